"""Which prefixes are found, how far, and why no further: by hand, and against a dictionary of whole prefixes."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pageframe.runtime.block_allocator import BlockAllocator
from pageframe.runtime.block_copy import BlockCopy
from pageframe.runtime.host_tier import HostTier
from pageframe.runtime.journal import EvictEvent, Journal
from pageframe.runtime.prefix_cache import NO_PLACE, Entry, Lookup, PrefixCache, make_salt

SIZE = 4
SALT = make_salt("tenant", "")


def array(tokens: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.array(tokens, dtype=np.int32)


class Scene:
    """A prefix cache over a pool, with requests that compute a prompt and are gone."""

    def __init__(self, num_blocks: int = 8, host_slots: int = 0, keep_evicted: int | None = None) -> None:
        self.allocator = BlockAllocator(num_blocks)
        self.journal = Journal()
        self.copies: list[BlockCopy] = []
        self.host_tier: HostTier[Entry] | None = HostTier(host_slots, self.copies.append) if host_slots else None
        self.cache = PrefixCache(
            self.allocator, self.journal, block_size=SIZE, host_tier=self.host_tier, keep_evicted=keep_evicted
        )

    def lookup(self, tokens: Sequence[int], salt: bytes = SALT) -> Lookup:
        return self.cache.lookup(salt, array(tokens), (len(tokens) - 1) // SIZE)

    def publish(self, tokens: Sequence[int], salt: bytes = SALT, request_id: str = "r") -> tuple[list[int], Entry]:
        """New blocks for the full blocks of `tokens`, published; the last entry. The blocks are still in use."""
        block_ids = self.allocator.allocate(len(tokens) // SIZE)
        entry = self.cache.root(salt)
        for index, block_id in enumerate(block_ids):
            piece = array(tokens[index * SIZE : (index + 1) * SIZE]).tobytes()
            entry = self.cache.publish(entry, piece, block_id, request_id)
        self.cache.check_invariants()
        return block_ids, entry

    def compute(self, tokens: Sequence[int], salt: bytes = SALT, request_id: str = "r") -> list[int]:
        """Publish, and give the blocks back: they are cached."""
        block_ids, _ = self.publish(tokens, salt, request_id)
        self.allocator.free(block_ids)
        self.check()
        return block_ids

    def evict(self, count: int) -> None:
        """Overwrite the `count` blocks that go next."""
        self.allocator.free(self.allocator.allocate(self.allocator.num_free + count))
        self.check()

    def found(self, tokens: Sequence[int], salt: bytes = SALT) -> tuple[list[int], str]:
        lookup = self.lookup(tokens, salt)
        return [entry.block_id for entry in lookup.entries], lookup.reason

    def check(self) -> None:
        self.allocator.check_invariants()
        self.cache.check_invariants()


# ---- what is found ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_whole_blocks_are_found_and_one_token_is_always_left(num_blocks: int, beyond: int) -> None:
    """Fault 8: a prompt of kB - 1, kB and kB + 1 tokens, all of them computed before."""
    scene = Scene()
    computed = scene.compute(range(100, 120))
    num_tokens = num_blocks * SIZE + beyond
    expected = num_blocks if beyond == 1 else num_blocks - 1
    assert scene.found(range(100, 100 + num_tokens)) == (computed[:expected], "partial block")


@pytest.mark.parametrize("num_tokens", [3, 4, 5, 7, 8, 9])
def test_only_full_blocks_are_there_to_be_found(num_tokens: int) -> None:
    """Fault 8, the other side: what was computed ends before, at and behind a block's end."""
    scene = Scene()
    computed = scene.compute(range(num_tokens))
    assert len(computed) == num_tokens // SIZE
    assert scene.found(range(20)) == (computed, "differs")


@pytest.mark.parametrize("place", range(3 * SIZE))
@pytest.mark.parametrize("bit", [0, 7, 8, 16, 30])
def test_keys_are_compared_exactly(place: int, bit: int) -> None:
    """Fault 12: a prompt that differs in a single bit, in any token of a block, shares what is before and no more."""
    scene = Scene()
    tokens = [1_000_000 + 77 * index for index in range(3 * SIZE)]
    computed = scene.compute(tokens)
    other = tokens.copy()
    other[place] ^= 1 << bit
    assert scene.found([*other, 0]) == (computed[: place // SIZE], "differs")
    assert scene.found([*tokens, 0]) == (computed, "partial block")


def test_the_same_block_behind_another_prefix_is_another_block() -> None:
    scene = Scene()
    first = scene.compute([1] * 4 + [9] * 4)
    second = scene.compute([2] * 4 + [9] * 4)
    assert scene.found([1] * 4 + [9] * 5) == (first, "partial block")
    assert scene.found([2] * 4 + [9] * 5) == (second, "partial block")
    assert scene.found([9] * 9) == ([], "differs")
    assert scene.found([1] * 9) == (first[:1], "differs")


def test_a_prompt_of_equal_blocks_is_found_block_by_block() -> None:
    scene = Scene()
    computed = scene.compute([5] * 12)
    assert len(set(computed)) == 3
    assert scene.found([5] * 9) == (computed[:2], "partial block")
    assert scene.found([5] * 20) == (computed, "differs")


# ---- salts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("t", "x"), ("t", "y")),
        (("t", ""), ("u", "")),
        (("ab", "c"), ("a", "bc")),
        (("ab", ""), ("", "ab")),
        (("a",), ("a", "")),
        (("", "a\0"), ("", "a")),
        (("\x01\0\0\0\0\0\0\0", ""), ("", "\x01\0\0\0\0\0\0\0")),
        (("ä", ""), ("a\u0308", "")),
    ],
)
def test_whoever_has_another_salt_finds_nothing(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    """Not even fields that run into one another, such as ("ab", "c") and ("a", "bc"), are the same salt."""
    scene = Scene()
    computed = scene.compute([1] * 8, make_salt(*one))
    assert scene.found([1] * 9, make_salt(*other)) == ([], "salt")
    assert scene.found([1] * 9, make_salt(*one)) == (computed, "partial block")
    assert scene.found([2] * 9, make_salt(*other)) == ([], "differs")


def test_each_salt_has_its_own_blocks_for_the_same_tokens() -> None:
    scene = Scene()
    mine, yours = scene.compute([1] * 8, b"mine"), scene.compute([1] * 8, b"yours")
    assert set(mine).isdisjoint(yours)
    assert scene.found([1] * 9, b"mine") == (mine, "partial block")
    assert scene.found([1] * 9, b"yours") == (yours, "partial block")
    assert scene.found([1] * 9, b"") == ([], "salt")
    # Under a salt that has prompts of its own, too.
    scene.compute([3] * 4, b"")
    assert scene.found([1] * 9, b"") == ([], "salt")
    assert scene.found([1] * 3, b"") == ([], "partial block")


@given(st.lists(st.text(), max_size=3), st.lists(st.text(), max_size=3))
def test_two_salts_are_equal_only_where_their_fields_are(one: list[str], other: list[str]) -> None:
    assert (make_salt(*one) == make_salt(*other)) == (one == other)


# ---- publishing ---------------------------------------------------------------------------------------------------


def test_a_duplicate_stays_private_and_is_freed_unindexed() -> None:
    """Fault 6: the second of two equal prompts computed side by side keeps its own blocks, found by nobody."""
    scene = Scene()
    first, entry = scene.publish([1] * 8)
    second, same = scene.publish([1] * 8)
    assert same is entry
    assert scene.found([1] * 9) == (first, "partial block")
    assert [scene.allocator.is_indexed(block_id) for block_id in first + second] == [True] * 2 + [False] * 2
    assert len(scene.cache) == 2
    scene.allocator.free(first)
    scene.allocator.free(second)
    assert [scene.allocator.state(block_id) for block_id in first + second] == ["cached"] * 2 + ["free"] * 2
    scene.check()


def test_what_goes_on_from_a_duplicate_is_found_behind_the_first_one() -> None:
    scene = Scene()
    first, _ = scene.publish([1] * 4)
    second, _ = scene.publish([1] * 4 + [2] * 4)
    assert scene.found([1] * 4 + [2] * 5) == ([first[0], second[1]], "partial block")


# ---- losing -------------------------------------------------------------------------------------------------------


def test_an_entry_does_not_outlive_its_blocks_reuse() -> None:
    """Fault 5: run X, overwrite the pool with Y, run X again."""
    scene = Scene(num_blocks=2)
    x, y = [1] * 8, [2] * 8
    scene.compute(x)
    blocks = scene.compute(y)
    assert scene.found([*x, 0]) == ([], "evicted")
    assert scene.found([*y, 0]) == (blocks, "partial block")
    again = scene.compute(x)
    assert scene.found([*x, 0]) == (again, "partial block")
    assert scene.found([*y, 0]) == ([], "evicted")


def test_a_miss_tells_in_which_step_the_block_was_lost() -> None:
    scene = Scene(num_blocks=3)
    scene.journal.at(7, 0.7)
    computed = scene.compute([1] * 12, request_id="author")
    scene.journal.at(30, 3.0)
    scene.cache.use(scene.lookup([1] * 9).entries)
    scene.journal.at(91, 9.1)
    scene.evict(2)
    lookup = scene.lookup([1] * 13)
    assert ([entry.block_id for entry in lookup.entries], lookup.reason) == (computed[:1], "evicted")
    assert lookup.evicted_step == 91
    assert scene.lookup([1] * 5).evicted_step == NO_PLACE
    told = [event for event in scene.journal if isinstance(event, EvictEvent)]
    assert [(event.step, event.request_id, event.block_id, event.idle_steps) for event in told] == [
        (91, "author", computed[2], 91 - 7),
        (91, "author", computed[1], 91 - 30),
    ]
    assert {(event.reason, event.host_slot) for event in told} == {("reused", NO_PLACE)}


def test_a_prefix_that_is_computed_again_is_found_with_the_blocks_that_followed_it() -> None:
    scene = Scene(num_blocks=4)
    _, tail = scene.compute([1] * 4 + [2] * 4)
    scene.allocator.share([tail])
    scene.evict(1)
    scene.allocator.free([tail])
    assert scene.found([1] * 4 + [2] * 5) == ([], "evicted")
    (new_head,) = scene.compute([1] * 4)
    assert scene.found([1] * 4 + [2] * 5) == ([new_head, tail], "partial block")


def test_blocks_that_cannot_be_trusted_are_not_found_and_free_once_unused() -> None:
    scene = Scene()
    head, tail = scene.compute([1] * 8)
    used, _ = scene.publish([2] * 4)
    scene.journal.at(5, 0.5)
    scene.cache.forget_blocks([tail, used[0], 7], "failed")
    scene.check()
    assert scene.found([1] * 9) == ([head], "evicted")
    assert scene.lookup([2] * 5).evicted_step == 5
    assert [scene.allocator.state(block_id) for block_id in (head, tail, used[0])] == ["cached", "free", "used"]
    told = [(event.block_id, event.reason) for event in scene.journal if isinstance(event, EvictEvent)]
    assert told == [(tail, "failed"), (used[0], "failed")]
    scene.allocator.free(used)
    assert scene.allocator.state(used[0]) == "free"
    again = scene.compute([2] * 4)
    assert scene.found([2] * 5) == (again, "partial block")


def test_after_a_reset_nothing_is_found_and_nothing_behind_forgotten_blocks_is_published() -> None:
    scene = Scene()
    scene.compute([1] * 8)
    used, entry = scene.publish([2] * 4)
    scene.evict(1)
    assert scene.cache.reset() == len(used) + 1
    assert len(scene.cache) == 0
    assert scene.cache.reset() == 0
    assert scene.found([1] * 9) == scene.found([2] * 9) == ([], "differs")
    assert [scene.allocator.state(block_id) for block_id in used] == ["used"]
    assert scene.allocator.num_cached == 0
    # The request goes on: two more blocks, neither of which may be found, nor block the way of others.
    more = scene.allocator.allocate(2)
    for block_id in more:
        entry = scene.cache.publish(entry, array([3] * 4).tobytes(), block_id, "r")
        assert (entry.block_id, scene.allocator.is_indexed(block_id)) == (NO_PLACE, False)
    assert scene.found([2] * 4 + [3] * 9) == ([], "differs")
    scene.check()
    fresh, _ = scene.publish([2] * 4 + [3] * 4)
    assert scene.found([2] * 4 + [3] * 5) == (fresh, "partial block")
    scene.allocator.free(used)
    scene.allocator.free(more)
    assert scene.allocator.num_free == 8 - len(fresh)


def test_an_old_salt_that_is_forgotten_starts_anew() -> None:
    scene = Scene(num_blocks=1, keep_evicted=0)
    scene.compute([1] * 4, b"a")
    scene.compute([1] * 4, b"b")
    assert scene.found([1] * 5, b"a") == ([], "salt"), "its root is gone with its last entry"
    blocks = scene.compute([1] * 4, b"a")
    assert scene.found([1] * 5, b"a") == (blocks, "partial block")
    assert scene.found([2] * 5, b"a") == ([], "differs")


# ---- what is remembered of evicted blocks -------------------------------------------------------------------------


def test_as_many_evicted_entries_are_remembered_as_asked_for_the_oldest_forgotten_first() -> None:
    scene = Scene(num_blocks=1, keep_evicted=2)
    for token in range(5):
        scene.compute([token] * 4)
    reasons = [scene.found([token] * 5)[1] for token in range(5)]
    assert reasons == ["differs", "differs", "evicted", "evicted", "partial block"]


def test_a_prefix_of_something_that_is_held_is_not_forgotten() -> None:
    """An evicted entry with blocks behind it keeps their place in the tree."""
    scene = Scene(num_blocks=8, keep_evicted=1)
    _, tail = scene.compute([1] * 4 + [2] * 4)
    scene.allocator.share([tail])
    scene.evict(1)
    for token in range(10, 40):
        scene.compute([token] * 4)
    scene.allocator.free([tail])
    assert scene.lookup([1] * 5).reason == "evicted"
    (again,) = scene.compute([1] * 4)
    assert scene.found([1] * 4 + [2] * 5) == ([again, tail], "partial block")


def count_entries() -> int:
    """Entries alive in this process, whoever keeps them."""
    gc.collect()
    # By type(): isinstance would ask every object of every library for its class.
    return sum(type(thing) is Entry for thing in gc.get_objects())


def test_any_number_of_publishes_and_evictions_leaves_an_index_of_bounded_size() -> None:
    """Fault 44. 10^4 random prompts under random salts; windows leave heads behind before their tails."""
    rng = random.Random(11)
    before = count_entries()
    scene = Scene(num_blocks=16, keep_evicted=8)
    running: list[list[int]] = []
    most = 0
    for number in range(10_000):
        while len(running) > 2 or (running and rng.random() < 0.3):
            scene.allocator.free(running.pop(rng.randrange(len(running))))
        tokens = [rng.randrange(6) for _ in range(rng.randint(1, 4)) for _ in range(SIZE)]
        block_ids, _ = scene.publish(tokens, bytes([rng.randrange(4)]))
        if rng.random() < 0.3:
            head = rng.randint(1, len(block_ids))
            scene.allocator.free(block_ids[:head])
            block_ids = block_ids[head:]
        running.append(block_ids)
        if number % 500 == 499:
            scene.check()
            most = max(most, count_entries() - before)
    # Held, remembered and 4 roots; those with something behind them may be more than `keep_evicted`, for a while.
    assert most <= 16 + 8 + 4 + 8, most
    assert sum(isinstance(event, EvictEvent) for event in scene.journal) > 10_000


def test_long_chains_that_are_lost_head_first_leave_an_index_of_bounded_size() -> None:
    """Fault 44: what a sliding window gives back is evicted before what follows it."""
    scene = Scene(num_blocks=64, keep_evicted=32)
    for number in range(200):
        block_ids, _ = scene.publish([number] * (64 * SIZE))
        for block_id in block_ids:
            scene.allocator.free([block_id])
    assert scene.cache.num_evicted <= 64 + 32
    scene.check()


def test_any_number_of_salts_leaves_no_roots_behind() -> None:
    """Fault 44: whoever may choose a salt may choose a new one each time."""
    before = count_entries()
    scene = Scene(num_blocks=4, keep_evicted=4)
    for number in range(1000):
        scene.compute([1] * 4, number.to_bytes(2, "little"))
    # Four held and four remembered, each below a root of its own.
    assert count_entries() - before <= 2 * (4 + 4)


# ---- host memory as a second place --------------------------------------------------------------------------------


def test_an_evicted_block_with_a_copy_in_host_memory_is_still_found() -> None:
    scene = Scene(num_blocks=2, host_slots=2)
    scene.compute([1] * 8)
    scene.evict(2)
    lookup = scene.lookup([1] * 9)
    assert lookup.reason == "partial block"
    assert [entry.block_id for entry in lookup.entries] == [NO_PLACE] * 2
    assert sorted(entry.host_slot for entry in lookup.entries) == [0, 1]
    told = [event.host_slot for event in scene.journal if isinstance(event, EvictEvent)]
    assert told == [lookup.entries[1].host_slot, lookup.entries[0].host_slot]
    # Put back into a block, it has both places; evicted again it needs no second copy.
    (block_id,) = scene.allocator.allocate(1)
    scene.cache.place(lookup.entries[0], block_id)
    scene.allocator.free([block_id])
    scene.check()
    scene.evict(1)
    assert len(scene.copies) == 2
    assert scene.found([1] * 9)[1] == "partial block"


def test_what_host_memory_loses_is_lost() -> None:
    scene = Scene(num_blocks=2, host_slots=1)
    scene.compute([1] * 8)
    scene.journal.at(4, 0.4)
    scene.evict(2)
    lookup = scene.lookup([1] * 9)
    assert (len(lookup.entries), lookup.reason, lookup.evicted_step) == (1, "evicted", 4)
    scene.journal.at(5, 0.5)
    scene.cache.forget_host_copies([0, 0])
    scene.check()
    assert scene.lookup([1] * 9).evicted_step == 5
    assert scene.found([1] * 9) == ([], "evicted")


def test_forgotten_blocks_lose_their_host_copies_too() -> None:
    scene = Scene(num_blocks=2, host_slots=2)
    scene.compute([1] * 4)
    scene.evict(1)
    (entry,) = scene.lookup([1] * 5).entries
    (block_id,) = scene.allocator.allocate(1)
    scene.cache.place(entry, block_id)
    scene.cache.forget_blocks([block_id], "failed")
    scene.check()
    assert scene.found([1] * 5) == ([], "evicted")
    assert scene.host_tier is not None
    assert scene.host_tier.num_used == 0


def test_a_reset_empties_host_memory() -> None:
    scene = Scene(num_blocks=2, host_slots=2)
    scene.compute([1] * 8)
    scene.evict(2)
    assert scene.cache.reset() == 0, "none of them was in a block"
    assert scene.host_tier is not None
    assert scene.host_tier.num_used == 0
    assert scene.found([1] * 9) == ([], "differs")
    scene.check()


# ---- digests ------------------------------------------------------------------------------------------------------


def test_a_digest_names_salt_and_tokens_and_nothing_else() -> None:
    one, other = Scene(), Scene(num_blocks=20)
    other.compute([7] * 12)
    _, here = one.publish([1] * 8)
    _, there = other.publish([1] * 8)
    assert here.block_id != there.block_id
    assert one.cache.digest(here) == other.cache.digest(there)
    assert len(one.cache.digest(here)) == 16
    int(one.cache.digest(here), 16)


def test_different_prefixes_have_different_digests_in_whatever_order_they_are_asked_for() -> None:
    scene = Scene(num_blocks=64)
    prompts = [(SALT, [1] * 12), (SALT, [1] * 4 + [2] * 8), (SALT, [2] * 12), (b"other", [1] * 12), (b"", [1] * 12)]
    entries = {scene.cache.root(salt) for salt, _ in prompts}
    for salt, tokens in prompts:
        blocks, _ = scene.publish(tokens, salt)
        entries |= {entry for block in blocks if (entry := scene.cache.entry_of(block)) is not None}
    assert len(entries) == 3 + 14  # the first two share their first block
    by_digest = {scene.cache.digest(entry): entry for entry in sorted(entries, key=lambda entry: -entry.entry_id)}
    assert len(by_digest) == len(entries)
    assert all(scene.cache.digest(entry) == digest for digest, entry in by_digest.items())


# ---- any sequence -------------------------------------------------------------------------------------------------

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["compute", "compute", "run", "end", "reset", "forget"]), PROMPTS, st.integers(0, 1)),
    max_size=40,
)


@given(operations=OPERATIONS, host_slots=st.integers(0, 3))
def test_a_lookup_finds_only_what_was_written_for_exactly_these_tokens(
    operations: list[tuple[str, list[int], int]], host_slots: int
) -> None:
    """Two tokens and two salts, so that everything shares something. The oracle knows what each place holds."""
    scene = Scene(num_blocks=5, host_slots=host_slots)
    in_blocks: dict[int, tuple[int, ...]] = {}
    in_slots: dict[int, tuple[int, ...]] = {}
    running: list[list[int]] = []
    for operation, tokens, salt in operations:
        num_full = len(tokens) // SIZE
        if operation in ("compute", "run") and num_full <= scene.allocator.num_available:
            block_ids, _ = scene.publish(tokens, bytes([salt]))
            for copy in scene.copies:
                in_slots[copy.dst] = in_blocks[copy.src]
            scene.copies.clear()
            for index, block_id in enumerate(block_ids):
                in_blocks[block_id] = (salt, *tokens[: (index + 1) * SIZE])
            running.append(block_ids)
        if operation in ("compute", "end") and running:
            scene.allocator.free(running.pop())
        elif operation == "reset":
            scene.cache.reset()
        elif operation == "forget" and running:
            scene.cache.forget_blocks(running[0], "failed")
        scene.check()
        lookup = scene.lookup([*tokens, 0], bytes([salt]))
        for index, entry in enumerate(lookup.entries):
            expected = (salt, *tokens[: (index + 1) * SIZE])
            if entry.block_id != NO_PLACE:
                assert in_blocks[entry.block_id] == expected
            if entry.host_slot != NO_PLACE:
                assert in_slots[entry.host_slot] == expected
        assert (lookup.reason == "partial block") == (len(lookup.entries) == num_full)
