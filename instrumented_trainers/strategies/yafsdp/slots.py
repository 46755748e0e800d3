"""The buffers that all units share: allocated once, lent to one unit at a time."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from instrumented_trainers.strategies.yafsdp.lane import Token

if TYPE_CHECKING:
    from instrumented_trainers.strategies.yafsdp.unit import Unit


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
