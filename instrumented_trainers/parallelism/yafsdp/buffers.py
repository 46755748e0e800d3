"""The buffers that all units share: allocated once, lent to one unit at a time."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from instrumented_trainers.parallelism.yafsdp.communication_lane import Token

if TYPE_CHECKING:
    from instrumented_trainers.parallelism.yafsdp.unit import Unit


@dataclass(eq=False)
class WeightSlot:
    """Room for the whole weights of one unit."""

    buffer: Tensor
    owner: "Unit | None" = None
    """The unit whose weights are in the buffer or on their way into it."""
    arriving: Token | None = None
    """The gather that fills the buffer, until the computation was made to wait for it."""


@dataclass(eq=False)
class GradientSlot:
    """Room for the whole gradients of one unit, before and while they are summed over the ranks."""

    buffer: Tensor
    owner: "Unit | None" = None
    """The unit whose gradients are being written."""
    written: set[int] = field(default_factory=set)
    """Indices of the owner's parameters whose gradients are there."""
    leaving: "tuple[Unit, Token] | None" = None
    """The unit whose sum is on its way, until it was added to the unit's gradient shard."""


@dataclass(eq=False)
class Slots:
    """A weight slot and a gradient slot that go together."""

    weights: WeightSlot
    gradients: GradientSlot


def allocate(units: "Sequence[Unit]", count: int) -> tuple[Slots, ...]:
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
