"""What the allocator held before the first event of a history, found by running the history backwards."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import polars as pl

from tracekit.replay.allocator import BlockState, SegmentState, Settings
from tracekit.replay.allocator.settings import LARGE_SEGMENT_BYTES, SMALL_BYTES, SMALL_SEGMENT_BYTES, UNLIMITED

_NEVER = 1 << 62


@dataclass(frozen=True)
class _Held:
    """A block that was held at the start; its size is None where no snapshot of it exists."""

    address: int
    requested_bytes: int
    state: str
    bytes: int | None
    until: int  # the event by which it was freed


def state(events: pl.DataFrame, final: Sequence[SegmentState], settings: Settings) -> tuple[SegmentState, ...]:
    """Return the segments before the first of `events` (one device's, with their index), after which came `final`.

    What the program holds at the start is freed without ever being allocated, or is there at the end untouched. How
    large a block was that no snapshot shows follows from the request, and from what lay behind it.
    """
    segments = _segments_before(events, final)
    if not segments:
        return ()
    held = _held(events, final)
    places = [block.address for block in held]
    taken = events.filter(pl.col("action") == "alloc").group_by("address").agg(pl.col("index").min()).sort("address")
    hints = _Hints(taken["address"].to_list(), taken["index"].to_list())
    found = []
    for segment in segments:
        first = bisect_left(places, segment.address)
        past = bisect_left(places, segment.address + segment.bytes)
        found.append(segment._replace(blocks=tuple(_blocks(segment, held[first:past], hints, settings))))
    return tuple(found)


@dataclass(frozen=True)
class _Hints:
    """Where blocks were handed out, and by which event first."""

    address: list[int]
    index: list[int]

    def behind(self, end: int, until: int) -> int | None:
        """Return the first address from `end` on, near it, at which a block was handed out before `until`."""
        first, past = bisect_left(self.address, end), bisect_right(self.address, end + SMALL_BYTES)
        return next((self.address[i] for i in range(first, past) if self.index[i] < until), None)


def _held(events: pl.DataFrame, final: Sequence[SegmentState]) -> list[_Held]:
    moves = events.filter(pl.col("action").is_in(["alloc", "free_requested", "free_completed"]))
    first = moves.group_by("address", maintain_order=True).agg(
        pl.col("action", "bytes", "index").first(), (pl.col("action") == "alloc").any().alias("again")
    )
    seen = set(first["address"].to_list())
    sizes = {block.address: block for segment in final for block in segment.blocks if block.state != "free"}
    held = [
        _Held(b.address, b.requested_bytes, b.state, b.bytes, _NEVER) for b in sizes.values() if b.address not in seen
    ]
    for address, action, size, index, again in first.filter(pl.col("action") != "alloc").iter_rows():
        told = None if again else sizes.get(address)
        known = "allocated" if action == "free_requested" else "pending"
        held.append(_Held(address, size, known, told.bytes if told else None, index))
    return sorted(held, key=lambda block: block.address)


def _blocks(segment: SegmentState, held: Sequence[_Held], hints: _Hints, settings: Settings) -> Iterator[BlockState]:
    """Yield the blocks of a segment, the free ones between those that were held too."""
    at, end = segment.address, segment.address + segment.bytes
    edge = _Held(end, 0, "free", 0, _NEVER)
    for block, following in pairwise([*held, edge]):
        size = block.bytes or _size(segment, block, following.address - block.address, hints, settings)
        if block.address > at:
            yield BlockState(at, block.address - at, "free")
        yield BlockState(block.address, size, block.state, block.requested_bytes)
        at = block.address + size
    if at < end:
        yield BlockState(at, end - at, "free")


def _size(segment: SegmentState, block: _Held, room: int, hints: _Hints, settings: Settings) -> int:
    size = settings.rounded(block.requested_bytes)
    if segment.small or segment.expandable or size >= room:
        return min(size, room)
    # A large block is split only where more than 1 MiB is left; one too large to split never is.
    if room - size <= SMALL_BYTES or (settings.max_split_bytes < UNLIMITED and size >= settings.max_split_bytes):
        return room
    behind = hints.behind(block.address + size, block.until)
    return size if behind is None else behind - block.address


def _segments_before(events: pl.DataFrame, final: Sequence[SegmentState]) -> list[SegmentState]:
    known = {segment.address: segment for segment in final if not segment.expandable}
    ranges = [segment for segment in final if segment.expandable]
    moves = events.filter(pl.col("action").str.starts_with("segment_")).select("action", "address", "bytes", "stream")
    for action, address, size, stream in reversed(moves.rows()):
        if action == "segment_alloc":
            known.pop(address, None)
        elif action == "segment_free":
            small = size == SMALL_SEGMENT_BYTES  # of no other size are small ones, and no large one is of this
            known[address] = SegmentState(address, size, stream, small, 0, expandable=False, blocks=())
        elif action == "segment_map":
            ranges = [part for segment in ranges for part in _without(segment, address, size)]
        else:
            ranges = _joined([*ranges, _like_neighbour(address, size, stream, [*ranges, *final])])
    return sorted([*known.values(), *ranges])


def _without(segment: SegmentState, address: int, size: int) -> Iterator[SegmentState]:
    end = segment.address + segment.bytes
    if address >= end or address + size <= segment.address:
        yield segment
        return
    if address > segment.address:
        yield segment._replace(bytes=address - segment.address)
    if address + size < end:
        yield segment._replace(address=address + size, bytes=end - address - size)


def _like_neighbour(address: int, size: int, stream: int, others: Sequence[SegmentState]) -> SegmentState:
    """Return a range that is of the kind of the nearest expandable one on its stream."""
    near = [other for other in others if other.expandable and other.stream == stream]
    nearest = min(near, key=lambda other: abs(other.address - address), default=None)
    small = size % LARGE_SEGMENT_BYTES != 0 if nearest is None else nearest.small
    return SegmentState(address, size, stream, small, nearest.pool if nearest else 0, expandable=True, blocks=())


def _joined(ranges: Sequence[SegmentState]) -> list[SegmentState]:
    found: list[SegmentState] = []
    for segment in sorted(ranges):
        last = found[-1] if found else None
        if last is not None and last.address + last.bytes == segment.address and last[2:5] == segment[2:5]:
            found[-1] = last._replace(bytes=last.bytes + segment.bytes)
        else:
            found.append(segment)
    return found
