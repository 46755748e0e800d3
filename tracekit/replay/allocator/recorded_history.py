"""The recorded allocator history of one device, prepared for replay: requests, frees and releases."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import polars as pl

from tracekit.model.sweep_line import Ints
from tracekit.model.trace import MemorySnapshot
from tracekit.replay.allocator.model import BlockState, SegmentEvent, SegmentState
from tracekit.replay.allocator.settings import (
    LARGE_SEGMENT_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    UNLIMITED,
    Settings,
)

ALLOC, REQUEST, COMPLETE, RELEASE = range(4)
CODES = {"alloc": ALLOC, "free_requested": REQUEST, "free_completed": COMPLETE}
SEGMENT_ALLOCATIONS = ("segment_alloc", "segment_map")
SEGMENT_FREES = ("segment_free", "segment_unmap")
EMPTY_CACHE, RETRY, SOME = "empty_cache", "retry", "some"
COMMON = "0:0"
_COLUMNS = ("action", "address", "bytes", "stream", "pool", "at_ns", "stack")
_STATES = {"active_allocated": "allocated", "inactive": "free"}
_NEVER = 1 << 62
_Hints: TypeAlias = Sequence[tuple[int, int]]
"""Addresses at which blocks were allocated, in order, each with the index of its first allocation."""


@dataclass(frozen=True, eq=False)
class History:
    """The history of one device. Arrays have one item per request, free or release of memory, in order."""

    device: int
    settings: Settings
    action: Ints
    address: Ints
    bytes: Ints
    stream: Ints
    pool: Ints
    at_ns: Ints
    stack: Ints
    """Call stack number in the snapshot; -1 if there is none."""
    releases: tuple[tuple[str, tuple[int, ...]], ...]
    """Per RELEASE the reason (EMPTY_CACHE, RETRY, or SOME: only the listed segments) and the released addresses."""
    segment_allocations: tuple[SegmentEvent, ...]
    segment_frees: tuple[SegmentEvent, ...]
    peak_reserved_bytes: int
    start: tuple[SegmentState, ...]
    """Segments before the first event; empty if the history begins with the first allocation."""
    final: tuple[SegmentState, ...]
    start_reserved_bytes: int = 0
    """Reserved bytes before the first event, if more than the segments of `start`."""
    static_bytes: int = 0
    """Bytes allocated throughout without any event; 0 with a snapshot."""
    inferred: bool = False
    """Whether the initial state was inferred from addresses that occur later."""
    not_replayable: str | None = None
    """Why the history cannot be replayed; None if it can."""

    @property
    def retries(self) -> int:
        """Return the number of allocation retries in the history (cudaMalloc failed, cache flushed)."""
        return sum(reason == RETRY for reason, _ in self.releases)

    def until(self, count: int) -> "History":
        """Return the history of the first `count` items; its final state is not known, so `final` is empty."""
        columns: dict[str, Any] = {name: getattr(self, name)[:count] for name in _COLUMNS}
        releases = self.releases[: int((columns["action"] == RELEASE).sum())]
        return replace(self, **columns, releases=releases, final=())

    def with_request(self, requested_bytes: int, stream: int) -> "History":
        """Return the history followed by one more request from the common pool."""
        address = int(self.address.max(initial=0)) + (1 << 40)
        at_ns = int(self.at_ns[-1]) if len(self.at_ns) else 0
        item = {
            "action": ALLOC, "address": address, "bytes": requested_bytes, "stream": stream, "pool": 0, "at_ns": at_ns,
            "stack": -1,
        }  # fmt: skip
        columns: dict[str, Any] = {name: np.append(getattr(self, name), item[name]) for name in _COLUMNS}
        return replace(self, **columns)

    def without_events(self) -> "History":
        """Return a history without events, in the final state throughout."""
        columns = {name: getattr(self, name)[:0] for name in _COLUMNS}
        reserved_bytes = sum(segment.bytes for segment in self.final)
        empty = replace(self, **columns, releases=(), segment_allocations=(), segment_frees=(), start=self.final)
        return replace(empty, peak_reserved_bytes=reserved_bytes)


def from_snapshot(snapshot: MemorySnapshot, device: int) -> History:
    """Return the history of one device of a snapshot."""
    settings = Settings.of_snapshot(snapshot.settings)
    events = snapshot.events.filter(pl.col("device") == device).with_row_index("index")
    segments = snapshot.segments.filter(pl.col("device") == device).sort("address")
    blocks = snapshot.blocks.filter(pl.col("device") == device).sort("address")
    pools = {COMMON: 0} | {name: i for i, name in enumerate(segments["pool"].unique().sort(), 1) if name != COMMON}
    final = _final(segments, blocks, pools)
    initial = initial_segments(events, final, settings)
    memory = events.filter(pl.col("action").is_in([*SEGMENT_ALLOCATIONS, *SEGMENT_FREES]))
    segment_events = [SegmentEvent(*row) for row in memory.select("action", "address", "bytes", "stream").iter_rows()]
    played, releases = _replay_events(snapshot, events)
    columns: dict[str, Any] = {
        name: played[name].fill_null(0).to_numpy() for name in ("address", "bytes", "stream", "at_ns")
    }
    reserved = sum(segment.bytes for segment in initial)
    change = pl.when(pl.col("action").is_in(SEGMENT_ALLOCATIONS)).then("bytes").otherwise(-pl.col("bytes"))
    grown = memory.select(change.cum_sum().max()).item() or 0
    return History(
        device,
        settings,
        action=played["code"].to_numpy(),
        **columns,
        pool=_pools(events, played, final),
        stack=played["stack"].fill_null(-1).to_numpy(),
        releases=releases,
        segment_allocations=tuple(event for event in segment_events if event.action in SEGMENT_ALLOCATIONS),
        segment_frees=tuple(event for event in segment_events if event.action in SEGMENT_FREES),
        peak_reserved_bytes=reserved + max(grown, 0),
        start=initial,
        final=final,
        not_replayable=_unplayable(played, initial),
    )


def is_replayed() -> pl.Expr:
    """Return whether an event of one device, in order, is an item of its history: of a release only the first."""
    is_release = pl.col("action").is_in(SEGMENT_FREES)
    return pl.col("action").is_in(list(CODES)) | (is_release & ~is_release.shift(1, fill_value=False))


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


def _unplayable(played: pl.DataFrame, initial: tuple[SegmentState, ...]) -> str | None:
    if played.is_empty():
        return "the snapshot holds no history of this device"
    is_disjoint = all(segment.address + segment.bytes <= following.address for segment, following in pairwise(initial))
    is_complete = all(sum(block.bytes for block in segment.blocks) == segment.bytes for segment in initial)
    return None if is_disjoint and is_complete else "the snapshot's segments and history contradict each other"


def _final(segments: pl.DataFrame, blocks: pl.DataFrame, pools: dict[str, int]) -> tuple[SegmentState, ...]:
    described = blocks.select("segment_address", "address", "bytes", "state", pl.col("requested_bytes").fill_null(0))
    blocks_of: dict[int, list[BlockState]] = {}
    for segment, address, size, raw, requested in described.iter_rows():
        state = _STATES.get(raw, "pending")
        blocks_of.setdefault(segment, []).append(BlockState(address, size, state, 0 if state == "free" else requested))
    rows = segments.select("address", "total_bytes", "stream", pl.col("kind") == "small", "pool", "expandable")
    return tuple(
        SegmentState(address, size, stream, small, pools[pool], grows, tuple(blocks_of.get(address, ())))
        for address, size, stream, small, pool, grows in rows.iter_rows()
    )


def _replay_events(
    snapshot: MemorySnapshot, events: pl.DataFrame
) -> tuple[pl.DataFrame, tuple[tuple[str, tuple[int, ...]], ...]]:
    """Return the events to replay, with each release as one event, and the reason and addresses of each release."""
    is_release = pl.col("action").is_in(SEGMENT_FREES)
    first = is_release & ~is_release.shift(1, fill_value=False)
    runs = events.with_columns(first.cum_sum().alias("run"), pl.col("action").shift(-1).alias("then"))
    grouped = runs.filter(is_release).group_by("run", maintain_order=True)
    rows = grouped.agg("address", pl.col("stack").first(), pl.col("then").last(), pl.col("index").first())
    reasons = _causes(snapshot, rows)
    code = pl.when(first).then(RELEASE).otherwise(pl.col("action").replace_strict(CODES, default=None))
    played = events.with_columns(code.cast(pl.Int64).alias("code")).drop_nulls("code")
    return played, tuple(zip(reasons, map(tuple, rows["address"].to_list()), strict=True))


def _causes(snapshot: MemorySnapshot, runs: pl.DataFrame) -> list[str]:
    """Return the reason of each release: from the functions on its stack, otherwise from the next event."""
    stacks = snapshot.stacks.filter(pl.col("stack").is_in(runs["stack"].drop_nulls().unique().implode()))
    names = stacks.join(snapshot.frames, on="frame").group_by("stack").agg(pl.col("name").str.join(" ").alias("names"))
    rows = runs.join(names, on="stack", how="left", maintain_order="left")
    by_stack = pl.col("names")
    reasons = (
        pl.when(by_stack.str.contains("(?i)empty_?cache")).then(pl.lit(EMPTY_CACHE))
        .when(by_stack.str.contains("garbage_collect_cached|release_available_cached")).then(pl.lit(SOME))
        .when(by_stack.str.contains(r"\bmalloc\b|::alloc")).then(pl.lit(RETRY))
        .when(pl.col("then").is_in([*SEGMENT_ALLOCATIONS, "oom"])).then(pl.lit(RETRY))
        .otherwise(pl.lit(EMPTY_CACHE))
    )  # fmt: skip
    return rows.select(reasons.alias("why"))["why"].to_list()


def _pools(events: pl.DataFrame, played: pl.DataFrame, final: tuple[SegmentState, ...]) -> Ints:
    """Return the private pool of each event: that of the segment that contains its address at that time.

    Segments that no longer exist at the end are assigned to the common pool.
    """
    event_pools = np.zeros(len(played), np.int64)
    if not any(segment.pool for segment in final):
        return event_pools
    moves = events.filter(pl.col("action").is_in(["segment_alloc", "segment_free"]))
    alive = dict(moves.filter(pl.col("action") == "segment_alloc").select("address", "index").iter_rows())
    bounds = {segment.address: (segment.address + segment.bytes, segment.pool) for segment in final}
    segments = {a: bound for a, bound in bounds.items() if a not in alive}
    starts = sorted(segments)
    index, address = played["index"].to_numpy(), played["address"].fill_null(0).to_numpy()
    begin = 0
    last = (int(index[-1]) + 1 if len(index) else 0, "", 0, 0)
    for number, action, where, size in [*moves.select("index", "action", "address", "bytes").iter_rows(), last]:
        end = int(np.searchsorted(index, number))
        if end > begin and starts:
            event_pools[begin:end] = _within(address[begin:end], starts, segments)
        begin = end
        if action == "segment_alloc":
            lasting = alive[where] == number and where in bounds
            if where not in segments:
                insort(starts, where)
            segments[where] = bounds[where] if lasting else (where + size, 0)
        elif where in segments:
            starts.remove(where)
            del segments[where]
    return event_pools


def _within(address: Ints, starts: list[int], segments: dict[int, tuple[int, int]]) -> Ints:
    begins = np.array(starts, np.int64)
    ends, pools = np.array([segments[begin] for begin in starts], np.int64).T
    place = np.searchsorted(begins, address, side="right") - 1
    inside = (place >= 0) & (address < ends[np.maximum(place, 0)])
    return np.where(inside, pools[np.maximum(place, 0)], 0)


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
