"""Predictions of other pipelines: more micro-batches, another schedule, layers moved between stages."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import polars as pl

from tracekit.analysis.parallelism import group_axes, pipeline_stages
from tracekit.conventions import pipeline_schedules
from tracekit.conventions.strategies import CP, EP, PP, TP
from tracekit.errors import InputError
from tracekit.model.run import Run
from tracekit.replay.graph import pipeline_timing, savings, steps, strategies
from tracekit.replay.graph.pipeline_timing import PipelineTiming
from tracekit.replay.graph.strategies import Prediction, axes_text
from tracekit.sync import alignment, collective_matching

_ASSUMED = "mean time of each stage's actions"
_OUTSIDE = "time outside the pipeline unchanged (optimizer); reduction of gradients in proportion to a rank's weights"
_PLACE = ["window", "rank"]


@dataclass(frozen=True)
class PipelineChange:
    """What to change in the pipeline of a run; None and 0: nothing."""

    micro_batches: int | None = None
    schedule: str | None = None
    virtual_stages: int = 0
    stage_layers: str | None = None
    axes: tuple[tuple[str, float], ...] = ()
    """Mesh axes and how many times as fast their links are."""

    @property
    def is_none(self) -> bool:
        """Return whether nothing changes."""
        return self == PipelineChange()


def predict(run: Run, change: PipelineChange) -> Prediction:
    """Return the predicted step time with another pipeline: the recorded one, and what the schedule's time changes by.

    Raises InputError for a run without a pipeline, or a change that is not possible.
    """
    before = pipeline_timing.recorded_timing(run)
    timing = before
    for axis, times in change.axes:
        timing = with_faster_axis(run, timing, axis, times)
    after = _apply_change(timing, change)
    replayed = savings.replayed_steps(run)
    if replayed.is_empty():
        raise InputError(f"{run.path}: no step can be replayed")
    step_ns = steps.total_ns(replayed, "duration_ns") // replayed.select("window", "step").n_unique()
    predicted_ns = step_ns + round(after.duration_ns() - before.duration_ns())
    faster = [strategies.axis_text(axis, times) for axis, times in change.axes]
    name = ", ".join([*_names(before, after), *faster]) or "the same pipeline"
    return Prediction(name, step_ns, predicted_ns, _assumptions(before, after))


def predict_axes(run: Run, axes: Mapping[str, float]) -> Prediction:
    """Return the predicted step time with the links of mesh axes at so many times their bandwidth.

    Within a pipeline (pp, tp, cp, ep) its actions are scheduled again; data parallelism is replayed on the graph, and
    the two changes add up. Raises InputError where the run has no collective of an axis.
    """
    for times in axes.values():
        strategies.checked_times(times, "--axis-times")
    is_pipelined = pipeline_stages.is_pipelined(run)
    within = tuple((axis, times) for axis, times in axes.items() if is_pipelined and axis in _WITHIN)
    replayed = {axis: times for axis, times in axes.items() if axis not in dict(within)}
    parts = [predict(run, PipelineChange(axes=within))] if within else []
    parts += [strategies.predict_axes(run, replayed)] if replayed else []
    first = parts[0]
    assumed = dict.fromkeys(text for part in parts for text in part.assumptions if text != _OUTSIDE or not replayed)
    return replace(
        first,
        name=", ".join(part.name for part in parts),
        predicted_ns=first.step_ns + sum(part.predicted_ns - part.step_ns for part in parts),
        assumptions=tuple(assumed),
    )


_WITHIN = (PP, TP, CP, EP)


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


def _apply_change(before: PipelineTiming, change: PipelineChange) -> PipelineTiming:
    after = _with_schedule(before, change.schedule or before.schedule, change.virtual_stages)
    if change.micro_batches is not None:
        if change.micro_batches < 1:
            raise InputError(f"--micro-batches is {change.micro_batches}; it must be 1 or more")
        after = after.with_micro_batches(change.micro_batches)
    if change.stage_layers is not None:
        after = after.with_layers(pipeline_timing.parsed_layers(change.stage_layers, after))
    if refusal := pipeline_schedules.refusal(after.schedule, after.shape):
        raise InputError(refusal)
    return after


def _with_schedule(before: PipelineTiming, schedule: str, virtual_stages: int) -> PipelineTiming:
    if schedule not in pipeline_schedules.SCHEDULES:
        raise InputError(
            f"--schedule is {schedule!r}; one of {', '.join(pipeline_schedules.SCHEDULES)} can be predicted"
        )
    usual = pipeline_schedules.usual_stages_per_rank(schedule)
    if schedule == pipeline_schedules.INTERLEAVED:
        usual = max(usual, before.shape.virtual_stages)
    stages = virtual_stages or usual
    total, count = sum(before.layers), stages * before.shape.ranks
    if count > total:
        raise InputError(f"{count} stages need a layer each; there are {total} layers")
    if count == before.stages:
        return before.with_schedule(schedule)
    return before.with_layers(tuple(pipeline_timing.equal_layers(total, count)), schedule, stages)


def _names(before: PipelineTiming, after: PipelineTiming) -> list[str]:
    parts = []
    if (before.schedule, before.stages) != (after.schedule, after.stages):
        stages = f" with {after.shape.virtual_stages} stages per rank" if after.shape.virtual_stages > 1 else ""
        parts.append(f"schedule {after.schedule}{stages}")
    if before.shape.micro_batches != after.shape.micro_batches:
        parts.append(f"{after.shape.micro_batches} micro-batches")
    if before.stages == after.stages and before.layers != after.layers:
        parts.append(f"stages of {', '.join(map(str, after.layers))} layers")
    return parts


def _assumptions(before: PipelineTiming, after: PipelineTiming) -> tuple[str, ...]:
    assumptions = [_ASSUMED, _OUTSIDE]
    if before.shape.micro_batches != after.shape.micro_batches:
        assumptions.append(
            "the same tokens per step: the time of an action proportional to the tokens of a micro-batch"
        )
    if before.layers != after.layers:
        assumptions.append("layers take equally long on a rank; the head as many layers as its weights are")
    if after.schedule in pipeline_schedules.SPLIT_BACKWARD and before.schedule not in pipeline_schedules.SPLIT_BACKWARD:
        assumptions.append("weight gradients take as long as forward without attention")
    if after.shape.micro_batches > before.shape.micro_batches:
        assumptions.append("kernels as efficient on smaller micro-batches")
    return tuple(assumptions)


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
