"""Logical to physical: which block holds which part of a request's context.

One int32 array for all running requests. A row is append-only while its request runs: an entry, once
written, is what kernels in flight may be reading. Only blocks that no kernel will read again, behind a sliding
window, leave a row before its request does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pageframe.runtime.block_allocator import BlockAllocator, OutOfBlocksError

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


#: Of most steps.
NO_UPDATES = TableUpdates([])


class BlockTables:
    """The block tables of all running requests.

    Args:
        max_requests: rows.
        max_blocks: entries of a row.
        block_size: token slots in a block.

    `table` [max_requests, max_blocks] int32, `num_blocks` and `first_block` [max_requests] int32 may be read by anyone:
    a row's blocks are at [first_block[row], num_blocks[row]), all other entries are NO_BLOCK. `changes` [max_requests]
    int64 counts what was done to a row other than appending to it.
    """

    def __init__(self, allocator: BlockAllocator, *, max_requests: int, max_blocks: int, block_size: int) -> None:
        self.allocator = allocator
        self.block_size = block_size
        self.table: npt.NDArray[np.int32] = np.full((max_requests, max_blocks), NO_BLOCK, dtype=np.int32)
        self.num_blocks: npt.NDArray[np.int32] = np.zeros(max_requests, dtype=np.int32)
        self.first_block: npt.NDArray[np.int32] = np.zeros(max_requests, dtype=np.int32)
        self.changes: npt.NDArray[np.int64] = np.zeros(max_requests, dtype=np.int64)
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

    def acquire_row(self, leading: Sequence[int], num_tokens: int, *, first_block: int = 0) -> int:
        """Take an empty row for `num_tokens` tokens. The caller has checked `num_free_rows`.

        Args:
            leading: the row's blocks from index `first_block` on: used or cached ones, which get one more reference,
                and NO_BLOCK for a new one. All behind them are new.

        Raises:
            OutOfBlocksError: not enough blocks are available; nothing was taken.
        """
        row = self._free_rows[-1]
        shared = [block_id for block_id in leading if block_id != NO_BLOCK]
        # References first: what is shared must not be handed out as new.
        self.allocator.share(shared)
        try:
            new = self.allocator.allocate(self.blocks_for(num_tokens) - first_block - len(shared))
        except OutOfBlocksError:
            self.allocator.free(shared)
            raise
        self._free_rows.pop()
        self._in_use[row] = True
        self.changes[row] += 1
        self.num_blocks[row] = self.first_block[row] = first_block
        unused = iter(new)
        self._append(row, [next(unused) if block_id == NO_BLOCK else block_id for block_id in leading])
        self._append(row, list(unused))
        return row

    def fork_row(self, row: int, num_tokens: int) -> int:
        """Take an empty row that shares the full blocks of `row`'s first `num_tokens` tokens, with a new block where a
        partial one is to be copied. The caller has checked `num_free_rows`.

        Raises:
            OutOfBlocksError: no block is available; nothing was taken.
        """
        first = int(self.first_block[row])
        full: list[int] = self.table[row, first : num_tokens // self.block_size].tolist()
        return self.acquire_row(full, num_tokens, first_block=first)

    def grow(self, row: int, num_tokens: int) -> list[int]:
        """Append blocks until `row` holds `num_tokens` tokens; returns the new block ids.

        Raises:
            OutOfBlocksError: not enough blocks are free; the row is as it was.
        """
        block_ids = self.allocator.allocate(self.missing_blocks(row, num_tokens))
        self._append(row, block_ids)
        return block_ids

    def _append(self, row: int, block_ids: Sequence[int]) -> None:
        first = int(self.num_blocks[row])
        end = first + len(block_ids)
        self.table[row, first:end] = block_ids
        self.num_blocks[row] = end
        for index, block_id in enumerate(block_ids, first):
            self._updates[row, index] = block_id

    def block_ids(self, row: int) -> list[int]:
        """The block ids that the row holds, in logical order, the first at index `first_block[row]`."""
        ids: list[int] = self.table[row, self.first_block[row] : self.num_blocks[row]].tolist()
        return ids

    def entries(self, row: int) -> list[int]:
        """The row's entries in logical order, NO_BLOCK for those given back."""
        entries: list[int] = self.table[row, : self.num_blocks[row]].tolist()
        return entries

    def release_before(self, row: int, index: int) -> list[int]:
        """Free the row's blocks before logical `index`, which nothing will read again; returns their ids."""
        first = int(self.first_block[row])
        block_ids: list[int] = self.table[row, first:index].tolist()
        self.allocator.free(block_ids)
        self.table[row, first:index] = NO_BLOCK
        self.changes[row] += 1
        self.first_block[row] = index
        return block_ids

    def release(self, row: int) -> list[int]:
        """Free the row's blocks and the row; returns the block ids it held."""
        assert self._in_use[row], f"row {row} is released but not in use"
        block_ids = self.block_ids(row)
        self.allocator.free(block_ids)
        self.table[row, : self.num_blocks[row]] = NO_BLOCK
        self.num_blocks[row] = self.first_block[row] = 0
        self._in_use[row] = False
        self._free_rows.append(row)
        return block_ids

    def drain_updates(self) -> TableUpdates:
        """Entries written since the last call, each once. A freed entry does no harm: kernels never read past a
        request's context, and a later owner's entries overwrite it."""
        if not self._updates:
            return NO_UPDATES
        updates = TableUpdates([(row, index, block_id) for (row, index), block_id in self._updates.items()])
        self._updates = {}
        return updates

    def repeat_updates(self) -> None:
        """Send every entry again with the next step: after a failed one nobody knows which the device has."""
        for row, index in np.argwhere(self.table != NO_BLOCK).tolist():
            self._updates[row, index] = int(self.table[row, index])

    def check_invariants(self) -> None:
        """Rows hold a dense range of valid ids; the allocator's counts are exactly the table's references and pins."""
        self.allocator.check_invariants()
        pins = self.allocator.pins()
        references = [pins.get(block_id, 0) for block_id in range(self.allocator.num_blocks)]
        for row, in_use in enumerate(self._in_use):
            first, count = int(self.first_block[row]), int(self.num_blocks[row])
            entries = self.table[row].tolist()
            assert in_use or count == 0, f"row {row} is not in use but holds {count} blocks"
            assert all(entry == NO_BLOCK for entry in entries[count:]), f"row {row} has entries past its {count} blocks"
            assert all(entry == NO_BLOCK for entry in entries[:first]), f"row {row} has entries before block {first}"
            for entry in entries[first:count]:
                assert 0 <= entry < self.allocator.num_blocks, f"row {row} holds block {entry}, which does not exist"
                references[entry] += 1
        assert sorted(self._free_rows) == [row for row, used in enumerate(self._in_use) if not used]
        assert references == self.allocator.ref_counts(), "reference counts differ from the tables' references"
