"""Matrix products that the name of a kernel states: the problem, or the part of it that is a template argument.

DeepGEMM compiles a kernel for a problem and puts what it compiled in among the template arguments: N and K as a rule, M
in some calls, 0 for what the kernel gets as an argument when it runs (deep_gemm/include/deep_gemm of
deepseek-ai/DeepGEMM: fp8_gemm.cuh, fp8_wgrad_gemm.cuh, impls/). The launch does not help: its grid is the number of
multiprocessors. Names of CUTLASS, cuBLAS, and hipBLASLt state the tile of a block only.
"""

import functools
import re
from collections.abc import Mapping
from typing import NamedTuple

from tracekit.conventions import devices

TILE_ONLY = "no operator recorded; the kernel's name has its tile, not the problem"
_MISSING = "the kernel's name lacks {}"


class Product(NamedTuple):
    """The dimensions of a product by the kernel's name, None for what it lacks, and its element type (FP8 …)."""

    dims: Mapping[str, int | None]
    dtype: str | None

    @property
    def flops(self) -> float | None:
        """Return the floating-point operations; None where a dimension is not known."""
        flops = 2.0
        for size in self.dims.values():
            if size is None:
                return None
            flops *= size
        return flops


@functools.lru_cache(maxsize=4096)
def product(name: str) -> Product | None:
    """Return the product that a kernel's name states, or a part of it; None for a name that states none.

    >>> product("void deep_gemm::fp8_gemm_kernel<4096u, 7168u, 128u, (deep_gemm::GemmType)0>(float*)").dims
    {'M': None, 'N': 4096, 'K': 7168}
    """
    match = _KERNEL.match(name)
    if match is None:
        return None
    kernel, arguments = match["kernel"], _arguments(name[match.end() :])
    first = next((first for pattern, first in _FIRST if re.fullmatch(pattern, kernel)), None)
    numbers = [int(number[1]) for text in arguments if (number := _NUMBER.fullmatch(text))]
    if first is None or len(numbers) < len(first):
        return None
    stated = {dim: size or None for dim, size in zip(first, numbers, strict=False)}
    dims = {dim: stated.get(dim) for dim in _DIMS}
    if "S" in first or any(kind and kind[1] != _NORMAL for text in arguments if (kind := _GEMM_TYPE.fullmatch(text))):
        dims[_GROUPS] = None
    return Product(dims, next((dtype for mark, dtype in _DTYPES.items() if mark in kernel), None))


def unknown_part(name: str) -> str | None:
    """Return why the operations of a kernel that states a part of its product are not known; None for other kernels.

    >>> unknown_part("void deep_gemm::fp8_gemm_kernel<4096u, 7168u, 128u, (deep_gemm::GemmType)0>(float*)")
    "the kernel's name lacks M"
    """
    stated = product(name)
    missing = [dim for dim, size in stated.dims.items() if size is None] if stated else []
    return _MISSING.format(" and ".join(missing)) if missing else None


def has_tile_only(name: str) -> bool:
    """Return whether a name is that of a library's matrix product, of which it states the tile only."""
    return bool(_TILED.search(name)) and product(name) is None


_DIMS = ("M", "N", "K")
_GROUPS = "the rows of its groups"
_KERNEL = re.compile(r"(?:void )?deep_gemm::(?:\w+::)*(?P<kernel>\w+)<")
_FIRST: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"fp8_gemm_kernel", ("N", "K")),
    (r"fp8_wgrad_gemm_kernel", ("M", "N")),
    (r"sm90_fp8_gemm_1d[12]d_impl|sm(90|100)_bf16_gemm_impl", ("M", "N", "K")),
    (r"sm100_fp8_fp4_gemm_1d1d_impl", ("gran_a", "gran_b", "M", "N", "K")),
    (r"sm(90|100)_bmn_bnk_mn_gemm_impl", ("M", "N", "K", "S")),
    (r"sm(90|100)_tf32_hc_prenorm_gemm_impl", ("N", "K")),
)
"""Kernels by what their first integers among the template arguments are; S stands for a batch that is not stated."""
_NUMBER = re.compile(r"(?:\(unsigned int\)\s*)?(\d{1,15})u?")
_GEMM_TYPE = re.compile(r"\(deep_gemm::GemmType\)\s*(\d+)")
_NORMAL = "0"
_DTYPES = {"fp8": devices.FP8, "bf16": devices.BF16, "tf32": devices.TF32, "bmn_bnk": devices.BF16}
_TILED = re.compile(
    r"cutlass_\d+_\w*(?:gemm|tensorop|simt)\w*_\d+x\d+|nvjet_\w+?_\d+x\d+_|_tilesize\d+x\d+x\d+|Cijk_\w*_MT\d+x\d+|"
    r"(?:volta|turing|ampere|sm\d\d)_\w*gemm\w*_\d+x\d+"
)


def _arguments(text: str) -> list[str]:
    """Return the arguments of a template up to its closing bracket; what is nested in them stays text."""
    arguments, depth, begun = [], 0, 0
    for index, letter in enumerate(text):
        if letter in "<(":
            depth += 1
        elif depth and letter in ">)":
            depth -= 1
        elif letter in ",>":
            arguments.append(text[begun:index].strip())
            begun = index + 1
            if letter == ">":
                break
    return arguments
