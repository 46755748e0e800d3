"""CPU time of the steps of a rank, by its metrics log."""

import polars as pl

from tracekit import conventions
from tracekit.model import schema
from tracekit.model.fact import trace_fact
from tracekit.model.trace import Trace

COLUMNS = schema.columns("step wall_ns cpu_ns processor_wait_ns collective_wait_ns")


@trace_fact
def cpu_times(trace: Trace) -> pl.DataFrame:
    """Time of each profiled step, CPU time of the process in it, and its thread's waits (or null).

    By the metrics log. Columns COLUMNS: waits for a processor, and for collectives.
    """
    names = {
        conventions.STEP_TIME_METRIC: "wall_ns",
        conventions.CPU_TIME_METRIC: "cpu_ns",
        conventions.PROCESSOR_WAIT_METRIC: "processor_wait_ns",
        conventions.COLLECTIVE_WAIT_METRIC: "collective_wait_ns",
    }
    rows = trace.metrics.filter(pl.col("name").is_in(list(names)), pl.col("step").is_in(trace.steps["step"].implode()))
    sums = rows.group_by("step", "name").agg(pl.col("value").last().round().cast(pl.Int64))
    parts = [sums.filter(name=name).select("step", pl.col("value").alias(column)) for name, column in names.items()]
    times = parts[0].join(parts[1], on="step")
    for waits in parts[2:]:
        times = times.join(waits, on="step", how="left")
    return schema.conform(times, COLUMNS)
