"""Judgements of memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import polars as pl

from tracekit import units
from tracekit.analysis import breakdown, memory
from tracekit.rule import Finding, Rule, Severity
from tracekit.trace import Fact, Run

_EVIDENCE_ROWS = 20


@dataclass(frozen=True)
class AllocatorChurn(Rule):
    """Device memory taken and returned in steady state, and unit buffers that come and go every step.

    What it does: reports cudaMalloc, cudaFree and the like inside profiled steps after warm-up, retries of the caching
    allocator, and, as information, buffers of at least 1 MiB that FSDP's gather and reduce spans allocate every step.

    Why it costs: a device malloc or free holds up the host, and the device once it runs out of queued work; a retry
    frees all that is cached and waits for every stream. Buffers that come and go fragment memory.

    How it is measured: the runtime calls inside steps: their time on the host, and the part of it during which the
    rank's devices idled, which is what the step loses. The first profiled step is left out where there are more, and so
    are the training's first `warm_up_steps`. Retries are counted by the metrics log. Buffers: allocations of 1 MiB or
    more inside spans of FSDP units, by step.

    How to fix: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, a smaller peak, no empty_cache in the loop; for unit
    buffers an engine with pre-allocated ones (YaFSDP).

    Blind spots: activations come and go in every run and are not counted. Without profile_memory no buffers are seen,
    without the metrics log no retries. What else may have kept the device idle during a call is not told apart.
    """

    code: ClassVar[str] = "MEM001"
    facts: ClassVar[tuple[Fact, ...]] = (memory.device_calls, memory.retries, memory.unit_buffers, breakdown.by_step)
    min_host_ratio: float = 0.001
    warning_stall_ratio: float = 0.01
    warm_up_steps: int = 2

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield at most one finding each on device calls, on retries and on unit buffers."""
        windows = run.table(breakdown.by_step).drop_nulls("step")
        first = pl.col("step").min().over("window", "rank")
        is_only = pl.col("step").max().over("window", "rank") == first
        steady = windows.filter((pl.col("step") > first) | is_only, pl.col("step") >= self.warm_up_steps)
        place = ["window", "rank", "step"]
        yield from self._device_calls(run.table(memory.device_calls).join(steady, place, "semi"), _steps(steady))
        yield from self._retries(run)
        yield from self._unit_buffers(run.table(memory.unit_buffers), _steps(run.table(breakdown.by_step)))

    def _device_calls(self, calls: pl.DataFrame, steps: pl.DataFrame) -> Iterator[Finding]:
        by_rank = calls.group_by("rank").agg(
            pl.len().alias("calls"), pl.col("dur_ns").sum().alias("cost"), pl.col("stalled_ns").sum()
        )
        worst = _worst(by_rank, steps)
        if worst is None:
            return
        host_ns, stalled_ns = (worst[name] / worst["steps"] for name in ("cost", "stalled_ns"))
        if host_ns < self.min_host_ratio * worst["step_ns"]:
            return
        impact = min(stalled_ns / worst["step_ns"], 1.0)
        count = worst["calls"] / worst["steps"]
        yield Finding(
            self.code,
            Severity.WARNING if impact >= self.warning_stall_ratio else Severity.INFO,
            f"{_count(count)} device malloc and free calls a step hold up the host for {units.duration(host_ns)} on "
            f"rank {worst['rank']}; its device idles for {units.duration(stalled_ns)} of that.",
            "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, lower the peak, keep empty_cache() out of the loop, "
            "and see that PYTORCH_NO_CUDA_MEMORY_CACHING is not set.",
            impact=impact,
            cost_ns=int(stalled_ns),
            confidence=0.8,
            ranks=tuple(calls["rank"].unique().sort().to_list()),
            steps=tuple(calls["step"].unique().sort().to_list()),
            evidence=calls.sort("stalled_ns", "dur_ns", descending=True).head(_EVIDENCE_ROWS),
            subject="device calls",
        )

    def _retries(self, run: Run) -> Iterator[Finding]:
        seen = run.table(memory.retries).filter(pl.col("step") >= self.warm_up_steps)
        seen = seen.unique(["rank", "step"], keep="first").sort("rank", "step")
        if seen.is_empty():
            return
        by_rank = seen.group_by("rank").agg(pl.col("retries").sum()).sort("retries", "rank", descending=[True, False])
        rank, retries = by_rank.row(0)
        yield Finding(
            self.code,
            Severity.WARNING,
            f"The caching allocator ran out of memory and retried {retries:,} times after warm-up on rank {rank}; each "
            "time it frees all that it cached and waits for every stream.",
            "Lower the peak (smaller batch, activation checkpointing) or set "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
            confidence=0.95,
            ranks=tuple(by_rank["rank"].sort().to_list()),
            steps=tuple(seen["step"].unique().sort().to_list()),
            evidence=seen.drop("window").head(_EVIDENCE_ROWS),
            subject="retries",
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
            evidence=buffers.sort("bytes", descending=True).head(_EVIDENCE_ROWS),
            subject="unit buffers",
        )


def _steps(windows: pl.DataFrame) -> pl.DataFrame:
    """Return how many steps each rank has, and how long the median one is: columns rank, steps, step_ns."""
    return windows.group_by("rank").agg(
        pl.struct("window", "step").n_unique().alias("steps"), pl.col("duration_ns").median().alias("step_ns")
    )


def _worst(costs: pl.DataFrame, steps: pl.DataFrame) -> dict[str, float] | None:
    joined = costs.join(steps, on="rank").sort("cost", "rank", descending=[True, False])
    return None if joined.is_empty() else joined.row(0, named=True)


def _count(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"
