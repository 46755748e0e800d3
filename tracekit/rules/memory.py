"""Judgements of memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import polars as pl

from tracekit import units
from tracekit.analysis import breakdown, memory
from tracekit.rule import Finding, Rule, Severity
from tracekit.trace import Fact, Run


@dataclass(frozen=True)
class AllocatorChurn(Rule):
    """Device memory taken and returned in steady state, and unit buffers that come and go every step.

    What it does: reports cudaMalloc, cudaFree and the like inside profiled steps, and, as information, buffers of at
    least 1 MiB that FSDP's gather and reduce spans allocate every step.

    Why it costs: a device malloc or free stalls the host and often all streams. Buffers that come and go fragment
    memory.

    How it is measured: the runtime calls inside steps with their duration; allocations of 1 MiB or more inside spans
    of FSDP units, by step.

    How to fix: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, a smaller peak, no empty_cache in the loop; for unit
    buffers an engine with pre-allocated ones (YaFSDP).

    Blind spots: activations come and go in every run and are not counted. Without profile_memory no buffers are seen.
    """

    code: ClassVar[str] = "MEM001"
    facts: ClassVar[tuple[Fact, ...]] = (memory.device_calls, memory.unit_buffers, breakdown.by_step)
    min_stall_ratio: float = 0.001

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield at most one finding on device calls and one on unit buffers."""
        steps = (
            run.table(breakdown.by_step)
            .group_by("rank")
            .agg(pl.col("step").n_unique().alias("steps"), pl.col("duration_ns").median().alias("step_ns"))
        )
        yield from self._device_calls(run.table(memory.device_calls), steps)
        yield from self._unit_buffers(run.table(memory.unit_buffers), steps)

    def _device_calls(self, calls: pl.DataFrame, steps: pl.DataFrame) -> Iterator[Finding]:
        worst = _worst(calls.group_by("rank").agg(pl.len().alias("calls"), pl.col("dur_ns").sum().alias("cost")), steps)
        if worst is None or worst["cost"] / worst["steps"] < self.min_stall_ratio * worst["step_ns"]:
            return
        cost = worst["cost"] / worst["steps"]
        yield Finding(
            self.code,
            Severity.WARNING,
            f"{worst['calls'] / worst['steps']:.0f} device malloc and free calls a step block the host "
            f"for {units.duration(cost)} on rank {worst['rank']}.",
            "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, lower the peak, keep empty_cache() out of the loop.",
            impact=min(cost / worst["step_ns"], 1.0),
            cost_ns=int(cost),
            confidence=0.8,
            ranks=tuple(calls["rank"].unique().sort().to_list()),
            steps=tuple(calls["step"].unique().sort().to_list()),
            evidence=calls.sort("dur_ns", descending=True).head(20),
            subject="device calls",
        )

    def _unit_buffers(self, buffers: pl.DataFrame, steps: pl.DataFrame) -> Iterator[Finding]:
        worst = _worst(
            buffers.group_by("rank").agg(pl.len().alias("calls"), pl.col("bytes").sum().alias("cost")), steps
        )
        if worst is None or buffers["step"].n_unique() < 2:
            return
        yield Finding(
            self.code,
            Severity.INFO,
            f"FSDP's gathers and reductions allocate {worst['calls'] / worst['steps']:.0f} buffers of 1 MiB or more "
            f"a step, {units.size(worst['cost'] / worst['steps'])} in all on rank {worst['rank']}.",
            "Buffers allocated once serve all units: YaFSDP keeps two for weights and two for gradients.",
            cost_bytes=int(worst["cost"] / worst["steps"]),
            confidence=0.8,
            ranks=tuple(buffers["rank"].unique().sort().to_list()),
            steps=tuple(buffers["step"].unique().sort().to_list()),
            evidence=buffers.sort("bytes", descending=True).head(20),
            subject="unit buffers",
        )


def _worst(costs: pl.DataFrame, steps: pl.DataFrame) -> dict[str, float] | None:
    joined = costs.join(steps, on="rank").sort("cost", descending=True)
    return None if joined.is_empty() else joined.row(0, named=True)
