"""Checkpoint saves: what each stage took on each rank."""

import polars as pl

from tracekit.trace import Trace

COLUMNS = {
    "checkpoint": pl.String, "step": pl.Int64, "stage": pl.String, "start_ns": pl.Int64, "dur_ns": pl.Int64,
    "bytes": pl.Int64, "blocking": pl.Boolean,
}  # fmt: skip


def saves(trace: Trace) -> pl.DataFrame:
    """Return the stages of this rank's saves from the checkpoint log.

    Columns checkpoint, step, stage, start_ns, dur_ns, bytes, blocking; one row per save and stage. The log holds the
    whole run, so every window of a rank tells the same.
    """
    return trace.checkpoints.filter(pl.col("operation") == "save").select(*COLUMNS)


def step_times(trace: Trace) -> pl.DataFrame:
    """Return the time of each step by the metrics log. Columns step, step_time_ns; one row per step."""
    return trace.metrics.filter(pl.col("name") == "step_time_ns").select("step", pl.col("value").alias("step_time_ns"))
