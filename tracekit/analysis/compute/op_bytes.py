"""Bytes that a call of a memory-bound operator reads and writes at least, from its inputs: each tensor once.

Where the inputs do not determine the outputs, the bytes are not known; nothing is estimated. What a kernel reads twice
(the two passes of a batch norm, a cache that is too small) counts once, so that the bytes are those of the roofline.

Signatures: aten/src/ATen/native/native_functions.yaml of PyTorch 2.13; element types of results:
c10/core/ScalarType.h (`promoteTypes`). The kernels of Inductor: torch/_inductor/codegen/triton.py.
"""

import functools
import json
import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, TypeAlias

from tracekit.analysis.compute import op_inputs
from tracekit.analysis.compute.op_inputs import (
    Inputs,
    Tensor,
    broadcast_elements,
    element_bytes,
    promoted_dtype,
    total_bytes,
)

_Formula: TypeAlias = Callable[[Inputs], "int | None"]
_STATISTIC_BYTES = 4
"""Norms keep the mean and the inverse deviation of a row in 32 bits."""
_INDEX = "long int"


@functools.lru_cache(maxsize=10_000)  # ranks of a run have mostly the same names
def has_formula(name: str) -> bool:
    """Return whether the bytes of an operator can be computed from its inputs."""
    return _formula(name) is not None


def of_call(
    name: str, shapes: str, dtypes: str | None, arguments: str | None, strides: str | None, list_dtype: str | None
) -> int | None:
    """Return `moved_bytes` of a call by the columns of the ops table; `list_dtype`: see `op_inputs.parse`."""
    try:
        call_inputs = op_inputs.parse(shapes, dtypes, arguments, strides, list_dtype)
    except op_inputs.OTHER_INPUTS:
        return None
    return None if call_inputs is None else moved_bytes(name, call_inputs)


def moved_bytes(name: str, call_inputs: Inputs) -> int | None:
    """Return the bytes that a call reads and writes at least; None where its inputs do not determine them.

    >>> both = op_inputs.parse('[[1024], [1024], []]', '["float", "float", "Scalar"]', None, None, None)
    >>> moved_bytes("aten::add", both)
    12288
    """
    formula = _formula(name)
    if formula is None:
        return None
    try:
        moved = formula(call_inputs)
        return None if moved is None or not 0 <= moved <= op_inputs.MAX_BYTES else moved
    except op_inputs.OTHER_INPUTS:
        return None


def is_library_op(name: str) -> bool:
    """Return whether an operator is a fused norm, activation or softmax of another library."""
    return name in _FORMULAS and "::" not in name


class Flow(NamedTuple):
    """The tensors of a call, each as its shape, element type and bytes: the result of an elementwise one, and operands.

    `result` is None where the operator is not elementwise.
    """

    result: list[object] | None
    operands: list[list[object]]


def flow_of_call(name: str, shapes: str, dtypes: str | None, arguments: str | None, strides: str | None) -> Flow | None:
    """Inputs and outputs of an elementwise operator, reduction, norm or softmax; None for others, and with out=.

    >>> flow_of_call("aten::exp", "[[2, 3]]", '["float"]', None, None).result
    [[2, 3], 'float', 24]
    """
    operands = _OPERANDS.get(name.removeprefix("aten::").removesuffix("_"))
    if operands is None or not name.startswith("aten::"):
        return None
    try:
        call_inputs = op_inputs.parse(shapes, dtypes, arguments, strides, None)
        return (
            None
            if call_inputs is None or _has_given_output(name, call_inputs, operands)
            else _flow(name, call_inputs, operands)
        )
    except op_inputs.OTHER_INPUTS:
        return None


def _has_given_output(name: str, call_inputs: Inputs, operands: int) -> bool:
    """Return whether a call writes to a tensor that it is given (out=), as DDP does with gradients."""
    is_elementwise = name.removeprefix("aten::") in _ELEMENTWISE
    return is_elementwise and any(tensor.elements for tensor in call_inputs.tensors(operands))


def _flow(name: str, call_inputs: Inputs, operands: int) -> Flow:
    is_copy = name == "aten::copy_"
    read = call_inputs.tensors(1, 2) if is_copy else call_inputs.tensors(0, operands)
    described = [[list(tensor.shape), tensor.dtype, tensor.bytes] for tensor in read]
    if not (is_copy or name.removeprefix("aten::").removesuffix("_") in _ELEMENTWISE):
        return Flow(None, described)
    if name.endswith("_"):
        written = call_inputs.tensor(0)
        return Flow([list(written.shape), written.dtype, written.bytes], described)
    largest = max(read, key=lambda tensor: tensor.elements)
    dtype = promoted_dtype(read, call_inputs.values[:operands])
    if largest.elements != broadcast_elements(read):
        return Flow(None, described)
    return Flow([list(largest.shape), dtype, largest.elements * element_bytes(dtype)], described)


# Elementwise ---------------------------------------------------------------------------------------------------------


def _elementwise(call_inputs: Inputs, operands: int, result: str = "") -> int:
    """Count an operator whose first `operands` arguments may be tensors; further tensors are outputs.

    `result` is the element type of the result, by default that to which the operands' types are promoted.
    """
    tensors = call_inputs.tensors(0, operands)
    outputs = [tensor for tensor in call_inputs.tensors(operands) if tensor.elements]
    dtype = outputs[-1].dtype if outputs else result or promoted_dtype(tensors, call_inputs.values[:operands])
    return total_bytes(tensors) + broadcast_elements(tensors) * element_bytes(dtype)


def _in_place(call_inputs: Inputs, operands: int) -> int:
    return total_bytes(call_inputs.tensors(0, operands)) + call_inputs.tensor(0).bytes


def _floating(call_inputs: Inputs, operands: int) -> int:
    """Count an operator whose result is floating, whatever its operands are."""
    is_floating = any(tensor.is_floating for tensor in call_inputs.tensors(0, operands))
    return _elementwise(call_inputs, operands, "" if is_floating else "float")


def _division(call_inputs: Inputs) -> int:
    has_rounding = call_inputs.value(2) is not None
    return _elementwise(call_inputs, 2) if has_rounding else _floating(call_inputs, 2)


def _selection(call_inputs: Inputs) -> int:
    return _elementwise(call_inputs, 3, promoted_dtype(call_inputs.tensors(1, 3), ()))


def _cumulative_sum(call_inputs: Inputs) -> int:
    tensor, number = call_inputs.tensor(0), call_inputs.value(2)
    sum_dtype = tensor.dtype if tensor.is_floating else _INDEX
    dtype = op_inputs.SCALAR_TYPES[number] if number else sum_dtype
    return tensor.bytes + tensor.elements * element_bytes(dtype)


def _dropout(call_inputs: Inputs) -> int:
    return 2 * call_inputs.tensor(0).bytes + call_inputs.tensor(0).elements


# Reductions ----------------------------------------------------------------------------------------------------------


def _reduction(
    call_inputs: Inputs, dims_at: int, dtype_at: int | None = None, *, result: str = "", results: int = 1
) -> int | None:
    """Count a reduction whose dimensions are argument `dims_at`; without that, to one element."""
    tensor = call_inputs.tensor(0)
    outputs = 1
    if len(call_inputs.slots) > 2:
        dims = call_inputs.value(dims_at)
        if dims is None:
            return None
        reduced = {int(dim) % len(tensor.shape) for dim in _numbers(dims)} or set(range(len(tensor.shape)))
        outputs = math.prod(size for dim, size in enumerate(tensor.shape) if dim not in reduced)
    number = call_inputs.value(dtype_at) if dtype_at is not None else None
    is_counted = dtype_at is not None and not tensor.is_floating  # sums of integers have 64 bits
    sum_dtype = _INDEX if is_counted else tensor.dtype
    dtype = result or (op_inputs.SCALAR_TYPES[number] if number else sum_dtype)
    return tensor.bytes + results * outputs * element_bytes(dtype)


def _extreme(call_inputs: Inputs) -> int | None:
    """Count max and min: of two tensors, of all elements, or along a dimension with the place of each."""
    if len(call_inputs.tensors(0, 2)) == 2:
        return _elementwise(call_inputs, 2)
    with_values = _reduction(call_inputs, 1)
    if len(call_inputs.slots) == 1 or with_values is None:
        return with_values
    with_places = _reduction(call_inputs, 1, result=_INDEX)
    return None if with_places is None else with_values + with_places - call_inputs.tensor(0).bytes


def _numbers(text: str) -> list[int]:
    parsed = json.loads(text)
    return parsed if isinstance(parsed, list) else [parsed]


def _softmax(call_inputs: Inputs) -> int | None:
    """Count softmax: dim, half_to_float follow the input."""
    scores, wider = call_inputs.tensor(0), call_inputs.value(2)
    if wider is None and element_bytes(scores.dtype) < 4:
        return None
    is_wider = wider == "True"
    return scores.bytes + scores.elements * (4 if is_wider else element_bytes(scores.dtype))


def _softmax_backward(call_inputs: Inputs) -> int | None:
    """Count the gradient of softmax from the result's gradient and the result; input_dtype, or the input, is fourth."""
    gradient = call_inputs.tensor(0)
    number = call_inputs.value(3)
    fourth = call_inputs.slots[3] if len(call_inputs.slots) > 3 else None
    if not isinstance(fourth, Tensor) and number is None:
        return None
    dtype = fourth.dtype if isinstance(fourth, Tensor) else op_inputs.SCALAR_TYPES[number or ""]
    return gradient.bytes + call_inputs.tensor(1).bytes + gradient.elements * element_bytes(dtype)


# Norms, pooling ------------------------------------------------------------------------------------------------------


def _layer_norm(call_inputs: Inputs, weights: int, statistics: int) -> int | None:
    """Count a norm of rows: input, normalized_shape, then `weights` tensors."""
    tensor, shape = call_inputs.tensor(0), call_inputs.value(1)
    scales = call_inputs.tensors(2, 2 + weights)
    if not shape and not scales:
        return None
    width = math.prod(_numbers(shape)) if shape else scales[0].elements
    return 2 * tensor.bytes + total_bytes(scales) + statistics * _STATISTIC_BYTES * (tensor.elements // width)


def _layer_norm_backward(call_inputs: Inputs, statistics: int) -> int | None:
    """Count a norm's gradients: gradient, input, normalized_shape, statistics, weights, output_mask."""
    mask, weights_at = call_inputs.value(len(call_inputs.slots) - 1), 3 + statistics
    if mask is None:
        return None
    is_written = json.loads(mask.lower())
    read = [*call_inputs.tensors(0, 2), *call_inputs.tensors(3, weights_at + 1)]
    scale = call_inputs.tensors(weights_at, weights_at + 1)
    input_bytes = call_inputs.tensor(1).bytes if is_written[0] else 0
    return total_bytes(read) + input_bytes + sum(total_bytes(scale) for writes in is_written[1:] if writes)


def _batch_norm(call_inputs: Inputs) -> int:
    """Count a batch norm: the input, its result, the values of each channel, and in training their new ones."""
    tensor, channels = call_inputs.tensor(0), call_inputs.tensors(1, 5)
    return 2 * tensor.bytes + (1 if call_inputs.value(5) == "False" else 2) * total_bytes(channels)


def _batch_norm_backward(call_inputs: Inputs) -> int | None:
    """Count a batch norm's gradients, from the input and the result's gradient in any order."""
    first, second, channels = call_inputs.tensor(0), call_inputs.tensor(1), call_inputs.tensors(2, 7)
    mask = call_inputs.value(9)
    writes_input = json.loads(mask.lower())[0] if mask else True
    gradient = first.bytes if writes_input else 0
    return first.bytes + second.bytes + gradient + total_bytes(channels) + 2 * total_bytes(call_inputs.tensors(2, 3))


def _max_pool(call_inputs: Inputs) -> int | None:
    """Count a pooling in two dimensions: kernel, stride, padding, dilation, ceil_mode; its result has places, too."""
    tensor = call_inputs.tensor(0)
    if call_inputs.value(5) != "False":
        return None
    kernel, stride, padding, dilation = (_pair(call_inputs.value(place)) for place in range(1, 5))
    stride = stride or kernel
    sizes = zip(tensor.shape[-2:], kernel, stride, padding, dilation, strict=True)
    pooled = [(size + 2 * pad - gap * (width - 1) - 1) // step + 1 for size, width, step, pad, gap in sizes]
    return tensor.bytes + math.prod(tensor.shape[:-2]) * math.prod(pooled) * (8 + element_bytes(tensor.dtype))


def _pair(text: str | None) -> list[int]:
    numbers = _numbers(text or "[]")
    return numbers * 2 if len(numbers) == 1 else numbers


# Look-ups ------------------------------------------------------------------------------------------------------------


def _embedding(call_inputs: Inputs) -> int:
    weight, places = call_inputs.tensor(0), call_inputs.tensor(1)
    return places.bytes + 2 * places.elements * math.prod(weight.shape[1:]) * element_bytes(weight.dtype)


def _embedding_backward(call_inputs: Inputs) -> int | None:
    rows = call_inputs.value(2)
    gradient = call_inputs.tensor(0)
    if rows is None:
        return None
    return gradient.bytes + call_inputs.tensor(1).bytes + int(rows) * gradient.shape[-1] * element_bytes(gradient.dtype)


def _index_select(call_inputs: Inputs) -> int | None:
    source, dim, places = call_inputs.tensor(0), call_inputs.value(1), call_inputs.tensor(2)
    if dim is None and len(source.shape) > 1:
        return None
    row = source.elements // source.shape[int(dim or 0)]
    return places.bytes + 2 * places.elements * row * element_bytes(source.dtype)


def _gather(call_inputs: Inputs) -> int:
    places = call_inputs.tensor(2)
    return places.bytes + 2 * places.elements * element_bytes(call_inputs.tensor(0).dtype)


def _whole(call_inputs: Inputs, *places: int) -> int:
    """Count the tensors at these places, each read or written as a whole."""
    return sum(call_inputs.tensor(place).bytes for place in places)


# Kernels of Inductor -------------------------------------------------------------------------------------------------

_TRITON = re.compile(r"^triton_(poi|red|per|split_scan|for)_")
_PARTIAL = re.compile(
    r"_(embedding|index|gather|scatter|slice|select|split|unbind|narrow|as_strided|unfold|roll|flip|constant_pad_nd|"
    r"cat|nll_loss_forward)(_|$)"
)
"""Operators, in the name of a kernel, that read or write a part of a buffer."""


def _buffers(call_inputs: Inputs) -> int:
    """Count a kernel's buffers once; one that it both reads and writes, which its call does not state, also once."""
    buffers = call_inputs.tensors()
    if not buffers:
        raise ValueError("no buffers")
    return total_bytes(buffers)


# Fused operators, also of other libraries ----------------------------------------------------------------------------


def _for_each(call_inputs: Inputs, lists: int, *, writes: bool = True) -> int:
    """Count an elementwise operator on lists of tensors: it writes as much as the first list."""
    first, other_lists = call_inputs.tensor_list(0), call_inputs.lists(1, lists)
    if any(len(tensors) != len(first) for tensors in other_lists):
        raise ValueError("lists whose shapes are not known")
    return total_bytes(first) * (2 if writes else 1) + sum(map(total_bytes, other_lists))


def _fused_optimizer(call_inputs: Inputs, needed: int, lists: int) -> int:
    """Count an optimizer's kernel on `lists` lists at most: parameters, gradients (not written), then states.

    The first `needed` lists cannot be empty.
    """
    tensor_lists = call_inputs.lists(0, lists)
    if any(len(tensors) != len(tensor_lists[0]) for tensors in tensor_lists[:needed]) or not tensor_lists[0]:
        raise ValueError("lists whose shapes are not known")
    sizes = [total_bytes(tensors) for tensors in tensor_lists]
    return 2 * sum(sizes) - sizes[1]


def _fused_norm(call_inputs: Inputs, statistics: int) -> int:
    """Count a norm of a tensor, followed by its weights: each is read, a result of its size written."""
    normed, weights = call_inputs.tensor(0), call_inputs.tensors(1)
    rows = normed.elements // (weights[0].elements if weights else normed.shape[-1])
    return 2 * normed.bytes + total_bytes(weights) + rows * statistics * _STATISTIC_BYTES


def _fused_gradient(call_inputs: Inputs, saved: int) -> int:
    """Count the gradients of `saved` tensors of the gradient's size, which are read."""
    return (1 + 2 * saved) * call_inputs.tensor(0).bytes


def _scaled_softmax(call_inputs: Inputs) -> int:
    """Count the scores, a mask if there is one, and the result."""
    masks = [tensor for tensor in call_inputs.tensors(1) if len(tensor.shape) > 1]
    return 2 * call_inputs.tensor(0).bytes + total_bytes(masks)


def _causal_softmax(call_inputs: Inputs) -> int:
    """Count the scores up to the diagonal, and the whole result, whose rest is zero."""
    scores = call_inputs.tensor(0)
    rows, columns = scores.shape[-2:]
    read = rows * (rows + 1) // 2 * (scores.bytes // (rows * columns)) if rows == columns else scores.bytes
    return read + scores.bytes


# Table ---------------------------------------------------------------------------------------------------------------


def _names(names: str) -> list[str]:
    return names.split()


_FLOATING_UNARY = _names(
    "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan tanh sigmoid gelu silu mish elu hardswish hardsigmoid "
    "leaky_relu softplus erf erfc erfinv reciprocal frac celu logit"
)
_UNARY = _names("abs neg relu hardtanh floor ceil round trunc sign sgn nan_to_num bitwise_not threshold square")
_BINARY = _names(
    "add sub mul rsub pow atan2 remainder fmod maximum minimum fmax fmin bitwise_and bitwise_or bitwise_xor "
    "floor_divide clamp_min clamp_max xlogy copysign hypot masked_fill threshold_backward gelu_backward silu_backward "
    "sigmoid_backward tanh_backward hardtanh_backward hardswish_backward leaky_relu_backward softplus_backward "
    "native_dropout_backward"
)
_COMPARISONS = _names("eq ne lt le gt ge logical_and logical_or logical_xor")
_TERNARY = _names("addcmul addcdiv lerp clamp mse_loss_backward smooth_l1_loss_backward")
_PREDICATES = _names("logical_not isnan isinf isfinite")
_IN_PLACE = (
    *((name, 1) for name in (*_UNARY, *_FLOATING_UNARY)),
    *((name, 2) for name in (*_BINARY, *_COMPARISONS, "div")),
    *((name, 3) for name in _TERNARY),
)

_WITH_GRADIENT = _names(
    "FastLayerNormFN LigerRMSNormFunction LigerLayerNormFunction ScaledSoftmax ScaledMaskedSoftmax "
    "ScaledUpperTriangMaskedSoftmax"
)
_LAYER_NORMS = ("LayerNorm", "LayerNormAffine", "LayerNormAffineMixedDtypes")
_RMS_NORMS = ("RMSNorm", "RMSNormAffine", "RMSNormAffineMixedDtypes")
_FORMULAS: Mapping[str, _Formula] = {
    **{f"aten::{name}": partial(_elementwise, operands=1) for name in _UNARY},
    **{f"aten::{name}": partial(_floating, operands=1) for name in _FLOATING_UNARY},
    **{f"aten::{name}": partial(_elementwise, operands=2) for name in _BINARY},
    **{f"aten::{name}": partial(_elementwise, operands=2, result="bool") for name in _COMPARISONS},
    **{f"aten::{name}": partial(_elementwise, operands=3) for name in _TERNARY},
    **{f"aten::{name}": partial(_elementwise, operands=1, result="bool") for name in _PREDICATES},
    **{f"aten::{name}_": partial(_in_place, operands=operands) for name, operands in _IN_PLACE},
    "aten::div": _division,
    "aten::cumsum": _cumulative_sum,
    "aten::where": _selection,
    **{
        f"aten::{name}": lambda call_inputs: _whole(call_inputs, 0)
        for name in ("fill_", "zero_", "uniform_", "normal_", "random_", "bernoulli_", "exponential_")
    },
    "aten::copy_": lambda call_inputs: _whole(call_inputs, 0, 1),
    "aten::native_dropout": _dropout,
    **{f"aten::{name}": partial(_reduction, dims_at=1, dtype_at=3) for name in ("sum", "mean")},
    **{f"aten::{name}": partial(_reduction, dims_at=1) for name in ("amax", "amin", "logsumexp", "var", "std")},
    **{f"aten::{name}": partial(_reduction, dims_at=1, results=2) for name in ("var_mean", "std_mean")},
    **{f"aten::{name}": partial(_reduction, dims_at=1, result=_INDEX) for name in ("argmax", "argmin")},
    **{f"aten::{name}": partial(_reduction, dims_at=1, result="bool") for name in ("any", "all")},
    **{f"aten::{name}": partial(_reduction, dims_at=2) for name in ("linalg_vector_norm", "norm")},
    **{f"aten::{name}": _extreme for name in ("max", "min")},
    **{f"aten::{name}": _softmax for name in ("_softmax", "_log_softmax")},
    **{f"aten::{name}": _softmax_backward for name in ("_softmax_backward_data", "_log_softmax_backward_data")},
    "aten::native_layer_norm": partial(_layer_norm, weights=2, statistics=2),
    "aten::_fused_rms_norm": partial(_layer_norm, weights=1, statistics=1),
    "aten::native_layer_norm_backward": partial(_layer_norm_backward, statistics=2),
    "aten::_fused_rms_norm_backward": partial(_layer_norm_backward, statistics=1),
    **{f"aten::{name}_batch_norm": _batch_norm for name in ("native", "cudnn", "miopen")},
    **{f"aten::{name}_batch_norm_backward": _batch_norm_backward for name in ("native", "cudnn", "miopen")},
    "aten::max_pool2d_with_indices": _max_pool,
    "aten::max_pool2d_with_indices_backward": lambda call_inputs: _whole(call_inputs, 0, 1, 7),
    "aten::embedding": _embedding,
    "aten::embedding_dense_backward": _embedding_backward,
    "aten::index_select": _index_select,
    "aten::gather": _gather,
    "aten::cat": lambda call_inputs: 2 * total_bytes(call_inputs.tensor_list(0)),
    "aten::nll_loss_backward": lambda call_inputs: _whole(call_inputs, 1, 2),
    **{
        f"aten::_foreach_{name}{suffix}": partial(_for_each, lists=lists)
        for names, lists in (
            ("neg sqrt reciprocal exp sign abs", 1),
            ("add sub mul div maximum clamp_min clamp_max pow", 2),
            ("addcmul addcdiv lerp", 3),
        )
        for name in names.split()
        for suffix in ("", "_")
    },
    "aten::_foreach_norm": partial(_for_each, lists=1, writes=False),
    **{f"aten::_fused_{name}_": partial(_fused_optimizer, needed=4, lists=5) for name in ("adam", "adamw")},
    "aten::_fused_sgd_": partial(_fused_optimizer, needed=2, lists=3),
    **{f"Fused{kind}Function": partial(_fused_norm, statistics=2) for kind in _LAYER_NORMS},
    **{f"Fused{kind}Function": partial(_fused_norm, statistics=1) for kind in _RMS_NORMS},
    "FastLayerNormFN": partial(_fused_norm, statistics=2),
    "LigerRMSNormFunction": partial(_fused_norm, statistics=1),
    "LigerLayerNormFunction": partial(_fused_norm, statistics=2),
    **{f"Fused{kind}FunctionBackward": partial(_fused_gradient, saved=1) for kind in (*_LAYER_NORMS, *_RMS_NORMS)},
    **{f"{name}Backward": partial(_fused_gradient, saved=1) for name in _WITH_GRADIENT},
    "ScaledSoftmax": _scaled_softmax,
    "ScaledMaskedSoftmax": _scaled_softmax,
    "ScaledUpperTriangMaskedSoftmax": _causal_softmax,
    **{f"Liger{kind}MulFunction": lambda call_inputs: 3 * call_inputs.tensor(0).bytes for kind in ("SiLU", "GELU")},
    **{f"Liger{kind}MulFunctionBackward": partial(_fused_gradient, saved=2) for kind in ("SiLU", "GELU")},
}

_ELEMENTWISE = frozenset(
    {*_UNARY, *_FLOATING_UNARY, *_BINARY, *_TERNARY, "div"} - {"masked_fill", "threshold", "native_dropout_backward"}
)
"""Elementwise operators whose results have the element type of their operands."""
_OPERANDS = {
    **{name: operands for name, operands in _IN_PLACE if name in _ELEMENTWISE},
    **dict.fromkeys(("copy", "_softmax", "_log_softmax", "native_layer_norm", "sum", "mean", "amax"), 1),
}
"""Operators that a compiler fuses, with the number of their operands that may be tensors."""


def _formula(name: str) -> _Formula | None:
    if _TRITON.match(name):
        return None if _PARTIAL.search(name.partition("_fused")[2]) else _buffers
    return _FORMULAS.get(name)
