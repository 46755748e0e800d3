"""Host time as a cause: late launches, data loading, allocator calls, saves, and FSDP1's rate limiter."""

from dataclasses import replace

import numpy as np
import polars as pl

from tracekit.analysis.host import host_stalls
from tracekit.analysis.parallelism import late_ranks
from tracekit.analysis.time import host_state
from tracekit.model.sweep_line import Flags, Ints
from tracekit.replay.graph.causes.cause import Cause, Kind, Pricing
from tracekit.replay.graph.dependency_graph import RELEASE, Graph
from tracekit.replay.graph.nodes import GAP_COLUMNS, HOST, WORK

_PAUSE_NS = 2_000_000
"""On a CPU run, where the host computes, shorter pauses between ops belong to the ops."""


def late_launch(graph: Graph) -> Graph:
    """Remove the host's time between its calls and in launches."""
    if not graph.on_device:
        return with_shorter_gaps(graph, _recurring(graph, gap_ns(graph, host_state.PYTHON)))
    late_ns = gap_ns(graph, host_state.PYTHON, host_state.OP, host_state.LAUNCH, host_state.LOCK)
    return with_zero_time(with_shorter_gaps(graph, late_ns), in_state(graph, host_state.LAUNCH))


def rate_limiter(graph: Graph) -> Graph:
    """Remove the waits of FSDP1's rate limiter."""
    return without_waits(graph, in_state(graph, host_state.RATE_LIMITER))


def data_loading(graph: Graph) -> Graph:
    """Remove the time of data loading.

    A load before the first step delays the device more than others do, for nothing is queued when a recording begins:
    it counts by the share of its time that the loads of the other steps cost. A single step's load counts whole.
    """
    data_ns = gap_ns(graph, host_state.DATA)
    ready = with_shorter_gaps(graph, data_ns)
    is_first = _is_released(graph)
    if data_ns[is_first].any():
        is_single_step = graph.windows["step"].n_unique() == 1
        share = 1.0 if is_single_step else _saved_share(graph, ready, np.where(is_first, 0, data_ns))
        counted_ns = np.where(is_first, np.round(share * data_ns), data_ns).astype(np.int64)
        ready = with_shorter_gaps(graph, counted_ns, before_window=True)
    on_host = (graph.column("what") == HOST) & graph.matches("kind", "compute")
    return with_zero_time(ready, on_host & graph.matches("phase", "data"))


def allocator(graph: Graph) -> Graph:
    """Remove the allocator's device calls."""
    return _without_state(graph, host_state.ALLOCATOR)


def checkpoint(graph: Graph) -> Graph:
    """Remove the time in which saves block training."""
    return with_zero_time(_without_state(graph, host_state.CHECKPOINT), graph.matches("phase", "checkpoint"))


LATE_LAUNCH = Cause(
    name="late-launch", codes=("HOST001",), kind=Kind.HOST, transform=late_launch, pricing=Pricing.CONSEQUENCE,
    summary="the host takes no time between calls and in launches",
    basis="host time between recorded calls, without data loading, saves, allocator calls and waits",
    removed_stalls=(
        host_stalls.PROFILER, host_stalls.COMPILE, host_stalls.AUTOTUNE, host_stalls.KERNEL_LOADING,
        host_stalls.GARBAGE_COLLECTION, host_stalls.LAUNCH, host_stalls.OTHER,
    ),
)  # fmt: skip
RATE_LIMITER = Cause(
    name="rate-limiter", codes=("HOST002",), kind=Kind.HOST, transform=rate_limiter, confidence=0.6,
    summary="FSDP1's limit of two all-gathers never delays the host",
    basis="rate_limiter spans",
)  # fmt: skip
DATA_LOADING = Cause(
    name="data-loading", codes=("HOST003",), kind=Kind.HOST, transform=data_loading, pricing=Pricing.SOURCE,
    idle_part=late_ranks.DATA, is_before_window=True, is_hidden_elsewhere=True,
    summary="every batch is ready when requested",
    basis="phase data and DataLoader spans",
    removed_stalls=(host_stalls.DATA,),
)  # fmt: skip
ALLOCATOR = Cause(
    name="allocator", codes=("MEM001",), kind=Kind.HOST, transform=allocator, pricing=Pricing.SOURCE,
    idle_part=late_ranks.ALLOCATOR, is_hidden_elsewhere=True,
    summary="the allocator makes no calls to the device",
    basis="cudaMalloc, cudaFree and their waits",
    removed_stalls=(host_stalls.RETRY, host_stalls.ALLOCATION),
)  # fmt: skip
CHECKPOINT = Cause(
    name="checkpoint", codes=("CKPT001",), kind=Kind.HOST, transform=checkpoint, pricing=Pricing.SOURCE,
    summary="no save blocks the training thread",
    basis="phase checkpoint",
    removed_stalls=(host_stalls.SAVE,),
)  # fmt: skip


def gap_ns(graph: Graph, *states: str) -> Ints:
    """Host time before each of the ranks' nodes in some states; without states, in all."""
    columns = [GAP_COLUMNS[state] for state in states or GAP_COLUMNS]
    return np.asarray(graph.frame.select(pl.sum_horizontal(columns)).to_series().to_numpy())


def in_state(graph: Graph, what: str) -> Flags:
    """Mark the host calls in a state."""
    return np.asarray(graph.column("host_state") == host_state.HOST_STATES.index(what))


def with_shorter_gaps(graph: Graph, by_ns: Ints, *, before_window: bool = False) -> Graph:
    """Return the graph with the time before its nodes reduced by `by_ns`.

    The first call of a rank is released at its recorded time: earlier by as much; before the window begins only
    with `before_window`.
    """
    chain_ns = graph.chain_ns.copy()
    chain_ns[: graph.count] -= by_ns
    edges = graph.edges
    released = np.flatnonzero((edges.kind == RELEASE) & (edges.waiting < graph.count))
    earlier_ns = by_ns[edges.waiting[released]]
    lag_ns = edges.lag_ns.copy()
    least_ns = np.where(before_window, lag_ns[released] - earlier_ns, np.minimum(lag_ns[released], 0))
    lag_ns[released] = np.maximum(lag_ns[released] - earlier_ns, least_ns)
    return replace(graph, chain_ns=np.maximum(chain_ns, 0), edges=replace(edges, lag_ns=lag_ns))


def with_zero_time(graph: Graph, which: Flags) -> Graph:
    """Return the graph with zero time for some of the ranks' nodes; for collectives, on all ranks."""
    nodes = np.flatnonzero(which)
    return graph.with_durations(np.concatenate((nodes, graph.done[nodes])), 0)


def without_waits(graph: Graph, which: Flags) -> Graph:
    """Return the graph with zero time and no waits for some host calls."""
    blocked = np.concatenate((which, np.zeros(len(graph.own_ns) - graph.count, bool)))
    remaining = ~blocked[graph.edges.waiting] | (graph.edges.awaited < 0)
    return with_zero_time(replace(graph, edges=graph.edges.select(remaining)), which & (graph.column("what") != WORK))


def _without_state(graph: Graph, state: str) -> Graph:
    """Return the graph without the host time in a state, between calls and in calls."""
    return without_waits(with_shorter_gaps(graph, gap_ns(graph, state)), in_state(graph, state))


def _recurring(graph: Graph, python_ns: Ints) -> Ints:
    """Return the long Python pauses at the same place of every step, each with its shortest length.

    On a CPU run the host shares its cores with other processes: a pause that occurs once is not due to training. What
    the host does before the first op of the first step is not known, so the pause there may be missing.
    """
    place = ["rank", "phase", "kind", "name", "nth"]
    in_steps = graph.frame.select("rank", "step").drop_nulls("step")
    steps = in_steps.group_by("rank").agg(
        pl.col("step").n_unique().alias("steps"), pl.col("step").min().alias("first_step")
    )
    nth = pl.int_range(pl.len()).over("rank", "step", "phase", "kind", "name").alias("nth")
    rows = graph.frame.select("at", "rank", "step", *place[1:4], nth, pause_ns=pl.Series(python_ns))
    long = rows.filter(pl.col("step").is_not_null(), pl.col("pause_ns") >= _PAUSE_NS).join(steps, on="rank")
    seen = long.with_columns(pl.col("step").n_unique().over(place).alias("seen"), pl.col("pause_ns").min().over(place))
    is_between = (pl.col("step").min().over(place) > pl.col("first_step")).cast(pl.Int64)
    recurring = seen.filter(pl.col("seen") == pl.col("steps") - is_between, pl.col("seen") > 1)
    late = np.zeros(graph.count, np.int64)
    late[recurring["at"].to_numpy()] = recurring["pause_ns"].to_numpy()
    return late


def _is_released(graph: Graph) -> Flags:
    """Mark the ranks' nodes that begin with the window: they have no wait for other nodes."""
    released = np.zeros(graph.count, bool)
    waiting = graph.edges.waiting[graph.edges.kind == RELEASE]
    released[waiting[waiting < graph.count]] = True
    return released


def _saved_share(graph: Graph, changed: Graph, removed_ns: Ints) -> float:
    """Return by which share of the time removed on the rank with most of it the last work ends earlier, 0 to 1."""
    is_work = graph.frame["kind"].is_not_null().to_numpy()
    before_ns, after_ns = (variant.replayed.end_ns[variant.done][is_work].max() for variant in (graph, changed))
    by_rank = (
        graph.frame.select("rank", ns=pl.Series(removed_ns, dtype=pl.Int64)).group_by("rank").agg(pl.col("ns").sum())
    )
    most_ns = int(by_rank["ns"].to_numpy().max(initial=0))
    return float(np.clip((before_ns - after_ns) / max(1, most_ns), 0, 1))
