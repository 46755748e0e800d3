"""Every table and column of a trace: type, unit and meaning. Readers conform to it; docs/schema.md is made from it.

Times are int64 nanoseconds, sizes are bytes, shares are ratios from 0 to 1. A missing value is a null; a table without
rows is an empty table with all its columns.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import polars as pl

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

    @property
    def schema(self) -> pl.Schema:
        """Return the Polars schema: column names and types, in order."""
        return pl.Schema({column.name: column.dtype for column in self.columns})

    def empty(self) -> pl.DataFrame:
        """Return the table with all its columns and no rows."""
        return self.schema.to_frame()

    def conform(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Return `frame` with exactly this table's columns, in order, cast; a missing column is all null.

        Raises polars.exceptions.InvalidOperationError where a value doesn't fit its column's type.
        """
        if frame.is_empty():
            return self.empty()  # selecting only literals from a frame without columns would make a row
        if list(frame.schema.items()) == list(self.schema.items()):
            return frame
        return conform(frame, self.schema)


def select(frame: pl.DataFrame, types: ColumnTypes) -> pl.DataFrame:
    """Return the columns of `frame` that `types` names, in that order, cast to these types."""
    return frame.select(pl.col(name).cast(dtype) for name, dtype in types.items())


def conform(frame: pl.DataFrame, types: ColumnTypes) -> pl.DataFrame:
    """Return `frame` with exactly the columns of `types`, in order, cast; a missing column is all null."""
    missing = [pl.lit(None).alias(name) for name in types if name not in frame.columns]
    return select(frame.with_columns(missing), types)


def columns(names: str, **others: type[pl.DataType] | pl.DataType) -> dict[str, type[pl.DataType] | pl.DataType]:
    """Return columns with their types: as in `others`, else as in a trace's tables, else by the name.

    By the name: ratios and rates (_ratio, _per_s) are float64, is_… boolean, _name and _kind text; all others int64.

    >>> columns("phase cause dur_ns exposed_ratio", cause=pl.String)
    {'phase': String, 'cause': String, 'dur_ns': Int64, 'exposed_ratio': Float64}
    """
    return {name: others.get(name) or _type_of(name) for name in names.split()}


_INT, _TEXT, _FLOAT, _BOOL = pl.Int64(), pl.String(), pl.Float64(), pl.Boolean()


def _column(name: str, dtype: pl.DataType, meaning: str, unit: str = "") -> Column:
    return Column(name, dtype, unit, meaning)


def _ns(name: str, meaning: str) -> Column:
    return Column(name, _INT, "ns", meaning)


def _bytes(name: str, meaning: str) -> Column:
    return Column(name, _INT, "bytes", meaning)


_STEP = _column("step", _INT, "Training step that launched the work, as the profiler numbers it; null outside steps.")
_PHASE = _column("phase", _TEXT, "forward, backward, clip, optimizer, data or checkpoint; null where not known.")
_UNIT = _column("unit", _TEXT, "FSDP unit (layer) by module path, '' for the root; null outside FSDP's spans.")
_SPAN = _column("span", _TEXT, "Innermost FSDP span around the launch without prefix and unit, such as all_gather.")

LANES = Table(
    "lanes",
    "timeline that runs one thing at a time: a device stream or a host thread",
    (
        _column("lane", _INT, "Number of the lane, unique in the trace."),
        _column("device", _INT, "Device index of a stream; null for a host thread."),
        _column("stream", _INT, "Stream number of a device lane; null for a host thread."),
        _column("pid", _TEXT, "Process id as the trace writes it."),
        _column("tid", _TEXT, "Thread id as the trace writes it."),
        _column("name", _TEXT, "Name from the trace's metadata, or made from stream or thread id."),
        _column("role", _TEXT, "Kind of work with most busy time on it: compute, communication, memcpy, memset, host."),
    ),
)

STEPS = Table(
    "steps",
    "training step",
    (
        _column("step", _INT, "Number of the step; null where the trace marks no steps and is taken as one window."),
        _ns("host_start_ns", "Start of the step on the host."),
        _ns("host_end_ns", "End of the step on the host."),
        _ns("start_ns", "Start of the device window: the first activity the step launched on the main compute lane."),
        _ns("end_ns", "End of the device window: the next step's start; for the last step, its last activity."),
        _column("device", _INT, "Device index the window belongs to; null on a CPU run."),
    ),
)

OPS = Table(
    "ops",
    "slice on a host thread",
    (
        _column("id", _INT, "Number of the slice, unique in the trace."),
        _column("parent_id", _INT, "Slice on the same thread that encloses this one; null at top level."),
        _column("lane", _INT, "Host thread it ran on."),
        _column("name", _TEXT, "Name of the slice."),
        _column("kind", _TEXT, "cpu_op, annotation, runtime, python or overhead."),
        _ns("start_ns", "Start."),
        _ns("dur_ns", "Duration."),
        _STEP,
        _PHASE,
        _UNIT,
        _SPAN,
        _column(
            "forward_id", _INT, "ops.id of the forward op whose gradient a backward op computes; null if not known."
        ),
        _column("shapes", _TEXT, "Shapes of the inputs as a JSON array; null where the profiler didn't record them."),
    ),
)

ACTIVITIES = Table(
    "activities",
    "piece of work on a device stream, or on a host thread if the trace has no device activity",
    (
        _column("id", _INT, "Number of the activity, unique in the trace."),
        _column("launch_id", _INT, "ops.id of the runtime call that launched it; on a CPU run, of the op itself."),
        _column("lane", _INT, "Stream, or thread on a CPU run."),
        _column("name", _TEXT, "Name of the kernel or op."),
        _column("kind", _TEXT, "compute, communication, memcpy or memset."),
        _ns("start_ns", "Start."),
        _ns("dur_ns", "Duration."),
        _bytes("bytes", "Bytes copied or set; null where not known."),
        _column("grid", _TEXT, "Blocks that the kernel was launched with, such as 4096x1x1; null where not known."),
        _column("block", _TEXT, "Threads of each block, such as 256x1x1; null where not known."),
        _STEP,
        _PHASE,
        _UNIT,
        _SPAN,
    ),
)

COLLECTIVES = Table(
    "collectives",
    "communication activity",
    (
        _column("activity_id", _INT, "activities.id."),
        _column("op", _TEXT, "all_reduce, all_gather, reduce_scatter, broadcast, send, …; null where not known."),
        _column("group", _TEXT, "Process group, as groups.group; null where not known."),
        _column("seq", _INT, "Sequence number within the group; null in most traces."),
        _column("dtype", _TEXT, "Element type; null where not known."),
        _bytes("sent_bytes", "Input message size on this rank; null where not known."),
        _bytes("received_bytes", "Output message size on this rank; null where not known."),
        _column("group_size", _INT, "Number of ranks in the group; null where not known."),
        _column("peer", _INT, "Global rank at the other end of a send or receive; null for others, or if not known."),
    ),
)

GROUPS = Table(
    "groups",
    "process group",
    (
        _column("group", _TEXT, "Name of the group, unique in the trace."),
        _column("description", _TEXT, "Name that the program gave it."),
        _column("backend", _TEXT, "nccl, gloo, …; null where not known."),
        _column("ranks", pl.List(pl.Int64()), "Global ranks in it, in order."),
    ),
)

ALLOCATIONS = Table(
    "allocations",
    "event of a memory allocator",
    (
        _ns("at_ns", "Time."),
        _column("device", _INT, "Device index; null for host memory."),
        _column("address", _INT, "Address of the block; null in old traces."),
        _bytes("delta_bytes", "Bytes allocated (positive) or freed (negative)."),
        _bytes("allocated_bytes", "Total allocated after the event; null in old traces."),
        _bytes("reserved_bytes", "Total reserved by the caching allocator after the event; null in old traces."),
        _column("op_id", _INT, "Innermost op on the same thread at that time; null outside ops."),
        _STEP,
        _PHASE,
        _UNIT,
        _SPAN,
    ),
)

SYNCS = Table(
    "syncs",
    "wait reported by CUDA, of a stream for an event or of the host; most traces have none",
    (
        _column("call_id", _INT, "ops.id of the runtime call; null where not known."),
        _column(
            "kind",
            _TEXT,
            "stream_wait, or what the host waited for: event, stream, context (all streams of the device).",
        ),
        _ns("start_ns", "Start of the call."),
        _ns("dur_ns", "Duration of the call: includes a wait of the host, not a wait of a stream."),
        _column("device", _INT, "Device index."),
        _column("stream", _INT, "Stream that waits or that the host waits for; null where not known."),
        _column("awaited_stream", _INT, "Stream on which the event was recorded; null where not known."),
        _column("record_id", _INT, "ops.id of the call that recorded the event; null where not known."),
    ),
)

CHECKPOINTS = Table(
    "checkpoints",
    "stage of a checkpoint save or load on this rank, on the clock of the trace",
    (
        _column("checkpoint", _TEXT, "Name of the checkpoint, the same on every rank."),
        _column("operation", _TEXT, "save or load."),
        _column("step", _INT, "Optimizer steps done when it began."),
        _column(
            "stage",
            _TEXT,
            "One of conventions.CHECKPOINT_STAGES, such as write; total or complete for the whole operation.",
        ),
        _ns("start_ns", "Time at which the stage was first entered."),
        _ns("dur_ns", "Time spent in the stage."),
        _bytes("bytes", "Bytes moved; null where not known."),
        _column("files", _INT, "Files opened or synced; null where not known."),
        _column("path", _TEXT, "Path of the checkpoint."),
        _column("blocking", _BOOL, "Whether the training thread waited for this stage."),
        _column("call", _TEXT, "Function that was called, such as dcp.async_save or torch.load."),
        _column("worker", _TEXT, "main (the training thread), thread (another thread), or process (another process)."),
        _column("process", _INT, "Process id of the worker."),
        _column("thread", _INT, "Native thread id of the worker."),
        _column("calls", _INT, "Calls that wrote or read; for fsync, calls of os.sync; null where none or not known."),
        _column(
            "durable",
            _BOOL,
            "Whether all files of this rank were synced after their last byte; total and complete only.",
        ),
        _bytes("dirty_before_bytes", "Dirty pages of the machine at the start; total and complete only."),
        _bytes("dirty_after_bytes", "The same at the end."),
        _bytes("writeback_before_bytes", "Pages of the machine under writeback at the start; total and complete only."),
        _bytes("writeback_after_bytes", "The same at the end."),
        _ns("io_some_ns", "Time in which some task of the machine stalled on I/O (PSI some); total and complete only."),
        _ns("io_full_ns", "Time in which all tasks of the machine stalled on I/O (PSI full)."),
        _ns("cpu_ns", "CPU time of the worker's thread; total and complete only."),
        _ns("run_delay_ns", "Time that the worker's thread was runnable but not running; total and complete only."),
        _bytes("storage_written_bytes", "Bytes that the process sent to storage during it; total and complete only."),
        _bytes("storage_read_bytes", "Bytes that the process read from storage during it; total and complete only."),
        _bytes("whole_bytes", "Bytes of all shards of the loaded checkpoint; total of a load only."),
    ),
)

METRICS = Table(
    "metrics",
    "training step and metric",
    (
        _column("step", _INT, "Training step."),
        _column("name", _TEXT, "Name of the metric, with its unit, such as step_time_ns."),
        _column("value", _FLOAT, "Value."),
    ),
)

DATA_QUALITY = Table(
    "data_quality",
    "data-quality issue of this trace",
    (
        _column("kind", _TEXT, "Kind of issue, such as truncated, unlinked, no_steps."),
        _column("message", _TEXT, "The issue and its effect, in one sentence."),
        _column("affected_ratio", _FLOAT, "Share of the trace's time, or of its events, that the issue affects.", ""),
    ),
)

TABLES: Mapping[str, Table] = {
    table.name: table
    for table in (
        LANES,
        STEPS,
        OPS,
        ACTIVITIES,
        COLLECTIVES,
        GROUPS,
        ALLOCATIONS,
        SYNCS,
        CHECKPOINTS,
        METRICS,
        DATA_QUALITY,
    )
}

_DEVICE = _column("device", _INT, "Device index.")
_ADDRESS = _column("address", _INT, "Address of its first byte.")
_STREAM = _column("stream", _INT, "Stream as the snapshot names it: 0 is the default stream, others are handles.")
_STACK = _column("stack", _INT, "stacks.stack that requested it; null where none was recorded.")

SEGMENTS = Table(
    "segments",
    "piece of device memory that the allocator reserved",
    (
        _DEVICE,
        _ADDRESS,
        _STREAM,
        _column("pool", _TEXT, "Private pool (CUDA graph, MemPool) as 'a:b'; '0:0' is the common one."),
        _column("kind", _TEXT, "small (for requests up to 1 MiB) or large."),
        _column("expandable", _BOOL, "Whether it is a mapped range of an expandable segment."),
        _bytes("total_bytes", "Size."),
        _bytes("allocated_bytes", "Bytes in allocated blocks."),
        _bytes("active_bytes", "Allocated bytes, and freed bytes that another stream still uses."),
        _bytes(
            "requested_bytes",
            "Bytes that the program requested in active blocks, before rounding; null in old snapshots.",
        ),
        _STACK,
    ),
)

BLOCKS = Table(
    "blocks",
    "block of a segment, in order of address",
    (
        _DEVICE,
        _column("segment_address", _INT, "segments.address."),
        _ADDRESS,
        _bytes("bytes", "Size, rounding included."),
        _bytes("requested_bytes", "Bytes that the program requested; null in old snapshots."),
        _column("state", _TEXT, "active_allocated, active_pending_free (or active_awaiting_free), inactive."),
        _STACK,
    ),
)

EVENTS = Table(
    "events",
    "event in the allocator's history, in order for each device",
    (
        _DEVICE,
        _ns("at_ns", "Unix time; null in old snapshots."),
        _column("action", _TEXT, "alloc, free_requested, free_completed, segment_alloc, segment_free, oom, …."),
        _column("address", _INT, "Address; null for events without one."),
        _bytes("bytes", "Bytes requested by an alloc (before rounding), or size of the segment."),
        _STREAM,
        _STACK,
    ),
)

STACKS = Table(
    "stacks",
    "frame of a call stack",
    (
        _column("stack", _INT, "Number of the stack: the same frames in the same order have one number."),
        _column("depth", _INT, "0 for the innermost frame."),
        _column("frame", _INT, "frames.frame."),
    ),
)

FRAMES = Table(
    "frames",
    "line of source code",
    (
        _column("frame", _INT, "Number of the frame."),
        _column("name", _TEXT, "Function."),
        _column("file", _TEXT, "File."),
        _column("line", _INT, "Line; 0 where not known."),
    ),
)

ANNOTATIONS = Table(
    "annotations",
    "begin or end of a named span of the profiler's record functions",
    (
        _DEVICE,
        _ns("at_ns", "Unix time."),
        _column("stage", _TEXT, "START or END."),
        _column("name", _TEXT, "Name of the span."),
    ),
)

SNAPSHOT_TABLES: Mapping[str, Table] = {
    table.name: table for table in (SEGMENTS, BLOCKS, EVENTS, STACKS, FRAMES, ANNOTATIONS)
}
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


def _type_of(name: str) -> type[pl.DataType]:
    by_affix = (dtype for affix, dtype in _TYPE_BY_AFFIX.items() if name.startswith(affix) or name.endswith(affix))
    return _TYPE_BY_NAME.get(name) or next(by_affix, pl.Int64)
