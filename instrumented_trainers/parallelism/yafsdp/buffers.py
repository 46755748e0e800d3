"""The buffers that all units share (double buffering): allocated once, used by one unit at a time."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from instrumented_trainers.parallelism.yafsdp.communication_lane import PendingCollective
from instrumented_trainers.parallelism.yafsdp.layout import Layout


class BufferUser(Protocol):
    """What a unit must state so that buffers can be allocated for it."""

    layout: Layout
    device: torch.device
    weight_dtype: torch.dtype
    reduce_dtype: torch.dtype


U = TypeVar("U", bound=BufferUser)


@dataclass(eq=False)
class WeightSlot(Generic[U]):
    """A buffer for the unsharded weights of one unit."""

    buffer: Tensor
    owner: U | None = None
    """The unit whose weights are in the buffer or being gathered into it."""
    gather: PendingCollective | None = None
    """The all-gather into the buffer, until the compute stream waits for it."""


@dataclass(eq=False)
class GradientSlot(Generic[U]):
    """A buffer for the unsharded gradients of one unit, before and during their reduce-scatter."""

    buffer: Tensor
    owner: U | None = None
    """The unit whose gradients are being written."""
    written: set[int] = field(default_factory=set)
    """Indices of the owner's parameters whose gradients have been written."""
    reduction: tuple[U, PendingCollective] | None = None
    """The running reduce-scatter and its unit, until the result is added to the unit's gradient shard."""


@dataclass(eq=False)
class Slots(Generic[U]):
    """A weight slot and a gradient slot that go together."""

    weights: WeightSlot[U]
    gradients: GradientSlot[U]


def allocate(units: Sequence[U], count: int) -> tuple[Slots[U], ...]:
    """Return `count` slots, each large enough for any of the units. They must agree in precision."""
    if not units:
        return ()
    precisions = {(unit.weight_dtype, unit.reduce_dtype) for unit in units}
    if len(precisions) > 1:
        raise ValueError(f"YaFSDP: units that share buffers must share a precision, but there are {precisions}")
    numel = max(unit.layout.numel for unit in units)
    first = units[0]

    def buffer(dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=first.device)

    return tuple(
        Slots(WeightSlot(buffer(first.weight_dtype)), GradientSlot(buffer(first.reduce_dtype))) for _ in range(count)
    )
