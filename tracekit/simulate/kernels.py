"""The kernels of a layer: how the time of its parts goes to ops, with names as a profiler shows them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from tracekit.conventions.strategies import ALL_GATHER, GATHERED_BYTES, REDUCED_BYTES, ring_hops
from tracekit.plan.hardware import Hardware
from tracekit.plan.models import Model
from tracekit.simulate.job import Job
from tracekit.simulate.program import COMMUNICATION, COMPUTE, MAIN_STREAM, Collective, Kernel

Quantity: TypeAlias = Any
"""A float, or an array of floats."""

CAST_BYTES = GATHERED_BYTES + REDUCED_BYTES
DIVIDE_BYTES = 2 * REDUCED_BYTES
COPY_BYTES = 2 * GATHERED_BYTES
OPTIMIZER_BYTES = 60  # per parameter: clip, then Adam on an fp32 weight and two moments, and a 16-bit weight written
_LOSS_BYTES = 14  # per logit: softmax and cross-entropy, and the same backward
_ATTENTION_BACKWARD = 2.5  # times forward: flash attention recomputes its products
_INDEXABLE_BYTES = 1 << 31


@dataclass(frozen=True)
class Rates:
    """What a machine does in a second; each a number or an array."""

    flops_per_s: Quantity
    memory_bytes_per_s: Quantity
    elementwise_bytes: Quantity
    bus_bytes_per_s: Quantity
    hop_s: Quantity
    overhead_s: Quantity
    give_way: Quantity
    give_way_high_priority: Quantity


@dataclass(frozen=True)
class Parts:
    """Device time of the compute of one micro-batch's step, in seconds."""

    matrices_s: Quantity
    """Matrix products of a layer's forward pass; backward takes twice as long."""
    attention_s: Quantity
    elementwise_s: Quantity
    head_s: Quantity
    """Matrix product of the head's forward pass."""
    loss_s: Quantity
    optimizer_s: Quantity

    @property
    def layer_forward_s(self) -> Quantity:
        """Return the forward pass of one layer."""
        return self.matrices_s + self.attention_s + self.elementwise_s

    @property
    def layer_backward_s(self) -> Quantity:
        """Return the backward pass of one layer, recomputation left out."""
        return 2 * self.matrices_s + self.attention_backward_s + 2 * self.elementwise_s

    @property
    def attention_backward_s(self) -> Quantity:
        """Return attention's part in the backward pass of one layer."""
        return _ATTENTION_BACKWARD * self.attention_s

    @property
    def head_forward_s(self) -> Quantity:
        """Return head and loss, forward."""
        return self.head_s + self.loss_s

    @property
    def head_backward_s(self) -> Quantity:
        """Return head and loss, backward."""
        return 2 * self.head_s + self.loss_s


ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::{}, std::array<char*, 3ul> >(int)"
NORM = "void at::native::(anonymous namespace)::{}<c10::BFloat16, float>(int, float)"
FLASH = "void pytorch_flash::flash_{}_kernel<Flash_kernel_traits<128, 128, 64, 4> >(pytorch_flash::Flash_params)"
GEMM_TILE = (128, 256)


class Op(NamedTuple):
    """A dispatcher op, the autograd node that runs it in backward ("" in forward), and the kernel it launches.

    `dims` are the shapes of its inputs, as a profiler records them.
    """

    name: str
    node: str
    kernel: Kernel
    dims: tuple[tuple[int, ...], ...] = ()


def rates(hardware: Hardware, *, spans_nodes: bool, overhead_s: float = 0.0) -> Rates:
    """Return the rates of a machine, for rings inside a node or across nodes."""
    return Rates(
        flops_per_s=hardware.flops_per_s,
        memory_bytes_per_s=hardware.memory_bytes_per_s,
        elementwise_bytes=hardware.elementwise_bytes,
        bus_bytes_per_s=hardware.network_bytes_per_s if spans_nodes else hardware.node_bytes_per_s,
        hop_s=hardware.network_hop_s if spans_nodes else hardware.node_hop_s,
        overhead_s=overhead_s,
        give_way=hardware.give_way,
        give_way_high_priority=hardware.give_way_high_priority,
    )


def parts(model: Model, speeds: Rates, *, batch: int, seq: int, shards: int) -> Parts:
    """Return the compute of a step: `batch` sequences of `seq` tokens a GPU, the optimizer's work over `shards`.

    A product of n parameters and t tokens takes 2nt operations; causal attention 2bs²h. What is neither moves
    `elementwise_bytes` per token and unit of width.
    """
    tokens = batch * seq
    return Parts(
        matrices_s=2 * model.layer_parameters * tokens / speeds.flops_per_s,
        attention_s=2 * batch * seq * seq * model.width / speeds.flops_per_s,
        elementwise_s=speeds.elementwise_bytes * tokens * model.width / speeds.memory_bytes_per_s,
        head_s=2 * model.outer_parameters * tokens / speeds.flops_per_s,
        loss_s=_LOSS_BYTES * tokens * model.vocabulary / speeds.memory_bytes_per_s,
        optimizer_s=speeds.overhead_s + OPTIMIZER_BYTES * model.parameters / shards / speeds.memory_bytes_per_s,
    )


def parts_of(job: Job) -> Parts:
    """Return the compute of a job's step."""
    speeds = rates(job.hardware, spans_nodes=False, overhead_s=job.step_overhead_ns / 1e9)
    return parts(job.model, speeds, batch=job.batch, seq=job.seq, shards=job.shards)


def ring_s(size_bytes: Quantity, speeds: Rates, ranks: Quantity) -> Quantity:
    """Return the time of a ring of `ranks` to gather or reduce-scatter `size_bytes` in all (nccl-tests' formula)."""
    hops = ring_hops(ALL_GATHER, ranks)
    return hops / ranks * size_bytes / speeds.bus_bytes_per_s + hops * speeds.hop_s


def moved_s(bytes_per_parameter: float, parameters: Quantity, speeds: Rates) -> Quantity:
    """Return the time of a kernel that only moves data."""
    return bytes_per_parameter * parameters / speeds.memory_bytes_per_s


def pieces(parameters: int) -> int:
    """Return into how many kernels PyTorch splits an elementwise op on reduced gradients: none may pass 2^31 bytes.

    >>> pieces(202_000_000), pieces(855_000_000)
    (1, 2)
    """
    return int(np.ceil(REDUCED_BYTES * parameters / _INDEXABLE_BYTES))


def layer_forward(job: Job, parts: Parts) -> Iterator[Op]:
    """Yield the ops of one layer's forward pass, in order."""
    model, total, tokens = job.model, job.model.layer_parameters, job.tokens
    width, hidden = model.width, model.hidden_width
    (qkv, out), (up, down) = model.attention_parameters, model.feed_forward_parameters
    inputs, wide = ((tokens, width),), ((tokens, hidden), (tokens, hidden))

    def product(parameters: int, narrow: int) -> Op:
        return _product(job, parts.matrices_s * parameters / total, "", (tokens, narrow, parameters // narrow))

    yield Op("aten::_fused_rms_norm", "", _elementwise(parts, 0.25, NORM.format("rms_norm_kernel")), inputs)
    yield product(qkv, width)
    yield Op("aten::_flash_attention_forward", "", _attention(job, parts.attention_s, "fwd"), inputs * 3)
    yield product(out, width)
    norm = _elementwise(parts, 0.35, NORM.format("rms_norm_kernel"))
    yield Op("aten::_fused_rms_norm", "", norm, inputs * 2)  # with the residual
    yield product(up, width)
    yield Op("aten::mul", "", _elementwise(parts, 0.4, ELEMENTWISE.format("SiluMulFunctor<c10::BFloat16>")), wide)
    yield product(down, hidden)


def layer_backward(job: Job, parts: Parts) -> Iterator[Op]:
    """Yield the ops of one layer's backward pass, in order, recomputation left out."""
    model, total, tokens = job.model, job.model.layer_parameters, job.tokens
    (qkv, out), (up, down) = model.attention_parameters, model.feed_forward_parameters
    inputs, wide = ((tokens, model.width),), ((tokens, model.hidden_width), (tokens, model.hidden_width))

    def products(parameters: int, narrow: int) -> list[Op]:
        return _gradients(job, parts.matrices_s * parameters / total, narrow, parameters // narrow)

    silu = ELEMENTWISE.format("SiluMulBackwardFunctor<c10::BFloat16>")
    back = _elementwise(parts, 0.6, NORM.format("back"))
    norm = Op("aten::_fused_rms_norm_backward", "FusedRmsNormBackward0", back, inputs * 2)
    yield from products(down, model.hidden_width)
    yield Op("aten::mul", "MulBackward0", _elementwise(parts, 0.8, silu), wide * 2)
    yield from products(up, model.width)
    yield norm
    yield from products(out, model.width)
    flash = _attention(job, parts.attention_backward_s, "bwd")
    yield Op("aten::_flash_attention_backward", "FlashAttentionBackward0", flash, inputs * 4)
    yield from products(qkv, model.width)
    yield norm


def head(job: Job, parts: Parts, *, backward: bool) -> list[Op]:
    """Return the ops of head and loss."""
    loss = "SoftMaxBackward" if backward else "SoftMaxForward"
    name = f"void at::native::(anonymous namespace)::cunn_{loss}<4, float>(int)"
    softmax = compute(name, parts.loss_s, blocks=job.tokens)
    width, vocabulary = job.model.width, job.model.vocabulary
    logits = ((job.tokens, vocabulary),)
    if not backward:
        product = _product(job, parts.head_s, "", (job.tokens, width, vocabulary))
        return [product, Op("aten::_log_softmax", "", softmax, logits)]
    products = _gradients(job, parts.head_s, width, vocabulary)
    return [Op("aten::_log_softmax_backward_data", "LogSoftmaxBackward0", softmax, logits), *products]


def embedding(job: Job, *, backward: bool) -> Op:
    """Return the look-up of the tokens' embeddings, or the sum of their gradients."""
    moved = GATHERED_BYTES * 2 * job.tokens * job.model.width / job.hardware.memory_bytes_per_s
    name = "embedding_backward_kernel" if backward else "indexSelectLargeIndex"
    kernel = compute(f"void at::native::(anonymous namespace)::{name}<float, long>(int)", moved)
    tokens, width = job.tokens, job.model.width
    if backward:
        return Op("aten::embedding_dense_backward", "EmbeddingBackward0", kernel, ((tokens, width), (tokens,)))
    return Op("aten::embedding", "", kernel, ((job.model.vocabulary, width), (tokens,)))


def moving(job: Job, what: str, bytes_per_parameter: float, parameters: int, stream: int) -> list[Kernel]:
    """Return the kernels of an op that casts, divides or copies gradients: several where its tensor is too large."""
    count = pieces(parameters)
    seconds = bytes_per_parameter * parameters / job.hardware.memory_bytes_per_s / count
    blocks = max(1, parameters // count // 2048)
    kernel = compute(ELEMENTWISE.format(what), seconds, blocks=blocks)
    return [kernel._replace(stream=stream, pieces=count)] * count


def optimizer(seconds: float) -> list[Op]:
    """Return the ops of clipping and of the optimizer's step, which take so many seconds together."""
    adam = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4> >(int)"
    count = 8
    return [Op("aten::_fused_adamw_", "", compute(adam, seconds / count, blocks=640))] * count


def collective(op: str, group: str, stream: int, *, elements: int, ranks: int, dtype: str) -> Kernel:
    """Return a collective on `elements` elements over `ranks`.

    op is all_gather, reduce_scatter, all_reduce or broadcast.
    """
    short = "f32" if dtype == "Float" else "bf16"
    name = {
        "all_gather": "ncclDevKernel_AllGather_RING_LL",
        "reduce_scatter": f"ncclDevKernel_ReduceScatter_Sum_{short}_RING_LL",
        "all_reduce": f"ncclDevKernel_AllReduce_Sum_{short}_RING_LL",
        "broadcast": "ncclDevKernel_Broadcast_RING_LL",
    }[op]
    part = -(-elements // ranks)
    sent, received = {"all_gather": (part, elements), "reduce_scatter": (elements, part)}.get(op, (elements, elements))
    return Kernel(
        f"{name}(ncclDevKernelArgsStorage<4096ul>)",
        COMMUNICATION,
        stream,
        blocks=24,
        collective=Collective(op, group, dtype, sent, received),
    )


def send_receive(message: Collective, stream: int) -> Kernel:
    """Return the kernel of a send, a receive or an all-to-all: NCCL runs all of them as sends and receives."""
    name = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
    return Kernel(name, COMMUNICATION, stream, blocks=8, collective=message)


def _gradients(job: Job, seconds: float, narrow: int, wide: int) -> list[Op]:
    """Return the two products that give the gradients of a product's input and of its weight."""
    sizes = ((job.tokens, wide, narrow), (wide, job.tokens, narrow))
    return [_product(job, seconds, "MmBackward0", size) for size in sizes]


def _product(job: Job, seconds: float, node: str, size: tuple[int, int, int]) -> Op:
    """Return the product of matrices of m times k and k times n elements."""
    m, k, n = size
    rows, columns = GEMM_TILE
    kernel = compute(job.hardware.gemm_name, seconds, blocks=-(-m // rows) * -(-n // columns))
    return Op("aten::mm", node, kernel, ((m, k), (k, n)))


def _attention(job: Job, seconds: float, direction: str) -> Kernel:
    blocks = max(1, job.tokens // 128) * job.model.heads
    return compute(FLASH.format(direction), seconds, blocks=blocks)


def _elementwise(parts: Parts, ratio: float, name: str) -> Kernel:
    return compute(name, parts.elementwise_s * ratio, blocks=4096)


def compute(name: str, seconds: float, *, blocks: int = 1) -> Kernel:
    """Return a kernel of the main compute that takes so many seconds alone."""
    return Kernel(name, COMPUTE, MAIN_STREAM, max(1_000, round(seconds * 1e9)), blocks=blocks)
