"""Pipelines: bubbles and traffic: arXiv 2104.04473 (plain, interleaved), 2401.10241 (zero-bubble)."""

from dataclasses import dataclass

from tracekit.errors import ConfigError

PLAIN, INTERLEAVED, ZB_H1, ZB_H2 = SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-h2")
ELEMENT_BYTES = 2


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
    """Return the costs of a schedule of `stages` and `micro_batches`. Raises ConfigError for invalid input."""
    if schedule not in SCHEDULES:
        raise ConfigError(f"schedule {schedule!r} does not exist: {', '.join(SCHEDULES)}")
    if chunks > 1 and schedule in (ZB_H1, ZB_H2):
        raise ConfigError(f"{schedule} has one chunk per rank; only interleaved schedules have {chunks}")
    idle = bubble_to_ideal_ratio(stages, micro_batches, chunks=chunks, schedule=schedule)
    traffic = {} if sizes is None else _traffic(sizes, stages, micro_batches, chunks)
    return PipelinePlan(idle, idle / (1 + idle), activation_ratio(stages, chunks, schedule), **traffic)


def bubble_to_ideal_ratio(stages: int, micro_batches: int, *, chunks: int = 1, schedule: str = PLAIN) -> float:
    """Return the idle time relative to the ideal time: (p − 1) / (v m) with v model chunks per rank.

    A third of it with ZB-H1, if forward, backward and weights take equally long; none with ZB-H2, at twice the
    activations. Raises ConfigError where stages, micro-batches or chunks are below 1.

    >>> bubble_to_ideal_ratio(4, 8)
    0.375
    """
    if min(stages, micro_batches, chunks) < 1:
        raise ConfigError("stages, micro-batches and chunks must be 1 or more")
    plain = (stages - 1) / (chunks * micro_batches)
    return {ZB_H1: plain / 3, ZB_H2: 0.0}.get(schedule, plain)


def activation_ratio(stages: int, chunks: int, schedule: str) -> float:
    """Return the first stage's activations relative to 1F1B: 1 + (p − 1)/(p v) interleaved, 2 by ZB-H2.

    Sources: arXiv 2205.05198, section 4.2.3; 2401.10241, section 2.2.
    """
    if schedule == ZB_H2:
        return 2.0
    return 1 + (stages - 1) / (stages * chunks) if chunks > 1 else 1.0


def _traffic(sizes: Sizes, stages: int, micro_batches: int, chunks: int) -> dict[str, float | None]:
    """Return the fields of a plan that need sizes.

    Between stages a micro-batch is b s h numbers, b s h / t with scatter-gather. For tensor parallelism a rank sends
    8 b s h (t − 1)/t per layer and micro-batch, forward and backward. With b = 1, s = 2048, h = 25600, t = 8 in fp16
    that is 734 MB per layer; between stages 105 MB, with scatter-gather 13.1 MB.
    """
    hidden_bytes = ELEMENT_BYTES * sizes.batch * sizes.sequence * sizes.width
    stage = hidden_bytes / (sizes.tp if sizes.scatter_gather else 1) if stages > 1 else 0.0
    layer = 8 * hidden_bytes * (sizes.tp - 1) / sizes.tp
    return {
        "stage_bytes_per_micro_batch": stage,
        "stage_bytes_per_step": 2 * stage * micro_batches * chunks,
        "tensor_parallel_bytes_per_micro_batch": layer,
        "tensor_parallel_bytes_per_step": None
        if sizes.layers is None
        else layer * (sizes.layers / stages) * micro_batches,
    }
