"""Rules on tensor and expert parallelism, and on how pipelines send and shard micro-batches."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import polars as pl

from tracekit.analysis.communication import collective_instances
from tracekit.analysis.parallelism import (
    axis_communication,
    expert_load,
    group_axes,
    pipeline_bubbles,
    pipeline_communication,
    tensor_parallel,
)
from tracekit.analysis.time import breakdown
from tracekit.conventions.strategies import TP
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.replay.graph.causes.collectives import UNBALANCED_EXPERTS
from tracekit.rules import quoted_step
from tracekit.rules.rule import Finding, Rule, Severity, WhatIf, distinct, largest_first, median_row

_EVIDENCE_ROWS = 40
_NODE_SPEEDUP = 5.0
"""How many times as fast links inside a node are at least, where no group inside a node shows it."""


@dataclass(frozen=True)
class TensorParallelAcrossNodes(Rule):
    """Tensor parallelism across nodes.

    What it does: reports tensor-parallel groups whose ranks are on several nodes, if their exposed communication costs
    `min_lost_ratio` of the step.

    Why it costs: tensor parallelism communicates several times per layer, and the next kernel waits for each result.
    Links between nodes are several times slower than NVLink inside a node.

    How it is measured: ranks are on the nodes that run.json states (GPUs per node), else a node begins where device
    indices start again. The cost is the exposed transfer time of these collectives, without waits, times the share that
    links inside a node would save: by the bus bandwidth of groups inside a node, where there are any, else a factor
    of 5.

    How to fix: make tp at most the GPUs of a node, with tp the innermost axis of the mesh (ranks of a group
    consecutive); use pipeline or data parallelism between nodes.

    Blind spots: nodes must be known. On nodes with NVLink between them (NVL72) this is not a problem.
    """

    code: ClassVar[str] = "TP001"
    facts: ClassVar[tuple[TraceFact, ...]] = tensor_parallel.FACTS
    min_lost_ratio: float = 0.02

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding for all groups across nodes."""
        if not axis_communication.has_calls(run, TP) or not (groups := tensor_parallel.groups_across_nodes(run)):
            return
        members = sorted({rank for ranks in groups for rank in ranks})
        steps = run.table(tensor_parallel.exposed_by_step).filter(pl.col("rank").is_in(members))
        if steps.is_empty():
            return
        axis_groups = tensor_parallel.named_groups(run)["ranks"].to_list()
        speed = tensor_parallel.bus_bandwidth(run, [ranks for ranks in groups if ranks in axis_groups], inside=False)
        inside = tensor_parallel.bus_bandwidth(run, groups, inside=True)
        saved = 1 - min(1.0, speed / inside) if speed and inside and inside > speed else 1 - 1 / _NODE_SPEEDUP
        worst = median_row(steps, "transfer_ns", "rank", "step")
        cost_ns = int(saved * worst["transfer_ns"])
        ratio = cost_ns / worst["duration_ns"]
        if ratio < self.min_lost_ratio:
            return
        bandwidth = f" Their bus bandwidth is {units.rate(speed)}." if speed else ""
        yield Finding(
            self.code,
            Severity.WARNING,
            f"{len(groups)} tensor-parallel groups, such as ranks {units.ranges(groups[0])}, are on several nodes: "
            f"{units.duration(worst['transfer_ns'])} of {units.duration(worst['duration_ns'])} "
            f"({units.share(worst['transfer_ns'] / worst['duration_ns'])}) of {quoted_step.place(worst['step'])} is "
            f"their exposed transfer time; links inside a node would save about {units.duration(cost_ns)}.{bandwidth}",
            "Keep each tensor-parallel group inside one node: tp at most the GPUs of a node and the innermost axis of "
            "the mesh; use pipeline or data parallelism between nodes.",
            impact=min(1.0, ratio),
            cost_ns=cost_ns,
            confidence=0.8,
            ranks=tuple(members),
            steps=distinct(steps, "step"),
            evidence=_evidence(run, worst),
            is_of_window=worst["step"] is None,
            claim="Tensor-parallel groups span several nodes",
        )


@dataclass(frozen=True)
class ExposedTensorParallel(Rule):
    """Exposed communication of tensor parallelism.

    What it does: reports runs in which tensor-parallel collectives run without compute for more than
    `max_exposed_ratio` of the step: how much of it is transfer, how much waiting for late ranks, and how long per
    pass of a micro-batch through a layer. It is a warning if the transfer alone is that much, or if it is
    `min_slow_ratio` of the step at a slow bus bandwidth: below `slow_bytes_per_ns` GB/s, or half of what the device's
    NVLink or Infinity Fabric carries in one direction to the group, if that is less; or, of collectives of 16 MiB or
    more, below `min_link_ratio` of what it carries. Else it is information. Groups across nodes belong to TP001.

    Why it costs: the result of an all-reduce of activations is needed at once, so nothing hides it: two all-reduces per
    layer in forward and two in backward.

    How it is measured: the axis of each group comes from its description, the manifest, or its collectives (see
    docs/parallelism.md). Exposed time is the time of its collectives in which the device computes nothing, per rank
    and step; transfer is what remains after all ranks have arrived. The message quotes the median step. A pass
    through a layer has two large all-reduces in forward, or in all if phases are not known; with sequence
    parallelism, two all-gathers and two reduce-scatters. The cost is the transfer.

    How to fix: overlap each collective with its matrix product (async tensor parallelism: torch.compile with
    torch._inductor.config._micro_pipeline_tp, --tp-comm-overlap of Megatron-LM) together with sequence parallelism;
    a smaller tensor-parallel group; larger micro-batches. Check slow links with nccl-tests. For waiting see RANK001 and
    HOST001.

    Blind spots: an inferred axis can be wrong: its confidence is in the message. Ranks whose peers have no trace are
    left out, for nothing shows how long they wait; if there are no others, the message says so.
    """

    code: ClassVar[str] = "TP002"
    part_of: ClassVar[str] = "COMM001"
    facts: ClassVar[tuple[TraceFact, ...]] = (*tensor_parallel.FACTS, *collective_instances.PEER_FACTS)
    max_exposed_ratio: float = 0.2
    min_slow_ratio: float = 0.05
    slow_bytes_per_ns: float = 50.0
    min_link_ratio: float = 0.25

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding if the median step is above the threshold."""
        steps = run.table(tensor_parallel.exposed_by_step)
        if steps.is_empty() or tensor_parallel.groups_across_nodes(run):
            return
        without_peers = collective_instances.ranks_without_peers(run)
        complete = steps.filter(~pl.col("rank").is_in(without_peers))
        steps = steps if complete.is_empty() else complete
        worst = median_row(steps, "exposed_ratio", "rank", "step")
        transfer_ratio = worst["transfer_ns"] / worst["duration_ns"]
        groups = tensor_parallel.named_groups(run)["ranks"].to_list()
        speed = tensor_parallel.bus_bandwidth(run, groups, inside=False)
        is_slow = transfer_ratio >= self.min_slow_ratio and self._is_slow(run, groups, speed)
        source, confidence = _source(run)
        if worst["exposed_ratio"] <= self.max_exposed_ratio and not is_slow:
            return
        is_known = not complete.is_empty()
        is_warning = is_slow or transfer_ratio > self.max_exposed_ratio
        advice = _OVERLAP if is_warning else _WAITING
        per_pass = ""
        if worst["passes"]:  # else messages are of less than a layer's activations
            per_pass_ns, passes = worst["per_pass_ns"], worst["passes"]
            per_pass = f", {units.duration(per_pass_ns)} for each of {passes} passes of a micro-batch through a layer"
        yield Finding(
            self.code,
            Severity.WARNING if is_warning else Severity.INFO,
            f"Tensor-parallel collectives (axis tp, {source}) are exposed for "
            f"{units.duration(worst['exposed_ns'])} of {units.duration(worst['duration_ns'])} "
            f"({units.share(worst['exposed_ratio'])}) in {quoted_step.place(worst['step'])} of rank {worst['rank']}: "
            f"{units.duration(worst['transfer_ns'])} {'transfer' if is_known else _UNKNOWN} and "
            f"{units.duration(worst['waited_ns'])} waiting for late ranks{per_pass}."
            + (f" Their bus bandwidth is {units.rate(speed)}." if speed else ""),
            _SLOW if is_slow else advice,
            impact=min(1.0, transfer_ratio),
            cost_ns=worst["transfer_ns"],
            confidence=min(0.9, confidence),
            ranks=distinct(steps, "rank"),
            steps=distinct(steps, "step"),
            evidence=_evidence(run, worst),
            is_of_window=worst["step"] is None,
            claim=f"Tensor-parallel collectives are not overlapped with compute on rank {worst['rank']}",
        )

    def _is_slow(self, run: Run, groups: list[list[int]], speed: float | None) -> bool:
        """Return whether the links are slow by themselves, or for the kind of device."""
        link = tensor_parallel.link_bandwidth(run, max(map(len, groups), default=0))
        min_speed = min(self.slow_bytes_per_ns * 1e9, link / 2 if link else math.inf)
        if speed and speed < min_speed:
            return True
        full_bytes = tensor_parallel.FULL_RATE_BYTES
        full_speed = tensor_parallel.bus_bandwidth(run, groups, inside=False, least_bytes=full_bytes)
        return bool(full_speed and link and full_speed < self.min_link_ratio * link)


_OVERLAP = (
    "Overlap each collective with its matrix product: sequence parallelism with async tensor parallelism "
    "(torch._inductor.config._micro_pipeline_tp, --tp-comm-overlap of Megatron-LM). Or use a smaller "
    "tensor-parallel group and more pipeline or data parallelism."
)

_SLOW = (
    "Find out why the links are slow: NCCL_DEBUG=INFO shows the transport (SHM or NET instead of P2P), nvidia-smi "
    "topo -m the links, nccl-tests (all_reduce_perf) their speed. On machines "
    "without NVLink or Infinity Fabric use pipeline or data parallelism instead of tensor parallelism."
)

_UNKNOWN = "transfer or waiting for ranks without a trace"

_WAITING = "Most of it is waiting for late ranks: see RANK001, RANK003 and HOST001. The transfer itself is short."


@dataclass(frozen=True)
class OverloadedExperts(Rule):
    """Overloaded experts: the experts of some ranks get more tokens than those of others.

    What it does: reports ranks whose experts get `min_load_ratio` times the mean of their group, in the median over
    layers and steps, if that costs `min_lost_ratio` of the step. It says how long the others wait.

    Why it costs: all ranks of an expert-parallel group wait in the second all-to-all of each layer for the rank with
    most tokens.

    How it is measured: all-to-alls of axis ep come in pairs: the first brings tokens to the experts, the second returns
    as many bytes. The load of a rank is what the first brings it; the time of its experts is the compute between the
    two. The message quotes the median step: over all pairs, the time of the rank with the highest load, less
    what it would take with the mean load. The cost is from a replay in which all ranks of a group get equally many
    tokens.

    How to fix: raise the coefficient of the load-balancing loss, use a bias per expert (loss-free balancing), a
    capacity factor that drops tokens, or place a busy expert with idle ones or on several ranks.

    Blind spots: needs message sizes, and pairs of all-to-alls without others between them (batches that overlap are not
    judged). Kernels with padding to a fixed capacity have equal messages: their waste is not seen.
    """

    code: ClassVar[str] = "EP001"
    facts: ClassVar[tuple[TraceFact, ...]] = (*expert_load.FACTS, breakdown.by_step)
    min_load_ratio: float = 1.05
    min_lost_ratio: float = 0.02

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding for all ranks with overloaded experts."""
        loads = run.table(expert_load.expert_load)
        if loads.is_empty():
            return
        medians = loads.group_by("rank").agg(pl.col("load_ratio").median()).sort("rank")
        hot = medians.filter(pl.col("load_ratio") >= self.min_load_ratio)
        steps = _losses(run, loads)
        if hot.is_empty() or steps.is_empty():
            return
        worst = median_row(steps, "lost_ratio", "step")
        if worst["lost_ratio"] < self.min_lost_ratio:
            return
        ranks = distinct(hot, "rank")
        hottest = largest_first(hot, "load_ratio", "rank").row(0, named=True)
        yield Finding(
            self.code,
            Severity.WARNING,
            f"The experts of {units.numbers('rank', ranks)} are overloaded: those of "
            f"rank {hottest['rank']} get {hottest['load_ratio']:.2f} times the mean of their group. The other ranks "
            f"wait {units.duration(worst['lost_ns'])} of {units.duration(worst['duration_ns'])} "
            f"({units.share(worst['lost_ratio'])}) for rank {hottest['rank']} in {quoted_step.place(worst['step'])}.",
            "Balance the experts: a larger coefficient of the load-balancing loss, a bias per expert (loss-free "
            "balancing), a capacity factor; or place busy experts with idle ones, or on several ranks.",
            impact=min(1.0, worst["lost_ratio"]),
            cost_ns=worst["lost_ns"],
            confidence=0.8,
            ranks=ranks,
            steps=distinct(loads, "step"),
            evidence=largest_first(loads, "load_ratio", "rank", "start_ns")
            .drop("members", "first_id", "second_id")
            .head(_EVIDENCE_ROWS),
            is_of_window=worst["step"] is None,
            what_if=WhatIf(UNBALANCED_EXPERTS),
            claim=f"The experts of {units.numbers('rank', ranks)} are overloaded; other ranks wait for them",
        )


@dataclass(frozen=True)
class ShardedMicroBatches(Rule):
    """ZeRO stage 2 or 3 under pipeline parallelism: gradients or weights communicated for every micro-batch.

    What it does: reports data-parallel reduce-scatters or all-gathers that run for `min_micro_batches` or more
    micro-batches of a step, at least half of them. It is a warning if they make the pipeline `min_lost_ratio`
    longer than those of one micro-batch would, else information.

    Why it costs: a pipeline runs many micro-batches per step. ZeRO stage 1 reduces gradients once per step; stage 2
    reduces them, and stage 3 (FSDP with resharding) also gathers weights, for each micro-batch. Pipeline stages already
    divide gradients and weights, so sharding them further saves little memory. DeepSpeed refuses stages 2 and 3 here.

    How it is measured: each all-gather and reduce-scatter of a data-parallel axis belongs to the last action of the
    pipeline that its host began before it. The recorded actions are scheduled again on links without cost, with
    the exposed time of these collectives in them, right before them and after the last one, and with that of one
    micro-batch: the cost is the difference.

    How to fix: shard the optimizer only: ZeRO stage 1 (ZeroRedundancyOptimizer, zero_optimization.stage 1,
    --use-distributed-optimizer). With FSDP keep weights (reshard_after_forward=False) and reduce gradients at the last
    micro-batch only (set_requires_gradient_sync).

    Blind spots: needs the axis of the groups. A collective belongs to the micro-batch in which it was launched; where
    launches were not recorded, those that run ahead are attributed to the first micro-batches.
    """

    code: ClassVar[str] = "PIPE004"
    facts: ClassVar[tuple[TraceFact, ...]] = (*pipeline_communication.MICRO_BATCH_FACTS,)
    min_micro_batches: int = 3
    min_lost_ratio: float = 0.01

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding if collectives recur with the micro-batches."""
        rows = run.table(pipeline_communication.sharded_micro_batches)
        often = rows.filter(
            pl.col("with_calls") >= self.min_micro_batches, pl.col("with_calls") * 2 >= pl.col("micro_batches")
        )
        passes = run.table(pipeline_communication.micro_batch_passes)
        if often.is_empty() or passes.is_empty():
            return
        ops = often.group_by("rank", "step", "axis").agg(
            pl.col("op").unique().sort(), pl.col("with_calls", "micro_batches").max(), pl.col("bytes").sum()
        )
        worst = median_row(ops, "bytes", "rank", "step")
        costly = median_row(passes, "lost_ns", "duration_ns")
        lost_ns, duration_ns = costly["lost_ns"], costly["duration_ns"]
        ratio = lost_ns / max(1, duration_ns)
        names = "s and ".join(worst["op"]).replace("_", "-").capitalize()
        stage = 3 if "all_gather" in worst["op"] else 2
        yield Finding(
            self.code,
            Severity.WARNING,
            f"{names}s of {worst['axis']} run for {worst['with_calls']} of {worst['micro_batches']} micro-batches, as "
            f"with ZeRO stage {stage}: {units.size(worst['bytes'])} per step on rank {worst['rank']}. The pipeline "
            f"takes {units.duration(lost_ns)} of {units.duration(duration_ns)} ({units.share(ratio)}) longer than if "
            "they ran for one.",
            "Shard the optimizer only (ZeRO stage 1: ZeroRedundancyOptimizer, zero_optimization.stage 1, "
            "--use-distributed-optimizer): gradients are then reduced once per step. With FSDP: "
            "fully_shard(reshard_after_forward=False) and set_requires_gradient_sync(False) but for the last "
            "micro-batch.",
            impact=min(1.0, ratio),
            cost_ns=lost_ns,
            confidence=0.8,
            ranks=distinct(often, "rank"),
            steps=distinct(often, "step"),
            evidence=largest_first(often, "lost_ns", "rank", "step").head(_EVIDENCE_ROWS),
            is_of_window=worst["step"] is None,
            claim=f"{names}s of {worst['axis']} run for every micro-batch of the pipeline",
        )


@dataclass(frozen=True)
class SlowPipelineLink(Rule):
    """A slow link between two stages of a pipeline.

    What it does: reports two neighboring stages between which results take `min_slowdown` times as long as over other
    links of the same kind, by more than the error of both ranks' clocks, if that costs `min_lost_ratio` of the
    pipeline's time.

    Why it costs: each micro-batch passes the link twice; the stage that receives it waits, and so do all later stages.

    How it is measured: where a rank was waiting already when its input was complete on the neighboring rank, the
    time until its action starts is that of the transfer: waiting for the neighbor is not in it. Links inside a node
    are compared with each other, and links between nodes; also with the same link of other replicas. At most a
    quarter of the transfers may be less than `min_slowdown` times as slow. The cost is the difference between two
    schedules of the recorded actions, with the link's median time and with the usual one.

    How to fix: check the link: nvidia-smi topo -m and nvlink -s inside a node; ibstat, link errors and NCCL_IB_HCA
    between nodes; NCCL_DEBUG=INFO shows the transport of each peer. Move the node out of the pipeline meanwhile.

    Blind spots: a pipeline with one link of its kind has nothing to compare with. Nodes are known by GPUs per node in
    run.json or by device indices. The time includes the launch of the action.
    """

    code: ClassVar[str] = "PIPE005"
    facts: ClassVar[tuple[TraceFact, ...]] = pipeline_communication.FACTS
    min_slowdown: float = 3.0
    min_lost_ratio: float = 0.002

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding per pair of stages with a slow link."""
        if run.table(pipeline_bubbles.pipeline_bubbles).is_empty():
            return
        links = _with_clock_errors(run, run.table(pipeline_communication.links).drop_nulls("usual_ns"))
        slow = links.filter(
            pl.col("low_ns") >= self.min_slowdown * pl.col("usual_ns"),
            pl.col("low_ns") - pl.col("usual_ns") > pl.col("clock_error_ns"),
            pl.col("saved_ns") >= self.min_lost_ratio * pl.col("duration_ns"),
        )
        pair = pl.concat_list(
            pl.min_horizontal("source_stage", "rank_stage"), pl.max_horizontal("source_stage", "rank_stage")
        )
        for (stages,), rows in slow.with_columns(pair.alias("pair")).group_by("pair", maintain_order=True):
            yield self._finding(rows, stages, distinct(run.table(pipeline_bubbles.pipeline_bubbles), "step"))

    def _finding(self, rows: pl.DataFrame, stages: object, steps: tuple[int, ...]) -> Finding:
        worst = largest_first(rows, "saved_ns", "rank").row(0, named=True)
        first, second = list(stages) if isinstance(stages, (list, pl.Series)) else (0, 0)
        ratio = worst["saved_ns"] / max(1, worst["duration_ns"])
        ranks = tuple(sorted({*distinct(rows, "rank"), *distinct(rows, "source_rank")}))
        return Finding(
            self.code,
            Severity.WARNING,
            f"The link between stages {first} and {second} (ranks {units.ranges(ranks)}) is slow: a result takes "
            f"{units.duration(worst['delay_ns'])} from rank {worst['source_rank']} to rank {worst['rank']}, "
            f"{units.duration(worst['usual_ns'])} over similar links. That costs {units.duration(worst['saved_ns'])} "
            f"of {units.duration(worst['duration_ns'])} ({units.share(ratio)}).",
            f"Check the link between ranks {worst['source_rank']} and {worst['rank']}: NCCL_DEBUG=INFO (transport), "
            "nvidia-smi topo -m and nvlink -s inside a node, ibstat and NCCL_IB_HCA between nodes; nccl-tests "
            "(sendrecv_perf) measures it.",
            impact=min(1.0, ratio),
            cost_ns=worst["saved_ns"],
            confidence=0.7,
            ranks=ranks,
            steps=steps,
            evidence=rows.drop("pair").head(_EVIDENCE_ROWS),
            subject=f"stages {first} and {second}",
            claim=f"The link between stages {first} and {second} is slow",
        )


def _with_clock_errors(run: Run, links: pl.DataFrame) -> pl.DataFrame:
    """Return links with clock_error_ns: by how much the clocks of both ranks may be off, 0 where that is not known."""
    residual_ns = run.offsets.group_by("rank").agg(pl.col("residual_ns").max().fill_null(0))
    for name in ("rank", "source_rank"):
        errors = residual_ns.rename({"rank": name, "residual_ns": f"{name}_error_ns"})
        links = links.join(errors, on=name, how="left", maintain_order="left")
    errors_ns = [pl.col(f"{name}_error_ns").fill_null(0) for name in ("rank", "source_rank")]
    return links.with_columns(pl.sum_horizontal(errors_ns).alias("clock_error_ns")).drop("^.*rank_error_ns$")


def overloaded_ranks(run: Run) -> frozenset[int]:
    """Return the ranks that EP001 reports: they are late for their tokens, and no stragglers."""
    return frozenset(rank for finding in OverloadedExperts().check(run) for rank in finding.ranks)


def _source(run: Run) -> tuple[str, float]:
    """Evidence that collectives are of tensor parallelism, and how sure that is."""
    groups = tensor_parallel.named_groups(run)
    sources = axis_communication.sources(run).filter(pl.col("axis") == TP) if groups.is_empty() else groups
    row = sources.sort("confidence").row(0, named=True)
    if row["source"] == group_axes.INFERRED:
        return f"inferred, confidence {row['confidence']:.0%}", row["confidence"]
    by = "group description" if row["source"] == group_axes.DESCRIPTION else "manifest"
    return f"by the {by}", row["confidence"]


def _evidence(run: Run, worst: dict[str, Any]) -> pl.DataFrame:
    calls = run.table(tensor_parallel.exposed_calls).filter(pl.col("rank") == worst["rank"])
    with_durations = calls.with_columns((pl.col("end_ns") - pl.col("start_ns")).alias("dur_ns"))
    ordered = largest_first(with_durations, "all_exposed_ns", "start_ns").head(_EVIDENCE_ROWS)
    return ordered.select(
        "window", "rank", "step", "phase", "op", "bytes", "start_ns", "dur_ns", "all_exposed_ns", "exposed_ns"
    )


def _losses(run: Run, loads: pl.DataFrame) -> pl.DataFrame:
    """Loss of each step to the rank with the highest load in each pair, in the group that loses most."""
    of_layer = ["window", "step", "group", "members", "layer"]
    hottest = loads.sort("load_ratio", descending=True).group_by(of_layer, maintain_order=True).first()
    lost_ns = (pl.col("expert_ns") - pl.col("balanced_ns")).sum().alias("lost_ns")
    of_group = hottest.group_by("window", "step", "group", "members").agg(lost_ns)
    worst = of_group.group_by("window", "step").agg(pl.col("lost_ns").max())
    steps = run.table(breakdown.by_step).group_by("window", "step").agg(pl.col("duration_ns").median().cast(pl.Int64))
    joined = worst.join(steps, on=["window", "step"], nulls_equal=True).filter(pl.col("duration_ns") > 0)
    return joined.with_columns((pl.col("lost_ns") / pl.col("duration_ns")).alias("lost_ratio"))
