"""Rules on fragmentation: free memory in pieces that are too small, and free memory of other streams."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import polars as pl

from tracekit.analysis.memory import allocations, steady_state
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.replay.allocator import run_snapshots
from tracekit.rules.quoted_step import DEVICE
from tracekit.rules.rule import Finding, Rule, Severity, distinct, largest_first

_EVIDENCE_ROWS = 60
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
            evidence=growths.head(_EVIDENCE_ROWS),
            subject="growth",
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
        )
