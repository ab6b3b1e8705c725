"""Answers about the engine's inside, as plain dicts that go out as JSON.

Called between steps, so every answer is of one step. Read-only: it reports what the scheduler, the tables and the
allocator hold, and keeps nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from pageframe.runtime.errors import InvalidRequestError, RequestNotFoundError
from pageframe.runtime.journal import ArriveEvent
from pageframe.runtime.journal_json import event_json
from pageframe.runtime.prefix_tree import prefix_tree
from pageframe.runtime.request import Request, RequestStatus
from pageframe.runtime.story import tell, wait_in_words

if TYPE_CHECKING:  # the API process needs EngineStats alone, and starts sooner without the engine's modules
    from pageframe.runtime.engine import Engine
    from pageframe.runtime.prefix_cache import PrefixCache
    from pageframe.runtime.scheduler import Scheduler

Json = dict[str, Any]

#: One answer holds at most so many.
MAX_EVENTS = 2_000


@dataclass(slots=True)
class EngineStats:
    """The engine's gauges and totals, for metrics.

    Args:
        num_running, num_waiting: choices that run and that stand in the queue.
        num_following: choices whose leader still computes the prompt for them.
        slots_written: slots of used blocks that hold K and V, each block counted once however many share it.
        slots_wasted: those that hold nothing, and have no known token to come.
        lookup_tokens, hit_tokens: tokens of requests when they first entered, and how many were found computed.
        step_tokens: of step `step`, 0 if it did nothing.
    """

    step: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_following: int = 0
    num_blocks: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    blocks_used: int = 0
    blocks_pinned: int = 0
    slots_written: int = 0
    slots_wasted: int = 0
    blocks_saved_by_sharing: int = 0
    num_preemptions: int = 0
    num_aborts: int = 0
    num_waits: dict[str, int] = field(default_factory=dict)
    lookup_tokens: int = 0
    hit_tokens: int = 0
    step_tokens: int = 0

    def at_the_end(self) -> EngineStats:
        """Of an engine that has ended: its totals stay, and there is nothing else."""
        return EngineStats(
            step=self.step,
            num_blocks=self.num_blocks,
            num_preemptions=self.num_preemptions,
            num_aborts=self.num_aborts,
            num_waits=self.num_waits,
            lookup_tokens=self.lookup_tokens,
            hit_tokens=self.hit_tokens,
        )


def engine_stats(engine: Engine) -> EngineStats:
    """Counters and gauges now. Costs a few array sums, whatever the number of blocks."""
    scheduler = engine.scheduler
    allocator, tables = scheduler.allocator, scheduler.tables
    references = int((tables.num_blocks - tables.first_block).sum())
    known, written = _tokens_in_rows(scheduler)
    # What several rows hold is full in each of them: a block that is not is never shared.
    saved = references - allocator.num_used
    last = engine.steps[-1] if engine.steps else None
    return EngineStats(
        step=scheduler.step,
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        num_following=scheduler.num_following,
        num_blocks=allocator.num_blocks,
        blocks_free=allocator.num_free,
        blocks_cached=allocator.num_cached,
        blocks_used=allocator.num_used,
        blocks_pinned=allocator.num_pinned,
        slots_written=written - saved * tables.block_size,
        slots_wasted=references * tables.block_size - known,
        blocks_saved_by_sharing=saved,
        num_preemptions=scheduler.num_preemptions,
        num_aborts=scheduler.num_aborts,
        num_waits=scheduler.num_waits,
        lookup_tokens=scheduler.num_lookup_tokens,
        hit_tokens=scheduler.num_hit_tokens,
        step_tokens=last.num_tokens if last is not None and last.step == scheduler.step else 0,
    )


def _tokens_in_rows(scheduler: Scheduler) -> tuple[int, int]:
    """Tokens that have a slot (computed or about to be), and tokens whose K/V are written, over the rows in use.

    A token in a block that rows share counts in each of them, one behind a window in none.
    """
    tables, rows = scheduler.tables, scheduler.rows_in_use()
    computed = scheduler.rows.num_computed_tokens[rows]
    # The newest token of a decoding request gets its slot in the next step, maybe in a block not yet allocated.
    with_slot = scheduler.rows.num_tokens[rows].clip(max=tables.num_blocks[rows] * tables.block_size)
    given_back = int(tables.first_block[rows].sum()) * tables.block_size
    return int(with_slot.sum()) - given_back, int(computed.sum()) - given_back


def inspect(engine: Engine, what: str, argument: str = "") -> Json:
    """Answer one question, asked between two steps.

    "kv", "blocks", "requests"; "request" and "story" (by id); "steps" and "events" (from which number on); "prefixes"
    (how many chains at most).

    Raises:
        RequestNotFoundError: nothing is known of a request with this id.
        InvalidRequestError: `what` or `argument` is not one.
    """
    answer = _ANSWERS.get(what)
    if answer is None:
        raise InvalidRequestError(f"there is nothing to inspect under {what!r}")
    return answer(engine, argument)


def _kv(engine: Engine, argument: str) -> Json:
    stats, resolved = engine_stats(engine), engine.resolved
    prefix_cache, host_tier = engine.scheduler.blocks.prefix_cache, engine.scheduler.blocks.host_tier
    return {
        "step": stats.step,
        "block_size": resolved.block_size,
        "num_blocks": stats.num_blocks,
        "blocks": engine.scheduler.allocator.counts(),
        "slots": {"written": stats.slots_written, "wasted": stats.slots_wasted},
        "blocks_saved_by_sharing": stats.blocks_saved_by_sharing,
        "contiguous_blocks": _contiguous_blocks(engine),
        "bytes": {
            "pool": resolved.pool_bytes,
            "per_block": resolved.kv_bytes_per_token * resolved.block_size,
            "per_token": resolved.kv_bytes_per_token,
        },
        "requests": {
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "following": stats.num_following,
        },
        "preemptions": stats.num_preemptions,
        "prefix_cache": {
            "lookup_tokens": stats.lookup_tokens,
            "hit_tokens": stats.hit_tokens,
            "blocks": 0 if prefix_cache is None else len(prefix_cache),
        },
        "host_cache": {"slots": resolved.host_slots, "used": 0 if host_tier is None else host_tier.num_used},
    }


def _contiguous_blocks(engine: Engine) -> int:
    """Blocks that the running requests would hold if each had its longest context reserved, in one piece."""
    tables, longest = engine.scheduler.tables, engine.resolved.max_model_len
    running = (request for request in engine.scheduler.live_requests() if request.row >= 0)
    return sum(tables.blocks_for(min(request.max_total_tokens, longest)) for request in running)


def _blocks(engine: Engine, argument: str) -> Json:
    scheduler = engine.scheduler
    allocator, tables = scheduler.allocator, scheduler.tables
    block_size = tables.block_size
    owners: dict[int, list[str]] = {}
    filled: dict[int, int] = {}
    for request in scheduler.live_requests():
        if request.row < 0:
            continue
        computed = int(scheduler.rows.num_computed_tokens[request.row])
        for index, block_id in enumerate(tables.block_ids(request.row), int(tables.first_block[request.row])):
            owners.setdefault(block_id, []).append(request.request_id)
            filled[block_id] = min(block_size, max(0, computed - index * block_size))
    blocks = []
    for block_id, count in enumerate(allocator.ref_counts()):
        state = allocator.state(block_id)
        blocks.append(
            {
                "id": block_id,
                "state": state,
                "ref_count": count,
                "owners": owners.get(block_id, []),
                "filled": block_size if state == "cached" else filled.get(block_id, 0),
                "digest": _digest(scheduler.blocks.prefix_cache, block_id),
            }
        )
    return {"step": scheduler.step, "blocks": blocks}


def _digest(prefix_cache: PrefixCache | None, block_id: int) -> str | None:
    entry = None if prefix_cache is None else prefix_cache.entry_of(block_id)
    return None if prefix_cache is None or entry is None else prefix_cache.digest(entry)


def _request(engine: Engine, request: Request) -> Json:
    running = request.status is RequestStatus.RUNNING
    return {
        "id": request.request_id,
        **request_origin(request),
        **request_numbers(engine, request),
        "block_table": engine.scheduler.tables.entries(request.row) if running else [],
        "waits": [asdict(wait) for wait in request.waits if wait.until != wait.since],
    }


def request_origin(request: Request) -> Json:
    """What a request came with, which never changes."""
    return {
        "tenant": request.tenant,
        "priority": request.priority,
        "seed": request.request_seed,
        "num_prompt_tokens": request.num_prompt_tokens,
        "max_total_tokens": request.max_total_tokens,
    }


def request_numbers(engine: Engine, request: Request) -> Json:
    """How far a request has come.

    `num_computed_tokens` and the block table are of the context, which begins at token `context_start`; -1 in the
    table is a block given back behind a window."""
    scheduler = engine.scheduler
    running = request.status is RequestStatus.RUNNING
    row = request.row
    num_tokens = len(request.token_ids)
    if running:
        num_tokens = request.context_start + int(scheduler.rows.num_tokens[row])
    wait = request.waits[-1] if request.waits and request.waits[-1].until is None else None
    return {
        "status": request.status.value,
        "finish_reason": None if request.finish_reason is None else request.finish_reason.value,
        "row": row if running else None,
        "num_tokens": num_tokens,
        "num_output_tokens": num_tokens - request.num_prompt_tokens,
        "num_computed_tokens": int(scheduler.rows.num_computed_tokens[row]) if running else 0,
        "num_cached_tokens": request.num_cached_tokens,
        "context_start": request.context_start,
        "leader": None if request.leader is None else request.leader.request_id,
        "num_preemptions": request.num_preemptions,
        "timings": {
            "arrived": request.arrival_time,
            "first_scheduled": request.first_scheduled_time,
            "first_token": request.first_token_time,
            "finished": request.finish_time,
        },
        "wait": None if wait is None else wait_in_words(wait.reason, wait.needed, wait.free, wait.behind),
        "waited": {reason: seconds for reason, seconds in request.waited.items() if seconds},
        "wait_since": None if wait is None else wait.since,
    }


def _newest_lookup(request: Request) -> Json | None:
    """What was found of a request's context when it first entered, and why its latest lookup found no more; None before
    that. A choice that forked goes on from its leader's."""
    if not request.miss_reason:
        return None
    return {
        "hit_tokens": request.num_cached_tokens,
        "reason": request.miss_reason,
        "evicted_step": None if request.evicted_step < 0 else request.evicted_step,
    }


def _requests(engine: Engine, argument: str) -> Json:
    requests = [_request(engine, request) for request in engine.scheduler.live_requests()]
    return {"step": engine.scheduler.step, "now": engine.now(), "requests": requests}


def _one_request(engine: Engine, request_id: str) -> Json:
    request = engine.scheduler.find(request_id)
    if request is None:
        raise RequestNotFoundError(request_id)
    return {
        "step": engine.scheduler.step,
        "now": engine.now(),
        **_request(engine, request),
        "prefix": _newest_lookup(request),
    }


def _story(engine: Engine, request_id: str) -> Json:
    """What happened to a request, as far as the journal goes back; `complete`: that is to its arrival."""
    sentences = tell(engine.journal, request_id)
    if not sentences:
        raise RequestNotFoundError(request_id)
    return {
        "id": request_id,
        "sentences": [asdict(sentence) for sentence in sentences],
        "complete": sentences[0].kind == ArriveEvent.kind,
    }


def _steps(engine: Engine, since: str) -> Json:
    return {"steps": [asdict(record) for record in engine.steps_since(_number("since", since or "0"))]}


def _events(engine: Engine, since: str) -> Json:
    """At most MAX_EVENTS events from number `since` on: `first` is the number of the first of them, `next` that of the
    event behind the last, `written` that of the next one to come. Where `first` is more than asked for, the events
    between are held no more; where it is less, the number was of another engine's."""
    journal = engine.journal
    asked = _number("since", since or "0")
    # A number of events to come is of an engine that was here before.
    first = journal.first if asked > journal.written else max(asked, journal.first)
    events = [event_json(number, event) for number, event in enumerate(journal.since(first, MAX_EVENTS), first)]
    return {"first": first, "next": first + len(events), "written": journal.written, "events": events}


def _prefixes(engine: Engine, limit: str) -> Json:
    return prefix_tree(engine, _number("limit", limit))


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise InvalidRequestError(f"{name} is {text!r}; it must be a number, 0 or more", param=name)
    return int(text)


_ANSWERS: dict[str, Callable[[Engine, str], Json]] = {
    "kv": _kv,
    "blocks": _blocks,
    "requests": _requests,
    "request": _one_request,
    "story": _story,
    "steps": _steps,
    "events": _events,
    "prefixes": _prefixes,
}
