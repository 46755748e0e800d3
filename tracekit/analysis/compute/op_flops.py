"""Floating-point operations of one operator call, from the shapes and values of its inputs.

Counted are matrix products, convolutions and attention, as by ``torch.utils.flop_counter``: a multiplication and an
addition are two operations, and a causal mask halves nothing. Operators outside these do work that memory bandwidth
limits; `has_no_products` says which are known to be such.

Formulas: torch/utils/flop_counter.py of PyTorch 2.13, but the gradient of a grouped convolution's weights counts each
group once, as its forward pass does; attention: `attention`. Names of Inductor's kernels:
torch/_inductor/codegen/triton.py.
"""

import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

from tracekit.analysis.compute import op_bytes, op_inputs
from tracekit.conventions import devices


class Attention(NamedTuple):
    """The places of an operator's arguments: query (key and value follow it), bounds, longest lengths, mask.

    Shapes are batch, heads, tokens, width; with `tokens_first` batch, tokens, heads, width. `bounds` are the first
    tokens of packed sequences (cu_seqlens) of queries, then keys; `longest` likewise. `causal` comes before the two
    numbers of `window`, how many keys each query sees before and after its own; negative or none for all.
    """

    query: int = 0
    backward: bool = False
    tokens_first: bool = True
    bounds: int | None = None
    longest: int | None = None
    causal: int | None = None
    window: int | None = None


Shape: TypeAlias = Sequence[int]
Shapes: TypeAlias = Sequence[Any]
_Formula: TypeAlias = Callable[[Shapes, Sequence[str]], "Work | None"]


class Work(NamedTuple):
    """The operations of a call, and the elements of its outputs."""

    flops: float
    output_elements: float


OutputShapes: TypeAlias = Mapping[tuple[str, str], Shape]
"""The output of a convolution by the shapes of its input and weight, as JSON."""

_MAX_WORK = 1e24
"""Operations, or elements, of one call: a device would take 30 years."""


def work(name: str, shapes: str | None, arguments: str | None, outputs: OutputShapes | None = None) -> Work | None:
    """Work of a call of an operator that has a formula; None where inputs don't determine it.

    `shapes` and `arguments` are the columns of the ops table. Where a convolution's stride was not recorded, its output
    is taken from `outputs` (see `convolution_outputs`).
    """
    formula = _formula(name)
    if formula is None or shapes is None:
        return None
    try:
        dims, values = json.loads(shapes), json.loads(arguments) if arguments else []
        counted = formula(dims, values)
        if counted is None and outputs and name in _CONVOLUTIONS:
            output = outputs.get((json.dumps(dims[0]), json.dumps(dims[1])))
            counted = None if output is None else _convolution_work(dims[0], dims[1], output)
        # NaN is in no range.
        return counted if counted is not None and all(0 <= number <= _MAX_WORK for number in counted) else None
    except op_inputs.OTHER_INPUTS:
        return None


@functools.lru_cache(maxsize=10_000)  # ranks of a run have mostly the same names
def has_formula(name: str) -> bool:
    """Return whether the operations of an operator can be computed from its inputs."""
    return _formula(name) is not None


def has_no_products(name: str) -> bool:
    """Return whether an operator, or a kernel that Inductor made, is known to multiply no matrices."""
    if _INDUCTOR.match(name) or op_bytes.is_library_op(name):
        return True
    if has_formula(name) or not _MEMORY_BOUND.match(name):
        return False
    return not name.startswith("aten::") or not _OPAQUE.search(name)


def is_memory_bound_kernel(name: str) -> bool:
    """Return whether a kernel is known by its name to multiply no matrices, whatever launched it."""
    return bool(_INDUCTOR.match(name)) or (bool(_MEMORY_BOUND_KERNEL.search(name)) and not _PRODUCT_KERNEL.search(name))


def convolution_outputs(backward_calls: Sequence[tuple[str, str]]) -> OutputShapes:
    """Outputs of convolutions as their backward passes state them, from pairs of name and shapes.

    Of an input and a weight that have outputs of several shapes (by stride), none is returned.
    """
    outputs: dict[tuple[str, str], set[tuple[int, ...]]] = {}
    for name, shapes in backward_calls:
        try:
            dims = json.loads(shapes)
            gradient, source = dims[_GRADIENT_AT[name]], dims[1 - _GRADIENT_AT[name]]
            outputs.setdefault((json.dumps(source), json.dumps(dims[2])), set()).add(tuple(gradient))
        except op_inputs.OTHER_INPUTS:
            continue
    return {inputs: next(iter(candidates)) for inputs, candidates in outputs.items() if len(candidates) == 1}


class InputBytes(NamedTuple):
    """The bytes of all input tensors, and the element type of the first one; None where types were not recorded."""

    total: float | None
    dtype: str | None


def input_bytes(name: str, shapes: str, dtypes: str | None) -> InputBytes:
    """Size of the inputs, from the columns of the ops table. Lists of tensors are not sized.

    What a product writes to (out=), which is recorded after its inputs, is none of them.
    """
    try:
        pairs = list(zip(json.loads(shapes), json.loads(dtypes or "[]"), strict=False))[: _PARAMETERS.get(name)]
        tensors = [(devices.element_type(dtype), shape) for shape, dtype in pairs if shape and isinstance(dtype, str)]
        sizes = [devices.ELEMENT_BYTES[dtype] * math.prod(shape) for dtype, shape in tensors if dtype]
        total = float(sum(sizes))
    except op_inputs.OTHER_INPUTS:
        return InputBytes(None, None)
    dtype = next((dtype for dtype, _ in tensors if dtype), None)
    return InputBytes(None if dtype is None else total, dtype)


def moved_bytes(done: Work, inputs: InputBytes) -> float | None:
    """Bytes that a call reads and writes at least: inputs and outputs once, in the inputs' element type."""
    if inputs.total is None or inputs.dtype is None:
        return None
    element_bytes = max(devices.ELEMENT_BYTES[inputs.dtype], _LEAST_OUTPUT_BYTES)
    return inputs.total + element_bytes * done.output_elements


def attention(name: str) -> Attention | None:
    """Places of the arguments of an attention operator; None for other operators."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    if _SCALED_DOT_PRODUCT_BACKWARD.match(name):
        return Attention(1, backward=True, tokens_first=False)
    if template := _FLEX_TEMPLATE.match(name):
        return Attention(0, backward=bool(template["backward"]), tokens_first=False)
    return Attention(tokens_first=False) if _SCALED_DOT_PRODUCT.match(name) else None


_LEAST_OUTPUT_BYTES = 2
"""Per element: products of 8-bit elements are written in 16."""


# Matrix products -----------------------------------------------------------------------------------------------------


def _product(dims: Shapes, values: Sequence[str], left_at: int = 0) -> Work:  # noqa: ARG001 the signature of formulas
    """Count an operator whose factors are inputs `left_at` and the next one."""
    lhs, rhs = dims[left_at : left_at + 2]
    if lhs[-1] != rhs[-2]:
        raise ValueError(f"no matrix product: {lhs} by {rhs}")
    return Work(2.0 * math.prod(lhs) * rhs[-1], math.prod(lhs[:-1]) * rhs[-1])


def _vector_product(dims: Shapes, values: Sequence[str], left_at: int = 0) -> Work:  # noqa: ARG001
    """Count a product whose left factor, a matrix or vector, is multiplied by a vector."""
    return Work(2.0 * math.prod(dims[left_at]), math.prod(dims[left_at][:-1]))


def _linear(dims: Shapes, values: Sequence[str]) -> Work:  # noqa: ARG001
    source, weight = dims[:2]
    return Work(2.0 * math.prod(source) * weight[0], math.prod(source[:-1]) * weight[0])


def _grouped_product(dims: Shapes, values: Sequence[str]) -> Work:  # noqa: ARG001
    """Count products whose rows, columns (left of 3 dimensions) or inner dimension (both of 2) are in groups.

    A row, column or inner element is in one group. Shapes do not show how many groups divide the inner dimension.
    """
    lhs, rhs = dims[:2]
    groups_columns = len(lhs) == 3 and len(rhs) == 2
    lhs = lhs[1:] if groups_columns else lhs
    return Work(2.0 * math.prod(lhs) * rhs[-1], math.prod(lhs[:-1]) * rhs[-1])


def _template_product(dims: Shapes, values: Sequence[str]) -> Work | None:  # noqa: ARG001
    """Count a product of Inductor's templates, whose buffers are the factors, fused operands and results in any order.

    The factors are neighbours that fit, and whose product has the elements of a later buffer; None where pairs of
    different work do.
    """
    buffers = [shape for shape in dims if len(shape) in (2, 3)]
    sizes = [math.prod(shape) for shape in dims]
    products = {
        _product((lhs, rhs), ()) for lhs, rhs in pairwise(buffers) if lhs[-1] == rhs[-2] and lhs[:-2] == rhs[:-2]
    }
    fitting = [product for product in products if product is not None and product.output_elements in sizes]
    return Work(fitting[0].flops, 0.0) if len(fitting) == 1 else None  # the result is one of the buffers


_TEMPLATE_PRODUCT = re.compile(r"^triton_tem_fused_(\w*_)?(add|b|badd)?mm(_|$)")


# Convolutions --------------------------------------------------------------------------------------------------------


def _convolution(dims: Shapes, values: Sequence[str], places: tuple[int, int, int, int | None]) -> Work | None:
    """Count a convolution; `places` of the arguments stride, padding, dilation, and transposed if there is one."""
    source, weight = dims[:2]
    *spread_places, transposed = places
    if transposed is not None and values and values[transposed] == "True":
        return _convolution_work(source, weight, source)
    if not values or not values[places[0]]:
        return None
    kernel = weight[2:]
    steps, pads, gaps = (_spread(values[place], len(kernel)) for place in spread_places if place is not None)
    sizes = zip(source[-len(kernel) :], kernel, steps, pads, gaps, strict=True)
    spatial = [(size + 2 * pad - gap * (width - 1) - 1) // step + 1 for size, width, step, pad, gap in sizes]
    return _convolution_work(source, weight, [*source[: -len(kernel)], *spatial])


def _spread(text: str, length: int) -> list[int]:
    numbers = [int(number) for number in json.loads(text)]
    return numbers * length if len(numbers) == 1 else numbers


def _convolution_work(source: Shape, weight: Shape, convolved: Shape) -> Work:
    """Work; `convolved` are the points that the kernel is applied to: outputs, inputs if transposed.

    The weight is (outputs, inputs / groups, kernel…), transposed (inputs, outputs / groups, kernel…).
    """
    kernel = len(weight) - 2
    points = math.prod(source[: -kernel - 1]) * math.prod(convolved[-kernel:])
    return Work(2.0 * points * math.prod(weight), points * weight[0])


def _convolution_gradients(dims: Shapes, values: Sequence[str]) -> Work:
    """Count aten::convolution_backward: each of the input's and the weight's gradient costs what forward does."""
    gradient, source, weight = dims[:3]
    is_transposed = len(values) > 7 and values[7] == "True"
    mask = json.loads(values[10].lower()) if len(values) > 10 and values[10] else [True, True]
    forward = _convolution_work(source, weight, source if is_transposed else gradient)
    outputs = [shape for is_wanted, shape in zip(mask, (source, weight), strict=False) if is_wanted]
    return Work(len(outputs) * forward.flops, sum(map(math.prod, outputs)))


def _library_gradients(dims: Shapes, values: Sequence[str]) -> Work:  # noqa: ARG001
    """Count the backward operators of torch before 1.11: input, gradient, weight; both gradients."""
    source, gradient, weight = dims[:3]
    return Work(2.0 * _convolution_work(source, weight, gradient).flops, math.prod(source) + math.prod(weight))


_CONVOLUTIONS: Mapping[str, _Formula] = {
    "aten::convolution": partial(_convolution, places=(3, 4, 5, 6)),
    "aten::_convolution": partial(_convolution, places=(3, 4, 5, 6)),
    "aten::convolution_overrideable": partial(_convolution, places=(3, 4, 5, 6)),
    "aten::cudnn_convolution": partial(_convolution, places=(3, 2, 4, None)),
    "aten::miopen_convolution": partial(_convolution, places=(4, 3, 5, None)),
    "aten::mkldnn_convolution": partial(_convolution, places=(4, 3, 5, None)),
}
_GRADIENT_AT = {
    "aten::convolution_backward": 0,
    "aten::cudnn_convolution_backward": 1,
    "aten::miopen_convolution_backward": 1,
    "aten::mkldnn_convolution_backward": 1,
}
"""Backward operators of convolutions, and the place of the output's gradient; the input is the other of the two."""
CONVOLUTION_BACKWARDS = tuple(_GRADIENT_AT)

_FORMULAS: Mapping[str, _Formula] = {
    **{f"aten::{name}": _product for name in ("mm", "bmm", "_scaled_mm", "_int_mm")},
    **{
        f"aten::{name}": partial(_product, left_at=1)
        for name in ("addmm", "addmm_", "_addmm_activation", "baddbmm", "baddbmm_", "addbmm")
    },
    "aten::mv": _vector_product,
    "aten::dot": _vector_product,
    "aten::addmv": partial(_vector_product, left_at=1),
    "aten::vdot": _vector_product,
    "mkldnn::_linear_pointwise": _linear,
    **{f"aten::{name}": _grouped_product for name in ("_grouped_mm", "_scaled_grouped_mm")},
    **_CONVOLUTIONS,
    **dict.fromkeys(CONVOLUTION_BACKWARDS[1:], _library_gradients),
    "aten::convolution_backward": _convolution_gradients,
}

_PARAMETERS: Mapping[str, int] = {
    **{f"aten::{name}": 2 for name in ("mm", "bmm", "_int_mm", "mv", "dot", "vdot")},
    **{f"aten::{name}": 5 for name in ("addmm", "addmm_", "baddbmm", "baddbmm_", "addbmm", "addmv")},
    "aten::_addmm_activation": 6,
    "aten::_scaled_mm": 8,
}
"""Products by the number of their arguments without out=."""


def _formula(name: str) -> _Formula | None:
    if name in _FORMULAS:
        return _FORMULAS[name]
    if _TEMPLATE_PRODUCT.match(name):
        return _template_product
    places = attention(name)
    return None if places is None else partial(_attention, name=name, places=places)


def _attention(dims: Shapes, values: Sequence[str], name: str, places: Attention) -> Work | None:
    """Count attention; None where the lengths of packed sequences are not known."""
    tensors = _tensors(places, dims, values)
    if tensors is None:
        return None
    query, key, value = tensors
    scores = 2.0 * math.prod(query[:3]) * min(key[2], _seen_keys(places, values))
    width, value_width = query[3], value[3]
    if places.backward:
        flops, output_elements = scores * (3 * width + 2 * value_width), float(sum(map(math.prod, tensors)))
    else:
        flops, output_elements = scores * (width + value_width), float(math.prod(query[:3]) * value_width)
    return Work(flops, 0.0 if name.startswith(_TEMPLATE) else output_elements)


_TEMPLATE = "triton_tem_"
"""Inductor's templates; a call of one states the buffers that it writes to, too."""

# Work without products -----------------------------------------------------------------------------------------------

# Inductor's pointwise, reduction, persistent reduction, scan and foreach kernels; its templates (tem) multiply.
_INDUCTOR = re.compile(r"^triton_(poi|red|per|split_scan|for)_")
_MEMORY_BOUND = re.compile(
    r"^(aten::|fsdp::|c10d::|record_param_comms|nccl:|fbgemm::(?!\w*(gemm|bmm|matmul|conv))|"
    r"torch::autograd::CppNode<\w*(Lookup|fbgemm_gpu::Permute))"
)
_OPAQUE = re.compile(
    r"(^|_|:)(rnn|lstm|gru|fft|linalg_(?!vector_norm|norm)|cholesky|svd|qr|lu|triangular_solve|cdist|trilinear|bilinear|"
    r"linear|matmul|einsum|grouped|sparse|addr|ger|ctc_loss)|attention|convolution|conv_|conv\d|_mm(_|$)|packed_mm"
)
"""Operators that may multiply in a way that has no formula here."""
_MEMORY_BOUND_KERNEL = re.compile(
    r"elementwise|reduce_kernel|softmax|layer_?norm|rms_?norm|multi_tensor_apply|CatArrayBatchedCopy|embedding|dropout",
    re.IGNORECASE,
)
_PRODUCT_KERNEL = re.compile(
    rf"gemm|mma|conv|attn|attention|flash|cutlass|bmm|matmul|nvjet|^{_TEMPLATE}", re.IGNORECASE
)


def _tensors(places: Attention, dims: Sequence[Any], values: Sequence[str]) -> list[Shape] | None:
    """Return query, key and value as (batch, heads, tokens, width); None where the lengths are not known."""
    tensors: list[Shape] = list(dims[places.query : places.query + 3])
    if places.bounds is not None and len(dims) > places.bounds and dims[places.bounds]:
        unpacked = _unpack(places, tensors, dims, values)
        if unpacked is None:
            return None
        tensors = unpacked
    if any(len(shape) != 4 for shape in tensors):
        return None
    return [[shape[0], shape[2], shape[1], shape[3]] for shape in tensors] if places.tokens_first else tensors


def _unpack(places: Attention, packed: list[Shape], dims: Sequence[Any], values: Sequence[str]) -> list[Shape] | None:
    """Return packed tensors (tokens, heads, width) as a batch of equal sequences; None where lengths differ."""
    if places.bounds is None or places.longest is None or any(len(shape) != 3 for shape in packed):
        return None
    sequences = [dims[places.bounds + offset][0] - 1 for offset in (0, 1, 1)]
    longest = [int(values[places.longest + offset]) for offset in (0, 1, 1)]
    pairs = list(zip(packed, sequences, longest, strict=True))
    if any(shape[0] != count * length for shape, count, length in pairs):
        return None
    return [[count, length, *shape[1:]] for shape, count, length in pairs]


def _seen_keys(places: Attention, values: Sequence[str]) -> float:
    """Most keys that a query is multiplied with: infinite without a window."""
    if places.window is None or len(values) < places.window + 2:
        return math.inf
    before, after = (int(text) if text not in ("", "None") else -1 for text in values[places.window :][:2])
    if before < 0:
        return math.inf
    if places.causal is not None and values[places.causal] == "True":
        return before + 1.0
    return before + 1.0 + after if after >= 0 else math.inf


_BY_NAME: Mapping[str, Attention] = {
    "aten::_flash_attention_forward": Attention(0, bounds=3, longest=5, causal=8, window=11),
    "aten::_flash_attention_backward": Attention(1, backward=True, bounds=6, longest=8, causal=11, window=15),
    "aten::_efficient_attention_forward": Attention(0, bounds=4, longest=6),
    "aten::_efficient_attention_backward": Attention(1, backward=True, bounds=6, longest=8),
    "flash_attn::_flash_attn_forward": Attention(0, causal=5, window=6),
    "flash_attn::_flash_attn_backward": Attention(1, backward=True, causal=11, window=12),
    "flash_attn::_flash_attn_varlen_forward": Attention(0, bounds=3, longest=5, causal=9, window=10),
    "flash_attn::_flash_attn_varlen_backward": Attention(1, backward=True, bounds=9, longest=11, causal=15, window=16),
    "flash_attn_3::fwd": Attention(0, bounds=7, longest=12, causal=24, window=25),
    "flash_attn_3::bwd": Attention(1, backward=True, bounds=9, longest=13, causal=16, window=17),
}
_SCALED_DOT_PRODUCT = re.compile(
    r"^aten::_scaled_dot_product_(?!attention_math)\w*attention(_for_cpu|_overrideable|_for_mps)?$"
)
_SCALED_DOT_PRODUCT_BACKWARD = re.compile(r"^aten::_scaled_dot_product_\w*attention\w*_backward$")
_FLEX_TEMPLATE = re.compile(r"^triton_tem_fused_(\w*_)?flex_attention(?P<backward>_backward)?(_|$)")
"""The templates of Inductor, whose buffers begin with query, key and value (torch/_inductor/kernel/flex/templates)."""
