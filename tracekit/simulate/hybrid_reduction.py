"""What data parallelism adds to a hybrid job: gathered weights, the reduction of gradients, and the optimizer."""

from tracekit.conventions import strategies
from tracekit.conventions.strategies import (
    AFTER_OPTIMIZER,
    ALL_GATHER,
    BACKWARD,
    BROADCAST,
    GATHERED_BYTES,
    GRADIENTS,
    OPTIMIZER,
    REDUCED_BYTES,
    STRATEGIES,
)
from tracekit.simulate import costs, kernels, program
from tracekit.simulate.hybrid import EXPERT_DATA
from tracekit.simulate.hybrid_layers import layer_parameters
from tracekit.simulate.job import Job
from tracekit.simulate.kernels import Op
from tracekit.simulate.program import Kernel

_OPS = 8
_OPTIMIZER_NAME = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4> >(int)"
)


def reduces(job: Job) -> bool:
    """Whether gradients are reduced: data parallelism has more than one rank."""
    assert job.hybrid is not None
    return job.hybrid.data_ranks > 1


def of_layer(job: Job, layer: int | None) -> list[Kernel]:
    """Return the reductions of a layer's gradients, its experts' among the ranks that share them; None: the root's."""
    assert job.hybrid is not None
    ops = [c.op for c in STRATEGIES[job.strategy].collectives if c.when == BACKWARD and c.tensor == GRADIENTS]
    return [
        kernels.collective(op, axis, program.REDUCE_STREAM, elements=max(1, count), ranks=ranks, dtype="Float")
        for axis, count, ranks in _shared_weights(job, layer)
        for op in ops
    ]


def gathers(job: Job, layer: int | None) -> list[Kernel]:
    """Return the collectives that make a layer's weights whole where they are sharded; None: the root's."""
    return [
        kernels.collective(
            ALL_GATHER, axis, program.GATHER_STREAM, elements=max(1, count), ranks=ranks, dtype="BFloat16"
        )
        for axis, count, ranks in _shared_weights(job, layer)
    ]


def gathered_bytes(job: Job, layer: int | None) -> int:
    """Return the bytes of a layer's gathered weights; None: the root's."""
    return GATHERED_BYTES * sum(count for _, count, _ in _shared_weights(job, layer))


def _shared_weights(job: Job, layer: int | None) -> list[tuple[str, int, int]]:
    """Return the axis, number and ranks of the weights of a layer that several ranks hold."""
    assert job.hybrid is not None
    dense, experts = _root_parameters(job) if layer is None else layer_parameters(job)
    groups = [(job.hybrid.data_axis, dense, job.hybrid.data_ranks)]
    sharing = job.hybrid.data_ranks // job.hybrid.layout.ep
    if experts and sharing > 1:
        groups.append((EXPERT_DATA if job.hybrid.layout.ep > 1 else job.hybrid.data_axis, experts, sharing))
    return groups


def optimizer(job: Job, rank: int) -> list[Op]:
    """Return the ops of the optimizer's step on what the rank keeps of its stages."""
    assert job.hybrid is not None
    ranks = job.hybrid.data_ranks if OPTIMIZER in STRATEGIES[job.strategy].sharded else 1
    rates = costs.rates(job.hardware, spans_nodes=False, overhead_s=job.step_overhead_ns / 1e9)
    seconds = rates.overhead_s + costs.OPTIMIZER_BYTES * parameters(job, rank) / ranks / rates.memory_bytes_per_s
    kernel = kernels.compute(_OPTIMIZER_NAME, seconds / _OPS, blocks=640)
    return [Op("aten::_fused_adamw_", "", kernel)] * _OPS


def after_optimizer(job: Job, rank: int) -> list[Kernel]:
    """Return the kernels that hand on the stepped weights: under zero1 each rank broadcasts its part."""
    assert job.hybrid is not None
    listed = STRATEGIES[job.strategy].collectives
    ranks, total = job.hybrid.data_ranks, parameters(job, rank)
    if ranks == 1 or not any(c.when == AFTER_OPTIMIZER and c.op == BROADCAST for c in listed):
        return []
    part = kernels.collective(
        BROADCAST, job.hybrid.data_axis, program.REDUCE_STREAM, elements=total // ranks, ranks=ranks, dtype="BFloat16"
    )
    return [part] * ranks


def parameters(job: Job, rank: int) -> int:
    """Return the weights of a rank's stages on it."""
    assert job.hybrid is not None
    stages = job.hybrid.stages_of(rank)
    layers = sum(job.hybrid.stage_layers[stage] for stage in stages)
    roots = [0 in stages, job.hybrid.stages - 1 in stages].count(True)
    return layers * sum(layer_parameters(job)) + roots * _root_parameters(job)[0]


def state_bytes(job: Job, rank: int) -> int:
    """Return the bytes of weights, gradients and optimizer state that a rank keeps."""
    assert job.hybrid is not None
    count, ranks = parameters(job, rank), job.hybrid.data_ranks
    if job.gathers_weights:
        weights = 0 if job.impairments.gathers_every_micro_batch else GATHERED_BYTES
        gradients = 0 if job.impairments.reduces_every_micro_batch else REDUCED_BYTES
        size = strategies.FP32_SHARDS_ADAM
        return count * (weights + gradients) + count * (size.parameters + size.gradients + size.optimizer) // ranks
    size = strategies.MIXED_ADAM
    shared = ranks if OPTIMIZER in STRATEGIES[job.strategy].sharded else 1
    return count * (size.parameters + 2 * GATHERED_BYTES) + count * size.optimizer // shared


def _root_parameters(job: Job) -> tuple[int, int]:
    """Return the weights of embedding or head on one rank."""
    assert job.hybrid is not None
    return job.model.outer_parameters // job.hybrid.layout.tp, 0
