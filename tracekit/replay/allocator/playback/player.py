"""Replay of a history: every request and free in recorded order, executed by the allocator model."""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tracekit.conventions.gc_pause import gc_paused
from tracekit.errors import InputError
from tracekit.model.sweep_line import Ints
from tracekit.replay.allocator import Allocator, OutOfMemory, Overlap, SegmentEvent, SegmentState, Settings
from tracekit.replay.allocator.blocks import Block, Pool
from tracekit.replay.allocator.playback.recorded_history import (
    ALLOC,
    COMPLETE,
    EMPTY_CACHE,
    REQUEST,
    RETRY,
    SEGMENT_ALLOCATIONS,
    SEGMENT_FREES,
    History,
)
from tracekit.replay.allocator.settings import UNLIMITED

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
