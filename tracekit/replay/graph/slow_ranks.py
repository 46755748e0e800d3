"""Ranks that others wait for, and a graph in which nobody waits for them."""

from dataclasses import replace

import numpy as np
import polars as pl

from tracekit.replay.graph import stalled_devices
from tracekit.replay.graph.dependency_graph import RELEASE, Graph, InsufficientDataError
from tracekit.replay.graph.nodes import HOST

_STEP = ["window", "step"]


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
    graph = stalled_devices.without_stalls(graph, is_late)
    nodes = np.flatnonzero(is_late)
    own_ns, chain_ns = graph.own_ns.copy(), graph.chain_ns.copy()
    own_ns[nodes] = chain_ns[nodes] = 0
    edges = graph.edges
    begins = (edges.kind == RELEASE) & (is_late & (graph.column("what") == HOST))[
        np.minimum(edges.waiting, graph.count - 1)
    ]
    released = replace(edges, lag_ns=np.where(begins, 0, edges.lag_ns))
    return replace(graph, own_ns=own_ns, chain_ns=chain_ns, edges=released)


def with_late_ranks(table: pl.DataFrame, late_ranks: tuple[int, ...]) -> pl.DataFrame:
    """Return the steps of a replay `without_late_ranks` with the late ranks as much faster as the median of the others.

    `table` has the columns of `savings.STEP_COLUMNS`: late ranks do not wait, so their own steps are moved in time.
    That is so in each step and over the window: a rank that is ahead absorbs a delay in one step and shows it later.
    """
    is_late, rank = pl.col("rank").is_in(list(late_ranks)), ["window", "rank", "device"]
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
