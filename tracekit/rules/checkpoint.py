"""Judgements of checkpoint I/O."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import polars as pl

from tracekit import conventions, units
from tracekit.analysis import checkpoint
from tracekit.rule import Finding, Rule, Severity
from tracekit.trace import Fact, Run

_FIXES = {
    conventions.PLAN: "Cache plans: DefaultSavePlanner(enable_plan_caching=True).",
    conventions.STAGE: "Stage into pinned memory that is kept: async_save(async_stager=DefaultStager(...)).",
    conventions.SERIALIZE: "Save fewer, larger tensors and more threads: FileSystemWriter(thread_count=…).",
    conventions.WRITE: "Write in the background: dcp.async_save; spread the shards over more writers.",
    conventions.FSYNC: "Take fsync off the training thread: dcp.async_save.",
    conventions.FINISH: "Take the metadata off the training thread: dcp.async_save.",
    conventions.WAIT: "Even out the shards' bytes over ranks, and save in the background: dcp.async_save.",
}


@dataclass(frozen=True)
class BlockingCheckpoint(Rule):
    """Checkpoint saves that stop the training thread.

    What it does: reports how long saves block training, which stage dominates, and what share of the time between saves
    that is.

    Why it costs: every rank waits while a blocking save runs; above 5% of the time it is worth changing.

    How it is measured: from the checkpoint log: the blocking total of each save on its slowest rank, against the
    training time between saves by the metrics log.

    How to fix: save asynchronously with pinned staging; then mend the stage that dominates.

    Blind spots: needs the checkpoint log of tracekit.capture; with a single save the interval is taken as the steps
    that led to it.
    """

    code: ClassVar[str] = "CKPT001"
    facts: ClassVar[tuple[Fact, ...]] = (checkpoint.saves, checkpoint.step_times)
    max_overhead_ratio: float = 0.05

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding for all blocking saves of the run."""
        stages = (
            run.table(checkpoint.saves).filter(pl.col("blocking")).unique(["rank", "checkpoint", "stage"], keep="first")
        )
        totals = stages.filter(pl.col("stage") == conventions.TOTAL)
        critical = totals.sort("dur_ns", "rank", descending=[True, False]).unique(
            "checkpoint", keep="first", maintain_order=True
        )
        if critical.is_empty():
            return
        blocked = float(str(critical["dur_ns"].median()))
        interval = _interval_ns(run, critical)
        overhead = blocked / (interval + blocked) if interval else 0.0
        parts = stages.filter(pl.col("stage") != conventions.TOTAL).join(
            critical.select("rank", "checkpoint"), on=["rank", "checkpoint"], how="semi"
        )
        by_stage = parts.group_by("stage").agg(pl.col("dur_ns").sum()).sort("dur_ns", "stage", descending=[True, False])
        stage = by_stage["stage"].first() if len(by_stage) else None
        share = by_stage.select("dur_ns").row(0)[0] / critical["dur_ns"].sum() if stage else 0.0
        per_step = self._per_step(run, blocked, critical)
        yield Finding(
            self.code,
            Severity.WARNING if overhead > self.max_overhead_ratio else Severity.INFO,
            f"A checkpoint blocks training for {units.duration(blocked)} (median of {critical.height})"
            + (f", {units.share(overhead)} of the time" if interval else "")
            + (f"; the stage {stage!s} takes {units.share(share)} of it." if stage else "."),
            "Save in the background with dcp.async_save. " + _FIXES.get(str(stage), ""),
            impact=overhead,
            cost_ns=per_step,
            confidence=0.9 if interval else 0.6,
            ranks=tuple(critical["rank"].unique().sort().to_list()),
            steps=tuple(critical["step"].drop_nulls().unique().sort().to_list()),
            evidence=stages.sort("checkpoint", "rank", "start_ns").head(40),
        )

    def _per_step(self, run: Run, blocked: float, critical: pl.DataFrame) -> int:
        steps = run.table(checkpoint.step_times)["step"].n_unique()
        return int(blocked * critical.height / steps) if steps else 0


def _interval_ns(run: Run, critical: pl.DataFrame) -> float:
    """Return the training time between saves in ns: the median plain step times the steps per save; 0 if unknown."""
    times = run.table(checkpoint.step_times).group_by("step").agg(pl.col("step_time_ns").max())
    done = critical["step"].drop_nulls().sort()
    if times.is_empty() or done.is_empty():
        return 0.0
    plain = times.filter(~pl.col("step").is_in((done - 1).to_list()))
    gaps = done.diff().drop_nulls()
    steps = gaps.median() if len(gaps) else done.first()
    median = plain["step_time_ns"].median()
    return float(str(steps)) * float(str(median)) if median else 0.0
