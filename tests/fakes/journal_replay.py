"""Rebuilds queues and block tables from the journal's events alone, and checks the order of service on the way.

It never looks at the scheduler; whoever compares the two does.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from pageframe.runtime.journal import (
    AdmitEvent,
    AllocateEvent,
    ArriveEvent,
    ChunkEvent,
    Event,
    FinishEvent,
    FreeEvent,
    Journal,
    PreemptEvent,
    WaitEvent,
)


class JournalReplay:
    """State as the events tell it: `tables` row -> block ids, `running` id -> row, `waiting` ids."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.tables: dict[int, list[int]] = {}
        self.running: dict[str, int] = {}
        self.waiting: set[str] = set()
        self.num_preemptions = 0
        self.num_chunks = 0
        self._order: dict[str, tuple[int, int]] = {}
        self._holder: dict[int, str] = {}
        self._leaving: set[str] = set()
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
            getattr(self, f"_on_{event.kind}")(event)

    def _on_arrive(self, event: ArriveEvent) -> None:
        self._order[event.request_id] = (event.priority, self._arrivals)
        self._arrivals += 1
        self.waiting.add(event.request_id)

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
        assert event.row not in self.tables, f"row {event.row} is taken"
        again_at_once = self._preempted_in.get(event.request_id) == event.step
        assert not again_at_once, f"{event.request_id} was preempted and admitted in one step, for nothing"
        self.waiting.remove(event.request_id)
        self.running[event.request_id] = event.row
        self.tables[event.row] = []

    def _on_allocate(self, event: AllocateEvent) -> None:
        assert self.running[event.request_id] == event.row
        assert event.block_ids, "an allocation of nothing"
        assert event.first_index == len(self.tables[event.row]), "a row must grow at its end"
        for block_id in event.block_ids:
            assert block_id not in self._holder, f"block {block_id} belongs to {self._holder[block_id]}"
            self._holder[block_id] = event.request_id
        self.tables[event.row].extend(event.block_ids)

    def _on_chunk(self, event: ChunkEvent) -> None:
        self.num_chunks += 1
        assert self.running[event.request_id] == event.row
        assert event.num_tokens > 0, "an empty chunk"
        assert event.start + event.num_tokens <= len(self.tables[event.row]) * self.block_size

    def _on_preempt(self, event: PreemptEvent) -> None:
        self.num_preemptions += 1
        victim, beneficiary = event.request_id, event.for_request
        assert victim == max(self.running, key=self._order.__getitem__), f"{victim} was not the last in the order"
        assert self._order[beneficiary] <= self._order[victim], f"{victim} gave way to a later request"
        assert self.running[victim] == event.row
        self._preempted_in[victim] = event.step
        self._leaving.add(victim)

    def _on_free(self, event: FreeEvent) -> None:
        assert self.running.pop(event.request_id) == event.row
        assert self.tables.pop(event.row) == list(event.block_ids), "what is freed is not what was allocated"
        for block_id in event.block_ids:
            del self._holder[block_id]
        if event.request_id in self._leaving:
            self._leaving.remove(event.request_id)
            self.waiting.add(event.request_id)

    def _on_finish(self, event: FinishEvent) -> None:
        assert event.request_id not in self.running, "blocks are freed before the end is told"
        if event.request_id in self._ended:
            assert (self._ended[event.request_id], event.reason) in (("length", "stop"), ("stop", "stop"))
            return
        self._ended[event.request_id] = event.reason
        self.waiting.discard(event.request_id)
        del self._order[event.request_id]
        self._preempted_in.pop(event.request_id, None)
