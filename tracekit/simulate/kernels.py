"""The kernels of a layer: how the time of its parts goes to ops, with names as a profiler shows them."""

from collections.abc import Iterator
from typing import NamedTuple

from tracekit.simulate import costs
from tracekit.simulate.costs import Parts
from tracekit.simulate.job import Job
from tracekit.simulate.program import COMPUTE, MAIN_STREAM, Collective, Kernel

_ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::{}, std::array<char*, 3ul> >(int)"
_NORM = "void at::native::(anonymous namespace)::{}<c10::BFloat16, float>(int, float)"
_FLASH = "void pytorch_flash::flash_{}_kernel<Flash_kernel_traits<128, 128, 64, 4> >(pytorch_flash::Flash_params)"
_SECOND_NS = 1e9


class Op(NamedTuple):
    """A dispatcher op, the autograd node that runs it in backward ("" in forward), and the kernel it launches."""

    name: str
    node: str
    kernel: Kernel


def layer_forward(job: Job, parts: Parts) -> list[Op]:
    """Return the ops of one layer's forward pass, in order."""
    return list(_forward(job, parts))


def layer_backward(job: Job, parts: Parts) -> list[Op]:
    """Return the ops of one layer's backward pass, in order, recomputation left out."""
    return list(_backward(job, parts))


def head(job: Job, parts: Parts, *, backward: bool) -> list[Op]:
    """Return the ops of head and loss."""
    loss = "SoftMaxBackward" if backward else "SoftMaxForward"
    softmax = Kernel(
        f"void at::native::(anonymous namespace)::cunn_{loss}<4, float>(int)",
        COMPUTE,
        MAIN_STREAM,
        _ns(parts.loss_s),
        blocks=job.tokens,
    )
    if not backward:
        return [Op("aten::mm", "", _gemm(job, parts.head_s)), Op("aten::_log_softmax", "", softmax)]
    products = [Op("aten::mm", "MmBackward0", _gemm(job, parts.head_s)) for _ in range(2)]
    return [Op("aten::_log_softmax_backward_data", "LogSoftmaxBackward0", softmax), *products]


def embedding(job: Job, *, backward: bool) -> Op:
    """Return the look-up of the tokens' embeddings, or the sum of their gradients."""
    moved = costs.WEIGHT_BYTES * 2 * job.tokens * job.model.width / job.hardware.memory_bytes_per_s
    name = "embedding_backward_kernel" if backward else "indexSelectLargeIndex"
    kernel = Kernel(f"void at::native::(anonymous namespace)::{name}<float, long>(int)", COMPUTE, MAIN_STREAM)
    return Op(
        "aten::embedding_dense_backward" if backward else "aten::embedding",
        "EmbeddingBackward0" if backward else "",
        _lasting(kernel, moved),
    )


def moving(job: Job, what: str, bytes_per_parameter: float, parameters: int, stream: int) -> list[Kernel]:
    """Return the kernels of an op that casts, divides or copies gradients: several where its tensor is too large."""
    count = costs.pieces(parameters)
    seconds = bytes_per_parameter * parameters / job.hardware.memory_bytes_per_s / count
    name = _ELEMENTWISE.format(what)
    kernel = Kernel(name, COMPUTE, stream, pieces=count, blocks=max(1, parameters // count // 2048))
    return [_lasting(kernel, seconds)] * count


def optimizer(parts: Parts) -> list[Op]:
    """Return the ops of clipping and of the optimizer's step."""
    adam = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4> >(int)"
    count = 8
    kernel = Kernel(adam, COMPUTE, MAIN_STREAM, blocks=640)
    return [Op("aten::_fused_adamw_", "", _lasting(kernel, parts.optimizer_s / count)) for _ in range(count)]


def collective(op: str, group: str, stream: int, *, whole: int, ranks: int, dtype: str) -> Kernel:
    """Return a collective on `whole` elements over `ranks`; op is all_gather, reduce_scatter or all_reduce."""
    short = "f32" if dtype == "Float" else "bf16"
    name = {
        "all_gather": "ncclDevKernel_AllGather_RING_LL",
        "reduce_scatter": f"ncclDevKernel_ReduceScatter_Sum_{short}_RING_LL",
        "all_reduce": f"ncclDevKernel_AllReduce_Sum_{short}_RING_LL",
    }[op]
    part = -(-whole // ranks)
    sent, received = {"all_gather": (part, whole), "reduce_scatter": (whole, part)}.get(op, (whole, whole))
    return Kernel(
        f"{name}(ncclDevKernelArgsStorage<4096ul>)",
        "communication",
        stream,
        blocks=24,
        collective=Collective(op, group, dtype, sent, received),
    )


def _forward(job: Job, parts: Parts) -> Iterator[Op]:
    model, whole = job.model, job.model.layer_parameters
    (qkv, out), (up, down) = model.attention_parameters, model.feed_forward_parameters
    yield Op("aten::_fused_rms_norm", "", _elementwise(parts, 0.25, _NORM.format("rms_norm_kernel")))
    yield Op("aten::mm", "", _gemm(job, parts.matrices_s * qkv / whole))
    yield Op("aten::_flash_attention_forward", "", _attention(job, parts.attention_s, "fwd"))
    yield Op("aten::mm", "", _gemm(job, parts.matrices_s * out / whole))
    yield Op("aten::_fused_rms_norm", "", _elementwise(parts, 0.35, _NORM.format("rms_norm_kernel")))
    yield Op("aten::mm", "", _gemm(job, parts.matrices_s * up / whole))
    yield Op("aten::mul", "", _elementwise(parts, 0.4, _ELEMENTWISE.format("SiluMulFunctor<c10::BFloat16>")))
    yield Op("aten::mm", "", _gemm(job, parts.matrices_s * down / whole))


def _backward(job: Job, parts: Parts) -> Iterator[Op]:
    model, whole = job.model, job.model.layer_parameters
    (qkv, out), (up, down) = model.attention_parameters, model.feed_forward_parameters

    def products(parameters: int) -> list[Op]:
        return [Op("aten::mm", "MmBackward0", _gemm(job, parts.matrices_s * parameters / whole)) for _ in range(2)]

    silu = _ELEMENTWISE.format("SiluMulBackwardFunctor<c10::BFloat16>")
    norm = Op("aten::_fused_rms_norm_backward", "FusedRmsNormBackward0", _elementwise(parts, 0.6, _NORM.format("back")))
    yield from products(down)
    yield Op("aten::mul", "MulBackward0", _elementwise(parts, 0.8, silu))
    yield from products(up)
    yield norm
    yield from products(out)
    flash = _attention(job, parts.attention_backward_s, "bwd")
    yield Op("aten::_flash_attention_backward", "FlashAttentionBackward0", flash)
    yield from products(qkv)
    yield norm


def _gemm(job: Job, seconds: float) -> Kernel:
    kernel = Kernel(job.hardware.gemm_name, COMPUTE, MAIN_STREAM, blocks=max(1, job.tokens // 128) * 32)
    return _lasting(kernel, seconds)


def _attention(job: Job, seconds: float, direction: str) -> Kernel:
    blocks = max(1, job.tokens // 128) * job.model.heads
    return _lasting(Kernel(_FLASH.format(direction), COMPUTE, MAIN_STREAM, blocks=blocks), seconds)


def _elementwise(parts: Parts, ratio: float, name: str) -> Kernel:
    return _lasting(Kernel(name, COMPUTE, MAIN_STREAM, blocks=4096), parts.elementwise_s * ratio)


def _lasting(kernel: Kernel, seconds: float) -> Kernel:
    return Kernel(
        kernel.name, kernel.kind, kernel.stream, _ns(seconds), kernel.pieces, kernel.blocks, kernel.bytes, None
    )


def _ns(seconds: float) -> int:
    return max(1_000, round(seconds * _SECOND_NS))
