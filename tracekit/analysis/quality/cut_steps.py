"""Steps of which the recording has only a part: the optimizer alone, or a step that began before the recording."""

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.analysis.time import breakdown, trace_columns
from tracekit.model import schema
from tracekit.model.fact import trace_fact
from tracekit.model.trace import Trace

COLUMNS = schema.columns("step part missing_ratio duration_ns steps", part=pl.String)
OPTIMIZER, TAIL = PARTS = ("optimizer", "tail")
"""What is recorded of a cut step: only the optimizer, or what follows a part of its forward pass."""
_BACKWARD = r"Backward\d*$"
_MIN_OPTIMIZER_RATIO = 0.9
"""Share of the launched device work above which a step without backward has nothing but the optimizer."""
_MIN_MISSING_RATIO = 0.25
"""Share of backward ops without a recorded forward op. Less is usual: pipelined trainers run a part of the forward
pass, such as the lookup of embeddings, one step ahead."""


@trace_fact
def cut_steps(trace: Trace) -> pl.DataFrame:
    """Return the steps of which only a part was recorded.

    Columns COLUMNS: part (of PARTS), missing_ratio (share of the step's backward ops whose forward op was not recorded;
    1 without any), duration_ns (of the step's device window, the longest), steps (how many the trace has); one row per
    cut step, null for a window without marks. A step between marks of the profiler is whole unless it has only the
    optimizer; the first one that ends at an optimizer step may have begun before the recording.
    """
    may_be_tail = _may_begin_before(trace)
    if not may_be_tail and not _may_be_optimizer(trace):
        return schema.empty(COLUMNS)
    parts = _backward(trace).join(_optimizer(trace), on="step", how="full", nulls_equal=True, coalesce=True)
    lengths = breakdown.by_step(trace).group_by("step").agg(pl.col("duration_ns").max())
    counted = lengths.with_columns(pl.len().cast(pl.Int64).alias("steps"))
    table = counted.join(parts, on="step", how="left", nulls_equal=True).with_columns(
        pl.col("backward_ops", "known_ops").fill_null(0), pl.col("optimizer_ratio").fill_null(0.0)
    )
    has_backward = bool(parts["backward_ops"].sum())
    is_optimizer = (pl.col("optimizer_ratio") >= _MIN_OPTIMIZER_RATIO) & (pl.col("backward_ops") == 0)
    missing_ratio = pl.when(pl.col("backward_ops") > 0).then(1 - pl.col("known_ops") / pl.col("backward_ops"))
    is_tail = (pl.col("step") == pl.col("step").min()) & pl.lit(may_be_tail and has_backward)
    return (
        table.with_columns(missing_ratio.otherwise(1.0).alias("missing_ratio"))
        .with_columns(
            pl.when(is_optimizer)
            .then(pl.lit(OPTIMIZER))
            .when(is_tail & (pl.col("missing_ratio") >= _MIN_MISSING_RATIO))
            .then(pl.lit(TAIL))
            .alias("part")
        )
        .drop_nulls("part")
        .pipe(schema.select, COLUMNS)
        .sort("step")
    )


def _may_begin_before(trace: Trace) -> bool:
    """Return whether the first step begins with the recording, and forward ops are known by sequence numbers.

    In a sampled trace most forward ops are missing everywhere.
    """
    has_forward_ids, issue = trace.ops["forward_id"].null_count() < trace.ops.height, trace_columns.has_issue
    return has_forward_ids and issue(trace, "steps_from_optimizer") and not issue(trace, "sampled")


def _may_be_optimizer(trace: Trace) -> bool:
    """Return whether the optimizer launched nearly all work of any step, work without a launch excluded."""
    step = trace_columns.activity_steps(trace)
    of_optimizer = trace_columns.as_flags(trace.activities["phase"] == conventions.OPTIMIZER)
    launched_ns = np.where(trace_columns.launch_ids(trace) >= 0, trace.activities["dur_ns"].to_numpy(), 0)
    _, code = np.unique(step, return_inverse=True)
    optimizer_ns, total_ns = np.bincount(code, launched_ns * of_optimizer), np.bincount(code, launched_ns)
    return bool((optimizer_ns >= _MIN_OPTIMIZER_RATIO * total_ns)[total_ns > 0].any())


def _backward(trace: Trace) -> pl.DataFrame:
    """Return the backward ops of each step. Columns step, backward_ops, known_ops (with a recorded forward op)."""
    backward = trace_columns.is_kind(trace, "cpu_op") & trace_columns.is_named(trace, _BACKWARD)
    ops = trace.ops.select("step", "forward_id").filter(pl.Series(backward))
    known_ops = pl.col("forward_id").is_not_null().sum().cast(pl.Int64)
    return ops.group_by("step").agg(pl.len().cast(pl.Int64).alias("backward_ops"), known_ops.alias("known_ops"))


def _optimizer(trace: Trace) -> pl.DataFrame:
    """Return the share of each step's launched work that the optimizer launched. Columns step, optimizer_ratio."""
    work = trace.activities.filter(pl.col("launch_id").is_not_null(), pl.col("dur_ns") > 0)
    of_optimizer = pl.col("dur_ns").filter(pl.col("phase").eq_missing(conventions.OPTIMIZER)).sum()
    return work.group_by("step").agg((of_optimizer / pl.col("dur_ns").sum()).alias("optimizer_ratio"))
