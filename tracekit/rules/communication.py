"""The rule on exposed communication, and its fixes by strategy, collective and backend."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import polars as pl

from tracekit import conventions
from tracekit.analysis.checkpoint import save_stages
from tracekit.analysis.communication import (
    collective_instances,
    exposed_communication,
    group_bandwidth,
    issuers,
    latency,
)
from tracekit.analysis.compute import contention
from tracekit.analysis.parallelism import (
    group_axes,
    pipeline_actions,
    pipeline_communication,
    pipeline_stages,
    rank_places,
    tensor_parallel,
    workload,
)
from tracekit.analysis.parallelism.workload import DDP, FSDP1, FSDP2, YAFSDP
from tracekit.analysis.time import breakdown
from tracekit.conventions.strategies import DP, DP_REPLICATE, DP_SHARD, TP
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.replay.graph.causes.collectives import COMMUNICATION
from tracekit.rules import quoted_step
from tracekit.rules.collective_batching import SmallCollectives, issuer_line
from tracekit.rules.rule import Finding, Rule, Severity, WhatIf, distinct, largest_first
from tracekit.sync import collective_matching

_GATHER, _REDUCE = "all_gather", "reduce_scatter"

_GLOO_FIXES = {
    FSDP1: (
        "FSDP1 on gloo blocks on each collective, so prefetching overlaps none of it: give each rank more tokens per "
        "step, or all-gather once instead of twice with sharding_strategy=ShardingStrategy.SHARD_GRAD_OP."
    ),
    FSDP2: (
        "FSDP2 on gloo blocks on each collective by default: overlap the next all-gather with compute by "
        "unshard(async_op=True), set_modules_to_forward_prefetch and set_modules_to_backward_prefetch. Reduce-scatters "
        "stay exposed, so give each rank more tokens per step."
    ),
}
_FIXES = {
    (FSDP1, _GATHER): (
        "Prefetch the next unit: FullyShardedDataParallel(forward_prefetch=True, "
        "backward_prefetch=BackwardPrefetch.BACKWARD_PRE). If all-gathers still start late, limit_all_gathers=False "
        "removes the limit on those in flight, at the cost of memory."
    ),
    (FSDP1, _REDUCE): (
        "Reduce fewer bytes: MixedPrecision(reduce_dtype=torch.bfloat16). Or reduce less often: accumulate gradients "
        "under no_sync(), at the cost of memory, or give each rank more tokens per step."
    ),
    (FSDP2, _GATHER): (
        "Prefetch further ahead: set_modules_to_forward_prefetch and set_modules_to_backward_prefetch with the next "
        "two modules. Or keep weights unsharded until backward with fully_shard(reshard_after_forward=False), at the "
        "cost of memory."
    ),
    (FSDP2, _REDUCE): (
        "Let all-gathers overtake reduce-scatters with set_separate_reduce_scatter_group, allow more reduce-scatters "
        "in flight with set_reduce_scatter_max_input_buffers(2), or reduce fewer bytes: "
        "MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)."
    ),
    (DDP, "all_reduce"): (
        "All-reduce less often: accumulate gradients under no_sync(). Or reduce fewer bytes: register_comm_hook(None, "
        "default_hooks.bf16_compress_hook) halves fp32 gradients, and another bucket_cap_mb can make the last bucket "
        "small."
    ),
    (YAFSDP, _GATHER): (
        "YaFSDP already prefetches the next unit: send fewer bytes with "
        "MixedPrecisionPolicy(param_dtype=torch.bfloat16), keep weights unsharded with "
        "fully_shard(reshard_after_forward=False), at the cost of memory, or give each rank more tokens per step."
    ),
    (YAFSDP, _REDUCE): (
        "YaFSDP already overlaps the reduce-scatter with the next layer's backward: send fewer bytes with "
        "MixedPrecisionPolicy(reduce_dtype=torch.bfloat16), or give each rank more tokens per step."
    ),
}
# Those that advise fewer bits, for messages of 16 bits or less.
_SHORT_FIXES = {
    (FSDP1, _REDUCE): (
        "Reduce less often: accumulate gradients under no_sync(), at the cost of memory, or give each rank more tokens "
        "per step. Gradients are reduced in 16 bits already."
    ),
    (FSDP2, _REDUCE): (
        "Let all-gathers overtake reduce-scatters with set_separate_reduce_scatter_group, or allow more "
        "reduce-scatters in flight with set_reduce_scatter_max_input_buffers(2). Gradients are reduced in 16 bits "
        "already."
    ),
    (DDP, "all_reduce"): (
        "All-reduce less often: accumulate gradients under no_sync(), or choose bucket_cap_mb so that the last bucket "
        "is small. Gradients are reduced in 16 bits already."
    ),
    (YAFSDP, _GATHER): (
        "YaFSDP already prefetches the next unit, in 16 bits: keep weights unsharded with "
        "fully_shard(reshard_after_forward=False), at the cost of memory, or give each rank more tokens per step."
    ),
    (YAFSDP, _REDUCE): (
        "YaFSDP already overlaps the reduce-scatter with the next layer's backward, in 16 bits: give each rank more "
        "tokens per step."
    ),
}
_TENSOR_PARALLEL = (
    "The result of an all-reduce of activations (tensor parallelism) is needed at once, so it cannot start earlier: "
    "split the batch in two, so that the all-reduce of one half overlaps with the compute of the other; keep the "
    "tensor-parallel group inside one node and as small as memory allows; or overlap it with its matrix product "
    "(sequence parallelism with async tensor parallelism{more})."
)
_IN_TRAINING, _IN_INFERENCE = ", userbuffers", ", one-shot all-reduce over symmetric memory"
_UNKNOWN_ALL_REDUCE = (
    "If these all-reduces reduce gradients, overlap them with backward (DistributedDataParallel, async_op=True) or "
    "accumulate gradients. If they reduce activations (tensor parallelism), they cannot start earlier: split the batch "
    "in two to overlap them, or use a smaller tensor-parallel group inside one node."
)
_ALL_TO_ALL = "Split the batch in two, so that the all-to-all of one half overlaps with the compute of the other."
_MESSAGES = (
    "Post the sends and receives in the evidence before the compute that does not need their data (isend, irecv or "
    "batch_isend_irecv), and wait() where the data is used."
)
_START_EARLIER = (
    "Start the {op} collectives in the evidence earlier (async_op=True, with wait() where the result is used), or give "
    "each rank more compute per byte."
)
_ISSUED_BY = {
    issuers.PROGRAM: (
        "The program's own code issues them{line}, outside the model: issue one for all tensors, not one for each "
        "(a flat buffer, torch.distributed._coalescing_manager, a foreach op before one all_reduce), or start them "
        "earlier (async_op=True, with wait() where the result is used)."
    ),
    issuers.DTENSOR: (
        "Ops on DTensors outside the model issue them{line} (full_tensor(), redistribute(), or an op on a sharded "
        "tensor): compute on the local shards and reduce once for all tensors, as torch.nn.utils.clip_grad_norm_ does "
        "for clipping."
    ),
    issuers.OPTIMIZER: (
        "The optimizer issues them{line}: let it communicate once for many parameters (larger buckets, flat buffers), "
        "or update only the local shard of each parameter."
    ),
}
_START_ANY_EARLIER = _START_EARLIER.replace("{op} ", "")
_MIN_OVERLAPPED_RATIO = 0.05  # below this share, no communication is overlapped

_EVIDENCE_ROWS = 20
_DATA_AXES = (DP, DP_REPLICATE, DP_SHARD)
_PLURALS = {"recv": "Receives"}
_SHORT_TYPES = r"(?i)half|float16|bf16|float8|int8|uint8|byte|char"  # compression to 16 bits gains nothing
_MIN_WAIT_RATIO = 0.02  # share of the step from which the message states the wait for late ranks


@dataclass(frozen=True)
class ExposedCommunication(Rule):
    """Exposed communication: collectives that no compute overlaps.

    What it does: reports runs in which collectives move data while the device computes nothing for more than
    `max_exposed_ratio` of the step.

    Why it costs: the device is idle during exposed communication. Overlapped communication is free.

    How it is measured: per rank and step, the union of all collectives minus the union of all compute in the step's
    device window, less the wait for late ranks: starting a collective earlier does not shorten that wait (see RANK001
    and RANK003). Sends and receives of a pipeline wait for other stages (PIPE001). Each rank is judged by its
    median step, the one with the median share; the message quotes the worst rank. Where the median step has little, but
    two steps or more and the mean of all steps have more than the threshold, it quotes the median of these steps, and
    the mean is the cost: gradients may be reduced in every second step only. Steps that save a checkpoint are left out
    (see CKPT001). So is the measured latency of collectives that could be batched (see COMM002). The cost is the saving
    of a replay in which transfers take no time: less than what is exposed, if the device then waits for something else.

    Bandwidth below `slow_bytes_per_ns` GB/s is stated: that of all messages of 4 MiB or more of one op, in groups of
    which every rank has a trace. No link inside a node is that slow (PCIe 3.0 x16 moves 12 GB/s). Inside a node whose
    devices have NVLink or Infinity Fabric, so is bandwidth below `min_link_ratio` of theirs, with messages of 16 MiB or
    more. Where links connect devices directly, without a switch (V100, MI250X to
    MI355X), a group of n ranks has n - 1 of them: a pair on MI300X one of seven. Ranks are inside a node if run.json,
    their hosts or their devices say so.

    How to fix: start all-gathers earlier (explicit prefetch), use larger units, or send fewer bytes. The fix in the
    finding depends on who issued most of the exposed time (FSDP, DDP, the optimizer, DTensor, the program itself), on
    the strategy (from the manifest, else from the spans in the trace) and on the most exposed collective.

    If most of it is tensor parallelism, the finding is information (see TP001 and TP002).

    Where ranks leave collectives half a millisecond and a quarter of a transfer apart or more (medians), their
    processes take turns on one device: the finding is information, since its transfers are not those of links.

    Blind spots: waits for a rank without a trace, which the message then mentions, and waits shorter than the clock
    error count as communication. On a CPU run, compute is the union of dispatcher ops.
    """

    code: ClassVar[str] = "COMM001"
    fix_without_pytorch: ClassVar[str] = (
        "Issue each collective as soon as its input is complete, on a stream of its own, and let independent kernels"
        " run meanwhile; wait for an event only where the result is used. Send fewer bytes."
    )
    facts: ClassVar[tuple[TraceFact, ...]] = (
        *save_stages.FACTS,
        exposed_communication.exposed_calls,
        *collective_instances.PEER_FACTS,
        breakdown.spans,
        exposed_communication.save_collectives,
        workload.strategy_marks,
        workload.marks,
        pipeline_actions.pipeline_actions,
        collective_matching.calls,
        *group_bandwidth.FACTS,
        *latency.FACTS,
        issuers.issuers,
        *rank_places.FACTS,
        tensor_parallel.links,
        contention.device_count,
    )
    max_exposed_ratio: float = 0.1
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
        ratio = (pl.col("exposed_ns") / pl.col("duration_ns")).alias("exposed_ratio")
        steps = save_stages.without_saves(
            run, run.table(pipeline_communication.exposed_transfers_by_step).filter(pl.col("duration_ns") > 0)
        ).join(_small_transfers(run), on=quoted_step.KEY, how="left", nulls_equal=True, maintain_order="left")
        is_notable = pl.col("small_ns") >= _MIN_SMALL_RATIO * pl.col("duration_ns")
        steps = steps.with_columns(pl.when(is_notable).then("small_ns").otherwise(0).alias("small_ns"))
        steps = steps.with_columns((pl.col("exposed_ns") - pl.col("small_ns")).clip(0)).with_columns(ratio)
        over = quoted_step.per_device(steps, "exposed_ratio").filter(pl.col("exposed_ratio") > self.max_exposed_ratio)
        is_recurring = over.is_empty()
        if is_recurring:
            over = _recurring(steps, self.max_exposed_ratio)
            steps = steps.filter(pl.col("exposed_ratio") > self.max_exposed_ratio)
        if over.is_empty():
            return
        worst = over.row(0, named=True)
        judged_steps = save_stages.steps(run).select(quoted_step.KEY).unique()
        collectives = (
            run.table(pipeline_communication.exposed_transfers)
            .filter(pl.col("exposed_ns") > 0)
            .drop("waited_ns")
            .join(judged_steps, on=quoted_step.KEY, how="semi", nulls_equal=True)
            .pipe(largest_first, "exposed_ns", "rank", "start_ns")
            .join(over.select("rank"), on="rank", how="semi")
        )
        axis = _most_exposed_axis(run, worst)
        overlapped_ratio = worst["overlapped_ns"] / worst["communication_ns"] if worst["communication_ns"] else 0.0
        severity = Severity.INFO if axis == TP else Severity.WARNING
        turns = _taking_turns(run)
        # Of time slices of a shared device, no bandwidth is known.
        slow = "" if turns else _slow_transfers(run, self.slow_bytes_per_ns) or _slow_for_node(run, self.min_link_ratio)
        step_calls = quoted_step.rows_of(collectives, worst)
        time = largest_first(step_calls.group_by("op").agg(pl.col("exposed_ns").sum()), "exposed_ns", "op")
        op = time["op"][0] if time.height else None
        costliest = step_calls.filter(pl.col("op").eq_missing(pl.lit(op)))
        in_backward = True if axis in _DATA_AXES else None
        if axis not in _DATA_AXES and costliest["phase"].count():
            backward_ns = int(costliest.filter(pl.col("phase") == conventions.BACKWARD)["exposed_ns"].sum())
            in_backward = backward_ns * 2 > int(costliest["exposed_ns"].sum())
        where = f"step {worst['step']} of rank {worst['rank']}" if is_recurring else quoted_step.describe(worst)
        message = (
            f"{units.share(worst['exposed_ratio'])} of the {quoted_step.noun(worst)} is exposed communication: "
            f"{units.duration(worst['exposed_ns'])} of {units.duration(worst['duration_ns'])} in "
            f"{where}. Compute overlaps {units.share(overlapped_ratio)} of its communication."
        )
        if worst["waited_ns"] >= _MIN_WAIT_RATIO * worst["duration_ns"]:
            awaited = f"late ranks{' or other stages of the pipeline' if pipeline_stages.is_pipelined(run) else ''}"
            message += f" The rank waits another {units.duration(worst['waited_ns'])} for {awaited}."
        if is_recurring:
            message += (
                f" So it is in {worst['over_steps']} of {units.count(worst['steps'], 'step')}: "
                f"{units.duration(worst['mean_ns'])} a step on average."
            )
        if worst["small_ns"]:
            message += f" Another {units.duration(worst['small_ns'])} is the latency of small collectives (COMM002)."
        op_name = _PLURALS.get(op or "", f"{(op or 'collective').replace('_', '-').capitalize()}s")
        dtypes = costliest["dtype"].drop_nulls()
        ddp = workload.DDP if axis in _DATA_AXES and op == "all_reduce" else None
        issuer_fix = _issuer_fix(run, costliest)
        fix = issuer_fix or fix_for(
            strategy=workload.run_strategy(run) or ddp,
            op=op,
            gloo=bool(step_calls["name"].str.starts_with("gloo:").any()),
            overlapped_ratio=overlapped_ratio,
            is_short=bool(dtypes.len() and dtypes.str.contains(_SHORT_TYPES).all()),
            in_backward=in_backward,
            infers=workload.is_inference(run),
        )
        yield Finding(
            self.code,
            severity,
            message
            + (_MAY_WAIT if worst["rank"] in collective_instances.ranks_without_peers(run) else "")
            + (_OF_TENSOR_PARALLEL if axis == TP else "")
            + turns
            + slow,
            _OWN_DEVICES if turns else fix + (_SLOW_FIX if slow else ""),
            impact=worst.get("mean_ratio", worst["exposed_ratio"]),
            cost_ns=worst.get("mean_ns", worst["exposed_ns"]),
            confidence=_TURNS_CONFIDENCE if turns else 0.9,
            what_if=WhatIf(COMMUNICATION, is_partial=worst["small_ns"] > 0),
            ranks=distinct(over, "rank"),
            steps=distinct(steps, "step"),
            evidence=_evidence(worst, collectives.drop("activity_id")),
            is_of_window=worst["step"] is None,
            claim=_TURNS if turns else f"{op_name} are not overlapped with compute on rank {worst['rank']}",
        )


_MIN_SMALL_RATIO = SmallCollectives.min_lost_ratio  # below it, COMM002 does not report them


def _small_transfers(run: Run) -> pl.DataFrame:
    """Exposed time that batching small collectives saves, as far as it is measured. Columns of KEY, small_ns."""
    merged = run.table(latency.batchable_calls)
    key = ["window", "rank", "activity_id"]
    if merged.is_empty():
        return pl.DataFrame(schema=dict.fromkeys(quoted_step.KEY, pl.Int64) | {"small_ns": pl.Int64})
    merged = merged.filter("is_merged", "is_measured").select(*key, "moving_ns").unique(key)
    calls = run.table(pipeline_communication.exposed_transfers).join(merged, on=key)
    saved_ns = (pl.col("exposed_ns") - pl.col("moving_ns")).clip(0).sum().cast(pl.Int64).alias("small_ns")
    return calls.group_by(quoted_step.KEY).agg(saved_ns)


def _recurring(steps: pl.DataFrame, max_ratio: float) -> pl.DataFrame:
    """For each device whose communication is exposed in some steps, but not in most, the median one of these.

    Such as gradients that are reduced in every second step, after two micro-batches: the median of all steps has none.
    It is in two steps or more, and above `max_ratio` over all steps together. Columns of `steps`, and mean_ns and
    mean_ratio over all steps, over_steps and steps (their numbers); the highest mean_ratio first.
    """
    is_over = pl.col("exposed_ratio") > max_ratio
    exposed, duration = pl.col("exposed_ns").sum(), pl.col("duration_ns").sum()
    means = steps.group_by("rank", "device").agg(
        (exposed / pl.len()).round().cast(pl.Int64).alias("mean_ns"),
        (exposed / duration).alias("mean_ratio"),
        is_over.sum().alias("over_steps"),
        pl.len().alias("steps"),
    )
    means = means.filter(pl.col("over_steps") > 1, pl.col("mean_ratio") > max_ratio)
    medians = quoted_step.per_device(steps.filter(is_over), "exposed_ratio")
    recurring = medians.join(means, on=["rank", "device"], nulls_equal=True)
    return recurring.sort("mean_ratio", "rank", "device", descending=[True, False, False])


def _issuer_fix(run: Run, calls: pl.DataFrame) -> str:
    """Fix where most of the exposed time of some calls is outside the model and not of a wrapper; "" otherwise."""
    key = ["window", "rank", "activity_id"]
    issued = calls.join(run.table(issuers.issuers).unique(key), on=key)
    sums = issued.group_by("issuer", "in_model").agg(pl.col("exposed_ns").sum(), pl.col("line").drop_nulls().first())
    most = sums.filter(pl.col("exposed_ns") * 2 > calls["exposed_ns"].sum(), ~pl.col("in_model"))
    if most.is_empty() or most["issuer"][0] not in _ISSUED_BY:
        return ""
    return _ISSUED_BY[most["issuer"][0]].format(line=issuer_line(most["line"][0]))


_LARGE_BYTES = 4 << 20  # smaller messages measure latency
_SLOW_FIX = (
    " Find out first why links are this slow: NCCL_DEBUG=INFO shows the transport (NET/Socket instead of NET/IB, SHM "
    "instead of P2P), nvidia-smi topo -m the links, nccl-tests their speed; unset "
    "NCCL_P2P_DISABLE and NCCL_IB_DISABLE."
)


_MIN_APART_NS, _MIN_APART_RATIO = 500_000, 0.25
"""Ranks that leave a collective farther apart, in ns and relative to a transfer, take turns: a time slice of a GPU is
about 2 ms. In recordings of ranks with a device each it is 0.06 ms and 0.1 at most."""
_TURNS_CONFIDENCE = 0.4  # less likely than not: on devices of their own, transfers would take another time
_TURNS = "Ranks take turns on a device, so that collectives take its time slices"
_OWN_DEVICES = (
    "Give each rank a device of its own (CUDA_VISIBLE_DEVICES, torch.cuda.set_device(local_rank)) and record again."
)


def _taking_turns(run: Run) -> str:
    """Return a sentence on device collectives that ranks leave too far apart for a transfer; "" otherwise."""
    if not run.table(contention.device_count)["devices"].sum():
        return ""
    devices = run.table(breakdown.by_step).select("rank", "device").unique()["device"]
    if len(devices) > 1 and devices.is_unique().all():
        return ""  # each rank has its own number of a device; with CUDA_VISIBLE_DEVICES, other devices have one number
    apart_ns, shortest_ns = collective_instances.median_departure(run)
    if apart_ns < max(_MIN_APART_NS, _MIN_APART_RATIO * shortest_ns):
        return ""
    return (
        f" But ranks leave the same collective {units.duration(apart_ns)} apart, which takes "
        f"{units.duration(shortest_ns)} at least (medians): their processes take turns on a device, or their clocks "
        "jump. How long transfers take is not known."
    )


def _slow_transfers(run: Run, slow_bytes_per_ns: float) -> str:
    """Return a sentence on the op with the longest transfers below a bandwidth; empty where there is none.

    On a CPU run the bandwidth is that of the host.
    """
    if not run.table(contention.device_count)["devices"].sum():
        return ""
    devices = run.table(breakdown.by_step).select("rank", "device").unique()["device"]
    if len(devices) > 1 and devices.is_unique().all():
        return ""  # each rank has its own number of a device; with CUDA_VISIBLE_DEVICES, other devices have one number
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


def fix_for(
    *,
    strategy: str | None,
    op: str | None,
    gloo: bool,
    overlapped_ratio: float,
    is_short: bool = False,
    in_backward: bool | None = None,
    infers: bool = False,
) -> str:
    """Return the fix where collectives of kind `op` are most of the exposed time.

    `overlapped_ratio` is the share of communication that compute overlaps now, `is_short` whether messages have 16 bits
    or less, `in_backward` whether most of those collectives are in backward (None where phases are unknown), `infers`
    whether the run does not train.
    """
    if op == "all_reduce" and not gloo and strategy in (None, DDP) and (infers or in_backward is False):
        return _TENSOR_PARALLEL.format(more=_IN_INFERENCE if infers else _IN_TRAINING)
    if op == "all_reduce" and strategy is None and in_backward is None:
        return _UNKNOWN_ALL_REDUCE
    if infers:
        strategy = None
    if is_short and (strategy, op) in _SHORT_FIXES:
        return _SHORT_FIXES[strategy or "", op or ""]
    if gloo and strategy in _GLOO_FIXES and op in (_GATHER, _REDUCE) and overlapped_ratio < _MIN_OVERLAPPED_RATIO:
        return _GLOO_FIXES[strategy]
    if (strategy, op) in _FIXES:
        return _FIXES[strategy or "", op or ""]
    if op == "all_to_all":
        return _ALL_TO_ALL
    if op in pipeline_actions.POINT_TO_POINT:
        return _MESSAGES
    return _START_EARLIER.format(op=op.replace("_", "-")) if op else _START_ANY_EARLIER
