"""File system calls of ranks, from I/O logs: the step of each, and sums by file."""

import numpy as np
import polars as pl

from tracekit.model import intervals, schema
from tracekit.model.fact import run_fact, trace_fact
from tracekit.model.run import Run
from tracekit.model.trace import Trace

COLUMNS = schema.columns(f"step {' '.join(column.name for column in schema.IO_CALLS.columns)}")
BY_FILE_COLUMNS = schema.columns(
    "rank kind file calls bytes busy_ns moved_bytes_per_s longest_ns longest_call",
    longest_call=pl.String,
    file=pl.String,
)


@trace_fact
def calls(trace: Trace) -> pl.DataFrame:
    """Return the file system calls of a trace, with the step in whose time on the host each began; by start.

    Columns COLUMNS; step is null for calls between and outside the recorded steps.
    """
    if trace.io_calls.is_empty():
        return schema.empty(COLUMNS)
    steps = trace.steps.select("step", "host_start_ns", "host_end_ns").drop_nulls().unique().sort("host_start_ns")
    begun = trace.io_calls.sort("start_ns").join_asof(
        steps, left_on="start_ns", right_on="host_start_ns", strategy="backward", check_sortedness=False
    )
    is_inside = pl.col("start_ns") < pl.col("host_end_ns")
    return schema.select(begun.with_columns(pl.when(is_inside).then("step").alias("step")), COLUMNS)


@run_fact
def of_run(run: Run) -> pl.DataFrame:
    """Return the file system calls of all ranks, once each: columns rank and COLUMNS, by rank and start.

    A log covers the whole process, so each window of a rank has the same calls; the step is that of any window.
    """
    key = ["rank", "start_ns", "dur_ns", "name", "file", "process", "thread", "bytes"]
    rows = run.table(calls).drop("window", strict=False)
    return rows.sort(*key, "step", nulls_last=True).unique(key, keep="first", maintain_order=True)


def by_file(run: Run) -> pl.DataFrame:
    """Return the calls of each rank by kind and file, the longest first. Columns BY_FILE_COLUMNS.

    `busy_ns` is the time in which any of the calls ran, `moved_bytes_per_s` the bytes over that time (null for calls
    that move none), `longest_call` the function of the longest call.
    """
    key = ["rank", "kind", "file"]
    ordered = run.table(of_run).sort(*key, "start_ns")
    end_ns = pl.col("start_ns") + pl.col("dur_ns")
    before_ns = end_ns.cum_max().shift(1).over(key)
    new_ns = (end_ns - pl.max_horizontal("start_ns", before_ns)).clip(0)
    longest = pl.col("dur_ns").arg_max()
    sums = (
        ordered.with_columns(new_ns.alias("new_ns"))
        .group_by(key, maintain_order=True)
        .agg(
            pl.len().cast(pl.Int64).alias("calls"),
            pl.when(pl.col("bytes").is_not_null().any()).then(pl.col("bytes").sum()).alias("bytes"),
            pl.col("new_ns").sum().alias("busy_ns"),
            pl.col("dur_ns").max().alias("longest_ns"),
            pl.col("name").get(longest).alias("longest_call"),
        )
    )
    rate = pl.when(pl.col("busy_ns") > 0).then(pl.col("bytes") * 1e9 / pl.col("busy_ns")).alias("moved_bytes_per_s")
    files = sums.with_columns(rate).sort("busy_ns", *key, descending=[True, False, False, False])
    return schema.select(files, BY_FILE_COLUMNS)


def during(rows: pl.DataFrame, spans: intervals.Spans) -> pl.DataFrame:
    """Return the calls that overlap any of the spans, shape (n, 2) in ns, with column overlap_ns; the longest first."""
    overlap_ns = intervals.coverage(intervals.from_table(rows), intervals.union(spans))
    overlapping = rows.with_columns(pl.Series("overlap_ns", overlap_ns, pl.Int64)).filter(pl.col("overlap_ns") > 0)
    return overlapping.sort("overlap_ns", "start_ns", descending=[True, False])


def covered_ns(overlapping: pl.DataFrame, spans: intervals.Spans) -> int:
    """Time of the spans that any of the calls covers, in ns."""
    ran = intervals.union(intervals.from_table(overlapping))
    return int(np.sum(intervals.coverage(intervals.union(spans), ran)))
