"""Which blocks a request's context is in: finds what is computed already, takes blocks, publishes, gives back.

The scheduler decides who gets memory; this decides which, and writes every change into the journal. It ties together
the block tables and the prefix cache with its host tier, and keeps per row how far that row is published:

    | matched or published, entry = chain[row] | full, this step's | partial |
    0                               num_published[row]          num_computed_tokens
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt

from pageframe.runtime.block_allocator import BlockAllocator
from pageframe.runtime.block_copy import FREE_COPIES, BlockCopy, CopyCosts, CopyKind
from pageframe.runtime.block_table import NO_BLOCK, BlockTables
from pageframe.runtime.host_tier import HostTier
from pageframe.runtime.journal import (
    AdmitEvent,
    AllocateEvent,
    CopyEvent,
    ForkEvent,
    FreeEvent,
    HitEvent,
    Journal,
    MissEvent,
    PinEvent,
    PublishEvent,
    ReleaseEvent,
    ShareEvent,
    UnpinEvent,
)
from pageframe.runtime.prefix_cache import TOKEN_BYTES, Entry, Lookup, PrefixCache
from pageframe.runtime.request import Request

Int32s = npt.NDArray[np.int32]


class BlockManager:
    """The memory of all running requests.

    Args:
        max_blocks: entries of a block-table row.
        prefix_cache: whether computed prefixes are found again.
        host_slots: blocks that host memory holds for the prefix cache, 0 for none.
        copy_costs: what decides between copying from host memory and computing again.
        window: tokens that any layer looks back, the newest included; None where some layer looks at everything.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_requests: int,
        max_blocks: int,
        journal: Journal,
        prefix_cache: bool = True,
        host_slots: int = 0,
        copy_costs: CopyCosts = FREE_COPIES,
        window: int | None = None,
    ) -> None:
        self.allocator = BlockAllocator(num_blocks)
        self.tables = BlockTables(
            self.allocator, max_requests=max_num_requests, max_blocks=max_blocks, block_size=block_size
        )
        self._copies: list[BlockCopy] = []
        self.host_tier: HostTier[Entry] | None = HostTier(host_slots, self._record_copy) if host_slots else None
        self.prefix_cache: PrefixCache | None = None
        if prefix_cache:
            self.prefix_cache = PrefixCache(self.allocator, journal, block_size=block_size, host_tier=self.host_tier)
        self._journal = journal
        self._block_size = block_size
        self._copy_costs = copy_costs
        self._window = window
        #: Per row: the entry of its last published block, None at the root.
        self._chain: list[Entry | None] = [None] * max_num_requests
        self._num_published: Int32s = np.zeros(max_num_requests, dtype=np.int32)
        #: Pinned until the plan that carries their copies is done.
        self._pinned: list[int] = []

    @property
    def num_index_changes(self) -> int:
        """Grows by one at least with each block that can be found, or can't be any more."""
        return 0 if self.prefix_cache is None else self.prefix_cache.generation

    # ---- entering -------------------------------------------------------------------------------------------------

    def lookup(self, request: Request) -> Lookup:
        """What of a waiting request's context is computed already; at least its last token never is."""
        if self.prefix_cache is None:
            return Lookup([], "off")
        if request.wants_prompt_logprobs:
            return Lookup([], "logprobs")
        context = request.context
        max_blocks = (len(context) - 1) // self._block_size
        return self._worth_copying(self.prefix_cache.lookup(request.salt, context, max_blocks))

    def _worth_copying(self, lookup: Lookup) -> Lookup:
        """Cut where copying what lies in host memory costs more than computing all that the copies would save."""
        computing = self._copy_costs.per_token * self._block_size
        best_length, saved, best_saved = 0, 0.0, 0.0
        for length, entry in enumerate(lookup.entries, 1):
            saved += computing - (self._copy_costs.per_block if entry.block_id == NO_BLOCK else 0.0)
            if saved >= best_saved:
                best_length, best_saved = length, saved
        left_out = lookup.entries[best_length:]
        if not left_out:
            return lookup
        return Lookup(
            lookup.entries[:best_length],
            "recompute",
            copy_seconds=sum(entry.block_id == NO_BLOCK for entry in left_out) * self._copy_costs.per_block,
            compute_seconds=len(left_out) * computing,
        )

    def missing_blocks(self, lookup: Lookup, num_tokens: int, leaving: Iterable[int] = ()) -> int:
        """Blocks that lack before a request with this lookup can hold `num_tokens` tokens; 0 or less where it can.

        Args:
            leaving: rows whose requests would give way for it.
        """
        given_back = Counter(block_id for row in leaving for block_id in self.tables.block_ids(row))
        freed = sum(self.allocator.ref_count(block_id) == count for block_id, count in given_back.items())
        matched = [entry.block_id for entry in lookup.entries if entry.block_id != NO_BLOCK]
        # What is matched but not in use counts as available now, and will not be.
        unused = sum(self.allocator.ref_count(block_id) == given_back[block_id] for block_id in matched)
        available = self.allocator.num_available + freed - unused
        return self.tables.blocks_for(num_tokens) - len(matched) - available

    def admit(self, request: Request, lookup: Lookup, num_tokens: int) -> int:
        """Give a request a row with blocks for `num_tokens` tokens, the first of them as looked up; returns the row.

        Raises:
            OutOfBlocksError: not enough blocks are available; nothing was taken.
        """
        entries = lookup.entries
        if self.prefix_cache is not None:
            self.prefix_cache.use(entries)
        try:
            row = self.tables.acquire_row([entry.block_id for entry in entries], num_tokens)
        finally:
            if self.host_tier is not None:
                # Later copies may overwrite what is to be copied back: they are made after it.
                self.host_tier.hold(())
        self._chain[row] = entries[-1] if entries else None
        self._num_published[row] = len(entries)
        self._note_admission(request, row, lookup)
        for index, entry in enumerate(entries):
            if entry.block_id == NO_BLOCK:
                self._copy_back(request, entry, int(self.tables.table[row, index]))
        return row

    def _copy_back(self, request: Request, entry: Entry, block_id: int) -> None:
        assert self.prefix_cache is not None
        self._record_copy(BlockCopy(CopyKind.TO_DEVICE, entry.host_slot, block_id), request.request_id)
        self.prefix_cache.place(entry, block_id)

    def _record_copy(self, copy: BlockCopy, request_id: str = "") -> None:
        self._copies.append(copy)
        self._journal.note(CopyEvent, request_id, copy_kind=copy.kind.value, src=copy.src, dst=copy.dst)

    def _note_admission(self, request: Request, row: int, lookup: Lookup) -> None:
        note, request_id, entries = self._journal.note, request.request_id, lookup.entries
        note(AdmitEvent, request_id, row=row, num_tokens=len(request.context))
        if entries:
            in_host = [entry.block_id == NO_BLOCK for entry in entries]
            tokens_behind = (len(entries) - in_host.index(True)) * self._block_size if any(in_host) else 0
            note(
                HitEvent,
                request_id,
                num_blocks=len(entries),
                num_tokens=len(entries) * self._block_size,
                num_copied=sum(in_host),
                copy_seconds=sum(in_host) * self._copy_costs.per_block,
                compute_seconds=tokens_behind * self._copy_costs.per_token,
            )
        note(
            MissEvent,
            request_id,
            reason=lookup.reason,
            num_blocks=len(entries),
            evicted_step=lookup.evicted_step,
            copy_seconds=lookup.copy_seconds,
            compute_seconds=lookup.compute_seconds,
        )
        matched = [entry.block_id != NO_BLOCK for entry in entries]
        self._note_blocks(request, row, 0, matched)

    def _note_blocks(self, request: Request, row: int, first_index: int, is_shared: Sequence[bool]) -> None:
        """Events for a new row's blocks from `first_index` on: runs that are shared, and runs that are new."""
        block_ids = self.tables.block_ids(row)
        flags = [*is_shared, *[False] * (len(block_ids) - len(is_shared))]
        index = 0
        for shared, run in groupby(flags):
            end = index + len(list(run))
            self._journal.note(
                ShareEvent if shared else AllocateEvent,
                request.request_id,
                row=row,
                first_index=first_index + index,
                block_ids=tuple(block_ids[index:end]),
            )
            index = end

    def fork(self, request: Request, leader: Request, num_tokens: int) -> int:
        """Give a choice a row that goes on from the `num_tokens` tokens its leader has computed; returns the row.

        Full blocks are shared, a partial one is copied before the next forward pass.

        Raises:
            OutOfBlocksError: no block is available; nothing was taken.
        """
        row = self.tables.fork_row(leader.row, num_tokens)
        self._chain[row] = self._chain[leader.row]
        self._num_published[row] = self._num_published[leader.row]
        first, num_full = int(self.tables.first_block[row]), num_tokens // self._block_size
        self._journal.note(ForkEvent, request.request_id, row=row, leader=leader.request_id, num_tokens=num_tokens)
        self._note_blocks(request, row, first, [True] * (num_full - first))
        if num_tokens % self._block_size:
            src, dst = self.tables.table[[leader.row, row], num_full].tolist()
            self._record_copy(BlockCopy(CopyKind.FORK, src, dst), request.request_id)
            self.allocator.pin((src, dst))
            self._pinned += (src, dst)
            self._journal.note(PinEvent, request.request_id, block_ids=(src, dst))
        return row

    # ---- while running --------------------------------------------------------------------------------------------

    def grow(self, request: Request, num_tokens: int) -> None:
        """Append blocks until a running request can hold `num_tokens` tokens.

        Raises:
            OutOfBlocksError: not enough blocks are available; nothing was taken.
        """
        first_index = int(self.tables.num_blocks[request.row])
        block_ids = self.tables.grow(request.row, num_tokens)
        self._journal.note(
            AllocateEvent,
            request.request_id,
            row=request.row,
            first_index=first_index,
            block_ids=tuple(block_ids),
        )

    def publish(self, requests: Sequence[Request], rows: Int32s, num_computed: Int32s, token_ids: Int32s) -> None:
        """Make findable what a finished forward pass has filled.

        Args:
            requests, rows, num_computed: parallel; tokens whose K and V are written.
            token_ids: int32 [max_requests, …], each row's context.
        """
        if self.prefix_cache is None:
            return
        num_full = num_computed // self._block_size
        for index in np.flatnonzero(num_full > self._num_published[rows]).tolist():
            self._publish(requests[index], int(rows[index]), int(num_full[index]), token_ids)

    def _publish(self, request: Request, row: int, num_full: int, token_ids: Int32s) -> None:
        assert self.prefix_cache is not None
        first, size = int(self._num_published[row]), self._block_size
        data, width = token_ids[row, first * size : num_full * size].tobytes(), size * TOKEN_BYTES
        entry = self._chain[row] or self.prefix_cache.root(request.salt)
        published = []
        for index, block_id in enumerate(self.tables.table[row, first:num_full].tolist()):
            entry = self.prefix_cache.publish(
                entry, data[index * width : (index + 1) * width], block_id, request.request_id
            )
            published.append(block_id if entry.block_id == block_id else NO_BLOCK)
        self._chain[row] = entry
        self._num_published[row] = num_full
        self._journal.note(PublishEvent, request.request_id, row=row, first_index=first, block_ids=tuple(published))

    def release_behind_window(self, requests: Sequence[Request], rows: Int32s, num_computed: Int32s) -> None:
        """Give back blocks that no query will look at again, where every layer has a window."""
        if self._window is None:
            return
        # The next query stands at position num_computed and sees the window that ends there.
        first_needed = np.maximum(num_computed - self._window + 1, 0) // self._block_size
        for index in np.flatnonzero(first_needed > self.tables.first_block[rows]).tolist():
            row = int(rows[index])
            first_index = int(self.tables.first_block[row])
            block_ids = self.tables.release_before(row, int(first_needed[index]))
            self._journal.note(
                ReleaseEvent,
                requests[index].request_id,
                row=row,
                first_index=first_index,
                block_ids=tuple(block_ids),
            )

    # ---- leaving --------------------------------------------------------------------------------------------------

    def release(self, request: Request) -> None:
        """Give a running request's row and blocks back."""
        row = request.row
        num_behind_window = int(self.tables.first_block[row])
        block_ids = self.tables.release(row)
        self._outlive_tail(self._chain[row], int(self._num_published[row]) - num_behind_window)
        self._chain[row] = None
        self._num_published[row] = 0
        self._journal.note(FreeEvent, request.request_id, row=row, block_ids=tuple(block_ids))
        if self._pinned:
            self._cancel_forks()

    def _outlive_tail(self, entry: Entry | None, num_held: int) -> None:
        """Blocks that a window gave back before the rest of their chain would be evicted first, and that rest be found
        no more: they count as used now, the chain's head last."""
        if self._window is None:
            return
        for _ in range(num_held):
            entry = entry and entry.parent
        while entry is not None:
            if entry.block_id != NO_BLOCK:
                self.allocator.touch(entry.block_id)
            entry = entry.parent

    def _cancel_forks(self) -> None:
        """Leave out copies for choices that are gone: their pins might keep the last blocks from whoever runs next."""
        useless = [
            copy for copy in self._copies if copy.kind is CopyKind.FORK and self.allocator.state(copy.dst) == "pinned"
        ]
        for copy in useless:
            self._copies.remove(copy)
            self._unpin([copy.src, copy.dst])

    def _unpin(self, block_ids: list[int]) -> None:
        self.allocator.unpin(block_ids)
        for block_id in block_ids:
            self._pinned.remove(block_id)
        self._journal.note(UnpinEvent, "", block_ids=tuple(block_ids))

    @property
    def num_evictions(self) -> int:
        """Blocks whose contents were given up, so far."""
        return 0 if self.prefix_cache is None else self.prefix_cache.num_evictions

    def reset_prefix_cache(self) -> int:
        """Forget all that was computed; the number of blocks that could be found until now.

        Running requests keep theirs, and what they compute from now on behind forgotten blocks is not found either.
        """
        return 0 if self.prefix_cache is None else self.prefix_cache.reset()

    # ---- a step's copies ------------------------------------------------------------------------------------------

    @property
    def pending_copies(self) -> tuple[BlockCopy, ...]:
        """Copies that the next plan will take. A block that one of them reads may be free by now: it is read before any
        forward pass can write it."""
        return tuple(self._copies)

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """The copies to be made before the next forward pass, in order. Then `copies_made` is called, after `distrust`
        where the forward pass failed."""
        copies = tuple(self._copies)
        self._copies.clear()
        return copies

    def copies_made(self) -> None:
        """The forward pass behind the copies that were taken last has ended."""
        if self._pinned:
            self._unpin(self._pinned.copy())

    def holders(self, copies: Sequence[BlockCopy]) -> set[int]:
        """Rows that hold a block into which one of these copies goes."""
        targets = [copy.dst for copy in copies if copy.kind is not CopyKind.TO_HOST]
        return set(np.nonzero(np.isin(self.tables.table, targets))[0].tolist()) if targets else set()

    def distrust(self, copies: Sequence[BlockCopy], rows: Iterable[int]) -> None:
        """A forward pass failed: nothing that these copies or rows touched is found again, and the device's tables are
        sent anew."""
        if self.prefix_cache is not None:
            touched = [copy.dst for copy in copies if copy.kind is CopyKind.TO_DEVICE]
            for row in rows:
                touched += self.tables.block_ids(row)
            self.prefix_cache.forget_blocks(touched, "failed")
            self.prefix_cache.forget_host_copies([copy.dst for copy in copies if copy.kind is CopyKind.TO_HOST])
        self.tables.repeat_updates()

    def check_invariants(self) -> None:
        """Tables, index, allocator and host tier agree, and a row is published no further than its full blocks."""
        self.tables.check_invariants()
        if self.prefix_cache is not None:
            self.prefix_cache.check_invariants()
        assert sorted(self._pinned) == sorted(
            block_id for block_id, pins in self.allocator.pins().items() for _ in range(pins)
        ), "a pin belongs to no copy"
        for copy in self._copies:
            if copy.kind is CopyKind.FORK:
                assert self.allocator.state(copy.dst) == "used", f"a copy into block {copy.dst} is for nobody"
        for row, num_published in enumerate(self._num_published.tolist()):
            assert num_published <= self.tables.num_blocks[row], f"row {row} is published past its blocks"
            if self.prefix_cache is None:
                assert num_published == 0
