"""Slow ranks and devices as causes: stragglers, device stalls, clock drops."""

from dataclasses import replace

import numpy as np
import polars as pl

from tracekit.analysis.parallelism import late_ranks
from tracekit.model.sweep_line import Flags
from tracekit.replay.graph.causes.cause import Cause, Kind, Pricing
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
    graph = _without_device_stalls(graph, is_late)
    nodes = np.flatnonzero(is_late)
    own_ns, chain_ns = graph.own_ns.copy(), graph.chain_ns.copy()
    own_ns[nodes] = chain_ns[nodes] = 0
    edges = graph.edges
    begins = (edges.kind == RELEASE) & (is_late & (graph.column("what") == HOST))[
        np.minimum(edges.waiting, graph.count - 1)
    ]
    released = replace(edges, lag_ns=np.where(begins, 0, edges.lag_ns))
    return replace(graph, own_ns=own_ns, chain_ns=chain_ns, edges=released)


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
    codes=("STREAM005",),
    summary="the device runs queued work at once and pauses no kernel",
    basis="times in which no device runs anything although work is queued, and kernels that take longer by as much",
    kind=Kind.CONTENTION,
    transform=device_stall,
    place=10,
    confidence=0.8,
    pricing=Pricing.SOURCE,
    idle_part=late_ranks.STALL,
)
CLOCK_DROP = Cause(
    name="clock-drop",
    codes=("STEP003",),
    summary="kernels are as fast as before the clock of their device dropped",
    basis="the same kernels before and after the moment from which on all are slower",
    kind=Kind.COMPUTE,
    transform=clock_drop,
    place=10,
    confidence=0.8,
    pricing=Pricing.SOURCE,
)
STRAGGLER = Cause(
    name="straggler",
    codes=("RANK001", "RANK004"),
    summary="no rank waits for the rank, or the group of ranks (RANK004), that arrives late",
    basis="arrivals at collectives: the ranks without which the others would wait least",
    kind=Kind.STRAGGLERS,
    transform=without_late_ranks,
    place=40,
    pricing=Pricing.LATE_RANKS,
)


def _without_device_stalls(graph: Graph, which: Flags) -> Graph:
    """Graph without the device stalls of some of the ranks' nodes."""
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
