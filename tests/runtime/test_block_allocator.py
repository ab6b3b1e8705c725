"""The allocator against lists that do the same slowly, and its promises one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pageframe.runtime.block_allocator import BlockAllocator, OutOfBlocksError


def make_allocator(num_blocks: int) -> tuple[BlockAllocator, list[int]]:
    """An allocator, and the list to which it adds each block that it evicts."""
    allocator = BlockAllocator(num_blocks)
    evicted: list[int] = []
    allocator.on_evict = evicted.append
    return allocator, evicted


def cache_chain(allocator: BlockAllocator, length: int) -> list[int]:
    """A chain of blocks that was used, indexed and given back; head first."""
    chain = allocator.allocate(length)
    for block_id in chain:
        allocator.set_indexed(block_id)
    allocator.free(chain)
    return chain


def totals(allocator: BlockAllocator) -> tuple[int, int, int, int]:
    """Free, cached, used and pinned blocks, which are all there are."""
    allocator.check_invariants()
    counts = (allocator.num_free, allocator.num_cached, allocator.num_used, allocator.num_pinned)
    assert sum(counts) == allocator.num_blocks
    return counts


def test_allocates_each_block_once_and_counts_them() -> None:
    allocator = BlockAllocator(5)
    assert (allocator.num_blocks, allocator.num_available) == (5, 5)
    assert totals(allocator) == (5, 0, 0, 0)
    first = allocator.allocate(2)
    second = allocator.allocate(3)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert totals(allocator) == (0, 0, 5, 0)
    assert allocator.ref_counts() == [1, 1, 1, 1, 1]


def test_too_many_blocks_take_nothing_and_name_the_numbers() -> None:
    """Cached blocks count as available, and neither they nor the free ones move."""
    allocator, evicted = make_allocator(5)
    used = allocator.allocate(1)
    cached = cache_chain(allocator, 2)
    with pytest.raises(OutOfBlocksError, match="5 blocks wanted, 4 available") as caught:
        allocator.allocate(5)
    assert (caught.value.wanted, caught.value.available) == (5, 4)
    assert evicted == []
    assert totals(allocator) == (2, 2, 1, 0)
    assert [block_id for block_id in cached if allocator.is_indexed(block_id)] == cached
    assert sorted(allocator.allocate(4) + used) == [0, 1, 2, 3, 4]


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
    assert totals(allocator) == (2, 0, 0, 0)


def test_free_blocks_are_handed_out_least_recently_freed_first_and_tails_before_heads() -> None:
    allocator = BlockAllocator(6)
    early, late = allocator.allocate(2), allocator.allocate(3)
    allocator.free(late)
    allocator.free(early)
    never_used = 5
    assert allocator.allocate(6) == [never_used, *reversed(late), *reversed(early)]


def test_free_blocks_are_handed_out_before_any_cached_one() -> None:
    """What a block holds survives as long as there is another to take."""
    allocator, evicted = make_allocator(4)
    cached = cache_chain(allocator, 2)
    assert allocator.allocate(1) == [2]
    unindexed = allocator.allocate(1)
    allocator.free(unindexed)
    assert allocator.allocate(1) == unindexed
    assert evicted == []
    assert allocator.allocate(1) == [cached[-1]]
    assert evicted == [cached[-1]]


def test_cached_blocks_are_evicted_least_recently_used_first_a_chains_tail_before_its_head() -> None:
    allocator, evicted = make_allocator(7)
    old, middle, young = (cache_chain(allocator, length) for length in (3, 2, 2))
    # Found again and given back: it is the youngest now.
    allocator.share(old[:1])
    allocator.free(old[:1])
    order = [*reversed(old[1:]), *reversed(middle), *reversed(young), old[0]]
    assert allocator.eviction_order() == order
    assert allocator.allocate(7) == order
    assert evicted == order


def test_each_evicted_block_is_told_once_before_it_is_handed_out() -> None:
    """Whoever hears of it must still find the block unowned, and no longer indexed."""
    allocator = BlockAllocator(3)
    seen = []
    allocator.on_evict = lambda block_id: seen.append(
        (block_id, allocator.ref_count(block_id), allocator.is_indexed(block_id))
    )
    head, tail = cache_chain(allocator, 2)
    allocator.allocate(3)
    assert seen == [(tail, 0, False), (head, 0, False)]
    assert [allocator.state(block_id) for block_id in range(3)] == ["used"] * 3


def test_a_reused_block_is_free_not_cached_when_it_comes_back() -> None:
    """Fault 5: that it was indexed ends with its contents."""
    allocator, _ = make_allocator(1)
    cache_chain(allocator, 1)
    allocator.free(allocator.allocate(1))
    assert totals(allocator) == (1, 0, 0, 0)
    assert allocator.state(0) == "free"


def test_a_cached_block_can_be_shared_and_leaves_the_pool_of_available_ones() -> None:
    """Fault 10: a block counts as available once, and not while anybody uses it."""
    allocator, evicted = make_allocator(2)
    chain = cache_chain(allocator, 2)
    allocator.share(chain)
    allocator.share(chain[:1])
    assert totals(allocator) == (0, 0, 2, 0)
    assert (allocator.num_available, allocator.ref_counts()) == (0, [2, 1])
    with pytest.raises(OutOfBlocksError):
        allocator.allocate(1)
    allocator.free(chain)
    assert (allocator.state(chain[0]), allocator.state(chain[1])) == ("used", "cached")
    assert evicted == []


def test_a_pinned_block_is_not_handed_out_until_it_is_unpinned() -> None:
    allocator, _ = make_allocator(2)
    kept, indexed = allocator.allocate(2)
    allocator.set_indexed(indexed)
    allocator.pin([kept, indexed])
    allocator.pin([kept])
    assert totals(allocator) == (0, 0, 2, 0), "used by its table too: not pinned yet"
    allocator.free([kept])
    allocator.free([indexed])
    assert totals(allocator) == (0, 0, 0, 2)
    assert (allocator.pins(), allocator.ref_counts()) == ({kept: 2, indexed: 1}, [2, 1])
    with pytest.raises(OutOfBlocksError):
        allocator.allocate(1)
    allocator.unpin([kept, indexed])
    assert (allocator.state(kept), allocator.state(indexed)) == ("pinned", "cached")
    allocator.unpin([kept])
    assert totals(allocator) == (1, 1, 0, 0)
    assert (allocator.state(kept), allocator.pins()) == ("free", {})


def test_a_pinned_block_is_not_freed_by_those_who_do_not_hold_it() -> None:
    allocator = BlockAllocator(1)
    chain = allocator.allocate(1)
    allocator.pin(chain)
    allocator.free(chain)
    with pytest.raises(AssertionError, match="freed more often"):
        allocator.free(chain)
    assert totals(allocator) == (0, 0, 0, 1)


def test_a_block_that_is_forgotten_is_free_if_nobody_uses_it() -> None:
    allocator, evicted = make_allocator(3)
    cached = cache_chain(allocator, 1)
    used = allocator.allocate(1)
    allocator.set_indexed(used[0])
    assert allocator.is_indexed(used[0])
    for block_id in cached + used:
        allocator.clear_indexed(block_id)
        assert not allocator.is_indexed(block_id)
    assert totals(allocator) == (2, 0, 1, 0)
    allocator.free(used)
    assert totals(allocator) == (3, 0, 0, 0)
    assert sorted(allocator.allocate(3)) == [0, 1, 2]
    assert evicted == []


def test_only_blocks_in_use_can_be_indexed() -> None:
    """Fault 7: what nobody holds was written by nobody."""
    allocator = BlockAllocator(1)
    with pytest.raises(AssertionError, match="not in use"):
        allocator.set_indexed(0)


def test_a_block_freed_twice_or_shared_while_free_is_an_error_of_ours() -> None:
    """Fault 4: a double free must not pass in silence."""
    allocator = BlockAllocator(2)
    block_ids = allocator.allocate(1)
    allocator.free(block_ids)
    with pytest.raises(AssertionError, match="freed more often than it was taken"):
        allocator.free(block_ids)
    with pytest.raises(AssertionError, match="cannot be shared"):
        allocator.share(block_ids)
    allocator.check_invariants()


def test_ref_counts_and_pins_are_copies() -> None:
    allocator = BlockAllocator(2)
    allocator.ref_counts()[0] = 9
    allocator.pins()[0] = 9
    assert (allocator.ref_counts(), allocator.pins()) == ([0, 0], {})


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_a_pool_has_at_least_one_block(num_blocks: int) -> None:
    with pytest.raises(ValueError, match=f"num_blocks is {num_blocks}"):
        BlockAllocator(num_blocks)


KINDS = ["allocate", "allocate", "share", "free", "free", "pin", "unpin", "index", "index", "forget"]
OPERATIONS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 5)), max_size=60)


class PlainPool:
    """The same with lists: free ids, cached ids, chains, pinned chains, the set of indexed ids."""

    def __init__(self, num_blocks: int) -> None:
        self.free, self.cached = list(range(num_blocks)), list[int]()
        self.chains, self.pinned = list[list[int]](), list[list[int]]()
        self.indexed, self.evicted = set[int](), list[int]()

    def held(self) -> list[int]:
        return [block_id for chain in self.chains + self.pinned for block_id in chain]

    def allocate(self, count: int) -> list[int]:
        chain, self.free = self.free[:count], self.free[count:]
        lacking = count - len(chain)
        taken, self.cached = self.cached[:lacking], self.cached[lacking:]
        self.indexed -= set(taken)
        self.evicted += taken
        return chain + taken

    def give_back(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            if block_id not in self.held():
                (self.cached if block_id in self.indexed else self.free).append(block_id)


@given(num_blocks=st.integers(1, 8), operations=OPERATIONS)
def test_any_sequence_behaves_like_plain_lists(num_blocks: int, operations: list[tuple[str, int]]) -> None:
    """References and pins of chains are taken and dropped at random, their blocks indexed and forgotten."""
    allocator, evicted = make_allocator(num_blocks)
    pool = PlainPool(num_blocks)
    for operation, number in operations:
        if operation == "allocate" and number > len(pool.free) + len(pool.cached):
            with pytest.raises(OutOfBlocksError):
                allocator.allocate(number)
        elif operation == "allocate":
            expected = pool.allocate(number)
            assert allocator.allocate(number) == expected
            pool.chains.append(expected)
        elif operation == "unpin" and pool.pinned:
            chain = pool.pinned.pop(number % len(pool.pinned))
            allocator.unpin(chain)
            # One after the other, in the order given.
            pool.give_back(chain)
        elif operation == "forget":
            for block_id in sorted(pool.indexed)[:number]:
                pool.indexed.remove(block_id)
                if block_id in pool.cached:
                    pool.cached.remove(block_id)
                    pool.free.append(block_id)
                allocator.clear_indexed(block_id)
        elif pool.chains and operation != "unpin":
            chain = pool.chains[number % len(pool.chains)]
            if operation == "share":
                allocator.share(chain)
                pool.chains.append(chain)
            elif operation == "pin":
                allocator.pin(chain)
                pool.pinned.append(chain)
            elif operation == "free":
                allocator.free(chain)
                del pool.chains[number % len(pool.chains)]
                pool.give_back(chain[::-1])
            else:
                pool.indexed |= set(chain)
                for block_id in chain:
                    allocator.set_indexed(block_id)
        assert allocator.ref_counts() == [pool.held().count(block_id) for block_id in range(num_blocks)]
        assert allocator.eviction_order() == pool.cached
        assert evicted == pool.evicted
        used = {block_id for chain in pool.chains for block_id in chain}
        pinned = set(pool.held()) - used
        assert totals(allocator) == (len(pool.free), len(pool.cached), len(used), len(pinned))
        states = {"free": set(pool.free), "cached": set(pool.cached), "used": used, "pinned": pinned}
        assert all(block_id in states[allocator.state(block_id)] for block_id in range(num_blocks))
