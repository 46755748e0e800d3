"""Host time as a cause: late launches, data loading, allocator calls, saves, and FSDP1's rate limiter."""

import numpy as np
import polars as pl

from tracekit.analysis.host import host_stalls, idle_after_sync, recurring_pauses
from tracekit.analysis.parallelism import late_ranks
from tracekit.analysis.time import host_state
from tracekit.model.columns import rows_by_key
from tracekit.model.memoize import memoize
from tracekit.model.sweep_line import Flags, Ints
from tracekit.replay.graph import host_lead
from tracekit.replay.graph.causes.cause import Cause, Kind, Pricing
from tracekit.replay.graph.dependency_graph import RELEASE, Graph, InsufficientDataError, replace_unequal
from tracekit.replay.graph.nodes import GAP_COLUMNS, HOST, STEP_END, WORK

_SHORT_RATIO = 0.1
_LEAD_ROUNDS = 8  # replays; a lead passes from wait to wait: with ten waits in each step, eight found all
_PAGEABLE_TO_DEVICE = r"HtoD.*Pageable"
_MIN_OTHERS = 2
"""Other steps of which a median is usual."""
_SPLIT_RATIO = 0.5
"""A call is in the middle of a pause if the host pauses before it for this share of the usual pause after a call."""


def late_launch(graph: Graph) -> Graph:
    """Remove the host's time between its calls and in launches."""
    if not graph.on_device:
        pauses_ns = _recurring(graph, gap_ns(graph, host_state.PYTHON))
        return with_shorter_gaps(graph, pauses_ns, before_window=True)
    late_ns = gap_ns(graph, host_state.PYTHON, host_state.OP, host_state.LAUNCH, host_state.LOCK)
    return with_zero_time(_with_leading_pause(graph, late_ns), in_state(graph, host_state.LAUNCH))


def rate_limiter(graph: Graph) -> Graph:
    """Remove the waits of FSDP1's rate limiter."""
    return without_waits(graph, in_state(graph, host_state.RATE_LIMITER))


def data_loading(graph: Graph) -> Graph:
    """Remove the time of data loading."""
    on_host = (graph.column("what") == HOST) & graph.matches("kind", "compute")
    return with_zero_time(_without_phase(graph, host_state.DATA), on_host & graph.matches("phase", "data"))


def compilation(graph: Graph) -> Graph:
    """Remove the time in compilers."""
    return without_waits(_without_phase(graph, host_state.COMPILE), in_state(graph, host_state.COMPILE))


def garbage_collection(graph: Graph) -> Graph:
    """Remove the time in Python's garbage collector."""
    collects = in_state(graph, host_state.GARBAGE_COLLECTION)
    return without_waits(_without_phase(graph, host_state.GARBAGE_COLLECTION), collects)


def _without_phase(graph: Graph, state: str) -> Graph:
    """Graph without the host time in a state before its nodes, of which the first may be before the first step.

    That delays the device more than others do, for nothing is queued when a recording begins: it counts by the share of
    its time that the others cost. A single step's counts whole.
    """
    state_ns = gap_ns(graph, state)
    shorter = with_shorter_gaps(graph, state_ns)
    is_first = _begin_window(graph)
    if not state_ns[is_first].any():
        return shorter
    is_single_step = graph.windows["step"].n_unique() == 1
    share = 1.0 if is_single_step else _saved_share(graph, shorter, np.where(is_first, 0, state_ns))
    counted_ns = np.where(is_first, np.round(share * state_ns), state_ns).astype(np.int64)
    return with_shorter_gaps(graph, counted_ns, before_window=True)


def _with_leading_pause(graph: Graph, by_ns: Ints) -> Graph:
    """Graph with shorter gaps, also before the first call of a window by what other steps lose before theirs.

    What the host does before the first call of the first step is not known, for the recording begins in it. If the
    other steps lose time before their first calls, for which the device is idle before their first work, it loses their
    median, at most its gap; that counts by the share of the time that the others cost, for nothing is queued when a
    recording begins.
    """
    shorter = with_shorter_gaps(graph, by_ns)
    calls = graph.frame.select("at", "rank", "step", "start_ns", "what", pl.Series("by_ns", by_ns)).filter(
        pl.col("what") == HOST, pl.col("step").is_not_null()
    )
    first_calls = calls.sort("start_ns", "at").unique(["rank", "step"], keep="first", maintain_order=True)
    lost_ns = pl.min_horizontal("by_ns", pl.col("idle_ns").fill_null(0))
    first_calls = first_calls.join(_idle_before_steps(graph), on=["rank", "step"], how="left").with_columns(
        by_ns=lost_ns
    )
    is_begin = pl.col("at").is_in(np.flatnonzero(_begin_window(graph)).tolist())
    other_steps = first_calls.filter(~is_begin).group_by("rank").agg(pl.len(), pl.col("by_ns").quantile(0.5, "lower"))
    begins = (
        first_calls.filter(is_begin).drop("by_ns").join(other_steps.filter(pl.col("len") >= _MIN_OTHERS), on="rank")
    )
    if not begins["by_ns"].sum():
        return shorter
    at = begins["at"].to_numpy()
    host_ns = gap_ns(graph, host_state.PYTHON, host_state.OP, host_state.LAUNCH, host_state.LOCK)[at]
    leading_ns = np.zeros(graph.count, np.int64)
    leading_ns[at] = np.minimum(begins["by_ns"].to_numpy(), host_ns)
    others_ns = np.where(leading_ns > 0, 0, by_ns)
    share = _saved_share(graph, shorter, others_ns)
    # Calls of other threads begin with the window, too: what they wait for is in it.
    counted_ns = np.round(share * leading_ns).astype(np.int64)
    return with_shorter_gaps(with_shorter_gaps(graph, others_ns), counted_ns, before_window=True)


def _idle_before_steps(graph: Graph) -> pl.DataFrame:
    """Time for which a rank's devices are idle before the first work of a step: columns rank, step, idle_ns."""
    work = graph.frame.select("rank", "step", "start_ns", "end_ns", "what").filter(pl.col("what") == WORK)
    busy_until_ns = pl.col("end_ns").cum_max().shift(1).over("rank")
    idle_ns = (pl.col("start_ns") - busy_until_ns).clip(0)
    ordered = work.sort("start_ns").with_columns(idle_ns=idle_ns)
    return ordered.unique(["rank", "step"], keep="first", maintain_order=True).select("rank", "step", "idle_ns")


def _begin_window(graph: Graph) -> Flags:
    """Mark the nodes that begin with the window."""
    released = graph.edges.waiting[graph.edges.kind == RELEASE]
    is_first = np.zeros(graph.count, bool)
    is_first[released[released < graph.count]] = True
    return is_first


def allocator(graph: Graph) -> Graph:
    """Remove the allocator's device calls."""
    return _without_state(graph, host_state.ALLOCATOR)


def oversubscribed_cores(graph: Graph) -> Graph:
    """Return the graph with each op whose threads lack processors as fast as the fastest identical one.

    Raises InsufficientDataError where no rank has such ops.
    """
    if graph.contended_ops.is_empty():
        raise InsufficientDataError("no ops of a CPU run are slow because their threads lack processors")
    excess = graph.contended_ops.select("rank", "excess_ns", ref="activity_id").unique(["rank", "ref"], keep="first")
    nodes = graph.frame.select("rank", "ref", at=pl.int_range(pl.len(), dtype=pl.Int64), kind="kind")
    ops = nodes.filter(pl.col("kind") == "compute").join(excess, on=["rank", "ref"])
    at = ops["at"].to_numpy()
    return graph.with_durations(at, np.maximum(graph.own_ns[at] - ops["excess_ns"].to_numpy(), 0))


def checkpoint(graph: Graph) -> Graph:
    """Remove the time in which saves block training."""
    return with_zero_time(_without_state(graph, host_state.CHECKPOINT), graph.matches("phase", "checkpoint"))


LATE_LAUNCH = Cause(
    name="late-launch",
    loss="late launches by the host",
    codes=("HOST001",), kind=Kind.HOST, transform=late_launch, pricing=Pricing.CONSEQUENCE, is_before_window=True,
    is_usual_before_window=True,
    summary="the host takes no time between calls and in launches",
    basis="host time between recorded calls, without data loading, saves, allocator calls and waits",
    removed_stalls=(
        host_stalls.PROFILER, *host_stalls.PREPARATION, host_stalls.LAUNCH, host_stalls.OTHER,
    ),
)  # fmt: skip
RATE_LIMITER = Cause(
    name="rate-limiter",
    loss="FSDP1's limit of two all-gathers",
    codes=("HOST002",), kind=Kind.HOST, transform=rate_limiter, confidence=0.6,
    summary="FSDP1's limit of two all-gathers never delays the host",
    basis="rate_limiter spans",
)  # fmt: skip
DATA_LOADING = Cause(
    name="data-loading",
    loss="waiting for data",
    codes=("HOST003",), kind=Kind.HOST, transform=data_loading, pricing=Pricing.SOURCE,
    idle_part=late_ranks.DATA, is_before_window=True, is_hidden_elsewhere=True,
    is_attainable=True,
    summary="every batch is ready when requested",
    basis="phase data and DataLoader spans",
    removed_stalls=(host_stalls.DATA,),
)  # fmt: skip
COMPILATION = Cause(
    name="compilation",
    loss="compiling",
    codes=("HOST005",), kind=Kind.HOST, transform=compilation, pricing=Pricing.SOURCE,
    idle_part=late_ranks.COMPILE, is_before_window=True, is_hidden_elsewhere=True,
    is_attainable=True,
    summary="nothing is compiled within the steps",
    basis="spans and Python functions of torch.compile, Triton and run-time compilers",
    removed_stalls=(host_stalls.COMPILE,),
)  # fmt: skip
GARBAGE_COLLECTION = Cause(
    name="garbage-collection",
    loss="Python's garbage collection",
    codes=("HOST006",), kind=Kind.HOST, transform=garbage_collection, pricing=Pricing.SOURCE,
    idle_part=late_ranks.GARBAGE_COLLECTION, is_before_window=True, is_hidden_elsewhere=True,
    is_attainable=True,
    summary="Python's garbage collector never runs within the steps",
    basis="calls of gc.collect in recorded stacks, and spans of gc.callbacks",
    removed_stalls=(host_stalls.GARBAGE_COLLECTION,),
)  # fmt: skip
ALLOCATOR = Cause(
    name="allocator",
    loss="the allocator's calls to the device",
    codes=("MEM001",), kind=Kind.HOST, transform=allocator, pricing=Pricing.SOURCE,
    idle_part=late_ranks.ALLOCATOR, is_hidden_elsewhere=True,
    is_attainable=True,
    summary="the allocator makes no calls to the device",
    basis="cudaMalloc, cudaFree and their waits",
    removed_stalls=(host_stalls.RETRY, host_stalls.ALLOCATION),
)  # fmt: skip
OVERSUBSCRIBED_CORES = Cause(
    name="oversubscribed-cores",
    loss="ops that share cores",
    codes=("HOST007",), kind=Kind.HOST, transform=oversubscribed_cores,
    pricing=Pricing.SOURCE, confidence=0.7,
    summary="ops of a CPU run take as long as the fastest with the same inputs",
    basis="ops with the same name and input shapes, where most of these are slow",
)  # fmt: skip
CHECKPOINT = Cause(
    name="checkpoint",
    loss="saves that block training",
    codes=("CKPT001",), kind=Kind.HOST, transform=checkpoint, pricing=Pricing.SOURCE,
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
    earlier_released = replace_unequal(graph, edges=replace_unequal(edges, lag_ns=lag_ns))
    return earlier_released.with_chain(np.maximum(chain_ns, 0))


def with_zero_time(graph: Graph, which: Flags) -> Graph:
    """Return the graph with zero time for some of the ranks' nodes; for collectives, on all ranks."""
    nodes = np.flatnonzero(which)
    return graph.with_durations(np.concatenate((nodes, graph.done[nodes])), 0)


def without_waits(graph: Graph, which: Flags) -> Graph:
    """Return the graph with zero time and no waits for some host calls."""
    blocked = np.concatenate((which, np.zeros(len(graph.own_ns) - graph.count, bool)))
    remaining = ~blocked[graph.edges.waiting] | (graph.edges.awaited < 0)
    waiting_less = replace_unequal(graph, edges=graph.edges.select(remaining))
    return with_zero_time(waiting_less, which & (graph.column("what") != WORK))


def blocking_sync(graph: Graph) -> Graph:
    """Remove the host's waits that leave the device idle, and its pauses after them as far as queued work hides them.

    Those of saves, allocator and rate limiter stay. Raises InsufficientDataError for a CPU run.
    """
    if not graph.on_device:
        raise InsufficientDataError("no device activity was recorded, so what the host waits for is not known")
    return _without_hidden_pauses(graph, np.ones(graph.count, bool))


def copies_awaited(graph: Graph) -> Graph:
    """Remove the host's waits for copies to the device that leave it idle, and pauses after them, as `blocking_sync`.

    The call that copies pageable memory returns when that is done: it waits for all queued work before, too.
    """
    waits = _waits_for_copies(graph)
    return _without_hidden_pauses(graph, waits) if waits.any() else graph


def _without_hidden_pauses(graph: Graph, calls: Flags) -> Graph:
    """Remove blocking waits among some calls, with the pauses after them unless the step stays launch-bound.

    Where the host launches the last work later than the device would end it, the step is launch-bound without the
    waits, too: then nothing is queued that hides pauses, and they stay.
    """
    without_pauses = without_waits_and_pauses(graph, calls)
    with_pauses = without_waits(graph, _blocking_calls(graph) & calls)
    work = np.flatnonzero(graph.column("what") == WORK)
    launches = graph.launch[work]
    launched_ns = with_pauses.replay.end_ns[launches[launches >= 0]].max(initial=0)
    is_launch_bound = launched_ns > without_pauses.replay.end_ns[graph.done[work]].max(initial=0)
    return with_pauses if is_launch_bound else without_pauses


def without_waits_and_pauses(graph: Graph, calls: Flags) -> Graph:
    """Remove those of the host's waits in some calls that leave the device idle, and its pauses after them.

    While the host pauses after a wait, nothing is queued: that pause would be hidden without the wait. A pause after a
    call that found the device idle is for what the host reads, too. A wait after which the device goes on costs
    nothing, and stays: one for a copy on another stream, or directly before a launch.
    """
    blocking = _blocking_calls(graph) & calls
    return without_waits(_with_leading_pause(graph, _pauses_after(graph, blocking)), blocking)


def _waits_for_copies(graph: Graph) -> Flags:
    """Mark the host's waits directly after a call that copies pageable memory to the device: they are for the copy."""
    name = graph.frame["name"]
    is_copy = graph.matches("kind", "memcpy") & name.str.contains(_PAGEABLE_TO_DEVICE).fill_null(value=False).to_numpy()
    launches = graph.launch[: graph.count][is_copy]
    return in_state(graph, host_state.SYNCHRONIZE) & np.isin(graph.chain[: graph.count], launches[launches >= 0])


def idle_after_waits_of_few_ranks(graph: Graph) -> Ints:
    """Recorded time that compute idles after each blocking call, directly or at later launches, in ns.

    Only on ranks that wait for the device more often in a step than most ranks do: waits of all make none of them late.
    """
    idle_ns = np.zeros(graph.count, np.int64)
    if not graph.on_device or graph.frame["rank"].n_unique() == 1:
        return idle_ns
    calls = _numbered_calls(graph)
    at = calls.filter(~idle_after_sync.is_of_most(calls["rank"].n_unique()))["at"].to_numpy()
    blocking = at[_blocking_calls(graph)[at]]
    if len(blocking):
        idle_ns[blocking] = _idle_after_waits(graph, in_state(graph, host_state.SYNCHRONIZE))[blocking]
    return idle_ns


def _without_state(graph: Graph, state: str) -> Graph:
    """Return the graph without the host time in a state, between calls and in calls."""
    return without_waits(with_shorter_gaps(graph, gap_ns(graph, state)), in_state(graph, state))


def _recurring(graph: Graph, python_ns: Ints) -> Ints:
    """Python pauses that recur at the same place of the steps, in ns per node.

    On a CPU run the host shares its cores with other processes: a pause that occurs once is not due to training. What
    the host does before the first op of the first step is not known: if the other steps pause there, it pauses for as
    long as their median. A pause at the end of the last step is before the first op of one that is not recorded; of
    the pauses at this place, the first step's has the rest.
    """
    place = ["rank", "phase", "kind", "name", "nth"]
    in_steps = graph.frame.select("rank", "step", "start_ns", "end_ns").drop_nulls("step")
    steps = in_steps.group_by("rank").agg(
        pl.col("step").n_unique().alias("steps"),
        pl.col("step").min().alias("first_step"),
        ((pl.col("end_ns").max() - pl.col("start_ns").min()) / pl.col("step").n_unique()).alias("mean_ns"),
    )
    nth = pl.int_range(pl.len()).over("rank", "step", "phase", "kind", "name").alias("nth")
    rows = graph.frame.select("at", "rank", "step", *place[1:4], nth, pause_ns=pl.Series(python_ns))
    begins = rows.filter(pl.Series(_begin_window(graph)))
    first_place = begins.select("step", *place).unique("rank", keep="first", maintain_order=True)
    last_pauses = rows.filter(kind=STEP_END).select("at", "rank", "pause_ns").join(first_place, on="rank")
    rows = pl.concat([rows.filter(pl.col("kind").ne_missing(STEP_END)), last_pauses.select(rows.columns)])
    longest_ns = pl.col("pause_ns").max().over("rank", "step", "phase", "kind", "name")
    is_long = (longest_ns >= recurring_pauses.PAUSE_NS) & (pl.col("pause_ns") >= recurring_pauses.LOOP_PAUSE_NS)
    long = rows.filter(pl.col("step").is_not_null(), is_long).join(steps, on="rank")
    recurring = recurring_pauses.recurring(long, place, pl.col("step").min().over(place) > pl.col("first_step"))
    late = np.zeros(graph.count, np.int64)
    late[recurring["at"].to_numpy()] = recurring["pause_ns"].to_numpy()
    begins = begins.filter(~pl.col("at").is_in(recurring["at"].implode())).drop("pause_ns")
    medians = recurring.group_by(place).agg(pl.col("pause_ns").quantile(0.5, "lower").cast(pl.Int64))
    unseen = begins.join(medians, on=place, nulls_equal=True).join(
        last_pauses.select("rank", last_ns="pause_ns"), on="rank", how="left"
    )
    late[unseen["at"].to_numpy()] = (unseen["pause_ns"] - unseen["last_ns"].fill_null(0)).clip(0).to_numpy()
    return late


def _saved_share(graph: Graph, changed: Graph, removed_ns: Ints) -> float:
    """Return by which share of the time removed on the rank with most of it the last work ends earlier, 0 to 1."""
    is_work = graph.frame["kind"].is_not_null().to_numpy()
    before_ns, after_ns = (variant.replay.end_ns[variant.done][is_work].max() for variant in (graph, changed))
    by_rank = (
        graph.frame.select("rank", ns=pl.Series(removed_ns, dtype=pl.Int64)).group_by("rank").agg(pl.col("ns").sum())
    )
    most_ns = int(by_rank["ns"].to_numpy().max(initial=0))
    return float(np.clip((before_ns - after_ns) / max(1, most_ns), 0, 1))


BLOCKING_SYNC = Cause(
    name="blocking-sync",
    loss="waits of the host for the device",
    codes=("HOST002",), kind=Kind.HOST, transform=blocking_sync, pricing=Pricing.SOURCE,
    idle_part=late_ranks.SYNCHRONIZE, is_before_window=True, is_usual_before_window=True, is_hidden_elsewhere=True,
    is_attainable=True, idle_ns=idle_after_waits_of_few_ranks,
    summary="the host never waits for the device in a call that leaves it idle",
    basis="synchronizing calls after which the device is idle at once or at later launches, except those of saves and "
    "the allocator, and the host's pause after each; FSDP1's rate limiter stays",
    removed_stalls=(host_stalls.SYNC,),
    excluded_stalls=(host_stalls.RETRY, host_stalls.ALLOCATION, host_stalls.DATA, host_stalls.SAVE),
)  # fmt: skip


@memoize
def _blocking_calls(graph: Graph) -> Flags:
    """Return the synchronizing calls after which the device is idle, except for the shortest times.

    Those are shorter than a tenth of the mean, weighted by time: what most of the idle time is due to is longer. Each
    wait takes the host's lead: without some, later ones take it instead, and are blocking calls, too.
    """
    synchronizes = in_state(graph, host_state.SYNCHRONIZE)
    idle_ns = np.where(synchronizes, _idle_after_waits(graph, synchronizes), 0)
    short_ns = max(1, _SHORT_RATIO * _mean_by_time(idle_ns))
    blocking = np.asarray(idle_ns >= short_ns)
    for _ in range(_LEAD_ROUNDS if blocking.any() else 0):
        remaining = without_waits(graph, blocking)
        more = synchronizes & ~blocking & (_replayed_idle_ns(remaining, synchronizes & ~blocking) >= short_ns)
        if not more.any():
            break
        blocking = blocking | more
    return blocking


def _idle_after_waits(graph: Graph, synchronizes: Flags) -> Ints:
    """Recorded time that compute idles after each synchronizing call, at most its wait and pause, in ns."""
    start_ns, end_ns = graph.column("start_ns"), graph.column("end_ns")
    pauses_ns = _pauses_after(graph, synchronizes)
    following = np.flatnonzero(pauses_ns)
    waited_ns = end_ns - start_ns - graph.own_ns[: graph.count]
    launch_bound_ns = host_lead.idle_due_to_waits(graph, np.where(synchronizes, waited_ns, 0), end_ns)
    late_ns = waited_ns.copy()
    np.add.at(late_ns, graph.chain[following], pauses_ns[following])
    busy_ns, next_ns = _compute_around(graph)
    is_known = (busy_ns >= 0) & (next_ns >= 0)
    until_next_ns = np.maximum(next_ns - np.maximum(busy_ns, start_ns), 0)
    return np.asarray(np.minimum(np.maximum(np.where(is_known, until_next_ns, 0), launch_bound_ns), late_ns))


def _replayed_idle_ns(graph: Graph, synchronizes: Flags) -> Ints:
    """Time that compute waits for launches after each synchronizing call in the replay, at most the wait, in ns."""
    start_ns, end_ns = graph.replay.start_ns[: graph.count], graph.replay.end_ns
    previous = graph.chain[: graph.count]
    ready_ns = end_ns[np.maximum(previous, 0)] + graph.chain_ns[: graph.count]
    waited_ns = np.where(synchronizes & (previous >= 0), np.maximum(start_ns - ready_ns, 0), 0)
    return host_lead.idle_due_to_waits(graph, waited_ns, end_ns[graph.done])


def _pauses_after(graph: Graph, calls: Flags) -> Ints:
    """Return the host's pauses between one of the calls that waited and the next launch, beyond the usual time.

    Time inside ops is not a pause: they launch what is needed. After a call that found the device idle, a pause counts
    for as long as those after waits in such a call take, for it alone delays nothing. So does one after a call in the
    middle of a pause: Python that runs for long before the call, too, runs for other reasons than the call.
    """
    on_host = np.asarray(graph.column("what") == HOST)
    previous = np.clip(graph.chain[: graph.count], 0, graph.count - 1)
    is_next = on_host & (graph.chain[: graph.count] >= 0)
    python_ns = gap_ns(graph, host_state.PYTHON, host_state.LOCK)
    usual_ns = int(np.median(python_ns[on_host])) if on_host.any() else 0
    beyond_ns = np.maximum(python_ns - usual_ns, 0)
    drained = _is_drained(graph, calls)
    pauses_ns = np.where(is_next & drained[previous], beyond_ns, 0)
    pauses_ns = _without_other_python(pauses_ns, beyond_ns, drained, previous)
    busy_ns, _ = _compute_around(graph)
    finds_idle = calls & (busy_ns >= 0) & (busy_ns <= graph.column("end_ns"))
    after_idle = np.flatnonzero(is_next & finds_idle[previous])
    typical_ns = _typical_ns(graph, pauses_ns, previous, after_idle)
    pauses_ns[after_idle] = np.maximum(pauses_ns[after_idle], np.minimum(beyond_ns[after_idle], typical_ns))
    waits = is_next & drained[previous]
    waits[after_idle] = True
    return _without_pauses_of_one_rank(graph, pauses_ns, waits)


def _without_pauses_of_one_rank(graph: Graph, pauses_ns: Ints, after_wait: Flags) -> Ints:
    """Return the pauses, those that one rank has alone after waits of all ranks no longer than on the other ranks."""
    rank_count = graph.frame["rank"].n_unique()
    if rank_count < 2 or not pauses_ns.any():
        return pauses_ns
    numbered = _numbered_calls(graph)
    at = numbered["at"].to_numpy()
    pauses = numbered.with_columns(dur_ns=pl.Series(pauses_ns[at], dtype=pl.Int64)).filter(pl.Series(after_wait[at]))
    alone = idle_after_sync.pauses_of_one_rank(pauses, rank_count)
    capped_ns = pauses_ns.copy()
    capped_ns[alone["at"].to_numpy()] = alone["usual_ns"].to_numpy()
    return capped_ns


@memoize
def _numbered_calls(graph: Graph) -> pl.DataFrame:
    """Calls of the hosts: at, rank, step, what, name, window, waits, nth (of its name in the step) and alike.

    `alike` is the number of ranks that wait for the device at least as often in the step as this one.
    """
    waits = pl.Series("waits", in_state(graph, host_state.SYNCHRONIZE))
    nodes = graph.frame.select("at", "rank", "step", "what", name="call", window=pl.lit(0)).with_columns(waits)
    numbered = nodes.filter(what=HOST).with_columns(nth=pl.int_range(pl.len()).over("rank", "step", "name"))
    alike = idle_after_sync.with_alike(numbered.group_by("window", "step", "rank").agg(pl.col("waits").sum()))
    of_step = ["window", "step", "rank"]
    return numbered.join(alike, on=of_step, how="left", nulls_equal=True, maintain_order="left")


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
