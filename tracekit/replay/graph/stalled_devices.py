"""Graphs without device stalls (queued work starts as soon as it can), clock drops, and avoidable kernel time."""

from dataclasses import replace

import numpy as np

from tracekit.model.sweep_line import Flags
from tracekit.replay.graph.dependency_graph import Graph, InsufficientDataError


def device_stall(graph: Graph) -> Graph:
    """Let queued work start as soon as it can, and paused kernels run through.

    Raises InsufficientDataError on a CPU run.
    """
    if not graph.on_device:
        raise InsufficientDataError("no device activity was recorded, so queued work is not known")
    return without_stalls(graph, np.ones(graph.count, np.bool_))


def clock_drop(graph: Graph) -> Graph:
    """Let kernels take the time that they take before the clock of their device drops."""
    nodes = np.flatnonzero(graph.column("slowed_ns"))
    return graph.with_durations(nodes, np.maximum(graph.own_ns[nodes] - graph.column("slowed_ns")[nodes], 0))


def without_avoidable_time(graph: Graph, cause: int) -> Graph:
    """Let kernels take as much less time as the change that avoids a cause of `avoidable_time` saves."""
    nodes = np.flatnonzero(graph.column("avoidable_by") == cause)
    return graph.with_durations(nodes, np.maximum(graph.own_ns[nodes] - graph.column("avoidable_ns")[nodes], 0))


def without_stalls(graph: Graph, which: Flags) -> Graph:
    """Return the graph without the stalls of some of the ranks' nodes."""
    stall_ns = np.zeros(len(graph.own_ns), np.int64)
    stall_ns[: graph.count] = np.where(which, graph.column("stall_ns"), 0)
    own_ns = graph.own_ns.copy()
    own_ns[: graph.count] -= np.where(which, graph.column("paused_ns"), 0)
    lag_ns = graph.edges.lag_ns
    shorter = replace(graph.edges, lag_ns=lag_ns - np.clip(stall_ns[graph.edges.waiting], 0, np.maximum(lag_ns, 0)))
    return replace(
        graph,
        own_ns=np.maximum(own_ns, 0),
        chain_ns=np.maximum(graph.chain_ns - stall_ns, 0),
        launch_ns=np.maximum(graph.launch_ns - stall_ns, 0),
        edges=shorter,
    )
