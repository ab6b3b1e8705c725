"""Queues, block tables and the state of every block, rebuilt from the journal's events alone.

It never looks at the scheduler. A recording that begins in the middle begins with such a state, and any later moment is
that state with the events up to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from pageframe.runtime.journal import (
    AdmitEvent,
    AllocateEvent,
    ArriveEvent,
    CopyEvent,
    Event,
    EvictEvent,
    FinishEvent,
    ForkEvent,
    FreeEvent,
    LoseEvent,
    PinEvent,
    PreemptEvent,
    PublishEvent,
    ReleaseEvent,
    ResetEvent,
    ShareEvent,
    SlideEvent,
    UnpinEvent,
)

NO_BLOCK = -1
#: Entries of a table; whatever says more is damaged, and must not take the memory for them.
MAX_TABLE = 2**24
TO_HOST, TO_DEVICE = "to_host", "to_device"


class JournalState:
    """What stood where after the events applied so far.

    `tables` row -> block ids in logical order (NO_BLOCK for those given back), `running` request id -> row, `waiting`
    ids, `following` choices whose leader has not forked -> leader, `indexed` block ids that the prefix cache can find,
    `host` host slot -> the request that computed what it holds.
    """

    def __init__(self) -> None:
        self.tables: dict[int, list[int]] = {}
        self.running: dict[str, int] = {}
        self.waiting: set[str] = set()
        self.following: dict[str, str] = {}
        self.indexed: set[int] = set()
        self.host: dict[int, str] = {}
        self.published_by: dict[int, str] = {}
        self.step, self.time = 0, float("-inf")
        self._references: Counter[int] = Counter()
        self._pins: Counter[int] = Counter()
        self._preempted: set[str] = set()

    def apply(self, events: Iterable[Event]) -> None:
        """Take further events, in the order written.

        Raises:
            LookupError, ValueError: they do not fit to what stands.
        """
        for event in events:
            self.step, self.time = event.step, event.time
            handle = getattr(self, f"_on_{event.kind}", None)
            if handle is not None:
                handle(event)

    def ref_count(self, block_id: int) -> int:
        """References of tables."""
        return self._references[block_id]

    def state(self, block_id: int) -> str:
        """A block's state, in the allocator's words."""
        if self._references[block_id]:
            return "used"
        return "pinned" if self._pins[block_id] else "cached" if block_id in self.indexed else "free"

    # ---- as JSON --------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """All of it, as `load` takes it."""
        return {
            "step": self.step,
            "time": self.time,
            "tables": [[row, ids] for row, ids in self.tables.items()],
            "running": self.running,
            "waiting": sorted(self.waiting),
            "following": self.following,
            "indexed": sorted(self.indexed),
            "host": list(self.host.items()),
            "published_by": [[block_id, request_id] for block_id, request_id in self.published_by.items()],
            "pins": [[block_id, count] for block_id, count in self._pins.items() if count],
        }

    @classmethod
    def load(cls, snapshot: dict[str, Any]) -> JournalState:
        """The state that a snapshot holds.

        Raises:
            KeyError, TypeError, ValueError: it is no snapshot.
        """
        state = cls()
        state.step, state.time = int(snapshot["step"]), float(snapshot["time"])
        state.tables = {int(row): [int(block_id) for block_id in ids] for row, ids in snapshot["tables"]}
        state.running = {str(request_id): int(row) for request_id, row in snapshot["running"].items()}
        state.waiting = {str(request_id) for request_id in snapshot["waiting"]}
        state.following = {str(request_id): str(leader) for request_id, leader in snapshot["following"].items()}
        state.indexed = {int(block_id) for block_id in snapshot["indexed"]}
        state.host = {int(slot): str(request_id) for slot, request_id in snapshot["host"]}
        state.published_by = {int(block_id): str(request_id) for block_id, request_id in snapshot["published_by"]}
        state._pins = Counter({int(block_id): int(count) for block_id, count in snapshot["pins"]})
        for ids in state.tables.values():
            state._references.update(block_id for block_id in ids if block_id != NO_BLOCK)
        return state

    # ---- requests -------------------------------------------------------------------------------------------------

    def _on_arrive(self, event: ArriveEvent) -> None:
        if event.leader:
            self.following[event.request_id] = event.leader
        else:
            self.waiting.add(event.request_id)

    def _on_admit(self, event: AdmitEvent) -> None:
        self.waiting.discard(event.request_id)
        self._open_row(event.request_id, event.row)

    def _open_row(self, request_id: str, row: int) -> None:
        self.running[request_id] = row
        self.tables[row] = []

    def _on_fork(self, event: ForkEvent) -> None:
        self.following.pop(event.request_id, None)
        if event.row == NO_BLOCK:
            self.waiting.add(event.request_id)
        else:
            self._open_row(event.request_id, event.row)

    def _on_preempt(self, event: PreemptEvent) -> None:
        self._preempted.add(event.request_id)

    def _on_slide(self, event: SlideEvent) -> None:
        self.waiting.add(event.request_id)

    def _on_finish(self, event: FinishEvent) -> None:
        self.waiting.discard(event.request_id)
        self.following.pop(event.request_id, None)
        if event.reason != "error":
            self._promote_follower(event.request_id)

    def _promote_follower(self, leader: str) -> None:
        heirs = [follower for follower, other in self.following.items() if other == leader]
        if heirs:
            del self.following[heirs[0]]
            self.waiting.add(heirs[0])
            self.following.update(dict.fromkeys(heirs[1:], heirs[0]))

    # ---- blocks ---------------------------------------------------------------------------------------------------

    def _append(self, event: AllocateEvent | ShareEvent) -> None:
        table = self.tables[event.row]
        if event.first_index > MAX_TABLE:
            raise ValueError(f"no table has {event.first_index:,} entries")
        if not table:
            table += [NO_BLOCK] * event.first_index  # a fork of a row whose first blocks are behind the window
        table += event.block_ids
        self._references.update(event.block_ids)

    def _on_allocate(self, event: AllocateEvent) -> None:
        self._append(event)

    def _on_share(self, event: ShareEvent) -> None:
        self._append(event)

    def _on_free(self, event: FreeEvent) -> None:
        self.running.pop(event.request_id, None)
        self.tables.pop(event.row, None)
        self._references.subtract(event.block_ids)
        if event.request_id in self._preempted:
            self._preempted.remove(event.request_id)
            self.waiting.add(event.request_id)

    def _on_release(self, event: ReleaseEvent) -> None:
        end = event.first_index + len(event.block_ids)
        self.tables[event.row][event.first_index : end] = [NO_BLOCK] * len(event.block_ids)
        self._references.subtract(event.block_ids)

    def _on_publish(self, event: PublishEvent) -> None:
        for block_id in event.block_ids:
            if block_id != NO_BLOCK:
                self.indexed.add(block_id)
                self.published_by[block_id] = event.request_id

    def _on_evict(self, event: EvictEvent) -> None:
        self.indexed.discard(event.block_id)

    def _on_lose(self, event: LoseEvent) -> None:
        self.host.pop(event.host_slot, None)

    def _on_reset(self, event: ResetEvent) -> None:
        self.indexed.clear()
        self.host.clear()

    def _on_copy(self, event: CopyEvent) -> None:
        if event.copy_kind == TO_HOST:
            self.host[event.dst] = self.published_by[event.src]
        elif event.copy_kind == TO_DEVICE:
            self.indexed.add(event.dst)
            self.published_by[event.dst] = self.host[event.src]

    def _on_pin(self, event: PinEvent) -> None:
        self._pins.update(event.block_ids)

    def _on_unpin(self, event: UnpinEvent) -> None:
        self._pins.subtract(event.block_ids)
