"""Rules on memory in use: growth, headroom, unused reserved memory, and the owner of the peak."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import polars as pl

from tracekit.analysis.memory import allocations, usage
from tracekit.analysis.parallelism import workload
from tracekit.analysis.quality import trace_quality
from tracekit.analysis.time import breakdown
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.rules.rule import Finding, Rule, Severity, distinct, largest_first

_WHERE = ("window", "rank")
_CUT_FACTS: tuple[TraceFact, ...] = (trace_quality.cut_steps, breakdown.by_step)
# Ops with an alternative that needs less memory.
_ALTERNATIVES = (
    (("log_softmax", "cross_entropy", "nll_loss"), "compute the loss in chunks of tokens, or with a fused kernel"),
    (("softmax", "bmm", "masked_fill"), "use torch.nn.functional.scaled_dot_product_attention, which stores no scores"),
)
_SHOWN_BY = "tracekit memory SNAPSHOT shows which code allocated the growing memory."
_LEAKS = {
    False: "Store no tensors with an autograd graph across steps: use .item() or .detach().",
    True: "Bound what is stored across requests, such as caches and outputs, and run under torch.inference_mode().",
}


@dataclass(frozen=True)
class GrowingMemory(Rule):
    """A memory leak: allocated memory that grows from step to step.

    What it does: reports ranks whose allocated memory is higher after each step than after the one before.

    Why it costs: a run whose memory grows ends with an out-of-memory error, after hours.

    How it is measured: allocated memory at the end of each step, from the profiler's memory events or from the metrics
    log. The slope is the median over all pairs of steps; its 99% confidence interval must begin at `min_bytes` per step
    or more. The growth over the window must be `min_growth_ratio` times the interquartile range of the steps without
    it, since memory that is allocated for a while looks like growth in a short window. Host memory that a thread
    without a profiler frees, such as gloo's, is left out: such frees are not recorded.

    How to fix: store no tensors with an autograd graph across steps: losses and outputs in lists (use .item() or
    .detach()), retain_graph, hooks and caches that grow. torch.cuda.memory._record_memory_history and tracekit memory
    SNAPSHOT show which code allocated the growing memory.

    Blind spots: fewer than 5 steps are not judged. A leak slower than the window's noise is not seen: log every step
    with tracekit.capture. A cache that fills up and then stops is reported as a leak while it fills. On the host, a
    leak of blocks of the same size as those that gloo frees is not seen.
    """

    code: ClassVar[str] = "MEM003"
    facts: ClassVar[tuple[TraceFact, ...]] = (usage.growth, workload.marks)
    min_bytes: int = 1 << 16
    min_growth_ratio: float = 5.0

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield at most one finding: the fastest growth."""
        growth_bytes = pl.col("slope_bytes") * (pl.col("last_step") - pl.col("first_step"))
        grown = run.table(usage.growth).filter(
            pl.col("low_bytes") >= self.min_bytes, growth_bytes >= self.min_growth_ratio * pl.col("spread_bytes")
        )
        if grown.is_empty():
            return
        worst = largest_first(grown, "slope_bytes", *_WHERE).row(0, named=True)
        yield Finding(
            self.code,
            Severity.WARNING,
            f"Allocated memory of rank {worst['rank']} grows by {units.size(worst['slope_bytes'])} per step (99% "
            f"confidence interval {units.size(worst['low_bytes'])} to {units.size(worst['high_bytes'])}), from "
            f"{units.size(worst['first_bytes'])} after step {worst['first_step']} to "
            f"{units.size(worst['last_bytes'])} after step {worst['last_step']}.",
            f"{_LEAKS[workload.is_inference(run)]} {_SHOWN_BY}",
            cost_bytes=int(worst["slope_bytes"]),
            confidence=0.9 if worst["steps"] >= 2 * usage.LEAST_STEPS else 0.7,
            ranks=distinct(grown, "rank"),
            evidence=grown,
            claim=f"Allocated memory of rank {worst['rank']} grows in every step",
        )


@dataclass(frozen=True)
class LittleHeadroom(Rule):
    """A device whose memory is nearly all reserved.

    What it does: reports devices with less than `min_headroom_ratio` of their memory never reserved.

    Why it costs: the next longer batch, or another process's context, ends the run or forces an allocation retry, which
    stops all streams.

    How it is measured: the device's memory in the trace's header, less the peak of memory that the caching allocator
    reserved.

    How to fix: lower the peak (tracekit memory RUN shows its owners), or, if much of the reserved memory is unused, set
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.

    Blind spots: needs profile_memory. Memory of other processes, NCCL and the CUDA context is unknown and comes on top.
    A run that is meant to fill its device is reported too.
    """

    code: ClassVar[str] = "MEM004"
    facts: ClassVar[tuple[TraceFact, ...]] = (allocations.peaks,)
    min_headroom_ratio: float = 0.05

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield at most one finding: the device with the least headroom."""
        peaks = run.table(allocations.peaks).drop_nulls("headroom_bytes").filter(pl.col("memory_bytes") > 0)
        ratio = pl.col("headroom_bytes") / pl.col("memory_bytes")
        low = peaks.with_columns(headroom_ratio=ratio).filter(pl.col("headroom_ratio") < self.min_headroom_ratio)
        if low.is_empty():
            return
        worst = low.sort("headroom_ratio", *_WHERE).row(0, named=True)
        yield Finding(
            self.code,
            Severity.INFO,
            f"Only {units.size(max(worst['headroom_bytes'], 0))} ({units.share(max(worst['headroom_ratio'], 0))}) of "
            f"the {units.size(worst['memory_bytes'])} of device {worst['device']} were never reserved on rank "
            f"{worst['rank']}.",
            "Lower the peak (tracekit memory RUN shows its owners), or reduce fragmentation with "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
            confidence=0.9,
            ranks=distinct(low, "rank"),
            evidence=low,
            claim=f"Device {worst['device']} of rank {worst['rank']} has almost no memory left",
        )


@dataclass(frozen=True)
class IdleReserve(Rule):
    """Reserved memory that is unused even at the peak of allocated memory.

    What it does: reports devices on which at least `min_slack_ratio` of the reserved memory, and `min_slack_bytes`, is
    unused at the peak.

    Why it costs: cached memory serves only requests that fit one of its free blocks, on the stream it belongs to.
    Fragmented memory, and memory of another stream, is lost to the program and to all others on the device.

    How it is measured: reserved less allocated memory at the peak of allocated memory, from the profiler's memory
    events.

    How to fix: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; tracekit memory SNAPSHOT --replay predicts the
    reserved memory under that and other settings. Allocate memory on the stream that uses it, instead of record_stream.

    Blind spots: a peak before the window (a first step, an evaluation) may have needed the memory: then
    torch.cuda.empty_cache once after it is enough. Only a snapshot shows the pool and stream of unused memory. A
    recording that has only the optimizer of each step does not show their peak, and is not judged.
    """

    code: ClassVar[str] = "MEM005"
    facts: ClassVar[tuple[TraceFact, ...]] = (allocations.peaks, *_CUT_FACTS)
    min_slack_ratio: float = 0.25
    min_slack_bytes: int = 1 << 30

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield at most one finding: the device with the most unused memory."""
        peaks = _with_peak(run, run.table(allocations.peaks))
        with_slack = peaks.drop_nulls("slack_bytes").filter(pl.col("peak_reserved_bytes") > 0)
        unused = with_slack.with_columns(slack_ratio=pl.col("slack_bytes") / pl.col("peak_reserved_bytes")).filter(
            pl.col("slack_ratio") >= self.min_slack_ratio, pl.col("slack_bytes") >= self.min_slack_bytes
        )
        if unused.is_empty():
            return
        worst = largest_first(unused, "slack_bytes", *_WHERE).row(0, named=True)
        yield Finding(
            self.code,
            Severity.INFO,
            f"{units.size(worst['slack_bytes'])} of the {units.size(worst['peak_reserved_bytes'])} reserved on rank "
            f"{worst['rank']} ({units.share(worst['slack_ratio'])}) are unused even at the peak of allocated memory.",
            "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; tracekit memory SNAPSHOT --replay "
            "'expandable_segments:True' predicts the saving.",
            cost_bytes=worst["slack_bytes"],
            confidence=0.6,
            ranks=distinct(unused, "rank"),
            evidence=unused,
            claim=f"Rank {worst['rank']} reserves memory that it does not use even at its peak",
        )


@dataclass(frozen=True)
class PeakOwner(Rule):
    """One op that allocated much of the peak.

    What it does: reports the op that allocated at least `min_owned_ratio` of a device's memory in use at the peak, and
    `min_owned_bytes`.

    Why it costs: the peak determines batch size, recomputation and how many devices a model needs.

    How it is measured: blocks in use at the peak by the op that allocated them, in each phase; memory allocated before
    the window has no op and is not judged. With recorded Python stacks (with_stack=True), the message names the module
    and the code location with most of it.

    How to fix: an op that does not materialise the tensor, activation checkpointing around it, or a smaller chunk.

    Blind spots: if the window contains the allocation of weights and optimizer state (the first step), these come
    first. Host memory is not judged, nor are ranks with only the optimizer of each step.
    """

    code: ClassVar[str] = "MEM006"
    facts: ClassVar[tuple[TraceFact, ...]] = (allocations.at_peak, workload.marks, *_CUT_FACTS)
    min_owned_ratio: float = 0.3
    min_owned_bytes: int = 256 << 20

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield at most one finding: the largest owner."""
        blocks = _with_peak(run, run.table(allocations.at_peak)).drop_nulls(["device", "op"])
        key = [*_WHERE, "device", "op", "phase", "peak_bytes"]
        # Rows come largest first, so the first known module and stack allocated most.
        first = pl.col("module", "stack").drop_nulls().first()
        owned = blocks.group_by(key, maintain_order=True).agg(pl.col("count", "bytes").sum(), first)
        owned = owned.with_columns(owned_ratio=pl.col("bytes") / pl.col("peak_bytes")).filter(
            pl.col("owned_ratio") >= self.min_owned_ratio, pl.col("bytes") >= self.min_owned_bytes
        )
        if owned.is_empty():
            return
        owned = largest_first(owned, "bytes", *_WHERE, "op", "phase")
        worst = owned.row(0, named=True)
        phase = f" of {worst['phase']}" if worst["phase"] else ""
        places = [] if worst["module"] is None else [f"module {worst['module']}"]
        places += [] if worst["stack"] is None else [worst["stack"]]
        site = f", most of it for {', '.join(places)}" if places else ""
        alternative = next((fix for names, fix in _ALTERNATIVES if any(name in worst["op"] for name in names)), None)
        if workload.is_inference(run):  # nothing is stored for backward
            fix = alternative or "use a smaller batch or shorter chunks of the input"
            fix = f"{fix[0].upper()}{fix[1:]}."
        else:
            fix = f"Use activation checkpointing around this op, or {alternative or 'use a smaller micro-batch'}."
        yield Finding(
            self.code,
            Severity.INFO,
            f"{worst['op']}{phase} allocated {units.size(worst['bytes'])} "
            f"({units.share(worst['owned_ratio'])}) of the {units.size(worst['peak_bytes'])} peak of rank "
            f"{worst['rank']}, in {units.count(worst['count'], 'block')}{site}.",
            fix,
            cost_bytes=worst["bytes"],
            confidence=0.8,
            ranks=distinct(owned, "rank"),
            evidence=owned,
            claim=f"{worst['op']}{phase} owns a large part of the peak memory of rank {worst['rank']}",
        )


def _with_peak(run: Run, table: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of ranks whose recording has more than the optimizer: the peak of a step is before it."""
    is_optimizer = pl.col("part") == trace_quality.OPTIMIZER
    only = run.table(trace_quality.cut_steps).filter(is_optimizer).select(*_WHERE, "step")
    other_steps = run.table(breakdown.by_step).join(only, on=[*_WHERE, "step"], how="anti", nulls_equal=True)
    cut = only.join(other_steps, on=_WHERE, how="anti")
    return table.join(cut, on=_WHERE, how="anti", maintain_order="left")
