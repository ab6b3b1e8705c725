"""Logical to physical: which block holds which part of a request's context.

One int32 array for all running requests. A row is append-only while its request runs: an entry, once
written, is what kernels in flight may be reading.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pageframe.runtime.block_allocator import BlockAllocator

NO_BLOCK = -1


class TableUpdates:
    """Entries written since the last step, as parallel int32 arrays: what the device's copy must change."""

    __slots__ = ("block_ids", "indices", "rows")

    def __init__(self, entries: list[tuple[int, int, int]]) -> None:
        columns = np.array(entries, dtype=np.int32).reshape(-1, 3)
        self.rows: npt.NDArray[np.int32] = columns[:, 0]
        self.indices: npt.NDArray[np.int32] = columns[:, 1]
        self.block_ids: npt.NDArray[np.int32] = columns[:, 2]

    def __len__(self) -> int:
        return len(self.rows)


class BlockTables:
    """The block tables of all running requests, and the one caller of the allocator.

    Args:
        max_requests: rows.
        max_blocks: entries of a row.
        block_size: token slots in a block.

    `table` [max_requests, max_blocks] int32 and `num_blocks` [max_requests] int32 may be read by anyone; entries at
    and past `num_blocks[row]` are NO_BLOCK.
    """

    def __init__(self, allocator: BlockAllocator, *, max_requests: int, max_blocks: int, block_size: int) -> None:
        self.allocator = allocator
        self.block_size = block_size
        self.table: npt.NDArray[np.int32] = np.full((max_requests, max_blocks), NO_BLOCK, dtype=np.int32)
        self.num_blocks: npt.NDArray[np.int32] = np.zeros(max_requests, dtype=np.int32)
        self._free_rows = list(range(max_requests - 1, -1, -1))
        self._in_use = [False] * max_requests
        #: By (row, index): an entry that changes hands twice in a step is sent once, since a device may apply the
        #: updates of one step in any order.
        self._updates: dict[tuple[int, int], int] = {}

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def missing_blocks(self, row: int, num_tokens: int) -> int:
        """Blocks that `row` lacks to hold `num_tokens` tokens."""
        return max(0, self.blocks_for(num_tokens) - int(self.num_blocks[row]))

    def acquire_row(self, num_tokens: int) -> int:
        """Take an empty row and blocks for `num_tokens` tokens. The caller has checked `num_free_rows`.

        Raises:
            OutOfBlocksError: not enough blocks are free; nothing was taken.
        """
        self.grow(self._free_rows[-1], num_tokens)
        row = self._free_rows.pop()
        self._in_use[row] = True
        return row

    def grow(self, row: int, num_tokens: int) -> list[int]:
        """Append blocks until `row` holds `num_tokens` tokens; returns the new block ids.

        Raises:
            OutOfBlocksError: not enough blocks are free; the row is as it was.
        """
        first = int(self.num_blocks[row])
        block_ids = self.allocator.allocate(self.missing_blocks(row, num_tokens))
        end = first + len(block_ids)
        self.table[row, first:end] = block_ids
        self.num_blocks[row] = end
        for index, block_id in enumerate(block_ids, first):
            self._updates[row, index] = block_id
        return block_ids

    def block_ids(self, row: int) -> list[int]:
        """The row's block ids in logical order."""
        ids: list[int] = self.table[row, : self.num_blocks[row]].tolist()
        return ids

    def release(self, row: int) -> list[int]:
        """Free the row's blocks and the row; returns the block ids it held."""
        assert self._in_use[row], f"row {row} is released but not in use"
        block_ids = self.block_ids(row)
        self.allocator.free(block_ids)
        self.table[row, : len(block_ids)] = NO_BLOCK
        self.num_blocks[row] = 0
        self._in_use[row] = False
        self._free_rows.append(row)
        return block_ids

    def drain_updates(self) -> TableUpdates:
        """Entries written since the last call, each once. A freed entry does no harm: kernels never read past a
        request's context, and a later owner's entries overwrite it."""
        updates = TableUpdates([(row, index, block_id) for (row, index), block_id in self._updates.items()])
        self._updates = {}
        return updates

    def repeat_updates(self) -> None:
        """Send every entry again with the next step: after a failed one nobody knows which the device has."""
        for row, index in np.argwhere(self.table != NO_BLOCK).tolist():
            self._updates[row, index] = int(self.table[row, index])

    def check_invariants(self) -> None:
        """Rows hold a dense prefix of valid ids; the allocator's counts are exactly the table's references."""
        self.allocator.check_invariants()
        references = [0] * self.allocator.num_blocks
        for row, in_use in enumerate(self._in_use):
            count = int(self.num_blocks[row])
            entries = self.table[row].tolist()
            assert in_use or count == 0, f"row {row} is not in use but holds {count} blocks"
            assert all(entry == NO_BLOCK for entry in entries[count:]), f"row {row} has entries past its {count} blocks"
            for entry in entries[:count]:
                assert 0 <= entry < self.allocator.num_blocks, f"row {row} holds block {entry}, which does not exist"
                references[entry] += 1
        assert sorted(self._free_rows) == [row for row, used in enumerate(self._in_use) if not used]
        assert references == self.allocator.ref_counts(), "reference counts differ from the tables' references"
