"""The allocator against a list that does the same slowly, and its promises one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pageframe.runtime.block_allocator import BlockAllocator, OutOfBlocksError


def test_allocates_each_block_once_and_counts_them() -> None:
    allocator = BlockAllocator(5)
    assert (allocator.num_blocks, allocator.num_free, allocator.num_used) == (5, 5, 0)
    first = allocator.allocate(2)
    second = allocator.allocate(3)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert (allocator.num_free, allocator.num_used) == (0, 5)
    assert allocator.ref_counts() == [1, 1, 1, 1, 1]
    allocator.check_invariants()


def test_too_many_blocks_take_nothing_and_name_the_numbers() -> None:
    allocator = BlockAllocator(3)
    allocator.allocate(1)
    with pytest.raises(OutOfBlocksError, match="3 blocks wanted, 2 free") as caught:
        allocator.allocate(3)
    assert (caught.value.wanted, caught.value.free) == (3, 2)
    assert allocator.num_free == 2
    assert len(allocator.allocate(2)) == 2


def test_allocating_nothing_is_allowed_in_a_full_pool() -> None:
    allocator = BlockAllocator(1)
    allocator.allocate(1)
    assert allocator.allocate(0) == []


def test_a_shared_block_is_free_after_its_last_reference() -> None:
    allocator = BlockAllocator(2)
    (block_id,) = allocator.allocate(1)
    allocator.share([block_id])
    assert allocator.ref_count(block_id) == 2
    allocator.free([block_id])
    assert (allocator.ref_count(block_id), allocator.num_used) == (1, 1)
    allocator.free([block_id])
    assert (allocator.ref_count(block_id), allocator.num_used) == (0, 0)
    allocator.check_invariants()


def test_free_blocks_are_handed_out_least_recently_freed_first_and_tails_before_heads() -> None:
    """What a block held survives as long as it can, a chain's head longest."""
    allocator = BlockAllocator(6)
    early, late = allocator.allocate(2), allocator.allocate(3)
    allocator.free(late)
    allocator.free(early)
    never_used = 5
    assert allocator.allocate(6) == [never_used, *reversed(late), *reversed(early)]


def test_a_block_freed_twice_or_shared_while_free_is_an_error_of_ours() -> None:
    """Fault 4: a double free must not pass in silence."""
    allocator = BlockAllocator(2)
    block_ids = allocator.allocate(1)
    allocator.free(block_ids)
    with pytest.raises(AssertionError, match="already free"):
        allocator.free(block_ids)
    with pytest.raises(AssertionError, match="cannot be shared"):
        allocator.share(block_ids)
    allocator.check_invariants()


def test_ref_counts_is_a_copy() -> None:
    allocator = BlockAllocator(2)
    allocator.ref_counts()[0] = 9
    assert allocator.ref_counts() == [0, 0]


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_a_pool_has_at_least_one_block(num_blocks: int) -> None:
    with pytest.raises(ValueError, match=f"num_blocks is {num_blocks}"):
        BlockAllocator(num_blocks)


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["allocate", "allocate", "share", "free", "free"]), st.integers(0, 5)), max_size=60
)


@given(num_blocks=st.integers(1, 8), operations=OPERATIONS)
def test_any_sequence_behaves_like_a_plain_list(num_blocks: int, operations: list[tuple[str, int]]) -> None:
    """References to chains are taken and dropped at random; the model keeps a list of free ids and a list of chains."""
    allocator = BlockAllocator(num_blocks)
    free, chains = list(range(num_blocks)), []
    for operation, number in operations:
        if operation == "allocate" and number > len(free):
            with pytest.raises(OutOfBlocksError):
                allocator.allocate(number)
        elif operation == "allocate":
            expected, free = free[:number], free[number:]
            assert allocator.allocate(number) == expected
            chains.append(expected)
        elif chains and operation == "share":
            chain = chains[number % len(chains)]
            allocator.share(chain)
            chains.append(chain)
        elif chains:
            chain = chains.pop(number % len(chains))
            allocator.free(chain)
            held = {block_id for other in chains for block_id in other}
            free += [block_id for block_id in reversed(chain) if block_id not in held]
        references = [sum(block_id in chain for chain in chains) for block_id in range(num_blocks)]
        assert allocator.ref_counts() == references
        assert allocator.num_free == len(free)
        allocator.check_invariants()
