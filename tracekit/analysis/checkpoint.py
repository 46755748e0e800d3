"""Checkpoint saves: what each stage took on each rank."""

import polars as pl

from tracekit.trace import Trace

COLUMNS = {
    "checkpoint": pl.String, "step": pl.Int64, "stage": pl.String, "start_ns": pl.Int64, "dur_ns": pl.Int64,
    "bytes": pl.Int64, "blocking": pl.Boolean,
}  # fmt: skip

SPAN_COLUMNS = {"step": pl.Int64, "name": pl.String, "start_ns": pl.Int64, "dur_ns": pl.Int64}

# How saves show in a trace: as annotations of trainers, or as Python frames where stacks were recorded.
_SAVE_SPAN = (
    r"^tracekit::checkpoint$|(?i:\bsave_checkpoint\b|\bcheckpoint_save\b|\bsaving checkpoint\b)"
    r"|\bdcp\.(?:async_)?save\b|\btorch\.save\b|torch/serialization\.py\(\d+\): save$"
    r"|torch/distributed/checkpoint/state_dict_saver\.py\(\d+\): (?:async_)?save$"
)


def saves(trace: Trace) -> pl.DataFrame:
    """Return the stages of this rank's saves from the checkpoint log.

    Columns checkpoint, step, stage, start_ns, dur_ns, bytes, blocking; one row per save and stage. The log holds the
    whole run, so every window of a rank tells the same.
    """
    return trace.checkpoints.filter(pl.col("operation") == "save").select(*COLUMNS)


def step_times(trace: Trace) -> pl.DataFrame:
    """Return the time of each step by the metrics log. Columns step, step_time_ns; one row per step."""
    return trace.metrics.filter(pl.col("name") == "step_time_ns").select("step", pl.col("value").alias("step_time_ns"))


def save_spans(trace: Trace) -> pl.DataFrame:
    """Return the spans in which a thread saves a checkpoint, as far as names of annotations and Python frames tell.

    Columns step, name, start_ns, dur_ns; one row per save: of spans inside each other, the outermost.
    """
    named = trace.ops.filter(pl.col("name").str.contains(_SAVE_SPAN)).sort("lane", "start_ns", "id")
    end_ns = pl.col("start_ns") + pl.col("dur_ns")
    reached_ns = end_ns.cum_max().shift(1).over("lane")
    return named.filter(reached_ns.is_null() | (pl.col("start_ns") >= reached_ns)).select(*SPAN_COLUMNS)
