"""The inputs of one operator call, from the columns of the ops table: tensors with their size in memory, and values."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

_ELEMENT_BYTES = {
    **dict.fromkeys(("c10::complex<double>",), 16),
    **dict.fromkeys(("double", "long int", "long", "c10::complex<float>"), 8),
    **dict.fromkeys(("float", "int", "c10::complex<c10::Half>"), 4),
    **dict.fromkeys(("c10::Half", "c10::BFloat16", "short int", "short"), 2),
    **dict.fromkeys(("bool", "signed char", "unsigned char"), 1),
}
"""Bytes of an element by the name that the profiler gives its type."""
_TENSOR_LIST = "TensorList"
OTHER_INPUTS = (ValueError, TypeError, IndexError, KeyError, AttributeError, ArithmeticError)
"""What a formula of an operator raises where a trace states other inputs: of another shape, damaged, or too large."""
MAX_BYTES = 1 << 62
SCALAR_TYPES: Mapping[str, str] = {
    "0": "unsigned char", "1": "signed char", "2": "short int", "3": "int", "4": "long int", "5": "c10::Half",
    "6": "float", "7": "double", "11": "bool", "15": "c10::BFloat16",
}  # fmt: skip
"""Element types by the number that an argument `dtype` has (c10/core/ScalarType.h)."""

_FLOATING = ("c10::Half", "c10::BFloat16", "float", "double")
_COMPLEX = ("c10::complex<c10::Half>", "c10::complex<float>", "c10::complex<double>")
_CATEGORIES = {"bool": 0, **dict.fromkeys(_FLOATING, 2), **dict.fromkeys(_COMPLEX, 3)}


class Tensor(NamedTuple):
    """A tensor that an operator takes: its shape, its element type, and how many elements are in memory.

    `stored` counts an expanded dimension, whose stride is 0, once.
    """

    shape: tuple[int, ...]
    dtype: str
    stored: int

    @property
    def elements(self) -> int:
        """Number of elements by the shape."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size in memory."""
        return self.stored * element_bytes(self.dtype)

    @property
    def is_floating(self) -> bool:
        """Return whether elements are floating-point or complex numbers."""
        return _category(self.dtype) >= 2


TensorList: TypeAlias = tuple[Tensor, ...]


class Inputs(NamedTuple):
    """The inputs of a call by place: tensors, lists of tensors, and the values of the others as text ("" for none)."""

    slots: Sequence[Tensor | TensorList | None]
    values: Sequence[str]

    def tensors(self, first: int = 0, last: int | None = None) -> list[Tensor]:
        """Tensors from one place to before another; lists of tensors are left out."""
        return [slot for slot in self.slots[first:last] if isinstance(slot, Tensor)]

    def tensor(self, place: int) -> Tensor:
        """Tensor at a place. Raises ValueError where there is none."""
        slot = self.slots[place] if place < len(self.slots) else None
        if not isinstance(slot, Tensor):
            raise ValueError(f"input {place} is no tensor")
        return slot

    def tensor_list(self, place: int) -> TensorList:
        """List of tensors at a place. Raises ValueError where its shapes are not known."""
        slot = self.slots[place]
        if not isinstance(slot, tuple) or isinstance(slot, Tensor) or not slot:
            raise ValueError(f"input {place} is not a list of tensors")
        return slot

    def lists(self, first: int, last: int) -> list[TensorList]:
        """Lists of tensors from one place to before another; empty ones where shapes were not recorded."""
        return [slot for slot in self.slots[first:last] if isinstance(slot, tuple) and not isinstance(slot, Tensor)]

    def value(self, place: int) -> str | None:
        """Value at a place; None where it was not recorded."""
        return (self.values[place] or None) if place < len(self.values) else None


def parse(
    shapes: str, dtypes: str | None, arguments: str | None, strides: str | None, list_dtype: str | None
) -> Inputs | None:
    """Inputs of a call; None where an element type is not recorded, or not known.

    The profiler does not record the element type of lists of tensors: `list_dtype`, by the kernels that the call
    launched, is that of all their elements; without it the lists are left out.
    """
    if dtypes is None:
        return None
    names: list[str] = json.loads(dtypes)
    if not all(isinstance(name, str) for name in names):
        raise ValueError("an element type that is not text")
    dims, steps = json.loads(shapes), json.loads(strides) if strides else []
    steps = steps if len(steps) == len(dims) else [None] * len(dims)
    try:
        slots = [_input(*fields, list_dtype) for fields in zip(dims, names, steps, strict=True)]
    except KeyError:
        return None
    return Inputs(slots, json.loads(arguments) if arguments else [])


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors in memory."""
    return sum(tensor.bytes for tensor in tensors)


def element_bytes(dtype: str) -> int:
    """Bytes of an element of a type that the profiler names. Raises KeyError for others."""
    return 1 if dtype.startswith("c10::Float8") else _ELEMENT_BYTES[dtype]


def list_dtype(kernel: str) -> str | None:
    """Return the element type of the lists of tensors that a kernel of PyTorch works on, from its name.

    >>> list_dtype("void multi_tensor_apply_kernel<TensorListMetadata<2>, BinaryOpListAlphaFunctor<float, 2, 2, 0>>")
    'float'
    """
    if match := _COPIED_LISTS.search(kernel):
        return _TYPE_OF_BYTES.get(match[1])
    match = _LIST_KERNEL.search(kernel)
    return match[1] if match else None


def broadcast_elements(tensors: Iterable[Tensor]) -> int:
    """Elements of the result of operands that are broadcast. Raises ValueError where they do not fit."""
    shapes = [tensor.shape for tensor in tensors]
    if not shapes:
        raise ValueError("no tensors")
    elements = 1
    for axis in range(1, max(map(len, shapes)) + 1):
        sizes = {shape[-axis] for shape in shapes if len(shape) >= axis} - {1}
        if len(sizes) > 1:
            raise ValueError(f"not broadcast: {shapes}")
        elements *= sizes.pop() if sizes else 1
    return elements


def promoted_dtype(tensors: list[Tensor], values: Iterable[str]) -> str:
    """Element type of a result; tensors without dimensions count only where they are of a higher category.

    Raises ValueError where a number of unknown category decides.
    """
    ranked = [[tensor.dtype for tensor in tensors if bool(tensor.shape) is has_shape] for has_shape in (True, False)]
    strong, weak = ranked if ranked[0] else (ranked[1], [])
    category = max(map(_category, strong))
    higher = [dtype for dtype in weak if _category(dtype) > category]
    if higher:
        return max(higher, key=lambda dtype: (_category(dtype), element_bytes(dtype)))
    if category < 2 and any(value and not value.lstrip("-").isdigit() for value in values):
        raise ValueError("a number of another category")
    highest = {dtype for dtype in strong if _category(dtype) == category}
    return "float" if highest == {"c10::Half", "c10::BFloat16"} else max(highest, key=element_bytes)


_LIST_KERNEL = re.compile(r"multi_tensor_apply_kernel<.*?Functor<(float|double|c10::Half|c10::BFloat16)\b")
_COPIED_LISTS = re.compile(r"CatArrayBatchedCopy\w*<.*?OpaqueType<(\d+)u>")
_TYPE_OF_BYTES = {"1": "unsigned char", "2": "c10::Half", "4": "float", "8": "double"}
_NO_TENSOR = frozenset(
    {"", "Scalar", "ScalarList", "GenericList", "Int", "Double", "Bool", "Device", "None", "String", "Optional[Scalar]"}
)


def _input(dims: Any, dtype: str, steps: Any, list_dtype: str | None) -> Tensor | TensorList | None:
    if dtype in _NO_TENSOR:
        return None
    if dtype == _TENSOR_LIST:
        is_known = list_dtype is not None and all(isinstance(shape, list) for shape in dims)
        return tuple(_tensor(shape, list_dtype, None) for shape in dims) if is_known else None  # type: ignore[arg-type]
    return _tensor(dims, dtype, steps)


def _tensor(shape: list[int], dtype: str, steps: Any) -> Tensor:
    element_bytes(dtype)
    if not all(isinstance(size, int) for size in shape):
        raise ValueError("a shape that is no list of integers")
    stored = math.prod(shape)
    if isinstance(steps, list) and len(steps) == len(shape):
        stored = math.prod(size for size, step in zip(shape, steps, strict=True) if step != 0 or size == 0)
    return Tensor(tuple(shape), dtype, stored)


def _category(dtype: str) -> int:
    return _CATEGORIES.get(dtype, 1)  # integers
