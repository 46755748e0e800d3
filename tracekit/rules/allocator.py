"""Rules on the allocator: device calls in steady state, retries, fragmentation, memory of side streams."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import polars as pl

from tracekit.analysis.checkpoint import save_stages
from tracekit.analysis.memory import allocations, steady_state
from tracekit.analysis.parallelism import workload
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.replay.allocator import run_snapshots
from tracekit.replay.graph.causes.host import ALLOCATOR
from tracekit.rules import quoted_step
from tracekit.rules.quoted_step import DEVICE
from tracekit.rules.rule import Finding, Rule, Severity, WhatIf, distinct, largest_first

_EVIDENCE_ROWS = 40
_WARM_UP = " Nothing is freed in the only step or window, so this looks like warm-up."
_FULL = "Device memory of {} is full: allocations fail and are tried again"
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
    fix_without_pytorch: ClassVar[str] = (
        "Allocate before the loop and use the memory again, or allocate from a pool: cudaMallocAsync and "
        "cudaFreeAsync, with cudaMemPoolAttrReleaseThreshold above the peak; cudaMalloc and cudaFree may wait for "
        "all work on the device."
    )
    facts: ClassVar[tuple[TraceFact, ...]] = (
        steady_state.device_calls, steady_state.stalls, workload.marks, *save_stages.FACTS,
    )  # fmt: skip
    min_stall_ratio: float = 0.01
    min_host_ratio: float = 0.05
    warmup_steps: int = 1

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield at most one finding: the median step of the rank that stalls most."""
        stalls = run.table(steady_state.stalls).filter(pl.col("duration_ns") > 0)
        # Steps without the first ones of each window, where there are more than those.
        number = pl.col("step").rank("dense").over(quoted_step.DEVICE)
        enough = pl.col("step").n_unique().over(quoted_step.DEVICE) > self.warmup_steps
        steps = save_stages.without_saves(run, stalls).filter(
            pl.col("step").is_null() | ~enough | (number > self.warmup_steps)
        )
        stalled, blocked = pl.col("stalled_ns") / pl.col("duration_ns"), pl.col("host_ns") / pl.col("duration_ns")
        steps = steps.with_columns(stalled.alias("stall_ratio"), blocked.alias("host_ratio"))
        worst = quoted_step.worst(steps, "stall_ratio")
        if worst is None or (worst["stall_ratio"] < self.min_stall_ratio and worst["host_ratio"] < self.min_host_ratio):
            return
        with_calls = steps.filter(pl.col("calls") > 0)
        half = "the second half of " if worst["step"] is None else ""
        calls = _calls_of(run, worst)
        names = quoted_step.rows_of(run.table(steady_state.device_calls), worst)["name"]
        # The only step of a run, or its only window, allocates and frees nothing, as warm-up does.
        fills = stalls["step"].n_unique() == 1 and not names.str.contains("Free").any()
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
            claim=f"Device malloc and free calls block {units.numbers('rank', distinct(with_calls, 'rank'))}",
        )


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
        # Excess of the median step with retries over the median step without, in ns; 0 if unknown.
        with_retries = rank_rows.filter(pl.col("retries") > 0)["step_time_ns"].median()
        without = rank_rows.filter(pl.col("retries") == 0)["step_time_ns"].median()
        slowdown_ns = max(0.0, float(str(with_retries)) - float(str(without)) if with_retries and without else 0.0)
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
            claim=_FULL.format(units.numbers("rank", distinct(counts, "rank"))),
        )

    def _from_snapshots(self, run: Run) -> Iterator[Finding]:
        retried = run.table(run_snapshots.histories).filter(pl.col("retries") >= self.min_retries)
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
            claim=_FULL.format(units.numbers("rank", distinct(retried, "rank"))),
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


_SEGMENT_ROWS = 60
_MAY_BE_WARM_UP = " There is no later step to compare with, so this may be warm-up."


@dataclass(frozen=True)
class FragmentedMemory(Rule):
    """Fragmentation: the allocator reserves more memory although enough is reserved and free, in smaller pieces.

    What it does: reports devices on which reserved memory grows in steady state while at least the requested size is
    reserved and free; and, from a memory snapshot, pools whose free memory exceeds the largest request but whose
    largest free block does not.

    Why it costs: fragmented memory is lost to the program; reserved memory grows until a retry (MEM007) or an
    out-of-memory error, and each growth is a cudaMalloc that stalls.

    How it is measured: in traces, requests after the first `warmup_steps` profiled steps (if there are more) at which
    reserved memory grew although reserved less allocated memory was at least the request; reported if they add up to
    `min_grown_ratio` of reserved memory and to `min_bytes`. In a window of `warmup_steps` or without steps, growth is
    information: it may be the first step, which fills the cache. The stall is that of the device call before each. In
    snapshots, per pool of free blocks: free memory of at least `min_bytes` and `min_free_ratio` of the pool.

    How to fix: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True merges free memory; max_split_size_mb leaves large
    blocks unsplit. Allocate long-lived tensors (optimizer state, buffers) before temporary ones. tracekit memory
    SNAPSHOT --replay predicts the reserved memory under a setting.

    Blind spots: a trace does not show streams and pools: unused memory on another stream (MEM009) or in another pool
    counts as fragmentation. Fragmentation before the window that grows no further shows as unused reserved memory
    (MEM005), or in a snapshot. The first 128 MiB of snapshots are read.
    """

    code: ClassVar[str] = "MEM008"
    facts: ClassVar[tuple[TraceFact, ...]] = (steady_state.regrowth, allocations.peaks, allocations.churn)
    min_grown_ratio: float = 0.02
    min_free_ratio: float = 0.1
    min_bytes: int = 64 << 20
    warmup_steps: int = 1

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield at most one finding on growth in traces and one on snapshots."""
        yield from self._regrowth(run)
        yield from self._fragmented_pools(run)

    def _regrowth(self, run: Run) -> Iterator[Finding]:
        grown = run.table(steady_state.regrowth)
        if grown.is_empty():
            return
        by_rank = run.table(allocations.churn).group_by("window", "rank")
        rank_steps = by_rank.agg(first_step=pl.col("step").min(), steps=pl.col("step").n_unique())
        grown = grown.join(rank_steps, on=["window", "rank"], how="left")
        warm = pl.col("step") >= pl.col("first_step") + self.warmup_steps
        steady = grown.filter(pl.col("step").is_null() | (pl.col("steps") <= self.warmup_steps) | warm)
        reserved = run.table(allocations.peaks).select(*DEVICE, "peak_reserved_bytes")
        sums = steady.group_by(DEVICE).agg(
            requests=pl.len(), grown_bytes=pl.col("grown_bytes").sum(), stalled_ns=pl.col("stalled_ns").sum(),
            least_idle_bytes=pl.col("idle_bytes").min(), steps=pl.col("steps").first(),
        )  # fmt: skip
        sums = sums.join(reserved, on=DEVICE, nulls_equal=True)
        bad = sums.filter(
            pl.col("grown_bytes") >= self.min_bytes,
            pl.col("grown_bytes") >= self.min_grown_ratio * pl.col("peak_reserved_bytes"),
        )
        if bad.is_empty():
            return
        worst = largest_first(bad, "grown_bytes", "window", "rank").row(0, named=True)
        rank_rows = steady.filter(pl.all_horizontal(pl.col(name).eq_missing(pl.lit(worst[name])) for name in DEVICE))
        # A window with no later step than the first ones does not show whether memory grows in steady state.
        is_steady = (worst["steps"] or 0) > self.warmup_steps
        growths = rank_rows.drop("first_step", "steps").sort("grown_bytes", descending=True, maintain_order=True)
        yield Finding(
            self.code,
            Severity.WARNING if is_steady else Severity.INFO,
            f"Fragmentation on rank {worst['rank']}: {units.count(worst['requests'], 'request')} reserved another "
            f"{units.size(worst['grown_bytes'])} although at least as much was reserved and free. The peak is "
            f"{units.size(worst['peak_reserved_bytes'])} reserved"
            + (
                f", and the device is idle for {units.duration(worst['stalled_ns'])}."
                if worst["stalled_ns"] > 0
                else "."
            )
            + ("" if is_steady else _MAY_BE_WARM_UP),
            "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or max_split_size_mb to leave large blocks unsplit. "
            "Allocate long-lived tensors before temporary ones.",
            cost_ns=worst["stalled_ns"] // max(worst["steps"] or 1, 1),
            cost_bytes=worst["grown_bytes"],
            confidence=0.7 if is_steady else 0.4,
            ranks=distinct(bad, "rank"),
            steps=distinct(rank_rows, "step"),
            evidence=growths.head(_SEGMENT_ROWS),
            subject="growth",
            claim=f"Fragmented memory makes rank {worst['rank']} reserve more than it needs",
        )

    def _fragmented_pools(self, run: Run) -> Iterator[Finding]:
        pools = run.table(run_snapshots.pools)
        cut = pools.filter(
            pl.col("free_bytes") >= self.min_bytes,
            pl.col("free_bytes") >= self.min_free_ratio * pl.col("total_bytes"),
            pl.col("largest_request_bytes") <= pl.col("free_bytes"),
            pl.col("largest_request_bytes") > pl.col("largest_free_bytes"),
        )
        if cut.is_empty():
            return
        worst = largest_first(cut, "free_bytes", "window", "rank").row(0, named=True)
        yield Finding(
            self.code,
            Severity.INFO,
            f"Fragmentation in the memory snapshot of rank {worst['rank']}: {units.size(worst['free_bytes'])} of the "
            f"{units.size(worst['total_bytes'])} of one pool are free, but the largest free block has "
            f"{units.size(worst['largest_free_bytes'])} and the largest request needs "
            f"{units.size(worst['largest_request_bytes'])}.",
            "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; tracekit memory SNAPSHOT --replay "
            "'expandable_segments:True' predicts the saving.",
            cost_bytes=worst["free_bytes"],
            confidence=0.7,
            ranks=distinct(cut, "rank"),
            evidence=cut,
            subject="snapshot",
            claim=f"Free memory of rank {worst['rank']} is fragmented",
        )


@dataclass(frozen=True)
class CrossStreamSlack(Rule):
    """Free memory that only another stream can use.

    What it does: reports devices on which free memory in pools of side streams, and memory whose free waits for another
    stream, add up to `min_idle_ratio` of reserved memory and to `min_idle_bytes`.

    Why it costs: each stream has its own cache: memory freed on a side stream serves no request of the main one. Memory
    marked with record_stream is not free until the other stream is done.

    How it is measured: from the memory snapshots next to the traces, at the moment of the snapshot; the main stream is
    the one with most memory.

    How to fix: allocate memory on the stream that uses most of it, and synchronize with events instead of
    Tensor.record_stream; reuse the buffers of side streams (all-gathers, copies), as YaFSDP does, or limit how many are
    in flight (limit_all_gathers, set_reduce_scatter_max_input_buffers).

    Blind spots: traces do not contain the streams of allocations, so a snapshot is needed. A snapshot taken between
    steps shows the memory that waits there, not within the step. The first 128 MiB of snapshots are read.
    """

    code: ClassVar[str] = "MEM009"
    facts: ClassVar[tuple[TraceFact, ...]] = (allocations.peaks,)
    min_idle_ratio: float = 0.05
    min_idle_bytes: int = 256 << 20

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield at most one finding: the device with the most such memory."""
        pools = run.table(run_snapshots.pools)
        of_stream = pools.group_by(*DEVICE, "stream").agg(pl.col("total_bytes", "free_bytes", "waiting_bytes").sum())
        main = pl.col("total_bytes") == pl.col("total_bytes").max().over(DEVICE)
        sides = of_stream.with_columns(side_bytes=pl.when(main).then(0).otherwise("free_bytes"))
        sums = sides.group_by(DEVICE).agg(pl.col("side_bytes", "waiting_bytes", "total_bytes").sum(), streams=pl.len())
        idle = sums.with_columns(idle_bytes=pl.col("side_bytes") + pl.col("waiting_bytes")).filter(
            pl.col("idle_bytes") >= self.min_idle_bytes,
            pl.col("idle_bytes") >= self.min_idle_ratio * pl.col("total_bytes"),
        )
        if idle.is_empty():
            return
        worst = largest_first(idle, "idle_bytes", "window", "rank").row(0, named=True)
        yield Finding(
            self.code,
            Severity.INFO,
            f"In the memory snapshot of rank {worst['rank']}, {units.size(worst['side_bytes'])} are free in the pools "
            f"of side streams and {units.size(worst['waiting_bytes'])} wait for another stream, of "
            f"{units.size(worst['total_bytes'])} reserved on {worst['streams']} streams.",
            "Allocate memory on the stream that uses it, synchronize with events instead of Tensor.record_stream, and "
            "reuse the buffers of side streams.",
            cost_bytes=worst["idle_bytes"],
            confidence=0.8,
            ranks=distinct(idle, "rank"),
            evidence=of_stream.sort(*DEVICE, "stream"),
            claim=f"Pools of side streams hold free memory on rank {worst['rank']}",
        )
