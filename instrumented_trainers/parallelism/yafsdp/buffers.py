"""The buffers that all units share (double buffering): allocated once, used by one unit at a time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from instrumented_trainers.parallelism.yafsdp.communication_lane import PendingCollective
from instrumented_trainers.parallelism.yafsdp.flat_parameters import UnitParameter

_ALIGNMENT = 256
"""Parts of a buffer start at a multiple of this many bytes, as what CUDA's allocator gives does."""


class BufferUser(Protocol):
    """What a unit must state so that buffers can be allocated for it."""

    device: torch.device

    @property
    def weight_bytes(self) -> int:
        """Size of the buffer for the unsharded weights."""

    @property
    def gradient_bytes(self) -> int:
        """Size of the buffer for the unsharded gradients."""


U = TypeVar("U", bound=BufferUser)


@dataclass(eq=False)
class WeightSlot(Generic[U]):
    """A buffer for the unsharded weights of one unit, in bytes."""

    buffer: Tensor
    owner: U | None = None
    """The unit whose weights are in the buffer or being gathered into it."""
    gather: PendingCollective | None = None
    """The all-gather into the buffer, until the compute stream waits for it."""


@dataclass(eq=False)
class GradientSlot(Generic[U]):
    """A buffer for the unsharded gradients of one unit, in bytes, before and during their reduce-scatter."""

    buffer: Tensor
    owner: U | None = None
    """The unit whose gradients are being written."""
    written: set[UnitParameter] = field(default_factory=set)
    """The owner's parameters whose gradients have been written."""
    reduction: tuple[U, PendingCollective] | None = None
    """The running reduce-scatter and its unit, until the result is added to the unit's gradient shard."""


@dataclass(eq=False)
class Slots(Generic[U]):
    """A weight slot and a gradient slot that go together."""

    weights: WeightSlot[U]
    gradients: GradientSlot[U]


def regions(sizes: Sequence[int]) -> list[slice]:
    """Slices of a buffer for parts of these sizes, one after the other, in bytes."""
    slices, end = [], 0
    for size in sizes:
        start = math.ceil(end / _ALIGNMENT) * _ALIGNMENT
        end = start + size
        slices.append(slice(start, end))
    return slices


def allocate(units: Sequence[U], count: int) -> tuple[Slots[U], ...]:
    """Return `count` slots, each large enough for any of the units."""
    if not units:
        return ()
    weights, gradients = max(unit.weight_bytes for unit in units), max(unit.gradient_bytes for unit in units)
    device = units[0].device
    return tuple(
        Slots(WeightSlot(_zeros(weights, device)), GradientSlot(_zeros(gradients, device))) for _ in range(count)
    )


def grow(slot: GradientSlot[U], size: int) -> None:
    """Make the slot's buffer at least as large: weights that were frozen when it was allocated are trained now."""
    if slot.buffer.numel() < size:
        slot.buffer = _zeros(size, slot.buffer.device)


@torch.inference_mode(mode=False)
def _zeros(size: int, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=device)
