"""Blocks, and pools of free blocks in the order in which the allocator searches them."""

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Protocol

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
