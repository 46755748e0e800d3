"""Judgements of ranks against each other."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import polars as pl

from tracekit import match, units
from tracekit.analysis import breakdown, causes, checkpoint, instances, waiting
from tracekit.rule import Finding, Rule, Severity
from tracekit.trace import Fact, Run

_EVIDENCE_ROWS = 40
_KEY = ("window", "step")


@dataclass(frozen=True)
class Straggler(Rule):
    """A rank that comes late to collectives again and again, while the others stand idle.

    What it does: reports a rank for which the others wait, without computing, for more than `min_wait_ratio` of the
    step, in at least `min_steps_ratio` of the steps from the first in which they do, and in more than one.

    Why it costs: a collective begins to move data when the last rank has come, so one slow rank slows all.

    How it is measured: collectives are found again on all ranks and clocks aligned by their ends. The part of a gap in
    compute in which a rank waits in a collective for the last to come is put to that rank's account; in each step the
    median over the other ranks counts. Of all waiting in collectives, hidden or not, more than half must be for it.
    Differences below the residual of the clocks are not told. Steps that save are left out.

    How to fix: look at what the late rank does before it comes: a slower or hotter device (clocks, nvidia-smi -q -d
    PERFORMANCE), more work (uneven batches or experts), a busy host (HOST001, HOST003), a neighbour on its node. Swap
    the node to tell hardware from data.

    Blind spots: needs the traces of all ranks of a group and three collectives that they share. Delays that move from
    rank to rank, as of uneven data, are no one's. A rank that is late because another collective held it up is blamed.
    """

    code: ClassVar[str] = "RANK001"
    facts: ClassVar[tuple[Fact, ...]] = (
        waiting.compute_gap_causes,
        match.calls,
        breakdown.by_step,
        checkpoint.save_spans,
    )
    min_wait_ratio: float = 0.05
    min_steps_ratio: float = 0.75

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding per straggling rank."""
        pieces = run.across(waiting.compute_gap_causes_across).filter(pl.col("cause") == causes.PEER)
        accounts = _accounts(run, pieces)
        for (rank,), mine in accounts.group_by("peer_rank", maintain_order=True):
            worst = self._persists(mine)
            if worst is not None:
                yield self._finding(int(str(rank)), worst, mine, pieces)

    def _persists(self, mine: pl.DataFrame) -> dict[str, Any] | None:
        """Return the typical step of a rank that is late in most steps since it first was; None for one that is not."""
        late = mine.filter((pl.col("wait_ratio") >= self.min_wait_ratio) & (pl.col("share") > _MOST))
        if late.height < 2:
            return None
        first = late.sort("order").row(0, named=True)["order"]
        since = mine.filter(pl.col("order") >= first)
        if late.height < self.min_steps_ratio * since.height or since.height * 3 < mine.height:
            return None
        ordered = since.sort("wait_ratio", "order")
        return ordered.row((ordered.height - 1) // 2, named=True) | {"late": late.height, "since": since.height}

    def _finding(self, rank: int, worst: dict[str, Any], mine: pl.DataFrame, pieces: pl.DataFrame) -> Finding:
        late = mine.filter(pl.col("wait_ratio") >= self.min_wait_ratio)
        blamed = pieces.filter(pl.col("peer_rank") == rank)
        quoted = blamed.filter(pl.col("window") == worst["window"], pl.col("step") == worst["step"])
        others = blamed.join(quoted, on=["window", "rank", "start_ns"], how="anti")
        shown = [each.sort("dur_ns", "start_ns", descending=[True, False]) for each in (quoted, others)]
        first = mine.filter(pl.col("order") == late["order"].min()).row(0, named=True)
        return Finding(
            self.code,
            Severity.WARNING,
            f"Rank {rank} comes late: the other ranks stand idle for it for {units.duration(worst['waited_ns'])} of "
            f"{units.duration(worst['duration_ns'])} ({units.share(worst['wait_ratio'])}) in the typical step "
            f"({worst['step']}), in {worst['late']} of {worst['since']} steps since step {first['step']}.",
            f"See what rank {rank} does before it comes: device clocks and temperature, uneven work, a busy host "
            "(HOST001, HOST003), neighbours on its node; swap the node to tell hardware from data.",
            impact=min(1.0, worst["wait_ratio"]),
            cost_ns=worst["waited_ns"],
            confidence=0.8,
            ranks=(rank,),
            steps=tuple(late["step"].unique().sort().to_list()),
            evidence=pl.concat([shown[0].head(_EVIDENCE_ROWS), shown[1].head(_EVIDENCE_ROWS)]).select(
                "window", "rank", "step", "phase", "unit", "peer_rank", "collective_id", "start_ns", "dur_ns"
            ),
            subject=f"rank {rank}",
        )


_MOST = 0.5


def _accounts(run: Run, pieces: pl.DataFrame) -> pl.DataFrame:
    """Return for each step and rank that others waited for how long their median did: waited_ns, wait_ratio, share.

    share is the rank's of all waiting for known ranks in the step, hidden or not; order numbers the steps.
    """
    saving = run.table(checkpoint.save_spans).drop_nulls("step").select(_KEY).unique()
    steps = run.table(breakdown.by_step).filter(pl.col("duration_ns") > 0).drop_nulls("step")
    steps = steps.group_by(_KEY).agg(pl.col("duration_ns").median().cast(pl.Int64), pl.col("rank").n_unique())
    steps = steps.join(saving, on=_KEY, how="anti").sort(_KEY).with_columns(pl.int_range(pl.len()).alias("order"))
    per_rank = pieces.drop_nulls("peer_rank").group_by(*_KEY, "peer_rank", "rank").agg(pl.col("dur_ns").sum())
    known = per_rank.select(pl.col("peer_rank").unique())
    waits = (
        per_rank.group_by(*_KEY, "peer_rank")
        .agg(pl.col("dur_ns").sort(descending=True).alias("each"))
        # The median over all other ranks: those without a row waited 0.
        .join(steps.select(*_KEY, pl.col("rank").alias("ranks")), on=_KEY)
        .with_columns(pl.col("each").list.get((pl.col("ranks").cast(pl.Int64) - 1) // 2, null_on_oob=True))
        .select(*_KEY, "peer_rank", pl.col("each").fill_null(0).alias("waited_ns"))
    )
    keys = [*_KEY, "peer_rank"]
    every = steps.join(known, how="cross").join(waits, on=keys, how="left").join(_in_all(run), on=keys, how="left")
    waited = pl.col("waited_ns").fill_null(0)
    return (
        every.with_columns(waited.alias("waited_ns"))
        .with_columns(
            (waited / pl.col("duration_ns")).alias("wait_ratio"),
            pl.col("share").fill_null(0.0),
        )
        .sort("peer_rank", "order")
    )


def _in_all(run: Run) -> pl.DataFrame:
    """Return for each step and rank its share of all waiting in collectives for ranks that are known."""
    last = run.across(instances.instances).select("window", "instance", pl.col("last_rank").alias("peer_rank"))
    waits = run.across(instances.waits).join(last.drop_nulls(), on=["window", "instance"])
    every = waits.group_by(*_KEY, "peer_rank").agg(pl.col("wait_ns").sum())
    share = pl.col("wait_ns") / pl.col("wait_ns").sum().over(_KEY)
    return every.select(*_KEY, "peer_rank", share.fill_nan(0.0).alias("share"))
