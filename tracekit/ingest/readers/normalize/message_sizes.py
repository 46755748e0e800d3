"""Element types and message sizes of collectives, by the shapes of an op's inputs and the names of kernels."""

import math
import re
from collections.abc import Iterable
from functools import lru_cache

from tracekit.ingest import untrusted_json

_ITEM_BYTES = {
    "double": 8, "float64": 8, "long": 8, "int64": 8, "float": 4, "float32": 4, "int": 4, "int32": 4,
    "half": 2, "float16": 2, "bfloat16": 2, "c10::half": 2, "c10::bfloat16": 2, "short": 2, "byte": 1, "int8": 1,
    "char": 1, "signed char": 1, "unsigned char": 1, "uint8": 1, "bool": 1, "long int": 8,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "c10::float8_e4m3fn": 1, "c10::float8_e5m2": 1, "int16": 2,
}  # fmt: skip
# NCCL names its old kernels …_Sum_float(…) and its new ones …_Sum_f32_….
_KERNEL_DTYPE = re.compile(
    r"_(?:sum|prod|min|max|minmax|avg|premulsum|sumpostdiv)_(b?f16|f32|f64|f8e4m3|f8e5m2|[iu](?:8|32|64)|u?int\d+_t|float|double|"
    r"half|__nv_bfloat16)(?=_|\(|$)",
    re.I,
)
_DTYPE_NAMES = {
    "bf16": "BFloat16", "f16": "Half", "f32": "Float", "f64": "Double", "__nv_bfloat16": "BFloat16", "half": "Half",
    "float": "Float", "double": "Double", "f8e4m3": "Float8_e4m3fn", "f8e5m2": "Float8_e5m2",
}  # fmt: skip
# Gathers and sends move bytes of any type; NCCL runs them as int8, so the kernel name has no dtype.
_TYPED = ("all_reduce", "reduce_scatter", "reduce")
# Of these, output and input differ.
_UNLIKE = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
_NO_TENSOR = ("", "Scalar", "ScalarList")

Shapes = tuple[str, str, bool]
"""Input dims and types as JSON, and whether output and input come first among them; else it is the input alone."""


def item_bytes(dtype: str | None) -> int | None:
    """Return the size of one element; None where the type is not known."""
    return _ITEM_BYTES.get(str(dtype).lower())


def dtype_by_name(op: str | None, kernel: str) -> str | None:
    """Return the element type in a kernel's name; None if the op moves any type as bytes."""
    return _kernel_dtype(kernel) if op in _TYPED else None


def by_shapes(
    op: str | None, dtype: str | None, candidates: Iterable[Shapes]
) -> tuple[str | None, int | None, int | None]:
    """Return dtype, sent and received bytes by the first of `candidates` that gives a size.

    `dtype` is the fallback where no shapes have a type: lists of tensors have none.
    """
    shapes = list(candidates)
    dtype = next((kind for _, kinds, _ in shapes if (kind := _dtype(kinds))), dtype)
    item = item_bytes(dtype)
    for dims, kinds, both_sides in shapes:
        sent, received = _counts(op, dims, kinds, both_sides)
        if item is not None and (sent is not None or received is not None):
            return dtype, None if sent is None else item * sent, None if received is None else item * received
    return dtype, None, None


@lru_cache(maxsize=4096)
def _counts(op: str | None, dims: str, kinds: str, both_sides: bool) -> tuple[int | None, int | None]:
    first, second = (_elements(*tensor) for tensor in zip(_two(dims), _two(kinds), strict=True))
    if op not in _UNLIKE:
        return first, first
    return (second, first) if both_sides else (first, None)


@lru_cache(maxsize=4096)
def _dtype(kinds: str) -> str | None:
    return next((kind for kind in _two(kinds) if isinstance(kind, str) and item_bytes(kind) is not None), None)


def _two(listed: str) -> list[object]:
    try:
        parsed = untrusted_json.parse(listed)
    except ValueError:
        parsed = None
    return [*(parsed if isinstance(parsed, list) else []), None, None][:2]


def _elements(shape: object, kind: object) -> int | None:
    """Number of elements of a tensor, or of all tensors of a list; None for what is none or has no shape."""
    if kind in _NO_TENSOR or not isinstance(shape, list):
        return None
    if not shape:
        return 1 if isinstance(kind, str) and item_bytes(kind) is not None else None
    return _product(shape)


def _product(shape: object) -> int | None:
    if isinstance(shape, list) and all(isinstance(n, int) for n in shape):
        return math.prod(shape)
    counts = [_product(inner) for inner in shape] if isinstance(shape, list) else [None]
    return None if None in counts else sum(count for count in counts if count is not None)


@lru_cache(maxsize=4096)
def _kernel_dtype(name: str) -> str | None:
    match = _KERNEL_DTYPE.search(name.partition("(")[0])
    return _DTYPE_NAMES.get(match[1].lower(), match[1]) if match else None
