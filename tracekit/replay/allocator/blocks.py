"""Blocks, and the free ones of a pool in the order in which the allocator looks at them."""

from bisect import bisect_left, insort

ADDRESS_BITS = 64


class Overlap(Exception):  # noqa: N818 what happened, not whose fault
    """Two blocks at one address: memory was given to the model that lies over what it has."""


class Block:
    """A piece of a segment: one that the program holds, or a free one; or address space without memory behind it."""

    __slots__ = (
        "active", "address", "allocated", "base", "born", "bytes", "key", "mapped", "next", "pool", "previous",
        "requested_bytes", "shared",
    )  # fmt: skip
    requested_bytes: int
    """Set where the program holds the block."""
    born: int
    """How often the pool had been asked when the block became free; set where it is free."""

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
        self.key = 0  # its place in the order of its pool; 0 while it is not there
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
        """Take over a neighbour's bytes and its other neighbour."""
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
        block.key = key
        block.born = self.asked

    def remove(self, block: Block) -> None:
        """Take a free block out."""
        del self.keys[bisect_left(self.keys, block.key)]
        del self.by_key[block.key]
        block.key = 0

    def blocks(self) -> list[Block]:
        """Return the free blocks, in order."""
        return [self.by_key[key] for key in self.keys]
