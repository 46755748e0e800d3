"""Host time between the calls that launch device work, and the work that blocking calls waited for."""

from dataclasses import dataclass

import numpy as np
import polars as pl

from tracekit.analysis.time import host_state
from tracekit.model import sweep_line
from tracekit.model.sweep_line import Flags, Ints
from tracekit.model.trace import Trace

STATE_COUNT = len(host_state.HOST_STATES)
ALLOCATOR, SYNCHRONIZE, LAUNCH = (
    host_state.HOST_STATES.index(each) for each in (host_state.ALLOCATOR, host_state.SYNCHRONIZE, host_state.LAUNCH)
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

    `gap_ns` is the host time before each call by state (`host_state.HOST_STATES`), shape (n, STATE_COUNT); that of the
    first call begins with the recording of its threads. `state` is that of the call itself. `own_ns` excludes waiting
    where `waits` are known.
    """

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
    launched = trace.activities["launch_id"].drop_nulls().unique()
    name = pl.col("name")
    found = (
        trace.ops.join(host_state.launching_threads(trace), on="lane", how="semi")
        .with_columns(
            pl.col("id").is_in(launched.implode()).alias("launches"),
            (name.str.contains(_DRAINS) & (pl.col("kind") == "runtime")).alias("drains"),
            (name.str.contains(_BLOCKS) & (pl.col("kind") == "runtime")).alias("blocks"),
            (name.str.contains(_ALLOCATES) & (pl.col("kind") == "runtime")).alias("allocates"),
        )
        .filter(pl.any_horizontal("launches", "drains", "blocks", "allocates"))
    )
    found = _split(trace, found).sort("start_ns", "id", "waits_itself")
    start = found["start_ns"].to_numpy().astype(np.int64)
    end = start + found["dur_ns"].to_numpy().astype(np.int64)
    reach = np.maximum.accumulate(np.concatenate((_begin(trace, start), end)))[:-1] if len(start) else start
    gap_ns = time_by_state(trace, reach, np.maximum(start, reach))
    state = host_state.state_at(trace, start)
    state = np.where(state > LAUNCH, LAUNCH, state)
    state[_with_allocator(found) & (state == SYNCHRONIZE)] = ALLOCATOR
    own = np.maximum(end - np.maximum(start, reach), 0)
    names = ("drains", "blocks", "launches", "waits_itself")
    flags = {name: found[name].fill_null(value=False).to_numpy() for name in names}
    ids = found["id"].to_numpy().astype(np.int64)
    return Calls(ids, start, end, gap_ns, own, state, **flags, step=found["step"], phase=found["phase"])


def call_names(trace: Trace, calls: Calls) -> pl.Series:
    """Return the name of each call with that of the op around it, shape (n,)."""
    ops = trace.ops.select("id", "name", "parent_id").unique("id")
    found = pl.DataFrame({"id": calls.id}).join(ops, on="id", how="left", maintain_order="left")
    parents = trace.ops.filter(pl.col("kind") == "cpu_op").select(parent_id="id", parent="name").unique("parent_id")
    named = found.join(parents, on="parent_id", how="left", maintain_order="left")
    return named.select(pl.concat_str(pl.col("parent").fill_null(""), "name", separator=" / ")).to_series()


def _begin(trace: Trace, start: Ints) -> Ints:
    """Return when the recording of the launching threads begins, at most the first call's start; shape (1,)."""
    began = trace.ops.join(host_state.launching_threads(trace), on="lane", how="semi")["start_ns"].to_numpy()
    return np.asarray(np.minimum(start[:1], began.min()), np.int64)


def time_by_state(trace: Trace, from_ns: Ints, to_ns: Ints) -> Ints:
    """Return the host time in each of the disjoint, sorted spans, in ns by HOST_STATES, shape (n, STATE_COUNT)."""
    found = np.zeros((len(from_ns), STATE_COUNT), np.int64)
    some = np.flatnonzero(to_ns > from_ns)
    spans = np.stack((from_ns[some], to_ns[some]), axis=1)
    pieces = sweep_line.pieces(spans, host_state.state_changes(trace))
    state = host_state.state_at(trace, pieces.start_ns)
    np.add.at(found, (some[pieces.of], state), pieces.end_ns - pieces.start_ns)
    return found


def _split(trace: Trace, found: pl.DataFrame) -> pl.DataFrame:
    """Return the calls, with two rows for copies that return after they are done."""
    name = pl.col("name")
    is_to_device = name.str.contains("HtoD", literal=True)
    is_staged = is_to_device & (pl.col("bytes") <= _staged_bytes(trace.activities.filter(is_to_device), found))
    is_async = (name.str.contains(_ASYNCHRONOUS) | is_staged).fill_null(value=False)
    copies = trace.activities.filter((pl.col("kind") == "memcpy") & ~is_async)
    done = copies.group_by("launch_id").agg((pl.col("start_ns") + pl.col("dur_ns")).max().alias("done_ns"))
    ended = found.join(done, left_on="id", right_on="launch_id", how="left", maintain_order="left")
    returns_ns = pl.col("start_ns") + pl.col("dur_ns")
    waits = (pl.col("launches") & (pl.col("done_ns") <= returns_ns)).fill_null(value=False)
    marked = ended.with_columns(waits.alias("waits_itself")).drop("done_ns")
    begins = marked.filter("waits_itself").with_columns(
        pl.lit(0, pl.Int64).alias("dur_ns"),
        *(pl.lit(value).alias(name) for name, value in (("waits_itself", False), ("drains", False), ("blocks", False))),
    )
    rest = marked.with_columns((pl.col("launches") & ~pl.col("waits_itself")).alias("launches"))
    return pl.concat([begins, rest])


def _staged_bytes(copies: pl.DataFrame, found: pl.DataFrame) -> int:
    """Return up to which size copies to the device run after their call: at least what one such copy here shows."""
    returns_ns = (pl.col("start_ns") + pl.col("dur_ns")).alias("returns_ns")
    called = copies.join(found.select(returns_ns, launch_id="id"), on="launch_id")
    later = called.filter(pl.col("start_ns") > pl.col("returns_ns"))["bytes"].drop_nulls().to_numpy()
    return max(_STAGED_BYTES, int(later.max(initial=0)))


def _with_allocator(found: pl.DataFrame) -> Flags:
    """Return which calls were made inside an op that also called the allocator: their waits are the allocator's."""
    parents = found.filter(pl.col("allocates"))["parent_id"].drop_nulls().unique()
    return found["parent_id"].is_in(parents.implode()).fill_null(value=False).to_numpy()
