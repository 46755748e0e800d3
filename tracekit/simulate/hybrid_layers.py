"""What one rank of a tensor-parallel layer runs: its share of the kernels, and the collectives between them.

Column-parallel products (queries, keys, values; up) follow a full input, row-parallel ones (out; down) give partial
sums: so a layer has two all-reduces forward and two backward, of batch × sequence × width elements each, or with
sequence parallelism an all-gather and a reduce-scatter in the place of each (arXiv 1909.08053, 2205.05198).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from tracekit.conventions import strategies
from tracekit.conventions.strategies import (
    AFTER_OPTIMIZER,
    ALL_GATHER,
    ALL_REDUCE,
    BACKWARD,
    BROADCAST,
    EP,
    GATHERED_BYTES,
    GRADIENTS,
    OPTIMIZER,
    REDUCE_SCATTER,
    REDUCED_BYTES,
    STRATEGIES,
    TP,
)
from tracekit.simulate import kernels, program
from tracekit.simulate.job import EXPERT_DATA, Job
from tracekit.simulate.kernels import Op, Parts
from tracekit.simulate.program import GATHER_STREAM, MAIN_STREAM, Kernel

ALL_TO_ALL = "all_to_all"
_CONCENTRATION = 400.0  # of the Dirichlet distribution of shares: a balanced router differs by about 5%


class Message(NamedTuple):
    """A collective on an axis in the midst of a layer; `splits` are tokens per peer, sent and received."""

    axis: str
    op: str
    elements: int
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    slowest: int = 0
    """Elements that the busiest rank of an all-to-all sends or receives."""


class WeightGradient(NamedTuple):
    """A product that gives a weight's gradient: zero-bubble schedules postpone it."""

    op: Op


Item: TypeAlias = Op | Message | WeightGradient


class Routing(NamedTuple):
    """Where one layer's tokens go in a micro-batch, seen by a rank: tokens sent to and received from each peer."""

    sent: tuple[int, ...]
    received: tuple[int, ...]
    slowest: int

    @property
    def tokens(self) -> int:
        """Return the tokens that the rank's experts work on."""
        return sum(self.received)


@dataclass(frozen=True)
class Layers:
    """Writes the layers of a job's ranks down; all ranks run the same kernels."""

    job: Job
    parts: Parts

    @property
    def _ranks(self) -> int:
        return self.job.mesh.layout.tp

    @property
    def _scatters(self) -> bool:
        return self.job.mesh.sequence_parallel

    def forward(self, routing: Routing | None = None) -> Iterator[Item]:
        """Yield a layer's forward pass."""
        (qkv, out), width = self.job.model.attention_parameters, self.job.model.width
        yield self._norm(0.25, "rms_norm_kernel", "")
        yield from self._enter()
        yield self._product(qkv, width, "")
        yield self._attention("fwd", self.parts.attention_s, "")
        yield self._product(out, width, "")
        yield from self._leave()
        yield self._norm(0.35, "rms_norm_kernel", "")
        yield from self._enter()
        yield from self._feed_forward() if routing is None else self._experts(routing)
        yield from self._leave()

    def backward(self, routing: Routing | None = None) -> Iterator[Item]:
        """Yield a layer's backward pass: as forward in reverse, two products for one."""
        (qkv, out), width = self.job.model.attention_parameters, self.job.model.width
        yield from self._enter()
        yield from self._feed_forward_backward() if routing is None else self._experts_backward(routing)
        yield from self._leave()
        yield self._norm(0.6, "back", "FusedRmsNormBackward0")
        yield from self._enter()
        yield from self._gradients(out, width)
        yield self._attention("bwd", self.parts.attention_backward_s, "FlashAttentionBackward0")
        yield from self._gradients(qkv, width)
        yield from self._leave()
        yield self._norm(0.6, "back", "FusedRmsNormBackward0")

    def head(self, *, backward: bool) -> Iterator[Item]:
        """Yield the pass of head and loss, whose vocabulary is divided among the ranks."""
        listed = kernels.head(self.job, self.parts, backward=backward)
        for index, op in enumerate(listed):
            kernel = op.kernel._replace(work_ns=max(1_000, op.kernel.work_ns // self._ranks))
            own_op = op._replace(kernel=kernel)
            yield WeightGradient(own_op) if backward and index == len(listed) - 1 else own_op
            if backward and index == len(listed) - 2:
                yield from self._leave()
        if not backward and self._ranks > 1:
            yield Message(TP, ALL_REDUCE, self.job.tokens)

    def embedding(self, *, backward: bool) -> Iterator[Item]:
        """Yield the look-up of the tokens, each on the rank that has its row, or the sum of their gradients."""
        op = kernels.embedding(self.job, backward=backward)
        if backward:
            yield from self._enter()
            yield WeightGradient(op)
        else:
            yield op
            yield from self._leave()

    # Parts -----------------------------------------------------------------------------------------------------------
    def _enter(self) -> Iterator[Item]:
        """Yield what makes a sequence-parallel input whole."""
        if self._scatters:
            yield self._message(ALL_GATHER)

    def _leave(self) -> Iterator[Item]:
        """Yield what adds the ranks' partial sums up."""
        if self._ranks > 1:
            yield self._message(REDUCE_SCATTER if self._scatters else ALL_REDUCE)

    def _message(self, op: str) -> Message:
        return Message(TP, op, self.job.tokens * self.job.model.width)

    def _feed_forward(self) -> Iterator[Item]:
        up, down = self.job.model.feed_forward_parameters
        yield self._product(up, self.job.model.width, "")
        yield self._gate(0.4, "SiluMulFunctor<c10::BFloat16>", "")
        yield self._product(down, self.job.model.hidden_width, "")

    def _feed_forward_backward(self) -> Iterator[Item]:
        up, down = self.job.model.feed_forward_parameters
        yield from self._gradients(down, self.job.model.hidden_width)
        yield self._gate(0.8, "SiluMulBackwardFunctor<c10::BFloat16>", "MulBackward0")
        yield from self._gradients(up, self.job.model.width)

    def _experts(self, routing: Routing) -> Iterator[Item]:
        yield self._router()
        yield from self._exchange(routing, back=False)
        yield from self._expert_products(routing, "", "SiluMulFunctor<c10::BFloat16>")
        yield from self._exchange(routing, back=True)

    def _experts_backward(self, routing: Routing) -> Iterator[Item]:
        yield from self._exchange(routing, back=False)
        products = list(self._expert_products(routing, "MmBackward0", "SiluMulBackwardFunctor<c10::BFloat16>"))
        for op in reversed(products):
            yield op
            if op.name == "aten::_grouped_mm":
                yield WeightGradient(op)
        yield from self._exchange(routing, back=True)
        yield self._router("MmBackward0")

    def _expert_products(self, routing: Routing, node: str, gate: str) -> Iterator[Op]:
        """Yield the experts' products, as long as the tokens that the rank received."""
        experts = self.job.model.experts
        assert experts is not None
        width, wide = self.job.model.width, experts.width
        each_s = 2 * width * wide * routing.tokens / self.job.hardware.flops_per_s / self._ranks
        per_token = self.parts.elementwise_s / self.job.tokens * 0.4 / self._ranks
        rows = max(1, routing.tokens)
        product = kernels.compute(_GROUPED, 2 * each_s, blocks=64)
        yield Op("aten::_grouped_mm", node, product, ((rows, width), (width, 2 * wide // self._ranks)))
        silu = kernels.compute(kernels.ELEMENTWISE.format(gate), per_token * routing.tokens, blocks=4096)
        yield Op("aten::mul", node and "MulBackward0", silu, ((rows, wide // self._ranks),) * 2)
        product = kernels.compute(_GROUPED, each_s, blocks=64)
        yield Op("aten::_grouped_mm", node, product, ((rows, wide // self._ranks), (wide // self._ranks, width)))

    def _router(self, node: str = "") -> Op:
        experts, tokens, width = self.job.model.experts, self.job.tokens, self.job.model.width
        assert experts is not None
        seconds = 2 * width * experts.count * tokens / self.job.hardware.flops_per_s
        kernel = kernels.compute(self.job.hardware.gemm_name, seconds, blocks=16)
        return Op("aten::mm", node, kernel, ((tokens, width), (width, experts.count)))

    def _exchange(self, routing: Routing, *, back: bool) -> Iterator[Message]:
        if len(routing.sent) == 1:  # the rank has all experts
            return
        width = self.job.model.width
        splits = (routing.received, routing.sent) if back else (routing.sent, routing.received)
        yield Message(EP, ALL_TO_ALL, sum(splits[0]) * width, splits, routing.slowest * width)

    def _norm(self, ratio: float, kernel: str, node: str) -> Op:
        ranks = self._ranks if self._scatters else 1
        seconds = self.parts.elementwise_s * ratio / ranks
        name = "aten::_fused_rms_norm" + ("_backward" if node else "")
        inputs = ((self.job.tokens // ranks, self.job.model.width),)
        return Op(name, node, kernels.compute(kernels.NORM.format(kernel), seconds, blocks=4096), inputs)

    def _gate(self, ratio: float, kernel: str, node: str) -> Op:
        seconds = self.parts.elementwise_s * ratio / self._ranks
        inputs = ((self.job.tokens, self.job.model.hidden_width // self._ranks),) * 2
        return Op("aten::mul", node, kernels.compute(kernels.ELEMENTWISE.format(kernel), seconds, blocks=4096), inputs)

    def _attention(self, direction: str, seconds: float, node: str) -> Op:
        blocks = max(1, self.job.tokens // 128) * self.job.model.heads // self._ranks
        kernel = kernels.compute(kernels.FLASH.format(direction), seconds / self._ranks, blocks=blocks)
        name = f"aten::_flash_attention_{'backward' if node else 'forward'}"
        return Op(name, node, kernel, ((self.job.tokens, self.job.model.width // self._ranks),) * 3)

    def _gradients(self, parameters: int, narrow: int) -> Iterator[Item]:
        product = self._product(parameters, narrow, "MmBackward0")
        yield product
        yield WeightGradient(product)

    def _product(self, parameters: int, narrow: int, node: str) -> Op:
        """Return the rank's share of the product by a weight of `narrow` rows."""
        seconds = 2 * parameters * self.job.tokens / self.job.hardware.flops_per_s / self._ranks
        wide = max(1, parameters // narrow // self._ranks)
        rows, columns = kernels.GEMM_TILE
        blocks = -(-self.job.tokens // rows) * -(-wide // columns)
        kernel = kernels.compute(self.job.hardware.gemm_name, seconds, blocks=blocks)
        return Op("aten::mm", node, kernel, ((self.job.tokens, narrow), (narrow, wide)))


_GROUPED = "void cutlass::device_kernel<at::cuda::detail::grouped_mm_kernel<cutlass::bfloat16_t> >(int)"

ROOT, HEAD = "root", "head"
"""The parts of the first and of the last stage that are no layers."""
Part: TypeAlias = int | str


class GatheredWeights:
    """Gathers a rank's weights where its job shards them (fully_shard); else it does nothing."""

    def __init__(self, job: Job, host: program.Host, issue: Callable[[Kernel], None]) -> None:
        self._job, self._host, self._issue = job, host, issue
        self._gathered: dict[tuple[int, Part], int] = {}

    @property
    def are_gathered_once(self) -> bool:
        """Whether weights are gathered once per step: reshard_after_forward=False."""
        return self._job.gathers_weights and not self._job.impairments.gathers_every_micro_batch

    def gather(self, position: str, stage: int, part: Part) -> None:
        """Gather a part's weights once the main stream has done what it was given so far."""
        layer = part if isinstance(part, int) else None
        self._host.begin(f"{position} gather {stage} {part}")
        with self._host.span(f"FSDP::all_gather ({part if layer is None else f'layers.{layer}'})"):
            if not self.are_gathered_once:
                size_bytes = gathered_bytes(self._job, layer)
                self._host.add(program.Allocate(_buffer(stage, part), size_bytes))
            self._host.follow(GATHER_STREAM, MAIN_STREAM)
            for kernel in gathers(self._job, layer):
                self._issue(kernel)
        self._gathered[stage, part] = self._host.record(GATHER_STREAM)

    def enter(self, position: str, stage: int, part: Part, following: Part | None) -> None:
        """Let the main stream wait for a part's weights; unless all are gathered once, gather the next part's too."""
        if not self._job.gathers_weights:
            return
        if not self.are_gathered_once and (stage, part) not in self._gathered:
            self.gather(position, stage, part)
        if (event := self._gathered.pop((stage, part), None)) is not None:
            self._host.wait(MAIN_STREAM, event)
        if not self.are_gathered_once and following is not None:
            self.gather(position, stage, following)

    def leave(self, stage: int, part: Part) -> None:
        """Free a part's weights, unless they are gathered once per step."""
        if self._job.gathers_weights and not self.are_gathered_once:
            self._host.add(program.Free(_buffer(stage, part)))


def layer_parameters(job: Job) -> tuple[int, int]:
    """Return the weights of a layer on one rank: those that all ranks of data parallelism share, and its experts'."""
    model, hybrid = job.model, job.mesh
    attention = sum(model.attention_parameters) // hybrid.layout.tp
    if model.experts is None:
        return attention + sum(model.feed_forward_parameters) // hybrid.layout.tp, 0
    rank_experts = model.experts.count // hybrid.layout.ep
    return attention + model.width * model.experts.count, rank_experts * model.expert_parameters // hybrid.layout.tp


def transferred_elements(job: Job) -> int:
    """Return the elements of one micro-batch that a stage sends to the next one on each rank: bsh, or its share of it.

    With sequence parallelism each rank has, and sends, its part of the sequence.
    """
    return job.tokens * job.model.width // (job.mesh.layout.tp if job.mesh.sequence_parallel else 1)


def parts_of(job: Job) -> Parts:
    """Return the compute of one micro-batch on an undivided layer."""
    return kernels.parts(
        job.model, kernels.rates(job.hardware, spans_nodes=False), batch=job.batch, seq=job.seq, shards=1
    )


def reduces(job: Job) -> bool:
    """Whether gradients are reduced: data parallelism has more than one rank."""
    return job.mesh.data_ranks > 1


def reduces_each_micro_batch(job: Job) -> bool:
    """Whether gradients are reduced in each micro-batch: under ZeRO-2, which stores none whole, or by a fault.

    FSDP2 shards them too, but accumulates whole ones with `set_requires_gradient_sync(False)`, as pipelines do.
    """
    strategy = STRATEGIES[job.strategy]
    return job.impairments.reduces_every_micro_batch or (
        GRADIENTS in strategy.sharded and not strategy.shards_parameters
    )


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
    rates = kernels.rates(job.hardware, spans_nodes=False, overhead_s=job.step_overhead_ns / 1e9)
    seconds = rates.overhead_s + kernels.OPTIMIZER_BYTES * parameters(job, rank) / ranks / rates.memory_bytes_per_s
    return kernels.optimizer(seconds)


def after_optimizer(job: Job, rank: int) -> list[Kernel]:
    """Return the kernels that hand on the stepped weights: ranks gather each layer, or each broadcasts its part."""
    ops = {collective.op for collective in STRATEGIES[job.strategy].collectives if collective.when == AFTER_OPTIMIZER}
    ranks, total = job.mesh.data_ranks, parameters(job, rank)
    if ranks == 1 or not ops:
        return []
    if ALL_GATHER in ops:
        return [kernel for layer in _layers_of_rank(job, rank) for kernel in gathers(job, layer)]
    part = kernels.collective(
        BROADCAST, job.mesh.data_axis, program.REDUCE_STREAM, elements=total // ranks, ranks=ranks, dtype="BFloat16"
    )
    return [part] * ranks


def parameters(job: Job, rank: int) -> int:
    """Return the weights of a rank's stages on it."""
    layers = _layers_of_rank(job, rank)
    roots = layers.count(None)
    return (len(layers) - roots) * sum(layer_parameters(job)) + roots * _root_parameters(job)[0]


def _layers_of_rank(job: Job, rank: int) -> list[int | None]:
    """Layers of a rank's stages; None for the embedding and for the head."""
    stages = job.mesh.stages_of(rank)
    roots = [None] * [0 in stages, job.mesh.stages - 1 in stages].count(True)
    return [*(layer for stage in stages for layer in job.mesh.layers_of(stage)), *roots]


def state_bytes(job: Job, rank: int) -> int:
    """Return the bytes of weights, gradients and optimizer state that a rank keeps."""
    count, ranks = parameters(job, rank), job.mesh.data_ranks
    if job.gathers_weights:
        weights = 0 if job.impairments.gathers_every_micro_batch else GATHERED_BYTES
        gradients = 0 if job.impairments.reduces_every_micro_batch else REDUCED_BYTES
        size = strategies.FP32_SHARDS_ADAM
        return count * (weights + gradients) + count * (size.parameters + size.gradients + size.optimizer) // ranks
    size = strategies.MIXED_ADAM
    strategy = STRATEGIES[job.strategy]
    gradient_bytes = strategy.per_rank(GRADIENTS, count * REDUCED_BYTES, ranks)
    optimizer_bytes = strategy.per_rank(OPTIMIZER, count * size.optimizer, ranks)
    return count * size.parameters + math.floor(gradient_bytes) + math.floor(optimizer_bytes)


class Router:
    """Draws how many tokens of each rank go to each expert, by step, micro-batch and layer."""

    def __init__(self, job: Job) -> None:
        self._job = job
        groups = job.mesh.layout.groups(EP) if job.model.experts else []
        self._place = {rank: (number, index) for number, ranks in enumerate(groups) for index, rank in enumerate(ranks)}
        self._routes = lru_cache(maxsize=None)(self._drawn)

    def routing(self, step: int, micro_batch: int, layer: int, rank: int) -> Routing | None:
        """Return the destinations of a rank's tokens, and what its experts receive; None without experts."""
        if self._job.model.experts is None:
            return None
        group, index = self._place[rank]
        tokens = self._routes(step, micro_batch, layer, group)
        sent, received = tokens[index], tokens[:, index]
        slowest = max(int(tokens.sum(axis=axis).max()) for axis in (0, 1))
        return Routing(tuple(map(int, sent)), tuple(map(int, received)), slowest)

    def _drawn(self, step: int, micro_batch: int, layer: int, group: int) -> npt.NDArray[np.int64]:
        """Return the tokens that each rank of a group sends to each other one, shape (ep, ep)."""
        experts, hybrid = self._job.model.experts, self._job.mesh
        assert experts is not None
        random = np.random.default_rng((self._job.seed, step, micro_batch, layer, group))
        weights = np.full(experts.count, _CONCENTRATION)
        if self._job.impairments.hot_expert is not None:
            expert, factor = self._job.impairments.hot_expert
            weights[expert] *= factor
        shares = random.dirichlet(weights)
        counts = random.multinomial(self._job.tokens * experts.active, shares, size=hybrid.layout.ep)
        per_rank: npt.NDArray[np.int64] = counts.reshape(hybrid.layout.ep, hybrid.layout.ep, -1).sum(axis=2)
        return per_rank


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
