"""Blocks, and pools of free blocks in the order in which the allocator searches them."""

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Protocol

from tracekit.replay.allocator.settings import LARGE_SEGMENT_BYTES, SMALL_SEGMENT_BYTES

ADDRESS_BITS = 64


class Overlap(Exception):  # noqa: N818 what happened, not whose fault
    """Two blocks at one address: the model received memory that overlaps its own."""


class Block:
    """A part of a segment, allocated or free; or address space without physical memory."""

    __slots__ = (
        "active", "address", "allocated", "base", "bytes", "free_since", "key", "mapped", "next", "pool", "previous",
        "requested_bytes", "shared",
    )  # fmt: skip
    requested_bytes: int
    """Set while the block is allocated."""
    free_since: int
    """Request count of the pool when the block became free; set while it is free."""

    def __init__(
        self,
        address: int,
        size_bytes: int,
        pool: "Pool",
        base: int | None = None,
        previous: "Block | None" = None,
        following: "Block | None" = None,
    ) -> None:
        """Make a free block between two neighbours; `base` is the start of the expandable segment that it is in."""
        self.address = address
        self.bytes = size_bytes
        self.pool = pool
        self.base = base
        self.key = 0  # its position in the order of its pool; 0 while it is not in the pool
        self.active = self.allocated = False  # active: allocated, or freed but still used by another stream
        self.shared = False  # used by another stream than its own
        self.mapped = True
        self.previous = previous
        self.next = following
        if previous is not None:
            previous.next = self
        if following is not None:
            following.previous = self

    @property
    def whole(self) -> bool:
        """Whether the block is its whole segment."""
        return self.previous is None and self.next is None

    def absorb(self, other: "Block") -> None:
        """Merge a neighbour into this block."""
        self.bytes += other.bytes
        if other is self.previous:
            self.address = other.address
            self.previous = further = other.previous
            if further is not None:
                further.next = self
        else:
            self.next = further = other.next
            if further is not None:
                further.previous = self


class Pool:
    """The free blocks of one private pool, size class and stream, by size and then address."""

    __slots__ = ("by_key", "keys", "number", "request_count", "small", "stream", "unmapped")

    def __init__(self, number: int, small: bool, stream: int) -> None:
        self.number = number
        self.small = small
        self.stream = stream
        self.request_count = 0
        self.unmapped: dict[int, Block] = {}
        self.keys: list[int] = []
        """Size and address of each block combined in one integer, sorted."""
        self.by_key: dict[int, Block] = {}

    def add(self, block: Block) -> None:
        """Add a free block. Raises Overlap if there is one of this size at its address."""
        key = block.bytes << ADDRESS_BITS | block.address
        if key in self.by_key:
            raise Overlap(f"two free blocks at {block.address:#x}")
        insort(self.keys, key)
        self.by_key[key] = block
        block.key = key
        block.free_since = self.request_count

    def remove(self, block: Block) -> None:
        """Remove a free block."""
        del self.keys[bisect_left(self.keys, block.key)]
        del self.by_key[block.key]
        block.key = 0

    def blocks(self) -> list[Block]:
        """Return the free blocks, in order."""
        return [self.by_key[key] for key in self.keys]


class DeviceMemory(Protocol):
    """The part of the allocator that maps and unmaps device memory."""

    reserved_bytes: int
    capacity_bytes: int
    address_space_bytes: int
    place: Callable[[int, Pool], int]

    def return_to_pool(self, block: Block) -> None:
        """Merge a free block with its free neighbours and add it to its pool."""

    def reserve(self, action: str, address: int, size_bytes: int, pool: Pool) -> None:
        """Account for memory allocated from the device."""

    def unreserve(self, action: str, address: int, size_bytes: int, pool: Pool) -> None:
        """Account for memory released to the device."""


def preferred_index(pool: Pool, place: int, *, in_use: bool) -> int:
    """Return the index of the block to use if the best fit, at `place`, is part of an expandable segment.

    A block at the end of its segment counts with the space into which it can grow, so it is used last. If expandable
    segments were turned off again, their blocks are not used.
    """
    keys, by_key = pool.keys, pool.by_key
    if not in_use:
        while place < len(keys) and by_key[keys[place]].base is not None:
            place += 1
        return place
    best = by_key[keys[place]]
    for further in range(place + 1, len(keys)):
        # Only a block that can grow is skipped: the others are sorted by size.
        if best.base is None or best.next is None or best.next.mapped:
            break
        following = by_key[keys[further]]
        if _growable_bytes(following) >= _growable_bytes(best):
            break
        best, place = following, further
    return place


def mapped_block(allocator: DeviceMemory, pool: Pool, size: int) -> Block | None:
    """Map memory for a block of at least `size` and return it, removed from its pool; None if there is no room."""
    block = _candidate(pool, size)
    if block is None:
        space = space_bytes(allocator, pool)
        address = allocator.place(space, pool)
        block = pool.unmapped[address] = Block(address, space, pool, address)
        block.mapped = False
    if block.bytes < size and block.whole:
        return None  # larger than the maximum segment
    if not block.mapped and not _map(allocator, block, min(block.bytes, size)):
        return None
    while block.bytes < size:
        following = block.next
        assert following is not None
        if not _map(allocator, following, min(size - block.bytes, following.bytes)):
            return None
        block = following
    pool.remove(block)
    return block


def unmap(allocator: DeviceMemory, block: Block) -> None:
    """Unmap the whole pages of a free block; the rest at either end stays free."""
    pool, page = block.pool, _page_bytes(block.pool)
    assert block.base is not None
    begin = block.base + -(-(block.address - block.base) // page) * page
    end = block.base + (block.address + block.bytes - block.base) // page * page
    if begin >= end:
        return
    pool.remove(block)
    if begin > block.address:
        pool.add(Block(block.address, begin - block.address, pool, block.base, block.previous, block))
    if block.address + block.bytes > end:
        past = block.address + block.bytes
        pool.add(Block(end, past - end, pool, block.base, block, block.next))
    block.address, block.bytes, block.mapped = begin, end - begin, False
    for neighbour in (block.previous, block.next):
        if neighbour is not None and not neighbour.mapped:
            del pool.unmapped[neighbour.address]
            block.absorb(neighbour)
    if not block.whole:
        pool.unmapped[block.address] = block
    allocator.unreserve("segment_unmap", begin, end - begin, pool)


def space_before(space: Block | None, address: int) -> Block | None:
    """Return the space before a mapped range, shortened to end at it; None if the range is in another segment."""
    if space is None or not space.address <= address < space.address + space.bytes:
        return None
    if space.address == address:
        before = space.previous
        del space.pool.unmapped[space.address]
        return before
    space.bytes = address - space.address
    return space


def space_after(block: Block, end: int) -> Block:
    """Return the space from the end of a mapped range to the end of its segment."""
    begin = block.address + block.bytes
    space = Block(begin, max(end - begin, 0), block.pool, block.base, block, None)
    space.mapped = False
    block.pool.unmapped[begin] = space
    return space


def space_bytes(allocator: DeviceMemory, pool: Pool) -> int:
    """Return the size of a segment's address space: whole pages."""
    page = _page_bytes(pool)
    return -(-allocator.address_space_bytes // page) * page


def _page_bytes(pool: Pool) -> int:
    return SMALL_SEGMENT_BYTES if pool.small else LARGE_SEGMENT_BYTES


def _growable_bytes(block: Block) -> int:
    following = block.next
    return block.bytes + (following.bytes if following is not None and not following.mapped else 0)


def _candidate(pool: Pool, size: int) -> Block | None:
    """Return the block with the lowest address at which `size` contiguous bytes can be mapped."""
    for address in sorted(pool.unmapped):
        first = pool.unmapped[address]
        if first.previous is not None and not first.previous.active:
            first = first.previous  # include the free block before it
        room, block = 0, first
        while room < size and not block.active:
            room += block.bytes
            if block.next is None:
                break
            block = block.next
        if room >= size:
            return first
    return None


def _map(allocator: DeviceMemory, block: Block, size: int) -> bool:
    """Map pages at the start of a space; it becomes a free block, merged with free neighbours."""
    pool, page = block.pool, _page_bytes(block.pool)
    size = -(-size // page) * page
    if allocator.reserved_bytes + size > allocator.capacity_bytes:
        return False
    address = block.address
    del pool.unmapped[address]
    if size < block.bytes:
        rest = Block(address + size, block.bytes - size, pool, block.base, block, block.next)
        rest.mapped = False
        pool.unmapped[rest.address] = rest
        block.bytes = size
    block.mapped = True
    allocator.return_to_pool(block)
    allocator.reserve("segment_map", address, size, pool)
    return True
