"""Redundant work of a step: gradient reductions of every micro-batch, recomputed activations."""

import numpy as np
import polars as pl

from tracekit.model.sweep_line import Flags
from tracekit.replay.graph.dependency_graph import Graph, InsufficientDataError
from tracekit.replay.graph.nodes import HOST

_REDUCES = ("reduce_scatter", "all_reduce")
_BEGINS = (pl.col("phase") == "forward") & (pl.col("phase").shift(1).over("rank", "step") == "backward")
MICRO_BATCH = _BEGINS.fill_null(value=False).cum_sum().over("rank", "step").cast(pl.Int64).alias("micro_batch")
"""The micro-batch of each row in its step, if rows are in order: one begins where forward follows backward."""


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


def _micro_batches(graph: Graph) -> pl.DataFrame:
    """Return the micro-batch of each node in its step, by its launch: node, phase, micro_batch, last."""
    on_host = (pl.col("what") == HOST) & pl.col("phase").is_in(["forward", "backward"])
    host = graph.frame.select("at", "rank", "step", "phase", "what").filter(on_host).sort("rank", "at")
    calls = host.with_columns(MICRO_BATCH).with_columns(last=pl.col("micro_batch").max().over("rank", "step"))
    by_call = calls.select(pl.col("at").alias("launch"), "phase", "micro_batch", "last")
    launch = graph.launch[: graph.count]
    nodes = pl.DataFrame({"node": np.arange(graph.count), "launch": np.where(launch >= 0, launch, -1)})
    return nodes.join(by_call, on="launch", how="inner")
