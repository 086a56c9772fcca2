"""PyTorch's caching allocator in small: one device, one stream, sizes and no memory.

Written after c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h of PyTorch 2.13, function by
function; their names are in the docstrings. Other streams and graphs' private pools are left out, and what is
off unless it is asked for: garbage collection, limits of splitting, rounding to powers of two.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field

MIN_BLOCK = 512  # kMinBlockSize
SMALL = 2**20  # kSmallSize: the most of a small pool
SMALL_SEGMENT = 2 * 2**20  # kSmallBuffer
LARGE_SEGMENT = 20 * 2**20  # large_segment_size
LARGE_ALLOCATION = 10 * 2**20  # kMinLargeAlloc: from here on a segment of its own
ROUND_LARGE = 2 * 2**20  # kRoundLarge

Operation = tuple[bool, Hashable, int]  # whether it allocates, the tensor, its bytes


class OutOfMemory(Exception):
    """The card cannot give another segment."""


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment, beside its neighbours in it. One that is not ``mapped`` is address space alone."""

    address: int
    size: int
    is_small: bool
    is_free: bool = True
    mapped: bool = True
    before: Block | None = None
    after: Block | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its segment."""
        return self.before is None and self.after is None


@dataclass
class Pool:
    """Free blocks by size and address (``BlockComparatorSize``), and address space that nothing is mapped to
    by address (``BlockComparatorAddress``)."""

    is_small: bool
    free: list[tuple[int, int, Block]] = field(default_factory=list)
    unmapped: list[tuple[int, Block]] = field(default_factory=list)

    @property
    def page(self) -> int:
        return SMALL_SEGMENT if self.is_small else LARGE_SEGMENT

    def add(self, block: Block) -> None:
        if block.mapped:
            insort(self.free, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def remove(self, block: Block) -> None:
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]


def rounded(size: int) -> int:
    """``get_round_size``."""
    return max(MIN_BLOCK, -(-size // MIN_BLOCK) * MIN_BLOCK)


def segment_bytes(size: int) -> int:
    """``get_allocation_size``."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < LARGE_ALLOCATION else -(-size // ROUND_LARGE) * ROUND_LARGE


class CachingAllocator:
    """Gives blocks as PyTorch would on a card of ``capacity`` bytes, with segments that are ``expandable`` or
    not. ``reserved`` are the bytes of segments, ``allocated`` those of blocks in use, each with its peak."""

    def __init__(self, *, expandable: bool, capacity: int | None = None) -> None:
        self.expandable, self.capacity = expandable, capacity
        self.pools = {is_small: Pool(is_small) for is_small in (True, False)}
        self.reserved = self.allocated = self.peak_reserved = self.peak_allocated = 0
        self._next_segment = 0

    def allocate(self, size: int) -> Block:
        """``malloc``: a cached block, or else a new segment, for which cached ones are given back if the card
        has no more. Raises OutOfMemory."""
        size = rounded(size)
        pool = self.pools[size <= SMALL]
        block = self._cached(pool, size) or self._new(pool, size)
        if block is None:
            self.release_cached()
            block = self._new(pool, size)
        if block is None:
            raise OutOfMemory(f"{size} bytes beside {self.reserved}")
        return self._take(pool, block, size)

    def free(self, block: Block) -> None:
        """``free_block``: with free neighbours it is one again."""
        self.allocated -= block.size
        block.is_free = True
        pool = self.pools[block.is_small]
        for neighbour in (block.before, block.after):
            self._merge(pool, block, neighbour)
        pool.add(block)

    def release_cached(self) -> None:
        """``release_cached_blocks``: segments that nobody uses go back to the driver, of expandable ones the
        whole pages that nobody uses."""
        for pool in self.pools.values():
            for _, _, block in list(pool.free):
                if self.expandable:
                    self._unmap(pool, block)
                elif block.is_whole:
                    pool.remove(block)
                    self.reserved -= block.size

    def _cached(self, pool: Pool, size: int) -> Block | None:
        """``get_free_block``: the smallest that is large enough. A block that can grow counts as all that it
        can grow to."""
        at = bisect_left(pool.free, (size,))
        if at == len(pool.free):
            return None
        if self.expandable:
            while at + 1 < len(pool.free) and _grown(pool.free[at + 1][2]) < _grown(pool.free[at][2]):
                at += 1
        return pool.free.pop(at)[2]

    def _new(self, pool: Pool, size: int) -> Block | None:
        """``alloc_block``; None where the card has no more."""
        if self.expandable:
            return self._expanded(pool, size)
        segment = segment_bytes(size)
        if not self._reserve(segment):
            return None
        return Block(self._segment(), segment, pool.is_small)

    def _expanded(self, pool: Pool, size: int) -> Block | None:
        """``try_allocate_expandable_block``: the first place with enough room, free or not mapped yet."""
        block = self._place(pool, size)
        if not block.mapped and not self._map(pool, block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.after
            assert following is not None and not following.mapped
            if not self._map(pool, following, min(size - block.size, following.size)):
                return None
            block = following  # the free block before it is a part of it now
        pool.remove(block)
        return block

    def _place(self, pool: Pool, size: int) -> Block:
        """``find_expandable_block``."""
        for _, block in pool.unmapped:
            first = block.before if block.before is not None and block.before.is_free else block
            room, at = 0, first
            while at is not None and at.is_free and room < size:
                room, at = room + at.size, at.after
            if room >= size:
                return first
        space = Block(self._segment(), 2**44, pool.is_small, mapped=False)
        pool.add(space)
        return space

    def _map(self, pool: Pool, block: Block, size: int) -> bool:
        """``map_block``: so many bytes of address space, in whole pages, become memory."""
        size = -(-size // pool.page) * pool.page
        if not self._reserve(size):
            return False
        pool.remove(block)
        block.mapped = True
        if size < block.size:
            rest = Block(block.address + size, block.size - size, pool.is_small, mapped=False)
            block.size = size
            _insert_after(block, rest)
            pool.add(rest)
        for neighbour in (block.before, block.after):
            self._merge(pool, block, neighbour)
        pool.add(block)
        return True

    def _unmap(self, pool: Pool, block: Block) -> None:
        """``unmap_block``: the whole pages of a free block."""
        first = -(-block.address // pool.page) * pool.page
        end = (block.address + block.size) // pool.page * pool.page
        if first >= end:
            return
        pool.remove(block)
        if first > block.address:
            head = Block(block.address, first - block.address, pool.is_small)
            _insert_before(block, head)
            pool.add(head)
        if block.address + block.size > end:
            tail = Block(end, block.address + block.size - end, pool.is_small)
            _insert_after(block, tail)
            pool.add(tail)
        block.address, block.size, block.mapped = first, end - first, False
        self.reserved -= block.size
        for neighbour in (block.before, block.after):
            self._merge(pool, block, neighbour)
        pool.add(block)

    def _take(self, pool: Pool, block: Block, size: int) -> Block:
        """``alloc_found_block``: what is left of a block is free, if it is worth keeping apart."""
        rest = block.size - size
        if rest >= MIN_BLOCK if pool.is_small or self.expandable else rest > SMALL:  # should_split
            other = Block(block.address + size, rest, pool.is_small)
            block.size = size
            _insert_after(block, other)
            pool.add(other)
        block.is_free = False
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def _merge(self, pool: Pool, block: Block, other: Block | None) -> None:
        """``try_merge_blocks``."""
        if other is None or not other.is_free or other.mapped != block.mapped:
            return
        pool.remove(other)
        if other is block.before:
            block.address, block.before = other.address, other.before
            if block.before is not None:
                block.before.after = block
        else:
            block.after = other.after
            if block.after is not None:
                block.after.before = block
        block.size += other.size

    def _reserve(self, size: int) -> bool:
        if self.capacity is not None and self.reserved + size > self.capacity:
            return False
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def _segment(self) -> int:
        self._next_segment += 1
        return self._next_segment * 2**45 // LARGE_SEGMENT * LARGE_SEGMENT


def _grown(block: Block) -> int:
    """The size of a free block with the address space after it."""
    after = block.after
    return block.size + (after.size if after is not None and not after.mapped else 0)


def _insert_after(block: Block, new: Block) -> None:
    new.before, new.after = block, block.after
    if new.after is not None:
        new.after.before = new
    block.after = new


def _insert_before(block: Block, new: Block) -> None:
    new.before, new.after = block.before, block
    if new.before is not None:
        new.before.after = new
    block.before = new


def replay(trace: Iterable[Operation], *, expandable: bool, capacity: int | None = None) -> CachingAllocator:
    """The allocator after all operations of a trace. Raises OutOfMemory."""
    allocator = CachingAllocator(expandable=expandable, capacity=capacity)
    live: dict[Hashable, Block] = {}
    for allocates, tensor, size in trace:
        if allocates:
            live[tensor] = allocator.allocate(size)
        elif tensor in live:
            allocator.free(live.pop(tensor))
    return allocator


def needed_bytes(trace: list[Operation], *, expandable: bool) -> int:
    """The least memory of a card, in MiB, on which a trace does not run out of it: in bytes."""
    free = replay(trace, expandable=expandable)
    low, high = free.peak_allocated >> 20, -(-free.peak_reserved // 2**20)
    while low < high:
        middle = (low + high) // 2
        try:
            replay(trace, expandable=expandable, capacity=middle << 20)
            high = middle
        except OutOfMemory:
            low = middle + 1
    return high << 20


def scaled(trace: Iterable[Operation], factor: float) -> list[Operation]:
    """The trace of a model whose tensors are all so much larger."""
    return [(allocates, tensor, max(1, int(factor * size))) for allocates, tensor, size in trace]


def peak_bytes(trace: Iterable[Operation]) -> int:
    """The most bytes that a trace asks for at once, without any rounding."""
    held = peak = 0
    for allocates, _, size in trace:
        held += size if allocates else -size
        peak = max(peak, held)
    return peak


def tensors(trace: Iterable[Operation]) -> Iterator[int]:
    """The sizes that a trace asks for."""
    return (size for allocates, _, size in trace if allocates)
