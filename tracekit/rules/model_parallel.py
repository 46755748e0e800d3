"""Rules on tensor and expert parallelism: groups across nodes, exposed communication, overloaded experts."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import polars as pl

from tracekit.analysis.communication import collective_instances
from tracekit.analysis.parallelism import axis_communication, expert_load, group_axes, tensor_parallel
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
    facts: ClassVar[tuple[TraceFact, ...]] = tensor_parallel.FACTS
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
    "topo -m or rocm-smi --showtopo the links, nccl-tests or rccl-tests (all_reduce_perf) their speed. On machines "
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
            f"The experts of {units.numbered('rank', ranks)} are overloaded: those of "
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
        )


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
