"""Playing a history: every request and free in the recorded order, through the model of the allocator."""

from dataclasses import dataclass

from tracekit.allocator import Allocator, OutOfMemory, SegmentEvent, SegmentState, Settings
from tracekit.allocator.blocks import Block, Pool
from tracekit.allocator.settings import UNLIMITED
from tracekit.replay.history import ALLOC, COMPLETE, EMPTY_CACHE, GIVEN, REQUEST, RETRY, TAKEN, History


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


def play(history: History, *, at_recorded_addresses: bool = True) -> Outcome:
    """Play a history under its own settings: if the model is right, it comes to what was recorded, block for block.

    Segments get the addresses that they were recorded at; or follow one another, which must change no size.
    """
    allocator = Allocator(history.settings)
    if at_recorded_addresses:
        allocator.place = _Recorded(allocator, history.taken)
    allocator.adopt(history.start)
    return _play(history, allocator, as_recorded=True)


def predict(history: History, settings: Settings, *, capacity_bytes: int | None = None) -> Outcome:
    """Play a history as if the job had run under other settings from its start.

    What the program held at the start is asked for anew, in order of address. The cache is emptied where the program
    did so. The device has `capacity_bytes`; without it, what was reserved at most if the record shows a retry (there
    was no more), else enough.
    """
    if capacity_bytes is None:
        capacity_bytes = history.peak_reserved_bytes if history.retries else UNLIMITED
    allocator = Allocator(settings, capacity_bytes=capacity_bytes)
    return _play(history, allocator, as_recorded=False)


class _Recorded:
    """Gives new segments the addresses at which they were recorded, in order."""

    def __init__(self, allocator: Allocator, taken: tuple[SegmentEvent, ...]) -> None:
        self.allocator = allocator
        self.taken = taken
        self.follow = allocator.place

    def __call__(self, size_bytes: int, pool: Pool) -> int:
        number = self.allocator.device_allocations
        if number < len(self.taken):
            told = self.taken[number]
            if told.bytes == size_bytes or self.allocator.settings.expandable:
                return told.address
        return self.follow(size_bytes, pool)


def _play(history: History, allocator: Allocator, *, as_recorded: bool) -> Outcome:
    live = dict(allocator.active) if as_recorded else _asked_anew(history, allocator)
    begun = len(allocator.events)
    mismatches = failed = 0
    releases = iter(history.releases)
    malloc, request, complete = allocator.malloc, allocator.request_free, allocator.complete_free
    columns = (history.action, history.address, history.bytes, history.stream, history.pool)
    for action, address, size, stream, pool in zip(*(column.tolist() for column in columns), strict=True):
        if action == ALLOC:
            try:
                block = live[address] = malloc(size, stream, pool)
            except OutOfMemory:
                failed += 1
                continue
            mismatches += block.address != address
        elif action == REQUEST:
            if address in live:
                request(live[address])
        elif action == COMPLETE:
            freed = live.pop(address, None)
            if freed is not None and freed.active:  # else given back already, when memory was short
                complete(freed)
        else:
            why, given = next(releases)
            _release(allocator, why, given, as_recorded=as_recorded)
    events = allocator.events[begun:]
    return Outcome(
        tuple(event for event in events if event.action in TAKEN),
        tuple(event for event in events if event.action in GIVEN),
        allocator.peak_reserved_bytes,
        allocator.peak_allocated_bytes,
        allocator.retries + (history.retries if as_recorded else 0),
        mismatches,
        failed,
        tuple(allocator.segments()),
    )


def _release(allocator: Allocator, why: str, given: tuple[int, ...], *, as_recorded: bool) -> None:
    """Give memory back where the record did: all that is cached, or only what was."""
    if why == EMPTY_CACHE or (why == RETRY and as_recorded):
        allocator.release_cached()
    elif as_recorded:
        heads = {block.address: block for block in allocator.blocks() if block.whole and not block.active}
        for address in given:
            if address in heads:
                allocator.release(heads[address])


def _asked_anew(history: History, allocator: Allocator) -> dict[int, Block]:
    """Ask for what the program held at the start; return it by recorded address."""
    live = {}
    for segment in history.start:
        for told in segment.blocks:
            if told.state == "free":
                continue
            block = live[told.address] = allocator.malloc(told.requested_bytes, segment.stream, segment.pool)
            if told.state == "pending":
                allocator.request_free(block)
    return live
