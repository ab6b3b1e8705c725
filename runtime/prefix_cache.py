"""Which computed blocks hold which token prefix.

A tree of entries, one per full block of tokens. An entry's key is (its parent's id, the block's token bytes), the
root's is the salt, and a lookup walks down from the root:

    root "tenant a" -- [the quick brown] -- [fox jumps over] -- [the lazy dog]
                              |                    |
                           block 7              block 2          evicted in step 91

Keys are compared exactly and ids are never used twice, so nothing can collide. An entry whose block was evicted
stays for a while: it explains misses, and keeps the chain of those behind it. What an entry holds is K and V that a
finished forward pass has written; who may look under a salt is decided by whoever names the salt.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pageframe.runtime.block_allocator import BlockAllocator
from pageframe.runtime.host_tier import HostTier
from pageframe.runtime.journal import EvictEvent, Journal, LoseEvent, ResetEvent

NO_PLACE = -1
TOKEN_BYTES = 4


def make_salt(*fields: str) -> bytes:
    """Who shares with whom: those with the same fields, none of which can run into the next."""
    encoded = [field.encode() for field in fields]
    return b"".join(len(field).to_bytes(8, "little") + field for field in encoded)


@dataclass(slots=True, eq=False)
class Entry:
    """One block's worth of tokens behind a prefix.

    Args:
        parent: None for a root.
        tokens: the block's token ids as int32 bytes; a root's salt.
        block_id, host_slot: where its K and V are, NO_PLACE for nowhere.
        evicted_step: when the last of them was lost.
        published_by: the request that computed it.
        used_step: when it was last published or found.
        num_hits: how often a request went on from it.
        is_forgotten: it is no longer in the index, and nothing can be published behind it.
    """

    entry_id: int
    parent: Entry | None
    tokens: bytes
    block_id: int = NO_PLACE
    host_slot: int = NO_PLACE
    num_children: int = 0
    evicted_step: int = NO_PLACE
    published_by: str = ""
    used_step: int = 0
    num_hits: int = 0
    is_forgotten: bool = False
    _digest: bytes = b""

    @property
    def is_held(self) -> bool:
        """Its K and V are somewhere."""
        return self.block_id != NO_PLACE or self.host_slot != NO_PLACE


@dataclass(frozen=True, slots=True)
class Lookup:
    """What a prefix lookup found, and why it stopped where it did.

    Args:
        entries: of the leading full blocks, in order.
        reason: "partial block" (only the last, partial block is left to compute), "differs" (no computed prefix goes on
            with these tokens), "evicted" (one did, but its block was reused in step `evicted_step`), "salt" (only
            other salts have it), "logprobs" (the request wants logprobs of its prompt, so all of it is computed),
            "recompute" (the next block is in host memory, but copying costs more than computing) or "off".
        copy_seconds, compute_seconds: of what was left out because of "recompute".
    """

    entries: list[Entry]
    reason: str
    evicted_step: int = NO_PLACE
    copy_seconds: float = 0.0
    compute_seconds: float = 0.0


class PrefixCache:
    """The index, and the only one who marks blocks as indexed.

    Args:
        host_tier: where evicted blocks go; None for nowhere.
        keep_evicted: how many entries without blocks are remembered.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        journal: Journal,
        *,
        block_size: int,
        host_tier: HostTier[Entry] | None = None,
        keep_evicted: int | None = None,
    ) -> None:
        self.allocator = allocator
        self.host_tier = host_tier
        self._journal = journal
        self._bytes_per_block = block_size * TOKEN_BYTES
        self._keep_evicted = allocator.num_blocks if keep_evicted is None else keep_evicted
        self._roots: dict[bytes, Entry] = {}
        self._index: dict[tuple[int, bytes], Entry] = {}
        self._by_block: dict[int, Entry] = {}
        #: Entries without a block, and of these the ones that nothing hangs from, oldest first: they go first.
        self._num_evicted = 0
        self._evicted_leaves: OrderedDict[int, Entry] = OrderedDict()
        #: How many roots have a first block with these tokens: tells a differing prompt from one under another salt.
        self._first_blocks: dict[bytes, int] = {}
        self._num_entries = 0
        #: Blocks whose contents were given up, so far.
        self.num_evictions = 0
        #: Changes whenever a lookup may have another answer than before.
        self.generation = 0
        allocator.on_evict = self._block_is_reused

    def __len__(self) -> int:
        """Blocks that can be found."""
        return len(self._by_block)

    @property
    def num_evicted(self) -> int:
        """Entries remembered without a block: `keep_evicted` at most, and those that others hang from."""
        return self._num_evicted

    def entry_of(self, block_id: int) -> Entry | None:
        """The entry that a block is indexed under."""
        return self._by_block.get(block_id)

    # ---- looking up -----------------------------------------------------------------------------------------------

    def lookup(self, salt: bytes, token_ids: npt.NDArray[np.int32], max_blocks: int) -> Lookup:
        """The longest chain of held entries for the leading full blocks of a prompt, at most `max_blocks`."""
        entry = self._roots.get(salt)
        if entry is None:
            found = max_blocks > 0 and token_ids[: self._bytes_per_block // TOKEN_BYTES].tobytes() in self._first_blocks
            return Lookup([], "salt" if found else "differs" if max_blocks else "partial block")
        data, width = token_ids.tobytes(), self._bytes_per_block
        entries: list[Entry] = []
        for start in range(0, max_blocks * width, width):
            child = self._index.get((entry.entry_id, data[start : start + width]))
            if child is None:
                under_other_salt = not entries and data[:width] in self._first_blocks
                return Lookup(entries, "salt" if under_other_salt else "differs")
            if not child.is_held:
                return Lookup(entries, "evicted", child.evicted_step)
            entries.append(child)
            entry = child
        return Lookup(entries, "partial block")

    def use(self, entries: Sequence[Entry]) -> None:
        """A request goes on from these. None of their copies in host memory is given up before the next call."""
        for entry in entries:
            entry.used_step = self._journal.step
            entry.num_hits += 1
        if self.host_tier is not None:
            self.host_tier.hold([entry.host_slot for entry in entries if entry.host_slot != NO_PLACE])

    # ---- filling --------------------------------------------------------------------------------------------------

    def root(self, salt: bytes) -> Entry:
        """The entry that all prefixes under `salt` hang from."""
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = self._new_entry(None, salt)
        return root

    def publish(self, parent: Entry, tokens: bytes, block_id: int, request_id: str) -> Entry:
        """Index a full, written block behind `parent`; the entry that now stands for these tokens.

        Where that entry has a block already, `block_id` was computed side by side with it: it stays private to its
        request. Behind an entry that was forgotten nothing is indexed.
        """
        key = (parent.entry_id, tokens)
        entry = self._index.get(key)
        if entry is None:
            entry = self._new_entry(parent, tokens)
            if parent.is_forgotten:
                entry.is_forgotten = True
                return entry
            self._index[key] = entry
            parent.num_children += 1
            self._evicted_leaves.pop(parent.entry_id, None)
            if parent.parent is None:
                self._first_blocks[tokens] = self._first_blocks.get(tokens, 0) + 1
        elif entry.block_id != NO_PLACE:
            return entry
        elif not entry.is_held:
            self._num_evicted -= 1
            self._evicted_leaves.pop(entry.entry_id, None)
        entry.published_by, entry.used_step = request_id, self._journal.step
        self.place(entry, block_id)
        return entry

    def place(self, entry: Entry, block_id: int) -> None:
        """Say that `block_id` holds the entry's K and V, or will before any forward pass reads it."""
        assert entry.block_id == NO_PLACE, f"entry {entry.entry_id} has block {entry.block_id} already"
        entry.block_id = block_id
        self._by_block[block_id] = entry
        self.generation += 1
        self.allocator.set_indexed(block_id)

    def _new_entry(self, parent: Entry | None, tokens: bytes) -> Entry:
        self._num_entries += 1
        return Entry(self._num_entries, parent, tokens)

    # ---- losing ---------------------------------------------------------------------------------------------------

    def _block_is_reused(self, block_id: int) -> None:
        """The allocator hands out a cached block: what it holds goes to host memory, or is lost."""
        entry = self._by_block.pop(block_id)
        self.generation += 1
        # Whoever gives way in host memory may be dropped, so this entry counts as held until it is known where it goes.
        if self.host_tier is not None and entry.host_slot == NO_PLACE:
            entry.host_slot = self.host_tier.store(entry, block_id, self._lose_host_copy)
        entry.block_id = NO_PLACE
        self._note_eviction(entry, block_id, "reused")
        if not entry.is_held:
            self._remember_evicted(entry)

    def _note_eviction(self, entry: Entry, block_id: int, reason: str) -> None:
        self.num_evictions += 1
        self._journal.note(
            EvictEvent,
            entry.published_by,
            block_id=block_id,
            host_slot=entry.host_slot if reason == "reused" else NO_PLACE,
            idle_steps=self._journal.step - entry.used_step,
            reason=reason,
        )

    def _lose_host_copy(self, entry: Entry) -> None:
        self._journal.note(LoseEvent, entry.published_by, host_slot=entry.host_slot)
        entry.host_slot = NO_PLACE
        self.generation += 1
        if not entry.is_held:
            self._remember_evicted(entry)

    def forget_blocks(self, block_ids: Sequence[int], reason: str) -> None:
        """What these blocks hold can't be trusted: they are not found any more, on the device or in host memory."""
        for block_id in block_ids:
            entry = self._by_block.pop(block_id, None)
            if entry is None:
                continue
            entry.block_id = NO_PLACE
            self.generation += 1
            self.allocator.clear_indexed(block_id)
            self._note_eviction(entry, block_id, reason)
            if entry.host_slot != NO_PLACE:
                self.forget_host_copies([entry.host_slot])
            else:
                self._remember_evicted(entry)

    def forget_host_copies(self, host_slots: Sequence[int]) -> None:
        """What these host slots hold can't be trusted."""
        if self.host_tier is None:
            return
        for slot in host_slots:
            entry = self.host_tier.drop(slot)
            if entry is not None:
                self._lose_host_copy(entry)

    def reset(self) -> int:
        """Forget everything; the number of blocks that could be found. Requests keep the blocks they use."""
        num_blocks = len(self._by_block)
        for entry in (*self._roots.values(), *self._index.values()):
            entry.is_forgotten = True
        self._roots.clear()
        self._index.clear()
        self._evicted_leaves.clear()
        self._num_evicted = 0
        self.generation += 1
        self._first_blocks.clear()
        for block_id in self._by_block:
            self.allocator.clear_indexed(block_id)
        self._journal.note(ResetEvent, "", num_blocks=num_blocks)
        self._by_block.clear()
        if self.host_tier is not None:
            self.host_tier.clear()
        return num_blocks

    def _remember_evicted(self, entry: Entry) -> None:
        """Keep an entry without a block, and drop the oldest of those that nothing hangs from."""
        entry.evicted_step = self._journal.step
        self._num_evicted += 1
        if not entry.num_children:
            self._evicted_leaves[entry.entry_id] = entry
        while self._num_evicted > self._keep_evicted and self._evicted_leaves:
            _, oldest = self._evicted_leaves.popitem(last=False)
            self._drop(oldest)

    def _drop(self, entry: Entry) -> None:
        parent = entry.parent
        assert parent is not None, "roots are never evicted"
        del self._index[parent.entry_id, entry.tokens]
        entry.is_forgotten = True
        self._num_evicted -= 1
        parent.num_children -= 1
        if parent.parent is None:
            self._drop_first_block(parent, entry.tokens)
        elif not parent.num_children and not parent.is_held:
            self._evicted_leaves[parent.entry_id] = parent

    def _drop_first_block(self, root: Entry, tokens: bytes) -> None:
        left = self._first_blocks.pop(tokens) - 1
        if left:
            self._first_blocks[tokens] = left
        if root.num_children == 0:
            del self._roots[root.tokens]
            root.is_forgotten = True

    # ---- for people and tests -------------------------------------------------------------------------------------

    def roots(self) -> list[Entry]:
        """The entries that everything else hangs from, one for each salt."""
        return list(self._roots.values())

    def entries(self) -> list[Entry]:
        """All entries but the roots, those without a block too; a parent stands before what was published behind it."""
        return list(self._index.values())

    def digest(self, entry: Entry) -> str:
        """16 hex digits that name an entry's whole prefix, salt included. For display: nothing is decided by it.

        SHA-256 of (the digest of what comes before, the block's tokens), the root's of its salt.
        """
        chain: list[Entry] = []
        node: Entry | None = entry
        while node is not None and not node._digest:
            chain.append(node)
            node = node.parent
        before = b"" if node is None else node._digest
        for node in reversed(chain):
            before = node._digest = hashlib.sha256(before + node.tokens).digest()
        return before.hex()[:16]

    def check_invariants(self) -> None:
        """Index, blocks, host slots and the allocator's marks agree; every chain reaches its root."""
        children: dict[int, int] = {}
        for (parent_id, tokens), entry in self._index.items():
            assert entry.parent is not None
            assert (parent_id, tokens) == (entry.parent.entry_id, entry.tokens), f"entry {entry.entry_id} is misfiled"
            assert len(tokens) == self._bytes_per_block, "a partial block is indexed"
            assert not entry.is_forgotten
            assert not entry.parent.is_forgotten, f"entry {entry.entry_id} hangs from a forgotten one"
            children[parent_id] = children.get(parent_id, 0) + 1
            if entry.block_id != NO_PLACE:
                assert self._by_block.get(entry.block_id) is entry
            is_leaf = not entry.is_held and not entry.num_children
            assert is_leaf == (entry.entry_id in self._evicted_leaves), f"entry {entry.entry_id} is not where it goes"
        assert self._num_evicted == sum(not entry.is_held for entry in self._index.values())
        for entry in (*self._roots.values(), *self._index.values()):
            assert entry.num_children == children.get(entry.entry_id, 0), f"entry {entry.entry_id} miscounts children"
        for block_id, entry in self._by_block.items():
            assert entry.block_id == block_id
            assert not entry.is_forgotten, f"block {block_id} is indexed under a forgotten entry"
        indexed = [block_id for block_id in range(self.allocator.num_blocks) if self.allocator.is_indexed(block_id)]
        assert indexed == sorted(self._by_block), "the allocator and the index disagree about who is indexed"
        if self.host_tier is not None:
            self.host_tier.check_invariants()
            for slot, entry in self.host_tier.items():
                assert entry.host_slot == slot
                assert not entry.is_forgotten, f"host slot {slot} is held by a forgotten entry"
