"""The rule on activation checkpointing."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import polars as pl

from tracekit.analysis.checkpoint import steps_without_saves
from tracekit.analysis.compute import recomputation
from tracekit.analysis.memory import allocations
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.replay.graph.causes.redundant_work import RECOMPUTATION
from tracekit.rules import quoted_step, step_losses
from tracekit.rules.rule import Finding, Rule, Severity, WhatIf, largest_first

_EVIDENCE_ROWS = 80


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
    facts: ClassVar[tuple[TraceFact, ...]] = (recomputation.regions, allocations.peaks, *steps_without_saves.FACTS)
    keep_free_ratio: float = 0.05
    min_saved_ratio: float = 0.02

    def blind_spot(self, run: Run) -> str | None:
        """Return why recomputation that is seen cannot be judged."""
        if run.table(recomputation.regions).is_empty() or self._free_bytes(run) is not None:
            return None
        return (
            "layers recompute their activations, but the trace does not contain the free memory; record with "
            "profile_memory=True."
        )

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding if the layers that fit in memory save enough in the worst device's median step."""
        free_bytes = self._free_bytes(run)
        parts = run.table(recomputation.regions)
        if free_bytes is None or parts.is_empty():
            return
        affordable = _affordable(parts, free_bytes)
        steps = steps_without_saves.losses(run, affordable, "compute_ns")
        loss = step_losses.worst(steps, self.min_saved_ratio)
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
            confidence=0.8 if step_parts["evidence"][0] == recomputation.CHECKPOINT_NODE else 0.6,
            what_if=WhatIf(RECOMPUTATION, is_partial=True),
            evidence=step_parts.sort("start_ns").head(_EVIDENCE_ROWS),
        )

    def _free_bytes(self, run: Run) -> int | None:
        """Return the free memory of the fullest device; None if no trace contains it."""
        regions = run.table(recomputation.regions).filter(pl.col("activation_bytes") > 0)
        peaks = run.table(allocations.peaks).drop_nulls(["headroom_bytes"]).filter(pl.col("memory_bytes") > 0)
        if peaks.is_empty() or regions.is_empty():
            return None
        free_bytes = pl.col("headroom_bytes") - self.keep_free_ratio * pl.col("memory_bytes")
        return max(0, int(peaks.select(free_bytes.min()).item()))


def _affordable(parts: pl.DataFrame, free_bytes: int) -> pl.DataFrame:
    """Return the parts of each pass whose activations fit in memory, the costliest first."""
    by = [*quoted_step.KEY, "backward"]
    needed = pl.col("activation_bytes").fill_null(0).clip(1)
    ordered = largest_first(parts.drop_nulls("activation_bytes"), "compute_ns", "start_ns")
    return ordered.with_columns(needed.cum_sum().over(by).alias("needed_bytes")).filter(
        pl.col("needed_bytes") <= free_bytes
    )
