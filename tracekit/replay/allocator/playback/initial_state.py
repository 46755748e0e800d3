"""The allocator state before the first event of a history, reconstructed by running the history backwards."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import polars as pl

from tracekit.replay.allocator import BlockState, SegmentState, Settings
from tracekit.replay.allocator.settings import LARGE_SEGMENT_BYTES, SMALL_BYTES, SMALL_SEGMENT_BYTES, UNLIMITED

_NEVER = 1 << 62
_Hints: TypeAlias = Sequence[tuple[int, int]]
"""Addresses at which blocks were allocated, in order, each with the index of its first allocation."""


@dataclass(frozen=True)
class _InitialBlock:
    """A block allocated at the start; its size is None if it is not in the final snapshot."""

    address: int
    requested_bytes: int
    state: str
    bytes: int | None
    until: int  # the event by which it was freed


def initial_segments(
    events: pl.DataFrame, final: Sequence[SegmentState], settings: Settings
) -> tuple[SegmentState, ...]:
    """Return the segments before the first of `events` (of one device, with their index), which led to `final`.

    A block allocated at the start is freed without being allocated before, or is untouched until the end. If the final
    snapshot does not contain it, its size follows from the request and from the block behind it.
    """
    initial = _initial_blocks(events, final)
    addresses = [block.address for block in initial]
    allocs = events.filter(pl.col("action") == "alloc").group_by("address").agg(pl.col("index").min()).sort("address")
    hints = allocs.rows()
    segments_at_start = []
    for segment in _segments_before(events, final):
        first = bisect_left(addresses, segment.address)
        past = bisect_left(addresses, segment.address + segment.bytes)
        segments_at_start.append(segment._replace(blocks=tuple(_blocks(segment, initial[first:past], hints, settings))))
    return tuple(segments_at_start)


def _initial_blocks(events: pl.DataFrame, final: Sequence[SegmentState]) -> list[_InitialBlock]:
    moves = events.filter(pl.col("action").is_in(["alloc", "free_requested", "free_completed"]))
    first = moves.group_by("address", maintain_order=True).agg(
        pl.col("action", "bytes", "index").first(), (pl.col("action") == "alloc").any().alias("again")
    )
    seen = set(first["address"].to_list())
    sizes = {block.address: block for segment in final for block in segment.blocks if block.state != "free"}
    initial = [
        _InitialBlock(b.address, b.requested_bytes, b.state, b.bytes, _NEVER)
        for b in sizes.values()
        if b.address not in seen
    ]
    for address, action, size, index, again in first.filter(pl.col("action") != "alloc").iter_rows():
        block_at_end = None if again else sizes.get(address)
        state = "allocated" if action == "free_requested" else "pending"
        initial.append(_InitialBlock(address, size, state, block_at_end.bytes if block_at_end else None, index))
    return sorted(initial, key=lambda block: block.address)


def _blocks(
    segment: SegmentState, initial: Sequence[_InitialBlock], hints: _Hints, settings: Settings
) -> Iterator[BlockState]:
    """Yield the blocks of a segment, including the free ones in between."""
    cursor, end = segment.address, segment.address + segment.bytes
    edge = _InitialBlock(end, 0, "free", 0, _NEVER)
    for block, following in pairwise([*initial, edge]):
        size = block.bytes or _size(segment, block, following.address - block.address, hints, settings)
        if block.address > cursor:
            yield BlockState(cursor, block.address - cursor, "free")
        yield BlockState(block.address, size, block.state, block.requested_bytes)
        cursor = block.address + size
    if cursor < end:
        yield BlockState(cursor, end - cursor, "free")


def _size(segment: SegmentState, block: _InitialBlock, room: int, hints: _Hints, settings: Settings) -> int:
    size = settings.round_up(block.requested_bytes)
    if segment.small or segment.expandable or size >= room:
        return min(size, room)
    # A large block is split only if more than 1 MiB remains; blocks of max_split_size or more are never split.
    if room - size <= SMALL_BYTES or (settings.max_split_bytes < UNLIMITED and size >= settings.max_split_bytes):
        return room
    # A block allocated shortly behind it, while it was allocated, shows where it ends.
    end = block.address + size
    first, past = bisect_left(hints, (end, 0)), bisect_left(hints, (end + SMALL_BYTES + 1, 0))
    return next((address - block.address for address, index in hints[first:past] if index < block.until), size)


def _segments_before(events: pl.DataFrame, final: Sequence[SegmentState]) -> list[SegmentState]:
    fixed = {segment.address: segment for segment in final if not segment.expandable}
    ranges = [segment for segment in final if segment.expandable]
    moves = events.filter(pl.col("action").str.starts_with("segment_")).select("action", "address", "bytes", "stream")
    for action, address, size, stream in reversed(moves.rows()):
        if action == "segment_alloc":
            fixed.pop(address, None)
        elif action == "segment_free":
            small = size == SMALL_SEGMENT_BYTES  # all small segments, and no large one, have this size
            fixed[address] = SegmentState(address, size, stream, small, 0, expandable=False, blocks=())
        elif action == "segment_map":
            ranges = [part for segment in ranges for part in _without(segment, address, size)]
        else:
            ranges = _join_ranges([*ranges, _like_neighbour(address, size, stream, [*ranges, *final])])
    return sorted([*fixed.values(), *ranges])


def _without(segment: SegmentState, address: int, size: int) -> Iterator[SegmentState]:
    end = segment.address + segment.bytes
    if address >= end or address + size <= segment.address:
        yield segment
        return
    if address > segment.address:
        yield segment._replace(bytes=address - segment.address)
    if address + size < end:
        yield segment._replace(address=address + size, bytes=end - address - size)


def _like_neighbour(address: int, size: int, stream: int, segments: Sequence[SegmentState]) -> SegmentState:
    """Return a range with the attributes of the nearest expandable segment on its stream."""
    near = [other for other in segments if other.expandable and other.stream == stream]
    nearest = min(near, key=lambda other: abs(other.address - address), default=None)
    small = size % LARGE_SEGMENT_BYTES != 0 if nearest is None else nearest.small
    return SegmentState(address, size, stream, small, nearest.pool if nearest else 0, expandable=True, blocks=())


def _join_ranges(ranges: Sequence[SegmentState]) -> list[SegmentState]:
    joined: list[SegmentState] = []
    for segment in sorted(ranges):
        last = joined[-1] if joined else None
        if last is not None and last.address + last.bytes == segment.address and last[2:5] == segment[2:5]:
            joined[-1] = last._replace(bytes=last.bytes + segment.bytes)
        else:
            joined.append(segment)
    return joined
