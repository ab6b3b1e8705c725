"""Block tables: rows that grow at their end, and updates from which a device's copy can follow."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pageframe.runtime.block_allocator import BlockAllocator, OutOfBlocksError
from pageframe.runtime.block_table import NO_BLOCK, BlockTables


def make_tables(num_blocks: int = 6, max_requests: int = 3, max_blocks: int = 4, block_size: int = 4) -> BlockTables:
    allocator = BlockAllocator(num_blocks)
    return BlockTables(allocator, max_requests=max_requests, max_blocks=max_blocks, block_size=block_size)


def updates(tables: BlockTables) -> list[tuple[int, int, int]]:
    drained = tables.drain_updates()
    assert drained.rows.dtype == drained.indices.dtype == drained.block_ids.dtype == np.int32
    columns = (drained.rows.tolist(), drained.indices.tolist(), drained.block_ids.tolist())
    return list(zip(*columns, strict=True))


@pytest.mark.parametrize(("num_tokens", "blocks"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_for(num_tokens: int, blocks: int) -> None:
    """Fault 8: exactly one block less, one token before and behind a multiple of the block size."""
    assert make_tables().blocks_for(num_tokens) == blocks


def test_a_row_grows_at_its_end_and_only_by_what_it_lacks() -> None:
    tables = make_tables()
    row = tables.acquire_row(5)
    assert tables.block_ids(row) == [0, 1]
    assert tables.grow(row, 8) == []
    assert tables.missing_blocks(row, 9) == 1
    assert tables.grow(row, 9) == [2]
    assert tables.missing_blocks(row, 1) == 0
    assert tables.table[row].tolist() == [0, 1, 2, NO_BLOCK]
    assert tables.num_blocks[row] == 3
    assert tables.allocator.num_used == 3
    tables.check_invariants()


def test_growth_that_does_not_fit_changes_nothing() -> None:
    tables = make_tables(num_blocks=3)
    row = tables.acquire_row(8)
    tables.drain_updates()
    with pytest.raises(OutOfBlocksError):
        tables.grow(row, 16)
    assert tables.block_ids(row) == [0, 1]
    assert tables.allocator.num_free == 1
    assert updates(tables) == []
    tables.check_invariants()


def test_a_row_whose_blocks_do_not_fit_is_not_taken() -> None:
    tables = make_tables(num_blocks=3)
    with pytest.raises(OutOfBlocksError):
        tables.acquire_row(13)
    assert tables.num_free_rows == 3
    assert tables.allocator.num_free == 3
    tables.check_invariants()
    assert [tables.acquire_row(0) for _ in range(3)] == [0, 1, 2]


def test_releasing_a_row_frees_its_blocks_in_logical_order_and_empties_it() -> None:
    tables = make_tables()
    tables.acquire_row(4)
    row = tables.acquire_row(8)
    tables.grow(row, 12)
    assert tables.release(row) == [1, 2, 3]
    assert tables.num_free_rows == 2
    assert tables.allocator.num_used == 1
    assert tables.table[row].tolist() == [NO_BLOCK] * 4
    assert tables.num_blocks[row] == 0
    tables.check_invariants()
    assert tables.acquire_row(0) == row


def test_a_row_released_twice_is_an_error_of_ours() -> None:
    """Fault 4: the second release must not free what another owner holds by now."""
    tables = make_tables()
    row = tables.acquire_row(4)
    tables.release(row)
    with pytest.raises(AssertionError, match="not in use"):
        tables.release(row)


def test_updates_are_the_entries_written_since_the_last_drain() -> None:
    tables = make_tables()
    row = tables.acquire_row(5)
    assert updates(tables) == [(row, 0, 0), (row, 1, 1)]
    assert updates(tables) == []
    tables.grow(row, 9)
    assert updates(tables) == [(row, 2, 2)]
    tables.release(row)
    assert updates(tables) == []


def test_an_entry_that_changes_hands_within_a_step_is_sent_once_with_its_last_owner() -> None:
    """A device may apply the updates of one step in any order, so an entry must not be among them twice."""
    tables = make_tables()
    tables.acquire_row(4)
    row = tables.acquire_row(8)
    tables.release(row)
    assert tables.acquire_row(12) == row
    sent = updates(tables)
    assert len({(row, index) for row, index, _ in sent}) == len(sent) == 4
    assert {(row, index, block_id) for index, block_id in enumerate(tables.block_ids(row))} <= set(sent)


def test_all_entries_in_use_can_be_sent_again() -> None:
    tables = make_tables()
    rows = [tables.acquire_row(5), tables.acquire_row(4), tables.acquire_row(1)]
    tables.release(rows[1])
    tables.drain_updates()
    tables.repeat_updates()
    assert sorted(updates(tables)) == [(0, 0, 0), (0, 1, 1), (2, 0, 3)]


STEPS = st.lists(st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 16)), max_size=6), max_size=12)


@given(steps=STEPS, seed=st.integers(0, 2**32))
def test_a_copy_that_applies_the_updates_in_any_order_follows_the_table(
    steps: list[list[tuple[bool, int, int]]], seed: int
) -> None:
    tables = make_tables(num_blocks=7)
    copy = np.full_like(tables.table, 99)
    in_use: set[int] = set()
    for step in steps:
        for growing, number, num_tokens in step:
            try:
                if not growing and number in in_use:
                    tables.release(number)
                    in_use.remove(number)
                elif growing and number in in_use:
                    tables.grow(number, num_tokens)
                elif growing and tables.num_free_rows:
                    in_use.add(tables.acquire_row(num_tokens))
            except OutOfBlocksError:
                pass
            tables.check_invariants()
        sent = updates(tables)
        random.Random(seed).shuffle(sent)
        for row, index, block_id in sent:
            copy[row, index] = block_id
        live = tables.table != NO_BLOCK
        assert (copy[live] == tables.table[live]).all()
