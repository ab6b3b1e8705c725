"""Checks every event of the journal against the state that the events before it rebuilt, and the order of service.

It never looks at the scheduler; whoever compares the two does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pageframe.runtime.journal import (
    AdmitEvent,
    AllocateEvent,
    ArriveEvent,
    ChunkEvent,
    CopyEvent,
    Event,
    EvictEvent,
    FinishEvent,
    FirstTokenEvent,
    ForkEvent,
    FreeEvent,
    GrammarEvent,
    HitEvent,
    Journal,
    LoseEvent,
    MissEvent,
    PreemptEvent,
    PublishEvent,
    ReleaseEvent,
    ResetEvent,
    ShareEvent,
    SlideEvent,
    StepEvent,
    WaitEvent,
)
from pageframe.runtime.journal_state import NO_BLOCK, JournalState


class JournalReplay(JournalState):
    """A JournalState that refuses events which cannot follow from those before.

    Args:
        lenient: a request may be preempted and come back in one step. Where blocks are shared it needs fewer of its own
            then, or gave way together with those it shared with, which freed more than was asked for. One that came by
            a fork may anyway: the pins of its copy are given up with it, which frees more too.
    """

    def __init__(self, block_size: int, *, lenient: bool = False) -> None:
        super().__init__()
        self.block_size = block_size
        self.counts: Counter[str] = Counter()
        #: Whose prefixes a request may share, by id: whoever adds requests fills it in.
        self.salts: dict[str, tuple[str, ...]] = {}
        self._lenient = lenient
        self._forked_from: dict[str, str] = {}
        self._forked: set[str] = set()
        self._order: dict[str, tuple[int, int]] = {}
        self._ended: dict[str, str] = {}
        self._got_token: set[str] = set()
        self._preempted_in: dict[str, int] = {}
        self._num_read = 0
        self._arrivals = 0

    def catch_up(self, journal: Journal) -> None:
        """Apply the events written since the last call."""
        assert journal.first <= self._num_read, "events were dropped before they were read"
        self.apply(journal.since(self._num_read))

    def apply(self, events: Iterable[Event]) -> None:
        for event in events:
            self._num_read += 1
            assert event.step >= self.step, "steps go backwards"
            assert event.time >= self.time, "time goes backwards"
            assert hasattr(self, f"_on_{event.kind}"), f"nobody checks events of kind {event.kind}"
            self.counts[event.kind] += 1
            super().apply((event,))

    # ---- requests -------------------------------------------------------------------------------------------------

    def _on_arrive(self, event: ArriveEvent) -> None:
        self._order[event.request_id] = (event.priority, self._arrivals)
        self._arrivals += 1
        super()._on_arrive(event)

    def _on_grammar(self, event: GrammarEvent) -> None:
        """It changes what is drawn, and nothing that is replayed."""
        assert event.request_id in self._order

    def _before(self, request_id: str) -> str:
        """Who stands before it in the order of service."""
        place = self._order.__getitem__
        queue = self.running if request_id in self.running else self.waiting
        ahead = [other for other in queue if place(other) < place(request_id)]
        if not ahead and queue is self.waiting:
            ahead = list(self.running)
        return max(ahead, key=place, default="")

    def _first_waiting(self) -> str:
        return min(self.waiting, key=self._order.__getitem__)

    def _on_wait(self, event: WaitEvent) -> None:
        if event.reason == "budget":
            assert event.request_id in self.running, "only who has its blocks waits for the budget"
            assert event.behind == self._before(event.request_id)
            return
        if event.reason == "group":
            assert self.following[event.request_id] == event.behind
            return
        assert event.behind == self._before(event.request_id)
        if event.reason == "queue":
            assert event.request_id in self.waiting
            return
        assert event.request_id == self._first_waiting(), "only the first in the queue waits for blocks or rows"
        assert event.reason in ("blocks", "rows")

    def _on_admit(self, event: AdmitEvent) -> None:
        assert event.request_id == self._first_waiting(), f"{event.request_id} overtook {self._first_waiting()}"
        again_at_once = self._preempted_in.get(event.request_id) == event.step
        assert self._lenient or event.request_id in self._forked or not again_at_once, (
            f"{event.request_id} was preempted and admitted in one step"
        )
        assert event.request_id in self.waiting
        self._forked_from.pop(event.request_id, None)
        super()._on_admit(event)

    def _open_row(self, request_id: str, row: int) -> None:
        assert row not in self.tables, f"row {row} is taken"
        super()._open_row(request_id, row)

    def _on_fork(self, event: ForkEvent) -> None:
        assert self.following[event.request_id] == event.leader
        if event.row != NO_BLOCK:
            assert event.leader in self.running, "a choice forks from one that holds nothing"
            self._forked_from[event.request_id] = event.leader
            self._forked.add(event.request_id)
        super()._on_fork(event)

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
        super()._on_preempt(event)

    def _on_slide(self, event: SlideEvent) -> None:
        assert event.request_id not in self.running, "blocks are freed before a context slides"
        assert event.context_start > 0
        super()._on_slide(event)

    def _on_finish(self, event: FinishEvent) -> None:
        request_id = event.request_id
        assert request_id not in self.running, "blocks are freed before the end is told"
        if request_id in self._ended:
            assert (self._ended[request_id], event.reason) in (("length", "stop"), ("stop", "stop"))
            return
        self._ended[request_id] = event.reason
        super()._on_finish(event)
        del self._order[request_id]
        self._preempted_in.pop(request_id, None)

    def _on_first_token(self, event: FirstTokenEvent) -> None:
        assert event.request_id not in self._got_token, "a second first token"
        self._got_token.add(event.request_id)

    def _on_step(self, event: StepEvent) -> None:
        assert event.num_running == len(self.running)
        assert event.num_waiting == len(self.waiting)
        assert event.num_requests == 0 or event.prefill_tokens + event.decode_tokens > 0
        assert event.evicted == self.counts["evict"] - self.counts["evictions told"]
        self.counts["evictions told"] = self.counts["evict"]
        used = sum(count > 0 for count in self._references.values())
        assert event.used == used
        assert event.cached == sum(
            not self._references[block_id] and not self._pins[block_id] for block_id in self.indexed
        )

    # ---- blocks ---------------------------------------------------------------------------------------------------

    def _append(self, event: AllocateEvent | ShareEvent) -> None:
        assert self.running[event.request_id] == event.row
        assert event.block_ids, f"an event of kind {event.kind} for no blocks"
        table = self.tables[event.row]
        assert event.first_index == len(table) or not table, "a row must grow at its end"
        super()._append(event)

    def _on_allocate(self, event: AllocateEvent) -> None:
        for block_id in event.block_ids:
            assert self.state(block_id) == "free", f"block {block_id} is handed out, but {self.state(block_id)}"
        self._append(event)

    def _on_share(self, event: ShareEvent) -> None:
        leader = self._forked_from.pop(event.request_id, None)
        for block_id in event.block_ids:
            assert self.state(block_id) in ("used", "cached"), f"block {block_id} is shared, but free"
            if leader is None:
                self._check_salt(event.request_id, self.published_by[block_id])
            else:
                assert block_id in self.tables[self.running[leader]]
        self._append(event)

    def _check_salt(self, request_id: str, publisher: str) -> None:
        assert self.salts[request_id] == self.salts[publisher], f"{request_id} got what {publisher} may not share"

    def _on_free(self, event: FreeEvent) -> None:
        assert self.running[event.request_id] == event.row
        held = [block_id for block_id in self.tables[event.row] if block_id != NO_BLOCK]
        assert held == list(event.block_ids), "what is freed is not what was allocated"
        super()._on_free(event)
        self._check_references(event.block_ids)

    def _check_references(self, block_ids: Iterable[int]) -> None:
        assert min((self.ref_count(block_id) for block_id in block_ids), default=0) >= 0

    def _on_release(self, event: ReleaseEvent) -> None:
        table, end = self.tables[event.row], event.first_index + len(event.block_ids)
        assert set(table[: event.first_index]) <= {NO_BLOCK}
        assert table[event.first_index : end] == list(event.block_ids)
        super()._on_release(event)
        self._check_references(event.block_ids)

    def _on_publish(self, event: PublishEvent) -> None:
        table = self.tables[event.row]
        for index, block_id in enumerate(event.block_ids, event.first_index):
            if block_id != NO_BLOCK:
                assert table[index] == block_id
        super()._on_publish(event)

    def _on_evict(self, event: EvictEvent) -> None:
        assert event.reason == "failed" or self.state(event.block_id) == "cached"
        assert event.block_id in self.indexed
        assert event.host_slot == NO_BLOCK or event.host_slot in self.host, "an eviction to where nothing is"
        super()._on_evict(event)

    def _on_lose(self, event: LoseEvent) -> None:
        assert event.host_slot in self.host
        super()._on_lose(event)

    def _on_reset(self, event: ResetEvent) -> None:
        assert event.num_blocks == len(self.indexed)
        super()._on_reset(event)

    def _on_copy(self, event: CopyEvent) -> None:
        assert event.copy_kind == "to_host" or self.state(event.dst) == "used"
        super()._on_copy(event)
        if event.copy_kind == "to_device":
            self._check_salt(event.request_id, self.host[event.src])

    def _on_hit(self, event: HitEvent) -> None:
        assert event.request_id in self.running
        assert event.num_tokens == event.num_blocks * self.block_size > 0
        assert event.copy_seconds <= event.compute_seconds, "copied what was cheaper to compute"
        self.counts["hit blocks"] += event.num_blocks

    def _on_miss(self, event: MissEvent) -> None:
        assert (event.reason == "evicted") == (event.evicted_step != NO_BLOCK)
        self.counts[f"miss: {event.reason}"] += 1
        assert (event.reason == "recompute") == (event.copy_seconds > event.compute_seconds), "the rule was not kept"
