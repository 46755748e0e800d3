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
    conventions.SERIALIZE: "Save fewer, larger tensors, with more threads: FileSystemWriter(thread_count=…).",
    conventions.WRITE: "Spread the bytes over more writers: FileSystemWriter(thread_count=…), even shards.",
    conventions.FSYNC: "",
    conventions.FINISH: "",
}

_EVIDENCE_ROWS = 40


@dataclass(frozen=True)
class BlockingCheckpoint(Rule):
    """Checkpoint saves that stop the training thread.

    What it does: reports how long saves block training, what share of the time between saves that is, which rank the
    others wait for, and which stage of its save takes longest.

    Why it costs: every rank waits while a blocking save runs; above 5% of the time it is worth changing.

    How it is measured: from the checkpoint log: the blocking total of each save on the rank it blocks longest, against
    the training time between saves by the metrics log. The rank that holds the others up is the one that works longest:
    its total less its own waiting. Without a log, saves seen in the trace by the names of spans and Python frames are
    reported as information.

    How to fix: save asynchronously with pinned staging; then mend the stage that takes longest.

    Blind spots: stages need the checkpoint log of tracekit.capture. With a single save the interval is taken as the
    steps that led to it. Without a log, saves outside the profiled window, or without a span, are not seen.
    """

    code: ClassVar[str] = "CKPT001"
    facts: ClassVar[tuple[Fact, ...]] = (checkpoint.saves, checkpoint.step_times, checkpoint.save_spans)
    max_overhead_ratio: float = 0.05

    def blind_spot(self, run: Run) -> str | None:
        """Return what is not known of the saves of a run without a checkpoint log."""
        if run.manifest or run.table(checkpoint.saves).height or run.table(checkpoint.save_spans).height:
            return None
        return (
            "there is no checkpoint log and no save in the traced steps; saves at other times are not known. "
            "tracekit.capture records them all."
        )

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding for all blocking saves of the run."""
        stages = _blocking(run)
        if stages.is_empty():
            if run.table(checkpoint.saves).is_empty():
                yield from self._seen_in_trace(run.table(checkpoint.save_spans))
            return
        critical = _critical(stages)
        blocked = float(str(critical["blocked_ns"].median()))
        interval = _interval_ns(run, critical)
        overhead = blocked / (interval + blocked) if interval else 0.0
        stage, told = _longest_stage(stages, critical)
        steps = run.table(checkpoint.step_times)["step"].n_unique()
        yield Finding(
            self.code,
            Severity.WARNING if overhead > self.max_overhead_ratio else Severity.INFO,
            f"A checkpoint blocks training for {units.duration(blocked)} (median of {critical.height})"
            + (f", {units.share(overhead)} of the time" if interval else "")
            + told,
            f"Save in the background with dcp.async_save. {_FIXES.get(stage, '')}".strip(),
            impact=overhead,
            cost_ns=int(blocked * critical.height / steps) if steps else 0,
            confidence=0.9 if interval else 0.6,
            ranks=tuple(stages["rank"].unique().sort().to_list()),
            steps=tuple(critical["step"].drop_nulls().unique().sort().to_list()),
            evidence=_evidence(stages, critical),
        )

    def _seen_in_trace(self, spans: pl.DataFrame) -> Iterator[Finding]:
        if spans.is_empty():
            return
        longest = spans.sort("dur_ns", "rank", descending=[True, False]).row(0, named=True)
        yield Finding(
            self.code,
            Severity.INFO,
            f"A save takes {units.duration(longest['dur_ns'])} on rank {longest['rank']} ({longest['name']}); how "
            "often there is one, and what its stages take, is not in the trace.",
            "Record the stages with tracekit.capture (Recorder.checkpoint); save in the background with "
            "dcp.async_save.",
            confidence=0.5,
            ranks=tuple(spans["rank"].unique().sort().to_list()),
            steps=tuple(spans["step"].drop_nulls().unique().sort().to_list()),
            evidence=spans.sort("dur_ns", descending=True).head(_EVIDENCE_ROWS),
            subject="seen in the trace",
        )


def _blocking(run: Run) -> pl.DataFrame:
    """Return the stages of blocking saves, each rank's once: its log is the same for every window."""
    stages = run.table(checkpoint.saves).filter(pl.col("blocking"))
    return stages.unique(["rank", "checkpoint", "stage"], keep="first", maintain_order=True)


def _critical(stages: pl.DataFrame) -> pl.DataFrame:
    """Return per save how long it blocked training and which rank the others waited for.

    Columns checkpoint, step, blocked_ns (the longest of all ranks), rank (that worked longest), work_ns (of that rank),
    waited_ns (the longest that another rank waited); in the order of the saves.
    """
    total_ns = pl.when(pl.col("stage") == conventions.TOTAL).then("dur_ns").sum()
    wait_ns = pl.when(pl.col("stage") == conventions.WAIT).then("dur_ns").sum()
    by_rank = (
        stages.group_by("checkpoint", "rank")
        .agg(pl.col("step").first(), pl.col("start_ns").min(), total_ns.alias("total_ns"), wait_ns.alias("wait_ns"))
        .filter(pl.col("total_ns") > 0)
        .with_columns((pl.col("total_ns") - pl.col("wait_ns")).alias("work_ns"))
        .sort("work_ns", "rank", descending=[True, False])
    )
    return (
        by_rank.group_by("checkpoint")
        .agg(
            pl.col("step", "rank", "work_ns").first(),
            pl.col("start_ns").min(),
            pl.col("total_ns").max().alias("blocked_ns"),
            pl.col("wait_ns").slice(1).max().fill_null(0).alias("waited_ns"),
        )
        .sort("start_ns", "checkpoint")
    )


def _longest_stage(stages: pl.DataFrame, critical: pl.DataFrame) -> tuple[str, str]:
    """Return the stage that takes longest where the others wait for it ('' where none is known), and a clause on it."""
    parts = stages.filter(~pl.col("stage").is_in([conventions.TOTAL, conventions.WAIT])).join(
        critical.select("rank", "checkpoint"), on=["rank", "checkpoint"], how="semi"
    )
    if parts.is_empty():
        return "", "."
    by_stage = parts.group_by("stage").agg(pl.col("dur_ns").sum()).sort("dur_ns", "stage", descending=[True, False])
    stage, dur_ns = by_stage.row(0)
    share = units.share(dur_ns / critical["blocked_ns"].sum())
    if stages["rank"].n_unique() == 1:
        return str(stage), f"; the stage {stage} takes {share} of it."
    several = critical["rank"].n_unique() > 1
    ranks = f"rank{'s' * several} {units.ranges(critical['rank'].to_list())}"
    waited = units.duration(critical["waited_ns"].median())  # type: ignore[arg-type]
    return str(stage), (
        f"; where it takes longest ({ranks}), the stage {stage} takes {share} of it, and others wait {waited}."
    )


def _evidence(stages: pl.DataFrame, critical: pl.DataFrame) -> pl.DataFrame:
    """Return the stages, the save that blocked longest first, and in it the rank that the others waited for."""
    known = critical.select("checkpoint", "blocked_ns", pl.col("rank").alias("critical"))
    ordered = stages.join(known, on="checkpoint").with_columns(pl.col("rank").ne(pl.col("critical")).alias("other"))
    ordered = ordered.sort(
        "blocked_ns", "other", "rank", "dur_ns", "stage", descending=[True, False, False, True, False]
    )
    return ordered.select(stages.columns).head(_EVIDENCE_ROWS)


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
