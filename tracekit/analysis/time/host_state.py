"""The state of the host at a given time: synchronizing, loading data, in an op, in Python, and so on."""

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.analysis.time import save_names
from tracekit.model import intervals
from tracekit.model.intervals import Spans
from tracekit.model.memoize import memoize
from tracekit.model.sweep_line import Flags, Ints, at, running
from tracekit.model.trace import Trace

RATE_LIMITER, CHECKPOINT, DATA, ALLOCATOR, LOCK, SYNCHRONIZE, LAUNCH, OP, PYTHON = HOST_STATES = (
    "rate_limiter",
    "checkpoint",
    "data",
    "allocator",
    "lock",
    "synchronize",
    "launch",
    "op",
    "python",
)
"""If several apply, the first counts: a rate limiter synchronizes, data loading runs ops."""

_ALLOCATOR = r"^(cuda|hip)(Malloc|Free|HostAlloc|FreeHost|MallocHost|HostMalloc|HostFree|MemCreate|MemMap|MemUnmap)"
SYNCHRONIZING = (
    r"^(cuda|hip)(Device|Stream|Event|Ctx)Synchronize|^cu(Ctx|Stream|Event)Synchronize|^(cuda|hip)Memcpy(2D)?$|"
    r"^aten::(item|_local_scalar_dense|is_nonzero)$"
)
_LOCK = r"(?i)\bgil\b|lock[ _:]?(acquire|wait)|acquire[_ ]lock|futex|mutex"
_LOADER = r"^enumerate\(DataLoader\)"


def state_at(trace: Trace, at_ns: Ints) -> Ints:
    """Return the state of the threads that launch work at each time, as an index into HOST_STATES.

    `op`: inside a framework op; `launch`: inside another runtime call; `python`: in nothing that the profiler records,
    so in Python or, without stacks, possibly not running. A save on any launching thread counts.
    """
    found = np.full(len(at_ns), HOST_STATES.index(PYTHON), np.int64)
    for index, spans in reversed(list(enumerate(_spans(trace)))):
        found[running(spans, at_ns) >= 0] = index
    return found


def state_changes(trace: Trace) -> Ints:
    """Return all times at which `state_at` may change."""
    return np.concatenate([spans.ravel() for spans in _spans(trace)])


def waited_ns(trace: Trace, at_ns: Ints) -> Ints:
    """Return for how long the host had been waiting for the device until each time; 0 where it was not."""
    spans = _spans(trace)[HOST_STATES.index(SYNCHRONIZE)]
    waiting = running(spans, at_ns - 1)
    return np.where(waiting >= 0, at_ns - at(spans[:, 0], waiting, 0), 0)


@memoize
def launching_threads(trace: Trace) -> pl.DataFrame:
    """Return the threads (column lane) that launch work."""
    ids = trace.activities.select(pl.col("launch_id").alias("id")).drop_nulls().unique()
    found = trace.ops.join(ids, on="id", how="semi").select("lane").unique()
    # Gloo's threads run collectives only: they are no host threads that delay launches. A thread that mostly waits in
    # receives computes, too.
    computing = trace.activities.filter(pl.col("kind") == "compute").select("lane").unique()
    carrying = trace.lanes.filter(pl.col("role") == "communication").select("lane")
    return found.join(carrying.join(computing, on="lane", how="anti"), on="lane", how="anti")


def is_synchronizing(state: Ints) -> Flags:
    """Return at which times the host waited for the device."""
    return np.isin(state, [HOST_STATES.index(SYNCHRONIZE), HOST_STATES.index(RATE_LIMITER)])


@memoize
def _spans(trace: Trace) -> list[Spans]:
    """Return the spans of the launching threads in each of HOST_STATES but the last."""
    ops = trace.ops.join(launching_threads(trace), on="lane", how="semi")
    name, kind, phase = pl.col("name"), pl.col("kind"), pl.col("phase")
    is_call = kind == "runtime"
    names = (
        ops.select("name", "kind")
        .unique()
        .with_columns(  # unique names are far fewer than ops
            name.str.contains("rate_limiter", literal=True).alias(RATE_LIMITER),
            name.str.contains(_LOADER).alias(DATA),
            name.str.contains(_ALLOCATOR).alias(ALLOCATOR),
            name.str.contains(_LOCK).alias(LOCK),
            name.str.contains(SYNCHRONIZING).alias(SYNCHRONIZE),
            save_names.is_save().alias(CHECKPOINT),
        )
    )
    flags = (
        ops.select("name", "kind", "phase")
        .join(names, on=["name", "kind"], how="left", maintain_order="left")
        .select(
            RATE_LIMITER,
            ((phase == conventions.CHECKPOINT).fill_null(value=False) | pl.col(CHECKPOINT)).alias(CHECKPOINT),
            ((phase == conventions.DATA).fill_null(value=False) | pl.col(DATA)).alias(DATA),
            (is_call & pl.col(ALLOCATOR)).alias(ALLOCATOR),
            LOCK,
            SYNCHRONIZE,
            is_call.alias(LAUNCH),
            (kind == "cpu_op").alias(OP),
        )
        .fill_null(value=False)
    )
    spans = intervals.from_table(ops)
    found = [intervals.union(spans[flags[each].to_numpy()]) for each in HOST_STATES[:-1]]
    allocator = HOST_STATES.index(ALLOCATOR)
    others = spans[~flags[ALLOCATOR].to_numpy()]
    found[allocator] = _with_pauses(found[allocator], others)
    return found


def _with_pauses(calls: Spans, others: Spans) -> Spans:
    """Return the spans of calls joined across the pauses in which nothing else begins or ends.

    The allocator frees its cache block by block: a pause between two of these calls that is shorter than both is its
    own.
    """
    if len(calls) < 2:
        return calls
    edges = np.sort(others, axis=None)
    before, after = np.searchsorted(edges, calls[:-1, 1]), np.searchsorted(edges, calls[1:, 0], side="right")
    pause = calls[1:, 0] - calls[:-1, 1]
    lengths = calls[:, 1] - calls[:, 0]
    joined = (before == after) & (pause <= np.minimum(lengths[:-1], lengths[1:]))
    return intervals.union(np.concatenate((calls, np.stack((calls[:-1, 1], calls[1:, 0]), axis=1)[joined])))
