"""One request's story in plain sentences, from the journal's events alone.

What happens once (it arrives, waits, enters, gets its first token, is preempted, ends) is told one by one; what goes
on all the time (chunks, blocks that come and are published) is summed up between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

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
    LoseEvent,
    MissEvent,
    PreemptEvent,
    PublishEvent,
    ReleaseEvent,
    ShareEvent,
    SlideEvent,
    WaitEvent,
)

MISS_REASONS = {
    "partial block": "all its full blocks were found",
    "differs": "no computed prefix goes on with its tokens",
    "salt": "what it needed was computed for a tenant or a cache_salt that it may not share with",
    "logprobs": "it wants logprobs of its prompt, so all of that is computed",
    "recompute": "the next block is in host memory, and copying it back would cost more than computing it",
    "off": "the prefix cache is off",
}
FINISH_REASONS = {
    "stop": "its text stopped",
    "length": "it reached the most tokens it may have",
    "abort": "its client went away, or somebody cancelled it",
    "error": "a forward pass failed",
    "timeout": "its time was up",
    "refused": "it could not be served as asked",
}
SHOWN_BLOCKS = 12


@dataclass(frozen=True, slots=True)
class Sentence:
    """Args:
    step: of the first event told of.
    time: seconds since its arrival, or since its oldest event that is still known.
    kind: of that event.
    """

    step: int
    time: float
    kind: str
    text: str


@dataclass(slots=True)
class _Background:
    """What went on between two events that are told one by one."""

    first: Event | None = None
    #: First and last step, by kind of event.
    spans: dict[str, list[int]] = field(default_factory=dict)
    num_chunks: int = 0
    chunk_tokens: int = 0
    first_step: int = 0
    last_step: int = 0
    new_blocks: list[int] = field(default_factory=list)
    shared_blocks: list[int] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, event: Event) -> None:
        self.first = self.first or event
        self.spans.setdefault(event.kind, [event.step, event.step])[1] = event.step
        if isinstance(event, ChunkEvent):
            self.first_step = event.step if not self.num_chunks else self.first_step
            self.last_step = event.step
            self.num_chunks += 1
            self.chunk_tokens += event.num_tokens
        elif isinstance(event, AllocateEvent):
            self.new_blocks += event.block_ids
        elif isinstance(event, ShareEvent):
            self.shared_blocks += event.block_ids
        elif isinstance(event, PublishEvent):
            self.counts["published"] += sum(block_id >= 0 for block_id in event.block_ids)
            self.counts["private"] += sum(block_id < 0 for block_id in event.block_ids)
        elif isinstance(event, ReleaseEvent):
            self.counts["released"] += len(event.block_ids)
        elif isinstance(event, CopyEvent):
            self.counts[f"copied {event.copy_kind}"] += 1
        elif isinstance(event, EvictEvent):
            self.counts["evicted"] += 1
            self.counts["to host"] += event.host_slot >= 0

    def _span(self, event_type: type[Event]) -> str:
        first, last = self.spans[event_type.kind]
        return "" if first == last else f", {_steps(first, last)}"

    def sentences(self) -> Iterator[str]:
        if self.shared_blocks:
            yield f"It shares {_blocks(self.shared_blocks)} with whoever computed them."
        if self.new_blocks:
            yield f"It got {_blocks(self.new_blocks)}{self._span(AllocateEvent)}."
        if self.num_chunks:
            yield (
                f"{_count(self.chunk_tokens, 'token')} of its context were computed in "
                f"{_count(self.num_chunks, 'chunk')}, {_steps(self.first_step, self.last_step)}."
            )
        counts = self.counts
        if counts["copied to_device"]:
            yield f"{_count(counts['copied to_device'], 'block')} came back from host memory."
        if counts["copied fork"]:
            yield "Its last, partial block was copied: it goes on with other tokens than the other choices."
        if counts["published"]:
            span = self._span(PublishEvent)
            yield f"{_count(counts['published'], 'full block')} can be found by others from then on{span}."
        if counts["private"]:
            yield f"{_count(counts['private'], 'block')} stayed its own: the same tokens had been computed before."
        if counts["released"]:
            yield f"{_were(counts['released'])} given back behind the model's window{self._span(ReleaseEvent)}."
        if counts["evicted"]:
            kept = f", {counts['to host']:,} of them kept in host memory" if counts["to host"] else ""
            yield f"{_were(counts['evicted'])} handed to others that it had computed{kept}{self._span(EvictEvent)}."


def tell(events: Iterable[Event], request_id: str) -> list[Sentence]:
    """What happened to a request, oldest first; empty where no event is of it."""
    own = [event for event in events if _is_about(event, request_id)]
    if not own:
        return []
    arrived = own[0].arrived if isinstance(own[0], ArriveEvent) else own[0].time
    ends = _ends_of_waits(own)
    sentences: list[Sentence] = []
    background = _Background()

    def say(event: Event, text: str) -> None:
        sentences.append(Sentence(event.step, event.time - arrived, event.kind, text))

    for event, end in zip(own, ends, strict=True):
        telling = _TOLD.get(type(event))
        if telling is None:
            background.add(event)
            continue
        if isinstance(event, WaitEvent) and end is not None and end.time == event.time:
            continue  # it took another form at once
        if background.first is not None:
            for text in background.sentences():
                say(background.first, text)
            background = _Background()
        if event.request_id == request_id:
            say(event, telling(event, end, arrived))
        else:
            say(event, f"It stands before {event.request_id}, which was preempted for it in step {event.step:,}.")
    if background.first is not None:
        for text in background.sentences():
            say(background.first, text)
    return sentences


def _is_about(event: Event, request_id: str) -> bool:
    if isinstance(event, PreemptEvent) and event.for_request == request_id:
        return True
    return event.request_id == request_id and not isinstance(event, LoseEvent)


def wait_in_words(reason: str, needed: int, free: int, behind: str) -> str:
    """What a wait is for, to be read after "it waits"."""
    after = f", behind {behind}" if behind else ""
    if reason == "blocks":
        return f"for blocks: it needs {needed:,}, {free:,} can be had{after}"
    words = {
        "queue": f"in the queue{after}" if behind else "for the next step to begin",
        "rows": f"for a place: as many requests run as may{after}",
        "budget": f"for the step's token budget, which went to others{after}",
        "group": f"for {behind or 'its first choice'}, which computes the prompt for all choices",
    }
    return words.get(reason, f"for {reason}{after}")


# ---- one event, one sentence ----------------------------------------------------------------------------------------


def _arrive(event: ArriveEvent, end: Event | None, arrived: float) -> str:
    text = (
        f"It arrived with {_count(event.num_prompt_tokens, 'prompt token')} and may grow to "
        f"{event.max_total_tokens:,} tokens"
    )
    text += f", for tenant {event.tenant}" if event.tenant else ""
    text += f", with priority {event.priority}" if event.priority else ""
    text += f"; {event.leader} computes the prompt for it." if event.leader else "."
    compiled = event.time - event.arrived
    return text + (f" It waited {_seconds(compiled)} for its grammar to be compiled." if compiled > 0 else "")


def _grammar(event: GrammarEvent, end: Event | None, arrived: float) -> str:
    return f"Its text will follow a grammar ({event.kind_of_grammar})."


def _wait(event: WaitEvent, end: Event | None, arrived: float) -> str:
    words = wait_in_words(event.reason, event.needed, event.free, event.behind)
    if end is None:
        return f"It waits {words}."
    for now, then in (("it needs", "it needed"), (" can be had", " could be had"), (" run as may", " ran as may")):
        words = words.replace(now, then)
    return f"It waited {_seconds(end.time - event.time)}, until step {end.step:,}, {words}."


def _ends_of_waits(events: Sequence[Event]) -> list[Event | None]:
    """For each event the next one that would end a wait which begins with it."""
    ends: list[Event | None] = []
    next_end: Event | None = None
    for event in reversed(events):
        ends.append(next_end)
        if isinstance(event, _ENDS_A_WAIT):
            next_end = event
    return ends[::-1]


def _admit(event: AdmitEvent, end: Event | None, arrived: float) -> str:
    return (
        f"It entered in step {event.step:,}, in row {event.row}, with {_count(event.num_tokens, 'token')} of context."
    )


def _hit(event: HitEvent, end: Event | None, arrived: float) -> str:
    text = f"Its first {_count(event.num_tokens, 'token')} ({_count(event.num_blocks, 'block')}) were found computed"
    if event.num_copied:
        text += (
            f"; {event.num_copied:,} of the blocks are copied from host memory, estimated at "
            f"{_seconds(event.copy_seconds)} instead of {_seconds(event.compute_seconds)} for computing them"
        )
    return text + "."


def _miss(event: MissEvent, end: Event | None, arrived: float) -> str:
    if event.reason == "evicted":
        why = f"the next block was evicted in step {event.evicted_step:,}"
    else:
        why = MISS_REASONS.get(event.reason, event.reason)
        if event.reason == "partial block" and not event.num_blocks:
            why = "its prompt has no full block to look for"
    if event.reason == "recompute":
        why += f" ({_seconds(event.copy_seconds)} against {_seconds(event.compute_seconds)})"
    return f"The prefix lookup ended after {_count(event.num_blocks, 'block')}: {why}."


def _fork(event: ForkEvent, end: Event | None, arrived: float) -> str:
    if event.row < 0:
        return f"{event.leader} had computed {event.num_tokens:,} tokens for it, but no block or row was to be had."
    return (
        f"It went on from the {_count(event.num_tokens, 'token')} that {event.leader} had computed, in row {event.row}."
    )


def _first_token(event: FirstTokenEvent, end: Event | None, arrived: float) -> str:
    return f"Its first token came in step {event.step:,}, {_seconds(event.time - arrived)} after its arrival."


def _preempt(event: PreemptEvent, end: Event | None, arrived: float) -> str:
    whom = "itself: it was the last in the order" if event.for_request == event.request_id else event.for_request
    return (
        f"In step {event.step:,} it was preempted for {whom}; it had computed "
        f"{_count(event.num_computed_tokens, 'token')}, of which it finds again what is still cached."
    )


def _slide(event: SlideEvent, end: Event | None, arrived: float) -> str:
    return f"Its context was full: it goes on from token {event.context_start:,}, computed anew."


def _finish(event: FinishEvent, end: Event | None, arrived: float) -> str:
    why = FINISH_REASONS.get(event.reason, event.reason)
    return (
        f"It ended in step {event.step:,}, {_seconds(event.time - arrived)} after its arrival: {why} ({event.reason}), "
        f"with {_count(event.num_output_tokens, 'output token')}."
    )


def _free(event: FreeEvent, end: Event | None, arrived: float) -> str:
    return f"It gave its {_count(len(event.block_ids), 'block')} and its row back in step {event.step:,}."


_TOLD: dict[type[Event], Callable[..., str]] = {
    ArriveEvent: _arrive,
    GrammarEvent: _grammar,
    WaitEvent: _wait,
    AdmitEvent: _admit,
    HitEvent: _hit,
    MissEvent: _miss,
    ForkEvent: _fork,
    FirstTokenEvent: _first_token,
    PreemptEvent: _preempt,
    SlideEvent: _slide,
    FinishEvent: _finish,
    FreeEvent: _free,
}
_ENDS_A_WAIT = (WaitEvent, AdmitEvent, ChunkEvent, ForkEvent, FinishEvent, PreemptEvent)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _were(number: int) -> str:
    return f"{_count(number, 'block')} {'was' if number == 1 else 'were'}"


def _blocks(block_ids: Sequence[int]) -> str:
    shown = ", ".join(map(str, block_ids[:SHOWN_BLOCKS]))
    more = f" and {len(block_ids) - SHOWN_BLOCKS:,} more" if len(block_ids) > SHOWN_BLOCKS else ""
    return f"{_count(len(block_ids), 'block')} ({shown}{more})"


def _steps(first: int, last: int) -> str:
    return f"in step {first:,}" if first == last else f"in steps {first:,} to {last:,}"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
