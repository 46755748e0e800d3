"""Pipelines: bubbles and traffic: arXiv 2104.04473 (plain, interleaved), 2401.10241 (zero-bubble)."""

from dataclasses import dataclass

from tracekit.errors import ConfigError

PLAIN, INTERLEAVED, ZB_H1, ZB_H2 = SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-h2")
ELEMENT_BYTES = 2


@dataclass(frozen=True)
class Bubble:
    """Idle time of a pipeline, relative to the ideal time of a step, and as a share of the whole."""

    bubble_to_ideal_ratio: float
    bubble_ratio: float


@dataclass(frozen=True)
class PipelinePlan:
    """A schedule's bubble, what it holds, and what a micro-batch and a step send; None where sizes were not given.

    `activation_ratio`: activations of the first stage relative to those of 1F1B. `stage_bytes_per_micro_batch` goes
    over each link between stages, forward and again backward; `tensor_parallel_bytes_per_micro_batch` is what a rank
    sends for one layer; per step it is for all layers and micro-batches of a stage.
    """

    bubble_to_ideal_ratio: float
    bubble_ratio: float
    activation_ratio: float
    stage_bytes_per_micro_batch: float | None = None
    stage_bytes_per_step: float | None = None
    tensor_parallel_bytes_per_micro_batch: float | None = None
    tensor_parallel_bytes_per_step: float | None = None


@dataclass(frozen=True)
class Sizes:
    """What travels: micro-batches of `batch` sequences of `sequence` tokens, `width` numbers each, in 2 bytes."""

    batch: int
    sequence: int
    width: int
    layers: int | None = None
    tp: int = 1
    scatter_gather: bool = False
    """Whether each of the tensor-parallel ranks sends its part only, and the next stage gathers them."""

    def __post_init__(self) -> None:
        if min(self.batch, self.sequence, self.width, self.tp, self.layers or 1) < 1:
            raise ConfigError("batch, sequence, width, layers and tp must be 1 or more")


def plan(
    stages: int, micro_batches: int, *, chunks: int = 1, schedule: str = PLAIN, sizes: Sizes | None = None
) -> PipelinePlan:
    """Return what a schedule of `stages` and `micro_batches` costs. Raises ConfigError for invalid input."""
    if schedule not in SCHEDULES:
        raise ConfigError(f"schedule {schedule!r} does not exist: {', '.join(SCHEDULES)}")
    if chunks > 1 and schedule in (ZB_H1, ZB_H2):
        raise ConfigError(f"{schedule} has one chunk per rank; only interleaved schedules have {chunks}")
    stall = _BUBBLES.get(schedule, bubble)(stages, micro_batches, chunks=chunks)
    result = PipelinePlan(stall.bubble_to_ideal_ratio, stall.bubble_ratio, activation_ratio(stages, chunks, schedule))
    return result if sizes is None else _with_traffic(result, stages, micro_batches, chunks, sizes)


def bubble(stages: int, micro_batches: int, *, chunks: int = 1) -> Bubble:
    """Return the bubble (p − 1) / (v m) of `chunks` model chunks per rank; 1 is not interleaved.

    >>> bubble(4, 8).bubble_to_ideal_ratio, round(bubble(4, 8).bubble_ratio, 3)
    (0.375, 0.273)
    """
    if min(stages, micro_batches, chunks) < 1:
        raise ConfigError("stages, micro-batches and chunks must be 1 or more")
    return _bubble((stages - 1) / (chunks * micro_batches))


def zb_h1_bubble(stages: int, micro_batches: int, *, chunks: int = 1) -> Bubble:
    """Return the bubble (p − 1) / 3 m of the schedule ZB-H1, where forward, backward and weights take alike."""
    return _bubble(bubble(stages, micro_batches, chunks=chunks).bubble_to_ideal_ratio / 3)


def zb_h2_bubble(stages: int, micro_batches: int, *, chunks: int = 1) -> Bubble:
    """Return no bubble: ZB-H2 fills it, at twice the activations."""
    bubble(stages, micro_batches, chunks=chunks)  # validates
    return _bubble(0.0)


def activation_ratio(stages: int, chunks: int, schedule: str) -> float:
    """Return the first stage's activations relative to 1F1B: 1 + (p − 1)/(p v) interleaved, 2 by ZB-H2.

    Sources: arXiv 2205.05198, section 4.2.3; 2401.10241, section 2.2.
    """
    if schedule == ZB_H2:
        return 2.0
    return 1 + (stages - 1) / (stages * chunks) if chunks > 1 else 1.0


def stage_elements(*, batch: int, sequence: int, width: int, tp: int = 1, scatter_gather: bool = False) -> float:
    """Return the numbers that a micro-batch carries from stage to stage: b s h, or b s h / t with scatter-gather."""
    return batch * sequence * width / (tp if scatter_gather else 1)


def tensor_parallel_elements(*, batch: int, sequence: int, width: int, tp: int) -> float:
    """Return the numbers that a rank sends per layer and micro-batch: 8 b s h (t − 1)/t, forward and backward.

    b = 1, s = 2048, h = 25600, t = 8 in fp16: 734 MB; between stages 105 MB, by scatter-gather 13.1 MB.
    """
    return 8 * batch * sequence * width * (tp - 1) / tp


def _with_traffic(pipeline: PipelinePlan, stages: int, micro_batches: int, chunks: int, sizes: Sizes) -> PipelinePlan:
    shape = {"batch": sizes.batch, "sequence": sizes.sequence, "width": sizes.width, "tp": sizes.tp}
    stage = ELEMENT_BYTES * stage_elements(**shape, scatter_gather=sizes.scatter_gather) if stages > 1 else 0.0
    layer = ELEMENT_BYTES * tensor_parallel_elements(**shape)
    layers = None if sizes.layers is None else sizes.layers / stages
    return PipelinePlan(
        pipeline.bubble_to_ideal_ratio,
        pipeline.bubble_ratio,
        pipeline.activation_ratio,
        stage_bytes_per_micro_batch=stage,
        stage_bytes_per_step=2 * stage * micro_batches * chunks,
        tensor_parallel_bytes_per_micro_batch=layer,
        tensor_parallel_bytes_per_step=None if layers is None else layer * layers * micro_batches,
    )


_BUBBLES = {ZB_H1: zb_h1_bubble, ZB_H2: zb_h2_bubble}


def _bubble(to_ideal: float) -> Bubble:
    return Bubble(to_ideal, to_ideal / (1 + to_ideal))
