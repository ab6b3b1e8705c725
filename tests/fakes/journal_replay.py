"""Rebuilds queues, block tables and the state of every block from the journal's events alone, and checks the order of
service on the way.

It never looks at the scheduler; whoever compares the two does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import islice

from pageframe.runtime.journal import (
    AdmitEvent,
    AllocateEvent,
    ArriveEvent,
    ChunkEvent,
    CopyEvent,
    Event,
    EvictEvent,
    FinishEvent,
    ForkEvent,
    FreeEvent,
    GrammarEvent,
    HitEvent,
    Journal,
    LoseEvent,
    MissEvent,
    PinEvent,
    PreemptEvent,
    PublishEvent,
    ReleaseEvent,
    ResetEvent,
    ShareEvent,
    SlideEvent,
    UnpinEvent,
    WaitEvent,
)

NO_BLOCK = -1


class JournalReplay:
    """State as the events tell it: `tables` row -> block ids, `running` id -> row, `waiting` ids, `following` choices
    whose leader has not forked, `indexed` block ids.

    Args:
        lenient: a request may be preempted and come back in one step. Where blocks are shared it needs fewer of its own
            then, or gave way together with those it shared with, which freed more than was asked for.
    """

    def __init__(self, block_size: int, *, lenient: bool = False) -> None:
        self.block_size = block_size
        self.tables: dict[int, list[int]] = {}
        self.running: dict[str, int] = {}
        self.waiting: set[str] = set()
        self.following: dict[str, str] = {}
        self.indexed: set[int] = set()
        self.counts: Counter[str] = Counter()
        #: Whose prefixes a request may share, by id: whoever adds requests fills it in.
        self.salts: dict[str, tuple[str, ...]] = {}
        self._published_by: dict[int, str] = {}
        self._copied_by: dict[int, str] = {}
        self._lenient = lenient
        self._references: Counter[int] = Counter()
        self._pins: Counter[int] = Counter()
        self._forked_from: dict[str, str] = {}
        self._order: dict[str, tuple[int, int]] = {}
        self._preempted: set[str] = set()
        self._ended: dict[str, str] = {}
        self._preempted_in: dict[str, int] = {}
        self._num_read = 0
        self._arrivals = 0
        self._last_step, self._last_time = 0, float("-inf")

    def catch_up(self, journal: Journal) -> None:
        """Apply the events written since the last call."""
        new = journal.written - self._num_read
        assert new <= len(journal), "events were dropped before they were read"
        self.apply(islice(journal, len(journal) - new, None))

    def apply(self, events: Iterable[Event]) -> None:
        for event in events:
            self._num_read += 1
            assert event.step >= self._last_step, "steps go backwards"
            assert event.time >= self._last_time, "time goes backwards"
            self._last_step, self._last_time = event.step, event.time
            self.counts[event.kind] += 1
            getattr(self, f"_on_{event.kind}")(event)

    def state(self, block_id: int) -> str:
        """A block's state, in the allocator's words."""
        count, pins = self._references[block_id], self._pins[block_id]
        if count:
            return "used"
        return "pinned" if pins else "cached" if block_id in self.indexed else "free"

    # ---- requests -------------------------------------------------------------------------------------------------

    def _on_arrive(self, event: ArriveEvent) -> None:
        self._order[event.request_id] = (event.priority, self._arrivals)
        self._arrivals += 1
        if event.leader:
            self.following[event.request_id] = event.leader
        else:
            self.waiting.add(event.request_id)

    def _on_grammar(self, event: GrammarEvent) -> None:
        """It changes what is drawn, and nothing that is replayed."""
        assert event.request_id in self._order

    def _first_waiting(self) -> str:
        return min(self.waiting, key=self._order.__getitem__)

    def _on_wait(self, event: WaitEvent) -> None:
        if event.reason == "budget":
            assert event.request_id in self.running, "only who has its blocks waits for the budget"
            return
        assert event.request_id == self._first_waiting(), "only the first in the queue waits for blocks or rows"
        assert event.reason in ("blocks", "rows")

    def _on_admit(self, event: AdmitEvent) -> None:
        assert event.request_id == self._first_waiting(), f"{event.request_id} overtook {self._first_waiting()}"
        again_at_once = self._preempted_in.get(event.request_id) == event.step
        assert self._lenient or not again_at_once, f"{event.request_id} was preempted and admitted in one step"
        self.waiting.remove(event.request_id)
        self._forked_from.pop(event.request_id, None)
        self._open_row(event.request_id, event.row)

    def _open_row(self, request_id: str, row: int) -> None:
        assert row not in self.tables, f"row {row} is taken"
        self.running[request_id] = row
        self.tables[row] = []

    def _on_fork(self, event: ForkEvent) -> None:
        assert self.following.pop(event.request_id) == event.leader
        if event.row == NO_BLOCK:
            self.waiting.add(event.request_id)
            return
        assert event.leader in self.running, "a choice forks from one that holds nothing"
        self._forked_from[event.request_id] = event.leader
        self._open_row(event.request_id, event.row)

    def _on_chunk(self, event: ChunkEvent) -> None:
        assert self.running[event.request_id] == event.row
        assert event.num_tokens > 0, "an empty chunk"
        assert event.start + event.num_tokens <= len(self.tables[event.row]) * self.block_size

    def _on_preempt(self, event: PreemptEvent) -> None:
        victim, beneficiary = event.request_id, event.for_request
        assert victim == max(self.running, key=self._order.__getitem__), f"{victim} was not the last in the order"
        assert self._order[beneficiary] <= self._order[victim], f"{victim} gave way to a later request"
        assert self.running[victim] == event.row
        self._preempted_in[victim] = event.step
        self._preempted.add(victim)

    def _on_slide(self, event: SlideEvent) -> None:
        assert event.request_id not in self.running, "blocks are freed before a context slides"
        assert event.context_start > 0
        self.waiting.add(event.request_id)

    def _on_finish(self, event: FinishEvent) -> None:
        request_id = event.request_id
        assert request_id not in self.running, "blocks are freed before the end is told"
        if request_id in self._ended:
            assert (self._ended[request_id], event.reason) in (("length", "stop"), ("stop", "stop"))
            return
        self._ended[request_id] = event.reason
        self.waiting.discard(request_id)
        self.following.pop(request_id, None)
        if event.reason != "error":
            self._promote_follower(request_id)
        del self._order[request_id]
        self._preempted_in.pop(request_id, None)

    def _promote_follower(self, leader: str) -> None:
        heirs = [follower for follower, other in self.following.items() if other == leader]
        if heirs:
            del self.following[heirs[0]]
            self.waiting.add(heirs[0])
            self.following.update(dict.fromkeys(heirs[1:], heirs[0]))

    # ---- blocks ---------------------------------------------------------------------------------------------------

    def _append(self, event: AllocateEvent | ShareEvent) -> None:
        assert self.running[event.request_id] == event.row
        assert event.block_ids, f"an event of kind {event.kind} for no blocks"
        table = self.tables[event.row]
        if not table:
            table += [NO_BLOCK] * event.first_index  # a fork of a row whose first blocks are behind the window
        assert event.first_index == len(table), "a row must grow at its end"
        table += event.block_ids
        self._references.update(event.block_ids)

    def _on_allocate(self, event: AllocateEvent) -> None:
        for block_id in event.block_ids:
            assert self.state(block_id) == "free", f"block {block_id} is handed out, but {self.state(block_id)}"
        self._append(event)

    def _on_share(self, event: ShareEvent) -> None:
        leader = self._forked_from.pop(event.request_id, None)
        for block_id in event.block_ids:
            assert self.state(block_id) in ("used", "cached"), f"block {block_id} is shared, but free"
            if leader is None:
                self._check_salt(event.request_id, self._published_by[block_id])
            else:
                assert block_id in self.tables[self.running[leader]]
        self._append(event)

    def _check_salt(self, request_id: str, publisher: str) -> None:
        assert self.salts[request_id] == self.salts[publisher], f"{request_id} got what {publisher} may not share"

    def _drop(self, block_ids: Iterable[int]) -> None:
        self._references.subtract(block_ids)
        assert min(self._references[block_id] for block_id in block_ids) >= 0

    def _on_free(self, event: FreeEvent) -> None:
        assert self.running.pop(event.request_id) == event.row
        held = [block_id for block_id in self.tables.pop(event.row) if block_id != NO_BLOCK]
        assert held == list(event.block_ids), "what is freed is not what was allocated"
        self._drop(held)
        if event.request_id in self._preempted:
            self._preempted.remove(event.request_id)
            self.waiting.add(event.request_id)

    def _on_release(self, event: ReleaseEvent) -> None:
        table, end = self.tables[event.row], event.first_index + len(event.block_ids)
        assert set(table[: event.first_index]) <= {NO_BLOCK}
        assert table[event.first_index : end] == list(event.block_ids)
        table[event.first_index : end] = [NO_BLOCK] * len(event.block_ids)
        self._drop(event.block_ids)

    def _on_publish(self, event: PublishEvent) -> None:
        table = self.tables[event.row]
        for index, block_id in enumerate(event.block_ids, event.first_index):
            if block_id != NO_BLOCK:
                assert table[index] == block_id
                self.indexed.add(block_id)
                self._published_by[block_id] = event.request_id

    def _on_evict(self, event: EvictEvent) -> None:
        assert event.reason == "failed" or self.state(event.block_id) == "cached"
        self.indexed.remove(event.block_id)
        assert event.host_slot == NO_BLOCK or event.host_slot in self._copied_by, "an eviction to where nothing is"

    def _on_lose(self, event: LoseEvent) -> None:
        del self._copied_by[event.host_slot]

    def _on_reset(self, event: ResetEvent) -> None:
        assert event.num_blocks == len(self.indexed)
        self.indexed.clear()
        self._copied_by.clear()

    def _on_copy(self, event: CopyEvent) -> None:
        if event.copy_kind == "to_host":
            self._copied_by[event.dst] = self._published_by[event.src]
            return
        assert self.state(event.dst) == "used"
        if event.copy_kind == "to_device":
            self.indexed.add(event.dst)
            self._published_by[event.dst] = self._copied_by[event.src]
            self._check_salt(event.request_id, self._copied_by[event.src])

    def _on_pin(self, event: PinEvent) -> None:
        self._pins.update(event.block_ids)

    def _on_unpin(self, event: UnpinEvent) -> None:
        self._pins.subtract(event.block_ids)

    def _on_hit(self, event: HitEvent) -> None:
        assert event.request_id in self.running
        assert event.num_tokens == event.num_blocks * self.block_size > 0
        assert event.copy_seconds <= event.compute_seconds, "copied what was cheaper to compute"
        self.counts["hit blocks"] += event.num_blocks

    def _on_miss(self, event: MissEvent) -> None:
        assert (event.reason == "evicted") == (event.evicted_step != NO_BLOCK)
        self.counts[f"miss: {event.reason}"] += 1
        assert (event.reason == "recompute") == (event.copy_seconds > event.compute_seconds), "the rule was not kept"
