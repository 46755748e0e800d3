"""Checkpoint saves: what each stage took on each rank, and which spans of a trace are saves."""

import numpy as np
import polars as pl

from tracekit import conventions, intervals
from tracekit.trace import Trace

COLUMNS = {
    "checkpoint": pl.String, "step": pl.Int64, "stage": pl.String, "start_ns": pl.Int64, "dur_ns": pl.Int64,
    "bytes": pl.Int64, "blocking": pl.Boolean,
}  # fmt: skip
SPAN_COLUMNS = {"step": pl.Int64, "name": pl.String, "start_ns": pl.Int64, "dur_ns": pl.Int64}

_OURS = "^" + conventions.span_name(conventions.CHECKPOINT) + r"(\.|$)"
# What others call a save in annotations (Lightning, torchtitan, own record_function names), and, in traces with
# stacks, the functions of PyTorch and of the trainers that save.
_SAVE_SPAN = (
    _OURS
    + r"|(?i)(\b|_)(save|saving|write|dump)[-_. ](a[-_. ])?(model[-_. ])?(checkpoint|ckpt)"
    + r"|(?i)(\b|_)(checkpoint|ckpt)[-_. ](save|saving)\b|(?i)^#+ ?checkpoint\b"
    + r"|(?i)\b(dcp|torch|distributed\.checkpoint)\.(async_)?save\b|(\b|_)save_state_dict\b"
)
_SAVE_FUNCTION = (
    r"torch/serialization\.py\(\d+\): save$"
    r"|torch/distributed/checkpoint/state_dict_saver\.py\(\d+\): (save|async_save|_?save_state_dict)$"
    r"|: _?save_(checkpoint|state_dict)$"
)


def saves(trace: Trace) -> pl.DataFrame:
    """Return the stages of this rank's saves from the checkpoint log.

    Columns checkpoint, step, stage, start_ns, dur_ns, bytes, blocking; one row per save and stage. The log holds the
    whole run, so every window of a rank tells the same.
    """
    return trace.checkpoints.filter(pl.col("operation") == "save").select(*COLUMNS)


def step_times(trace: Trace) -> pl.DataFrame:
    """Return the time of each step by the metrics log. Columns step, step_time_ns; one row per step."""
    return trace.metrics.filter(pl.col("name") == conventions.STEP_TIME_METRIC).select(
        "step", pl.col("value").alias("step_time_ns")
    )


def save_spans(trace: Trace) -> pl.DataFrame:
    """Return the spans of the trace that are saves: the recorder's own, and others known by their names.

    Columns step, name, start_ns, dur_ns; one row per stretch of time that the host spends in saves, named after the
    span that begins it. `step` is the one in whose host window the stretch begins; null outside of steps.
    """
    name, kind = pl.col("name"), pl.col("kind")
    found = trace.ops.filter(
        ((kind == "annotation") & name.str.contains(_SAVE_SPAN))
        | ((kind == "python") & name.str.contains(_SAVE_FUNCTION)),
        pl.col("dur_ns") > 0,
    ).sort("start_ns", "dur_ns", descending=[False, True])
    merged = intervals.union(intervals.from_columns(found["start_ns"], found["dur_ns"]))
    if not len(merged):
        return pl.DataFrame(schema=SPAN_COLUMNS)
    first = np.searchsorted(found["start_ns"].to_numpy(), merged[:, 0], side="left")
    return found[first].select(
        "step",
        "name",
        "start_ns",
        pl.Series("dur_ns", merged[:, 1] - merged[:, 0], pl.Int64),
    )


def host_steps(trace: Trace) -> pl.DataFrame:
    """Return the host windows of the steps. Columns step, start_ns, dur_ns; one row per step that the trace marks."""
    marked = trace.steps.drop_nulls(["step", "host_start_ns", "host_end_ns"]).unique("step", maintain_order=True)
    return marked.select(
        "step",
        pl.col("host_start_ns").alias("start_ns"),
        (pl.col("host_end_ns") - pl.col("host_start_ns")).alias("dur_ns"),
    )
