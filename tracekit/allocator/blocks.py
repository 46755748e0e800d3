"""Blocks, and the free ones of a pool in the order in which the allocator looks at them."""

from bisect import bisect_left, insort

ADDRESS_BITS = 64


class Overlap(Exception):  # noqa: N818 what happened, not whose fault
    """Two blocks at one address: memory was given to the model that lies over what it has."""


class Block:
    """A piece of a segment: one that the program holds, or a free one; or address space without memory behind it."""

    __slots__ = (
        "active", "address", "allocated", "base", "born", "bytes", "mapped", "next", "pool", "previous",
        "requested_bytes", "shared",
    )  # fmt: skip

    def __init__(self, address: int, size_bytes: int, pool: "Pool", base: int | None = None) -> None:
        """Make a free block; `base` is the start of the expandable segment that it is part of."""
        self.address = address
        self.bytes = size_bytes
        self.pool = pool
        self.base = base
        self.requested_bytes = 0
        self.allocated = False
        self.active = False  # allocated, or freed but still used by another stream
        self.shared = False  # used by another stream than its own
        self.mapped = True
        self.born = 0  # how often the pool had been asked when the block became free
        self.previous: Block | None = None
        self.next: Block | None = None

    @property
    def whole(self) -> bool:
        """Whether the block is its whole segment."""
        return self.previous is None and self.next is None

    def insert(self, previous: "Block | None", following: "Block | None") -> None:
        """Put the block between two neighbours."""
        self.previous, self.next = previous, following
        if previous is not None:
            previous.next = self
        if following is not None:
            following.previous = self

    def absorb(self, other: "Block") -> None:
        """Take over a neighbour's bytes and its other neighbour."""
        if other is self.previous:
            self.address = other.address
            self.insert(other.previous, self.next)
        else:
            self.insert(self.previous, other.next)
        self.bytes += other.bytes


class Pool:
    """The free blocks of one private pool, size class and stream, by size and then address."""

    __slots__ = ("asked", "by_key", "keys", "number", "small", "stream", "unmapped")

    def __init__(self, number: int, small: bool, stream: int) -> None:
        self.number = number
        self.small = small
        self.stream = stream
        self.asked = 0
        self.unmapped: dict[int, Block] = {}
        self.keys: list[int] = []
        """Size and address of each block in one number, in order."""
        self.by_key: dict[int, Block] = {}

    def add(self, block: Block) -> None:
        """Add a free block. Raises Overlap if there is one of this size at its address."""
        key = block.bytes << ADDRESS_BITS | block.address
        if key in self.by_key:
            raise Overlap(f"two free blocks at {block.address:#x}")
        insort(self.keys, key)
        self.by_key[key] = block
        block.born = self.asked

    def remove(self, block: Block) -> None:
        """Take a free block out."""
        key = block.bytes << ADDRESS_BITS | block.address
        del self.keys[bisect_left(self.keys, key)]
        del self.by_key[key]

    def first(self, size_bytes: int) -> int:
        """Return the place of the smallest block of at least `size_bytes`, at the lowest address of those."""
        return bisect_left(self.keys, size_bytes << ADDRESS_BITS)

    def at(self, place: int) -> Block | None:
        """Return the block at a place of the order; None past the end."""
        return self.by_key[self.keys[place]] if place < len(self.keys) else None

    def take(self, place: int) -> Block:
        """Take out the block at a place."""
        return self.by_key.pop(self.keys.pop(place))

    def blocks(self) -> list[Block]:
        """Return the free blocks, in order."""
        return [self.by_key[key] for key in self.keys]
