"""Playing a history: every request and free in the recorded order, through the model of the allocator."""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tracekit.errors import InputError
from tracekit.model.gc_pause import gc_paused
from tracekit.replay.allocator import Allocator, OutOfMemory, Overlap, SegmentEvent, SegmentState, Settings
from tracekit.replay.allocator.blocks import Block, Pool
from tracekit.replay.allocator.playback.recorded_history import (
    ALLOC,
    COMPLETE,
    EMPTY_CACHE,
    GIVEN,
    REQUEST,
    RETRY,
    TAKEN,
    History,
    Ints,
)
from tracekit.replay.allocator.settings import UNLIMITED

_WARMING_EVENTS = 100_000
_APART_BYTES = 1 << 40
_FREE = -1
"""A free whose two parts follow each other."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a play came to."""

    taken: tuple[SegmentEvent, ...]
    """Memory taken of the device after the start, in order."""
    given: tuple[SegmentEvent, ...]
    peak_reserved_bytes: int
    peak_allocated_bytes: int
    retries: int
    address_mismatches: int
    """Requests that got another address than in the record."""
    out_of_memory: int
    """Requests that found no memory; what came of them is left out."""
    final: tuple[SegmentState, ...]
    moved_bytes: Ints
    """For each event of the history: bytes of the block that it took (positive) or freed (negative), or 0."""


def play(history: History, *, at_recorded_addresses: bool = True) -> Outcome:
    """Play a history under its own settings: if the model is right, it comes to what was recorded, block for block.

    Segments get the addresses that they were recorded at; or follow one another, which must change no size. Raises
    InputError where the record contradicts itself.
    """
    allocator = Allocator(history.settings)
    if at_recorded_addresses:
        recorded = _Recorded(allocator, history.taken)
        recorded.hold(history.start)
        allocator.place = recorded
    player = _Player(history, allocator, as_recorded=True)
    try:
        allocator.adopt(history.start)
        unseen_bytes = max(history.start_reserved_bytes - allocator.reserved_bytes, 0)
        player.live = dict(allocator.active)
        player.run()
    except Overlap as overlap:
        raise InputError(f"nothing to replay: the record contradicts itself, {overlap}") from None
    return player.outcome(unseen_bytes, retries=allocator.retries + history.retries)


def predict(history: History, settings: Settings, *, capacity_bytes: int | None = None) -> Outcome:
    """Play a history as if the job had run under other settings from its start.

    A history that begins with the first allocation is played once. Of one that begins later, what the program held is
    asked for anew, in order of address, and the history is played twice, the first time 100,000 events of it at most:
    only the second time counts, with the cache that the first one filled. The cache is emptied where the program did
    so. The device has `capacity_bytes`; without it, what was reserved at most if the record shows a retry (there was
    no more), else enough.
    """
    if capacity_bytes is None:
        capacity_bytes = history.peak_reserved_bytes if history.retries else UNLIMITED
    allocator = Allocator(settings, capacity_bytes=capacity_bytes - history.unseen_bytes)
    if history.start:
        warming = _Player(history, allocator, as_recorded=False)
        warming.ask_for_start()
        warming.run(_WARMING_EVENTS)
        warming.rewind()
    player = _Player(history, allocator, as_recorded=False)
    if history.start:
        player.live = warming.live
    retries = allocator.retries
    player.run()
    return player.outcome(history.unseen_bytes, retries=allocator.retries - retries)


class _Recorded:
    """Gives new segments the addresses at which they were recorded, in order, unless something lies there."""

    def __init__(self, allocator: Allocator, taken: tuple[SegmentEvent, ...]) -> None:
        self.allocator = allocator
        self.taken = taken
        self.follow = allocator.place
        beyond = max((event.address + event.bytes for event in taken), default=0)
        allocator.next_address = max(allocator.next_address, -(-beyond // _APART_BYTES) * _APART_BYTES)
        self._ends: dict[int, int] = {}
        self._starts: list[int] = []
        self._seen = 0

    def hold(self, segments: tuple[SegmentState, ...]) -> None:
        """Note what lies where at the start."""
        for segment in segments:
            self._add(segment.address, segment.bytes)

    def __call__(self, size_bytes: int, pool: Pool) -> int:
        number = self.allocator.device_allocations
        told = self.taken[number] if number < len(self.taken) else None
        expands = self.allocator.settings.expandable
        # Where an address is not as recorded, the model or the record is wrong, and another one must not be told over.
        if told is None or not (expands or told.bytes == size_bytes) or self._occupied(told.address, told.bytes):
            return self.follow(size_bytes, pool)
        return told.address

    def _occupied(self, address: int, size_bytes: int) -> bool:
        for event in self.allocator.events[self._seen :]:
            if event.action in TAKEN:
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
    """One pass over a history: which blocks stand for the recorded ones now, and what went otherwise."""

    def __init__(self, history: History, allocator: Allocator, *, as_recorded: bool) -> None:
        self.history = history
        self.allocator = allocator
        self.as_recorded = as_recorded
        self.live: dict[int, Block] = {}
        self.moved = [0] * len(history.action)
        self.mismatches = self.failed = 0
        self.begun = len(allocator.events)
        self._releases = iter(history.releases)

    def run(self, most: int | None = None) -> None:
        """Play all events, or so many."""
        with gc_paused():
            self._run(most)

    def _run(self, most: int | None) -> None:
        live, moved, allocator = self.live, self.moved, self.allocator
        malloc, free = allocator.malloc, allocator.free
        mismatches = 0
        for number, action, address, size, stream, pool in self._listed(most):
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
                self._play_apart(number, action, address)
        self.mismatches += mismatches

    def _listed(self, most: int | None) -> Iterable[tuple[int, int, int, int, int, int]]:
        """Return number, action, address, bytes, stream and pool of each event, the two parts of a free as one."""
        history = self.history
        action, address = history.action[:most], history.address[:most]
        at_once = (action[:-1] == REQUEST) & (action[1:] == COMPLETE) & (address[:-1] == address[1:])
        played = np.concatenate(([True], ~at_once))[: len(action)]
        action = np.where(np.concatenate((at_once, [False]))[: len(action)], _FREE, action)
        columns = (np.arange(len(action)), action, address, history.bytes[:most], history.stream[:most])
        return zip(*(column[played].tolist() for column in (*columns, history.pool[:most])), strict=True)

    def _play_apart(self, number: int, action: int, address: int) -> None:
        """Play one part of a free whose other part comes later, or a return of memory."""
        if action == REQUEST:
            wanted = self.live.get(address)
            if wanted is not None:
                self.moved[number] = -wanted.bytes
                self.allocator.request_free(wanted)
        elif action == COMPLETE:
            freed = self.live.pop(address, None)
            # Else it was given back already, when memory was short.
            if freed is not None and freed.active and not freed.allocated:
                self.allocator.complete_free(freed)
        else:
            self._release(*next(self._releases))

    def _release(self, why: str, given: tuple[int, ...]) -> None:
        """Give memory back where the record did: all that is cached, or only what was."""
        allocator = self.allocator
        all_of_it = why == RETRY and self.as_recorded and not self.history.settings.gives_back_some
        if why == EMPTY_CACHE or all_of_it:
            allocator.release_cached()
        elif self.as_recorded:
            heads = {block.address: block for block in allocator.blocks() if block.whole and not block.active}
            for address in given:
                if address in heads:
                    allocator.release(heads[address])

    def ask_for_start(self) -> None:
        """Ask for what the program held at the start, as far as it is not held."""
        for segment in self.history.start:
            for told in segment.blocks:
                if told.state == "free" or told.address in self.live:
                    continue
                try:
                    block = self.allocator.malloc(told.requested_bytes, segment.stream, segment.pool)
                except OutOfMemory:
                    self.failed += 1
                    continue
                self.live[told.address] = block
                if told.state == "pending":
                    self.allocator.request_free(block)

    def rewind(self) -> None:
        """Go back to what was held at the start: free what came since, ask for what went."""
        taken = set(self.history.address[self.history.action == ALLOC].tolist())
        for address in taken & self.live.keys():
            block = self.live.pop(address)
            if block.allocated:
                self.allocator.request_free(block)
            if block.active:
                self.allocator.complete_free(block)
        self.ask_for_start()

    def outcome(self, unseen_bytes: int, *, retries: int) -> Outcome:
        """Return what the pass came to."""
        events = self.allocator.events[self.begun :]
        return Outcome(
            tuple(event for event in events if event.action in TAKEN),
            tuple(event for event in events if event.action in GIVEN),
            self.allocator.peak_reserved_bytes + unseen_bytes,
            self.allocator.peak_allocated_bytes,
            retries,
            self.mismatches,
            self.failed,
            tuple(self.allocator.segments()),
            np.array(self.moved, np.int64),
        )
