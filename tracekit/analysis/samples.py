"""Per-step samples of every number that a run is compared by."""

import polars as pl

from tracekit.analysis import breakdown
from tracekit.trace import Trace

COLUMNS = {"step": pl.Int64, "metric": pl.String, "value": pl.Float64}

LOWER_IS_BETTER = {
    "step_time_ns": True,
    "compute_ns": True,
    "communication_ns": True,
    "exposed_communication_ns": True,
    "exposed_communication_ratio": True,
    "overlap_ratio": False,
    "idle_ns": True,
    "allocations": True,
    "allocated_bytes": True,
    "checkpoint_blocked_ns": True,
    "tokens_per_second": False,
}
"""The metrics a comparison shows, in order, and which way is better."""


def samples(trace: Trace) -> pl.DataFrame:
    """Return per-step samples of the metrics in `LOWER_IS_BETTER`.

    Columns step, metric, value; one row per step and metric that the trace can tell. `step_time_ns` is the device
    window of the step. `allocations` and `allocated_bytes` count allocator events of the step that take memory, on the
    device, or on the host in a CPU run. `checkpoint_blocked_ns` has one row per checkpoint saved: the time that the
    training thread waited, by the checkpoint log.
    """
    parts = (_of_breakdown(trace), _of_allocations(trace), _of_checkpoints(trace), _of_metrics(trace))
    return pl.concat([part.select(pl.col(name).cast(dtype) for name, dtype in COLUMNS.items()) for part in parts])


def _of_breakdown(trace: Trace) -> pl.DataFrame:
    # A rank that drives several devices is as slow as the slowest of them.
    steps = breakdown.by_step(trace).sort("duration_ns").group_by("step", maintain_order=True).last().sort("step")
    communication = pl.col("communication_ns")
    wide = steps.select(
        "step",
        pl.col("duration_ns").alias("step_time_ns"),
        "compute_ns",
        "communication_ns",
        "exposed_communication_ns",
        (pl.col("exposed_communication_ns") / pl.col("duration_ns")).alias("exposed_communication_ratio"),
        pl.when(communication > 0).then(pl.col("overlapped_ns") / communication).alias("overlap_ratio"),
        "idle_ns",
    )
    return wide.unpivot(index="step", variable_name="metric", value_name="value").drop_nulls("value")


def _of_allocations(trace: Trace) -> pl.DataFrame:
    device = pl.col("device")
    taken = trace.allocations.filter(
        pl.col("delta_bytes") > 0,
        device.is_not_null() if trace.on_device else device.is_null(),
        pl.col("step").is_not_null(),
    )
    wide = taken.group_by("step").agg(
        pl.len().cast(pl.Float64).alias("allocations"),
        pl.col("delta_bytes").sum().cast(pl.Float64).alias("allocated_bytes"),
    )
    return wide.sort("step").unpivot(index="step", variable_name="metric", value_name="value")


def _of_checkpoints(trace: Trace) -> pl.DataFrame:
    blocked = trace.checkpoints.filter(pl.col("operation") == "save", pl.col("stage") == "total", pl.col("blocking"))
    return blocked.select("step", pl.lit("checkpoint_blocked_ns").alias("metric"), pl.col("dur_ns").alias("value"))


def _of_metrics(trace: Trace) -> pl.DataFrame:
    known = trace.metrics.filter(pl.col("name") == "tokens_per_second")
    return known.select("step", pl.col("name").alias("metric"), "value")
