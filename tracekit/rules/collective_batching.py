"""Rules on collectives that could be batched: many small ones, and gradients reduced in every micro-batch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import polars as pl

from tracekit.analysis.checkpoint import save_stages
from tracekit.analysis.communication import issuers, latency
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


@dataclass(frozen=True)
class SmallCollectives(Rule):
    """Small collectives whose latency takes longer than their data transfer.

    What it does: reports runs that lose `min_lost_ratio` of the step or more to the latency of collectives that could
    be batched: at least four launched one after the other, and, where they are mostly latency, those with compute
    between them: gradient reductions of a backward pass, FSDP's of one pass, and those that the optimizer or the
    program itself issues between backward and the next forward pass.

    Why it costs: every collective of n ranks passes n-1 links in sequence before its data flows, and the host launches
    each one separately.

    How it is measured: a line fitted to the run's own times by size, without waiting for late ranks, gives each group's
    latency and bandwidth. Where sizes are too similar for a fit, latency is the time of messages below 1 MiB (DDP's
    first bucket) beyond what their bytes need at 2 GB/s, or on hosts (gloo) at 0.1 GB/s; else 5 µs per hop are assumed,
    which the message states. Batches with compute between them are only so large that latency is a fifth of their time,
    so that they still overlap. The loss is the latency of the collectives that batching removes and the pauses between
    them, as far as compute is idle meanwhile. Steps that save are left out; the message quotes the median step of the
    worst device. The cost is the saving of a replay in which these collectives take only the time of their bytes.

    How to fix: a larger DistributedDataParallel(bucket_cap_mb=…); under FSDP2 fully_shard on larger blocks (or several
    modules as one unit: fully_shard([a, b])), under FSDP1 a wider auto_wrap_policy; the program's own in one call:
    torch.distributed._coalescing_manager, all_gather_into_tensor and reduce_scatter_tensor on flat buffers,
    torch._foreach_ ops and one all_reduce instead of one per tensor.

    The advice follows who issued them (`analysis/communication/issuers.py`).

    Blind spots: collectives in forward and backward that no wrapper issues (tensor parallelism) are assumed to be
    needed at once. NCCL changes its protocol with size, so no line fits all sizes. Late ranks without a trace look like
    latency.
    """

    code: ClassVar[str] = "COMM002"
    fix_without_pytorch: ClassVar[str] = (
        "Batch them: one collective on one flat buffer for several arrays, or ncclGroupStart and ncclGroupEnd around"
        " them."
    )
    facts: ClassVar[tuple[TraceFact, ...]] = (
        *latency.FACTS, collective_matching.calls, *save_stages.FACTS, workload.strategy_marks,
    )  # fmt: skip
    min_lost_ratio: float = 0.02

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding if the worst device's typical step exceeds the threshold."""
        small = _losses(run)
        loss = quoted_step.worst_loss(save_stages.losses(run, small, "lost_ns"), self.min_lost_ratio)
        if loss is None:
            return
        step_calls = largest_first(loss.rows(small).filter(pl.col("lost_ns") > 0), "lost_ns", "start_ns")
        largest = step_calls.row(0, named=True)
        assumed = "" if largest["is_measured"] else " (assumed: the sizes in this run are too similar to measure it)"
        yield loss.finding(
            self,
            Severity.WARNING,
            f"{int(step_calls['count'].sum()):,} small collectives, such as {largest['op'].replace('_', '-')} of "
            f"{units.size(int(largest['bytes']))}, lose {loss} to latency, about "
            f"{units.duration(int(largest['latency_ns']))} each{assumed}. Batching them into "
            f"{int(step_calls['joined'].sum()):,} saves that time.",
            _batch_fix(workload.run_strategy(run), largest),
            confidence=0.7 if largest["is_measured"] else 0.5,
            what_if=WhatIf(SMALL_COLLECTIVES),
            evidence=quoted_step.evidence(small, loss.row, "lost_ns").select(
                *_EVIDENCE_COLUMNS, "count", "joined", "latency_ns", "start_ns", "dur_ns", "lost_ns"
            ),
            claim=f"Small collectives ({largest['op'].replace('_', '-')}) of rank {largest['rank']} are latency-bound",
        )


def _losses(run: Run) -> pl.DataFrame:
    """Loss of each batch of collectives to latency: columns of one of its calls, count, joined, latency_ns, lost_ns."""
    calls = run.table(latency.batchable_calls)
    end_ns = pl.col("start_ns") + pl.col("dur_ns")
    sums = calls.group_by("window", "rank", "device", "burst", "pool", maintain_order=True).agg(
        pl.col("step", "phase", "unit", "op", "group", "group_size", "is_measured").first(),
        pl.col("issuer", "line", "in_model", "joined").first(),
        pl.col("bytes").median(),
        pl.len().cast(pl.Int64).alias("count"),
        pl.col("latency_ns").median(),
        pl.col("latency_ns").filter("is_merged").sum().alias("merged_ns"),
        pl.col("start_ns").first(),
        (end_ns.max() - pl.col("start_ns").min()).alias("dur_ns"),
        pl.col("dur_ns").sum().alias("busy_ns"),
        pl.col("exposed_ns").sum(),
        pl.col("burst_exposed_ns").first(),
    )  # fmt: skip
    # The pauses between the collectives of a burst end, too; between those of a pool is compute.
    is_burst = pl.col("burst").is_not_null()
    pauses_ns = (pl.col("dur_ns") - pl.col("busy_ns")).clip(0) * (1 - pl.col("joined") / pl.col("count"))
    saved_ns = pl.col("merged_ns") + pl.when(is_burst).then(pauses_ns).otherwise(0.0)
    bound_ns = pl.when(is_burst).then("burst_exposed_ns").otherwise("exposed_ns")
    return (
        sums.with_columns(pl.min_horizontal(saved_ns, bound_ns).cast(pl.Int64).alias("lost_ns"))
        .drop("burst", "pool", "merged_ns", "busy_ns", "exposed_ns", "burst_exposed_ns")
        .sort("window", "rank", "start_ns")
    )


_LARGER_FIXES = {
    DDP: "Use larger buckets: DistributedDataParallel(bucket_cap_mb=…), several times the current value.",
    FSDP1: "Wrap larger blocks: an auto_wrap_policy that makes one or several whole layers a unit.",
    FSDP2: (
        "Shard larger units: fully_shard on whole layers or on several at once (fully_shard([a, b])), not on single "
        "matrices."
    ),
    YAFSDP: "Shard larger units: whole layers, not single matrices.",
}
_BATCH_FIX = "Batch them: one flat buffer for several tensors, or torch.distributed._coalescing_manager."
_ISSUER_FIXES = {
    issuers.PROGRAM: (
        "The program's own code issues them{line}: issue one for all tensors instead of one for each (a flat buffer, "
        "torch.distributed._coalescing_manager, or torch._foreach_ ops before one all_reduce)."
    ),
    issuers.DTENSOR: (
        "Each op on a DTensor (full_tensor(), redistribute()) issues its own collective{line}: compute on the local "
        "shards and reduce once for all parameters, as torch.nn.utils.clip_grad_norm_ does for clipping."
    ),
    issuers.OPTIMIZER: (
        "The optimizer issues them for one parameter each{line}: let it communicate in buckets or flat buffers of many "
        "parameters, or update only local shards."
    ),
}


def _batch_fix(strategy: str | None, batch: dict[str, Any]) -> str:
    """Fix by who issued the costliest batch; where that is not known, by the strategy, if its wrapper has such ops."""
    issuer, op = batch["issuer"], batch["op"]
    if issuer in _ISSUER_FIXES and not batch["in_model"]:
        return _ISSUER_FIXES[issuer].format(line=issuer_line(batch["line"]))
    if issuer == issuers.DDP:
        return _LARGER_FIXES[DDP]
    if issuer == issuers.FSDP:
        return _LARGER_FIXES[strategy if strategy in (FSDP1, YAFSDP) else FSDP2]
    return _LARGER_FIXES[strategy] if strategy is not None and op in _WRAPPED_OPS.get(strategy, ()) else _BATCH_FIX


def issuer_line(line: str | None) -> str:
    """Where the program issues collectives, such as " in train.py(12): clip"; "" where no stacks were recorded."""
    return f" in {line}" if line else ""


_WRAPPED_OPS = {DDP: ("all_reduce",)} | dict.fromkeys((FSDP1, FSDP2, YAFSDP), ("all_gather", "reduce_scatter"))
"""The collectives that a wrapper itself starts: its settings batch no others."""
_EVIDENCE_COLUMNS = (
    "window",
    "rank",
    "step",
    "device",
    "phase",
    "unit",
    "op",
    "issuer",
    "group",
    "group_size",
    "bytes",
)


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
    fix_without_pytorch: ClassVar[str] = "Add up locally, and reduce once after the last part."
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
