"""Faster links of one axis in a run with a pipeline: transfers between stages, or collectives within its actions."""

import polars as pl

from tracekit.analysis.parallelism import group_axes, pipeline_stages
from tracekit.conventions.strategies import PP
from tracekit.errors import InputError
from tracekit.model.run import Run
from tracekit.replay.graph import pipeline_timing
from tracekit.replay.graph.pipeline_timing import PipelineTiming
from tracekit.replay.graph.strategies import axes_text
from tracekit.sync import alignment, collective_matching

_PLACE = ["window", "rank"]


def with_faster_axis(run: Run, timing: PipelineTiming, axis: str, times: float) -> PipelineTiming:
    """Return the timing with the links of an axis at `times` their bandwidth.

    A stage's actions get shorter by what the transfers within them do; a collective's transfer is its shortest duration
    over the ranks. Raises InputError where the run has no collective of the axis.
    """
    if axis == PP:
        return timing.with_transfers(1 / times)
    saved = _transfers_by_action(run, axis)
    kinds = pipeline_timing.KINDS
    saved_ns = {(stage, kinds[action]): (1 - 1 / times) * ns for stage, action, ns in saved.iter_rows()}
    return timing.shorten(saved_ns)


def _transfers_by_action(run: Run, axis: str) -> pl.DataFrame:
    """Return the time of an axis' transfers in an action. Columns stage, action, ns: means over the actions."""
    actions = run.table(pipeline_stages.staged_actions)
    axes = run.table(group_axes.group_axes)
    groups = axes.filter(pl.col("axis") == axis).select("group", "members")
    if groups.is_empty():
        raise InputError(f"--axis-times {axis}: no collective of this axis; the run has {axes_text(axes)}")
    matched = run.table(collective_matching.matched_calls).join(groups, on=["group", "members"], how="semi")
    on_clock = alignment.on_run_clock(matched, run.offsets, ("start_ns", "end_ns"))
    took_ns = pl.col("end_ns") - pl.col("start_ns")
    shortest = pl.when(pl.col("instance").is_null()).then(took_ns).otherwise(took_ns.min().over("window", "instance"))
    calls = on_clock.select(*_PLACE, at_ns="start_ns", ns=shortest).sort("at_ns")
    begun = actions.select(*_PLACE, "stage", "action", "start_ns", until_ns="end_ns").sort("start_ns")
    inside = calls.join_asof(begun, left_on="at_ns", right_on="start_ns", by=_PLACE, check_sortedness=False)
    sums = inside.filter(pl.col("at_ns") <= pl.col("until_ns")).group_by("stage", "action").agg(pl.col("ns").sum())
    counts = actions.group_by("stage", "action").len()
    return sums.join(counts, on=["stage", "action"]).select("stage", "action", pl.col("ns") / pl.col("len"))
