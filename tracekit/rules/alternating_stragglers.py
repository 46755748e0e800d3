"""The rule on ranks that straggle in turn."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import polars as pl

from tracekit.analysis.communication import communication_gap_causes
from tracekit.analysis.compute import compute_gap_causes
from tracekit.analysis.parallelism import stragglers
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.model.trace import Fact
from tracekit.rules.rule import Finding, Rule, Severity, distinct
from tracekit.rules.stragglers import Straggler

_EVIDENCE_ROWS = 40
_KEY = ("window", "step")


@dataclass(frozen=True)
class UnevenRanks(Rule):
    """Ranks that wait for each other, without a single straggler.

    What it does: reports runs in which ranks are idle in collectives for more than `min_wait_ratio` of the step on
    average because other ranks arrive late, and no single rank causes most of it.

    Why it costs: every collective waits for the rank that is slowest at that moment, and the slowest rank changes.

    How it is measured: as in RANK001, but for all late ranks together, averaged over the ranks; the message quotes the
    representative step. Not reported if more than half of the waiting in most steps is for the same rank: that is
    RANK001. In a run of one step RANK001 cannot judge, so this rule does. Steps that save are left out.

    How to fix: give ranks the same amount of work (pack sequences to one length, balance experts), and make hosts
    equally fast: single ranks are late at times because of gc, a data loader, or other jobs on the node. HOST001 and
    HOST003 name the ranks. Fewer collectives per step are less exposed to delays.

    Blind spots: needs traces of all ranks of a group and three shared collectives. Waits below the clock error are
    ignored. The reported time is the upper bound of the saving.
    """

    code: ClassVar[str] = "RANK003"
    facts: ClassVar[tuple[Fact, ...]] = Straggler.facts
    min_wait_ratio: float = 0.1

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding if the representative step exceeds the threshold and there is no single straggler."""
        pieces = run.run_table(compute_gap_causes.compute_gap_causes_across).filter(
            pl.col("cause") == communication_gap_causes.PEER
        )
        steps = stragglers.steps(run)
        means = _waits(steps, pieces)
        worst = means.sort("wait_ratio", "order").row((means.height - 1) // 2, named=True) if means.height else None
        if (
            worst is None
            or worst["wait_ratio"] <= self.min_wait_ratio
            or _is_one_straggler(run.run_table(stragglers.straggler_costs))
        ):
            return
        quoted = pieces.filter(pl.col("window") == worst["window"], pl.col("step") == worst["step"])
        late_ranks = _late_ranks(quoted)
        longest = quoted.group_by("rank").agg(pl.col("dur_ns").sum()).sort("dur_ns", "rank", descending=[True, False])
        yield Finding(
            self.code,
            Severity.WARNING,
            f"Ranks wait for each other: on average, a rank is idle {units.duration(worst['waited_ns'])} of "
            f"{units.duration(worst['duration_ns'])} ({units.share(worst['wait_ratio'])}) for late ranks in the "
            f"representative step ({worst['step']}), {_describe(late_ranks)}.",
            f"Check why {_suspects(late_ranks)} arrive late: uneven work (sequence lengths, experts), or temporary "
            "host delays (HOST001, HOST003, gc, other jobs on the node).",
            impact=min(1.0, worst["wait_ratio"]),
            cost_ns=worst["waited_ns"],
            confidence=0.7,
            ranks=distinct(longest, "rank"),
            steps=distinct(means.filter(pl.col("wait_ratio") > self.min_wait_ratio), "step"),
            evidence=quoted.sort("dur_ns", "start_ns", descending=[True, False])
            .head(_EVIDENCE_ROWS)
            .select(*_EVIDENCE),
        )


_MOST = 0.5
_MAX_NAMED = 3
_EVIDENCE = ("window", "rank", "step", "phase", "unit", "peer_rank", "collective_id", "start_ns", "dur_ns")


def _is_one_straggler(accounts: pl.DataFrame) -> bool:
    """Return whether most of the waiting is for the same rank in most steps, with at least two steps."""
    most = accounts.filter(pl.col("share") > _MOST).group_by("late_rank").len()
    steps = accounts["order"].n_unique()
    return steps > 1 and bool((most["len"] * 2 > steps).any())


def _waits(steps: pl.DataFrame, pieces: pl.DataFrame) -> pl.DataFrame:
    """Return the mean wait of the ranks in each step: columns of `stragglers.steps`, waited_ns, wait_ratio."""
    total = pieces.group_by(_KEY).agg(pl.col("dur_ns").sum())
    return (
        steps.join(total, on=_KEY, how="left", maintain_order="left")
        .with_columns((pl.col("dur_ns").fill_null(0) // pl.col("ranks")).cast(pl.Int64).alias("waited_ns"))
        .with_columns((pl.col("waited_ns") / pl.col("duration_ns")).alias("wait_ratio"))
    )


def _late_ranks(pieces: pl.DataFrame) -> list[tuple[int, float]]:
    """Return the ranks waited for most, with their share of the waiting, highest first."""
    total = int(pieces["dur_ns"].sum())
    by_peer = pieces.drop_nulls("peer_rank").group_by("peer_rank").agg(pl.col("dur_ns").sum())
    most = by_peer.sort("dur_ns", "peer_rank", descending=[True, False]).head(_MAX_NAMED)
    return [(rank, waited_ns / total) for rank, waited_ns in most.select("peer_rank", "dur_ns").iter_rows()]


def _describe(shares: list[tuple[int, float]]) -> str:
    if not shares:
        return "for which ranks is within clock error"
    return "most for " + ", ".join(f"rank {rank} ({units.share(share)})" for rank, share in shares)


def _suspects(shares: list[tuple[int, float]]) -> str:
    return "ranks " + ", ".join(str(rank) for rank, _ in shares) if len(shares) > 1 else "single ranks"
