"""Stragglers beside those that the others wait for most: what a run waits for once these are no longer late."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import polars as pl

from tracekit.analysis.parallelism import late_ranks
from tracekit.model.memoize import memoize
from tracekit.model.run import Run

_MIN_EXPLAINED = 0.5
"""Share of what the others lose that the rank's own work must take longer: a rank that another one delays, or that is
the latest of equals by chance, has no more work than they."""
_MOST_STRAGGLERS = 4
"""Stragglers after which no more are searched: of more, the finding would be that ranks differ (RANK003)."""
_MOST_RANKS = 128
"""Ranks up to which waits are measured again without some of them; replays compare as many (`representative_ranks`)."""
_STEP = ("window", "step")


def further_stragglers(
    run: Run,
    stragglers: Iterable[dict[str, Any]],
    candidates: Callable[[Run], Iterable[dict[str, Any]]],
    *,
    min_excess_ratio: float,
) -> Iterator[dict[str, Any]]:
    """Yield the stragglers among the other ranks, the costliest first, each without those before it.

    Whoever arrives last hides how late the others are. `candidates` returns the late ranks of a run as
    `Straggler.persistent` does; those count whose own work takes longer than that of other ranks, by
    `min_excess_ratio` of the step and half of what the others lose. Adds `stragglers_before`.
    """
    before = tuple(sorted({rank for straggler in stragglers for rank in straggler["group"]}))
    for _ in range(_MOST_STRAGGLERS):
        rest = without_ranks(run, before)
        if len(run.ranks) > _MOST_RANKS or len(rest.ranks) < 2:
            return
        late = [
            candidate | {"stragglers_before": before}
            for candidate in candidates(rest)
            if _is_explained(run, candidate, before, min_excess_ratio)
        ]
        if not late:
            return
        costliest = max(late, key=lambda candidate: int(candidate["lost_ns"]))
        yield costliest
        before = tuple(sorted({*before, *costliest["late_ranks"]}))


def without_ranks(run: Run, ranks: tuple[int, ...]) -> Run:
    """The run without some ranks."""
    return _others(run, ranks) if ranks else run  # a cached result that is the run itself would keep it forever


@memoize
def _others(run: Run, ranks: tuple[int, ...]) -> Run:
    return run.of_ranks([rank for rank in run.ranks if rank not in ranks])


def _is_explained(run: Run, candidate: dict[str, Any], before: tuple[int, ...], min_excess_ratio: float) -> bool:
    """Whether the work of a late rank takes so much longer than that of ranks which are not late."""
    late: pl.DataFrame = candidate["late"]
    others_in_group = tuple(rank for rank in candidate["group"] if rank not in candidate["late_ranks"])
    excess = late_ranks.excess_time(
        run, late_ranks.of_steps(candidate["late_ranks"], late.select(_STEP)), left_out=(*before, *others_in_group)
    )
    least_ns = max(_MIN_EXPLAINED * candidate["lost_ns"], min_excess_ratio * candidate["duration_ns"])
    return excess is not None and excess.total_ns >= least_ns
