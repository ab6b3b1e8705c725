"""Host memory as a second place for what is evicted from the pool: which slot holds what.

A slot holds one block. What a slot's bytes mean is known to its owner, here only that it has one. The copies
themselves are lists that a step's plan carries to the runner, in the order in which they were decided.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, ItemsView, Sequence
from typing import Generic, TypeVar

from pageframe.runtime.block_copy import BlockCopy, CopyKind

OwnerT = TypeVar("OwnerT")

NO_SLOT = -1


class HostTier(Generic[OwnerT]):
    """`num_slots` slots, the least recently used given up first.

    Args:
        copy: called with each copy into host memory, to be made in the order of the calls.
    """

    def __init__(self, num_slots: int, copy: Callable[[BlockCopy], None]) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots is {num_slots}; it must be at least 1")
        self.num_slots = num_slots
        self._copy = copy
        self._free = list(range(num_slots - 1, -1, -1))
        self._owners: OrderedDict[int, OwnerT] = OrderedDict()
        self._held: frozenset[int] = frozenset()

    @property
    def num_used(self) -> int:
        return len(self._owners)

    def items(self) -> ItemsView[int, OwnerT]:
        """Slots in use and their owners, the least recently used first."""
        return self._owners.items()

    def store(self, owner: OwnerT, block_id: int, on_lost: Callable[[OwnerT], None]) -> int:
        """Copy a block into a slot of its own, which is returned, or NO_SLOT where all are held; `on_lost` hears of the
        owner that had to give way."""
        if self._free:
            slot = self._free.pop()
        else:
            slot = next((slot for slot in self._owners if slot not in self._held), NO_SLOT)
            if slot == NO_SLOT:
                return NO_SLOT
            on_lost(self._owners.pop(slot))
        self._owners[slot] = owner
        self._copy(BlockCopy(CopyKind.TO_HOST, block_id, slot))
        return slot

    def hold(self, slots: Sequence[int]) -> None:
        """A chain's slots, head first, were used just now: they are not given up before the next call, and after it the
        chain's tail before its head."""
        self._held = frozenset(slots)
        for slot in reversed(slots):
            self._owners.move_to_end(slot)

    def drop(self, slot: int) -> OwnerT | None:
        """Give a slot up; its owner, if it had one."""
        owner = self._owners.pop(slot, None)
        if owner is not None:
            self._free.append(slot)
        return owner

    def clear(self) -> None:
        """Give all slots up."""
        self._free += self._owners
        self._owners.clear()

    def check_invariants(self) -> None:
        """Every slot is either free or owned."""
        assert sorted([*self._free, *self._owners]) == list(range(self.num_slots))
