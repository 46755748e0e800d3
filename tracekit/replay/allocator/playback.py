"""Replay of a recorded or inferred history by the allocator model, under its own or other settings."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl

from tracekit.conventions.gc_pause import gc_paused
from tracekit.errors import InputError
from tracekit.model.sweep_line import Ints
from tracekit.model.trace import Trace
from tracekit.replay.allocator.blocks import Block, Overlap, Pool
from tracekit.replay.allocator.model import Allocator, BlockState, OutOfMemory, SegmentEvent, SegmentState
from tracekit.replay.allocator.recorded_history import (
    ALLOC,
    COMPLETE,
    EMPTY_CACHE,
    RELEASE,
    REQUEST,
    RETRY,
    SEGMENT_ALLOCATIONS,
    SEGMENT_FREES,
    History,
    from_snapshot,
)
from tracekit.replay.allocator.settings import SEGMENT_STEP_BYTES, SMALL_BYTES, SMALL_SEGMENT_BYTES, UNLIMITED, Settings

__all__ = ["History", "ReplayResult", "from_snapshot", "from_trace", "predict", "replay_as_recorded"]
_WARM_UP_EVENTS = 100_000
_APART_BYTES = 1 << 40
_FREE = -1
"""A free whose request and completion are consecutive."""


@dataclass(frozen=True, eq=False)
class ReplayResult:
    """The result of a replay."""

    segment_allocations: tuple[SegmentEvent, ...]
    """Segments allocated after the start, in order."""
    segment_frees: tuple[SegmentEvent, ...]
    peak_reserved_bytes: int
    peak_allocated_bytes: int
    retries: int
    address_mismatches: int
    """Requests that got a different address than recorded."""
    out_of_memory: int
    """Requests that failed; later events of their blocks are ignored."""
    final: tuple[SegmentState, ...]
    moved_bytes: Ints
    """Bytes that each event of the history allocated (positive) or freed (negative), or 0."""


def replay_as_recorded(history: History, *, at_recorded_addresses: bool = True) -> ReplayResult:
    """Replay a history under its own settings: a correct model reproduces the recording block for block.

    Segments get their recorded addresses, or follow one another, which must not change any size. Raises InputError if
    the history contradicts itself.
    """
    allocator = Allocator(history.settings)
    if at_recorded_addresses:
        allocator.place = _RecordedAddresses(allocator, history)
    player = _Player(history, allocator, as_recorded=True)
    try:
        allocator.adopt(history.start)
        unseen_bytes = max(history.start_reserved_bytes - allocator.reserved_bytes, 0)
        player.live = dict(allocator.active)
        player.run()
    except Overlap as overlap:
        raise InputError(f"the history cannot be replayed, it contradicts itself, {overlap}") from None
    return player.result(unseen_bytes, retries=allocator.retries + history.retries)


def predict(history: History, settings: Settings, *, capacity_bytes: int | None = None) -> ReplayResult:
    """Replay a history as if the job had run under other settings from its start.

    A history that begins with the first allocation is replayed once. If it begins later, the initial blocks are
    allocated in order of address and the history is replayed twice: first up to 100,000 events to fill the cache, then
    completely; only the second pass counts. The cache is emptied where the program did so. `capacity_bytes` is the
    device memory: by default the recorded peak of reserved memory if there was an allocation retry, else unlimited.
    """
    if capacity_bytes is None:
        capacity_bytes = history.peak_reserved_bytes if history.retries else UNLIMITED
    allocator = Allocator(settings, capacity_bytes=capacity_bytes - history.static_bytes)
    warm_up = _Player(history, allocator, as_recorded=False)
    if history.start:
        warm_up.allocate_initial_blocks()
        warm_up.run(_WARM_UP_EVENTS)
        warm_up.rewind()
    player = _Player(history, allocator, as_recorded=False)
    player.live = warm_up.live
    retries = allocator.retries
    player.run()
    return player.result(history.static_bytes, retries=allocator.retries - retries)


class _RecordedAddresses:
    """Places new segments at their recorded addresses, in order, unless these are occupied."""

    def __init__(self, allocator: Allocator, history: History) -> None:
        self.allocator = allocator
        self.recorded = history.segment_allocations
        self.follow = allocator.place
        last_end = max((event.address + event.bytes for event in self.recorded), default=0)
        allocator.next_address = max(allocator.next_address, -(-last_end // _APART_BYTES) * _APART_BYTES)
        self._ends: dict[int, int] = {}
        self._starts: list[int] = []
        self._seen = 0
        for segment in history.start:
            self._add(segment.address, segment.bytes)

    def __call__(self, size_bytes: int, pool: Pool) -> int:
        number = self.allocator.device_allocations
        event = self.recorded[number] if number < len(self.recorded) else None
        expands = self.allocator.settings.expandable
        # If the recorded address does not fit, the model or the history is wrong; segments must not overlap.
        if event is None or not (expands or event.bytes == size_bytes) or self._is_occupied(event.address, event.bytes):
            return self.follow(size_bytes, pool)
        return event.address

    def _is_occupied(self, address: int, size_bytes: int) -> bool:
        for event in self.allocator.events[self._seen :]:
            if event.action in SEGMENT_ALLOCATIONS:
                self._add(event.address, event.bytes)
            elif self._ends.get(event.address) == event.address + event.bytes:
                self._starts.remove(event.address)
                del self._ends[event.address]
        self._seen = len(self.allocator.events)
        place = bisect_left(self._starts, address + size_bytes) - 1
        return place >= 0 and self._ends[self._starts[place]] > address

    def _add(self, address: int, size_bytes: int) -> None:
        if address not in self._ends:
            insort(self._starts, address)
        self._ends[address] = address + size_bytes


class _Player:
    """One pass over a history: maps recorded blocks to blocks of the model and counts deviations."""

    def __init__(self, history: History, allocator: Allocator, *, as_recorded: bool) -> None:
        self.history = history
        self.allocator = allocator
        self.as_recorded = as_recorded
        self.live: dict[int, Block] = {}
        self.moved = [0] * len(history.action)
        self.mismatches = self.failed = 0
        self.begun = len(allocator.events)
        self._releases = iter(history.releases)

    @gc_paused()
    def run(self, max_events: int | None = None) -> None:
        """Replay all events, or the first `max_events`."""
        live, moved, allocator = self.live, self.moved, self.allocator
        malloc, free = allocator.malloc, allocator.free
        mismatches = 0
        for number, action, address, size, stream, pool in self._events(max_events):
            if action == ALLOC:
                try:
                    block = live[address] = malloc(size, stream, pool)
                except OutOfMemory:
                    self.failed += 1
                    continue
                moved[number] = block.bytes
                mismatches += block.address != address
            elif action == _FREE:
                freed = live.pop(address, None)
                if freed is not None and freed.active:
                    moved[number] = -freed.bytes
                    free(freed)
            else:
                self._replay_single(number, action, address)
        self.mismatches += mismatches

    def _events(self, max_events: int | None) -> Iterable[tuple[int, int, int, int, int, int]]:
        """Return number, action, address, bytes, stream and pool of each event, consecutive parts of a free as one."""
        history = self.history
        action, address = history.action[:max_events], history.address[:max_events]
        at_once = (action[:-1] == REQUEST) & (action[1:] == COMPLETE) & (address[:-1] == address[1:])
        played = np.concatenate(([True], ~at_once))[: len(action)]
        action = np.where(np.concatenate((at_once, [False]))[: len(action)], _FREE, action)
        columns = (np.arange(len(action)), action, address, history.bytes[:max_events], history.stream[:max_events])
        return zip(*(column[played].tolist() for column in (*columns, history.pool[:max_events])), strict=True)

    def _replay_single(self, number: int, action: int, address: int) -> None:
        """Replay one part of a free whose other part comes later, or a release."""
        if action == REQUEST:
            block = self.live.get(address)
            if block is not None:
                self.moved[number] = -block.bytes
                self.allocator.request_free(block)
        elif action == COMPLETE:
            freed = self.live.pop(address, None)
            # Otherwise it was released already, by a retry.
            if freed is not None and freed.active and not freed.allocated:
                self.allocator.complete_free(freed)
        else:
            self._release(*next(self._releases))

    def _release(self, reason: str, addresses: tuple[int, ...]) -> None:
        """Release memory where the history did: the whole cache, or only the recorded segments."""
        allocator = self.allocator
        releases_all = reason == RETRY and self.as_recorded and not self.history.settings.gives_back_some
        if reason == EMPTY_CACHE or releases_all:
            allocator.release_cached()
        elif self.as_recorded:
            heads = {block.address: block for block in allocator.blocks() if block.whole and not block.active}
            for address in addresses:
                if address in heads:
                    allocator.release(heads[address])

    def allocate_initial_blocks(self) -> None:
        """Allocate the initial blocks that are not allocated yet."""
        for segment in self.history.start:
            for block in segment.blocks:
                if block.state == "free" or block.address in self.live:
                    continue
                try:
                    new = self.allocator.malloc(block.requested_bytes, segment.stream, segment.pool)
                except OutOfMemory:
                    self.failed += 1
                    continue
                self.live[block.address] = new
                if block.state == "pending":
                    self.allocator.request_free(new)

    def rewind(self) -> None:
        """Return to the initial state: free newer blocks, allocate missing initial blocks."""
        allocated = set(self.history.address[self.history.action == ALLOC].tolist())
        for address in allocated & self.live.keys():
            block = self.live.pop(address)
            if block.allocated:
                self.allocator.request_free(block)
            if block.active:
                self.allocator.complete_free(block)
        self.allocate_initial_blocks()

    def result(self, unseen_bytes: int, *, retries: int) -> ReplayResult:
        """Return the result of the pass."""
        events = self.allocator.events[self.begun :]
        return ReplayResult(
            tuple(event for event in events if event.action in SEGMENT_ALLOCATIONS),
            tuple(event for event in events if event.action in SEGMENT_FREES),
            self.allocator.peak_reserved_bytes + unseen_bytes,
            self.allocator.peak_allocated_bytes,
            retries,
            self.mismatches,
            self.failed,
            tuple(self.allocator.segments()),
            np.array(self.moved, np.int64),
        )


def from_trace(trace: Trace) -> History:
    """Return the history of the device with the most memory events in a trace.

    Sizes are block sizes, so they include rounding. All events are on one stream. The cache at the start is assumed to
    be the memory that contains the window's blocks, so that they fit does not validate the model. Segment allocations
    and frees are inferred from changes of the reserved total.
    """
    events = trace.allocations.filter(pl.col("device").is_not_null())
    devices = events["device"].mode().sort().to_list()
    device = devices[0] if devices else -1
    events = events.filter(pl.col("device") == device).with_row_index("index")
    reason = _unplayable(trace, events)
    if reason is not None:
        events = events.clear()
    played = _replay_events(events)
    changes = events.select(pl.col("reserved_bytes").diff().fill_null(0).alias("change"), "address", "index")
    memory = [
        SegmentEvent("segment_alloc" if change > 0 else "segment_free", address, abs(change), 0)
        for change, address, _ in changes.filter(pl.col("change") != 0).iter_rows()
    ]
    start = _start(events)
    initial_total_bytes = sum(block.bytes for segment in start for block in segment.blocks if block.state != "free")
    first = events.select(pl.col("allocated_bytes") - pl.col("delta_bytes"), "reserved_bytes").head(1).fill_null(0)
    allocated_bytes, reserved_bytes = first.row(0) if first.height else (0, 0)
    releases = played.filter(pl.col("code") == RELEASE).height
    columns = {name: played[name].to_numpy() for name in ("address", "bytes", "at_ns")}
    return History(
        device,
        Settings(),
        action=played["code"].to_numpy(),
        **columns,
        stream=np.zeros(len(played), np.int64),
        pool=np.zeros(len(played), np.int64),
        stack=np.full(len(played), -1, np.int64),
        releases=((EMPTY_CACHE, ()),) * releases,
        segment_allocations=tuple(event for event in memory if event.action == "segment_alloc"),
        segment_frees=tuple(event for event in memory if event.action == "segment_free"),
        peak_reserved_bytes=int(str(events["reserved_bytes"].max() or 0)),
        start=start,
        final=(),
        start_reserved_bytes=reserved_bytes,
        static_bytes=max(allocated_bytes - initial_total_bytes, 0),
        inferred=True,
        not_replayable=reason,
    )


def _unplayable(trace: Trace, events: pl.DataFrame) -> str | None:
    if not trace.on_device:
        return "the memory is the host's, which has no caching allocator to replay"
    if events.is_empty():
        return "the trace holds no memory events of a device: record with profile_memory=True, or take a snapshot"
    if events["address"].null_count():
        return "the trace's memory events have no addresses (an old torch): take a memory snapshot"
    return None


def _replay_events(events: pl.DataFrame) -> pl.DataFrame:
    """Return the events to replay: allocations, frees in their two parts, and releases before they become visible."""
    delta_bytes = events["delta_bytes"].to_numpy()
    is_free = delta_bytes < 0
    has_release = (events["reserved_bytes"].diff().fill_null(0) < 0).to_numpy()
    parts = 1 + has_release + is_free
    event = np.repeat(np.arange(len(events)), parts)
    first = np.cumsum(parts) - parts
    code = np.full(len(event), ALLOC)
    code[(first + has_release)[is_free]] = REQUEST
    code[(first + has_release + 1)[is_free]] = COMPLETE
    code[first[has_release]] = RELEASE
    at_event = {name: events[name].to_numpy()[event] for name in ("address", "at_ns")}
    return pl.DataFrame({**at_event, "code": code, "bytes": np.abs(delta_bytes)[event]})


def _start(events: pl.DataFrame) -> tuple[SegmentState, ...]:
    """Return segments that cover all blocks, with the blocks allocated at the start."""
    first = events.group_by("address").agg(pl.col("delta_bytes").first()).filter(pl.col("delta_bytes") < 0)
    sizes = {address: -delta for address, delta in first.iter_rows()}
    blocks = events.select("address", size=pl.col("delta_bytes").abs()).unique()
    # A small block lies in an aligned segment of 2 MiB.
    small = blocks.filter(pl.col("size") <= SMALL_BYTES)["address"].to_numpy() // SMALL_SEGMENT_BYTES
    pages = np.unique(small) * SMALL_SEGMENT_BYTES
    ranges = [(int(page), int(page) + SMALL_SEGMENT_BYTES, True) for page in pages]
    large = blocks.filter(pl.col("size") > SMALL_BYTES).sort("address")
    ranges += [(begin, end, False) for begin, end in _ranges(large["address"].to_numpy(), large["size"].to_numpy())]
    addresses = sorted(sizes)
    return tuple(
        SegmentState(
            begin, end - begin, 0, small, 0, expandable=False, blocks=tuple(_blocks(begin, end, addresses, sizes))
        )
        for begin, end, small in sorted(ranges)
    )


def _ranges(address: Ints, size: Ints) -> Iterator[tuple[int, int]]:
    """Yield the contiguous ranges that blocks cover, rounded outwards to multiples of 2 MiB."""
    if not len(address):
        return
    begin = address // SEGMENT_STEP_BYTES * SEGMENT_STEP_BYTES
    end = -(-(address + size) // SEGMENT_STEP_BYTES) * SEGMENT_STEP_BYTES
    reach = np.maximum.accumulate(end)
    first = np.flatnonzero(np.concatenate(([True], begin[1:] >= reach[:-1])))
    last = np.concatenate((first[1:] - 1, [len(begin) - 1]))
    yield from zip(begin[first].tolist(), reach[last].tolist(), strict=True)


def _blocks(begin: int, end: int, addresses: list[int], sizes: dict[int, int]) -> Iterator[BlockState]:
    first, past = np.searchsorted(addresses, [begin, end])
    cursor = begin
    for address in addresses[first:past]:
        if address > cursor:
            yield BlockState(cursor, address - cursor, "free")
        yield BlockState(address, sizes[address], "allocated", sizes[address])
        cursor = address + sizes[address]
    if cursor < end:
        yield BlockState(cursor, end - cursor, "free")
