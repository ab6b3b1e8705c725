"""Blocks, index and host memory together: what a request is given, what it leaves behind, and the copies in between.

Requests run here without a scheduler: admitted, computed in one go, published, released.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import pytest
from fakes.scheduling import make_request

from pageframe.runtime.block_allocator import OutOfBlocksError
from pageframe.runtime.block_copy import FREE_COPIES, BlockCopy, CopyCosts, CopyKind
from pageframe.runtime.block_manager import BlockManager
from pageframe.runtime.block_table import NO_BLOCK
from pageframe.runtime.journal import (
    AllocateEvent,
    CopyEvent,
    Event,
    EvictEvent,
    HitEvent,
    Journal,
    MissEvent,
    PublishEvent,
    ReleaseEvent,
    ShareEvent,
    UnpinEvent,
)
from pageframe.runtime.request import Request, SamplingParams

SIZE = 4
MAX_LEN = 64

EventT = TypeVar("EventT", bound=Event)


class Scene:
    """A manager and the tokens of its rows."""

    def __init__(
        self,
        num_blocks: int = 8,
        *,
        max_num_requests: int = 4,
        prefix_cache: bool = True,
        host_slots: int = 0,
        copy_costs: CopyCosts = FREE_COPIES,
        window: int | None = None,
    ) -> None:
        self.journal = Journal()
        self.manager = BlockManager(
            num_blocks=num_blocks,
            block_size=SIZE,
            max_num_requests=max_num_requests,
            max_blocks=MAX_LEN // SIZE,
            journal=self.journal,
            prefix_cache=prefix_cache,
            host_slots=host_slots,
            copy_costs=copy_costs,
            window=window,
        )
        self.allocator, self.tables = self.manager.allocator, self.manager.tables
        self.rows = np.zeros((max_num_requests, MAX_LEN), dtype=np.int32)
        self._arrivals = 0

    def request(self, tokens: Sequence[int], request_id: str = "") -> Request:
        self._arrivals += 1
        name = request_id or f"r{self._arrivals}"
        return make_request(name, tokens, SamplingParams(max_tokens=1), arrival=self._arrivals)

    def admit(self, tokens: Sequence[int] | Request, num_tokens: int = 0) -> Request:
        """Admit a request with blocks for its tokens, or more."""
        request = tokens if isinstance(tokens, Request) else self.request(tokens)
        lookup = self.manager.lookup(request)
        request.row = self.manager.admit(request, lookup, num_tokens or len(request.token_ids))
        self.rows[request.row, : len(request.token_ids)] = request.token_ids
        self.manager.check_invariants()
        return request

    def publish(self, request: Request, num_computed: int) -> None:
        rows = np.array([request.row], dtype=np.int32)
        self.manager.publish([request], rows, np.array([num_computed], dtype=np.int32), self.rows)
        self.manager.check_invariants()

    def slide_window(self, request: Request, num_computed: int) -> None:
        rows = np.array([request.row], dtype=np.int32)
        self.manager.release_behind_window([request], rows, np.array([num_computed], dtype=np.int32))
        self.manager.check_invariants()

    def release(self, request: Request) -> None:
        self.manager.release(request)
        request.row = -1
        self.manager.check_invariants()

    def compute(self, tokens: Sequence[int]) -> list[int]:
        """A request that computes these tokens and is gone; the blocks it had."""
        request = self.admit(tokens)
        block_ids = self.tables.block_ids(request.row)
        self.publish(request, len(tokens))
        self.release(request)
        self.manager.take_copies()
        self.manager.copies_made()
        return block_ids

    def evict_all(self) -> None:
        """Overwrite the whole pool once."""
        self.release(self.admit([99] * (self.allocator.num_blocks * SIZE)))
        self.manager.take_copies()

    def found(self, tokens: Sequence[int]) -> tuple[int, str]:
        lookup = self.manager.lookup(self.request(tokens))
        return len(lookup.entries), lookup.reason

    def of(self, kind: type[EventT]) -> list[EventT]:
        return [event for event in self.journal if isinstance(event, kind)]


# ---- lookups ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [1, 3])
@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_a_request_finds_whole_blocks_and_computes_at_least_its_last_token(num_blocks: int, beyond: int) -> None:
    """Fault 8."""
    scene = Scene()
    scene.compute(range(16))
    expected = num_blocks if beyond == 1 else num_blocks - 1
    assert scene.found(range(num_blocks * SIZE + beyond)) == (expected, "partial block")


def test_without_a_prefix_cache_nothing_is_found_and_freed_blocks_are_free() -> None:
    scene = Scene(prefix_cache=False)
    scene.compute(range(8))
    assert scene.found(range(9)) == (0, "off")
    assert (scene.allocator.num_free, scene.allocator.num_cached) == (8, 0)
    assert scene.manager.reset_prefix_cache() == 0
    assert scene.of(PublishEvent) == []


def test_a_request_that_wants_logprobs_of_its_prompt_computes_all_of_it() -> None:
    scene = Scene()
    scene.compute(range(8))
    request = scene.request(range(9))
    request.wants_prompt_logprobs = True
    lookup = scene.manager.lookup(request)
    assert (lookup.entries, lookup.reason) == ([], "logprobs")


def test_what_slid_out_of_a_context_is_not_looked_up() -> None:
    """The later part starts at position 0: it shares with those who begin with it."""
    scene = Scene()
    scene.compute([1] * 8)
    scene.compute([2] * 8)
    request = scene.request([1] * 8 + [2] * 8)
    assert scene.manager.lookup(request).reason == "differs"
    request.context_start = 8
    lookup = scene.manager.lookup(request)
    assert (len(lookup.entries), lookup.reason) == (1, "partial block")


# ---- copying back against computing again -------------------------------------------------------------------------

#: A block costs as much to copy as to compute.
EQUAL = CopyCosts(per_block=4.0, per_token=1.0)
DEAR = CopyCosts(per_block=4.5, per_token=1.0)
CHEAP = CopyCosts(per_block=3.5, per_token=1.0)


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        (FREE_COPIES, (3, "partial block")),
        (CHEAP, (3, "partial block")),
        (EQUAL, (3, "partial block")),
        (DEAR, (0, "recompute")),
    ],
)
def test_blocks_are_copied_back_unless_computing_them_is_cheaper(costs: CopyCosts, expected: tuple[int, str]) -> None:
    scene = Scene(num_blocks=3, host_slots=3, copy_costs=costs)
    scene.compute(range(12))
    scene.evict_all()
    assert scene.found(range(13)) == expected


def scene_with_places(places: str, costs: CopyCosts) -> Scene:
    """Prompt range(4 * len(places)) is computed; of its blocks those with an "h" are only in host memory, the others
    in blocks."""
    scene = Scene(num_blocks=len(places), host_slots=len(places), copy_costs=costs)
    block_ids = scene.compute(range(SIZE * len(places)))
    kept = [block_id for block_id, place in zip(block_ids, places, strict=True) if place == "d"]
    scene.allocator.share(kept)
    scene.allocator.free(scene.allocator.allocate(places.count("h")))
    scene.allocator.free(kept)
    scene.manager.take_copies()
    scene.manager.check_invariants()
    return scene


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ("dd", (2, "partial block")),
        # Copying a block costs 7, computing one 4. A copy pays where enough blocks behind it need none.
        ("dh", (1, "recompute")),
        ("hd", (2, "partial block")),
        ("hhd", (0, "recompute")),
        ("hhdd", (4, "partial block")),
        ("dhhd", (1, "recompute")),
        ("dhhdd", (5, "partial block")),
        ("hdhhd", (2, "recompute")),
        ("hddh", (3, "recompute")),
    ],
)
def test_a_match_is_cut_where_its_copies_cost_more_than_they_save(places: str, expected: tuple[int, str]) -> None:
    scene = scene_with_places(places, CopyCosts(per_block=7.0, per_token=1.0))
    assert scene.found(range(SIZE * len(places) + 1)) == expected


def test_copies_that_cost_exactly_what_they_save_are_made() -> None:
    scene = scene_with_places("dhhd", CopyCosts(per_block=6.0, per_token=1.0))
    assert scene.found(range(17)) == (4, "partial block")


def test_a_match_that_is_cut_says_what_was_weighed() -> None:
    scene = scene_with_places("dhh", CopyCosts(per_block=6.0, per_token=1.0))
    lookup = scene.manager.lookup(scene.request(range(13)))
    assert (len(lookup.entries), lookup.reason) == (1, "recompute")
    assert (lookup.copy_seconds, lookup.compute_seconds) == (12.0, 8.0)
    scene = scene_with_places("hh", CopyCosts(per_block=6.0, per_token=1.0))
    lookup = scene.manager.lookup(scene.request(range(9)))
    assert (lookup.entries, lookup.reason) == ([], "recompute")
    assert (lookup.copy_seconds, lookup.compute_seconds) == (12.0, 8.0)


def test_a_hit_tells_what_its_copies_cost_and_save() -> None:
    scene = scene_with_places("dhd", CopyCosts(per_block=0.5, per_token=0.25))
    scene.admit(range(12), num_tokens=12)
    (hit,) = scene.of(HitEvent)
    assert (hit.num_blocks, hit.num_tokens, hit.num_copied) == (2, 8, 1)
    assert (hit.copy_seconds, hit.compute_seconds) == (0.5, 4 * 0.25)
    misses = [(event.reason, event.num_blocks) for event in scene.of(MissEvent)]
    assert misses[-1] == ("partial block", 2)


# ---- admission ----------------------------------------------------------------------------------------------------


def test_shared_copied_and_new_blocks_are_told_as_what_they_are() -> None:
    scene = scene_with_places("dhdd", FREE_COPIES)
    shared = [entry.block_id for entry in scene.manager.lookup(scene.request(range(17))).entries]
    written = scene.journal.written
    request = scene.admit([*range(12), 50])
    table = scene.tables.block_ids(request.row)
    assert (table[0], table[2]) == (shared[0], shared[2])
    told = [
        (event.kind, event.first_index, event.block_ids)
        for event in list(scene.journal)[written:]
        if isinstance(event, ShareEvent | AllocateEvent)
    ]
    assert told == [
        ("share", 0, (table[0],)),
        ("allocate", 1, (table[1],)),
        ("share", 2, (table[2],)),
        ("allocate", 3, (table[3],)),
    ]


def test_one_allocation_that_evicts_while_another_entry_comes_back_copies_out_before_in() -> None:
    """The block that comes back goes into the one just evicted: in the other order host memory would get its copy."""
    scene = Scene(num_blocks=2, host_slots=3)
    scene.compute([1] * 8)
    scene.evict_all()
    cached = scene.compute([2] * 8)
    request = scene.admit([1] * 7)
    copies = scene.manager.take_copies()
    assert [copy.kind for copy in copies] == [CopyKind.TO_HOST, CopyKind.TO_HOST, CopyKind.TO_DEVICE]
    table = scene.tables.block_ids(request.row)
    assert [copy.src for copy in copies[:2]] == table == cached[::-1]
    assert copies[2].dst == table[0]
    assert copies[2].src not in {copy.dst for copy in copies[:2]}, "what comes back is not overwritten before"
    assert scene.manager.take_copies() == ()
    told = [
        BlockCopy(CopyKind(event.copy_kind), event.src, event.dst)
        for event in scene.of(CopyEvent)
        if isinstance(event, CopyEvent)
    ]
    assert told[-3:] == list(copies)


def test_what_comes_back_does_not_lose_its_slot_to_what_gives_way_for_it() -> None:
    """Host memory is full of what is wanted: the evicted blocks are lost, not the ones that are on their way back."""
    scene = Scene(num_blocks=3, host_slots=2)
    scene.compute([1] * 8)
    scene.evict_all()
    scene.compute([2] * 12)
    scene.admit([1] * 9)
    copies = scene.manager.take_copies()
    assert [copy.kind for copy in copies] == [CopyKind.TO_DEVICE] * 2
    assert scene.found([2] * 13) == (0, "evicted")
    assert scene.found([1] * 9) == (2, "partial block")


def test_a_block_that_came_back_is_found_by_the_next_one_in_its_block() -> None:
    scene = Scene(num_blocks=4, host_slots=2)
    scene.compute([1] * 8)
    scene.evict_all()
    first = scene.admit([1] * 9)
    second = scene.admit([1] * 9)
    assert scene.tables.block_ids(first.row)[:2] == scene.tables.block_ids(second.row)[:2]
    assert len(scene.manager.take_copies()) == 2


def test_an_admission_that_does_not_fit_takes_nothing() -> None:
    scene = Scene(num_blocks=4)
    scene.compute([1] * 8)
    scene.admit([2] * 8)
    request = scene.request([1] * 13)
    lookup = scene.manager.lookup(request)
    before = (scene.allocator.ref_counts(), scene.journal.written, scene.tables.num_free_rows)
    with pytest.raises(OutOfBlocksError):
        scene.manager.admit(request, lookup, 17)
    scene.manager.check_invariants()
    assert (scene.allocator.ref_counts(), scene.journal.written, scene.tables.num_free_rows) == before
    assert scene.found([1] * 9) == (2, "partial block")


def missing(scene: Scene, tokens: Sequence[int], num_tokens: int, leaving: Sequence[Request] = ()) -> int:
    lookup = scene.manager.lookup(scene.request(tokens))
    return scene.manager.missing_blocks(lookup, num_tokens, [request.row for request in leaving])


def test_missing_blocks_does_not_count_a_matched_cached_block_twice() -> None:
    """Fault 10: what is matched is not there to be handed out as new, too."""
    scene = Scene(num_blocks=4)
    scene.compute([1] * 8)
    assert scene.allocator.num_available == 4
    assert missing(scene, [1] * 9, 16) == 0
    assert missing(scene, [1] * 9, 17) == 1
    assert missing(scene, [3] * 9, 16) == 0
    scene.admit([1] * 9)
    assert scene.allocator.num_available == 1
    # Both matched blocks are in use now: shared, they cost nothing.
    assert missing(scene, [1] * 9, 12) == 0
    assert missing(scene, [1] * 9, 13) == 1


def test_missing_blocks_counts_what_leaving_rows_would_really_free() -> None:
    scene = Scene(num_blocks=6)
    scene.compute([1] * 8)
    first = scene.admit([1] * 9)  # 2 shared and 1 of its own
    second = scene.admit([1] * 9)  # the same 2 and 1 of its own
    assert scene.allocator.num_available == 2
    assert missing(scene, [3] * 12, 12) == 1
    assert missing(scene, [3] * 12, 12, [first]) == 0, "its own block"
    assert missing(scene, [3] * 16, 16, [first]) == 1, "not those that the other one shares"
    assert missing(scene, [3] * 24, 24, [first, second]) == 0, "each shared block once"
    assert missing(scene, [3] * 28, 28, [first, second]) == 1
    # One that matches what the leaving ones share: those blocks are matched and not available besides.
    assert missing(scene, [1] * 24, 24, [first, second]) == 0
    assert missing(scene, [1] * 28, 28, [first, second]) == 1


def test_missing_blocks_does_not_count_pinned_ones() -> None:
    scene = Scene(num_blocks=4)
    leader = scene.admit([1] * 6)
    row = scene.manager.fork(scene.request([1] * 6), leader, 6)
    assert scene.allocator.num_available == 1
    # The leader's partial block is being copied, and its full one is shared: nothing would come back at once.
    assert missing(scene, [3] * 8, 8, [leader]) == 1
    scene.manager.take_copies()
    scene.manager.copies_made()
    assert missing(scene, [3] * 8, 8, [leader]) == 0
    assert row != leader.row


# ---- publishing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_computed", "num_found"), [(0, 0), (3, 0), (4, 1), (5, 1), (8, 2), (9, 2)])
def test_only_what_is_full_and_computed_can_be_found(num_computed: int, num_found: int) -> None:
    """Fault 7: the blocks were allocated for all of the prompt at once."""
    scene = Scene()
    request = scene.admit(range(12))
    assert scene.found(range(13)) == (0, "differs")
    scene.publish(request, num_computed)
    assert scene.found(range(13))[0] == num_found
    table = scene.tables.block_ids(request.row)
    assert [scene.allocator.is_indexed(block_id) for block_id in table] == [index < num_found for index in range(3)]


def test_each_block_is_published_once_and_told_with_its_place() -> None:
    scene = Scene()
    request = scene.admit(range(16))
    for num_computed in (2, 5, 6, 13):
        scene.publish(request, num_computed)
    table = scene.tables.block_ids(request.row)
    told = [(event.first_index, event.block_ids) for event in scene.of(PublishEvent)]
    assert told == [(0, (table[0],)), (1, (table[1], table[2]))]


def test_two_equal_prompts_computed_together_keep_one_private_copy_of_each_block() -> None:
    """Fault 6."""
    scene = Scene()
    first, second = scene.admit([1] * 8), scene.admit([1] * 8)
    scene.publish(first, 8)
    scene.publish(second, 8)
    told = [event.block_ids for event in scene.of(PublishEvent)]
    assert told == [tuple(scene.tables.block_ids(first.row)), (NO_BLOCK, NO_BLOCK)]
    private = scene.tables.block_ids(second.row)
    scene.release(first)
    third = scene.admit([1] * 9)
    assert set(private).isdisjoint(scene.tables.block_ids(third.row))
    scene.release(second)
    assert [scene.allocator.state(block_id) for block_id in private] == ["free", "free"]


def test_another_salt_finds_nothing_and_says_why() -> None:
    scene = Scene()
    scene.compute([1] * 8)
    request = scene.request([1] * 9)
    request.salt = b"another"
    lookup = scene.manager.lookup(request)
    assert (lookup.entries, lookup.reason) == ([], "salt")


# ---- forks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "num_shared"), [(7, 1), (8, 2), (9, 2), (3, 0)])
def test_a_fork_shares_full_blocks_and_copies_the_partial_one(num_tokens: int, num_shared: int) -> None:
    """Fault 8. The leader has a block for its next token already."""
    scene = Scene()
    leader = scene.admit([1] * num_tokens, num_tokens + 1)
    scene.publish(leader, num_tokens)
    follower = scene.request([1] * num_tokens)
    follower.row = scene.manager.fork(follower, leader, num_tokens)
    scene.manager.check_invariants()
    ours, theirs = scene.tables.block_ids(leader.row), scene.tables.block_ids(follower.row)
    assert theirs[:num_shared] == ours[:num_shared]
    if num_tokens % SIZE == 0:
        assert len(theirs) == num_shared
        assert scene.manager.take_copies() == ()
        assert scene.allocator.pins() == {}
        return
    assert len(theirs) == num_shared + 1
    copy = BlockCopy(CopyKind.FORK, ours[num_shared], theirs[num_shared])
    assert copy.src != copy.dst
    assert scene.allocator.pins() == {copy.src: 1, copy.dst: 1}
    assert scene.manager.take_copies() == (copy,)
    scene.manager.copies_made()
    scene.manager.check_invariants()
    assert scene.allocator.pins() == {}


def test_a_leader_that_leaves_before_the_copy_keeps_its_block_from_others() -> None:
    scene = Scene(num_blocks=4)
    leader = scene.admit([1] * 6)
    follower = scene.request([1] * 6)
    follower.row = scene.manager.fork(follower, leader, 6)
    partial = scene.tables.block_ids(leader.row)[1]
    scene.release(leader)
    assert scene.allocator.state(partial) == "pinned"
    others = scene.tables.block_ids(scene.admit([3] * 4).row)
    assert partial not in others
    (copy,) = scene.manager.take_copies()
    assert copy.src == partial
    scene.manager.copies_made()
    assert scene.allocator.state(partial) == "free"
    scene.manager.check_invariants()


def test_a_fork_whose_row_is_gone_before_the_copy_pins_nothing() -> None:
    """Nobody would read that copy. Were the pins left, a request that needs those blocks would wait for a forward pass
    that only it could bring about."""
    scene = Scene()
    leader = scene.admit([1] * 6)
    followers = [scene.request([1] * 6) for _ in range(2)]
    for follower in followers:
        follower.row = scene.manager.fork(follower, leader, 6)
    gone = scene.tables.block_ids(followers[0].row)[1]
    scene.release(followers[0])
    (partial,) = scene.tables.block_ids(leader.row)[1:]
    kept = scene.tables.block_ids(followers[1].row)[1]
    assert scene.allocator.pins() == {partial: 1, kept: 1}
    scene.release(leader)
    scene.release(followers[1])
    assert (scene.allocator.pins(), scene.allocator.num_free) == ({}, 8)
    assert scene.manager.take_copies() == ()
    unpinned = [block_id for event in scene.of(UnpinEvent) for block_id in event.block_ids]
    assert sorted(unpinned) == sorted([partial, partial, gone, kept])


def test_a_fork_that_does_not_fit_takes_nothing() -> None:
    scene = Scene(num_blocks=2)
    leader = scene.admit([1] * 6)
    written = scene.journal.written
    with pytest.raises(OutOfBlocksError):
        scene.manager.fork(scene.request([1] * 6), leader, 6)
    scene.manager.check_invariants()
    assert (scene.allocator.pins(), scene.manager.take_copies(), scene.journal.written) == ({}, (), written)


def test_choices_publish_behind_the_prompt_they_share() -> None:
    scene = Scene()
    leader = scene.admit([1] * 8)
    scene.publish(leader, 6)
    follower = scene.request([1] * 6 + [2] * 2)
    follower.row = scene.manager.fork(follower, leader, 6)
    scene.rows[follower.row, :8] = follower.token_ids
    scene.publish(leader, 8)
    scene.publish(follower, 8)
    assert scene.found([1] * 9) == (2, "partial block")
    assert scene.found([1] * 6 + [2] * 3) == (2, "partial block")
    assert scene.allocator.num_used == 3


# ---- windows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 4, 5, 6, 9])
@pytest.mark.parametrize("num_computed", [0, 1, 4, 5, 8, 9, 12, 13, 16])
def test_exactly_the_blocks_behind_the_window_are_given_back(window: int, num_computed: int) -> None:
    """The next query stands at `num_computed` and sees `window` tokens, itself included."""
    scene = Scene(window=window)
    request = scene.admit(range(20))
    before = scene.tables.block_ids(request.row)
    scene.slide_window(request, num_computed)
    seen = range(max(0, num_computed - window + 1), num_computed + 1)
    kept = [index for index in range(5) if index >= seen[0] // SIZE]
    assert scene.tables.block_ids(request.row) == [before[index] for index in kept]
    assert scene.tables.entries(request.row)[: kept[0]] == [NO_BLOCK] * kept[0]
    assert scene.allocator.num_used == len(kept)
    told = [(event.first_index, event.block_ids) for event in scene.of(ReleaseEvent)]
    assert told == ([(0, tuple(before[: kept[0]]))] if kept[0] else [])
    # Again at the same place: nothing.
    scene.slide_window(request, num_computed)
    assert len(scene.of(ReleaseEvent)) == len(told)


def test_without_a_window_everything_is_kept() -> None:
    scene = Scene()
    request = scene.admit(range(20))
    scene.slide_window(request, 20)
    assert scene.allocator.num_used == 5


def test_what_is_behind_the_window_can_still_be_found_by_others() -> None:
    scene = Scene(window=4)
    request = scene.admit(range(13))
    scene.publish(request, 12)
    scene.slide_window(request, 12)
    assert scene.found(range(13)) == (3, "partial block")
    assert (scene.allocator.num_cached, scene.allocator.num_used) == (2, 2)


def test_forks_behind_a_window_are_released_in_every_order() -> None:
    """Fault 4."""
    for first_to_leave in range(2):
        scene = Scene(window=4)
        leader = scene.admit(range(14))
        scene.publish(leader, 14)
        scene.slide_window(leader, 14)
        follower = scene.request(range(14))
        follower.row = scene.manager.fork(follower, leader, 14)
        scene.manager.check_invariants()
        scene.manager.take_copies()
        scene.manager.copies_made()
        rows = [leader, follower]
        for request in (rows[first_to_leave], rows[1 - first_to_leave]):
            scene.slide_window(request, 15)
            scene.release(request)
        assert (scene.allocator.num_used, scene.allocator.num_pinned) == (0, 0)


# ---- a failed forward pass ----------------------------------------------------------------------------------------


def test_nothing_that_a_failed_step_touched_is_found_again() -> None:
    """Also what the failed request had shared: who knows what was written."""
    scene = Scene(num_blocks=8, host_slots=4)
    prompt = scene.compute([1] * 8)
    other = scene.compute([2] * 8)
    failed = scene.admit([1] * 8 + [3] * 4)
    assert scene.tables.block_ids(failed.row)[:2] == prompt
    scene.manager.distrust((), {failed.row})
    scene.manager.check_invariants()
    scene.release(failed)
    assert scene.found([1] * 9) == (0, "evicted")
    assert scene.found([2] * 9) == (2, "partial block")
    assert [scene.allocator.state(block_id) for block_id in prompt + other] == ["free"] * 2 + ["cached"] * 2
    told = [(event.block_id, event.reason) for event in scene.of(EvictEvent)]
    assert told == [(block_id, "failed") for block_id in prompt]


def test_copies_of_a_failed_step_are_not_trusted_on_either_side() -> None:
    scene = Scene(num_blocks=2, host_slots=4)
    scene.compute([1] * 8)
    scene.evict_all()
    scene.compute([2] * 8)
    assert scene.found([1] * 9) == scene.found([2] * 9) == (2, "partial block")
    request = scene.admit([1] * 7)
    copies = scene.manager.take_copies()
    assert {copy.kind for copy in copies} == {CopyKind.TO_HOST, CopyKind.TO_DEVICE}
    assert scene.manager.holders(copies) == {request.row}
    scene.manager.distrust(copies, ())
    scene.manager.check_invariants()
    assert scene.found([2] * 9) == (0, "evicted"), "its copies into host memory"
    assert scene.found([1] * 5) == (0, "evicted"), "the copy back, and the slot it came from"
    assert scene.manager.host_tier is not None
    assert scene.manager.host_tier.num_used == 1, "the second block of the first prompt was in no copy"


def test_after_a_failed_step_all_entries_are_sent_to_the_device_again() -> None:
    scene = Scene()
    request = scene.admit([1] * 8)
    scene.tables.drain_updates()
    scene.manager.distrust((), ())
    updates = scene.tables.drain_updates()
    assert updates.block_ids.tolist() == scene.tables.block_ids(request.row)


def test_holders_are_the_rows_that_a_copy_writes_for() -> None:
    scene = Scene()
    leader = scene.admit([1] * 6)
    follower = scene.request([1] * 6)
    follower.row = scene.manager.fork(follower, leader, 6)
    scene.admit([2] * 4)
    copies = scene.manager.take_copies()
    assert scene.manager.holders(copies) == {follower.row}
    assert scene.manager.holders(()) == set()
    assert scene.manager.holders([BlockCopy(CopyKind.TO_HOST, 0, copies[0].dst)]) == set(), "dst is a slot there"


def test_a_reset_tells_how_many_blocks_could_be_found_and_spares_running_requests() -> None:
    scene = Scene()
    scene.compute([1] * 8)
    running = scene.admit([2] * 8)
    scene.publish(running, 4)
    assert scene.manager.reset_prefix_cache() == 3
    scene.manager.check_invariants()
    assert (scene.allocator.num_cached, scene.allocator.num_used) == (0, 2)
    scene.publish(running, 8)
    assert scene.found([2] * 9) == (0, "differs")
    scene.release(running)
    assert scene.allocator.num_free == 8
