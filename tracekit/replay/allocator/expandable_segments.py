"""Expandable segments: address space into which memory is mapped page by page, so that a segment grows in place."""

from tracekit.replay.allocator.blocks import Block, DeviceMemory, Pool
from tracekit.replay.allocator.settings import LARGE_SEGMENT_BYTES, SMALL_SEGMENT_BYTES


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
        block = _new_space(allocator, pool)
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


def _new_space(allocator: DeviceMemory, pool: Pool) -> Block:
    size = space_bytes(allocator, pool)
    address = allocator.place(size, pool)
    space = Block(address, size, pool, address)
    space.mapped = False
    pool.unmapped[address] = space
    return space


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
