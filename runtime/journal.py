"""What happened and why: a bounded ring of typed events, written where things happen.

Events carry ids and numbers, never prompt text. What changes tables, references or the index
has an event, so that the journal alone rebuilds them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

# Not frozen: making a frozen object takes more than twice as long, and a step makes dozens. Nobody changes an event.


@dataclass(slots=True, kw_only=True)
class Event:
    """What every event has. `time` is in seconds, of the engine's clock."""

    kind: ClassVar[str] = "event"
    step: int
    time: float
    request_id: str


@dataclass(slots=True, kw_only=True)
class ArriveEvent(Event):
    """`leader`: the choice that computes the prompt for this one too, or "". It came at `arrived`, seconds of the
    engine's clock: before now where its grammar had to be compiled first."""

    kind: ClassVar[str] = "arrive"
    arrived: float
    num_prompt_tokens: int
    max_total_tokens: int
    tenant: str
    priority: int
    seed: int
    leader: str


@dataclass(slots=True, kw_only=True)
class GrammarEvent(Event):
    """A request that arrived has a grammar of this `kind_of_grammar`, which its text will follow."""

    kind: ClassVar[str] = "grammar"
    kind_of_grammar: str


@dataclass(slots=True, kw_only=True)
class WaitEvent(Event):
    """A request cannot go on, from now on. `reason` is as in request.Wait; `behind` is who stands before it in the
    order of service, or for "group" the choice that computes the prompt: "" for nobody."""

    kind: ClassVar[str] = "wait"
    reason: str
    needed: int
    free: int
    behind: str


@dataclass(slots=True, kw_only=True)
class AdmitEvent(Event):
    kind: ClassVar[str] = "admit"
    row: int
    num_tokens: int


@dataclass(slots=True, kw_only=True)
class AllocateEvent(Event):
    """Blocks appended to a row, from logical index `first_index` on."""

    kind: ClassVar[str] = "allocate"
    row: int
    first_index: int
    block_ids: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class ChunkEvent(Event):
    """Prompt tokens [start, start + num_tokens) are computed in this step."""

    kind: ClassVar[str] = "chunk"
    row: int
    start: int
    num_tokens: int


@dataclass(slots=True, kw_only=True)
class PreemptEvent(Event):
    """Its blocks went to `for_request` (itself: it was the last in the order). It had computed `num_computed_tokens`;
    what of them is still in the prefix cache when it comes back is found."""

    kind: ClassVar[str] = "preempt"
    row: int
    for_request: str
    num_computed_tokens: int


@dataclass(slots=True, kw_only=True)
class FirstTokenEvent(Event):
    """Its first token was drawn."""

    kind: ClassVar[str] = "first_token"


@dataclass(slots=True, kw_only=True)
class FinishEvent(Event):
    """It ended. A second one corrects the first: its text turned out to have stopped earlier."""

    kind: ClassVar[str] = "finish"
    reason: str
    num_output_tokens: int


@dataclass(slots=True, kw_only=True)
class FreeEvent(Event):
    """A row's references were dropped, in logical order, and the row with them."""

    kind: ClassVar[str] = "free"
    row: int
    block_ids: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class ReleaseEvent(Event):
    """References from logical index `first_index` on were dropped: no kernel looks behind the window again."""

    kind: ClassVar[str] = "release"
    row: int
    first_index: int
    block_ids: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class SlideEvent(Event):
    """Its context was full; the next one begins at token `context_start`, positions from 0, and is computed anew."""

    kind: ClassVar[str] = "slide"
    row: int
    context_start: int


@dataclass(slots=True, kw_only=True)
class HitEvent(Event):
    """The first `num_blocks` blocks were found computed, `num_copied` of them in host memory.

    `copy_seconds` is what these copies were estimated to take, `compute_seconds` what computing all that they make
    usable would have."""

    kind: ClassVar[str] = "hit"
    num_blocks: int
    num_tokens: int
    num_copied: int
    copy_seconds: float
    compute_seconds: float


@dataclass(slots=True, kw_only=True)
class MissEvent(Event):
    """Why the lookup went no further than `num_blocks` blocks, and the numbers of that: see prefix_cache.Lookup."""

    kind: ClassVar[str] = "miss"
    reason: str
    num_blocks: int
    evicted_step: int
    copy_seconds: float
    compute_seconds: float


@dataclass(slots=True, kw_only=True)
class ShareEvent(Event):
    """Blocks that others hold too, or that were cached, appended to a row from logical index `first_index` on."""

    kind: ClassVar[str] = "share"
    row: int
    first_index: int
    block_ids: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class PublishEvent(Event):
    """Full blocks of a row, from logical index `first_index` on, can be found from now on. -1 stands for one that stays
    private, because its tokens were indexed already."""

    kind: ClassVar[str] = "publish"
    row: int
    first_index: int
    block_ids: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class EvictEvent(Event):
    """What a block held can't be found there any more; `request_id` computed it.

    `reason`: "reused" (the least recently used one was handed out; it is in `host_slot` now, or lost if that is -1),
    or "failed" (the forward pass that used it failed)."""

    kind: ClassVar[str] = "evict"
    block_id: int
    host_slot: int
    idle_steps: int
    reason: str


@dataclass(slots=True, kw_only=True)
class LoseEvent(Event):
    """What `host_slot` held can't be found there any more; `request_id` computed it."""

    kind: ClassVar[str] = "lose"
    host_slot: int


@dataclass(slots=True, kw_only=True)
class ResetEvent(Event):
    """All that was computed is forgotten; `num_blocks` could be found until now."""

    kind: ClassVar[str] = "reset"
    num_blocks: int


@dataclass(slots=True, kw_only=True)
class CopyEvent(Event):
    """A block will be copied before the next forward pass: see block_copy.BlockCopy."""

    kind: ClassVar[str] = "copy"
    copy_kind: str
    src: int
    dst: int


@dataclass(slots=True, kw_only=True)
class ForkEvent(Event):
    """A choice goes on from the `num_tokens` tokens that `leader` has computed, in a row of its own; where none was to
    be had, `row` is -1 and it waits."""

    kind: ClassVar[str] = "fork"
    row: int
    leader: str
    num_tokens: int


@dataclass(slots=True, kw_only=True)
class PinEvent(Event):
    """Blocks that a copy in flight needs are kept from being handed out."""

    kind: ClassVar[str] = "pin"
    block_ids: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class UnpinEvent(Event):
    kind: ClassVar[str] = "unpin"
    block_ids: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class StepEvent(Event):
    """A step has ended; `request_id` is "".

    Args:
        started, seconds: when it began and how long it took, of the engine's clock.
        num_requests, prefill_tokens, decode_tokens, token_budget: of its plan.
        num_running, num_waiting: requests behind it.
        free, cached, used, pinned: blocks behind it, by state.
        evicted: blocks whose contents were given up since the step before.
        lookup_tokens, hit_tokens: totals until now, see Scheduler.
    """

    kind: ClassVar[str] = "step"
    started: float
    seconds: float
    num_requests: int
    prefill_tokens: int
    decode_tokens: int
    token_budget: int
    num_running: int
    num_waiting: int
    free: int
    cached: int
    used: int
    pinned: int
    evicted: int
    lookup_tokens: int
    hit_tokens: int


EventT = TypeVar("EventT", bound=Event)


class Journal:
    """A bounded ring of events: the oldest are dropped. Events are numbered from 0 in the order written."""

    def __init__(self, capacity: int = 65_536) -> None:
        self._capacity = capacity
        #: Event number n is at n modulo the capacity.
        self._ring: list[Event] = []
        self._written = 0
        #: Of the events to come.
        self.step = 0
        self.time = 0.0

    def at(self, step: int, time: float) -> None:
        """From here on events are of this step and time."""
        self.step, self.time = step, time

    def note(self, event_type: type[EventT], request_id: str, **numbers: Any) -> None:
        """Write an event of the current step and time."""
        self.write(event_type(step=self.step, time=self.time, request_id=request_id, **numbers))

    def write(self, event: Event) -> None:
        if self._written < self._capacity:
            self._ring.append(event)
        else:
            self._ring[self._written % self._capacity] = event
        self._written += 1

    def __len__(self) -> int:
        return len(self._ring)

    @property
    def written(self) -> int:
        """Events ever written, and the number of the next."""
        return self._written

    @property
    def first(self) -> int:
        """The number of the oldest event still held."""
        return self._written - len(self._ring)

    def since(self, number: int, limit: int | None = None) -> list[Event]:
        """Events from number `number` on that are still held, oldest first, at most `limit`. Reads no others."""
        start = max(number, self.first)
        stop = self._written if limit is None else min(self._written, start + limit)
        if start >= stop:
            return []
        begin, end = start % self._capacity, stop % self._capacity
        return self._ring[begin:end] if begin < end else self._ring[begin:] + self._ring[:end]

    def __iter__(self) -> Iterator[Event]:
        """Events still held, oldest first."""
        return iter(self.since(0))


#: Every kind of event, by its name.
EVENT_KINDS: dict[str, type[Event]] = {event_type.kind: event_type for event_type in Event.__subclasses__()}
