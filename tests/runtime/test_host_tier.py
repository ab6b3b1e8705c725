"""Host memory by hand: who gives way to whom, and the copies in the order in which they were decided."""

from __future__ import annotations

import pytest

from pageframe.runtime.block_copy import BlockCopy, CopyKind
from pageframe.runtime.host_tier import NO_SLOT, HostTier


class Scene:
    """A tier whose owners are letters."""

    def __init__(self, num_slots: int) -> None:
        self.copies: list[BlockCopy] = []
        self.tier: HostTier[str] = HostTier(num_slots, self.copies.append)
        self.lost: list[str] = []

    def store(self, owner: str, block_id: int = 0) -> int:
        slot = self.tier.store(owner, block_id, self.lost.append)
        self.tier.check_invariants()
        return slot

    def owners(self) -> list[str]:
        return [owner for _, owner in self.tier.items()]


def test_each_owner_gets_a_slot_of_its_own_until_there_are_none() -> None:
    scene = Scene(3)
    slots = [scene.store(owner) for owner in "abc"]
    assert sorted(slots) == [0, 1, 2]
    assert dict(scene.tier.items()) == dict(zip(slots, "abc", strict=True))
    assert (scene.tier.num_used, scene.tier.num_slots, scene.lost) == (3, 3, [])


def test_the_least_recently_used_gives_way_and_is_told() -> None:
    scene = Scene(2)
    first, second = scene.store("a"), scene.store("b")
    assert scene.store("c") == first
    assert scene.lost == ["a"]
    scene.tier.hold([second])
    scene.tier.hold([])
    assert scene.store("d") == first, "b was used since"
    assert scene.lost == ["a", "c"]
    assert scene.owners() == ["b", "d"]


def test_what_is_held_does_not_give_way_until_the_next_call() -> None:
    scene = Scene(3)
    a, b, _ = (scene.store(owner) for owner in "abc")
    scene.tier.hold([a, b])
    scene.store("d")
    assert scene.lost == ["c"]
    scene.tier.hold([])
    scene.store("e")
    scene.store("f")
    assert set(scene.lost) == {"c", "a", "b"}


def test_there_is_no_slot_where_all_are_held() -> None:
    scene = Scene(2)
    slots = [scene.store("a"), scene.store("b")]
    scene.tier.hold(slots)
    before = scene.copies.copy()
    assert scene.store("c") == NO_SLOT
    assert (scene.owners(), scene.lost, scene.copies) == (["b", "a"], [], before)


def test_of_a_chain_that_was_used_the_tail_gives_way_before_the_head() -> None:
    scene = Scene(6)
    slots = [scene.store(owner) for owner in "abcdef"]
    scene.tier.hold([slots[5], slots[0], slots[3]])
    scene.tier.hold([])
    for owner in "uvwxyz":
        scene.store(owner)
    assert scene.lost == ["b", "c", "e", "d", "a", "f"]


def test_what_came_in_while_others_are_held_gives_way_where_they_must_not() -> None:
    scene = Scene(2)
    held = scene.store("held")
    scene.tier.hold([held])
    slot = scene.store("a")
    assert scene.store("b") == slot
    assert scene.lost == ["a"]
    assert set(scene.owners()) == {"held", "b"}


def test_copies_are_written_down_in_the_order_in_which_they_were_decided() -> None:
    scene = Scene(2)
    slots = [scene.store(owner, block_id) for owner, block_id in (("a", 7), ("b", 3), ("c", 7))]
    assert scene.copies == [
        BlockCopy(CopyKind.TO_HOST, src=block_id, dst=slot) for block_id, slot in zip((7, 3, 7), slots, strict=True)
    ]


def test_a_slot_given_up_is_free_again_and_tells_whose_it_was() -> None:
    scene = Scene(2)
    slot = scene.store("a")
    assert scene.tier.drop(slot) == "a"
    assert scene.tier.drop(slot) is None
    scene.tier.check_invariants()
    assert scene.tier.num_used == 0
    assert {scene.store("b"), scene.store("c")} == {0, 1}
    assert scene.lost == [], "who gives a slot up by itself is told by nobody"


def test_clearing_gives_all_slots_up() -> None:
    scene = Scene(3)
    for owner in "abcd":
        scene.store(owner)
    scene.tier.hold([0, 1, 2])
    scene.lost.clear()
    scene.tier.clear()
    scene.tier.check_invariants()
    assert (scene.tier.num_used, scene.lost) == (0, [])
    assert sorted(scene.store(owner) for owner in "xyz") == [0, 1, 2]


@pytest.mark.parametrize("num_slots", [0, -1])
def test_a_tier_has_at_least_one_slot(num_slots: int) -> None:
    with pytest.raises(ValueError, match=f"num_slots is {num_slots}"):
        HostTier(num_slots, lambda copy: None)
