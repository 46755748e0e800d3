"""Gaps in a step, without a running collective while more follow or without compute, and the parts of its time."""

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.analysis.time import breakdown, launches, trace_columns
from tracekit.model import columns, intervals, schema, sweep_line
from tracekit.model.intervals import Spans
from tracekit.model.memoize import memoize
from tracekit.model.trace import Trace

COMMUNICATION_COLUMNS = schema.columns("gap device step phase unit lane collective_id name op start_ns dur_ns")
COMPUTE_COLUMNS = schema.columns("gap device step phase unit lane activity_id name start_ns dur_ns")

PART_COLUMNS = schema.columns("step device part name dur_ns", part=pl.String)
COMPUTE, GAP = "compute", "gap"


@memoize
def communication_gaps(trace: Trace) -> pl.DataFrame:
    """Return the spans of a phase in which no collective runs although more of the phase follow.

    Columns COMMUNICATION_COLUMNS: gap (number in the trace), collective_id, name and op of the next collective, which
    ends the gap; one row per gap. A phase begins with the first activity launched in it;
    unknown phases and steps count as one each. Collectives of saves end no gap.
    """
    parts = [_closing_collectives(trace, device) for device in breakdown.devices(trace)]
    return _number_gaps([schema.empty(COMMUNICATION_COLUMNS), *parts], COMMUNICATION_COLUMNS)


@memoize
def compute_gaps(trace: Trace) -> pl.DataFrame:
    """Return the spans of each step's device window without compute.

    Columns COMPUTE_COLUMNS: gap (number in the trace), step of the window, phase to name of the compute that ends the
    gap (null at the end of the trace); one row per gap.
    """
    windows = trace_columns.windows(trace)
    parts = [
        _idle(trace, windows.filter(pl.col("device").eq_missing(device)), device) for device in breakdown.devices(trace)
    ]
    return _number_gaps([schema.empty(COMPUTE_COLUMNS), *parts], COMPUTE_COLUMNS)


def step_parts(trace: Trace) -> pl.DataFrame:
    """Return the time of each step in compute of each name, and in the gaps without compute before each name.

    Columns PART_COLUMNS; one row per step, device, part (compute or gap) and name, '' for a gap that no compute ends. A
    gap holds the exposed communication, the copies and the idle time before the compute that ends it.
    """
    compute = trace.activities.filter(pl.col("kind") == "compute").join(
        trace.lanes.select("lane", "device"), on="lane", maintain_order="left"
    )
    columns = ("step", "device", "name", "dur_ns")
    rows = pl.concat(
        table.select(*columns, pl.lit(part).alias("part"))
        for part, table in ((COMPUTE, compute), (GAP, compute_gaps(trace)))
    )
    step_rows = rows.filter(pl.col("step").is_not_null()).with_columns(pl.col("name").fill_null(""))
    sums = step_rows.group_by("step", "device", "part", "name").agg(pl.col("dur_ns").sum())
    return schema.select(sums, PART_COLUMNS).sort("step", "device", "part", "name")


def _closing_collectives(trace: Trace, device: int | None) -> pl.DataFrame:
    """Return each collective that ends a span without one since its phase began, with the span's times."""
    work, arrays = launches.work(trace, device), launches.work_columns(trace, device)
    rows = np.flatnonzero(arrays.communicates)
    calls = work.select("device", "step", "phase", "unit", "lane", "name", collective_id="id")[rows]
    begun = work.group_by("step", "phase").agg(pl.col("start_ns").min())
    begun_ns = (
        calls.select("step", "phase")
        .join(begun, on=["step", "phase"], how="left", nulls_equal=True, maintain_order="left")["start_ns"]
        .to_numpy()
    )
    start, end = arrays.spans[rows, 0], arrays.spans[rows, 1]
    reached = np.concatenate((np.array([sweep_line.NEVER]), np.maximum.accumulate(end)))[: len(rows)]
    since = np.maximum(reached, begun_ns)
    is_save = columns.flags(calls["phase"] == conventions.CHECKPOINT)
    closing = np.flatnonzero((start > since) & ~is_save)
    times = [pl.Series("start_ns", since[closing]), pl.Series("dur_ns", (start - since)[closing])]
    row = columns.rows_of(trace.collectives["activity_id"].to_numpy(), arrays.id[rows[closing]])
    return calls[closing].hstack([columns.rows_or_nulls(trace.collectives.select("op"), row)["op"], *times])


def _idle(trace: Trace, windows: pl.DataFrame, device: int | None) -> pl.DataFrame:
    """Return the spans of the windows without compute, with the compute that ends each."""
    work, arrays = launches.work(trace, device), launches.work_columns(trace, device)
    rows = np.flatnonzero(arrays.computes)
    busy = intervals.union(arrays.spans[rows])
    steps: list[int | None] = []
    idle_spans: list[Spans] = [intervals.EMPTY]
    for step, start_ns, end_ns in windows.select("step", "start_ns", "end_ns").iter_rows():
        first, past = np.searchsorted(busy[:, 1], start_ns, side="right"), np.searchsorted(busy[:, 0], end_ns)
        idle = intervals.gaps(busy[first:past], (start_ns, end_ns))
        idle_spans.append(idle)
        steps += [step] * len(idle)
    spans = np.concatenate(idle_spans)
    following = np.searchsorted(arrays.spans[rows, 0], spans[:, 1], side="left")
    row = np.concatenate((rows, np.array([-1])))[following]
    return columns.rows_or_nulls(work.select("phase", "unit", "lane", "name", activity_id="id"), row).hstack(
        [
            pl.Series("step", steps, pl.Int64),
            pl.Series("device", [device] * len(spans), pl.Int64),
            pl.Series("start_ns", spans[:, 0]),
            pl.Series("dur_ns", spans[:, 1] - spans[:, 0]),
        ]
    )


def _number_gaps(parts: list[pl.DataFrame], columns: schema.ColumnTypes) -> pl.DataFrame:
    table = pl.concat([schema.conform(part, columns) for part in parts]).sort("device", "start_ns")
    number = pl.Series("gap", np.arange(table.height), pl.Int64)
    return table.replace_column(table.get_column_index("gap"), number)
