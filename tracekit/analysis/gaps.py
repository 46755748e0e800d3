"""Gaps: spans of a step in which no collective runs although more are to come, and in which nothing computes."""

import numpy as np
import polars as pl

from tracekit import conventions, intervals
from tracekit.analysis import breakdown, launches
from tracekit.analysis.once import once
from tracekit.intervals import Spans
from tracekit.trace import Trace

COMMUNICATION_COLUMNS = {
    "gap": pl.Int64, "device": pl.Int64, "step": pl.Int64, "phase": pl.String, "unit": pl.String, "lane": pl.Int64,
    "collective_id": pl.Int64, "name": pl.String, "op": pl.String, "start_ns": pl.Int64, "dur_ns": pl.Int64,
}  # fmt: skip
COMPUTE_COLUMNS = {
    "gap": pl.Int64, "device": pl.Int64, "step": pl.Int64, "phase": pl.String, "unit": pl.String, "lane": pl.Int64,
    "activity_id": pl.Int64, "name": pl.String, "start_ns": pl.Int64, "dur_ns": pl.Int64,
}  # fmt: skip


@once
def communication_gaps(trace: Trace) -> pl.DataFrame:
    """Return the spans of a phase in which no collective runs on the device although more of the phase are to come.

    Columns gap (number in the trace), device, step, phase, unit, lane, collective_id, name, op (of the collective that
    ends it: the next to start), start_ns, dur_ns; one row per gap. A phase begins with the first activity that was
    launched in it; unknown phases and steps count as one each. What saves communicate closes no gap.
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


@once
def compute_gaps(trace: Trace) -> pl.DataFrame:
    """Return the spans of each step's device window in which the device computes nothing.

    Columns gap (number in the trace), device, step (of the window), phase, unit, lane, activity_id, name (of the
    compute that ends it; null at the end of the trace), start_ns, dur_ns; one row per gap.
    """
    parts = [pl.DataFrame(schema=COMPUTE_COLUMNS)]
    windows = trace.steps.drop_nulls(["start_ns", "end_ns"])
    for device in breakdown.devices(trace):
        compute = launches.work(trace, device).filter(pl.col("kind") == "compute")
        busy = intervals.union(intervals.from_columns(compute["start_ns"], compute["dur_ns"]))
        for step, start_ns, end_ns in (
            windows.filter(pl.col("device").eq_missing(device)).select("step", "start_ns", "end_ns").iter_rows()
        ):
            parts.append(_idle(compute, intervals.gaps(busy, (start_ns, end_ns)), step, device))
    return _numbered(parts, COMPUTE_COLUMNS)


def _closed(calls: pl.DataFrame, *, begun_ns: str) -> pl.DataFrame:
    """Return each activity before which none of `calls` runs since `begun_ns`, with that span as start_ns, dur_ns."""
    calls = calls.sort("start_ns", "id")
    end_ns = pl.col("start_ns") + pl.col("dur_ns")
    since_ns = pl.max_horizontal(end_ns.cum_max().shift(1), begun_ns)
    return (
        calls.with_columns(since_ns.alias("since_ns"), pl.col("start_ns").alias("until_ns"))
        .filter(pl.col("until_ns") > pl.col("since_ns"))
        .with_columns(pl.col("since_ns").alias("start_ns"), (pl.col("until_ns") - pl.col("since_ns")).alias("dur_ns"))
    )


def _idle(compute: pl.DataFrame, idle: Spans, step: int | None, device: int | None) -> pl.DataFrame:
    """Return the idle spans of a step with the compute that ends each; `compute` comes by start and id."""
    following = pl.Series(np.searchsorted(compute["start_ns"].to_numpy(), idle[:, 1], side="left"))
    row = following.set(following >= len(compute), None)
    by = compute.select("phase", "unit", "lane", "name", pl.col("id").alias("activity_id"))
    return pl.DataFrame({"start_ns": idle[:, 0], "dur_ns": idle[:, 1] - idle[:, 0]}).with_columns(
        *(column.gather(row) for column in by.iter_columns()),
        pl.lit(step, pl.Int64).alias("step"),
        pl.lit(device, pl.Int64).alias("device"),
    )


def _numbered(parts: list[pl.DataFrame], columns: dict[str, type[pl.DataType]]) -> pl.DataFrame:
    named = [name for name in columns if name != "gap"]
    found = pl.concat([part.select(pl.col(name).cast(columns[name]) for name in named) for part in parts])
    return found.sort("device", "start_ns").select(pl.int_range(pl.len()).cast(pl.Int64).alias("gap"), *named)
