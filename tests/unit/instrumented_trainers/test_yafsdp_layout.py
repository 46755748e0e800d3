"""Shards and boxes against what a flat tensor really holds."""

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from instrumented_trainers.parallelism.yafsdp.layout import ALIGNMENT, Layout, boxes

shapes = st.lists(st.integers(1, 5), max_size=4).map(torch.Size)


@given(st.lists(shapes, max_size=6), st.integers(1, 5))
def test_shards_hold_every_element_once_and_in_order(parameters: list[torch.Size], world_size: int) -> None:
    layout = Layout.of(parameters, world_size)
    flat = np.full(layout.numel, -1)
    for index in range(len(parameters)):
        flat[layout.span(index)] = np.arange(parameters[index].numel()) + 1000 * index
    shards = flat.reshape(world_size, layout.shard_numel)

    for index, shape in enumerate(parameters):
        elements_by_rank = []
        for rank in range(world_size):
            part = layout.part(index, rank)
            elements = shards[rank][part.start : part.stop].tolist()
            assert not elements or elements[0] == 1000 * index + part.origin
            elements_by_rank += elements
        assert elements_by_rank == list(range(1000 * index, 1000 * index + shape.numel()))


@given(st.lists(shapes, max_size=6), st.integers(1, 5))
def test_shards_are_equal_aligned_and_padded_by_less_than_a_step(parameters: list[torch.Size], world_size: int) -> None:
    layout = Layout.of(parameters, world_size)
    assert layout.shard_numel * world_size == layout.numel
    assert layout.shard_numel % ALIGNMENT == 0
    assert all(offset % ALIGNMENT == 0 for offset in layout.offsets)
    padded = sum(-(-shape.numel() // ALIGNMENT) * ALIGNMENT for shape in parameters)
    assert 0 <= padded - layout.used_numel < ALIGNMENT
    assert 0 <= layout.numel - layout.used_numel < world_size * ALIGNMENT


@given(shapes, st.data())
def test_boxes_are_the_range_in_its_order(shape: torch.Size, data: st.DataObject) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    whole = np.arange(numel).reshape(shape)

    found = []
    for offsets, sizes in boxes(shape, start, stop):
        box = whole[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))]
        assert box.size > 0
        found += box.ravel().tolist()
    assert found == list(range(start, stop))


@given(shapes, st.data())
def test_boxes_are_few(shape: torch.Size, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, math.prod(shape)))
    stop = data.draw(st.integers(start, math.prod(shape)))
    assert len(list(boxes(shape, start, stop))) <= max(1, 2 * len(shape) - 1)
