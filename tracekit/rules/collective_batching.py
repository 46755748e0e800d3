"""Rules on collectives that could be batched: many small ones, and gradients reduced in every micro-batch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import polars as pl

from tracekit.analysis.checkpoint import save_stages
from tracekit.analysis.communication import collective_instances, latency
from tracekit.analysis.parallelism import workload
from tracekit.analysis.parallelism.workload import DDP, FSDP1, FSDP2, YAFSDP
from tracekit.analysis.time import backward_passes
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.replay.graph.causes.collectives import SMALL_COLLECTIVES
from tracekit.replay.graph.causes.device_time import MICRO_BATCH_REDUCTIONS
from tracekit.rules import quoted_step
from tracekit.rules.rule import Finding, Rule, Severity, WhatIf, largest_first
from tracekit.sync import collective_matching

_BURST = (*quoted_step.DEVICE, "burst")
_POOL = (*quoted_step.DEVICE, "pool")
_MIN_SIZE_SPREAD = 4.0  # largest over smallest size; below it, latency cannot be separated from transfer time
_LEAST_BUCKET_BYTES = 1 << 20  # DDP's first bucket (torch.distributed._DEFAULT_FIRST_BUCKET_BYTES)
_TRANSFER_PER_LATENCY = 4.0  # transfer time over latency of a large enough collective: latency is a fifth of its time


@dataclass(frozen=True)
class SmallCollectives(Rule):
    """Small collectives whose latency takes longer than their data transfer.

    What it does: reports runs that lose `min_lost_ratio` of the step or more to the latency of collectives that could
    be batched: at least `min_count` launched one after the other, and gradient reductions that are mostly latency.

    Why it costs: every collective of n ranks passes n-1 links in sequence before its data flows, and the host launches
    each one separately.

    How it is measured: a line fitted to the run's own times by size gives each group's latency and bandwidth. Where
    sizes are too similar for a fit, `assumed_hop_ns` per hop is used, which the message states; for all-reduces of
    gradients below 1 MiB (the size of DDP's first bucket), the time beyond what their bytes need at 2 GB/s, if that is
    more and all ranks have a trace. Gradients are batched up to the size at which latency is a fifth of the time, so
    that they still overlap with compute. The loss is the latency of the collectives that batching removes and the
    pauses between them, as far as compute is idle meanwhile. Steps that save are left out; the message quotes the
    median step of the worst device.

    How to fix: a larger DistributedDataParallel(bucket_cap_mb=…); under FSDP2 fully_shard on larger blocks (or several
    modules as one unit: fully_shard([a, b])), under FSDP1 a wider auto_wrap_policy; your own collectives in one call:
    torch.distributed._coalescing_manager, all_gather_into_tensor and reduce_scatter_tensor on flat buffers,
    torch._foreach_ ops and one all_reduce instead of one per tensor.

    Blind spots: collectives with compute between them are assumed to need it, except for gradients. NCCL changes its
    protocol with size, so no line fits all sizes. Late ranks without a trace look like latency.
    """

    code: ClassVar[str] = "COMM002"
    facts: ClassVar[tuple[TraceFact, ...]] = (
        *latency.FACTS, collective_matching.calls, *save_stages.FACTS, workload.strategy_marks,
    )  # fmt: skip
    min_lost_ratio: float = 0.02
    min_count: int = 4
    assumed_hop_ns: float = 5_000.0

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding if the worst device's typical step exceeds the threshold."""
        small = self._lost(run)
        loss = quoted_step.worst_loss(save_stages.losses(run, small, "lost_ns"), self.min_lost_ratio)
        if loss is None:
            return
        step_calls = largest_first(loss.rows(small).filter(pl.col("lost_ns") > 0), "lost_ns", "start_ns")
        largest = step_calls.row(0, named=True)
        assumed = "" if largest["is_fitted"] else " (assumed: the sizes in this run are too similar to measure it)"
        yield loss.finding(
            self,
            Severity.WARNING,
            f"{int(step_calls['count'].sum()):,} small collectives, such as {largest['op'].replace('_', '-')} of "
            f"{units.size(int(largest['bytes']))}, lose {loss} to latency, about "
            f"{units.duration(int(largest['latency_ns']))} each{assumed}. Batching them into "
            f"{int(step_calls['joined'].sum()):,} saves that time.",
            _batch_fix(workload.run_strategy(run), largest["op"]),
            confidence=0.7 if largest["is_fitted"] else 0.5,
            what_if=WhatIf(SMALL_COLLECTIVES),
            evidence=quoted_step.evidence(small, loss.row, "lost_ns").select(
                *_EVIDENCE_COLUMNS, "count", "joined", "latency_ns", "start_ns", "dur_ns", "lost_ns"
            ),
            claim=f"Small collectives ({largest['op'].replace('_', '-')}) of rank {largest['rank']} are latency-bound",
        )

    def _lost(self, run: Run) -> pl.DataFrame:
        """Loss of each burst, and of each pool of gradients, to latency: joined, latency_ns, lost_ns."""
        lines = run.table(latency.by_group).drop("sizes")
        # Where ranks have no trace, waits for them are part of all times.
        is_known = not collective_instances.ranks_without_peers(run)
        is_undersized = ~pl.col("is_fitted") & (pl.col("op") == "all_reduce") & (pl.col("bytes") < _LEAST_BUCKET_BYTES)
        is_undersized &= pl.col("pool").is_not_null() & pl.lit(is_known)
        assumed_ns = pl.when(is_undersized).then(pl.max_horizontal("overhead_ns", pl.lit(self.assumed_hop_ns)))
        hop_ns = pl.coalesce("hop_ns", assumed_ns.otherwise(self.assumed_hop_ns)).fill_nan(self.assumed_hop_ns)
        calls = (
            run.table(latency.bursts)
            .join(lines, on=["group", "group_size"], how="left", nulls_equal=True, maintain_order="left")
            .with_columns(latency.hops().alias("hops"), latency.ring_bytes().alias("ring_bytes"))
            .drop_nulls(["hops", "ring_bytes", "is_fitted"])
            .with_columns(pl.min_horizontal(hop_ns * pl.col("hops"), "dur_ns").alias("latency_ns"))
        )
        together = calls.filter(pl.col("count") >= self.min_count)
        single = calls.filter(pl.col("count") < self.min_count).drop_nulls("pool")
        is_measured = (pl.col("size_ratio") >= _MIN_SIZE_SPREAD) | (is_undersized & (pl.col("overhead_ns") > 0))
        mostly = (pl.col("latency_ns") * 2 > pl.col("dur_ns")) & is_measured
        return pl.concat([
            _batch_sums(together, _BURST, gaps=True),
            _batch_sums(single.filter(mostly), _POOL, gaps=False),
        ]).sort("window", "rank", "start_ns")  # fmt: skip


_LARGER_FIXES = {
    DDP: "Use larger buckets: DistributedDataParallel(bucket_cap_mb=…), several times the current value.",
    FSDP1: "Wrap larger blocks: an auto_wrap_policy that makes one or several whole layers a unit.",
    FSDP2: (
        "Shard larger units: fully_shard on whole layers or on several at once (fully_shard([a, b])), not on single "
        "matrices. Batch your own collectives with torch.distributed._coalescing_manager or a flat buffer."
    ),
    YAFSDP: "Shard larger units: whole layers, not single matrices.",
}
_BATCH_FIX = "Batch them: one flat buffer for several tensors, or torch.distributed._coalescing_manager."
_OWN_OPS = {DDP: ("all_reduce",)} | dict.fromkeys((FSDP1, FSDP2, YAFSDP), ("all_gather", "reduce_scatter"))
"""The collectives that a wrapper itself starts: its settings batch no others."""
_EVIDENCE_COLUMNS = ("window", "rank", "step", "device", "phase", "unit", "op", "group", "group_size", "bytes")


def _batch_fix(strategy: str | None, op: str) -> str:
    return _LARGER_FIXES[strategy] if strategy is not None and op in _OWN_OPS.get(strategy, ()) else _BATCH_FIX


def _batch_sums(calls: pl.DataFrame, by: tuple[str, ...], *, gaps: bool) -> pl.DataFrame:
    """Return one row per set of collectives: how many batched ones replace it, and how much time that saves."""
    end_ns = pl.col("start_ns") + pl.col("dur_ns")
    sums = calls.sort("start_ns").group_by(by, maintain_order=True).agg(
        pl.col("step", "phase", "unit", "op", "group", "group_size", "is_fitted").first(),
        pl.col("bytes").median(),
        pl.len().cast(pl.Int64).alias("count"),
        pl.col("latency_ns").median(),
        pl.col("ring_bytes").sum(),
        pl.col("start_ns").first(),
        (end_ns.max() - pl.col("start_ns").min()).alias("dur_ns"),
        pl.col("dur_ns").sum().alias("busy_ns"),
        (pl.col("dur_ns") - pl.col("latency_ns")).sum().alias("moving_ns"),
        pl.col("exposed_ns").sum(),
        pl.col("burst_exposed_ns").first(),
    )  # fmt: skip
    # A burst can be one collective; buckets of gradients must stay small enough to overlap with compute.
    large_enough = (pl.col("moving_ns") / (_TRANSFER_PER_LATENCY * pl.col("latency_ns"))).ceil().clip(1)
    pieces = pl.lit(1.0) if gaps else large_enough
    between_ns = (pl.col("dur_ns") - pl.col("busy_ns")).clip(0) / pl.col("count") if gaps else pl.lit(0.0)
    bound_ns = pl.col("burst_exposed_ns" if gaps else "exposed_ns")
    return (
        sums.with_columns(pl.min_horizontal(pieces, "count").cast(pl.Int64).alias("joined"))
        .with_columns(((pl.col("count") - pl.col("joined")) * (pl.col("latency_ns") + between_ns)).alias("saved_ns"))
        .with_columns(pl.min_horizontal("saved_ns", bound_ns).cast(pl.Int64).alias("lost_ns"))
        .select("window", "rank", "device", "step", "phase", "unit", "op", "group", "group_size", "is_fitted", "bytes",
                "count", "joined", "latency_ns", "start_ns", "dur_ns", "lost_ns")
    )  # fmt: skip


@dataclass(frozen=True)
class ReducedEveryMicroBatch(Rule):
    """Gradients that are reduced in every micro-batch although they are accumulated.

    What it does: reports steps with several backward passes in which earlier passes reduce the same gradients as the
    last one, if the exposed time of these reductions is `min_lost_ratio` of the step or more.

    Why it costs: gradients need one reduction per step. With k micro-batches, k-1 of k reductions move sums that the
    next one moves again.

    How it is measured: all-reduces and reduce-scatters launched in backward, by op, group, size and unit; those of
    earlier passes that the last pass repeats are counted, unless an optimizer steps in between. A backward pass ends
    where a forward pass begins. Collectives that forward launches too are not gradients. Steps that save are left out;
    the message quotes the median step of the worst device.

    How to fix: reduce in the last micro-batch only. DDP and FSDP1: model.no_sync() around the others; FSDP2:
    set_requires_gradient_sync(False), on a mesh of two axes set_requires_all_reduce(False) to skip only the all-reduce,
    and set_is_last_backward(True) for the last. FSDP then stores the unsharded gradients of all units, as the fix
    states; DDP stores them anyway. Or use fewer and larger micro-batches.

    Blind spots: without phases (spans of tracekit.capture, or autograd's own names) passes are unknown. YaFSDP reduces
    in each micro-batch by design, since its two buffers cannot store the gradients of all units: it is not reported.
    ZeRO-2 and ZeRO-3 do the same under pipelines; use ZeRO-1 there.
    """

    code: ClassVar[str] = "COMM003"
    facts: ClassVar[tuple[TraceFact, ...]] = (
        backward_passes.gradient_reductions,
        *save_stages.FACTS,
        workload.strategy_marks,
    )
    min_lost_ratio: float = 0.01

    def blind_spot(self, run: Run) -> str | None:
        """Return why micro-batches cannot be distinguished from steps where no steps are marked."""
        repeated = _repeated_reductions(run.table(backward_passes.gradient_reductions))
        losses = save_stages.losses(run, repeated, "exposed_ns").filter(pl.col("step").is_null())
        if quoted_step.worst_loss(losses, self.min_lost_ratio) is None:
            return None
        return (
            "the trace marks no steps, so it does not show whether its backward passes are micro-batches of one step; "
            "call profiler.step() in every step."
        )

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding if the worst device's typical step exceeds the threshold."""
        strategy = workload.run_strategy(run)
        if strategy == YAFSDP:
            return
        repeated = _repeated_reductions(run.table(backward_passes.gradient_reductions).drop_nulls("step"))
        loss = quoted_step.worst_loss(save_stages.losses(run, repeated, "exposed_ns"), self.min_lost_ratio)
        if loss is None:
            return
        step_rows = loss.rows(repeated)
        passes = int(step_rows["backward_count"].max())  # type: ignore[arg-type]
        unsharded_bytes = int(step_rows.filter(pl.col("backward") == 0)["bytes"].sum())
        yield loss.finding(
            self,
            Severity.WARNING,
            f"Gradients are reduced in each of {passes} backward passes per step, and the last pass repeats "
            f"{step_rows.height} earlier reductions. Their exposed time is {loss}.",
            _REDUCE_ONCE.get(strategy or "", _REDUCE_ANY_ONCE).format(bytes=units.size(unsharded_bytes)),
            confidence=0.8,
            what_if=WhatIf(MICRO_BATCH_REDUCTIONS),
            evidence=quoted_step.evidence(repeated, loss.row, "exposed_ns").select(
                *("window", "rank", "step", "device", "backward", "backward_count", "unit", "op", "group", "bytes"),
                *("start_ns", "dur_ns", "exposed_ns"),
            ),
            claim="Gradients are reduced in every backward pass instead of once per step",
        )


_MEMORY = "Each rank then stores about {bytes} of unsharded gradients until the last one."
_REDUCE_ANY_ONCE = f"Reduce in the last micro-batch only (no_sync(), set_requires_gradient_sync(False)). {_MEMORY}"
_REDUCE_ONCE = {
    DDP: "Reduce in the last micro-batch only: model.no_sync() around the others. It needs no extra memory.",
    FSDP1: f"Reduce in the last micro-batch only: model.no_sync() around the others. {_MEMORY}",
    FSDP2: "Reduce in the last micro-batch only: set_requires_gradient_sync(False) for the others and "
    f"set_is_last_backward(True) for the last. {_MEMORY} On a mesh of two axes, set_requires_all_reduce(False) "
    "saves only the all-reduce and needs no extra memory.",
}
_SAME = ("window", "rank", "device", "step", "updates", "op", "group", "unit", "bytes")


def _repeated_reductions(reductions: pl.DataFrame) -> pl.DataFrame:
    """Return the reductions of earlier backward passes that the last pass of the step repeats."""
    last = reductions.filter(pl.col("backward") == pl.col("backward_count") - 1)
    earlier = reductions.filter(pl.col("backward") < pl.col("backward_count") - 1)
    return earlier.join(last.select(_SAME).unique(), on=_SAME, how="semi", nulls_equal=True, maintain_order="left")
