"""Memory of one rank of a hybrid job: its stages' training state, and activations of the micro-batches in flight."""

from tracekit.conventions import pipeline_schedules
from tracekit.conventions.pipeline_schedules import FORWARD, INPUT_GRADIENT
from tracekit.conventions.strategies import PP
from tracekit.simulate import hybrid_reduction
from tracekit.simulate.job import Job

_LOGIT_BYTES = 6
# Per token and unit of width of a stored layer, as in `memory`: what tensor parallelism divides only with sequence
# parallelism is 10 of 34 parts (arXiv 2205.05198).
_STORED_BYTES, _UNDIVIDED = 40.5, 10 / 34


def activation_bytes(job: Job, stage: int) -> int:
    """Return the bytes of one micro-batch's activations of a stage on a rank."""
    assert job.hybrid is not None
    ranks = job.hybrid.layout.tp
    undivided = 0 if job.hybrid.sequence_parallel else _UNDIVIDED
    share = undivided + (1 - undivided) / ranks
    layers = round(_STORED_BYTES * share * job.tokens * job.model.width * job.hybrid.stage_layers[stage])
    is_last = stage == job.hybrid.stages - 1
    return layers + (_LOGIT_BYTES * job.model.vocabulary * job.tokens // ranks if is_last else 0)


def peak_activation_bytes(job: Job, rank: int) -> int:
    """Return the most that the activations of a rank's micro-batches in flight take."""
    assert job.hybrid is not None
    place = job.hybrid.layout.coordinate(rank)[PP]
    used_bytes = peak_bytes = 0
    for action in pipeline_schedules.order(job.hybrid.schedule, job.hybrid.shape(job.micro_batches), place):
        size = activation_bytes(job, action.stage)
        if action.kind == FORWARD:
            used_bytes += size
        elif action.kind != INPUT_GRADIENT:
            used_bytes -= size
        peak_bytes = max(peak_bytes, used_bytes)
    return peak_bytes


def static_bytes(job: Job, rank: int) -> int:
    """Return the bytes that a rank always uses."""
    return hybrid_reduction.state_bytes(job, rank)


def peak_bytes(job: Job, rank: int) -> int:
    """Return the most that a rank uses in a step."""
    return static_bytes(job, rank) + peak_activation_bytes(job, rank)


def fullest_rank(job: Job) -> int:
    """Return the rank that uses the most memory: one of each place on the pp axis is looked at."""
    assert job.hybrid is not None
    inner = job.gpus // job.hybrid.layout.pp
    return max(range(0, job.gpus, inner), key=lambda rank: peak_bytes(job, rank))
