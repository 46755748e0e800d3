"""What-if questions to simulated hybrid runs, and what the changed job takes when it is simulated, too."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from tracekit.conventions import pipeline_schedules
from tracekit.conventions.strategies import AXES, DP_REPLICATE, DP_SHARD, PP, TP
from tracekit.errors import InputError
from tracekit.model.run import Run
from tracekit.replay.graph import pipeline_changes, savings
from tracekit.replay.graph.pipeline_changes import PipelineChange
from tracekit.simulate import engine
from tracekit.simulate.job import Hybrid, Impairments, Job, equal_stages

MATTERS = 0.03  # share of the step from which a change is an answer worth having
CLOSE = 0.1
_SAME = 0.001  # of the step
_FASTER = 4.0
_UNBALANCED_EXPERTS = "unbalanced-experts"
_Predict: TypeAlias = Callable[[Run], float]
_Question: TypeAlias = tuple[str, str, _Predict, Callable[[], Job]]
"""What it is about, the options of whatif, the prediction in ns, and the job with this change."""


@dataclass(frozen=True)
class Answer:
    """A question about a step, its time before, as predicted, and as simulated with the change; times in ns."""

    question: str
    about: str
    before_ns: float
    predicted_ns: float
    true_ns: float

    @property
    def step_error(self) -> float:
        """Return the error of the predicted step, as a share of the true one."""
        return abs(self.predicted_ns - self.true_ns) / self.true_ns

    @property
    def matters(self) -> bool:
        """Return whether the step changes, in truth or as predicted."""
        return max(abs(self.before_ns - self.true_ns), abs(self.before_ns - self.predicted_ns)) >= self._least_ns

    @property
    def change_error(self) -> float:
        """Return the error of the predicted change, as a share of the true change or of the least that matters."""
        true_ns = abs(self.true_ns - self.before_ns)
        return abs(self.predicted_ns - self.true_ns) / max(true_ns, self._least_ns)

    @property
    def _least_ns(self) -> float:
        return MATTERS * self.before_ns


def answers(run: Run, job: Job, healthy: Job, subjects: Sequence[str] = ()) -> tuple[Answer, ...]:
    """Ask a simulated run what its job allows: another pipeline, faster links, experts with equally many tokens.

    `subjects` limits the questions to those about these subjects.
    """
    before_ns = _step_ns(job)
    results = []
    for about, question, predict, changed in _questions(job, healthy):
        if subjects and about not in subjects:
            continue
        try:
            true_ns = _step_ns(changed())
        except InputError:  # such a job is not possible, or is not simulated
            continue
        results.append(Answer(question, about, before_ns, predict(run), true_ns))
    return tuple(results)


def _step_ns(job: Job) -> float:
    return engine.total_ns(job) / job.steps


def _questions(job: Job, healthy: Job) -> Iterator[_Question]:
    assert job.hybrid is not None
    if job.hybrid.layout.pp > 1:
        yield from _pipelines(job, job.hybrid)
    if job.impairments.hot_expert != healthy.impairments.hot_expert:
        yield "experts", f"--without {_UNBALANCED_EXPERTS}", _without_unbalanced_experts, lambda: healthy
    yield from _placements(job, job.hybrid)
    for axis, changed in _faster_axes(job, job.hybrid):
        text = f"--axis-times {axis}={_FASTER:g}"
        yield f"links of {axis}", text, _axis(axis), partial(replace, job, impairments=changed)


def _pipelines(job: Job, hybrid: Hybrid) -> Iterator[_Question]:
    for schedule in pipeline_schedules.SCHEDULES:
        if schedule != hybrid.schedule:
            changed = _with_schedule(hybrid, job.model.layers, schedule)
            change = PipelineChange(schedule=schedule)
            yield "schedule", f"--schedule {schedule}", _pipeline(change), partial(replace, job, hybrid=changed)
    for count, batch in ((job.micro_batches // 2, 2 * job.batch), (2 * job.micro_batches, job.batch // 2)):
        if count * batch == job.micro_batches * job.batch > 0:
            text = f"--micro-batches {count}"
            changed_job = partial(replace, job, micro_batches=count, batch=batch)
            yield "micro-batches", text, _pipeline(PipelineChange(micro_batches=count)), changed_job
    layers = equal_stages(job.model.layers, hybrid.stages)
    if layers != hybrid.stage_layers:
        text = ",".join(map(str, layers))
        changed_job = partial(replace, job, hybrid=replace(hybrid, stage_layers=layers))
        yield "layers of stages", f"--stage-layers {text}", _pipeline(PipelineChange(stage_layers=text)), changed_job


def _placements(job: Job, hybrid: Hybrid) -> Iterator[_Question]:
    """Ask for the two inner axes in the other order, where that moves ranks between nodes.

    Links that are slow by a fault are left out: whether the fault moves with the ranks is not known.
    """
    slow = job.impairments
    inner = [axis for axis in reversed(AXES) if hybrid.layout.sizes[axis] > 1]
    if len(inner) < 2 or job.gpus <= job.hardware.gpus_per_node or slow.slow_axes or slow.slow_boundaries:
        return
    order = (inner[1], inner[0], *inner[2:])
    changed = partial(replace, job, hybrid=replace(hybrid, rank_order=order))
    if abs(_step_ns(changed()) - _step_ns(job)) < _SAME * _step_ns(job):
        return
    text = "-".join(order)
    yield (
        "ranks on nodes",
        f"--rank-order {text}",
        lambda run: pipeline_changes.predict_rank_order(run, text).predicted_ns,
        changed,
    )


def _with_schedule(hybrid: Hybrid, layers: int, schedule: str) -> Hybrid:
    """Return the layout under a schedule, with as many stages per rank as whatif takes by default."""
    stages = pipeline_schedules.usual_stages_per_rank(schedule)
    stage_layers = (
        hybrid.stage_layers if stages == hybrid.virtual_stages else equal_stages(layers, stages * hybrid.layout.pp)
    )
    return replace(hybrid, schedule=schedule, virtual_stages=stages, stage_layers=stage_layers)


def _faster_axes(job: Job, hybrid: Hybrid) -> Iterator[tuple[str, Impairments]]:
    layout, slow = hybrid.layout, job.impairments
    if layout.pp > 1:
        links = {stage: slow.slow_boundaries.get(stage, 1.0) / _FASTER for stage in range(hybrid.stages)}
        yield PP, replace(slow, slow_boundaries=links)
    if layout.tp > 1:
        yield TP, _faster(slow, TP)
    if hybrid.data_ranks > 1 and layout.ep == 1:
        yield "dp", _faster(slow, DP_REPLICATE, DP_SHARD)


def _faster(slow: Impairments, *axes: str) -> Impairments:
    faster = {axis: slow.slow_axes.get(axis, 1.0) / _FASTER for axis in axes}
    return replace(slow, slow_axes={**slow.slow_axes, **faster})


def _pipeline(change: PipelineChange) -> _Predict:
    return lambda run: pipeline_changes.predict(run, change).predicted_ns


def _axis(axis: str) -> _Predict:
    return lambda run: pipeline_changes.predict_axes(run, {axis: _FASTER}).predicted_ns


def _without_unbalanced_experts(run: Run) -> float:
    saving = savings.saving(run, _UNBALANCED_EXPERTS)
    return saving.step_ns - saving.saved_ns


def table(results: Sequence[Answer]) -> str:
    """Return the errors of the answers by question, as Markdown."""
    lines = [
        "| question about | answers | median error of the step | largest | within 10% | step changes by 3% | "
        "median error of the change | within 10% |",
        f"|{'---|' * 8}",
    ]
    kinds = sorted({result.about for result in results})
    rows = [_row(about, [result for result in results if result.about == about]) for about in kinds]
    return "\n".join([*lines, *rows, *([_row("all", results)] if results else [])])


def _row(about: str, results: Sequence[Answer]) -> str:
    of_step = [result.step_error for result in results]
    of_change = [result.change_error for result in results if result.matters]
    cells = [about, str(len(results)), f"{statistics.median(of_step):.1%}", f"{max(of_step):.1%}", _close(of_step)]
    cells += [str(len(of_change)), *([f"{statistics.median(of_change):.1%}", _close(of_change)] if of_change else "  ")]
    return f"| {' | '.join(cells)} |"


def _close(errors: Sequence[float]) -> str:
    return f"{sum(error <= CLOSE for error in errors) / len(errors):.1%}"
