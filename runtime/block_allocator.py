"""Physical blocks: who holds how many references, and which blocks are free.

It knows block ids and nothing else: not what a block holds, nor for whom. Its callers are BlockTables and,
through it, the scheduler.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from pageframe.runtime.errors import EngineError


class OutOfBlocksError(EngineError):
    """More blocks were asked for than are free. Nothing was taken."""

    def __init__(self, wanted: int, free: int) -> None:
        super().__init__(f"{wanted} blocks wanted, {free} free")
        self.wanted = wanted
        self.free = free


class BlockAllocator:
    """A pool of `num_blocks` blocks with reference counts. Every operation is O(1) per block.

    A block is *free* (reference count 0, in the free list) or *used* (count of 1 and more). The free list is in
    the order in which blocks will be handed out: least recently freed first, so that what a block held survives
    as long as it can. An OrderedDict makes taking a block out of the middle O(1) too.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; it must be at least 1")
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def ref_counts(self) -> list[int]:
        """A copy of all reference counts, by block id."""
        return self._ref_counts.copy()

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each with one reference.

        Raises:
            OutOfBlocksError: fewer are free; nothing was taken.
        """
        if count > len(self._free):
            raise OutOfBlocksError(count, len(self._free))
        block_ids = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def share(self, block_ids: Sequence[int]) -> None:
        """Add one reference to each of these used blocks."""
        for block_id in block_ids:
            assert self._ref_counts[block_id] > 0, f"block {block_id} is free and cannot be shared"
            self._ref_counts[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop one reference of each block of a chain, given head first.

        Blocks without references left join the free list, the chain's tail first: a head is worth more than a tail,
        since a prefix can be used without what follows it.
        """
        for block_id in reversed(block_ids):
            count = self._ref_counts[block_id]
            assert count > 0, f"block {block_id} is freed but already free"
            self._ref_counts[block_id] = count - 1
            if count == 1:
                self._free[block_id] = None

    def check_invariants(self) -> None:
        """Every block is either free with no references, or used with at least one."""
        for block_id, count in enumerate(self._ref_counts):
            assert count >= 0, f"block {block_id} has reference count {count}"
            is_free = block_id in self._free
            assert is_free == (count == 0), f"block {block_id} has {count} references; in the free list: {is_free}"
        assert len(self._free) + self.num_used == self.num_blocks
