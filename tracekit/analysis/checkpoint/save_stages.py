"""Checkpoint saves: the time of each stage on each rank, and which spans of a trace are saves."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit import conventions
from tracekit.analysis.time import save_names
from tracekit.model import intervals, schema
from tracekit.model.fact import trace_fact
from tracekit.model.intervals import Spans
from tracekit.model.memoize import memoize
from tracekit.model.trace import Trace

COLUMNS = (
    "checkpoint", "step", "stage", "start_ns", "dur_ns", "bytes", "blocking", "files", "calls", "path", "call",
    "worker", "durable", "cpu_ns", "run_delay_ns", "whole_bytes",
)  # fmt: skip
SPAN_COLUMNS = schema.columns(
    "step name start_ns dur_ns copied_ns pageable_bytes collective_ns idle_ns write_ns fsync_ns"
)

_WRITE_FUNCTION = r"built-in method write of _?io\.|<built-in method write\b|BufferedWriter.*\bwrite\b"
_FSYNC_FUNCTION = r"\bfsync\b"


@trace_fact
def saves(trace: Trace) -> pl.DataFrame:
    """Return the stages of this rank's saves from the checkpoint log.

    Columns COLUMNS of `schema.CHECKPOINTS`; one row per save, worker and stage. The log covers the whole run, so every
    window of a rank returns the same rows.
    """
    return _operation(trace, conventions.SAVE)


@trace_fact
def loads(trace: Trace) -> pl.DataFrame:
    """Return the stages of this rank's loads, with the columns of `saves`."""
    return _operation(trace, conventions.LOAD)


def _operation(trace: Trace, operation: str) -> pl.DataFrame:
    stages = trace.checkpoints.select(*COLUMNS)
    return stages.filter(trace.checkpoints["operation"] == operation) if stages.height else stages


@trace_fact
def step_times(trace: Trace) -> pl.DataFrame:
    """Return the step times of the metrics log. Columns step, step_time_ns; one row per step."""
    return trace.metrics.filter(pl.col("name") == conventions.STEP_TIME_METRIC).select("step", step_time_ns="value")


@trace_fact
@memoize
def save_spans(trace: Trace) -> pl.DataFrame:
    """Return the spans of the trace that are saves: the recorder's own, and others recognized by name.

    Columns SPAN_COLUMNS; one row per span of time that the host spends in saves, named after its first slice. `step` is
    the step in whose host window it begins; null outside steps. The trace shows copies from the device (`copied_ns`,
    and `pageable_bytes` of those into pageable memory) and idle time of the device, both null on a CPU run;
    collectives; and Python's write and fsync calls, null in traces without stacks. It never shows serialization.
    """
    rows = np.flatnonzero(save_names.is_save(trace))
    if not len(rows):
        return schema.empty(SPAN_COLUMNS)
    slices = trace.ops[rows].filter(pl.col("dur_ns") > 0).sort("start_ns", "dur_ns", descending=[False, True])
    merged = intervals.union(intervals.from_table(slices))
    if not len(merged):
        return schema.empty(SPAN_COLUMNS)
    first = np.searchsorted(slices["start_ns"].to_numpy(), merged[:, 0], side="left")
    dur_ns = pl.Series("dur_ns", merged[:, 1] - merged[:, 0], pl.Int64)
    return slices[first].select("step", "name", "start_ns", dur_ns, *_inside(trace, merged))


def _inside(trace: Trace, spans: Spans) -> Iterator[pl.Series]:
    """Yield what happens inside each span, the last columns of SPAN_COLUMNS."""
    work, name, kind = trace.activities, pl.col("name"), pl.col("kind")
    from_device = work.filter((kind == "memcpy") & name.str.contains("DtoH", literal=True))
    pageable = from_device.filter(name.str.contains("Pageable", literal=True))
    span_row = np.searchsorted(spans[:, 0], pageable["start_ns"].to_numpy(), side="right") - 1
    within = (span_row >= 0) & (pageable["start_ns"].to_numpy() < spans[np.maximum(span_row, 0), 1])
    sizes = np.bincount(span_row[within], pageable["bytes"].fill_null(0).to_numpy()[within], minlength=len(spans))
    python = trace.ops.filter(kind == "python")
    lengths = spans[:, 1] - spans[:, 0]
    on_device, stacks = trace.on_device, python.height > 0

    def column(label: str, values: npt.NDArray[np.int64], *, is_known: bool = True) -> pl.Series:
        return pl.Series(label, values if is_known else [None] * len(spans), pl.Int64)

    yield column("copied_ns", _coverage_ns(spans, from_device), is_known=on_device)
    yield column("pageable_bytes", sizes.astype(np.int64), is_known=on_device)
    collectives = work.filter(kind == "communication")
    yield column("collective_ns", _coverage_ns(spans, collectives))
    yield column("idle_ns", lengths - _coverage_ns(spans, work), is_known=on_device)
    for label, function in (("write_ns", _WRITE_FUNCTION), ("fsync_ns", _FSYNC_FUNCTION)):
        yield column(label, _coverage_ns(spans, python.filter(name.str.contains(function))), is_known=stacks)


def _coverage_ns(spans: Spans, rows: pl.DataFrame) -> npt.NDArray[np.int64]:
    return intervals.coverage(spans, intervals.from_table(rows))
