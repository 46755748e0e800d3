"""Host time between the calls that launch device work, and the work that blocking calls waited for."""

from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from tracekit.analysis.time import host_state, trace_columns
from tracekit.model import sweep_line
from tracekit.model.columns import flags, ids, rows_of
from tracekit.model.sweep_line import NEVER, Flags, Ints
from tracekit.model.trace import Trace

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
    reach = np.maximum.accumulate(np.concatenate((_begin(trace, start), end)))[:-1] if len(start) else start
    gap_ns = time_by_state(trace, reach, np.maximum(start, reach))
    state = host_state.state_at(trace, start)
    state = np.where(state > LAUNCH, LAUNCH, state)
    state[_with_allocator(recorded) & (state == SYNCHRONIZE)] = ALLOCATOR
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


def _begin(trace: Trace, start: Ints) -> Ints:
    """Begin of the recording of the launching threads, at most the first call's start; shape (1,)."""
    began = trace.ops["start_ns"].to_numpy()[host_state.is_launching(trace)]
    return np.asarray(np.minimum(start[:1], began.min()), np.int64)


def time_by_state(trace: Trace, from_ns: Ints, to_ns: Ints) -> Ints:
    """Return the host time in each of the disjoint, sorted spans, in ns by HOST_STATES, shape (n, STATE_COUNT)."""
    time_ns = np.zeros((len(from_ns), STATE_COUNT), np.int64)
    some = np.flatnonzero(to_ns > from_ns)
    spans = np.stack((from_ns[some], to_ns[some]), axis=1)
    pieces = sweep_line.pieces(spans, host_state.state_changes(trace))
    state = host_state.state_at(trace, pieces.start_ns)
    np.add.at(time_ns, (some[pieces.span], state), pieces.end_ns - pieces.start_ns)
    return time_ns


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
        to_device=pl.col("name").str.contains("HtoD", literal=True),
        is_async=pl.col("name").str.contains(_ASYNCHRONOUS),
    )
    to_device, size = flags(names["to_device"]), ids(copies["bytes"])
    later = to_device & (call >= 0)
    if later.any():
        later &= copies["start_ns"].to_numpy() > recorded.end_ns[call]
    staged_bytes = max(_STAGED_BYTES, int(size[later].max(initial=0)))
    return flags(names["is_async"]) | (to_device & (size >= 0) & (size <= staged_bytes))


def _with_allocator(recorded: _CallRows) -> Flags:
    """Mark calls that were made inside an op that also called the allocator: their waits are the allocator's."""
    parents = recorded.parent_id[recorded.allocates & (recorded.parent_id >= 0)]
    return np.isin(recorded.parent_id, parents)
