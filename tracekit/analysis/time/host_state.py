"""The state of the host at a given time: synchronizing, saving, loading data, in an op, in Python, and so on."""

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.analysis.time import trace_columns
from tracekit.ingest.readers.normalize.name_patterns import COMPILER
from tracekit.model import intervals
from tracekit.model.intervals import Spans
from tracekit.model.memoize import memoize
from tracekit.model.sweep_line import Flags, Ints, at, distinct, last_until, running
from tracekit.model.trace import Trace

_OURS = "^" + conventions.span_name(conventions.CHECKPOINT) + r"(\.|$)"
# Save annotations of other tools: names given to record_function, and those of Lightning's profiler, which records
# "[pl][profile]" and the action (lightning/pytorch/profilers/pytorch.py), such as save_checkpoint (Trainer).
_SAVE_SPAN = (
    _OURS
    + r"|(?i)(\b|_)(save|saving|write|dump)[-_. ](a[-_. ])?(model[-_. ])?(checkpoint|ckpt)"
    + r"|(?i)(checkpoint(er|ing|manager)?|\bckpt|_ckpt)[-_. ](async_)?(save|saving|write|writing|dump)\b"
    + r"|(?i)^(#+ ?)?checkpoint(ing)?\b( ##)?$|(?i)^#+ ?checkpoint\b"
    + r"|(?i)\b(dcp|torch|distributed\.checkpoint)\.(async_)?save\b|(\b|_)save_(\w+_)?state_dict\b"
    + r"|\bsave_pretrained\b|\bSnapshot\.(async_)?take\b"  # Hugging Face, torchsnapshot
)
# In traces with stacks, the functions of PyTorch and trainers that save: DeepSpeed (engine.py) and Megatron-LM
# (checkpointing.py) save_checkpoint, Hugging Face Trainer _save_checkpoint and save_model, Accelerate save_state.
_SAVE_FUNCTION = (
    r"torch/serialization\.py\(\d+\): save$"
    r"|torch/distributed/checkpoint/state_dict_saver\.py\(\d+\): (save|async_save|_?save_state_dict)$"
    r"|: _?save_(checkpoint|state_dict)$"
    r"|transformers/.*: (save_pretrained|save_model)$|accelerate/accelerator\.py\(\d+\): (save_state|save_model)$"
    r"|safetensors/torch\.py\(\d+\): save_file$|torchsnapshot/.*: (async_)?take$"
)

(
    RATE_LIMITER, CHECKPOINT, COMPILE, GARBAGE_COLLECTION, DATA, ALLOCATOR, LOCK, SYNCHRONIZE, LAUNCH, OP, PYTHON,
) = HOST_STATES = (
    "rate_limiter", "checkpoint", "compile", "garbage_collection", "data", "allocator", "lock", "synchronize", "launch",
    "op", "python",
)  # fmt: skip
"""If several apply, the first counts: a rate limiter synchronizes, compilers run ops and collect garbage, and data
loading does all of that."""
COLLECTOR = (
    r"(?i)\bgc[._ ]?collect|garbage.?collect|<built-in (function|method) (gc\.)?collect\b|"
    r"^(python[ _.])?gc($|[ :.(#-])"
)
"""Slices of Python's garbage collector: calls of gc.collect in traces with stacks, and spans of gc.callbacks."""

_ALLOCATOR = r"^(cuda|hip)(Malloc|Free|HostAlloc|FreeHost|MallocHost|HostMalloc|HostFree|MemCreate|MemMap|MemUnmap)"
SYNCHRONIZING = (
    r"^(cuda|hip)(Device|Stream|Event|Ctx)Synchronize|^cu(Ctx|Stream|Event)Synchronize|^(cuda|hip)Memcpy(2D)?$|"
    r"^aten::(item|_local_scalar_dense|is_nonzero)$"
)
_LOCK = r"(?i)\bgil\b|lock[ _:]?(acquire|wait)|acquire[_ ]lock|futex|mutex"
_RATE_LIMITER = "rate_limiter"
_LOADER = r"^enumerate\(DataLoader\)"


def state_at(trace: Trace, at_ns: Ints) -> Ints:
    """State of the threads that launch work at each time, as an index into HOST_STATES.

    `op`: inside a framework op; `launch`: inside another runtime call; `python`: in nothing that the profiler records,
    so in Python or, without stacks, possibly not running. A save on any launching thread counts.
    """
    return at(_states(trace), last_until(state_changes(trace), at_ns), HOST_STATES.index(PYTHON))


@memoize
def state_changes(trace: Trace) -> Ints:
    """Return all times at which `state_at` may change, sorted, each once."""
    return distinct(np.concatenate([spans.ravel() for spans in _spans(trace)]))


@memoize
def _states(trace: Trace) -> Ints:
    """State from each of `state_changes` to the next one."""
    changes = state_changes(trace)
    states = np.full(len(changes), HOST_STATES.index(PYTHON), np.int64)
    for index, spans in reversed(list(enumerate(_spans(trace)))):
        states[running(spans, changes) >= 0] = index
    return states


def has_state(trace: Trace, state: str) -> bool:
    """Return whether the threads that launch work are ever in a state, one of HOST_STATES but the last."""
    return len(_spans(trace)[HOST_STATES.index(state)]) > 0


def waited_ns(trace: Trace, at_ns: Ints) -> Ints:
    """Time for which the host had been waiting for the device at each time, in ns; 0 where it was not."""
    spans = _spans(trace)[HOST_STATES.index(SYNCHRONIZE)]
    waiting = running(spans, at_ns - 1)
    return np.where(waiting >= 0, at_ns - at(spans[:, 0], waiting, 0), 0)


@memoize
def launching_threads(trace: Trace) -> pl.DataFrame:
    """Threads (column lane) that launch work, in order."""
    launched = trace.activities["launch_id"].drop_nulls().to_numpy()
    launching = trace.ops["lane"].to_numpy()[np.isin(trace.ops["id"].to_numpy(), launched)]
    # Gloo's threads run collectives only: they are no host threads that delay launches. A thread that mostly waits in
    # receives computes, too.
    computing = trace.activities["lane"].filter(trace.activities["kind"] == "compute").to_numpy()
    carrying = trace.lanes["lane"].filter(trace.lanes["role"] == "communication").to_numpy()
    lanes = np.setdiff1d(launching, np.setdiff1d(carrying, computing))
    return pl.DataFrame({"lane": lanes}, schema={"lane": pl.Int64})


@memoize
def is_launching(trace: Trace) -> Flags:
    """Mask of the ops on a thread that launches work; shape (ops,)."""
    return np.isin(trace.ops["lane"].to_numpy(), launching_threads(trace)["lane"].to_numpy())


def is_synchronizing(state: Ints) -> Flags:
    """Return at which times the host waited for the device."""
    return np.isin(state, [HOST_STATES.index(SYNCHRONIZE), HOST_STATES.index(RATE_LIMITER)])


@memoize
def is_save(trace: Trace) -> Flags:
    """Mask of the ops that are saves by their name: annotations, and functions of traces with stacks; shape (ops,)."""
    by_span = trace_columns.is_kind(trace, "annotation") & trace_columns.is_named(trace, _SAVE_SPAN)
    python = trace_columns.is_kind(trace, "python")
    return by_span | (python & trace_columns.is_named(trace, _SAVE_FUNCTION)) if python.any() else by_span


@memoize
def _spans(trace: Trace) -> list[Spans]:
    """Spans of the launching threads in each of HOST_STATES but the last."""
    is_call, launching = trace_columns.is_kind(trace, "runtime"), is_launching(trace)
    flags = {
        RATE_LIMITER: trace_columns.is_named(trace, _RATE_LIMITER),
        CHECKPOINT: trace_columns.is_phase(trace, conventions.CHECKPOINT) | is_save(trace),
        COMPILE: trace_columns.is_named(trace, COMPILER),
        GARBAGE_COLLECTION: trace_columns.is_named(trace, COLLECTOR),
        DATA: trace_columns.is_phase(trace, conventions.DATA) | trace_columns.is_named(trace, _LOADER),
        ALLOCATOR: is_call & trace_columns.is_named(trace, _ALLOCATOR),
        LOCK: trace_columns.is_named(trace, _LOCK),
        SYNCHRONIZE: trace_columns.is_named(trace, SYNCHRONIZING),
        LAUNCH: is_call,
        OP: trace_columns.is_kind(trace, "cpu_op"),
    }
    spans = trace_columns.spans(trace)
    state_spans = [intervals.union(spans[flags[state] & launching]) for state in HOST_STATES[:-1]]
    allocator = HOST_STATES.index(ALLOCATOR)
    state_spans[allocator] = _with_pauses(state_spans[allocator], spans[launching & ~flags[ALLOCATOR]])
    return state_spans


def _with_pauses(calls: Spans, other_spans: Spans) -> Spans:
    """Spans of calls joined across the pauses in which nothing else begins or ends.

    The allocator frees its cache block by block: a pause between two of these calls that is shorter than both is its
    own.
    """
    if len(calls) < 2:
        return calls
    edges = np.sort(other_spans, axis=None)
    before, after = np.searchsorted(edges, calls[:-1, 1]), np.searchsorted(edges, calls[1:, 0], side="right")
    pause = calls[1:, 0] - calls[:-1, 1]
    lengths = calls[:, 1] - calls[:, 0]
    joined = (before == after) & (pause <= np.minimum(lengths[:-1], lengths[1:]))
    return intervals.union(np.concatenate((calls, np.stack((calls[:-1, 1], calls[1:, 0]), axis=1)[joined])))
