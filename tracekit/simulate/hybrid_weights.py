"""Sharded weights of a hybrid job's stages: gathered once per step, or before each action that uses them."""

from collections.abc import Callable
from typing import TypeAlias

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
from tracekit.simulate.program import GATHER_STREAM, MAIN_STREAM, Kernel

ROOT, HEAD = "root", "head"
"""The parts of the first and of the last stage that are no layers."""
Part: TypeAlias = int | str


class GatheredWeights:
    """Gathers a rank's weights where its job shards them (fully_shard); else it does nothing."""

    def __init__(self, job: Job, host: program.Host, issue: Callable[[Kernel], None]) -> None:
        self._job, self._host, self._issue = job, host, issue
        self._gathered: dict[tuple[int, Part], int] = {}

    @property
    def are_kept(self) -> bool:
        """Return whether weights are gathered once per step: reshard_after_forward=False."""
        return self._job.gathers_weights and not self._job.impairments.gathers_every_micro_batch

    def gather(self, position: str, stage: int, part: Part) -> None:
        """Gather a part's weights once the main stream has done what it was given so far."""
        layer = part if isinstance(part, int) else None
        self._host.begin(f"{position} gather {stage} {part}")
        with self._host.span(f"FSDP::all_gather ({part if layer is None else f'layers.{layer}'})"):
            if not self.are_kept:
                size_bytes = gathered_bytes(self._job, layer)
                self._host.add(program.Allocate(_buffer(stage, part), size_bytes))
            self._host.follow(GATHER_STREAM, MAIN_STREAM)
            for kernel in gathers(self._job, layer):
                self._issue(kernel)
        self._gathered[stage, part] = self._host.record(GATHER_STREAM)

    def enter(self, position: str, stage: int, part: Part, following: Part | None) -> None:
        """Let the main stream wait for a part's weights; if none are kept, gather those of the following part too."""
        if not self._job.gathers_weights:
            return
        if not self.are_kept and (stage, part) not in self._gathered:
            self.gather(position, stage, part)
        if (event := self._gathered.pop((stage, part), None)) is not None:
            self._host.wait(MAIN_STREAM, event)
        if not self.are_kept and following is not None:
            self.gather(position, stage, following)

    def leave(self, stage: int, part: Part) -> None:
        """Free a part's weights, unless they are kept."""
        if self._job.gathers_weights and not self.are_kept:
            self._host.add(program.Free(_buffer(stage, part)))


def reduces(job: Job) -> bool:
    """Whether gradients are reduced: data parallelism has more than one rank."""
    return job.mesh.data_ranks > 1


def of_layer(job: Job, layer: int | None) -> list[Kernel]:
    """Return the reductions of a layer's gradients, its experts' among the ranks that share them; None: the root's."""
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


def optimizer(job: Job, rank: int) -> list[Op]:
    """Return the ops of the optimizer's step on what the rank keeps of its stages."""
    ranks = job.mesh.data_ranks if OPTIMIZER in STRATEGIES[job.strategy].sharded else 1
    rates = costs.rates(job.hardware, spans_nodes=False, overhead_s=job.step_overhead_ns / 1e9)
    seconds = rates.overhead_s + costs.OPTIMIZER_BYTES * parameters(job, rank) / ranks / rates.memory_bytes_per_s
    return kernels.optimizer(seconds)


def after_optimizer(job: Job, rank: int) -> list[Kernel]:
    """Return the kernels that hand on the stepped weights: under zero1 each rank broadcasts its part."""
    listed = STRATEGIES[job.strategy].collectives
    ranks, total = job.mesh.data_ranks, parameters(job, rank)
    if ranks == 1 or not any(c.when == AFTER_OPTIMIZER and c.op == BROADCAST for c in listed):
        return []
    part = kernels.collective(
        BROADCAST, job.mesh.data_axis, program.REDUCE_STREAM, elements=total // ranks, ranks=ranks, dtype="BFloat16"
    )
    return [part] * ranks


def parameters(job: Job, rank: int) -> int:
    """Return the weights of a rank's stages on it."""
    stages = job.mesh.stages_of(rank)
    layers = sum(job.mesh.stage_layers[stage] for stage in stages)
    roots = [0 in stages, job.mesh.stages - 1 in stages].count(True)
    return layers * sum(layer_parameters(job)) + roots * _root_parameters(job)[0]


def state_bytes(job: Job, rank: int) -> int:
    """Return the bytes of weights, gradients and optimizer state that a rank keeps."""
    count, ranks = parameters(job, rank), job.mesh.data_ranks
    if job.gathers_weights:
        weights = 0 if job.impairments.gathers_every_micro_batch else GATHERED_BYTES
        gradients = 0 if job.impairments.reduces_every_micro_batch else REDUCED_BYTES
        size = strategies.FP32_SHARDS_ADAM
        return count * (weights + gradients) + count * (size.parameters + size.gradients + size.optimizer) // ranks
    size = strategies.MIXED_ADAM
    shared = ranks if OPTIMIZER in STRATEGIES[job.strategy].sharded else 1
    return count * (size.parameters + 2 * GATHERED_BYTES) + count * size.optimizer // shared


def _buffer(stage: int, part: Part) -> str:
    return f"weights {stage} {part}"


def _shared_weights(job: Job, layer: int | None) -> list[tuple[str, int, int]]:
    """Return the axis, number and ranks of the weights of a layer that several ranks hold."""
    dense, experts = _root_parameters(job) if layer is None else layer_parameters(job)
    groups = [(job.mesh.data_axis, dense, job.mesh.data_ranks)]
    sharing = job.mesh.data_ranks // job.mesh.layout.ep
    if experts and sharing > 1:
        groups.append((EXPERT_DATA if job.mesh.layout.ep > 1 else job.mesh.data_axis, experts, sharing))
    return groups


def _root_parameters(job: Job) -> tuple[int, int]:
    """Return the weights of embedding or head on one rank."""
    return job.model.outer_parameters // job.mesh.layout.tp, 0
