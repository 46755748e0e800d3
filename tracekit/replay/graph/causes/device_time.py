"""Device time as a cause: avoidable and repeated work, stalls and clock drops of a device, and late ranks."""

from dataclasses import replace
from functools import partial

import numpy as np
import polars as pl

from tracekit.analysis.compute import avoidable_time
from tracekit.analysis.parallelism import late_ranks
from tracekit.analysis.time import host_state
from tracekit.model.sweep_line import Flags
from tracekit.replay.graph.causes.cause import Cause, Kind, Pricing
from tracekit.replay.graph.causes.host import BLOCKING_SYNC, copies_awaited, gap_ns, with_shorter_gaps, with_zero_time
from tracekit.replay.graph.dependency_graph import RELEASE, Graph, InsufficientDataError, replace_unequal
from tracekit.replay.graph.nodes import HOST

_REDUCES = ("reduce_scatter", "all_reduce")
_BEGINS = (pl.col("phase") == "forward") & (pl.col("phase").shift(1).over("rank", "step") == "backward")
MICRO_BATCH = _BEGINS.fill_null(value=False).cum_sum().over("rank", "step").cast(pl.Int64).alias("micro_batch")
"""The micro-batch of each row in its step, if rows are in order: one begins where forward follows backward."""
_STEP = ["window", "step"]


def without_avoidable_time(graph: Graph, cause: int) -> Graph:
    """Let kernels take as much less time as the change that avoids a cause of `avoidable_time` saves.

    What it saves beyond the time of an op of a CPU run is the pause in Python before that op.
    """
    nodes = np.flatnonzero(graph.column("avoidable_by") == cause)
    remaining_ns = graph.own_ns[nodes] - graph.column("avoidable_ns")[nodes]
    shorter = graph.with_durations(nodes, np.maximum(remaining_ns, 0))
    if graph.on_device:
        return shorter
    pause_ns = np.zeros(graph.count, np.int64)
    pause_ns[nodes] = np.minimum(np.maximum(-remaining_ns, 0), gap_ns(graph, host_state.PYTHON)[nodes])
    return with_shorter_gaps(shorter, pause_ns)


def without_host_copies(graph: Graph) -> Graph:
    """Let copies between host and device take no exposed time, and the host not wait for those to the device."""
    return without_avoidable_time(copies_awaited(graph), avoidable_time.HOST_COPY)


def without_recomputation(graph: Graph) -> Graph:
    """Set the time of recomputed activations to zero."""
    return without_recomputed(graph, recomputed_nodes(graph))


def without_recomputed(graph: Graph, nodes: Flags) -> Graph:
    """Set the time of some recomputed nodes to zero; on a CPU run also that of the host's work between them."""
    without = with_zero_time(graph, nodes)
    return without if graph.on_device else with_shorter_gaps(without, np.where(nodes, gap_ns(graph), 0))


def recomputed_nodes(graph: Graph) -> Flags:
    """Return the nodes that recompute activations. Raises InsufficientDataError where none are known."""
    is_recomputed: Flags = graph.frame["recomputed"].fill_null(value=False).to_numpy()
    if not is_recomputed.any():
        raise InsufficientDataError("the trace shows no recomputation")
    return is_recomputed


def reduce_once_per_step(graph: Graph) -> Graph:
    """Return the graph with gradients reduced, and prepared for it, in the last micro-batch of a step only.

    A micro-batch begins where forward follows backward. Raises InsufficientDataError where steps have one.
    """
    batches = _micro_batches(graph)
    calls = graph.parts.select("at", "done", "rank", "op").join(
        batches, left_on="at", right_on="node", how="left", maintain_order="left"
    )
    early = calls.filter(
        pl.col("op").is_in(_REDUCES), pl.col("micro_batch") < pl.col("last"), pl.col("phase") == "backward"
    )
    if early.is_empty():
        raise InsufficientDataError("no step reduces gradients before its last micro-batch")
    prepares = graph.prepared.filter(pl.col("collective").is_in(early["at"].implode()))
    return graph.with_durations(np.concatenate((early["done"], early["at"], prepares["node"])), 0)


MISALIGNED_PRODUCTS = Cause(
    name="misaligned-products",
    loss="misaligned matrix products",
    codes=("COMP001",), kind=Kind.COMPUTE,
    transform=partial(without_avoidable_time, cause=avoidable_time.MISALIGNED), place=10, confidence=0.6,
    summary="rows of matrix products begin at multiples of 16 bytes in memory",
    basis="kernels for other rows, at the share of the roofline that the other products reach",
)  # fmt: skip


IDLE_TENSOR_CORES = Cause(
    name="idle-tensor-cores",
    loss="matrix products without tensor cores",
    codes=("COMP002",), kind=Kind.COMPUTE,
    transform=partial(without_avoidable_time, cause=avoidable_time.NO_TENSOR_CORES), place=10, confidence=0.6,
    summary="32-bit matrix products use tensor cores (TF32)",
    basis="kernels that do not, at half the peak in TF32 or 80% of the memory bandwidth",
)  # fmt: skip


UNFUSED_OPTIMIZER = Cause(
    name="unfused-optimizer",
    loss="an optimizer of many kernels",
    codes=("COMP003",), kind=Kind.COMPUTE,
    transform=partial(without_avoidable_time, cause=avoidable_time.UNFUSED_OPTIMIZER), place=10, confidence=0.6,
    summary="one kernel updates parameters and optimizer state",
    basis="elementwise kernels of the optimizer, by their accesses to memory and those of a fused one",
)  # fmt: skip


UNFUSED_KERNELS = Cause(
    name="unfused-kernels",
    loss="elementwise kernels that are not fused",
    codes=("COMP004",), kind=Kind.COMPUTE,
    transform=partial(without_avoidable_time, cause=avoidable_time.UNFUSED_CHAIN), place=10, confidence=0.6,
    summary="elementwise kernels in a row are one",
    basis="inputs that the kernel before wrote, by their share of the bytes that a kernel moves",
)  # fmt: skip


PARTIAL_WAVES = Cause(
    name="partial-waves",
    loss="partly filled waves of matrix products",
    codes=("COMP005",), kind=Kind.COMPUTE,
    transform=partial(without_avoidable_time, cause=avoidable_time.PARTIAL_WAVE), place=10, confidence=0.6,
    summary="the last wave of blocks of a matrix product fills the device",
    basis="blocks of products with one block per tile, by the number of multiprocessors",
)  # fmt: skip


SLOW_ARITHMETIC = Cause(
    name="slow-arithmetic",
    loss="slow elementwise ops",
    codes=("COMP006",), kind=Kind.COMPUTE,
    transform=partial(without_avoidable_time, cause=avoidable_time.SLOW_ARITHMETIC), place=10, confidence=0.8,
    is_attainable=True,
    summary="elementwise ops of a CPU run are as fast as others of their size",
    basis="ops that take five times as long in every call as others of the same element type and size",
)  # fmt: skip


VALUE_READS = Cause(
    name="value-reads",
    loss="reads of tensor values by Python",
    codes=("HOST002",), kind=Kind.COMPUTE,
    transform=partial(without_avoidable_time, cause=avoidable_time.VALUE_READ), place=10, confidence=0.8,
    is_attainable=True,
    summary="Python reads no values of tensors on a CPU run",
    basis="ops that give values to Python, and copies and reductions directly before them that backward does not need",
)  # fmt: skip


CASTS = Cause(
    name="casts",
    loss="conversions of element types",
    codes=("COMP007",), kind=Kind.COMPUTE,
    transform=partial(without_avoidable_time, cause=avoidable_time.CAST), place=10, confidence=0.8,
    summary="no op of a CPU run converts element types, and none of a device back and forth",
    basis="copies to another floating type; on a device those that the next kernel reverts",
)  # fmt: skip


SMALL_OPS = Cause(
    name="small-ops",
    loss="hundreds of small ops",
    codes=("COMP008",), kind=Kind.COMPUTE,
    transform=partial(without_avoidable_time, cause=avoidable_time.SMALL_OP), place=10, confidence=0.8,
    is_attainable=True,
    summary="one op replaces hundreds of small ones",
    basis="ops of a CPU run on less than 64 KiB, called with the same shapes 200 times in a step or more",
)  # fmt: skip


ANOMALY_CHECKS = Cause(
    name="anomaly-checks",
    loss="checks of anomaly mode",
    codes=("COMP009",), kind=Kind.COMPUTE,
    transform=partial(without_avoidable_time, cause=avoidable_time.ANOMALY_CHECK), place=10, confidence=0.8,
    is_attainable=True,
    summary="autograd looks for no NaN in gradients (anomaly mode)",
    basis="ops of a CPU run that autograd calls for that after each node of backward, and stacks that forward records",
)  # fmt: skip


DETERMINISTIC_FILLS = Cause(
    name="deterministic-fills",
    loss="fills of deterministic mode",
    codes=("COMP010",), kind=Kind.COMPUTE,
    transform=partial(without_avoidable_time, cause=avoidable_time.DETERMINISTIC_FILL), place=10, confidence=0.9,
    is_attainable=True,
    summary="new tensors are not overwritten first (deterministic mode)",
    basis="aten::fill_ within ops that allocate tensors",
)  # fmt: skip


SIDE_WORK = Cause(
    name="side-work",
    loss="work that no gradient needs",
    codes=("COMP011",), kind=Kind.COMPUTE,
    transform=partial(without_avoidable_time, cause=avoidable_time.SIDE_WORK), place=10, confidence=0.8,
    is_attainable=True,
    summary="a step computes only what its gradients and its update need",
    basis="operators after the optimizer, or between the last one that backward needs and backward, that write into no "
    "tensor which exists",
)  # fmt: skip


INTERRUPTED_PYTHON = Cause(
    name="interrupted-python",
    loss="interruptions of Python",
    codes=("HOST008",), kind=Kind.HOST,
    transform=partial(without_avoidable_time, cause=avoidable_time.INTERRUPTION), place=10, confidence=0.8,
    pricing=Pricing.SOURCE,
    summary="Python between ops takes as long in each step as in the fastest, and other threads take no processor",
    basis="pauses between the same ops of a CPU run, where every step loses a tenth of its time to longer ones; waits "
    "of its ops for a processor that other threads of the process use",
)  # fmt: skip


HOST_COPIES = Cause(
    name="host-copies",
    loss="copies between host and device",
    codes=("HOST004",), kind=Kind.COMPUTE,
    transform=without_host_copies, confidence=0.8,
    pricing=Pricing.SOURCE, contains=(BLOCKING_SYNC,),
    is_attainable=True,
    summary="copies between host and device are overlapped and those to the device do not block the host",
    basis="copies between host and device, for as long as neither compute nor a collective runs, and waits of the host "
    "for copies from pageable memory that leave the device idle",
)  # fmt: skip


DEVICE_COPIES = Cause(
    name="device-copies",
    loss="other copies and memory sets",
    codes=("HOST004",), kind=Kind.COMPUTE,
    transform=partial(without_avoidable_time, cause=avoidable_time.DEVICE_COPY), confidence=0.8,
    pricing=Pricing.SOURCE,
    summary="copies other than between host and device, and memory sets, are overlapped",
    basis="copies between devices, within one and of managed memory, and memory sets, for as long as neither compute "
    "nor a collective runs",
)  # fmt: skip


RECOMPUTATION = Cause(
    name="recomputation", codes=("MEM002",), kind=Kind.COMPUTE, transform=without_recomputation,
    summary="no activation is recomputed",
    basis="forward ops that run again in backward (activation checkpointing)",
)  # fmt: skip


MICRO_BATCH_REDUCTIONS = Cause(
    name="micro-batch-reductions",
    loss="reductions in every micro-batch",
    codes=("COMM003",), kind=Kind.COMMUNICATION, transform=reduce_once_per_step,
    is_attainable=True,
    summary="gradients are reduced once per step",
    basis="all but the last reduction of each unit in a step, with their preparation",
)  # fmt: skip


def without_late_ranks(graph: Graph) -> Graph:
    """Return the graph in which the late ranks take no time of their own, so that nobody waits for them.

    Their hosts begin with the window. By default these are the rank, or the ranks of a group, that the others wait for
    most (`late_ranks.latest`). Making them as fast as their peers would need to know how fast those would be without
    waiting; the other ranks' work is known.
    Raises InsufficientDataError for a single rank.
    """
    if graph.frame["rank"].n_unique() < 2:
        raise InsufficientDataError("comparing ranks needs the traces of at least two")
    is_late = np.asarray(graph.frame["rank"].is_in(list(graph.late_ranks)).to_numpy())
    graph = _without_device_stalls(graph, is_late)
    nodes = np.flatnonzero(is_late)
    own_ns, chain_ns = graph.own_ns.copy(), graph.chain_ns.copy()
    own_ns[nodes] = chain_ns[nodes] = 0
    edges = graph.edges
    begins = (edges.kind == RELEASE) & (is_late & (graph.column("what") == HOST))[
        np.minimum(edges.waiting, graph.count - 1)
    ]
    released = replace(edges, lag_ns=np.where(begins, 0, edges.lag_ns))
    return replace(graph, own_ns=own_ns, edges=released).with_chain(chain_ns)


def with_late_ranks(table: pl.DataFrame, ranks: tuple[int, ...]) -> pl.DataFrame:
    """Return the steps of a replay `without_late_ranks` with the late ranks as much faster as the median of the others.

    `table` has the columns of `savings.STEP_COLUMNS`: late ranks do not wait, so their own steps are moved in time.
    That is so in each step and over the window: a rank that is ahead absorbs a delay in one step and shows it later.
    """
    is_late, rank = pl.col("rank").is_in(list(ranks)), ["window", "rank", "device"]
    of_rank = table.with_columns(total_ns=pl.col("saved_ns").sum().over(rank), steps=pl.len().over(rank))
    of_others = of_rank.with_columns(
        step_ns=pl.col("saved_ns").filter(~is_late).median().over(_STEP),
        window_ns=pl.col("total_ns").filter(~is_late).median().over("window"),
    )
    missing_ns = (pl.col("window_ns") - pl.col("step_ns").sum().over(rank)) / pl.col("steps")
    others_ns = (pl.col("step_ns") + missing_ns).round().cast(pl.Int64)
    saved = of_others.with_columns(pl.when(is_late).then(others_ns).otherwise("saved_ns").alias("saved_ns"))
    without_ns = (pl.col("replayed_ns") - pl.col("saved_ns")).alias("without_ns")
    return saved.with_columns(without_ns).select(table.columns)


def with_even_work(graph: Graph) -> Graph:
    """Let each rank compute as long in each step as ranks do on average: its kernels take longer or shorter by a ratio.

    Raises InsufficientDataError for a single rank, and on a CPU run.
    """
    if not graph.on_device or graph.frame["rank"].n_unique() < 2:
        raise InsufficientDataError("comparing ranks needs the device activity of at least two")
    nodes = np.flatnonzero(graph.matches("kind", "compute"))
    work = graph.frame.select("rank", "step")[nodes].with_columns(pl.Series("own_ns", graph.own_ns[nodes]))
    sums = work.group_by("rank", "step").agg(pl.col("own_ns").sum())
    ratios = sums.with_columns(ratio=pl.col("own_ns").mean().over("step") / pl.col("own_ns").clip(1)).drop("own_ns")
    even = work.join(ratios, on=["rank", "step"], nulls_equal=True, maintain_order="left")
    return graph.with_durations(nodes, (even["own_ns"] * even["ratio"]).round().cast(pl.Int64).to_numpy())


def device_stall(graph: Graph) -> Graph:
    """Let queued work start as soon as it can, and paused kernels run through.

    Raises InsufficientDataError on a CPU run.
    """
    if not graph.on_device:
        raise InsufficientDataError("no device activity was recorded, so queued work is not known")
    return _without_device_stalls(graph, np.ones(graph.count, np.bool_))


def clock_drop(graph: Graph) -> Graph:
    """Let kernels take the time that they take before the clock of their device drops."""
    nodes = np.flatnonzero(graph.column("slowed_ns"))
    return graph.with_durations(nodes, np.maximum(graph.own_ns[nodes] - graph.column("slowed_ns")[nodes], 0))


DEVICE_STALL = Cause(
    name="device-stall",
    loss="pauses of the device",
    codes=("STREAM005",), kind=Kind.CONTENTION, transform=device_stall, place=10, confidence=0.8,
    pricing=Pricing.SOURCE, idle_part=late_ranks.STALL,
    summary="the device runs queued work at once and pauses no kernel",
    basis="times in which no device runs anything although work is queued, and kernels that take longer by as much",
)  # fmt: skip


CLOCK_DROP = Cause(
    name="clock-drop",
    loss="a dropped clock",
    codes=("STEP003",), kind=Kind.COMPUTE, transform=clock_drop, place=10, pricing=Pricing.SOURCE,
    summary="kernels are as fast as before the clock of their device dropped",
    basis="the same kernels outside of the time in which all are slower",
)  # fmt: skip


STRAGGLER = Cause(
    name="straggler",
    loss="waiting for late ranks",
    codes=("RANK001", "RANK003", "RANK005", "RANK004"), kind=Kind.STRAGGLERS,
    transform=without_late_ranks, place=40, pricing=Pricing.LATE_RANKS,
    summary="no rank waits for the rank, or the group of ranks (RANK004), that arrives late",
    basis="arrivals at collectives: the ranks without which the others would wait least",
)  # fmt: skip

UNEVEN_WORK = Cause(
    name="uneven-work",
    loss="work that is divided unevenly",
    codes=("RANK003",), kind=Kind.STRAGGLERS, transform=with_even_work, place=30, confidence=0.9,
    summary="each rank computes as long in each step as ranks do on average",
    basis="the time of all kernels that compute, by rank and step",
)  # fmt: skip


def _micro_batches(graph: Graph) -> pl.DataFrame:
    """Return the micro-batch of each node in its step, by its launch: node, phase, micro_batch, last."""
    on_host = (pl.col("what") == HOST) & pl.col("phase").is_in(["forward", "backward"])
    host = graph.frame.select("at", "rank", "step", "phase", "what").filter(on_host).sort("rank", "at")
    calls = host.with_columns(MICRO_BATCH).with_columns(last=pl.col("micro_batch").max().over("rank", "step"))
    by_call = calls.select(pl.col("at").alias("launch"), "phase", "micro_batch", "last")
    launch = graph.launch[: graph.count]
    nodes = pl.DataFrame({"node": np.arange(graph.count), "launch": np.where(launch >= 0, launch, -1)})
    return nodes.join(by_call, on="launch", how="inner")


def _without_device_stalls(graph: Graph, which: Flags) -> Graph:
    """Graph without the device stalls of some of the ranks' nodes."""
    stall_ns = np.zeros(len(graph.own_ns), np.int64)
    stall_ns[: graph.count] = np.where(which, graph.column("stall_ns"), 0)
    own_ns = graph.own_ns.copy()
    own_ns[: graph.count] -= np.where(which, graph.column("paused_ns"), 0)
    lag_ns = graph.edges.lag_ns
    lag_ns = lag_ns - np.clip(stall_ns[graph.edges.waiting], 0, np.maximum(lag_ns, 0))
    return replace_unequal(
        graph,
        own_ns=np.maximum(own_ns, 0),
        chain_ns=np.maximum(graph.chain_ns - stall_ns, 0),
        launch_ns=np.maximum(graph.launch_ns - stall_ns, 0),
        edges=replace_unequal(graph.edges, lag_ns=lag_ns),
    )
