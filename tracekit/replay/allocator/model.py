"""The allocator: what it does with each request, free and return of memory."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from tracekit.replay.allocator import expandable_segments
from tracekit.replay.allocator.blocks import ADDRESS_BITS, Block, Overlap, Pool
from tracekit.replay.allocator.settings import (
    BLOCK_BYTES,
    LARGE_SEGMENT_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    UNLIMITED,
    Settings,
    segment_bytes,
)

ALLOC, FREE, MAP, UNMAP = "segment_alloc", "segment_free", "segment_map", "segment_unmap"
COMMON_POOL = 0
ADDRESS_SPACE_BYTES = 90 << 30
"""Of an expandable segment: the device's memory and an eighth, on a device of 80 GiB."""


class OutOfMemory(Exception):  # noqa: N818 its name at torch
    """The device has no memory left for a request, even after all that is cached was given back."""


class SegmentEvent(NamedTuple):
    """Memory taken of the device, or given back."""

    action: str
    address: int
    bytes: int
    stream: int


class BlockState(NamedTuple):
    """A block as a snapshot tells it; `state` is allocated, pending or free."""

    address: int
    bytes: int
    state: str
    requested_bytes: int = 0


class SegmentState(NamedTuple):
    """A segment as a snapshot tells it: a range of memory with its blocks end to end."""

    address: int
    bytes: int
    stream: int
    small: bool
    pool: int
    expandable: bool
    blocks: tuple[BlockState, ...]


class Allocator:
    """One device's allocator.

    >>> allocator = Allocator()
    >>> block = allocator.malloc(3_000_000)
    >>> block.bytes, allocator.reserved_bytes
    (3000320, 20971520)
    >>> allocator.free(block)
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        capacity_bytes: int = UNLIMITED,
        place: Callable[[int, Pool], int] | None = None,
        address_space_bytes: int = ADDRESS_SPACE_BYTES,
    ) -> None:
        """Make an allocator without memory, on a device that has `capacity_bytes` for it.

        `place` gives the address of a new segment (or address space) by its size and pool; without it they follow one
        another. `address_space_bytes` is how far an expandable segment can grow.
        """
        self.settings = settings or Settings()
        self.capacity_bytes = capacity_bytes
        self.address_space_bytes = address_space_bytes
        fraction = self.settings.memory_fraction
        self.allowed_bytes = UNLIMITED if fraction is None else int(fraction * capacity_bytes)
        self.collects = fraction is not None and self.settings.gc_threshold > 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.device_allocations = 0
        self.retries = 0
        self.events: list[SegmentEvent] = []
        self.freeable_pools: set[int] = set()
        """Private pools that nobody uses any more: their memory can be given back."""
        self.active: dict[int, Block] = {}
        self._pools: dict[tuple[int, bool, int], Pool] = {}
        self._rounded: dict[int, int] = {}
        self.next_address = 1 << 40
        """Where the next segment goes, unless `place` says otherwise."""
        self.place = place or self._follow

    # Requests and frees -----------------------------------------------------------------------------------------------
    def malloc(self, requested_bytes: int, stream: int = 0, pool: int = COMMON_POOL) -> Block:
        """Return a block of at least `requested_bytes`. Raises OutOfMemory, and Overlap if `place` told wrong."""
        size = self._rounded.get(requested_bytes)
        if size is None:
            size = self._rounded[requested_bytes] = self.settings.rounded(requested_bytes)
        free = self._pools.get((pool, size <= SMALL_BYTES, stream)) or self.pool(pool, size <= SMALL_BYTES, stream)
        block = self._best_fit(free, size) or self._grown(free, size)
        rest = block.bytes - size
        if rest >= BLOCK_BYTES and self._splits(free, size, rest):
            block.bytes = size
            free.add(Block(block.address + size, rest, free, block.base, block, block.next))
        block.requested_bytes = requested_bytes
        block.allocated = block.active = True
        if self.active.setdefault(block.address, block) is not block:
            raise Overlap(f"two blocks at {block.address:#x}")
        self.allocated_bytes += block.bytes
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return block

    def record_stream(self, block: Block, stream: int) -> None:
        """Note that another stream uses the block: after its free it can only serve again when that is done."""
        block.shared |= stream != block.pool.stream

    def free(self, block: Block) -> None:
        """Free a block: at once, unless another stream uses it; then `complete_free` has to come."""
        block.allocated = False
        self.allocated_bytes -= block.bytes
        if not block.shared:
            del self.active[block.address]
            block.active = False
            self.give(block)

    def request_free(self, block: Block) -> None:
        """Take the block from the program."""
        block.allocated = False
        self.allocated_bytes -= block.bytes

    def complete_free(self, block: Block) -> None:
        """Let the block serve again, joined with its free neighbours."""
        del self.active[block.address]
        block.active = block.shared = False
        self.give(block)

    def give(self, block: Block) -> None:
        """Join a free block with its free neighbours and add it to its pool."""
        pool = block.pool
        keys, by_key = pool.keys, pool.by_key
        for neighbour in (block.previous, block.next):
            if neighbour is not None and (key := neighbour.key):
                del keys[bisect_left(keys, key)]
                del by_key[key]
                block.absorb(neighbour)
        pool.add(block)

    def pool(self, number: int, small: bool, stream: int) -> Pool:
        """Return the free blocks of a private pool (or the common one), size class and stream."""
        key = (number, small, stream)
        found = self._pools.get(key)
        if found is None:
            found = self._pools[key] = Pool(number, small, stream)
        return found

    def _splits(self, pool: Pool, size: int, rest: int) -> bool:
        if pool.small or self.settings.expandable:
            return True
        return size < self.settings.max_split_bytes and rest > SMALL_BYTES

    def _best_fit(self, pool: Pool, size: int) -> Block | None:
        if self.collects:
            pool.asked += 1
        keys = pool.keys
        place = bisect_left(keys, size << ADDRESS_BITS)
        if place == len(keys):
            return None
        block = pool.by_key[keys[place]]
        settings = self.settings
        if block.base is not None and not (settings.expandable and (block.next is None or block.next.mapped)):
            place = expandable_segments.preferred(pool, place, in_use=settings.expandable)
            if place == len(keys):
                return None
            block = pool.by_key[keys[place]]
        limit = settings.max_split_bytes
        if size < limit <= block.bytes:
            return None
        if size >= limit and block.bytes >= size + settings.max_non_split_rounding_bytes:
            return None
        del pool.by_key[keys.pop(place)]
        block.key = 0
        return block

    # Memory of the device ---------------------------------------------------------------------------------------------
    def _grown(self, pool: Pool, size: int) -> Block:
        """Return a block that is new from the device, given back from elsewhere first if need be."""
        if self.collects:
            self._collect()
        block = self._new(pool, size)
        if block is None and self._release_oversized(pool, size):
            block = self._new(pool, size)
        if block is None:
            self.release_cached()
            self.retries += 1
            block = self._new(pool, size)
        if block is None:
            raise OutOfMemory(f"{size:,} bytes on stream {pool.stream}, with {self.reserved_bytes:,} bytes reserved")
        return block

    def _new(self, pool: Pool, size: int) -> Block | None:
        wanted = segment_bytes(size)
        if self.reserved_bytes + wanted > self.allowed_bytes:
            return None
        if self.settings.expandable:
            return expandable_segments.grown(self, pool, size)
        if self.reserved_bytes + wanted > self.capacity_bytes:
            return None
        address = self.place(wanted, pool)
        self.reserve(ALLOC, address, wanted, pool)
        return Block(address, wanted, pool)

    def reserve(self, action: str, address: int, size_bytes: int, pool: Pool) -> None:
        """Count memory that is taken of the device."""
        self.device_allocations += 1
        self.reserved_bytes += size_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        self.events.append(SegmentEvent(action, address, size_bytes, pool.stream))

    def unreserve(self, action: str, address: int, size_bytes: int, pool: Pool) -> None:
        """Count memory that is given back to the device."""
        self.reserved_bytes -= size_bytes
        self.events.append(SegmentEvent(action, address, size_bytes, pool.stream))

    def release(self, block: Block) -> None:
        """Give a free block that is its whole segment back to the device."""
        block.pool.remove(block)
        self.unreserve(FREE, block.address, block.bytes, block.pool)

    def release_cached(self) -> None:
        """Give all whole free segments back, as `torch.cuda.empty_cache` does, and a request that finds no memory."""
        for block in [each for each in self.active.values() if not each.allocated]:
            self.complete_free(block)  # the allocator waits for the streams that use them
        for small in (False, True):
            self._release_of(lambda pool, small=small: pool.number == COMMON_POOL and pool.small is small)  # type: ignore[misc]
        for number in sorted(self.freeable_pools):
            for small in (True, False):
                self._release_of(lambda pool, n=number, small=small: pool.number == n and pool.small is small)  # type: ignore[misc]

    def _release_of(self, wanted: Callable[[Pool], bool]) -> None:
        blocks = [block for pool in self._in_order(wanted) for block in pool.blocks()]
        for block in blocks:
            if block.base is None and block.whole:
                self.release(block)
        for block in blocks:
            if block.base is not None:
                expandable_segments.unmap(self, block)

    def _in_order(self, wanted: Callable[[Pool], bool]) -> list[Pool]:
        return sorted(filter(wanted, self._pools.values()), key=lambda pool: pool.stream)

    def _release_oversized(self, pool: Pool, size: int) -> bool:
        """Give back blocks too large to split: one that would do, else from the largest until they add up."""
        limit = self.settings.max_split_bytes
        if limit == UNLIMITED:
            return False
        wanted = max(size, limit)
        place = bisect_left(pool.keys, wanted << ADDRESS_BITS)
        if place < len(pool.keys):
            self.release(pool.by_key[pool.keys[place]])
            return True
        given = 0
        for block in reversed(pool.blocks()):
            if given >= wanted or block.bytes < limit:
                break
            given += block.bytes
            self.release(block)
        return given >= wanted

    def _collect(self) -> None:
        """Give back unused large segments, those first that were not asked for the longest."""
        threshold = int(self.settings.gc_threshold * self.allowed_bytes)
        target, given = self.reserved_bytes - threshold, 0
        pools = self._in_order(lambda pool: pool.number == COMMON_POOL and not pool.small)
        idle = [block for pool in pools for block in pool.blocks() if block.whole]
        age = sum(block.pool.asked - block.born for block in idle)
        while given < target and idle:
            mean = age / len(idle)
            kept = []
            for block in idle:
                since = block.pool.asked - block.born
                if since < mean:
                    kept.append(block)
                    continue
                age -= since
                given += block.bytes
                self.release(block)
            idle = kept

    def _follow(self, size_bytes: int, pool: Pool) -> int:  # noqa: ARG002 one signature for all
        address = self.next_address
        self.next_address += -(-size_bytes // SMALL_SEGMENT_BYTES) * SMALL_SEGMENT_BYTES
        return address

    # State ------------------------------------------------------------------------------------------------------------
    def blocks(self) -> Iterator[Block]:
        """Yield the blocks with memory behind them, free or not, in no order."""
        yield from self.active.values()
        for pool in self._pools.values():
            yield from pool.blocks()

    def segments(self) -> list[SegmentState]:
        """Return the segments as a snapshot tells them, by address."""
        heads = [block for block in self.blocks() if block.previous is None or not block.previous.mapped]
        return [_state(head) for head in sorted(heads, key=lambda block: block.address)]

    def adopt(self, segments: Iterable[SegmentState]) -> None:
        """Take over segments of a snapshot, so that what follows starts from there."""
        last: dict[tuple[int, bool, int], Block] = {}  # of expandable segments: what lies before the next range
        for segment in sorted(segments):
            pool = self.pool(segment.pool, segment.small, segment.stream)
            key = (segment.pool, segment.small, segment.stream)
            previous = None
            if segment.expandable:
                previous = expandable_segments.reach(last.get(key), segment.address)
            base = None if not segment.expandable else segment.address if previous is None else previous.base
            end = segment.address + segment.bytes
            for told in segment.blocks:
                previous = self._adopted(told, pool, base, previous)
            if base is not None and previous is not None:
                page = SMALL_SEGMENT_BYTES if pool.small else LARGE_SEGMENT_BYTES
                end = base + -(-self.address_space_bytes // page) * page
                last[key] = expandable_segments.beyond(previous, end)
            self.next_address = max(self.next_address, -(-end // LARGE_SEGMENT_BYTES) * LARGE_SEGMENT_BYTES)
            self.reserved_bytes += segment.bytes
        self.peak_reserved_bytes, self.peak_allocated_bytes = self.reserved_bytes, self.allocated_bytes

    def _adopted(self, told: BlockState, pool: Pool, base: int | None, previous: Block | None) -> Block:
        block = Block(told.address, told.bytes, pool, base, previous, None)
        block.requested_bytes = told.requested_bytes
        block.active = told.state != "free"
        block.allocated = told.state == "allocated"
        if block.active:
            self.active[block.address] = block
            self.allocated_bytes += block.bytes if block.allocated else 0
        else:
            pool.add(block)
        return block


def _state(head: Block) -> SegmentState:
    blocks = []
    block: Block | None = head
    while block is not None and block.mapped:
        state = "allocated" if block.allocated else "pending" if block.active else "free"
        blocks.append(BlockState(block.address, block.bytes, state, block.requested_bytes if block.active else 0))
        block = block.next
    pool, total = head.pool, sum(each.bytes for each in blocks)
    return SegmentState(head.address, total, pool.stream, pool.small, pool.number, head.base is not None, tuple(blocks))
