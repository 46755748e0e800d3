"""The allocator: what it does with each request, free and return of memory."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from tracekit.replay.allocator.blocks import (
    ADDRESS_BITS,
    Block,
    Overlap,
    Pool,
    mapped_block,
    preferred_index,
    space_after,
    space_before,
    space_bytes,
    unmap,
)
from tracekit.replay.allocator.settings import (
    BLOCK_BYTES,
    LARGE_SEGMENT_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    UNLIMITED,
    Settings,
    segment_bytes,
)

ALLOC, FREE = "segment_alloc", "segment_free"
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
    """A block as in a snapshot; `state` is allocated, pending or free."""

    address: int
    bytes: int
    state: str
    requested_bytes: int = 0


class SegmentState(NamedTuple):
    """A segment as in a snapshot: a range of memory with its contiguous blocks."""

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
        """Make an empty allocator on a device with `capacity_bytes`.

        `place` returns the address of a new segment (or address space) for a size and pool; by default segments follow
        one another. `address_space_bytes` is the maximum size of an expandable segment.
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
        """Private pools without users: their memory can be released."""
        self.active: dict[int, Block] = {}
        self._pools: dict[tuple[int, bool, int], Pool] = {}
        self._rounded: dict[int, int] = {}
        self.next_address = 1 << 40
        """Address of the next segment without `place`."""
        self.place = place or self._next_free_address

    # Requests and frees -----------------------------------------------------------------------------------------------
    def malloc(self, requested_bytes: int, stream: int = 0, pool: int = COMMON_POOL) -> Block:
        """Return a block of at least `requested_bytes`. Raises OutOfMemory, or Overlap at an address in use."""
        size = self._rounded.get(requested_bytes)
        if size is None:
            size = self._rounded[requested_bytes] = self.settings.round_up(requested_bytes)
        free = self._pools.get((pool, size <= SMALL_BYTES, stream)) or self.pool(pool, size <= SMALL_BYTES, stream)
        block = self._best_fit(free, size) or self._allocate_from_device(free, size)
        rest = block.bytes - size
        splits = free.small or self.settings.expandable
        if rest >= BLOCK_BYTES and (splits or (size < self.settings.max_split_bytes and rest > SMALL_BYTES)):
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
        """Record that another stream uses the block: it is reused only after that stream has finished."""
        block.shared |= stream != block.pool.stream

    def free(self, block: Block) -> None:
        """Free a block. If another stream uses it, `complete_free` must follow."""
        block.allocated = False
        self.allocated_bytes -= block.bytes
        if not block.shared:
            del self.active[block.address]
            block.active = False
            self.return_to_pool(block)

    def request_free(self, block: Block) -> None:
        """Free the block for the program; it stays active until `complete_free`."""
        block.allocated = False
        self.allocated_bytes -= block.bytes

    def complete_free(self, block: Block) -> None:
        """Make the block available again, merged with its free neighbours."""
        del self.active[block.address]
        block.active = block.shared = False
        self.return_to_pool(block)

    def return_to_pool(self, block: Block) -> None:
        """Merge a free block with its free neighbours and add it to its pool."""
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
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = Pool(number, small, stream)
        return pool

    def _best_fit(self, pool: Pool, size: int) -> Block | None:
        if self.collects:
            pool.request_count += 1
        keys = pool.keys
        place = bisect_left(keys, size << ADDRESS_BITS)
        if place == len(keys):
            return None
        block = pool.by_key[keys[place]]
        settings = self.settings
        if block.base is not None and not (settings.expandable and (block.next is None or block.next.mapped)):
            place = preferred_index(pool, place, in_use=settings.expandable)
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
    def _allocate_from_device(self, pool: Pool, size: int) -> Block:
        """Return a block of new device memory; release cached memory and retry if there is none."""
        if self.collects:
            self._collect_garbage()
        block = self._new_block(pool, size)
        if block is None and self._release_oversized(pool, size):
            block = self._new_block(pool, size)
        if block is None:
            self.release_cached()
            self.retries += 1
            block = self._new_block(pool, size)
        if block is None:
            raise OutOfMemory(f"{size:,} bytes on stream {pool.stream}, with {self.reserved_bytes:,} bytes reserved")
        return block

    def _new_block(self, pool: Pool, size: int) -> Block | None:
        needed_bytes = segment_bytes(size)
        if self.reserved_bytes + needed_bytes > self.allowed_bytes:
            return None
        if self.settings.expandable:
            return mapped_block(self, pool, size)
        if self.reserved_bytes + needed_bytes > self.capacity_bytes:
            return None
        address = self.place(needed_bytes, pool)
        self.reserve(ALLOC, address, needed_bytes, pool)
        return Block(address, needed_bytes, pool)

    def reserve(self, action: str, address: int, size_bytes: int, pool: Pool) -> None:
        """Account for memory allocated from the device."""
        self.device_allocations += 1
        self.reserved_bytes += size_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        self.events.append(SegmentEvent(action, address, size_bytes, pool.stream))

    def unreserve(self, action: str, address: int, size_bytes: int, pool: Pool) -> None:
        """Account for memory released to the device."""
        self.reserved_bytes -= size_bytes
        self.events.append(SegmentEvent(action, address, size_bytes, pool.stream))

    def release(self, block: Block) -> None:
        """Release a free block that is a whole segment to the device."""
        block.pool.remove(block)
        self.unreserve(FREE, block.address, block.bytes, block.pool)

    def release_cached(self) -> None:
        """Release all free segments, as `torch.cuda.empty_cache` and a failed allocation do."""
        for block in [b for b in self.active.values() if not b.allocated]:
            self.complete_free(block)  # the allocator waits for the streams that use them
        for small in (False, True):
            self._release_free_blocks(COMMON_POOL, small=small)
        for number in sorted(self.freeable_pools):
            for small in (True, False):
                self._release_free_blocks(number, small=small)

    def _release_free_blocks(self, number: int, *, small: bool) -> None:
        blocks = self._free_blocks(number, small=small)
        for block in blocks:
            if block.base is None and block.whole:
                self.release(block)
        for block in blocks:
            if block.base is not None:
                unmap(self, block)

    def _free_blocks(self, number: int, *, small: bool) -> list[Block]:
        """Return the free blocks of a private pool (or the common one) and size class, by stream."""
        pools = sorted((stream, pool) for (n, s, stream), pool in self._pools.items() if (n, s) == (number, small))
        return [block for _, pool in pools for block in pool.blocks()]

    def _release_oversized(self, pool: Pool, size: int) -> bool:
        """Release blocks too large to split: one of sufficient size, otherwise the largest until the sum suffices."""
        limit = self.settings.max_split_bytes
        if limit == UNLIMITED:
            return False
        min_bytes = max(size, limit)
        place = bisect_left(pool.keys, min_bytes << ADDRESS_BITS)
        if place < len(pool.keys):
            self.release(pool.by_key[pool.keys[place]])
            return True
        released_bytes = 0
        for block in reversed(pool.blocks()):
            if released_bytes >= min_bytes or block.bytes < limit:
                break
            released_bytes += block.bytes
            self.release(block)
        return released_bytes >= min_bytes

    def _collect_garbage(self) -> None:
        """Release unused large segments, the least recently used first (garbage_collection_threshold)."""
        threshold = int(self.settings.gc_threshold * self.allowed_bytes)
        target, released_bytes = self.reserved_bytes - threshold, 0
        idle = [block for block in self._free_blocks(COMMON_POOL, small=False) if block.whole]
        age = sum(block.pool.request_count - block.free_since for block in idle)
        while released_bytes < target and idle:
            mean = age / len(idle)
            recent = []
            for block in idle:
                since = block.pool.request_count - block.free_since
                if since < mean:
                    recent.append(block)
                    continue
                age -= since
                released_bytes += block.bytes
                self.release(block)
            idle = recent

    def _next_free_address(self, size_bytes: int, pool: Pool) -> int:  # noqa: ARG002 one signature for all
        address = self.next_address
        self.next_address += -(-size_bytes // SMALL_SEGMENT_BYTES) * SMALL_SEGMENT_BYTES
        return address

    # State ------------------------------------------------------------------------------------------------------------
    def blocks(self) -> Iterator[Block]:
        """Yield all mapped blocks, free or not, in no particular order."""
        yield from self.active.values()
        for pool in self._pools.values():
            yield from pool.blocks()

    def segments(self) -> list[SegmentState]:
        """Return the segments as in a snapshot, by address."""
        heads = [block for block in self.blocks() if block.previous is None or not block.previous.mapped]
        return [_state(head) for head in sorted(heads, key=lambda block: block.address)]

    def adopt(self, segments: Iterable[SegmentState]) -> None:
        """Start from the segments of a snapshot."""
        last: dict[tuple[int, bool, int], Block] = {}  # of expandable segments: the block before the next range
        for segment in sorted(segments):
            pool = self.pool(segment.pool, segment.small, segment.stream)
            key = (segment.pool, segment.small, segment.stream)
            previous = None
            if segment.expandable:
                previous = space_before(last.get(key), segment.address)
            base = segment.address if previous is None else previous.base
            base = base if segment.expandable else None
            end = segment.address + segment.bytes
            for state in segment.blocks:
                previous = self._adopt_block(state, pool, base, previous)
            if base is not None and previous is not None:
                end = base + space_bytes(self, pool)
                last[key] = space_after(previous, end)
            self.next_address = max(self.next_address, -(-end // LARGE_SEGMENT_BYTES) * LARGE_SEGMENT_BYTES)
            self.reserved_bytes += segment.bytes
        self.peak_reserved_bytes, self.peak_allocated_bytes = self.reserved_bytes, self.allocated_bytes

    def _adopt_block(self, state: BlockState, pool: Pool, base: int | None, previous: Block | None) -> Block:
        block = Block(state.address, state.bytes, pool, base, previous, None)
        block.requested_bytes = state.requested_bytes
        block.active = state.state != "free"
        block.allocated = state.state == "allocated"
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
        used = "allocated" if block.allocated else "pending"
        state = used if block.active else "free"
        blocks.append(BlockState(block.address, block.bytes, state, block.requested_bytes if block.active else 0))
        block = block.next
    pool, total = head.pool, sum(b.bytes for b in blocks)
    return SegmentState(head.address, total, pool.stream, pool.small, pool.number, head.base is not None, tuple(blocks))
