"""Every table and column of a trace: type, unit and meaning. Readers conform to it; docs/schema.md is made from it.

Times are int64 nanoseconds, sizes are bytes, shares are ratios from 0 to 1. A missing value is a null; a table without
rows is an empty table with all its columns.
"""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import polars as pl

from tracekit.model.table_document import ColumnDocument, TableDocument

ColumnTypes: TypeAlias = Mapping[str, type[pl.DataType] | pl.DataType]


@dataclass(frozen=True)
class Column:
    """One column: its name, its Polars type, its unit ("" where it has none) and one sentence of meaning."""

    name: str
    dtype: pl.DataType
    unit: str
    meaning: str


@dataclass(frozen=True)
class Table:
    """One table: its name, what one row is, and its columns in order."""

    name: str
    grain: str
    columns: tuple[Column, ...]

    @classmethod
    def of(cls, document: TableDocument) -> "Table":
        """Return the table of a document."""
        columns = (Column(c.name, _DTYPES[c.type_name], c.unit, c.meaning) for c in document.columns)
        return cls(document.name, document.grain, tuple(columns))

    @property
    def schema(self) -> pl.Schema:
        """Return the Polars schema: column names and types, in order."""
        return pl.Schema({column.name: column.dtype for column in self.columns})

    @property
    def document(self) -> TableDocument:
        """Return the table as documentation shows it."""
        columns = (ColumnDocument(c.name, _TYPE_NAMES[c.dtype], c.unit, c.meaning) for c in self.columns)
        return TableDocument(self.name, self.grain, tuple(columns))

    def empty(self) -> pl.DataFrame:
        """Return the table with all its columns and no rows."""
        return empty({column.name: column.dtype for column in self.columns})

    def conform(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Return `frame` with exactly this table's columns, in order, cast; a missing column is all null.

        Raises polars.exceptions.InvalidOperationError where a value doesn't fit its column's type.
        """
        if frame.is_empty():
            return self.empty()  # selecting only literals from a frame without columns would make a row
        if list(frame.schema.items()) == list(self.schema.items()):
            return frame
        return conform(frame, self.schema)


_PLAIN_DTYPES: dict[str, pl.DataType] = {
    "integer": pl.Int64(),
    "text": pl.String(),
    "number": pl.Float64(),
    "true or false": pl.Boolean(),
}
_DTYPES = _PLAIN_DTYPES | {f"list of {name}": pl.List(dtype) for name, dtype in _PLAIN_DTYPES.items()}
_TYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def empty(types: ColumnTypes) -> pl.DataFrame:
    """Return a table with these columns and no rows: one object for all who ask, so nobody may change it in place."""
    return _empty(tuple(types.items()))


@functools.cache
def _empty(columns: tuple[tuple[str, type[pl.DataType] | pl.DataType], ...]) -> pl.DataFrame:
    return pl.DataFrame(schema=dict(columns))  # to make one costs as much as a query


def concat(tables: Iterable[pl.DataFrame], types: ColumnTypes) -> pl.DataFrame:
    """Return tables with exactly these columns one below the other; an empty table for none."""
    parts = list(tables)
    if len(parts) == 1:
        return parts[0]
    return pl.concat([empty(types), *parts])


def select(frame: pl.DataFrame, types: ColumnTypes) -> pl.DataFrame:
    """Return the columns of `frame` that `types` names, in that order, cast to these types."""
    # Without a query, which costs ten times as much.
    first, *rest = (_cast(frame.get_column(name), dtype) for name, dtype in types.items())
    return first.to_frame().hstack(rest)


def _cast(column: pl.Series, dtype: type[pl.DataType] | pl.DataType) -> pl.Series:
    return column if column.dtype == dtype else column.cast(dtype)


def conform(frame: pl.DataFrame, types: ColumnTypes) -> pl.DataFrame:
    """Return `frame` with exactly the columns of `types`, in order, cast; a missing column is all null."""
    missing = [pl.lit(None).alias(name) for name in types if name not in frame.columns]
    return select(frame.with_columns(missing) if missing else frame, types)


def columns(names: str, **types: type[pl.DataType] | pl.DataType) -> dict[str, type[pl.DataType] | pl.DataType]:
    """Return columns with their types: as in `types`, else as in a trace's tables, else by the name.

    By the name: ratios and rates (_ratio, _per_s) are float64, is_… boolean, _name and _kind text; all others int64.

    >>> columns("phase cause dur_ns exposed_ratio", cause=pl.String)
    {'phase': String, 'cause': String, 'dur_ns': Int64, 'exposed_ratio': Float64}
    """
    named = dict[str, type[pl.DataType] | pl.DataType]()
    for name in names.split():
        by_affix = (dtype for affix, dtype in _TYPE_BY_AFFIX.items() if name.startswith(affix) or name.endswith(affix))
        named[name] = types.get(name) or _TYPE_BY_NAME.get(name) or next(by_affix, pl.Int64)
    return named


_INT, _TEXT, _FLOAT, _BOOL = pl.Int64(), pl.String(), pl.Float64(), pl.Boolean()


def column(name: str, meaning: str, dtype: pl.DataType = _INT) -> Column:
    """Return a column, by default an int64, with the unit that its name ends with.

    >>> column("sent_bytes", "Input message size.").unit
    'bytes'
    """
    unit = next((unit for ending, unit in _UNIT_BY_ENDING.items() if f"_{name}".endswith(ending)), "")
    return Column(name, dtype, unit, meaning)


def table(name: str, grain: str, *columns: Column) -> Table:
    """Return a table with these columns."""
    return Table(name, grain, columns)


_UNIT_BY_ENDING = {"_ns": "ns", "_bytes": "bytes", "_bytes_per_s": "bytes/s", "_mhz": "MHz", "_w": "W", "_c": "°C"}


def _by_name(*tables: Table) -> Mapping[str, Table]:
    return {table.name: table for table in tables}


_STEP = column("step", "Training step, or iteration found by repetition, that launched the work; null outside steps.")
_PHASE = column("phase", "forward, backward, clip, optimizer, data or checkpoint; null where not known.", _TEXT)
_UNIT = column("unit", "FSDP unit (layer) by module path, '' for the root; null outside FSDP's spans.", _TEXT)
_SPAN = column("span", "Innermost FSDP span around the launch without prefix and unit, such as all_gather.", _TEXT)

LANES = table(
    "lanes",
    "timeline that runs one thing at a time: a device stream or a host thread",
    column("lane", "Number of the lane, unique in the trace."),
    column("device", "Device index of a stream; null for a host thread."),
    column("stream", "Stream number of a device lane; null for a host thread."),
    column("pid", "Process id as the trace writes it.", _TEXT),
    column("tid", "Thread id as the trace writes it.", _TEXT),
    column("name", "Name from the trace's metadata, or made from stream or thread id.", _TEXT),
    column("role", "Kind of work with most busy time on it: compute, communication, memcpy, memset, host.", _TEXT),
)

STEPS = table(
    "steps",
    "training step",
    column("step", "Number of the step; null where the trace has no steps and is taken as one window."),
    column("host_start_ns", "Start of the step on the host."),
    column("host_end_ns", "End of the step on the host."),
    column("start_ns", "Start of the device window: the first activity the step launched on the main compute lane."),
    column(
        "end_ns",
        "End of the device window: the next step's start; of the last step, its last activity, or on a CPU run its "
        "mark's end, if that is later.",
    ),
    column("device", "Device index the window belongs to; null on a CPU run."),
)

OPS = table(
    "ops",
    "slice on a host thread",
    column("id", "Number of the slice, unique in the trace."),
    column("parent_id", "Slice on the same thread that encloses this one; null at top level."),
    column("lane", "Host thread it ran on."),
    column("name", "Name of the slice.", _TEXT),
    column("kind", "cpu_op, annotation, runtime, python, overhead or os_call.", _TEXT),
    column("start_ns", "Start."),
    column("dur_ns", "Duration."),
    _STEP,
    _PHASE,
    _UNIT,
    _SPAN,
    column("forward_id", "ops.id of the forward op whose gradient a backward op computes; null if not known."),
    column("shapes", "Shapes of the inputs as a JSON array; null where the profiler didn't record them.", _TEXT),
    column("dtypes", "Element types of the inputs as a JSON array, as the profiler names them; null likewise.", _TEXT),
    column("arguments", "Values of inputs that are no tensors, as a JSON array of texts; null likewise.", _TEXT),
    column("strides", "Strides of the inputs as a JSON array, 0 along an expanded dimension; null likewise.", _TEXT),
)

ACTIVITIES = table(
    "activities",
    "piece of work on a device stream, or on a host thread if the trace has no device activity",
    column("id", "Number of the activity, unique in the trace."),
    column("launch_id", "ops.id of the runtime call that launched it; on a CPU run, of the op itself."),
    column("lane", "Stream, or thread on a CPU run."),
    column("name", "Name of the kernel or op.", _TEXT),
    column("kind", "compute, communication, memcpy or memset.", _TEXT),
    column("start_ns", "Start."),
    column("dur_ns", "Duration."),
    column("bytes", "Bytes copied or set; null where not known."),
    column("grid", "Blocks that the kernel was launched with, such as 4096x1x1; null where not known.", _TEXT),
    column("block", "Threads of each block, such as 256x1x1; null where not known.", _TEXT),
    column("graph_annotation", "What a CUDA graph's annotation calls the kernel, as its module; else null.", _TEXT),
    _STEP,
    _PHASE,
    _UNIT,
    _SPAN,
)

COLLECTIVES = table(
    "collectives",
    "communication activity",
    column("activity_id", "activities.id."),
    column("op", "all_reduce, all_gather, reduce_scatter, broadcast, send, …; null where not known.", _TEXT),
    column("group", "Process group, as groups.group; null where not known.", _TEXT),
    column("seq", "Sequence number within the group; null in most traces."),
    column("dtype", "Element type; null where not known.", _TEXT),
    column("sent_bytes", "Input message size on this rank; null where not known."),
    column("received_bytes", "Output message size on this rank; null where not known."),
    column("group_size", "Number of ranks in the group; null where not known."),
    column("peer", "Global rank at the other end of a send or receive; null for others, or if not known."),
    column(
        "splits",
        "Bytes that an all-to-all sends to each rank of the group, in its order; null where equal or not known.",
        pl.List(pl.Int64()),
    ),
    column("row_bytes", "Bytes of a row (a token) of an all-to-all; null where splits are."),
)

GROUPS = table(
    "groups",
    "process group",
    column("group", "Name of the group, unique in the trace.", _TEXT),
    column("description", "Name that the program gave it.", _TEXT),
    column("backend", "nccl, gloo, …; null where not known.", _TEXT),
    column("ranks", "Global ranks in it, in order.", pl.List(pl.Int64())),
)

ALLOCATIONS = table(
    "allocations",
    "event of a memory allocator",
    column("at_ns", "Time."),
    column("device", "Device index; null for host memory."),
    column("address", "Address of the block; null in old traces."),
    column("delta_bytes", "Bytes allocated (positive) or freed (negative)."),
    column("allocated_bytes", "Total allocated after the event; null in old traces."),
    column("reserved_bytes", "Total reserved by the caching allocator after the event; null in old traces."),
    column("op_id", "Innermost op on the same thread at that time; null outside ops."),
    _STEP,
    _PHASE,
    _UNIT,
    _SPAN,
)

SYNCS = table(
    "syncs",
    "wait reported by CUDA, of a stream for an event or of the host; most traces have none",
    column("call_id", "ops.id of the runtime call; null where not known."),
    column(
        "kind", "stream_wait, or what the host waited for: event, stream, context (all streams of the device).", _TEXT
    ),
    column("start_ns", "Start of the call."),
    column("dur_ns", "Duration of the call: includes a wait of the host, not a wait of a stream."),
    column("device", "Device index."),
    column("stream", "Stream that waits or that the host waits for; null where not known."),
    column("awaited_stream", "Stream on which the event was recorded; null where not known."),
    column("record_id", "ops.id of the call that recorded the event; null where not known."),
)

CHECKPOINTS = table(
    "checkpoints",
    "stage of a checkpoint save or load on this rank, on the clock of the trace",
    column("checkpoint", "Name of the checkpoint, the same on every rank.", _TEXT),
    column("operation", "save or load.", _TEXT),
    column("step", "Optimizer steps done when it began."),
    column(
        "stage",
        "One of conventions.CHECKPOINT_STAGES, such as write; total or complete for the whole operation.",
        _TEXT,
    ),
    column("start_ns", "Time at which the stage was first entered."),
    column("dur_ns", "Time spent in the stage."),
    column("bytes", "Bytes moved; null where not known."),
    column("files", "Files opened or synced; null where not known."),
    column("path", "Path of the checkpoint.", _TEXT),
    column("blocking", "Whether the training thread waited for this stage.", _BOOL),
    column("call", "Function that was called, such as dcp.async_save or torch.load.", _TEXT),
    column("worker", "main (the training thread), thread (another thread), or process (another process).", _TEXT),
    column("process", "Process id of the worker."),
    column("thread", "Native thread id of the worker."),
    column("calls", "Calls that wrote or read; for fsync, calls of os.sync; null where none or not known."),
    column(
        "durable", "Whether all files of this rank were synced after their last byte; total and complete only.", _BOOL
    ),
    column("dirty_before_bytes", "Dirty pages of the machine at the start; total and complete only."),
    column("dirty_after_bytes", "The same at the end."),
    column("writeback_before_bytes", "Pages of the machine under writeback at the start; total and complete only."),
    column("writeback_after_bytes", "The same at the end."),
    column("io_some_ns", "Time in which some task of the machine stalled on I/O (PSI some); total and complete only."),
    column("io_full_ns", "Time in which all tasks of the machine stalled on I/O (PSI full)."),
    column("cpu_ns", "CPU time of the worker's thread; total and complete only."),
    column("run_delay_ns", "Time that the worker's thread was runnable but not running; total and complete only."),
    column("storage_written_bytes", "Bytes that the process sent to storage during it; total and complete only."),
    column("storage_read_bytes", "Bytes that the process read from storage during it; total and complete only."),
    column("whole_bytes", "Bytes of all shards of the loaded checkpoint; total of a load only."),
)

IO_CALLS = table(
    "io_calls",
    "file system call of the rank's process or its workers, from DFTracer or Nsight Systems, on the clock of the trace",
    column("name", "Function that was called, such as pread64 or fsync.", _TEXT),
    column("kind", "read, write, sync or metadata (open, close, stat, seek, …).", _TEXT),
    column("file", "Path of the file; null where it is not recorded.", _TEXT),
    column("start_ns", "Start."),
    column("dur_ns", "Duration."),
    column(
        "bytes", "Bytes that were read or written, as returned; null for other calls, and where failed or not recorded."
    ),
    column("process", "Process id."),
    column("thread", "Native thread id."),
)

COUNTERS = table(
    "counters",
    "sample of a counter that a profiler recorded: GPU metrics of Nsight Systems, counter tracks of Perfetto",
    column("at_ns", "Time of the sample."),
    column("device", "Device index; null for a counter of no device."),
    column("name", "Name of the counter as the profiler writes it, mostly with its unit.", _TEXT),
    column("value", "Value; clock frequencies of Nsight Systems in MHz.", _FLOAT),
)

METRICS = table(
    "metrics",
    "training step and metric",
    column("step", "Training step."),
    column("name", "Name of the metric, with its unit, such as step_time_ns.", _TEXT),
    column("value", "Value.", _FLOAT),
)

DATA_QUALITY = table(
    "data_quality",
    "data-quality issue of this trace",
    column("kind", "Kind of issue, such as truncated, unlinked, no_steps.", _TEXT),
    column("message", "The issue and its effect, in one sentence.", _TEXT),
    column("affected_ratio", "Share of the trace's time, or of its events, that the issue affects.", _FLOAT),
)

COLLECTIVES_ONLY = "collectives_only"
"""Issue of a trace of a log of collectives: compute, idle time and the host are not known."""
COMPILED_PROGRAM = "compiled_program"
"""Issue of a trace of a device that runs whole programs, so that no operation has a launch by the host."""
SPANS_ONLY = "spans_only"
"""Issue of a trace of a trainer's log: spans of the training loop on the host, without operators and the device."""
WRITE_TIMES = "write_times"
"""Issue of a trace that states how long collectives took, and when they were logged in place of when they ended."""

TABLES: Mapping[str, Table] = _by_name(
    LANES,
    STEPS,
    OPS,
    ACTIVITIES,
    COLLECTIVES,
    GROUPS,
    ALLOCATIONS,
    SYNCS,
    CHECKPOINTS,
    IO_CALLS,
    COUNTERS,
    METRICS,
    DATA_QUALITY,
)

_DEVICE = column("device", "Device index.")
_ADDRESS = column("address", "Address of its first byte.")
_STREAM = column("stream", "Stream as the snapshot names it: 0 is the default stream, others are handles.")
_STACK = column("stack", "stacks.stack that requested it; null where none was recorded.")

SEGMENTS = table(
    "segments",
    "piece of device memory that the allocator reserved",
    _DEVICE,
    _ADDRESS,
    _STREAM,
    column("pool", "Private pool (CUDA graph, MemPool) as 'a:b'; '0:0' is the common one.", _TEXT),
    column("kind", "small (for requests up to 1 MiB) or large.", _TEXT),
    column("expandable", "Whether it is a mapped range of an expandable segment.", _BOOL),
    column("total_bytes", "Size."),
    column("allocated_bytes", "Bytes in allocated blocks."),
    column("active_bytes", "Allocated bytes, and freed bytes that another stream still uses."),
    column(
        "requested_bytes", "Bytes that the program requested in active blocks, before rounding; null in old snapshots."
    ),
    _STACK,
)

BLOCKS = table(
    "blocks",
    "block of a segment, in order of address",
    _DEVICE,
    column("segment_address", "segments.address."),
    _ADDRESS,
    column("bytes", "Size, rounding included."),
    column("requested_bytes", "Bytes that the program requested; null in old snapshots."),
    column("state", "active_allocated, active_pending_free (or active_awaiting_free), inactive.", _TEXT),
    _STACK,
)

EVENTS = table(
    "events",
    "event in the allocator's history, in order for each device",
    _DEVICE,
    column("at_ns", "Unix time; null in old snapshots."),
    column("action", "alloc, free_requested, free_completed, segment_alloc, segment_free, oom, ….", _TEXT),
    column("address", "Address; null for events without one."),
    column("bytes", "Bytes requested by an alloc (before rounding) or oom (after rounding), or size of the segment."),
    _STREAM,
    _STACK,
    column("free_bytes", "Free memory of the device at an oom, as the driver states it; null for other events."),
)

STACKS = table(
    "stacks",
    "frame of a call stack",
    column("stack", "Number of the stack: the same frames in the same order have one number."),
    column("depth", "0 for the innermost frame."),
    column("frame", "frames.frame."),
)

FRAMES = table(
    "frames",
    "line of source code",
    column("frame", "Number of the frame."),
    column("name", "Function.", _TEXT),
    column("file", "File.", _TEXT),
    column("line", "Line; 0 where not known."),
)

ANNOTATIONS = table(
    "annotations",
    "begin or end of a named span of the profiler's record functions",
    _DEVICE,
    column("at_ns", "Unix time."),
    column("stage", "START or END.", _TEXT),
    column("name", "Name of the span.", _TEXT),
)

SNAPSHOT_TABLES = _by_name(SEGMENTS, BLOCKS, EVENTS, STACKS, FRAMES, ANNOTATIONS)
"""The tables of a CUDA memory snapshot; not part of a trace."""


_OTHER_TEXTS = ("axis", "cause", "code", "detail", "evidence", "label", "metric", "module", "save", "source", "state")
_TYPE_BY_NAME: dict[str, type[pl.DataType]] = {
    **{column.name: type(column.dtype) for table in TABLES.values() for column in table.columns},
    **dict.fromkeys(_OTHER_TEXTS, pl.String),
    "confidence": pl.Float64,
    "slowdown": pl.Float64,
    "ranks": pl.Int64,  # how many; in GROUPS a list
}
_TYPE_BY_AFFIX = {"is_": pl.Boolean, "_ratio": pl.Float64, "_per_s": pl.Float64, "_name": pl.String, "_kind": pl.String}
