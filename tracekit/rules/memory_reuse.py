"""Rules on memory that could be reused or kept: changing sizes, FSDP buffers, activations that are recomputed."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import polars as pl

from tracekit.analysis.checkpoint import save_stages
from tracekit.analysis.memory import allocations, steady_state
from tracekit.analysis.time import backward_passes, breakdown
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.replay.allocator import double_buffering
from tracekit.replay.graph.causes.device_time import RECOMPUTATION
from tracekit.rules import quoted_step
from tracekit.rules.rule import Finding, Rule, Severity, WhatIf, distinct, largest_first

_FIX = "Pad or bucket inputs to a few lengths, or reuse a buffer of the largest size."
_FIX_ON_DEVICE = "PYTORCH_CUDA_ALLOC_CONF=roundup_power2_divisions:8 rounds similar sizes to one."
_EVIDENCE_ROWS = 80


@dataclass(frozen=True)
class ChangingSizes(Rule):
    """Allocation churn: memory allocated in sizes that no earlier step allocated.

    What it does: reports ranks whose steps allocate blocks of 1 MiB and more in ever new sizes.

    Why it costs: a cached block serves requests of its own size; a new size splits a larger block or needs a device
    malloc. The cache fills with pieces that fit nothing: device mallocs in steady state (MEM001), fragmentation
    (MEM008), retries (MEM007).

    How it is measured: blocks of sizes that no earlier step of the window allocated (on a device: within 1 MiB, by
    which a block may exceed its request), as a share of the step's peak; reported from `min_new_size_ratio` on, for the
    median step of the worst rank. The first `warmup_steps` profiled steps are left out. The message also states
    all bytes allocated in the step: eager training allocates a multiple of its peak in every step, which the cache
    serves as long as sizes repeat.

    How to fix: pad or bucket inputs to a few lengths; PYTORCH_CUDA_ALLOC_CONF=roundup_power2_divisions:8 rounds similar
    sizes to one, expandable_segments:True merges free memory; allocate a buffer of the largest size once.

    Blind spots: in a window of two or three steps, the second and third of a few lengths look new. Needs
    profile_memory. On a CPU run host memory is judged, which has no cache.
    """

    code: ClassVar[str] = "MEM010"
    facts: ClassVar[tuple[TraceFact, ...]] = (
        allocations.churn,
        allocations.new_sizes,
        allocations.peaks,
        breakdown.by_step,
    )
    min_new_size_ratio: float = 0.1
    warmup_steps: int = 1

    def blind_spot(self, run: Run) -> str | None:
        """Return why sizes cannot be judged where no steps are marked."""
        steps = run.table(breakdown.by_step)["step"]
        if steps.is_empty() or steps.is_not_null().any() or run.table(allocations.peaks).is_empty():
            return None
        return (
            "the traces mark no steps, so new sizes cannot be distinguished from first allocations; call "
            "profiler.step() in every step."
        )

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield at most one finding: the rank whose median step allocates most in new sizes."""
        fresh = run.table(allocations.new_sizes)
        sums = fresh.group_by(quoted_step.KEY).agg(fresh_count=pl.len(), fresh_bytes=pl.col("bytes").sum())
        steps = run.table(allocations.churn).filter(pl.col("peak_bytes") > 0)
        number = pl.col("step").rank("dense").over(quoted_step.DEVICE)
        steps = steps.filter(number > self.warmup_steps).join(sums, on=quoted_step.KEY, how="left", nulls_equal=True)
        steps = steps.with_columns(pl.col("fresh_count", "fresh_bytes").fill_null(0)).with_columns(
            fresh_ratio=pl.col("fresh_bytes") / pl.col("peak_bytes")
        )
        worst = quoted_step.worst(steps, "fresh_ratio")
        if worst is None or worst["fresh_ratio"] < self.min_new_size_ratio or not worst["fresh_count"]:
            return
        step_blocks = largest_first(quoted_step.rows_of(fresh, worst), "bytes", "start_ns")
        kind = "" if worst["device"] is not None else " of the host's memory"
        yield Finding(
            self.code,
            Severity.INFO if worst["device"] is None else Severity.WARNING,
            f"{units.size(worst['fresh_bytes'])}{kind} in {worst['fresh_count']:,} blocks have sizes that no earlier "
            f"step allocated, in {quoted_step.describe(worst)}. The step allocates "
            f"{units.size(worst['bytes'])} in {worst['distinct_sizes']:,} sizes and peaks at "
            f"{units.size(worst['peak_bytes'])}.",
            _FIX if worst["device"] is None else f"{_FIX} {_FIX_ON_DEVICE}",
            cost_bytes=worst["fresh_bytes"],
            confidence=0.8,
            ranks=distinct(fresh, "rank"),
            steps=distinct(fresh, "step"),
            evidence=step_blocks,
            claim=f"Every step allocates {'device' if not kind else 'host'} memory in new sizes",
        )


@dataclass(frozen=True)
class ReallocatedBuffers(Rule):
    """FSDP buffers allocated for every unit, which two reused buffers of each kind could replace.

    What it does: reports the buffers of at least 1 MiB that FSDP's all-gather and reduce-scatter spans allocate in
    every step, and the size of two buffers of each kind.

    Why it costs: dynamic buffers make memory use vary from step to step and fragment the cache; a job needs more memory
    than its layers do.

    How it is measured: allocations inside all-gather and reduce-scatter spans, without those of a backend inside its
    own collective; the median step of the rank that allocates most, with at least `min_steps` steps that
    allocate any. Two buffers of the size of the largest unit, one pair for weights and one for gradients, replace them,
    if spans name their units.

    How to fix: an engine with preallocated buffers that alternate between layers (YaFSDP). tracekit memory RUN --replay
    unit_buffers:2 predicts the reserved memory.

    Blind spots: FSDP1's spans name no units, so only its buffers are reported. Blocks that outlive their step are not
    counted as replaceable.
    """

    code: ClassVar[str] = "MEM011"
    facts: ClassVar[tuple[TraceFact, ...]] = (
        steady_state.unit_buffers,
        double_buffering.alternating,
        breakdown.by_step,
    )
    min_steps: int = 2

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield at most one finding: the rank that allocates most."""
        buffers = run.table(steady_state.unit_buffers)
        keys = ["window", "rank", "step"]
        sums = buffers.group_by(keys).agg(pl.len().alias("count"), pl.col("bytes").sum())
        steps = run.table(breakdown.by_step).select(*keys, "device").drop_nulls("step").unique(keys)
        steps = steps.join(sums, on=keys, how="left").with_columns(pl.col("count", "bytes").fill_null(0))
        worst = quoted_step.worst(steps, "bytes")
        if worst is None or not worst["count"] or buffers["step"].n_unique() < self.min_steps:
            return
        step_buffers = largest_first(quoted_step.rows_of(buffers, worst), "bytes", "start_ns")
        reusable = quoted_step.rows_of(run.table(double_buffering.alternating).drop("device"), worst)
        if reusable.is_empty():
            potential_saving = ""
        else:
            replaced, needed, count = (int(reusable[name].sum()) for name in ("bytes", "buffers_bytes", "count"))
            potential_saving = (
                f"; two reused buffers of each kind, {units.size(needed)} in total, replace {count} of these blocks "
                f"({units.size(replaced)} per step)"
            )
        yield Finding(
            self.code,
            Severity.INFO,
            f"FSDP allocates {worst['count']} buffers of 1 MiB or more, {units.size(worst['bytes'])} in total, for "
            f"all-gathers and reduce-scatters in {quoted_step.describe(worst)}{potential_saving}.",
            "Reuse preallocated buffers for all units: YaFSDP has two for weights and two for gradients.",
            cost_bytes=worst["bytes"],
            confidence=0.8,
            ranks=distinct(buffers, "rank"),
            steps=distinct(buffers, "step"),
            evidence=step_buffers,
            claim="FSDP allocates new buffers for its collectives instead of reusing some",
        )


@dataclass(frozen=True)
class NeedlessRecomputation(Rule):
    """Activations that backward recomputes although the device has memory to store them.

    What it does: reports runs in which layers run forward again in backward (activation checkpointing) and the device
    has never-reserved memory for the activations of some of them, with `keep_free_ratio` left free; if not recomputing
    those saves `min_saved_ratio` of the step or more.

    Why it costs: recomputing every layer adds a third to the compute. Each layer without it saves one forward pass.

    How it is measured: kernels launched under CheckpointFunctionBackward, or, for the non-reentrant variant, under an
    autograd node together with ops that only forward passes call. The activations of a part are the memory allocated
    and not freed while it ran again, without all-gather buffers. Free is the device's memory less the peak of reserved
    memory, on the rank with the least. The saving is the kernels' time, with the longest parts that fit first. Steps
    that save are left out.

    How to fix: checkpoint fewer layers: torch.utils.checkpoint on the first N only, apply_activation_checkpointing with
    a check_fn that leaves layers out, or save the outputs of costly ops (selective checkpointing:
    create_selective_checkpoint_contexts, context_fn). Instrumented trainers: --checkpoint-layers N.

    Blind spots: needs profile_memory, a trace header with the device's memory, and steps at their largest size: a
    longer batch needs more. Under pipeline schedules several micro-batches store activations at once, so fewer layers
    fit. Recomputation by torch.compile's partitioner is not seen.
    """

    code: ClassVar[str] = "MEM002"
    facts: ClassVar[tuple[TraceFact, ...]] = (backward_passes.regions, allocations.peaks, *save_stages.FACTS)
    keep_free_ratio: float = 0.05
    min_saved_ratio: float = 0.02

    def blind_spot(self, run: Run) -> str | None:
        """Return why recomputation that is seen cannot be judged."""
        if run.table(backward_passes.regions).is_empty() or self._free_bytes(run) is not None:
            return None
        return (
            "layers recompute their activations, but the trace does not contain the free memory; record with "
            "profile_memory=True."
        )

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding if the layers that fit in memory save enough in the worst device's median step."""
        free_bytes = self._free_bytes(run)
        parts = run.table(backward_passes.regions)
        if free_bytes is None or parts.is_empty():
            return
        # Parts of each pass whose activations fit in memory, the costliest first.
        by = [*quoted_step.KEY, "backward"]
        needed = pl.col("activation_bytes").fill_null(0).clip(1)
        ordered = largest_first(parts.drop_nulls("activation_bytes"), "compute_ns", "start_ns")
        affordable = ordered.with_columns(needed.cum_sum().over(by).alias("needed_bytes")).filter(
            pl.col("needed_bytes") <= free_bytes
        )
        steps = save_stages.losses(run, affordable, "compute_ns")
        loss = quoted_step.worst_loss(steps, self.min_saved_ratio)
        if loss is None:
            return
        step_parts = loss.rows(parts)
        passes = int(step_parts["backward"].n_unique())
        layers, count = step_parts.height // passes, loss.rows(affordable).height // passes
        yield replace(loss, steps=steps.filter(pl.col("lost_ns") > 0)).finding(
            self,
            Severity.WARNING,
            f"Backward recomputes {layers} parts of the model, although memory could store the activations of {count} "
            f"({units.size(int(step_parts['activation_bytes'].max()))} each; {units.size(free_bytes)} are free with "  # type: ignore[arg-type]
            f"{units.share(self.keep_free_ratio)} in reserve). Recomputing those takes {loss}.",
            f"Checkpoint only {layers - count} of the {layers} parts (torch.utils.checkpoint on the first layers, or a "
            "check_fn for apply_activation_checkpointing), or save costly outputs with "
            "create_selective_checkpoint_contexts.",
            confidence=0.8 if step_parts["evidence"][0] == backward_passes.CHECKPOINT_NODE else 0.6,
            what_if=WhatIf(RECOMPUTATION, is_partial=True),
            evidence=step_parts.sort("start_ns").head(_EVIDENCE_ROWS),
            claim="Backward recomputes activations that memory could store",
        )

    def _free_bytes(self, run: Run) -> int | None:
        """Return the free memory of the fullest device; None if no trace contains it."""
        regions = run.table(backward_passes.regions).filter(pl.col("activation_bytes") > 0)
        peaks = run.table(allocations.peaks).drop_nulls(["headroom_bytes"]).filter(pl.col("memory_bytes") > 0)
        if peaks.is_empty() or regions.is_empty():
            return None
        free_bytes = pl.col("headroom_bytes") - self.keep_free_ratio * pl.col("memory_bytes")
        return max(0, int(peaks.select(free_bytes.min()).item()))
