"""Physical blocks: who holds how many references, and which blocks can be handed out.

It knows block ids and nothing else: not what a block holds, nor for whom. BlockTables takes and gives back,
PrefixCache marks what can be found, BlockManager pins.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from pageframe.runtime.errors import EngineError


class OutOfBlocksError(EngineError):
    """More blocks were asked for than can be handed out. Nothing was taken."""

    def __init__(self, wanted: int, available: int) -> None:
        super().__init__(f"{wanted} blocks wanted, {available} available")
        self.wanted = wanted
        self.available = available


class BlockAllocator:
    """A pool of `num_blocks` blocks with reference counts. Every operation is O(1) per block.

    A block is one of

        free     no references, contents worth nothing
        cached   no references, but indexed: the prefix cache may still find what it holds
        used     referenced, by block tables at least
        pinned   referenced, but only by pins: a copy in flight reads or writes it

    Free blocks are handed out first, then cached ones, the least recently used first; `on_evict` is called with each
    cached block that is taken.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; it must be at least 1")
        self.num_blocks = num_blocks
        #: Set by the prefix cache, the one who indexes blocks.
        self.on_evict: Callable[[int], None] = _nobody_indexes
        self._ref_counts = array("i", bytes(4 * num_blocks))
        self._indexed = bytearray(num_blocks)
        self._free: deque[int] = deque(range(num_blocks))
        # Least recently used first; an OrderedDict makes taking a block out of the middle O(1) too.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._pins: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_pinned(self) -> int:
        return sum(self._ref_counts[block_id] == pins for block_id, pins in self._pins.items())

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available - self.num_pinned

    def counts(self) -> dict[str, int]:
        """Blocks by state."""
        return {"free": self.num_free, "cached": self.num_cached, "used": self.num_used, "pinned": self.num_pinned}

    def ref_count(self, block_id: int) -> int:
        """References of tables and pins."""
        return self._ref_counts[block_id]

    def ref_counts(self) -> list[int]:
        """A copy of all reference counts, by block id."""
        return self._ref_counts.tolist()

    @property
    def reference_view(self) -> memoryview:
        """All reference counts by block id, int32, as they are: to be read, now."""
        return memoryview(self._ref_counts).toreadonly()

    @property
    def indexed_view(self) -> memoryview:
        """Whether the prefix cache can find each block, uint8 by block id: to be read, now."""
        return memoryview(self._indexed).toreadonly()

    def pins(self) -> dict[int, int]:
        """A copy of the pins, by block id; each is part of the block's reference count."""
        return self._pins.copy()

    def state(self, block_id: int) -> str:
        """ "free", "cached", "used" or "pinned"."""
        count = self._ref_counts[block_id]
        if count == 0:
            return "cached" if self._indexed[block_id] else "free"
        return "pinned" if self._pins.get(block_id) == count else "used"

    def allocate(self, count: int) -> list[int]:
        """Take `count` free or cached blocks, each with one reference and not indexed.

        Raises:
            OutOfBlocksError: fewer are available; nothing was taken.
        """
        if count > self.num_available:
            raise OutOfBlocksError(count, self.num_available)
        num_free = min(count, len(self._free))
        block_ids = [self._free.popleft() for _ in range(num_free)]
        for _ in range(count - num_free):
            block_id, _ = self._cached.popitem(last=False)
            self._indexed[block_id] = False
            self.on_evict(block_id)
            block_ids.append(block_id)
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def share(self, block_ids: Sequence[int]) -> None:
        """Add one reference to each of these blocks, used or cached."""
        for block_id in block_ids:
            count = self._ref_counts[block_id]
            if count == 0:
                assert self._indexed[block_id], f"block {block_id} is free and cannot be shared"
                del self._cached[block_id]
            self._ref_counts[block_id] = count + 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop one reference of each block of a chain, given head first.

        Blocks without references left become cached or free, the chain's tail first: a head is worth more than a tail,
        since a prefix can be used without what follows it.
        """
        for block_id in reversed(block_ids):
            count = self._ref_counts[block_id]
            assert count > self._pins.get(block_id, 0), f"block {block_id} is freed more often than it was taken"
            self._drop_reference(block_id)

    def _drop_reference(self, block_id: int) -> None:
        count = self._ref_counts[block_id] - 1
        self._ref_counts[block_id] = count
        if count == 0:
            if self._indexed[block_id]:
                self._cached[block_id] = None
            else:
                self._free.append(block_id)

    def pin(self, block_ids: Sequence[int]) -> None:
        """Keep these used blocks from being handed out, whatever their tables do."""
        self.share(block_ids)
        for block_id in block_ids:
            self._pins[block_id] = self._pins.get(block_id, 0) + 1

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Take one pin of each back."""
        for block_id in block_ids:
            left = self._pins.pop(block_id) - 1
            if left:
                self._pins[block_id] = left
            self._drop_reference(block_id)

    def is_indexed(self, block_id: int) -> bool:
        """The prefix cache can find this block."""
        return bool(self._indexed[block_id])

    def set_indexed(self, block_id: int) -> None:
        """The prefix cache can find this used block from now on, also when nobody uses it any more."""
        assert self._ref_counts[block_id] > 0, f"block {block_id} is indexed but not in use"
        self._indexed[block_id] = True

    def clear_indexed(self, block_id: int) -> None:
        """The prefix cache has forgotten this block: if nobody uses it, it is free."""
        self._indexed[block_id] = False
        if self._ref_counts[block_id] == 0:
            del self._cached[block_id]
            self._free.append(block_id)

    def touch(self, block_id: int) -> None:
        """If it is cached, it is the last to be handed out now."""
        if block_id in self._cached:
            self._cached.move_to_end(block_id)

    def eviction_order(self) -> list[int]:
        """The cached blocks in the order in which they will be handed out once no free ones are left."""
        return list(self._cached)

    def check_invariants(self) -> None:
        """Every block is exactly one of free, cached, used and pinned."""
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is in the free list twice"
        for block_id, count in enumerate(self._ref_counts):
            pins = self._pins.get(block_id, 0)
            assert count >= pins >= 0, f"block {block_id} has {count} references, {pins} of them pins"
            state = self.state(block_id)
            assert (block_id in free) == (state == "free"), f"block {block_id} is {state}; in the free list or not?"
            assert (block_id in cached) == (state == "cached"), f"block {block_id} is {state}; in the LRU list or not?"
        assert self.num_free + self.num_cached + self.num_used + self.num_pinned == self.num_blocks


def _nobody_indexes(block_id: int) -> None:
    raise AssertionError(f"block {block_id} is cached, but no prefix cache is there to index it")
