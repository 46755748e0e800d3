"""Redundant work of a step: gradient reductions of every micro-batch, recomputed activations."""

from dataclasses import replace

import numpy as np
import polars as pl

from tracekit.model.sweep_line import Flags
from tracekit.replay.graph.dependency_graph import Graph, InsufficientDataError
from tracekit.replay.graph.nodes import HOST

_REDUCES = ("reduce_scatter", "all_reduce")


def recomputed_nodes(graph: Graph) -> Flags:
    """Return the nodes that recompute activations. Raises InsufficientDataError where none are known."""
    found = np.asarray(graph.frame["recomputed"].fill_null(value=False).to_numpy())
    if not found.any():
        raise InsufficientDataError("the trace shows no recomputation")
    return found


def reduce_once_per_step(graph: Graph) -> Graph:
    """Return the graph with gradients reduced, and prepared for it, in the last micro-batch of a step only.

    A micro-batch begins where forward follows backward. Raises InsufficientDataError where steps have one.
    """
    numbered = _micro_batches(graph)
    calls = graph.parts.select("at", "done", "rank", "op").join(
        numbered, left_on="at", right_on="node", how="left", maintain_order="left"
    )
    early = calls.filter(
        pl.col("op").is_in(_REDUCES), pl.col("micro_batch") < pl.col("last"), pl.col("phase") == "backward"
    )
    if early.is_empty():
        raise InsufficientDataError("no step reduces gradients before its last micro-batch")
    own = graph.own_ns.copy()
    own[early["done"].to_numpy()] = 0
    own[early["at"].to_numpy()] = 0
    prepares = graph.prepared.filter(pl.col("collective").is_in(early["at"].implode()))
    own[prepares["node"].to_numpy()] = 0
    return replace(graph, own_ns=own)


def _micro_batches(graph: Graph) -> pl.DataFrame:
    """Return the micro-batch of each node in its step, by its launch: node, phase, micro_batch, last."""
    frame = graph.frame.with_columns(pl.int_range(pl.len()).cast(pl.Int64).alias("at"))
    host = frame.filter((pl.col("what") == HOST) & pl.col("phase").is_in(["forward", "backward"])).sort("rank", "at")
    begins = (pl.col("phase") == "forward") & (pl.col("phase").shift(1).over("rank", "step") == "backward")
    calls = host.with_columns(
        begins.fill_null(value=False).cum_sum().over("rank", "step").cast(pl.Int64).alias("micro_batch")
    )
    calls = calls.with_columns(pl.col("micro_batch").max().over("rank", "step").alias("last"))
    by_call = calls.select(pl.col("at").alias("launch"), "phase", "micro_batch", "last")
    launch = graph.launch[: graph.count]
    nodes = pl.DataFrame({"node": np.arange(graph.count), "launch": np.where(launch >= 0, launch, -1)})
    return nodes.join(by_call, on="launch", how="inner")
