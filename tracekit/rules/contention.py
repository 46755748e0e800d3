"""Rules on contention: compute, collectives and their preparation that delay each other on the device."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import polars as pl

from tracekit.analysis.checkpoint import save_stages
from tracekit.analysis.compute import collective_contention, compute_gap_causes, contention
from tracekit.analysis.parallelism import workload
from tracekit.analysis.time import breakdown
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.replay.graph.causes.cause import Cause
from tracekit.replay.graph.causes.contention import SLOWED_BY_COPIES, SLOWED_COLLECTIVES, SLOWED_COMPUTE
from tracekit.rules import quoted_step
from tracekit.rules.quoted_step import StepLoss
from tracekit.rules.rule import Finding, Rule, Severity, WhatIf, distinct
from tracekit.sync.collective_matching import calls

_MIN_OVERLAP_RATIO = 0.2  # share of a step from which an unknown slowdown is reported as a blind spot


@dataclass(frozen=True)
class ContendedCompute(Rule):
    """Compute that takes longer while a collective is on the device.

    What it does: reports runs in which kernels take more than `min_slowdown` times as long during collectives as alone,
    if that costs at least `min_cost_ratio` of the step.

    Why it costs: a running collective occupies SMs (NCCL's channels) and memory bandwidth. Matrix products that fill
    the device then need a second wave: up to twice the time.

    How it is measured: each kernel is compared with itself (name, grid, block, bytes, input shapes of its op; without
    recorded shapes, its neighbours on the stream) without a concurrent collective, in the same step if possible. Work
    that runs concurrently with other work too is compared only with work in the same situation, or left out. The
    slowdown is the time during collectives over the time of the same work alone; its lower bound (95% interval,
    bootstrap over steps and units) must exceed `min_slowdown`. The loss is the extra time of the compared kernels,
    extended to the overlap of kernels without a sample alone; at most the step's duration minus its collectives. The
    message quotes the median step of the worst device. The cost is the saving of a replay without the slowdown
    (`tracekit whatif`); below `min_cost_ratio`, because the device waits for others anyway, it is information, and also
    as a suspicion: no interval, and fewer than `min_calls` samples.

    How to fix: give collectives fewer SMs: NCCL_MAX_CTAS (or ncclConfig.maxCTAs in ProcessGroupNCCL.Options),
    NCCL_CGA_CLUSTER_SIZE, SHARP or copy engines if available (symmetric memory, NCCL 2.28 and later); leave SMs free in
    matrix products (CUBLASLT_SM_COUNT_TARGET, Triton grids below the number of SMs); or send fewer bytes (fully_shard
    on a mesh of two axes, larger batches).

    Blind spots: needs device streams, and the same kernels without a concurrent collective in the same trace. Without
    shapes or a grid, kernels with one name and different sizes are separated only by their neighbours. Clocks that drop
    under load look the same.
    """

    code: ClassVar[str] = "STREAM003"
    fix_without_pytorch: ClassVar[str] = (
        "Let collectives use fewer multiprocessors (NCCL_MAX_CTAS), or move them to where compute is not limited by "
        "memory."
    )
    facts: ClassVar[tuple[TraceFact, ...]] = (
        contention.by_step,
        contention.by_kernel,
        breakdown.by_step,
        workload.strategy_marks,
    )
    cause: ClassVar[Cause] = SLOWED_COMPUTE
    concurrent_kind: ClassVar[str] = contention.COMMUNICATION
    concurrent_work: ClassVar[str] = "collectives"
    min_slowdown: float = 1.15
    min_cost_ratio: float = 0.02
    min_calls: int = 10

    def blind_spot(self, run: Run) -> str | None:
        """Return why a run without a sample alone cannot be judged."""
        compute = run.table(contention.by_step).filter(self._is_concurrent())
        return _why_unjudged(run, compute, f"compute ran concurrently with {self.concurrent_work}")

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding if the worst device's typical step loses enough."""
        compute = run.table(contention.by_step).filter(self._is_concurrent())
        slow = _slowed_devices(compute, self.min_slowdown)
        slow_compute = compute.join(slow, on=["rank", "device"])
        rest = (pl.col("overlapped_ns") - pl.col("judged_ns")) * (1 - 1 / pl.col("slowdown"))
        lost = slow_compute.select(
            *quoted_step.KEY, (pl.col("lost_ns") + rest).round().cast(pl.Int64), slowed_ns="overlapped_ns"
        )
        steps = quoted_step.by_step(run, lost, max_loss=pl.col("duration_ns") - pl.col("communication_ns"))
        loss = quoted_step.worst_for_replay(steps, self.min_cost_ratio)
        if loss is None:
            return
        slowdown, suspicion, confidence = _slowdown_on(slow, loss, self.min_calls)
        on_ranks = pl.col("rank").is_in(distinct(loss.steps, "rank"))
        kernels = run.scan(contention.by_kernel).filter(self._is_concurrent(), on_ranks).collect()
        quoted_first = kernels.sort(pl.col("rank") == loss.row["rank"], "lost_ns", descending=True)
        yield loss.finding(
            self,
            Severity.INFO if suspicion else Severity.WARNING,
            f"Kernels take {slowdown} as long during {self.concurrent_work} as alone. "
            f"{_cost(loss, 'slowed_ns')}.{suspicion}",
            self._fix(run),
            confidence=confidence,
            evidence=quoted_first.head(40),
            what_if=WhatIf(self.cause, self.min_cost_ratio),
            claim=f"{self.concurrent_work.capitalize()} that run at the same time slow kernels down",
        )

    def _fix(self, run: Run) -> str:
        return (
            "Let collectives use fewer SMs (NCCL_MAX_CTAS, NCCL_CGA_CLUSTER_SIZE), or matrix products leave SMs free "
            f"(CUBLASLT_SM_COUNT_TARGET); or send fewer bytes{_FEWER_BYTES.get(workload.run_strategy(run) or '', '')}."
        )

    @classmethod
    def _is_concurrent(cls) -> pl.Expr:
        """Whether a row of `contention.by_step` or `by_kernel` is compute during work of the concurrent kind."""
        return (pl.col("kind") == contention.COMPUTE) & (pl.col("concurrent_kind") == cls.concurrent_kind)


@dataclass(frozen=True)
class ComputeSlowedByCopies(ContendedCompute):
    """Compute that takes longer while copies of another stream are on the device.

    What it does: reports runs in which kernels take more than `min_slowdown` times as long during copies of other
    streams (prefetched batches, offloaded activations or weights) as alone, if that costs at least `min_cost_ratio` of
    the step.

    Why it costs: a copy takes memory bandwidth from the kernels, and copies within a device also multiprocessors. What
    the copy hides is then paid by kernels that are limited by memory.

    How it is measured: as STREAM003, with copies and memory sets of other streams instead of collectives. Work that a
    collective overlaps too is compared only with work in the same situation. The cost is the saving of a replay without
    the slowdown; below `min_cost_ratio` it is information, and also as a suspicion: no interval, and fewer than
    `min_calls` samples.

    How to fix: copy fewer bytes (convert and crop on the host, a smaller type, offload less), copy what the step needs
    once, or place the copies where kernels compute (matrix products) instead of where they move data (elementwise ones,
    the optimizer).

    Blind spots: needs device streams, and the same kernels without a concurrent copy in the same trace. Copies of other
    processes and devices over the same links are not seen. Clocks that drop under load look the same.
    """

    code: ClassVar[str] = "STREAM006"
    fix_without_pytorch: ClassVar[str] = (
        "Copy fewer bytes, or place the copies where kernels compute instead of where they move data."
    )
    cause: ClassVar[Cause] = SLOWED_BY_COPIES
    concurrent_kind: ClassVar[str] = contention.COPY
    concurrent_work: ClassVar[str] = "copies"

    def _fix(self, run: Run) -> str:  # noqa: ARG002
        return (
            "Copy fewer bytes (convert and crop on the host, send a smaller type, offload less), or issue the copies "
            "where kernels compute (matrix products) instead of where they move data (elementwise ones, the optimizer)."
        )


@dataclass(frozen=True)
class StarvedCollectives(Rule):
    """Collectives that take longer while compute runs, and compute that then waits for them.

    What it does: reports runs in which collectives move their data more than `min_slowdown` times more slowly during
    compute than alone, if compute waits for that at least `min_cost_ratio` of the step.

    Why it costs: compute that fills the device takes memory bandwidth and SMs from the collective, or lowers the
    clocks. The extra time is lost where compute then waits for the collective.

    How it is measured: by bus bandwidth at the same size. A transfer lasts from the arrival of the last known rank to
    the end, and is compared with those of the same op, group, element type and size without concurrent compute, in the
    same step if possible. Collectives that run concurrently with another one are compared only with such; if there is
    no other sample, a collective by itself is compared with one that overlaps with another collective, which
    underestimates the slowdown. The slowdown is the time during compute over the time of the same transfers alone; its
    lower bound (95% interval, bootstrap over steps and units) must exceed `min_slowdown`. Collectives without a sample
    are assumed to be slowed like the rest of the rank. The loss of a chain of collectives without a gap is at most the
    time that compute waits for it. The message quotes the median step of the worst device. The cost is the
    saving of a replay without the slowdown (`tracekit whatif`); below `min_cost_ratio` it is information, and also as
    a suspicion: no interval, and fewer than `min_calls` samples or ranks without a trace.

    How to fix: give collectives more SMs (NCCL_MIN_CTAS, NCCL_MIN_NCHANNELS), or their streams a high priority
    (ProcessGroupNCCL.Options.is_high_priority_stream); or start them earlier, so that compute does not wait
    (set_modules_to_forward_prefetch, set_modules_to_backward_prefetch).

    Blind spots: needs device streams, and the same collectives without concurrent compute in the same trace. If ranks
    of the group have no trace, the wait for them counts as transfer and the confidence is lower. Copies between devices
    of a node and collectives of other jobs on the same links are not seen.
    """

    code: ClassVar[str] = "STREAM004"
    fix_without_pytorch: ClassVar[str] = (
        "Give the stream of collectives a higher priority (cudaStreamCreateWithPriority), or launch kernels with "
        "fewer blocks."
    )
    facts: ClassVar[tuple[TraceFact, ...]] = (
        collective_contention.calls,
        calls,
        breakdown.by_step,
        workload.strategy_marks,
    )
    min_slowdown: float = 1.2
    min_cost_ratio: float = 0.02
    min_calls: int = 10

    def blind_spot(self, run: Run) -> str | None:
        """Return why a run without a sample alone cannot be judged."""
        by_step = run.table(collective_contention.by_step)
        return _why_unjudged(run, by_step, "collectives ran concurrently with compute")

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding if the worst device's typical step loses enough."""
        by_step = run.table(collective_contention.by_step)
        slow = _slowed_devices(by_step, self.min_slowdown)
        lost = by_step.join(slow, on=["rank", "device"]).select(
            *quoted_step.KEY, pl.col("waited_ns").alias("lost_ns"), "overlapped_ns"
        )
        steps = quoted_step.by_step(run, lost, max_loss=pl.col("duration_ns") - pl.col("compute_ns"))
        loss = quoted_step.worst_for_replay(steps, self.min_cost_ratio)
        if loss is None:
            return
        collectives = run.table(collective_contention.compared_calls).filter("judged")
        collectives = collectives.with_columns(pl.col("excess_ns").alias("lost_ns"))
        is_whole = bool(collectives["whole"].all())
        slowdown, suspicion, confidence = _slowdown_on(slow, loss, self.min_calls, is_whole=is_whole)
        yield loss.finding(
            self,
            Severity.INFO if suspicion else Severity.WARNING,
            f"Collectives take {slowdown} as long during compute as alone{_bandwidth(run)}. "
            f"{_cost(loss, 'overlapped_ns')}.{suspicion}",
            "Give collectives more SMs or priority (NCCL_MIN_CTAS, ProcessGroupNCCL.Options.is_high_priority_stream), "
            f"or start them earlier{_EARLIER.get(workload.run_strategy(run) or '', ' (async_op=True)')}.",
            confidence=confidence * (1.0 if is_whole else 0.8),
            evidence=quoted_step.evidence(collectives, loss.row, "lost_ns").select(_EVIDENCE_COLUMNS),
            what_if=WhatIf(SLOWED_COLLECTIVES, self.min_cost_ratio),
            claim="Kernels that run at the same time slow collectives down",
        )


@dataclass(frozen=True)
class PreparationGap(Rule):
    """Collectives that start late because copies and casts prepare them, while compute waits.

    What it does: reports, as information, runs in which compute waits more than `min_lost_ratio` of the step for
    collectives that are delayed by their preparation: copy-in, concatenation, cast, divide.

    Why it costs: the network is idle while a collective is prepared. Compute that waits for the collective also waits
    for its preparation. The part that contention adds to the preparation belongs to STREAM001.

    How it is measured: preparation is the work launched under the same FSDP span before the collective, else the work
    directly before it on its communication stream. Two times are compared: the preparation while no collective runs on
    the device (at most what the same kernels take alone), and the idle time of compute until that collective and those
    that follow without a gap. The smaller one counts. Steps that save are left out. The message quotes the
    median step of the worst device.

    How to fix: prepare less: parameters and gradients in one flat buffer (YaFSDP), gradients in the reduce dtype
    (MixedPrecisionPolicy.reduce_dtype), one divide after backward; or prepare earlier, by prefetching a module ahead
    (set_modules_to_forward_prefetch, set_modules_to_backward_prefetch).

    Blind spots: needs device streams: on a CPU run, preparation is compute. Preparation that never runs alone counts in
    full, contention included. Work under other spans and on other streams is not recognized as preparation.
    """

    code: ClassVar[str] = "COMM004"
    fix_without_pytorch: ClassVar[str] = (
        "Prepare the input of a collective earlier, or on another stream, and in fewer kernels."
    )
    facts: ClassVar[tuple[TraceFact, ...]] = (
        compute_gap_causes.chains, contention.device_count, workload.strategy_marks, *save_stages.FACTS,
    )  # fmt: skip
    min_lost_ratio: float = 0.02

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding if the worst device's median step exceeds the threshold."""
        # Chains on devices that begin with preparation; lost_ns is the longest that compute can wait for it.
        if not run.table(contention.device_count)["devices"].sum():
            return
        lost_ns = pl.min_horizontal("preparation_ns", pl.col("waited_ns") - pl.col("contention_ns"))
        chains = run.table(compute_gap_causes.chains).with_columns(lost_ns=lost_ns).filter(pl.col("lost_ns") > 0)
        loss = quoted_step.worst_loss(save_stages.losses(run, chains, "lost_ns"), self.min_lost_ratio)
        if loss is None:
            return
        preparation_ns = int(loss.rows(chains)["preparation_ns"].sum())
        yield loss.finding(
            self,
            Severity.INFO,
            f"Compute waits {loss} for copies and casts that prepare collectives, which take "
            f"{units.duration(preparation_ns)}.",
            _PREPARE_FSDP if workload.run_strategy(run) in _SHARDED else _PREPARE_LESS,
            confidence=0.7,
            evidence=quoted_step.evidence(chains, loss.row, "lost_ns", 20),
            claim="Compute waits for copies and casts that prepare collectives",
        )


_SHARDED = (workload.FSDP1, workload.FSDP2, workload.YAFSDP)
_PREPARE_FSDP = (
    "Prepare less: one flat buffer per unit (YaFSDP), gradients in the reduce dtype "
    "(MixedPrecisionPolicy.reduce_dtype). Or prepare earlier: set_modules_to_forward_prefetch, "
    "set_modules_to_backward_prefetch."
)
_PREPARE_LESS = (
    "Prepare less: write results into one preallocated buffer, in the layout and type that is sent, instead of "
    "copying, casting or concatenating before each collective. Or prepare earlier, on the stream of compute."
)
_FEWER_BYTES = {
    workload.FSDP1: " (ShardingStrategy.HYBRID_SHARD)",
    workload.FSDP2: " (fully_shard on a mesh of two axes)",
    workload.YAFSDP: " (fully_shard on a mesh of two axes)",
    workload.DDP: " (no_sync() between micro-batches)",
}
_EARLIER = {
    workload.FSDP1: " (forward_prefetch=True, BackwardPrefetch.BACKWARD_PRE)",
    workload.FSDP2: " (set_modules_to_forward_prefetch, set_modules_to_backward_prefetch)",
    workload.YAFSDP: "",
    workload.DDP: " (bucket_cap_mb)",
}
"""How each strategy sends less, or starts collectives earlier."""
_EVIDENCE_COLUMNS = (
    *("window", "rank", "step", "device", "lane", "name", "op", "group", "unit", "bytes", "start_ns", "dur_ns"),
    *("transfer_ns", "alone_ns", "compute_ns", "waited_ns", "lost_ns"),
)


_MOST_SPREAD = 10.0
"""How many times as far from 1 the upper bound of a slowdown may be as its lower one."""


def _slowed_devices(steps: pl.DataFrame, min_slowdown: float) -> pl.DataFrame:
    """Return the devices whose slowdown exceeds `min_slowdown` at its lower bound.

    Columns rank, device, slowdown, low, high, judged_calls.
    """
    pairs = contention.pool_pairs(steps, min_slowdown=min_slowdown)
    slowed = pairs.filter(pl.coalesce("low", "slowdown") > min_slowdown)
    calls = steps.group_by("rank", "device").agg(pl.col("judged_calls").sum())
    return slowed.select("rank", "device", "slowdown", "low", "high").join(calls, on=["rank", "device"])


def _slowdown_on(
    slow: pl.DataFrame, loss: StepLoss, min_calls: int, *, is_whole: bool = True
) -> tuple[str, str, float]:
    """The slowdown on the quoted device in words, why it is only a suspicion (or ''), and how sure it is."""
    row = slow.filter(pl.col("rank") == loss.row["rank"], pl.col("device") == loss.row["device"]).row(0, named=True)
    times, low, calls = f"{row['slowdown']:.2f} times", row["low"], int(row["judged_calls"])
    if low is not None:
        interval = f"{times} (95% interval {low:.2f} to {row['high']:.2f})"
        # From 1.26 to 50 times, a few of the samples decide: the cost is not known.
        if row["high"] - 1 > _MOST_SPREAD * (low - 1):
            return interval, " The interval is wide, so this is a suspicion: record more steps and ranks.", 0.4
        return interval, "", 0.8
    few = f" Only {calls} of them could be compared on this rank, so this is a suspicion: record more steps and ranks."
    return times, "" if calls >= min_calls and is_whole else few, 0.5


def _cost(loss: StepLoss, overlap: str) -> str:
    return f"That costs {loss}, out of {units.duration(loss.row[overlap])} of overlap"


def _bandwidth(run: Run) -> str:
    """Return the bus bandwidth, alone and during compute, of the collective that takes most time."""
    speeds = ("alone_bus_bytes_per_s", "concurrent_bus_bytes_per_s")
    bandwidths = run.table(collective_contention.bandwidths).drop_nulls(speeds)
    if bandwidths.is_empty():
        return ""
    first = bandwidths.row(0, named=True)
    solo, concurrent = (units.size(round(first[name])) for name in speeds)
    return f" ({first['op']} of {units.size(first['bytes'])}: bus bandwidth {concurrent}/s instead of {solo}/s)"


def _why_unjudged(run: Run, by_step: pl.DataFrame, what: str) -> str | None:
    unknown = by_step.filter((pl.col("judged_ns").sum() == 0).over("rank", "device"))
    unknown = unknown.with_columns(pl.col("overlapped_ns").alias("lost_ns"))
    steps = quoted_step.by_step(run, unknown.select(*quoted_step.KEY, "lost_ns"))
    loss = quoted_step.worst_loss(steps, _MIN_OVERLAP_RATIO)
    if loss is None:
        return None
    return (
        f"{what} for {units.duration(loss.row['lost_ns'])} in {quoted_step.describe(loss.row)}, but never ran "
        f"alone, so the slowdown is unknown: {contention.RECORD}."
    )
