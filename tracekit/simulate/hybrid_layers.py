"""What one rank of a tensor-parallel layer runs: its share of the kernels, and the collectives between them.

Column-parallel products (queries, keys, values; up) follow a full input, row-parallel ones (out; down) give partial
sums: so a layer has two all-reduces forward and two backward, of batch × sequence × width elements each, or with
sequence parallelism an all-gather and a reduce-scatter in the place of each (arXiv 1909.08053, 2205.05198).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from tracekit.conventions.strategies import ALL_GATHER, ALL_REDUCE, EP, REDUCE_SCATTER, TP
from tracekit.simulate import costs, kernels
from tracekit.simulate.costs import Parts
from tracekit.simulate.job import Job
from tracekit.simulate.kernels import Op

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
    return costs.parts(job.model, costs.rates(job.hardware, spans_nodes=False), batch=job.batch, seq=job.seq, shards=1)


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
