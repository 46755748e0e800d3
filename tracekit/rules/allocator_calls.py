"""Rules on the allocator's device calls: mallocs and frees in steady state, and allocation retries."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import polars as pl

from tracekit.analysis.checkpoint import save_stages
from tracekit.analysis.memory import steady_state
from tracekit.analysis.parallelism import workload
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.replay.allocator.facts import snapshot_facts
from tracekit.replay.graph.causes.host import ALLOCATOR
from tracekit.rules import quoted_step
from tracekit.rules.rule import Finding, Rule, Severity, WhatIf, distinct, largest_first

_EVIDENCE_ROWS = 40
_WARM_UP = " Nothing is freed in the only step or window, so this looks like warm-up."
_RETRIES = "Allocation retries (cudaMalloc failed, cache flushed)"
_RETRY_FIX = (
    "Lower the peak (smaller batch, activation checkpointing). If much of the reserved memory is unused, set "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
)
_DEVICE_CALLS_FIX = (
    "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, lower the peak (smaller batch, activation checkpointing), "
    "keep torch.cuda.empty_cache() out of the loop and PYTORCH_NO_CUDA_MEMORY_CACHING unset."
)


@dataclass(frozen=True)
class SteadyDeviceAllocation(Rule):
    """Device memory that is allocated and freed in steady state.

    What it does: reports cudaMalloc, cudaFree, hipMalloc and similar calls after warm-up, with the time they stall the
    device.

    Why it costs: a device malloc or free blocks the host and often all streams; when the queued work is done, the
    device is idle.

    How it is measured: the loss is the time in which no device works during such a call, and after it until the next
    work, as far as the call ran while the device was busy. Host time in the calls is reported separately. The first
    `warmup_steps` profiled steps fill the cache and are left out if there are more; without marked steps, the second
    half of the trace is judged. The message quotes the median step of the worst rank: a warning from
    `min_stall_ratio` of it, or, if the device hardly waits, information from `min_host_ratio` of it on the host.
    A window of one step, or without steps, that allocates and frees nothing looks like warm-up: it is information.

    How to fix: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, a smaller peak, no empty_cache in the loop.

    Blind spots: a call that overlaps with queued work but delays later launches is not counted. Other rules report why
    the allocator called the device: MEM007 (retries), MEM008 (fragmentation), MEM010 (changing sizes).
    """

    code: ClassVar[str] = "MEM001"
    facts: ClassVar[tuple[TraceFact, ...]] = (
        steady_state.device_calls, steady_state.stalls, workload.marks, *save_stages.FACTS,
    )  # fmt: skip
    min_stall_ratio: float = 0.01
    min_host_ratio: float = 0.05
    warmup_steps: int = 1

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield at most one finding: the median step of the rank that stalls most."""
        stalls = run.table(steady_state.stalls).filter(pl.col("duration_ns") > 0)
        steps = self._steady(save_stages.without_saves(run, stalls))
        stalled, blocked = pl.col("stalled_ns") / pl.col("duration_ns"), pl.col("host_ns") / pl.col("duration_ns")
        steps = steps.with_columns(stalled.alias("stall_ratio"), blocked.alias("host_ratio"))
        worst = quoted_step.worst(steps, "stall_ratio")
        if worst is None or (worst["stall_ratio"] < self.min_stall_ratio and worst["host_ratio"] < self.min_host_ratio):
            return
        with_calls = steps.filter(pl.col("calls") > 0)
        half = "the second half of " if worst["step"] is None else ""
        calls = _calls_of(run, worst)
        fills = self._only_fills(stalls, quoted_step.rows_of(run.table(steady_state.device_calls), worst))
        warns = worst["stall_ratio"] >= self.min_stall_ratio and not fills
        yield Finding(
            self.code,
            Severity.WARNING if warns else Severity.INFO,
            f"{worst['calls']:,} device malloc and free calls in {half}{quoted_step.describe(worst)} leave the "
            f"device idle for {quoted_step.describe_loss(worst, 'stalled_ns')} and take "
            f"{units.duration(worst['host_ns'])} on the host.{_WARM_UP if fills else ''}",
            _for(run, _DEVICE_CALLS_FIX),
            impact=worst["stall_ratio"],
            cost_ns=worst["stalled_ns"],
            # With one step, or none, warm-up cannot be separated from steady state.
            confidence=0.8 if steps["step"].n_unique() > 1 else 0.5,
            ranks=distinct(with_calls, "rank"),
            steps=distinct(with_calls, "step"),
            evidence=calls,
            what_if=WhatIf(ALLOCATOR) if warns else None,
            subject="device calls",
            is_of_window=worst["step"] is None,
        )

    def _only_fills(self, stalls: pl.DataFrame, calls: pl.DataFrame) -> bool:
        """Return whether the only step of a run, or its only window, allocates and frees nothing, as warm-up does."""
        return bool(stalls["step"].n_unique() == 1 and not calls["name"].str.contains("Free").any())

    def _steady(self, steps: pl.DataFrame) -> pl.DataFrame:
        """Return the steps without the first ones of each window, where there are more than those."""
        number = pl.col("step").rank("dense").over(quoted_step.DEVICE)
        enough = pl.col("step").n_unique().over(quoted_step.DEVICE) > self.warmup_steps
        return steps.filter(pl.col("step").is_null() | ~enough | (number > self.warmup_steps))


@dataclass(frozen=True)
class AllocatorRetry(Rule):
    """Allocation retries: cudaMalloc failed, the allocator flushed its cache and tried again.

    What it does: reports how many retries there were, in which steps, and how much longer those steps took.

    Why it costs: a retry waits for all streams, frees every cached block with cudaFree and fills the cache again: the
    whole device is idle. The next one may end the run with an out-of-memory error.

    How it is measured: steps in which the counter num_alloc_retries of the metrics log increased, after `warmup_steps`
    logged ones; their cost is the difference of their median duration to that of the others. Without a log, from the
    memory snapshots next to the traces: memory released during a request counts, from `min_retries` on; its time is
    unknown.

    How to fix: a lower peak (smaller batch, activation checkpointing), PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
    if much of the reserved memory is unused, or garbage_collection_threshold with a memory fraction, which releases
    memory earlier and in parts.

    Blind spots: nothing is seen without the metrics log of tracekit.capture and without a snapshot; MEM001 still
    reports the device calls of a retry. The first 128 MiB of snapshots are read.
    """

    code: ClassVar[str] = "MEM007"
    facts: ClassVar[tuple[TraceFact, ...]] = (steady_state.retries, workload.marks)
    warmup_steps: int = 1
    min_retries: int = 1

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield at most one finding: the rank with most retries."""
        table = run.table(steady_state.retries)
        yield from self._from_log(run) if table.height else self._from_snapshots(run)

    def _from_log(self, run: Run) -> Iterator[Finding]:
        table = run.table(steady_state.retries).filter(pl.col("window") == pl.col("window").min().over("rank"))
        rows = table.filter(pl.col("step").rank("ordinal").over("rank") > self.warmup_steps)
        retried = rows.filter(pl.col("retries") > 0)
        if retried.is_empty():
            return
        counts = retried.group_by("rank").agg(pl.col("retries").sum(), pl.len().alias("steps"))
        worst = largest_first(counts, "retries", "rank").row(0, named=True)
        rank_rows = rows.filter(pl.col("rank") == worst["rank"])
        slowdown_ns = max(0.0, _slowdown_ns(rank_rows))
        yield Finding(
            self.code,
            Severity.WARNING,
            f"{_RETRIES}: {worst['retries']} in {worst['steps']} of {rank_rows.height} steps on rank {worst['rank']}"
            + (f"; those steps take {units.duration(slowdown_ns)} longer than the others." if slowdown_ns else "."),
            _for(run, _RETRY_FIX),
            impact=min(1.0, slowdown_ns * worst["steps"] / rank_rows["step_time_ns"].sum()) if slowdown_ns else 0.0,
            cost_ns=int(slowdown_ns * (worst["steps"] / rank_rows.height)),
            confidence=0.9,
            ranks=distinct(counts, "rank"),
            steps=distinct(retried, "step"),
            evidence=rank_rows.sort(pl.col("retries") == 0, maintain_order=True).select(
                "window", "rank", "step", "retries", "step_time_ns"
            ),
        )

    def _from_snapshots(self, run: Run) -> Iterator[Finding]:
        retried = run.table(snapshot_facts.histories).filter(pl.col("retries") >= self.min_retries)
        if retried.is_empty():
            return
        worst = largest_first(retried, "retries", "rank").row(0, named=True)
        yield Finding(
            self.code,
            Severity.WARNING,
            f"{_RETRIES}: {worst['retries']} in the {worst['events']:,} events of the memory snapshot of rank "
            f"{worst['rank']}.",
            _for(run, _RETRY_FIX),
            confidence=0.8,
            ranks=distinct(retried, "rank"),
            evidence=retried,
        )


def _for(run: Run, fix: str) -> str:
    """Return a fix without what only training needs, where the run infers."""
    return fix.replace(", activation checkpointing", ", smaller cache") if workload.is_inference(run) else fix


def _calls_of(run: Run, worst: dict[str, Any]) -> pl.DataFrame:
    """Return the calls of the quoted step, the costliest first, then one row with their totals."""
    calls = run.table(steady_state.device_calls)
    end_ns = worst["start_ns"] + worst["duration_ns"]
    step_calls = quoted_step.rows_of(calls, worst).filter(
        pl.lit(worst["step"] is not None) | pl.col("start_ns").is_between(worst["start_ns"], end_ns)
    )
    totals = pl.DataFrame(
        [
            {name: worst[name] for name in ("window", "rank", "step", "host_ns", "stalled_ns")}
            | {"name": f"all {worst['calls']} calls", "step_ns": worst["duration_ns"]}
        ],
        schema_overrides={"step": pl.Int64},
    )
    step_calls = largest_first(step_calls, "stalled_ns", "start_ns").head(_EVIDENCE_ROWS)
    rows = pl.concat([step_calls.with_columns(pl.col("dur_ns").alias("host_ns")), totals], how="diagonal")
    return rows.select("window", "rank", "step", "name", "start_ns", "dur_ns", "host_ns", "stalled_ns", "step_ns")


def _slowdown_ns(steps: pl.DataFrame) -> float:
    """Excess of the median step with retries over the median step without, in ns; 0 if unknown."""
    with_retries = steps.filter(pl.col("retries") > 0)["step_time_ns"].median()
    without = steps.filter(pl.col("retries") == 0)["step_time_ns"].median()
    return float(str(with_retries)) - float(str(without)) if with_retries and without else 0.0
