"""Rules on communication: exposed collectives, and collectives that their preparation delays."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import polars as pl

from tracekit import conventions
from tracekit.analysis.checkpoint import save_stages
from tracekit.analysis.communication import collective_instances, exposed_communication, group_bandwidth
from tracekit.analysis.compute import compute_gap_causes, contention
from tracekit.analysis.parallelism import (
    group_axes,
    pipeline_actions,
    pipeline_communication,
    pipeline_stages,
    rank_places,
    tensor_parallel,
    workload,
)
from tracekit.analysis.time import breakdown
from tracekit.conventions.strategies import DP, DP_REPLICATE, DP_SHARD, TP
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.replay.graph.causes.collectives import COMMUNICATION
from tracekit.rules import communication_fixes, quoted_step
from tracekit.rules.rule import Finding, Rule, Severity, WhatIf, distinct, largest_first
from tracekit.sync import collective_matching

_EVIDENCE_ROWS = 20
_SHORT_TYPES = r"(?i)half|float16|bf16|float8|int8|uint8|byte|char"  # compression to 16 bits gains nothing
_MIN_WAIT_RATIO = 0.02  # share of the step from which the message states the wait for late ranks


@dataclass(frozen=True)
class ExposedCommunication(Rule):
    """Exposed communication: collectives that no compute overlaps.

    What it does: reports runs in which collectives move data while the device computes nothing for more than
    `max_exposed_ratio` of the step. It is an error above `error_exposed_ratio`, and information from
    `info_exposed_ratio` or if a replay without transfers saves less than that.

    Why it costs: the device is idle during exposed communication. Overlapped communication is free.

    How it is measured: per rank and step, the union of all collectives minus the union of all compute in the step's
    device window, less the wait for late ranks: starting a collective earlier does not shorten that wait (see RANK001
    and RANK003). Sends and receives of a pipeline wait for other stages (PIPE001). Each rank is judged by its
    median step, the one with the median share; the message quotes the worst rank. Steps that save a checkpoint
    are left out (see CKPT001). The cost is the saving of a replay in which transfers take no time: less than what is
    exposed, if the device then waits for something else.

    Bandwidth below `slow_bytes_per_ns` GB/s is stated: that of all messages of 4 MiB or more of one op, in groups of
    which every rank has a trace. No link inside a node is that slow (PCIe 3.0 x16 moves 12 GB/s). Inside a node whose
    devices have NVLink or Infinity Fabric, so is bandwidth below `min_link_ratio` of theirs, with messages of 16 MiB or
    more, and the finding is a warning then. Where links connect devices directly, without a switch (V100, MI250X to
    MI355X), a group of n ranks has n - 1 of them: a pair on MI300X one of seven. Ranks are inside a node if run.json,
    their hosts or their devices say so.

    How to fix: start all-gathers earlier (explicit prefetch), use larger units, or send fewer bytes. The fix in the
    finding depends on the strategy (from the manifest, else from the spans in the trace) and on the most exposed
    collective.

    If most of it is tensor parallelism, the finding is information (see TP001 and TP002).

    Blind spots: waits for a rank without a trace, which the message then mentions, and waits shorter than the clock
    error count as communication. On a CPU run, compute is the union of dispatcher ops.
    """

    code: ClassVar[str] = "COMM001"
    facts: ClassVar[tuple[TraceFact, ...]] = (
        *save_stages.FACTS,
        exposed_communication.exposed_calls,
        breakdown.spans,
        exposed_communication.save_collectives,
        workload.strategy_marks,
        workload.marks,
        pipeline_actions.pipeline_actions,
        collective_matching.calls,
        *group_bandwidth.FACTS,
        *rank_places.FACTS,
        tensor_parallel.links,
        contention.device_count,
    )
    info_exposed_ratio: float = 0.1
    max_exposed_ratio: float = 0.2
    error_exposed_ratio: float = 0.6
    slow_bytes_per_ns: float = 2.0
    min_link_ratio: float = 0.1

    def blind_spot(self, run: Run) -> str | None:
        """Return why a run that saves in every step cannot be judged."""
        if save_stages.steps(run).is_empty() and run.table(breakdown.by_step).height:
            return (
                "every profiled step saves a checkpoint, so communication was not judged; profile steps between saves."
            )
        return None

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding for the run if the worst rank's median step exceeds the threshold."""
        steps = _exposed_steps(run)
        over = quoted_step.per_device(steps, "exposed_ratio").filter(
            pl.col("exposed_ratio") > min(self.info_exposed_ratio, self.max_exposed_ratio)
        )
        if over.is_empty():
            return
        worst = over.row(0, named=True)
        collectives = _collectives(run).join(over.select("rank"), on="rank", how="semi")
        severity = self._severity(worst["exposed_ratio"])
        axis = _most_exposed_axis(run, worst)
        if axis == TP:
            severity = Severity.INFO
        slow = _slow_transfers(run, self.slow_bytes_per_ns)
        if not slow and (slow := _slow_for_node(run, self.min_link_ratio)) and axis != TP:
            severity = max(severity, Severity.WARNING)
        yield Finding(
            self.code,
            severity,
            _message(worst, of_pipeline=pipeline_stages.is_pipelined(run))
            + (_MAY_WAIT if worst["rank"] in collective_instances.ranks_without_peers(run) else "")
            + (_OF_TENSOR_PARALLEL if axis == TP else "")
            + slow,
            _fix(run, worst, quoted_step.rows_of(collectives, worst), axis) + (_SLOW_FIX if slow else ""),
            impact=worst["exposed_ratio"],
            cost_ns=worst["exposed_ns"],
            confidence=0.9,
            what_if=WhatIf(COMMUNICATION, self.info_exposed_ratio if severity >= Severity.WARNING else 0.0),
            ranks=distinct(over, "rank"),
            steps=distinct(steps, "step"),
            evidence=_evidence(worst, collectives),
            is_of_window=worst["step"] is None,
        )

    def _severity(self, exposed_ratio: float) -> Severity:
        if exposed_ratio > self.error_exposed_ratio:
            return Severity.ERROR
        return Severity.WARNING if exposed_ratio > self.max_exposed_ratio else Severity.INFO


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
    facts: ClassVar[tuple[TraceFact, ...]] = (
        compute_gap_causes.chains, contention.device_count, workload.strategy_marks, *save_stages.FACTS,
    )  # fmt: skip
    min_lost_ratio: float = 0.02

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding if the worst device's median step exceeds the threshold."""
        chains = _preparation_chains(run)
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
            evidence=quoted_step.evidence(chains, loss.row, "lost_ns", _EVIDENCE_ROWS),
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


def _preparation_chains(run: Run) -> pl.DataFrame:
    """Return the chains on devices that begin with preparation; lost_ns is the longest that compute can wait for it."""
    if not run.table(contention.device_count)["devices"].sum():
        return run.table(compute_gap_causes.chains).clear().with_columns(lost_ns=pl.lit(0, pl.Int64))
    lost_ns = pl.min_horizontal("preparation_ns", pl.col("waited_ns") - pl.col("contention_ns"))
    return run.table(compute_gap_causes.chains).with_columns(lost_ns.alias("lost_ns")).filter(pl.col("lost_ns") > 0)


def _exposed_steps(run: Run) -> pl.DataFrame:
    """Return the exposed communication of steps without saves; exposed_ratio leaves out the wait for late ranks."""
    ratio = (pl.col("exposed_ns") / pl.col("duration_ns")).alias("exposed_ratio")
    return save_stages.without_saves(
        run, run.table(pipeline_communication.exposed_transfers_by_step).filter(pl.col("duration_ns") > 0)
    ).with_columns(ratio)


def _collectives(run: Run) -> pl.DataFrame:
    """Return the exposed collectives of those steps, the most exposed first, without the wait for late ranks."""
    steps = save_stages.steps(run).select("window", "rank", "step", "device").unique()
    return (
        run.table(pipeline_communication.exposed_transfers)
        .filter(pl.col("exposed_ns") > 0)
        .drop("activity_id", "waited_ns")
        .join(steps, on=steps.columns, how="semi", nulls_equal=True)
        .pipe(largest_first, "exposed_ns", "rank", "start_ns")
    )


def _message(worst: dict[str, Any], of_pipeline: bool) -> str:
    message = (
        f"{units.share(worst['exposed_ratio'])} of the {quoted_step.noun(worst)} is exposed communication: "
        f"{units.duration(worst['exposed_ns'])} of {units.duration(worst['duration_ns'])} in "
        f"{quoted_step.describe(worst)}. Compute overlaps {units.share(_overlapped_ratio(worst))} of its "
        "communication."
    )
    if worst["waited_ns"] < _MIN_WAIT_RATIO * worst["duration_ns"]:
        return message
    awaited = f"late ranks{' or other stages of the pipeline' if of_pipeline else ''}"
    return f"{message} The rank waits another {units.duration(worst['waited_ns'])} for {awaited}."


_LARGE_BYTES = 4 << 20  # smaller messages measure latency
_SLOW_FIX = (
    " Find out first why links are this slow: NCCL_DEBUG=INFO shows the transport (NET/Socket instead of NET/IB, SHM "
    "instead of P2P), nvidia-smi topo -m or rocm-smi --showtopo the links, nccl-tests or rccl-tests their speed; unset "
    "NCCL_P2P_DISABLE and NCCL_IB_DISABLE."
)


def _slow_transfers(run: Run, slow_bytes_per_ns: float) -> str:
    """Return a sentence on the op with the longest transfers below a bandwidth; empty where there is none.

    On a CPU run the bandwidth is that of the host.
    """
    if not run.table(contention.device_count)["devices"].sum():
        return ""
    slow = _slowest(_whole_transfers(run, _LARGE_BYTES), slow_bytes_per_ns)
    return slow and f"{slow}, far below any link inside a node."


def _slow_for_node(run: Run, min_link_ratio: float) -> str:
    """Return a sentence on the op with the longest transfers inside nodes that are slow for the devices' links.

    Of groups of several sizes, the largest is stated.
    """
    calls = _whole_transfers(run, tensor_parallel.FULL_RATE_BYTES)
    groups = calls["ranks"].unique().to_list()
    inside = calls.filter(pl.col("ranks").is_in([ranks for ranks in groups if rank_places.share_node(run, ranks)]))
    for (size,), of_size in sorted(inside.partition_by("group_size", as_dict=True).items(), reverse=True):
        link = tensor_parallel.link_bandwidth(run, size)
        slow = link and _slowest(of_size, min_link_ratio * link / collective_instances.SECOND_NS)
        if link and slow:
            peers = "the other rank" if size <= 2 else f"the other {size - 1} ranks"
            return f"{slow} inside a node, where a device's links carry {units.rate(link)} to {peers}."
    return ""


def _whole_transfers(run: Run, least_bytes: int) -> pl.DataFrame:
    """Return the large transfers of groups of which every rank has a trace: one without may arrive late."""
    is_whole = pl.col("ranks").list.len() >= pl.col("group_size")
    return run.table(group_bandwidth.transfers).filter(is_whole, pl.col("bytes") >= least_bytes)


def _slowest(large: pl.DataFrame, slow_bytes_per_ns: float) -> str:
    """Sentence on the speed of the op with the longest transfers below a bandwidth; empty where there is none."""
    bus_bytes = (pl.col("bytes") * collective_instances.bus_factor()).sum().alias("bus_bytes")
    sums = large.group_by("op").agg(bus_bytes, pl.col("transfer_ns").sum(), pl.len().alias("calls"))
    slow = sums.filter(pl.col("bus_bytes") < slow_bytes_per_ns * pl.col("transfer_ns"))
    if slow.is_empty():
        return ""
    row = largest_first(slow, "transfer_ns", "op").row(0, named=True)
    speed = units.rate(row["bus_bytes"] * collective_instances.SECOND_NS / row["transfer_ns"])
    return f" Its {row['calls']:,} large {row['op'].replace('_', '-')} collectives have a bus bandwidth of {speed}"


def _evidence(worst: dict[str, Any], exposed: pl.DataFrame) -> pl.DataFrame:
    """Return the quoted step's collectives, a row for that step, then the most exposed of other steps and ranks."""
    collectives = exposed.drop("dtype")
    step_row = pl.DataFrame(
        [
            {name: worst[name] for name in quoted_step.KEY}
            | {"name": "whole step", "op": "whole step"}
            | {"exposed_ns": worst["exposed_ns"], "step_ns": worst["duration_ns"]}
        ],
        schema_overrides={name: collectives.schema[name] for name in quoted_step.KEY},
    )
    step_calls = quoted_step.rows_of(collectives, worst)
    other_calls = collectives.join(step_calls, on=["window", "rank", "lane", "start_ns"], how="anti")
    parts = [step_calls.head(_EVIDENCE_ROWS), step_row, other_calls.head(_EVIDENCE_ROWS)]
    return pl.concat(parts, how="diagonal").select(*collectives.columns, "step_ns")


def _overlapped_ratio(worst: dict[str, Any]) -> float:
    return float(worst["overlapped_ns"] / worst["communication_ns"]) if worst["communication_ns"] else 0.0


_MAY_WAIT = " Some of it may be waiting for ranks without a trace."
_OF_TENSOR_PARALLEL = " Most of it is tensor parallelism: see TP001 and TP002."


def _most_exposed_axis(run: Run, worst: dict[str, Any]) -> str | None:
    """Return the axis with more than half of the exposed transfers of a step; None where it is not stated or unclear.

    An inferred axis does not change what this rule says.
    """
    stated = run.table(group_axes.group_axes).filter(pl.col("source") != group_axes.INFERRED)
    if not stated["axis"].is_in([TP, *_DATA_AXES]).any():
        return None
    key = ["window", "rank", "activity_id"]
    axes = run.table(group_axes.axis_of_calls).join(stated.select("group", "members"), on=["group", "members"])
    step_calls = quoted_step.rows_of(run.table(exposed_communication.exposed_transfers), worst)
    sums = step_calls.join(axes.select(*key, "axis"), on=key).group_by("axis").agg(pl.col("exposed_ns").sum())
    dominant = sums.filter(pl.col("exposed_ns") * 2 > step_calls["exposed_ns"].sum())
    return None if dominant.is_empty() else str(dominant["axis"][0])


def _fix(run: Run, worst: dict[str, Any], step_calls: pl.DataFrame, axis: str | None) -> str:
    time = largest_first(step_calls.group_by("op").agg(pl.col("exposed_ns").sum()), "exposed_ns", "op")
    op = time["op"][0] if time.height else None
    gloo = bool(step_calls["name"].str.starts_with("gloo:").any())
    costliest = step_calls.filter(pl.col("op").eq_missing(pl.lit(op)))
    backward_ns = costliest.filter(pl.col("phase") == conventions.BACKWARD)["exposed_ns"].sum()
    return communication_fixes.fix_for(
        strategy=workload.run_strategy(run) or (workload.DDP if axis in _DATA_AXES and op == "all_reduce" else None),
        op=op,
        gloo=gloo,
        overlapped_ratio=_overlapped_ratio(worst),
        is_short=bool(costliest["dtype"].drop_nulls().str.contains(_SHORT_TYPES).all() and costliest["dtype"].count()),
        in_backward=_in_backward(costliest, int(backward_ns), axis),
        infers=workload.is_inference(run),
    )


_DATA_AXES = (DP, DP_REPLICATE, DP_SHARD)


def _in_backward(costliest: pl.DataFrame, backward_ns: int, axis: str | None) -> bool | None:
    """Return whether collectives are of gradients; None where neither axis nor phase is known."""
    if axis in _DATA_AXES:
        return True
    return backward_ns * 2 > int(costliest["exposed_ns"].sum()) if costliest["phase"].count() else None
