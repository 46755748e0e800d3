"""How far a value computed over ranks is from that of one process, and whether a constant factor explains it."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_EXPLAINED = 0.01
"""A factor explains a difference that it leaves at most this share of: rounding adds far less, another error more."""
_NEAR = 1e-3
FP64_TOLERANCE, FP64_FLOOR = 1e-9, 1e-3
"""In fp64, rounding is about 1e-16, and errors of a strategy are above 1e-6. The floor is for values that are zero but
for rounding, such as the gradient of a bias that the next norm subtracts: it is a share of the largest value."""
_ROUNDINGS, _GROWTH, _MOST = 1000, 10, 0.25
"""Sums over a thousand roundings, each step multiplies what differs, and beyond a quarter nothing is explained."""


@dataclass(frozen=True)
class Tolerance:
    """What rounding explains: a relative difference of values that count as at least a share of the largest one."""

    relative: float
    floor_ratio: float


def tolerance(dtype: torch.dtype, step: int) -> Tolerance:
    """Tolerance of a step, counted from 0, where the coarsest numbers are of this dtype."""
    if dtype is torch.float64:
        return Tolerance(FP64_TOLERANCE, FP64_FLOOR)
    return Tolerance(min(_ROUNDINGS * torch.finfo(dtype).eps * _GROWTH**step, _MOST), 1.0)


@dataclass(frozen=True)
class Difference:
    """The largest difference relative to the value's scale, and the factor that explains it, if there is one."""

    relative: float
    ratio: float | None = None


def difference(value: Tensor, reference: Tensor, *, least_scale: float = 0.0) -> Difference:
    """Difference from the reference. It is infinite for another shape, and where only one of them is finite."""
    if value.shape != reference.shape:
        return Difference(math.inf)
    value, reference = value.detach().double().flatten(), reference.detach().double().flatten()
    if not value.numel():
        return Difference(0.0)
    is_finite = reference.isfinite()
    if not torch.equal(value.isfinite(), is_finite):
        return Difference(math.inf)
    value, reference = value[is_finite], reference[is_finite]
    if not value.numel():
        return Difference(0.0)
    scale = max(float(reference.abs().max()), least_scale)
    largest = float((value - reference).abs().max())
    if largest == 0:
        return Difference(0.0)
    relative = largest / scale if scale else math.inf
    square = float(reference @ reference)
    ratio = float(value @ reference) / square if square else math.nan
    remainder = float((value - ratio * reference).abs().max()) / scale if square else math.inf
    return Difference(relative, ratio if remainder <= _EXPLAINED * relative else None)


def is_scale(ratio: float | None, *, elements: int, ranks: int) -> bool:
    """Whether the difference is one of scale. Of a single number any factor is one, so it must be one of the ranks."""
    if ratio is None:
        return False
    return elements > 1 or any(abs(ratio / factor - 1) < _NEAR for factor in (ranks, 1 / ranks))
