"""Graph transforms that each remove one cause of lost time: a graph in, another graph out."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
import polars as pl

from tracekit.analysis.compute import avoidable_time
from tracekit.analysis.time import host_state
from tracekit.model.columns import rows_by_key
from tracekit.model.memoize import memoize
from tracekit.model.sweep_line import Flags, Ints, distinct
from tracekit.replay.graph import (
    balanced_experts,
    causes,
    contention_free,
    earlier_collectives,
    redundant_work,
    slow_ranks,
    slow_transfers,
    stalled_devices,
)
from tracekit.replay.graph.dependency_graph import RELEASE, START_ORDER, Graph, InsufficientDataError
from tracekit.replay.graph.nodes import GAP_COLUMNS, HOST, WORK

_SHORT_RATIO = 0.1
_USUAL_QUANTILE = 0.75
_SPLIT_RATIO = 0.5
"""A call is in the middle of a pause if the host pauses before it for this share of the usual pause after a call."""
_PAUSE_NS = 2_000_000
"""On a CPU run, where the host computes, shorter pauses between ops belong to the ops."""


Transform: TypeAlias = Callable[[Graph], Graph]


def late_launch(graph: Graph) -> Graph:
    """Remove the host's time between its calls and in launches."""
    if not graph.on_device:
        return _with_shorter_gaps(graph, _recurring(graph, _gap_ns(graph, host_state.PYTHON)))
    late_ns = _gap_ns(graph, host_state.PYTHON, host_state.OP, host_state.LAUNCH, host_state.LOCK)
    return _with_zero_time(_with_shorter_gaps(graph, late_ns), _in_state(graph, host_state.LAUNCH))


def blocking_sync(graph: Graph) -> Graph:
    """Remove the host's waits that leave the device idle, and its pauses after them.

    Those of saves, allocator and rate limiter stay. While the host pauses after a wait, nothing is queued: that pause
    would be hidden without the wait. A pause after a call that found the device idle is for what the host reads, too.
    A wait after which the device goes on costs nothing, and stays: one for a copy on another stream, or directly before
    a launch. Raises InsufficientDataError for a CPU run.
    """
    if not graph.on_device:
        raise InsufficientDataError("no device activity was recorded, so what the host waits for is not known")
    blocking = _blocking_calls(graph)
    return _without_waits(_with_shorter_gaps(graph, _pauses_after(graph, blocking)), blocking)


def rate_limiter(graph: Graph) -> Graph:
    """Remove the waits of FSDP1's rate limiter."""
    return _without_waits(graph, _in_state(graph, host_state.RATE_LIMITER))


def data_loading(graph: Graph) -> Graph:
    """Remove the time of data loading.

    A load before the first step delays the device more than others do, for nothing is queued when a recording begins:
    it counts by the share of its time that the loads of the other steps cost. A single step's load counts whole.
    """
    gap_ns = _gap_ns(graph, host_state.DATA)
    ready = _with_shorter_gaps(graph, gap_ns)
    is_first = _is_released(graph)
    if gap_ns[is_first].any():
        share = (
            1.0 if graph.windows["step"].n_unique() == 1 else _saved_share(graph, ready, np.where(is_first, 0, gap_ns))
        )
        counted_ns = np.where(is_first, np.round(share * gap_ns), gap_ns).astype(np.int64)
        ready = _with_shorter_gaps(graph, counted_ns, before_window=True)
    on_host = (graph.column("what") == HOST) & graph.matches("kind", "compute")
    return _with_zero_time(ready, on_host & graph.matches("phase", "data"))


def allocator(graph: Graph) -> Graph:
    """Remove the allocator's device calls."""
    return _without_state(graph, host_state.ALLOCATOR)


def checkpoint(graph: Graph) -> Graph:
    """Remove the time in which saves block training."""
    return _with_zero_time(_without_state(graph, host_state.CHECKPOINT), graph.matches("phase", "checkpoint"))


def shared_queue(graph: Graph) -> Graph:
    """Remove the start order between streams that share a launch queue."""
    return replace(graph, edges=graph.edges.select(graph.edges.kind != START_ORDER))


def communication(graph: Graph) -> Graph:
    """Set the time of transfers to zero."""
    return graph.with_durations(is_transfer(graph), 0)


def recomputation(graph: Graph) -> Graph:
    """Set the time of recomputed activations to zero."""
    return _with_zero_time(graph, redundant_work.recomputed_nodes(graph))


TRANSFORMS: Mapping[str, Transform] = {
    "late-launch": late_launch,
    "blocking-sync": blocking_sync,
    "rate-limiter": rate_limiter,
    "data-loading": data_loading,
    "allocator": allocator,
    "checkpoint": checkpoint,
    "device-stall": stalled_devices.device_stall,
    "clock-drop": stalled_devices.clock_drop,
    **{
        name: partial(stalled_devices.without_avoidable_time, cause=cause)
        for name, cause in {
            "misaligned-products": avoidable_time.MISALIGNED,
            "idle-tensor-cores": avoidable_time.NO_TENSOR_CORES,
            "unfused-optimizer": avoidable_time.UNFUSED_OPTIMIZER,
            "unfused-kernels": avoidable_time.UNFUSED_CHAIN,
            "partial-waves": avoidable_time.PARTIAL_WAVE,
        }.items()
    },
    "preparation": contention_free.without_preparation,
    "give-way": contention_free.without_give_way,
    "slowed-compute": contention_free.uncontended_compute,
    "slowed-collectives": contention_free.uncontended_collectives,
    "shared-queue": shared_queue,
    "shared-communicator": earlier_collectives.independent_collectives,
    "straggler": slow_ranks.without_late_ranks,
    "slow-link": slow_transfers.equalize_transfers,
    "unbalanced-experts": balanced_experts.with_balanced_experts,
    "communication": communication,
    "late-gathers": earlier_collectives.prefetch_all_gathers,
    "small-collectives": slow_transfers.bucket_collectives,
    "micro-batch-reductions": redundant_work.reduce_once_per_step,
    "recomputation": recomputation,
}


BEFORE_WINDOW = "data-loading"
"""The transform that saves time before the first work of a window, too: the first batch is loaded there."""
CONTENTION_TRANSFORMS = frozenset({"preparation", "give-way", "slowed-compute"})
"""Transforms that set contention themselves: durations are not updated after them."""
_FIRST = (
    causes.STALLED_COLLECTIVE.name,
    "device-stall",
    "clock-drop",
    "misaligned-products",
    "idle-tensor-cores",
    "unfused-optimizer",
    "unfused-kernels",
    "partial-waves",
    "slowed-compute",
    "give-way",
    "slowed-collectives",
    "slow-link",
    "unbalanced-experts",
    "small-collectives",
    "straggler",
)
"""Transforms that compare recorded durations: applied before those that remove or move work."""
_LAST = ("shared-queue", "shared-communicator", "late-gathers")


class HostSpan(NamedTuple):
    """A span of time on the host of a rank, on the run's clock."""

    window: int
    rank: int
    start_ns: int
    end_ns: int
    stall: str = ""
    """The stall that the span is a part of: the same text in other recordings of the same job."""


STOPPED = "stopped"
"""The `stall` of a span in which the process of a rank did not run."""


def on_ranks(graph: Graph, ranks: tuple[int, ...], transform: Transform) -> Graph:
    """Return the graph after a transform of host time or device stalls that is applied to some ranks."""
    is_on_ranks = graph.frame["rank"].is_in(list(ranks)).to_numpy()
    device_times = pl.col("stall_ns", "paused_ns", "slowed_ns", "avoidable_ns") * pl.lit(pl.Series(is_on_ranks))
    hidden = graph.frame.with_columns(
        _host_state_of(graph, is_on_ranks),
        _gaps() * pl.lit(pl.Series(is_on_ranks)),
        device_times,
        pl.when(pl.lit(pl.Series(is_on_ranks))).then("phase").alias("phase"),
    )
    return replace(transform(replace(graph, frame=hidden)), frame=graph.frame)


def outside_stalls(graph: Graph, stalls: tuple[HostSpan, ...], transform: Transform) -> Graph:
    """Return the graph after a transform that leaves the host time in some stalls as it is."""
    in_stall, stalled_ns = _stalled_time(graph, stalls)
    unstalled = pl.lit(pl.Series(1 - stalled_ns / np.maximum(_gap_ns(graph), 1)))
    hidden = graph.frame.with_columns(_host_state_of(graph, ~in_stall), (_gaps() * unstalled).cast(pl.Int64))
    changed = transform(replace(graph, frame=hidden))
    own_ns, chain_ns = changed.own_ns.copy(), changed.chain_ns.copy()
    nodes = np.flatnonzero(in_stall)
    own_ns[nodes] = graph.own_ns[nodes]
    chain_ns[: graph.count] = np.maximum(chain_ns[: graph.count], np.minimum(stalled_ns, graph.chain_ns[: graph.count]))
    return replace(changed, own_ns=own_ns, chain_ns=chain_ns, frame=graph.frame)


def without_stalls(graph: Graph, stalls: tuple[HostSpan, ...]) -> Graph:
    """Return the graph without the host time in some stalls: pauses, calls, and the waits of these calls.

    What a pause takes at the same place of other steps remains.
    """
    in_stall, stalled_ns = _stalled_time(graph, stalls)
    beyond_ns = np.maximum(stalled_ns - _usual_ns(graph, stalled_ns > 0), 0)
    return _without_waits(_with_shorter_gaps(graph, beyond_ns), in_stall)


def without_excess(graph: Graph, spans: tuple[HostSpan, ...]) -> Graph:
    """Return the graph with the collectives that end with some spans of their ranks shorter by these.

    Of a rank that was STOPPED in a span, its host's time in the span is removed, too.
    """
    stopped = tuple(span for span in spans if span.stall == STOPPED)
    own_ns = graph.own_ns.copy()
    start, end, rank = (graph.column(name) for name in ("start_ns", "end_ns", "rank"))
    calls = np.flatnonzero(graph.matches("kind", "communication"))
    for span in spans:
        if span.window != graph.window or span in stopped:
            continue
        rank_calls = calls[(rank[calls] == span.rank) & (start[calls] <= span.start_ns + 1)]
        stalled = rank_calls[np.abs(end[rank_calls] - span.end_ns) <= 1]  # clocks are converted to whole ns
        done = distinct(graph.done[stalled])
        own_ns[done] = np.maximum(own_ns[done] - (span.end_ns - span.start_ns), 0)
    return without_stalls(replace(graph, own_ns=own_ns), stopped)


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of transforms in the order in which they are applied, each once."""
    rest = [name for name in TRANSFORMS if name not in (*_FIRST, *_LAST)]
    requested = frozenset(names)
    return tuple(name for name in (*_FIRST, *rest, *_LAST) if name in requested)


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


def is_transfer(graph: Graph) -> Flags:
    """Mark nodes that transfer data: collectives of the ranks, and join nodes."""
    return np.concatenate((graph.matches("kind", "communication"), np.ones(len(graph.own_ns) - graph.count, bool)))


def _stalled_time(graph: Graph, stalls: Iterable[HostSpan]) -> tuple[Flags, Ints]:
    """Mark host calls that are at least half in stalls; and the stalled part of the time before each node.

    The device becomes idle only when a pause has lasted for a while: all of it is a stall if half of it is, or if it
    covers half of the stall.
    """
    in_stall, stalled_ns = np.zeros(graph.count, bool), np.zeros(graph.count, np.int64)
    window_stalls = [stall for stall in stalls if stall.window == graph.window]
    if not window_stalls:
        return in_stall, stalled_ns
    start, end = graph.column("start_ns"), graph.column("end_ns")
    gap_ns = _gap_ns(graph)
    hosts = np.flatnonzero(graph.column("what") == HOST)
    calls_of = {rank: hosts[rows] for rank, rows in rows_by_key(graph.column("rank")[hosts]).items()}
    for stall in window_stalls:
        calls = calls_of.get(stall.rank, hosts[:0])
        begin, until, pause_ns = start[calls], end[calls], gap_ns[calls]
        inside_ns = np.minimum(until, stall.end_ns) - np.maximum(begin, stall.start_ns)
        in_stall[calls] |= (inside_ns > 0) & (2 * inside_ns >= until - begin)
        before_ns = np.minimum(begin, stall.end_ns) - np.maximum(begin - pause_ns, stall.start_ns)
        is_pause = 2 * before_ns >= np.minimum(pause_ns, stall.end_ns - stall.start_ns)
        stalled_ns[calls] += np.where(before_ns > 0, np.where(is_pause, pause_ns, before_ns), 0)
    return in_stall, np.minimum(stalled_ns, gap_ns)


def _usual_ns(graph: Graph, which: Flags) -> Ints:
    """Return the host time before some launches that other steps of the rank have there, too; 0 for other nodes.

    The same place is the same kernel with the same number in its step.
    """
    place = ["rank", "name", "nth"]
    launch = graph.launch[: graph.count]
    launched = graph.frame.select("rank", "step", "name", call=pl.Series(launch)).filter(pl.col("call") >= 0)
    calls = launched.sort("call").unique("call", keep="first", maintain_order=True)
    gap_ns = _gap_ns(graph)[calls["call"].to_numpy()]
    at_place = calls.with_columns(
        pl.int_range(pl.len()).over("rank", "step", "name").alias("nth"), pl.Series("gap_ns", gap_ns, pl.Int64)
    )
    selected = at_place.filter(pl.Series(which[calls["call"].to_numpy()]))
    other_steps = selected.join(at_place, on=place, suffix="_other").filter(pl.col("step") != pl.col("step_other"))
    usual = other_steps.group_by("call").agg(pl.col("gap_ns_other").quantile(_USUAL_QUANTILE, "higher").cast(pl.Int64))
    usual_ns = np.zeros(graph.count, np.int64)
    usual_ns[usual["call"].to_numpy()] = usual["gap_ns_other"].to_numpy()
    return usual_ns


def _host_state_of(graph: Graph, which: Flags) -> pl.Series:
    """Return the column of the state of the host in its calls, for some of them only."""
    state = np.where(which, graph.column("host_state"), -1)
    return pl.Series("host_state", state, dtype=graph.frame["host_state"].dtype)


def _gaps() -> pl.Expr:
    return pl.col(*GAP_COLUMNS.values())


def _gap_ns(graph: Graph, *states: str) -> Ints:
    """Return the host time before each of the ranks' nodes in some states; without states, in all."""
    columns = [GAP_COLUMNS[state] for state in states or GAP_COLUMNS]
    return np.asarray(graph.frame.select(pl.sum_horizontal(columns)).to_series().to_numpy())


def _pauses_after(graph: Graph, calls: Flags) -> Ints:
    """Return the host's pauses between one of the calls that waited and the next launch, beyond the usual time.

    Time inside ops is not a pause: they launch what is needed. After a call that found the device idle, a pause counts
    for as long as those after waits in such a call take, for it alone delays nothing. So does one after a call in the
    middle of a pause: Python that runs for long before the call, too, runs for other reasons than the call.
    """
    on_host = np.asarray(graph.column("what") == HOST)
    previous = np.clip(graph.chain[: graph.count], 0, graph.count - 1)
    is_next = on_host & (graph.chain[: graph.count] >= 0)
    gap_ns = _gap_ns(graph, host_state.PYTHON, host_state.LOCK)
    usual_ns = int(np.median(gap_ns[on_host])) if on_host.any() else 0
    beyond_ns = np.maximum(gap_ns - usual_ns, 0)
    drained = _is_drained(graph, calls)
    pauses_ns = np.where(is_next & drained[previous], beyond_ns, 0)
    pauses_ns = _without_other_python(pauses_ns, beyond_ns, drained, previous)
    busy_ns, _ = _compute_around(graph)
    finds_idle = calls & (busy_ns >= 0) & (busy_ns <= graph.column("end_ns"))
    after_idle = np.flatnonzero(is_next & finds_idle[previous])
    typical_ns = _typical_ns(graph, pauses_ns, previous, after_idle)
    pauses_ns[after_idle] = np.maximum(pauses_ns[after_idle], np.minimum(beyond_ns[after_idle], typical_ns))
    return pauses_ns


def _typical_ns(graph: Graph, pauses_ns: Ints, previous: Ints, nodes: Ints) -> Ints:
    """Typical time of pauses after waits in the call before some nodes, in ns: on the rank, else in all calls.

    One call may read a value, another one wait for a batch: what the host does after them differs.
    """

    def calls_before(rows: Ints) -> pl.DataFrame:
        return pl.DataFrame([graph.frame["rank"].gather(rows), graph.frame["call"].gather(previous[rows])])

    after_waits = np.flatnonzero(pauses_ns > 0)
    exact = pl.Series("pause_ns", pauses_ns[after_waits]).cast(pl.Float64)
    mean_ns = (pl.col("pause_ns") ** 2).sum() / pl.col("pause_ns").sum()
    by_call = calls_before(after_waits).hstack([exact]).group_by("rank", "call")
    means = by_call.agg(mean_ns.cast(pl.Int64).alias("mean_ns"))
    typical = calls_before(nodes).join(means, on=["rank", "call"], how="left", maintain_order="left")
    return np.asarray(typical["mean_ns"].fill_null(_mean_by_time(pauses_ns)).to_numpy())


def _without_other_python(pauses_ns: Ints, before_ns: Ints, drained: Flags, previous: Ints) -> Ints:
    """Return the pauses after calls, those in the middle of a longer pause no longer than after other calls.

    `before_ns` is the pause before each node, `drained` says which follow a wait without a launch, `previous` what
    precedes them.
    """
    ordinary = np.sort(pauses_ns[pauses_ns > 0])
    while True:  # until no more sequences of calls turn out to begin in a pause
        usual_ns = _median_by_time(ordinary)
        within = drained & ~drained[previous] & (before_ns >= max(_SPLIT_RATIO * usual_ns, 1))
        while (more := drained & within[previous] & ~within).any():
            within = within | more
        outside = np.sort(pauses_ns[(pauses_ns > 0) & ~within[previous]])
        if len(outside) >= len(ordinary) or not len(outside):
            break
        ordinary = outside
    is_other = within[previous] & (usual_ns >= _SHORT_RATIO * pauses_ns)
    return np.where(is_other, np.minimum(pauses_ns, usual_ns), pauses_ns)


def _median_by_time(times_ns: Ints) -> int:
    """Return the duration up to which half of the time is in shorter ones; `times_ns` are sorted. 0 for none."""
    reach_ns = np.cumsum(times_ns)
    return int(times_ns[np.searchsorted(reach_ns, reach_ns[-1] / 2)]) if len(times_ns) else 0


def _mean_by_time(times_ns: Ints) -> int:
    """Return the mean of durations, each weighted by itself: how long what most of the time is due to takes."""
    exact = times_ns.astype(np.float64)
    return int((exact**2).sum() / max(exact.sum(), 1.0))


@memoize
def _blocking_calls(graph: Graph) -> Flags:
    """Return the synchronizing calls after which the device is idle, except for the shortest times.

    Those are shorter than a tenth of the mean, weighted by time: what most of the idle time is due to is longer.
    """
    synchronizes = _in_state(graph, host_state.SYNCHRONIZE)
    pauses_ns = _pauses_after(graph, synchronizes)
    following = np.flatnonzero(pauses_ns)
    late_ns = graph.column("end_ns") - graph.column("start_ns") - graph.own_ns[: graph.count]
    np.add.at(late_ns, graph.chain[following], pauses_ns[following])
    idle_ns = np.where(synchronizes, np.minimum(_idle_after(graph), late_ns), 0)
    return np.asarray(synchronizes & (idle_ns > 0) & (idle_ns >= _SHORT_RATIO * _mean_by_time(idle_ns)))


def _idle_after(graph: Graph) -> Ints:
    """Return for each host call how long compute is idle from its start until the first compute launched after it."""
    busy_ns, next_ns = _compute_around(graph)
    is_known = (busy_ns >= 0) & (next_ns >= 0)
    return np.where(is_known, np.maximum(next_ns - np.maximum(busy_ns, graph.column("start_ns")), 0), 0)


def _compute_around(graph: Graph) -> tuple[Ints, Ints]:
    """Return for each host call when the compute launched before it ends, and when that launched after it starts.

    -1 where there is none, and for nodes that are no host calls.
    """
    start, end, rank = (graph.column(name) for name in ("start_ns", "end_ns", "rank"))
    launch = graph.launch[: graph.count]
    computes = graph.matches("kind", "compute") & (graph.column("what") == WORK) & (launch >= 0)
    busy_ns, next_ns = np.full(graph.count, -1, np.int64), np.full(graph.count, -1, np.int64)
    hosts = np.flatnonzero(graph.column("what") == HOST)
    computing = np.flatnonzero(computes)
    calls_of = {rank_number: hosts[rows] for rank_number, rows in rows_by_key(rank[hosts]).items()}
    for rank_number, rows in rows_by_key(rank[computing]).items():
        work = computing[rows]
        work = work[np.argsort(launch[work], kind="stable")]
        reach_ns = np.maximum.accumulate(end[work])
        first_ns = np.minimum.accumulate(start[work][::-1])[::-1]
        calls = calls_of.get(rank_number, hosts[:0])
        place = np.searchsorted(launch[work], calls, side="right")
        busy_ns[calls[place > 0]] = reach_ns[place[place > 0] - 1]
        next_ns[calls[place < len(work)]] = first_ns[place[place < len(work)]]
    return busy_ns, next_ns


def _is_drained(graph: Graph, calls: Flags) -> Flags:
    """Return the host nodes after which nothing is queued: calls that waited, and what follows without a launch."""
    launches = np.zeros(len(graph.own_ns), bool)
    launches[graph.launch[graph.launch >= 0]] = True
    waited = graph.column("end_ns") - graph.column("start_ns") > graph.own_ns[: graph.count]
    drained = np.asarray(waited & calls)
    keeps = ~launches[: graph.count] & (graph.column("what") == HOST)
    previous = graph.chain[: graph.count]
    before = np.clip(previous, 0, graph.count - 1)
    while True:  # once for each call in the longest sequence of calls without a launch
        more = keeps & (previous >= 0) & drained[before] & ~drained
        if not more.any():
            return drained
        drained = drained | more


def _in_state(graph: Graph, what: str) -> Flags:
    return np.asarray(graph.column("host_state") == host_state.HOST_STATES.index(what))


def _without_state(graph: Graph, state: str) -> Graph:
    """Return the graph without the host time in a state, between calls and in calls."""
    return _without_waits(_with_shorter_gaps(graph, _gap_ns(graph, state)), _in_state(graph, state))


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


def _with_shorter_gaps(graph: Graph, by_ns: Ints, *, before_window: bool = False) -> Graph:
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


def _with_zero_time(graph: Graph, which: Flags) -> Graph:
    """Return the graph with zero time for some of the ranks' nodes; for collectives, on all ranks."""
    nodes = np.flatnonzero(which)
    return graph.with_durations(np.concatenate((nodes, graph.done[nodes])), 0)


def _without_waits(graph: Graph, which: Flags) -> Graph:
    """Return the graph with zero time and no waits for some host calls."""
    blocked = np.concatenate((which, np.zeros(len(graph.own_ns) - graph.count, bool)))
    remaining = ~blocked[graph.edges.waiting] | (graph.edges.awaited < 0)
    return _with_zero_time(replace(graph, edges=graph.edges.select(remaining)), which & (graph.column("what") != WORK))
