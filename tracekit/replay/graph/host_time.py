"""Host time between the calls that launch device work, and the work that blocking calls waited for."""

from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from tracekit.analysis.compute import avoidable_time
from tracekit.analysis.parallelism import pipeline_actions
from tracekit.analysis.time import backward_passes, host_state, trace_columns
from tracekit.model import sweep_line
from tracekit.model.columns import flags, ids, rows_of
from tracekit.model.sweep_line import NEVER, Flags, Ints
from tracekit.model.trace import Trace
from tracekit.replay.graph.nodes import HOST, STEP_END, WORK, edge_table, gap_series, number_nodes

STATE_COUNT = len(host_state.HOST_STATES)
ALLOCATOR, SYNCHRONIZE, LAUNCH = (
    host_state.HOST_STATES.index(state) for state in (host_state.ALLOCATOR, host_state.SYNCHRONIZE, host_state.LAUNCH)
)
_DRAINS = r"^(cuda|hip)(DeviceSynchronize|Free$|FreeHost|HostFree)|^cuCtxSynchronize"
_BLOCKS = r"^(cuda|hip)(Stream|Event)Synchronize|^cu(Stream|Event)Synchronize|^(cuda|hip)Memcpy(2D)?$"
_ASYNCHRONOUS = r"(?i)DtoD|PtoP|DeviceToDevice|Pinned"
_STAGED_BYTES = 128 << 10
"""For copies on a device, of pinned memory, and of so much to the device, CUDA's host calls do not wait: that they end
within the call is by chance. CUDA's documentation promises it for 64 KiB; recordings on H100 show copies of 81 and 128
KiB that ran long after their call had returned. Where larger ones do, these do not wait either."""
_ALLOCATES = r"^(cuda|hip)(Malloc|Free|HostAlloc|FreeHost|MallocHost|HostMalloc|HostFree|MemCreate|MemMap|MemUnmap)"
_LEAST_WAIT_NS = 200_000
"""A wait for a complete message takes less, on a busy host too; not from the trace."""
_LATE_END_RATIO, _LATEST_END_NS = 0.01, 4_000_000
"""Share of the host's wait by which the end of the awaited collective may be recorded later; at most a tick of a
scheduler (250 Hz): what ends after that is another collective."""
_NEVER = np.iinfo(np.int64).max
_BUSY = [
    host_state.HOST_STATES.index(state)
    for state in (host_state.DATA, host_state.CHECKPOINT, host_state.COMPILE, host_state.GARBAGE_COLLECTION)
]
"""States in which the host of a CPU run works: it waits for no collective meanwhile."""


_WORK_COLUMNS = (
    "ref", "lane", "kind", "name", "step", "phase", "unit", "span", "start_ns", "end_ns", "launch", "previous",
    "is_message",
)  # fmt: skip


@dataclass(frozen=True)
class Calls:
    """The host calls that launch work or may wait for it, in order, as one chain over the launching threads.

    `row` is the row of each in `trace.ops`. `gap_ns` is the host time before each call by state
    (`host_state.HOST_STATES`), shape (n, STATE_COUNT); that of the first call begins with the recording of its threads.
    `state` is that of the call itself. `own_ns` excludes waiting where `waits` are known.
    """

    row: Ints
    id: Ints
    start_ns: Ints
    end_ns: Ints
    gap_ns: Ints
    own_ns: Ints
    state: Ints
    drains: Flags
    blocks: Flags
    launches: Flags
    waits_itself: Flags
    step: pl.Series
    phase: pl.Series


def calls(trace: Trace) -> Calls:
    """Return the host calls of a trace with device activity; none where its launches are unknown.

    A call that launches work and returns when it is done has two rows: one that launches, one that waits.
    """
    recorded = _split(trace, _recorded_calls(trace))
    recorded = recorded.rows(np.lexsort((recorded.waits_itself, recorded.id, recorded.start_ns)))
    start, end = recorded.start_ns, recorded.end_ns
    reach = start
    if len(start):
        began = trace.ops["start_ns"].to_numpy()[host_state.is_launching(trace)]  # the recording of these threads
        reach = np.maximum.accumulate(np.append(min(start[0], began.min()), end))[:-1]
    gap_ns = time_by_state(trace, reach, np.maximum(start, reach))
    state = host_state.state_at(trace, start)
    state = np.where(state > LAUNCH, LAUNCH, state)
    # The waits of calls inside an op that also called the allocator are the allocator's.
    of_allocator = recorded.parent_id[recorded.allocates & (recorded.parent_id >= 0)]
    state[np.isin(recorded.parent_id, of_allocator) & (state == SYNCHRONIZE)] = ALLOCATOR
    own_ns = np.maximum(end - np.maximum(start, reach), 0)
    return Calls(
        recorded.row, recorded.id, start, end, gap_ns, own_ns, state,
        recorded.drains, recorded.blocks, recorded.launches, recorded.waits_itself,
        trace.ops["step"][recorded.row], trace.ops["phase"][recorded.row],
    )  # fmt: skip


def call_names(trace: Trace, calls: Calls) -> pl.Series:
    """Return the name of each call with that of the op around it, shape (n,)."""
    name, parent = trace.ops["name"], trace_columns.parent_rows(trace)[calls.row]
    is_op = (parent >= 0) & trace_columns.is_kind(trace, "cpu_op")[parent]
    pairs = pl.DataFrame({
        "parent": pl.concat([name, pl.Series("name", [""])])[np.where(is_op, parent, len(name))],
        "name": name[calls.row],
    })  # fmt: skip
    return pairs.select(pl.concat_str("parent", "name", separator=" / ").alias("parent")).to_series()


@dataclass(frozen=True)
class _CallRows:
    """The calls as recorded: their rows in `trace.ops`, and what each does; shape (n,)."""

    row: Ints
    id: Ints
    parent_id: Ints
    start_ns: Ints
    end_ns: Ints
    launches: Flags
    drains: Flags
    blocks: Flags
    allocates: Flags
    waits_itself: Flags

    def rows(self, which: Ints | Flags) -> "_CallRows":
        return _CallRows(*(column[which] for column in vars(self).values()))


def time_by_state(trace: Trace, from_ns: Ints, to_ns: Ints) -> Ints:
    """Return the host time in each of the disjoint, sorted spans, in ns by HOST_STATES, shape (n, STATE_COUNT)."""
    time_ns = np.zeros((len(from_ns), STATE_COUNT), np.int64)
    some = np.flatnonzero(to_ns > from_ns)
    spans = np.stack((from_ns[some], to_ns[some]), axis=1)
    pieces = sweep_line.pieces(spans, host_state.state_changes(trace))
    state = host_state.state_at(trace, pieces.start_ns)
    np.add.at(time_ns, (some[pieces.span], state), pieces.end_ns - pieces.start_ns)
    return time_ns


def build(trace: Trace) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return nodes and edges of a CPU run."""
    host = _host(trace)
    calls = _collectives(trace, host)
    first_call = len(host)
    start, end = host["start_ns"].to_numpy(), host["end_ns"].to_numpy()
    reach = np.maximum.accumulate(np.concatenate((start[:1], end)))[:-1] if first_call else start
    paused = np.maximum(start, reach)
    gap_ns = time_by_state(trace, reach, paused)
    awaited, until = _awaited_collectives(calls, reach, paused)
    waits = np.flatnonzero(awaited >= 0)
    waiting_ns = time_by_state(trace, reach[waits], np.minimum(until, paused)[waits])
    waiting_ns[:, _BUSY] = 0
    gap_ns[waits] = np.maximum(gap_ns[waits] - waiting_ns, 0)
    lag = (paused - until)[waits]
    own_ns = np.maximum(end - paused, 0)
    woken = _wake_up_ns(calls, start)
    avoidable = avoidable_time.avoidable(trace).select(ref="activity_id", avoidable_ns="saved_ns", avoidable_by="cause")
    host = host.join(avoidable, on="ref", how="left", maintain_order="left")
    nodes = host.with_columns(
        pl.Series("recomputed", np.isin(ids(host["ref"]), backward_passes.recomputed_ids(trace))),
        pl.Series("chain", np.arange(first_call, dtype=np.int64) - 1),
        pl.Series("chain_ns", gap_ns.sum(axis=1)),
        pl.Series("own_ns", own_ns),
        *gap_series(gap_ns),
        what=pl.lit(HOST, pl.Int8),
    )
    work = calls.drop("is_message").with_columns(
        pl.when(pl.col("previous") >= 0).then(pl.col("previous") + first_call).otherwise(-1).alias("chain"),
        pl.Series("chain_ns", woken),
        pl.Series("launch_ns", woken),
        (pl.col("end_ns") - pl.col("start_ns")).alias("own_ns"),
        what=pl.lit(WORK, pl.Int8),
    )
    edges = edge_table(waits, awaited[waits] + first_call, "sync", inferred=True, lag_ns=lag)
    return number_nodes(pl.concat([nodes, work], how="diagonal_relaxed")), edges


def _recorded_calls(trace: Trace) -> _CallRows:
    """Return the calls of the launching threads that launch, wait for or allocate something, in order of `ops`."""
    ops = trace.ops
    id_, start, dur = (ops[name].to_numpy().astype(np.int64, copy=False) for name in ("id", "start_ns", "dur_ns"))
    launches = np.zeros(ops.height, np.bool_)
    launch = trace_columns.launch_rows(trace)
    launches[launch[launch >= 0]] = True
    patterns = {"drains": _DRAINS, "blocks": _BLOCKS, "allocates": _ALLOCATES}
    runtime = trace_columns.is_kind(trace, "runtime")
    does = {what: runtime & trace_columns.is_named(trace, pattern) for what, pattern in patterns.items()}
    is_call = host_state.is_launching(trace) & np.logical_or.reduce([launches, *does.values()])
    none = np.zeros(ops.height, np.bool_)
    all_calls = _CallRows(
        np.arange(ops.height, dtype=np.int64), id_, trace_columns.parent_ids(trace), start, start + dur, launches,
        **does, waits_itself=none,
    )  # fmt: skip
    return all_calls.rows(np.flatnonzero(is_call))


def _split(trace: Trace, recorded: _CallRows) -> _CallRows:
    """Return the calls, with two rows for copies that return after they are done."""
    copies = trace.activities.filter(trace.activities["kind"] == "memcpy")
    if not copies.height:
        return recorded
    call = rows_of(recorded.id, ids(copies["launch_id"]))
    done_ns = copies["start_ns"].to_numpy() + copies["dur_ns"].to_numpy()
    blocking = ~_is_asynchronous(copies, call, recorded) & (call >= 0)
    last_ns = np.full(len(recorded.id), NEVER, np.int64)
    np.maximum.at(last_ns, call[blocking], done_ns[blocking])
    waits = recorded.launches & (last_ns > NEVER) & (last_ns <= recorded.end_ns)
    no = np.zeros(int(waits.sum()), np.bool_)
    first = recorded.rows(waits)
    begins = replace(first, end_ns=first.start_ns, waits_itself=no, drains=no, blocks=no)
    rest = replace(recorded, waits_itself=waits, launches=recorded.launches & ~waits)
    both = zip(vars(begins).values(), vars(rest).values(), strict=True)
    return _CallRows(*(np.concatenate(columns) for columns in both))


def _is_asynchronous(copies: pl.DataFrame, call: Ints, recorded: _CallRows) -> Flags:
    """Mark copies that the host never waits for; `call` is the row of each one's launch in `recorded`, or -1."""
    names = copies.select(
        to_device=pl.col("name").str.contains("HtoD", literal=True), is_async=pl.col("name").str.contains(_ASYNCHRONOUS)
    )
    to_device, size = flags(names["to_device"]), ids(copies["bytes"])
    later = to_device & (call >= 0)
    if later.any():
        later &= copies["start_ns"].to_numpy() > recorded.end_ns[call]
    staged_bytes = max(_STAGED_BYTES, int(size[later].max(initial=0)))
    return flags(names["is_async"]) | (to_device & (size >= 0) & (size <= staged_bytes))


def _host(trace: Trace) -> pl.DataFrame:
    """Return the compute, the issue calls of collectives, and the end of the last step where it is later, in order."""
    compute = trace.activities.filter(pl.col("kind") != "communication").select(
        pl.col("id").alias("ref"), "lane", "kind", "name", "step", "phase", "unit", "span", "start_ns",
        (pl.col("start_ns") + pl.col("dur_ns")).alias("end_ns"), pl.lit(-1, pl.Int64).alias("call"),
    )  # fmt: skip
    issues = (
        trace.activities.filter(pl.col("kind") == "communication")
        .select(pl.col("id").alias("call"), "launch_id")
        .join(trace.ops, left_on="launch_id", right_on="id")
        .select(
            pl.lit(None, pl.Int64).alias("ref"), "lane", pl.lit(None, pl.String).alias("kind"), "name", "step", "phase",
            "unit",
            "span", "start_ns", pl.col("start_ns").alias("end_ns"), "call",
        )
    )  # fmt: skip
    calls = pl.concat([compute, issues]).sort("start_ns", "end_ns", maintain_order=True)
    return pl.concat([calls, _end_of_last_step(trace, calls)], how="diagonal")


def _end_of_last_step(trace: Trace, calls: pl.DataFrame) -> pl.DataFrame:
    """Return a call without duration where the last step's mark ends, on the thread of the last call; none if earlier.

    Else what the host does between the last op and the end of the step would be in every step but the last one.
    """
    step = trace_columns.windows(trace).drop_nulls("step").sort("end_ns").tail(1)
    done_ns = (trace.activities["start_ns"] + trace.activities["dur_ns"]).max()
    return step.filter(pl.col("end_ns") > pl.lit(done_ns, pl.Int64)).select(
        "step",
        "end_ns",
        start_ns="end_ns",
        kind=pl.lit(STEP_END),
        name=pl.lit(STEP_END),
        lane=pl.lit(calls["lane"].last() if calls.height else None, pl.Int64),
        call=pl.lit(-1, pl.Int64),
    )


def _collectives(trace: Trace, host: pl.DataFrame) -> pl.DataFrame:
    """Return the collectives by lane and start, each with its issue call (launch, -1: unknown) and predecessor.

    A thread that runs them one after the other is a lane. Sends and receives that overlap wait for their peers only.
    """
    issues = host.select(pl.int_range(pl.len()).cast(pl.Int64).alias("launch"), "call").filter(pl.col("call") >= 0)
    is_message = pl.col("op").is_in(pipeline_actions.POINT_TO_POINT)
    messages = trace.collectives.select("activity_id", is_message.alias("is_message"))
    calls = (
        trace.activities.filter(pl.col("kind") == "communication")
        .join(issues, left_on="id", right_on="call", how="left", maintain_order="left")
        .join(messages, left_on="id", right_on="activity_id", how="left", maintain_order="left")
        .sort("lane", "start_ns", "id")
        .with_columns(pl.col("is_message").fill_null(value=False))
        .with_columns((pl.col("start_ns") + pl.col("dur_ns")).alias("end_ns"), pl.col("id").alias("ref"))
    )
    overlaps = (pl.col("start_ns") < pl.col("end_ns").shift(1).over("lane")).any().over("lane")
    return calls.with_columns(
        pl.col("launch").fill_null(-1),
        pl.when((pl.col("lane") == pl.col("lane").shift(1)) & ~overlaps)
        .then(pl.int_range(pl.len()).cast(pl.Int64) - 1)
        .otherwise(-1)
        .fill_null(-1)
        .alias("previous"),
    ).select(*_WORK_COLUMNS)


def _awaited_collectives(calls: pl.DataFrame, from_ns: Ints, to_ns: Ints) -> tuple[Ints, Ints]:
    """Return the collective whose end is the last within each pause of the host (-1: none), and that end.

    A send or receive of gloo ends where the host waits for it, so a short wait shows that it was complete before. On a
    busy machine the host goes on a little before the thread of the collective has written down its end.
    """
    ends, is_message = calls["end_ns"].to_numpy(), calls["is_message"].to_numpy()
    if not len(ends):
        return np.full(len(to_ns), -1, np.int64), to_ns
    # A message that ends later is one that the host waits for next.
    until_ns = to_ns + np.minimum(_LATE_END_RATIO * (to_ns - from_ns), _LATEST_END_NS).astype(np.int64)
    last, later = _last_until(ends, to_ns), _last_until(np.where(is_message, _NEVER, ends), until_ns)
    row = np.where((later >= 0) & (ends[later] > np.where(last >= 0, ends[last], -_NEVER)), later, last)
    least_ns = np.where(is_message[row], _LEAST_WAIT_NS, 0)
    is_awaited = (row >= 0) & (to_ns > from_ns) & (ends[row] > from_ns + least_ns)
    return np.where(is_awaited, row, -1), np.where(is_awaited, ends[row], to_ns)


def _last_until(ends: Ints, until_ns: Ints) -> Ints:
    """Index of the last end at or before each time; -1 where there is none."""
    order = np.argsort(ends, kind="stable")
    last = np.searchsorted(ends[order], until_ns, side="right") - 1
    return np.where(last >= 0, order[np.maximum(last, 0)], -1)


def _wake_up_ns(calls: pl.DataFrame, issued_ns: Ints) -> Ints:
    """Time that each collective's thread took to start it after its issue and its predecessor's end, in ns."""
    launch, previous = calls["launch"].to_numpy(), calls["previous"].to_numpy()
    start, end = calls["start_ns"].to_numpy(), calls["end_ns"].to_numpy()
    if not len(start):
        return start
    could = np.where(launch >= 0, issued_ns[np.maximum(launch, 0)] if len(issued_ns) else start, start.min())
    could = np.where(previous >= 0, np.maximum(could, end[np.maximum(previous, 0)]), could)
    is_known = (launch >= 0) | (previous >= 0)
    return np.asarray(np.where(is_known, np.maximum(start - could, 0), 0), np.int64)
