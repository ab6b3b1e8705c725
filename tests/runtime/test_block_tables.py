"""Block tables: rows that start with shared blocks, grow at their end and lose their beginning behind a window, and
updates from which a device's copy can follow."""

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
    row = tables.acquire_row([], 5)
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
    row = tables.acquire_row([], 8)
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
        tables.acquire_row([], 13)
    assert tables.num_free_rows == 3
    assert tables.allocator.num_free == 3
    tables.check_invariants()
    assert [tables.acquire_row([], 0) for _ in range(3)] == [0, 1, 2]


def test_releasing_a_row_frees_its_blocks_in_logical_order_and_empties_it() -> None:
    tables = make_tables()
    tables.acquire_row([], 4)
    row = tables.acquire_row([], 8)
    tables.grow(row, 12)
    assert tables.release(row) == [1, 2, 3]
    assert tables.num_free_rows == 2
    assert tables.allocator.num_used == 1
    assert tables.table[row].tolist() == [NO_BLOCK] * 4
    assert tables.num_blocks[row] == 0
    tables.check_invariants()
    assert tables.acquire_row([], 0) == row


def test_a_row_released_twice_is_an_error_of_ours() -> None:
    """Fault 4: the second release must not free what another owner holds by now."""
    tables = make_tables()
    row = tables.acquire_row([], 4)
    tables.release(row)
    with pytest.raises(AssertionError, match="not in use"):
        tables.release(row)


def test_updates_are_the_entries_written_since_the_last_drain() -> None:
    tables = make_tables()
    row = tables.acquire_row([], 5)
    assert updates(tables) == [(row, 0, 0), (row, 1, 1)]
    assert updates(tables) == []
    tables.grow(row, 9)
    assert updates(tables) == [(row, 2, 2)]
    tables.release(row)
    assert updates(tables) == []


def test_an_entry_that_changes_hands_within_a_step_is_sent_once_with_its_last_owner() -> None:
    """A device may apply the updates of one step in any order, so an entry must not be among them twice."""
    tables = make_tables()
    tables.acquire_row([], 4)
    row = tables.acquire_row([], 8)
    tables.release(row)
    assert tables.acquire_row([], 12) == row
    sent = updates(tables)
    assert len({(row, index) for row, index, _ in sent}) == len(sent) == 4
    assert {(row, index, block_id) for index, block_id in enumerate(tables.block_ids(row))} <= set(sent)


def test_all_entries_in_use_can_be_sent_again() -> None:
    tables = make_tables()
    rows = [tables.acquire_row([], 5), tables.acquire_row([], 4), tables.acquire_row([], 1)]
    tables.release(rows[1])
    tables.drain_updates()
    tables.repeat_updates()
    assert sorted(updates(tables)) == [(0, 0, 0), (0, 1, 1), (2, 0, 3)]


# ---- rows that start with blocks of others ------------------------------------------------------------------------


def cache_blocks(tables: BlockTables, count: int) -> list[int]:
    """Blocks that nobody uses, but that the prefix cache can find."""
    row = tables.acquire_row([], count * tables.block_size)
    block_ids = tables.block_ids(row)
    for block_id in block_ids:
        tables.allocator.set_indexed(block_id)
    tables.release(row)
    tables.drain_updates()
    return block_ids


def test_a_row_starts_with_the_blocks_it_shares_and_goes_on_with_new_ones() -> None:
    tables = make_tables()
    used = tables.block_ids(tables.acquire_row([], 4))
    cached = cache_blocks(tables, 1)
    row = tables.acquire_row([*used, *cached], 13)
    assert tables.block_ids(row) == [*used, *cached, 2, 3]
    assert [tables.allocator.ref_count(block_id) for block_id in tables.block_ids(row)] == [2, 1, 1, 1]
    assert updates(tables) == [(row, 0, 0), (row, 1, 1), (row, 2, 2), (row, 3, 3)]
    tables.check_invariants()


def test_holes_among_the_leading_blocks_are_filled_with_new_ones() -> None:
    """A block that is to come back from host memory needs a new one between those that are shared."""
    tables = make_tables()
    first, last = cache_blocks(tables, 2)
    row = tables.acquire_row([NO_BLOCK, first, NO_BLOCK, last], 16)
    assert tables.block_ids(row) == [2, first, 3, last]
    assert tables.allocator.num_used == 4
    tables.check_invariants()


def test_what_a_row_shares_is_never_handed_out_as_its_own_new_block() -> None:
    """The cached blocks are all that is left: the older one is shared, so the younger one must be reused."""
    tables = make_tables(num_blocks=2)
    evicted: list[int] = []
    tables.allocator.on_evict = evicted.append
    head, tail = cache_blocks(tables, 2)
    row = tables.acquire_row([tail], 8)
    assert tables.block_ids(row) == [tail, head]
    assert evicted == [head]
    tables.check_invariants()


def test_a_row_whose_new_blocks_do_not_fit_gives_its_shared_ones_back() -> None:
    tables = make_tables(num_blocks=4)
    evicted: list[int] = []
    tables.allocator.on_evict = evicted.append
    used = tables.block_ids(tables.acquire_row([], 4))
    cached = cache_blocks(tables, 1)
    tables.acquire_row([], 4)
    tables.drain_updates()
    with pytest.raises(OutOfBlocksError):
        tables.acquire_row([used[0], cached[0], NO_BLOCK], 16)
    assert tables.allocator.ref_count(used[0]) == 1
    assert tables.allocator.state(cached[0]) == "cached"
    assert (tables.num_free_rows, tables.allocator.num_available, evicted) == (1, 2, [])
    assert updates(tables) == []
    tables.check_invariants()


@pytest.mark.parametrize(
    ("num_tokens", "num_shared", "num_new"), [(7, 1, 1), (8, 2, 0), (9, 2, 1), (3, 0, 1), (4, 1, 0)]
)
def test_a_fork_shares_full_blocks_and_has_a_partial_one_of_its_own(
    num_tokens: int, num_shared: int, num_new: int
) -> None:
    """Fault 8. The leader may hold more than the fork goes on from."""
    tables = make_tables()
    leader = tables.acquire_row([], 12)
    row = tables.fork_row(leader, num_tokens)
    assert tables.block_ids(row) == [*tables.block_ids(leader)[:num_shared], *range(3, 3 + num_new)]
    assert tables.allocator.num_used == 3 + num_new
    tables.check_invariants()
    tables.release(leader)
    tables.check_invariants()
    tables.release(row)
    assert tables.allocator.num_used == 0


def test_a_fork_that_does_not_fit_takes_nothing() -> None:
    tables = make_tables(num_blocks=2)
    leader = tables.acquire_row([], 7)
    with pytest.raises(OutOfBlocksError):
        tables.fork_row(leader, 7)
    assert tables.allocator.ref_counts() == [1, 1]
    assert tables.num_free_rows == 2
    tables.check_invariants()


# ---- rows that lose their beginning -------------------------------------------------------------------------------


def test_blocks_behind_a_window_leave_the_row_and_their_places_stay() -> None:
    tables = make_tables()
    row = tables.acquire_row([], 13)
    assert tables.release_before(row, 1) == [0]
    assert tables.release_before(row, 3) == [1, 2]
    assert tables.entries(row) == [NO_BLOCK, NO_BLOCK, NO_BLOCK, 3]
    assert tables.block_ids(row) == [3]
    assert (tables.first_block[row], tables.num_blocks[row]) == (3, 4)
    assert tables.allocator.num_used == 1
    assert tables.missing_blocks(row, 16) == 0, "what is given back is not missing"
    tables.check_invariants()
    assert tables.release(row) == [3]
    assert (tables.first_block[row], tables.num_blocks[row]) == (0, 0)
    assert tables.allocator.num_used == 0
    assert tables.acquire_row([], 4) == row
    assert tables.entries(row) == [4]


def test_a_fork_of_a_row_without_its_beginning_has_none_either() -> None:
    """Fault 4: what the leader gave back belongs to others by now."""
    tables = make_tables(max_requests=2)
    leader = tables.acquire_row([], 14)
    tables.release_before(leader, 2)
    row = tables.fork_row(leader, 14)
    assert tables.entries(row) == [NO_BLOCK, NO_BLOCK, 2, 4]
    assert tables.allocator.ref_counts() == [0, 0, 2, 1, 1, 0]
    tables.check_invariants()
    for each in (leader, row):
        tables.release(each)
        tables.check_invariants()
    assert tables.allocator.num_used == 0


# ---- damage -------------------------------------------------------------------------------------------------------


def test_damage_does_not_pass_the_invariants() -> None:
    def damaged() -> tuple[BlockTables, int]:
        tables = make_tables()
        tables.acquire_row([], 4)
        return tables, tables.acquire_row([], 12)

    tables, row = damaged()
    tables.table[row, 3] = 5
    with pytest.raises(AssertionError, match="entries past its 3 blocks"):
        tables.check_invariants()
    tables, row = damaged()
    tables.table[row, 1] = NO_BLOCK
    with pytest.raises(AssertionError, match="holds block -1"):
        tables.check_invariants()
    tables, row = damaged()
    tables.table[row, 1] = 6
    with pytest.raises(AssertionError, match="holds block 6, which does not exist"):
        tables.check_invariants()
    tables, row = damaged()
    tables.first_block[row] = 1
    with pytest.raises(AssertionError, match="entries before block 1"):
        tables.check_invariants()
    tables, row = damaged()
    tables.table[row, 1] = tables.table[0, 0]
    with pytest.raises(AssertionError, match="reference counts differ"):
        tables.check_invariants()
    tables, row = damaged()
    tables.allocator.share([int(tables.table[row, 0])])
    with pytest.raises(AssertionError, match="reference counts differ"):
        tables.check_invariants()
    tables, row = damaged()
    tables.num_blocks[2] = 1
    with pytest.raises(AssertionError, match="not in use but holds 1 blocks"):
        tables.check_invariants()


def test_pins_are_no_references_of_tables() -> None:
    tables = make_tables()
    row = tables.acquire_row([], 4)
    tables.allocator.pin(tables.block_ids(row))
    tables.check_invariants()
    tables.release(row)
    tables.check_invariants()
    assert tables.allocator.num_pinned == 1


KINDS = ["grow", "grow", "acquire", "acquire", "fork", "share", "slide", "release"]
STEPS = st.lists(
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 2), st.integers(0, 16)), max_size=6), max_size=12
)


@given(steps=STEPS, seed=st.integers(0, 2**32))
def test_a_copy_that_applies_the_updates_in_any_order_follows_the_table(
    steps: list[list[tuple[str, int, int]]], seed: int
) -> None:
    tables = make_tables(num_blocks=7)
    copy = np.full_like(tables.table, 99)
    in_use: set[int] = set()
    for step in steps:
        for kind, number, num_tokens in step:
            before = tables.allocator.ref_counts()
            capacity = 4 * int(tables.num_blocks[number])
            try:
                if kind == "acquire" and tables.num_free_rows:
                    in_use.add(tables.acquire_row([], num_tokens))
                elif number not in in_use:
                    pass
                elif kind == "grow":
                    tables.grow(number, num_tokens)
                elif kind == "fork" and tables.num_free_rows and 4 * tables.first_block[number] <= num_tokens:
                    in_use.add(tables.fork_row(number, min(num_tokens, capacity)))
                elif kind == "share" and tables.num_free_rows and tables.first_block[number] == 0:
                    leading = [*tables.block_ids(number)[:2], NO_BLOCK]
                    in_use.add(tables.acquire_row(leading, 4 * len(leading)))
                elif kind == "slide" and int(tables.first_block[number]) < num_tokens // 4 <= capacity // 4:
                    tables.release_before(number, num_tokens // 4)
                elif kind == "release":
                    tables.release(number)
                    in_use.remove(number)
            except OutOfBlocksError:
                assert tables.allocator.ref_counts() == before
            tables.check_invariants()
        sent = updates(tables)
        random.Random(seed).shuffle(sent)
        for row, index, block_id in sent:
            copy[row, index] = block_id
        live = tables.table != NO_BLOCK
        assert (copy[live] == tables.table[live]).all()
