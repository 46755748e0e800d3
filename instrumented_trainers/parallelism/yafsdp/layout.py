"""Where each parameter lies in a unit's flat tensor and in each rank's shard of it. Pure arithmetic, in elements."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

ALIGNMENT = 8
"""Parameters and shards start at a multiple of this many elements: of 16 bytes for two-byte elements.

Matrix products and vectorized loads are fastest from such addresses.
"""

Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""An axis-aligned part of a tensor: its offsets and its sizes, one of each per dim."""


@dataclass(frozen=True)
class Part:
    """What one rank's shard holds of one parameter: `shard[start:stop]` is the flat parameter from `origin` on."""

    start: int
    stop: int
    origin: int


@dataclass(frozen=True)
class Layout:
    """Parameters one after the other, each padded, cut into equal shards, one per rank."""

    shapes: tuple[torch.Size, ...]
    offsets: tuple[int, ...]
    numel: int
    """Length of the flat tensor with its padding."""
    world_size: int

    @classmethod
    def of(cls, shapes: Sequence[torch.Size], world_size: int) -> "Layout":
        """Return the layout of parameters with these shapes, in this order, over `world_size` ranks."""
        offsets, end = [], 0
        for shape in shapes:
            offsets.append(math.ceil(end / ALIGNMENT) * ALIGNMENT)
            end = offsets[-1] + shape.numel()
        step = world_size * ALIGNMENT
        end = max(end, 1) if shapes else 0  # parameters without elements have a gradient, too
        return cls(tuple(shapes), tuple(offsets), math.ceil(end / step) * step, world_size)

    @property
    def used_numel(self) -> int:
        """End of the last parameter."""
        return self.offsets[-1] + self.shapes[-1].numel() if self.shapes else 0

    @property
    def shard_numel(self) -> int:
        """Return the length of one rank's shard."""
        return self.numel // self.world_size

    def span(self, index: int) -> slice:
        """Slice of the flat tensor that is a parameter."""
        return slice(self.offsets[index], self.offsets[index] + self.shapes[index].numel())

    def part(self, index: int, rank: int) -> Part:
        """Part of a parameter that the shard of `rank` holds; start equals stop where it holds nothing."""
        first, last = rank * self.shard_numel, (rank + 1) * self.shard_numel
        span = self.span(index)
        start = min(max(span.start, first), last)
        stop = max(min(span.stop, last), start)
        return Part(start - first, stop - first, start - span.start if stop > start else 0)


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that together are the elements [start, stop) of a row-major tensor, in their order.

    At most two per dim but the first, which has at most one more.

    >>> list(boxes((3, 4), 2, 9))
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if stop <= start:
        return
    if len(shape) < 2:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    row = math.prod(shape[1:])
    first_whole, past_whole = math.ceil(start / row), stop // row
    if first_whole > past_whole:
        yield from _within_row(shape, past_whole, start, stop)
        return
    yield from _within_row(shape, first_whole - 1, start, first_whole * row)
    if past_whole > first_whole:
        rest = tuple(shape[1:])
        yield (first_whole, *(0 for _ in rest)), (past_whole - first_whole, *rest)
    yield from _within_row(shape, past_whole, past_whole * row, stop)


def _within_row(shape: Sequence[int], index: int, start: int, stop: int) -> Iterator[Box]:
    origin = index * math.prod(shape[1:])
    for offsets, sizes in boxes(shape[1:], start - origin, stop - origin):
        yield (index, *offsets), (1, *sizes)
