"""Changes of how a step is divided: micro-batches and the schedule of a pipeline."""

from collections.abc import Sequence

from tracekit.replay.graph import pipeline_changes
from tracekit.replay.graph.causes.collectives import COMMUNICATION, SMALL_COLLECTIVES
from tracekit.replay.graph.causes.device_time import MICRO_BATCH_REDUCTIONS, SMALL_OPS
from tracekit.replay.graph.causes.host import LATE_LAUNCH
from tracekit.replay.graph.pipeline_changes import PipelineChange
from tracekit.replay.graph.strategies import Prediction
from tracekit.tune.changes.change import Change, Risk, TunedRun, unknown_memory

_INTERLEAVED, _INTERLEAVED_STAGES = "interleaved", 2
"""Stages that each rank has under that schedule, each of one layer or more."""
_SCHEDULES = (_INTERLEAVED, "zb-h1")
"""Schedules with smaller bubbles than 1F1B whose stages stay where they are. zbv and dualpipev move layers."""


def _is_pipeline(run: TunedRun) -> bool:
    return run.number("pp", 1) > 1


def _fewer(run: TunedRun) -> Sequence[str]:
    """Halved micro-batches with twice the sequences, as MICRO/BATCH; none in a pipeline, whose bubble would grow."""
    micro_batches, batch = run.number("micro_batches", 1), run.number("batch", 0)
    if micro_batches % 2 or not batch or _is_pipeline(run):
        return ()
    return tuple(dict.fromkeys((f"1/{micro_batches * batch}", f"{micro_batches // 2}/{2 * batch}")))


def _more(run: TunedRun) -> Sequence[str]:
    """Twice the micro-batches with half the sequences, in a pipeline."""
    micro_batches, batch = run.number("micro_batches", 1), run.number("batch", 0)
    return (f"{2 * micro_batches}/{batch // 2}",) if _is_pipeline(run) and batch and batch % 2 == 0 else ()


def _schedules(run: TunedRun) -> Sequence[str]:
    is_default = run.options.get("schedule") in ("1f1b", "gpipe") and not run.number("checkpoint_layers", 0)
    if not _is_pipeline(run) or not is_default:
        return ()
    layers, stages = run.manifest.model.layers, _INTERLEAVED_STAGES * run.number("pp", 1)
    return tuple(name for name in _SCHEDULES if name != _INTERLEAVED or layers is None or layers >= stages)


def _predicted_micro_batches(run: TunedRun, value: str) -> Prediction:
    return pipeline_changes.predict(run.run, PipelineChange(micro_batches=int(value.partition("/")[0])))


def _predicted_schedule(run: TunedRun, value: str) -> Prediction:
    return pipeline_changes.predict(run.run, PipelineChange(schedule=value))


FEWER_MICRO_BATCHES = Change(
    name="fewer-micro-batches",
    summary="a step has fewer, larger micro-batches with the same tokens",
    risk=Risk.ROUNDING,
    # FSDP gathers weights and reduces gradients for each micro-batch.
    causes=(MICRO_BATCH_REDUCTIONS, COMMUNICATION, LATE_LAUNCH, SMALL_OPS, SMALL_COLLECTIVES),
    codes=("COMM003",),
    is_partial=True,
    # Ops on few rows take as long as on more: eight micro-batches as one saved 63 and 70% of a step on two CPU ranks,
    # although exposed communication took 15 and 5% of it.
    saves_beyond_causes=True,
    values=_fewer,
    option="--micro-batches {first} --batch {second}",
    added_bytes=unknown_memory,
)
MORE_MICRO_BATCHES = Change(
    name="more-micro-batches",
    summary="a pipeline has more, smaller micro-batches with the same tokens, so that its bubble is smaller",
    risk=Risk.ROUNDING,
    codes=("PIPE001",),
    values=_more,
    option="--micro-batches {first} --batch {second}",
    predict=_predicted_micro_batches,
)
PIPELINE_SCHEDULE = Change(
    name="pipeline-schedule",
    summary="the pipeline's actions run in an order with a smaller bubble",
    risk=Risk.ROUNDING,
    codes=("PIPE001",),
    values=_schedules,
    option="--schedule {value}",
    predict=_predicted_schedule,
    added_bytes=unknown_memory,
)
