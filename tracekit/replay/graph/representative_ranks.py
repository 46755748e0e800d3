"""Representative ranks: replays of a run with many ranks read only their traces, as if no others were recorded.

The replay graph of 1,000 ranks takes gigabytes, and most of them do the same. The ranks that findings name are chosen,
those that the others wait for, and others at equal distances: 64 or more, fewer where each has recorded much work. A
rank comes with the ranks that it exchanges activations with, so pipelines and tensor-parallel groups are whole; of
data-parallel groups a part is enough. A collective of which some members are not chosen keeps its recorded duration
after the last of those that are.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import polars as pl

from tracekit.analysis.parallelism import late_ranks, rank_places
from tracekit.conventions import strategies
from tracekit.model.fact import trace_fact
from tracekit.model.memoize import memoize
from tracekit.model.run import Run
from tracekit.model.trace import Trace, TraceFact

T = TypeVar("T")
MAX_RANKS = 128
"""Runs of up to so many ranks are replayed with all of them."""
_LEAST_RANKS = 64
_FEWEST_RANKS = 16
_MOST_ACTIVITIES = 90_000
"""In the replayed ranks, beyond the fewest: a replay takes about 1.1 KB for each, 100 MB in all."""
_PER_FINDING = 8
_DATA_PARALLEL = (strategies.DP_REPLICATE, strategies.DP_SHARD)


@trace_fact
def activity_counts(trace: Trace) -> pl.DataFrame:
    """Count of a trace's activities. Column activities; one row."""
    return pl.DataFrame({"activities": [trace.activities.height]})


FACTS: tuple[TraceFact, ...] = (activity_counts,)
"""What `run_of` reads of each trace, in addition to facts of rules."""


def are_needed(run: Run) -> bool:
    """Return whether a run has too many ranks to replay all of them."""
    return len(run.ranks) > MAX_RANKS


def run_of(run: Run, finding_ranks: tuple[tuple[int, ...], ...] = ()) -> Run:
    """Return the run of the representative ranks; the run itself if it has few ranks.

    `finding_ranks` are the ranks of findings: up to eight of each are chosen, first of those that name the fewest, as
    far as there is room. Any rank will do for a finding on most of them.
    """
    return _representative(run, finding_ranks) if are_needed(run) else run


@memoize
def _representative(run: Run, finding_ranks: tuple[tuple[int, ...], ...]) -> Run:
    run.measure((*late_ranks.FACTS, *FACTS))  # in one pass, if nothing of it is measured yet
    # Not the run itself, which the cache would then keep in memory for ever.
    specific = [ranks for ranks in (late_ranks.latest(run), *finding_ranks) if len(ranks) <= len(run.ranks) // 2]
    preferred = (rank for ranks in sorted(specific, key=len) for rank in _spread(ranks, _PER_FINDING))
    per_rank = int(run.table(activity_counts)["activities"].sum()) / max(len(run.ranks), 1)
    target = min(_LEAST_RANKS, max(_FEWEST_RANKS, int(_MOST_ACTIVITIES / max(per_rank, 1))))
    # The ranks in parts of at most MAX_RANKS that exchange activations: model replicas, or pipelines of one.
    units: dict[int, tuple[int, ...]] = {rank: (rank,) for rank in run.ranks}
    for group in _dependent_groups(run):
        present = [rank for rank in group if rank in units]
        joined = tuple(sorted({other for rank in present for other in units[rank]}))
        if len(joined) <= MAX_RANKS:
            units |= dict.fromkeys(joined, joined)
    return run.of_ranks(_choose_ranks(sorted(set(units.values())), preferred, target))


def _choose_ranks(units: Sequence[tuple[int, ...]], preferred: Iterable[int], target: int) -> list[int]:
    """Return ranks in whole units: those of the `preferred` ranks, then some at equal distances.

    They are at most 2 * `target` ranks, or one unit.
    """
    unit_of = {rank: unit for unit in units for rank in unit}
    largest = max(map(len, units))
    limit = max(min(MAX_RANKS, 2 * target), largest)
    ranks: set[int] = set()
    for rank in preferred:
        if len(ranks.union(unit_of.get(rank, ()))) <= limit:
            ranks.update(unit_of.get(rank, ()))
    for unit in _spread(units, max(1, target // largest)):
        if len(ranks) < target and len(ranks.union(unit)) <= limit:
            ranks.update(unit)
    return sorted(ranks)


def _dependent_groups(run: Run) -> Iterator[tuple[int, ...]]:
    """Yield the groups of ranks that exchange activations: pipelines first, then others, the smallest first.

    Groups whose axis is not known are among them unless they are larger than half of what is replayed: those are of
    data parallelism.
    """
    by_axis = rank_places.axis_groups(run)
    axis_sets = {frozenset(ranks) for _, ranks in by_axis}
    dependent = [(axis != strategies.PP, len(ranks), ranks) for axis, ranks in by_axis if axis not in _DATA_PARALLEL]
    unnamed = map(tuple, rank_places.process_groups(run)["ranks"].unique().to_list())
    small = [ranks for ranks in unnamed if frozenset(ranks) not in axis_sets and len(ranks) <= _LEAST_RANKS // 2]
    dependent += [(True, len(ranks), ranks) for ranks in small]
    for *_, ranks in sorted(dependent):
        yield ranks


def _spread(values: Sequence[T], count: int) -> list[T]:
    """Return at most `count` of some values at equal distances, the first and the last among them."""
    if len(values) <= count:
        return list(values)
    if count == 1:
        return [values[0]]
    return [values[round(index * (len(values) - 1) / (count - 1))] for index in range(count)]
