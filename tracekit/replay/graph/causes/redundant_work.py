"""Redundant work as a cause: avoidable kernel time, recomputed activations, reductions of every micro-batch."""

from functools import partial

import numpy as np
import polars as pl

from tracekit.analysis.compute import avoidable_time
from tracekit.model.sweep_line import Flags
from tracekit.replay.graph.causes.cause import Cause, Kind
from tracekit.replay.graph.causes.host import with_zero_time
from tracekit.replay.graph.dependency_graph import Graph, InsufficientDataError
from tracekit.replay.graph.nodes import HOST

_REDUCES = ("reduce_scatter", "all_reduce")
_BEGINS = (pl.col("phase") == "forward") & (pl.col("phase").shift(1).over("rank", "step") == "backward")
MICRO_BATCH = _BEGINS.fill_null(value=False).cum_sum().over("rank", "step").cast(pl.Int64).alias("micro_batch")
"""The micro-batch of each row in its step, if rows are in order: one begins where forward follows backward."""


def without_avoidable_time(graph: Graph, cause: int) -> Graph:
    """Let kernels take as much less time as the change that avoids a cause of `avoidable_time` saves."""
    nodes = np.flatnonzero(graph.column("avoidable_by") == cause)
    return graph.with_durations(nodes, np.maximum(graph.own_ns[nodes] - graph.column("avoidable_ns")[nodes], 0))


def without_recomputation(graph: Graph) -> Graph:
    """Set the time of recomputed activations to zero."""
    return with_zero_time(graph, recomputed_nodes(graph))


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
    codes=("COMP001",),
    summary="rows of matrix products begin at multiples of 16 bytes in memory",
    basis="kernels for other rows, at the share of the roofline that the other products reach",
    kind=Kind.COMPUTE,
    transform=partial(without_avoidable_time, cause=avoidable_time.MISALIGNED),
    place=10,
    confidence=0.6,
)
IDLE_TENSOR_CORES = Cause(
    name="idle-tensor-cores",
    codes=("COMP002",),
    summary="32-bit matrix products use tensor cores (TF32)",
    basis="kernels that do not, at half the peak in TF32 or 80% of the memory bandwidth",
    kind=Kind.COMPUTE,
    transform=partial(without_avoidable_time, cause=avoidable_time.NO_TENSOR_CORES),
    place=10,
    confidence=0.6,
)
UNFUSED_OPTIMIZER = Cause(
    name="unfused-optimizer",
    codes=("COMP003",),
    summary="one kernel updates parameters and optimizer state",
    basis="elementwise kernels of the optimizer, by their accesses to memory and those of a fused one",
    kind=Kind.COMPUTE,
    transform=partial(without_avoidable_time, cause=avoidable_time.UNFUSED_OPTIMIZER),
    place=10,
    confidence=0.6,
)
UNFUSED_KERNELS = Cause(
    name="unfused-kernels",
    codes=("COMP004",),
    summary="elementwise kernels in a row are one",
    basis="inputs that the kernel before wrote, by their share of the bytes that a kernel moves",
    kind=Kind.COMPUTE,
    transform=partial(without_avoidable_time, cause=avoidable_time.UNFUSED_CHAIN),
    place=10,
    confidence=0.6,
)
PARTIAL_WAVES = Cause(
    name="partial-waves",
    codes=("COMP005",),
    summary="the last wave of blocks of a matrix product fills the device",
    basis="blocks of products with one block per tile, by the number of multiprocessors",
    kind=Kind.COMPUTE,
    transform=partial(without_avoidable_time, cause=avoidable_time.PARTIAL_WAVE),
    place=10,
    confidence=0.6,
)
RECOMPUTATION = Cause(
    name="recomputation",
    codes=("MEM002",),
    summary="no activation is recomputed",
    basis="forward ops that run again in backward (activation checkpointing)",
    kind=Kind.COMPUTE,
    transform=without_recomputation,
)
MICRO_BATCH_REDUCTIONS = Cause(
    name="micro-batch-reductions",
    codes=("COMM003",),
    summary="gradients are reduced once per step",
    basis="all but the last reduction of each unit in a step, with their preparation",
    kind=Kind.COMMUNICATION,
    transform=reduce_once_per_step,
)


def _micro_batches(graph: Graph) -> pl.DataFrame:
    """Return the micro-batch of each node in its step, by its launch: node, phase, micro_batch, last."""
    on_host = (pl.col("what") == HOST) & pl.col("phase").is_in(["forward", "backward"])
    host = graph.frame.select("at", "rank", "step", "phase", "what").filter(on_host).sort("rank", "at")
    calls = host.with_columns(MICRO_BATCH).with_columns(last=pl.col("micro_batch").max().over("rank", "step"))
    by_call = calls.select(pl.col("at").alias("launch"), "phase", "micro_batch", "last")
    launch = graph.launch[: graph.count]
    nodes = pl.DataFrame({"node": np.arange(graph.count), "launch": np.where(launch >= 0, launch, -1)})
    return nodes.join(by_call, on="launch", how="inner")
