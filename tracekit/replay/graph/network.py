"""Replay with higher or lower network bandwidth."""

from dataclasses import replace

import numpy as np
import polars as pl

from tracekit.analysis.communication import latency
from tracekit.replay.graph import slow_transfers
from tracekit.replay.graph.dependency_graph import Graph, InsufficientDataError
from tracekit.replay.graph.transforms import is_communication


def scale_bandwidth(graph: Graph, times: float, lines: pl.DataFrame) -> Graph:
    """Return the graph with every link at `times` its bandwidth; the latency of hops stays.

    `lines` are latency and bandwidth by group (`latency.by_group`); where latency is unknown, the whole transfer
    scales. Raises InsufficientDataError where nothing is transferred.
    """
    if not is_communication(graph).any():
        raise InsufficientDataError("the traces contain no collective")
    calls = slow_transfers.transfers(graph).join(lines, on=["group", "group_size"], how="left", maintain_order="left")
    stays_ns = np.zeros(len(graph.own_ns))
    latencies = calls.select((latency.hops() * pl.col("hop_ns")).fill_nan(None).fill_null(0.0)).to_series()
    stays_ns[calls["done"].to_numpy()] = np.minimum(latencies.to_numpy(), calls["took_ns"].to_numpy())
    moves = np.concatenate((is_communication(graph), np.ones(len(graph.own_ns) - graph.count, bool)))
    scaled = np.round(stays_ns + (graph.own_ns - stays_ns) / times).astype(np.int64)
    return replace(graph, own_ns=np.where(moves, scaled, graph.own_ns))
