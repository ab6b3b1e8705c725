"""What happened and why: a bounded ring of typed events, written where things happen.

Events carry ids and numbers, never prompt text. Allocate and free events alone rebuild every block table.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar


@dataclass(slots=True, frozen=True, kw_only=True)
class Event:
    """What every event has. `time` is in seconds, of the engine's clock."""

    kind: ClassVar[str] = "event"
    step: int
    time: float
    request_id: str


@dataclass(slots=True, frozen=True, kw_only=True)
class ArriveEvent(Event):
    kind: ClassVar[str] = "arrive"
    num_prompt_tokens: int
    max_total_tokens: int
    tenant: str
    priority: int
    seed: int


@dataclass(slots=True, frozen=True, kw_only=True)
class WaitEvent(Event):
    """A request cannot go on, from now on. `reason`: "blocks" (the head of the queue needs `needed`, `free` are free),
    "rows" (as many requests run as may), or "budget" (the step's tokens went to others)."""

    kind: ClassVar[str] = "wait"
    reason: str
    needed: int
    free: int


@dataclass(slots=True, frozen=True, kw_only=True)
class AdmitEvent(Event):
    kind: ClassVar[str] = "admit"
    row: int
    num_tokens: int


@dataclass(slots=True, frozen=True, kw_only=True)
class AllocateEvent(Event):
    """Blocks appended to a row, from logical index `first_index` on."""

    kind: ClassVar[str] = "allocate"
    row: int
    first_index: int
    block_ids: tuple[int, ...]


@dataclass(slots=True, frozen=True, kw_only=True)
class ChunkEvent(Event):
    """Prompt tokens [start, start + num_tokens) are computed in this step."""

    kind: ClassVar[str] = "chunk"
    row: int
    start: int
    num_tokens: int


@dataclass(slots=True, frozen=True, kw_only=True)
class PreemptEvent(Event):
    """Its blocks went to `for_request` (itself: it was the last in the order). `num_computed_tokens` are lost."""

    kind: ClassVar[str] = "preempt"
    row: int
    for_request: str
    num_computed_tokens: int


@dataclass(slots=True, frozen=True, kw_only=True)
class FinishEvent(Event):
    """It ended. A second one corrects the first: its text turned out to have stopped earlier."""

    kind: ClassVar[str] = "finish"
    reason: str
    num_output_tokens: int


@dataclass(slots=True, frozen=True, kw_only=True)
class FreeEvent(Event):
    """A row's references were dropped, in logical order."""

    kind: ClassVar[str] = "free"
    row: int
    block_ids: tuple[int, ...]


class Journal:
    """A bounded ring of events: the oldest are dropped. Events are numbered from 0 in the order written."""

    def __init__(self, capacity: int = 65_536) -> None:
        self._events: deque[Event] = deque(maxlen=capacity)
        self._written = 0

    def __len__(self) -> int:
        return len(self._events)

    @property
    def written(self) -> int:
        """Events ever written; the oldest still held has number `written - len(self)`."""
        return self._written

    def write(self, event: Event) -> None:
        self._events.append(event)
        self._written += 1

    def __iter__(self) -> Iterator[Event]:
        """Events still held, oldest first."""
        return iter(self._events)
