"""Gaps in a step: spans without a running collective while more are to follow, and spans without compute."""

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.analysis.time import breakdown, launches
from tracekit.model import intervals, schema
from tracekit.model.intervals import Spans
from tracekit.model.memoize import memoize
from tracekit.model.trace import Trace

COMMUNICATION_COLUMNS = schema.columns("gap device step phase unit lane collective_id name op start_ns dur_ns")
COMPUTE_COLUMNS = schema.columns("gap device step phase unit lane activity_id name start_ns dur_ns")


@memoize
def communication_gaps(trace: Trace) -> pl.DataFrame:
    """Return the spans of a phase in which no collective runs although more of the phase follow.

    Columns COMMUNICATION_COLUMNS: gap (number in the trace), collective_id, name and op of the next collective, which
    ends the gap; one row per gap. A phase begins with the first activity launched in it;
    unknown phases and steps count as one each. Collectives of saves end no gap.
    """
    parts = [pl.DataFrame(schema=COMMUNICATION_COLUMNS)]
    ops = trace.collectives.select(pl.col("activity_id").alias("collective_id"), "op").unique("collective_id")
    for device in breakdown.devices(trace):
        work = launches.work(trace, device)
        begun = work.group_by("step", "phase").agg(pl.col("start_ns").min().alias("begun_ns"))
        calls = work.filter(pl.col("kind") == "communication").join(
            begun, on=["step", "phase"], how="left", nulls_equal=True, maintain_order="left"
        )
        found = _closed(calls, begun_ns="begun_ns").filter(pl.col("phase").ne_missing(conventions.CHECKPOINT))
        parts.append(found.rename({"id": "collective_id"}).join(ops, on="collective_id", how="left"))
    return _numbered(parts, COMMUNICATION_COLUMNS)


@memoize
def compute_gaps(trace: Trace) -> pl.DataFrame:
    """Return the spans of each step's device window without compute.

    Columns COMPUTE_COLUMNS: gap (number in the trace), step of the window, phase to name of the compute that ends the
    gap (null at the end of the trace); one row per gap.
    """
    parts = [pl.DataFrame(schema=COMPUTE_COLUMNS)]
    windows = trace.steps.drop_nulls(["start_ns", "end_ns"])
    for device in breakdown.devices(trace):
        compute = launches.work(trace, device).filter(pl.col("kind") == "compute")
        parts.append(_idle(compute, windows.filter(pl.col("device").eq_missing(device)), device))
    return _numbered(parts, COMPUTE_COLUMNS)


def _closed(calls: pl.DataFrame, *, begun_ns: str) -> pl.DataFrame:
    """Return each activity that ends a span without any of `calls` since `begun_ns`, with the span's times."""
    calls = calls.sort("start_ns", "id")
    end_ns = pl.col("start_ns") + pl.col("dur_ns")
    since_ns = pl.max_horizontal(end_ns.cum_max().shift(1), begun_ns)
    return (
        calls.with_columns(since_ns.alias("since_ns"), pl.col("start_ns").alias("until_ns"))
        .filter(pl.col("until_ns") > pl.col("since_ns"))
        .with_columns(pl.col("since_ns").alias("start_ns"), (pl.col("until_ns") - pl.col("since_ns")).alias("dur_ns"))
    )


def _idle(compute: pl.DataFrame, windows: pl.DataFrame, device: int | None) -> pl.DataFrame:
    """Return the spans of the windows without any of `compute`, with the compute that ends each."""
    busy = intervals.union(intervals.from_table(compute))
    steps: list[int | None] = []
    found: list[Spans] = [intervals.EMPTY]
    for step, start_ns, end_ns in windows.select("step", "start_ns", "end_ns").iter_rows():
        first, past = np.searchsorted(busy[:, 1], start_ns, side="right"), np.searchsorted(busy[:, 0], end_ns)
        idle = intervals.gaps(busy[first:past], (start_ns, end_ns))
        found.append(idle)
        steps += [step] * len(idle)
    spans = np.concatenate(found)
    following = compute.sort("start_ns", "id").select(
        "phase", "unit", "lane", "name", pl.col("id").alias("activity_id"), pl.col("start_ns").alias("_start_ns")
    )
    row = np.searchsorted(following["_start_ns"].to_numpy(), spans[:, 1], side="left")
    ended = pl.Series(np.where(row < following.height, row, following.height), dtype=pl.UInt32)
    by = pl.concat([following, following.clear(1)])[ended]
    return by.with_columns(
        pl.Series("step", steps, pl.Int64),
        pl.lit(device, pl.Int64).alias("device"),
        pl.Series("start_ns", spans[:, 0], pl.Int64),
        pl.Series("dur_ns", spans[:, 1] - spans[:, 0], pl.Int64),
    )


def _numbered(parts: list[pl.DataFrame], columns: schema.ColumnTypes) -> pl.DataFrame:
    found = pl.concat([schema.conform(part, columns) for part in parts]).sort("device", "start_ns")
    return found.with_columns(pl.int_range(pl.len()).cast(pl.Int64).alias("gap"))
