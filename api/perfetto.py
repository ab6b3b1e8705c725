"""A journal as a trace for Perfetto: what the scheduler and every request did, on one axis of time.

Knows the journal's events as JSON and Chrome's Trace Event Format, and neither servers nor terminals.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Json = dict[str, Any]

SCHEDULER, REQUESTS = 1, 2
#: Thread ids; no two of the trace are the same, nor the same as a process id.
STEPS_THREAD, EVICTIONS_THREAD, FIRST_REQUEST_THREAD = 11, 12, 101
#: Of the kinds of event that tell when a request was there. Others come long after it has gone.
_SIGNS_OF_LIFE = frozenset(
    (
        *("arrive", "wait", "admit", "hit", "miss", "share", "allocate", "fork", "chunk", "first_token"),
        *("release", "slide", "preempt", "free", "finish"),
    )
)
_INSTANTS = {
    "preempt": ("row", "for_request", "num_computed_tokens"),
    "slide": ("row", "context_start"),
    "fork": ("row", "leader", "num_tokens"),
}


@dataclass(frozen=True, slots=True)
class Trace:
    """A journal in the Trace Event Format.

    Args:
        events: its "traceEvents"; `ts` and `dur` in microseconds from the first one on.
        seconds: how much time it spans.
    """

    events: list[Json]
    num_steps: int
    num_requests: int
    seconds: float


@dataclass(slots=True)
class _Phase:
    """What a request does from `start` until the next phase begins."""

    name: str
    start: int
    args: Json


@dataclass(slots=True)
class _Life:
    """One request. Times in nanoseconds.

    Args:
        end: when it ended; None while it lives.
        needed: context tokens at its latest admission; whoever has computed them all decodes.
    """

    thread: int
    start: int
    end: int | None = None
    args: Json = field(default_factory=dict)
    phases: list[_Phase] = field(default_factory=list)
    has_token: bool = False
    needed: int = 0

    def begin(self, name: str, time: int, **args: Any) -> None:
        """Another phase begins; the same one just goes on."""
        if not self.phases or self.phases[-1].name != name or args:
            self.phases.append(_Phase(name, time, args))

    @property
    def computing(self) -> str:
        """What a request does that computes tokens it already has."""
        return "recompute" if self.has_token else "prefill"


def make_trace(journal: Iterable[Json]) -> Trace:
    """The trace of a journal's events, oldest first, each as runtime.journal_json makes it."""
    events = list(journal)
    builder = _Builder(events)
    for event in events:
        builder.add(event)
    return builder.trace()


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace as a file that Perfetto opens. The file is there whole, or as it was before.

    Raises:
        OSError: it cannot be written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("w", encoding="utf-8") as file:
            json.dump({"traceEvents": trace.events, "displayTimeUnit": "ms"}, file, separators=(",", ":"))
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


class _Builder:
    """Takes a journal's events one by one.

    Args:
        events: all of them, to know where time begins and ends.
    """

    def __init__(self, events: list[Json]) -> None:
        moments = [_ns(event["started"] if event["kind"] == "step" else event["time"]) for event in events]
        self._origin = min(moments, default=0)
        self._last = max([*moments, *(_end(event) for event in events)], default=0)
        self._lives: dict[str, _Life] = {}
        self._others: list[Json] = []
        self._arrows: list[tuple[str, str, int]] = []
        #: Who decodes from the end of this step on.
        self._caught_up: list[_Life] = []
        self._steps: list[Json] = []

    def add(self, event: Json) -> None:
        kind, time = event["kind"], _ns(event["time"])
        if kind == "step":
            self._steps.append(event)
            self._step(event)
        elif kind == "evict":
            args = {name: event[name] for name in ("block_id", "request_id", "host_slot", "idle_steps", "reason")}
            self._others.append(self._instant("evict", SCHEDULER, EVICTIONS_THREAD, time, args))
        elif kind in _SIGNS_OF_LIFE:
            life = self._life(event["request_id"], time)
            self._take(life, event, time)
            if kind in _INSTANTS:
                args = {name: event[name] for name in ("step", *_INSTANTS[kind])}
                self._others.append(self._instant(kind, REQUESTS, life.thread, time, args))
            if kind == "preempt" and event["for_request"] != event["request_id"]:
                self._life(event["for_request"], time)
                self._arrows.append((event["request_id"], event["for_request"], time))

    def trace(self) -> Trace:
        """All that was added, in an order that viewers like: names first, what encloses before what it encloses."""
        events = self._names()
        for step, following in itertools.zip_longest(self._steps, self._steps[1:]):
            events += self._step_events(step, following)
        for request_id, life in self._lives.items():
            events += self._life_events(request_id, life)
        events += self._others
        for number, (victim, beneficiary, time) in enumerate(self._arrows, 1):
            arrow = {"name": "preempted for", "cat": "preempt", "id": number, "pid": REQUESTS, "ts": self._us(time)}
            events.append({"ph": "s", **arrow, "tid": self._lives[victim].thread})
            events.append({"ph": "f", "bp": "e", **arrow, "tid": self._lives[beneficiary].thread})
        return Trace(events, len(self._steps), len(self._lives), (self._last - self._origin) / 1e9)

    # ---- one request ----------------------------------------------------------------------------------------------

    def _life(self, request_id: str, time: int) -> _Life:
        if request_id not in self._lives:
            self._lives[request_id] = _Life(FIRST_REQUEST_THREAD + len(self._lives), time)
        return self._lives[request_id]

    def _take(self, life: _Life, event: Json, time: int) -> None:
        """What an event tells of its request's phases."""
        match event["kind"]:
            case "arrive":
                for name in ("num_prompt_tokens", "max_total_tokens", "tenant", "priority"):
                    life.args[name] = event[name]
            case "wait":
                args = {name: event[name] for name in ("needed", "free", "behind") if event[name]}
                life.begin(f"wait: {event['reason']}", time, step=event["step"], **args)
            case "admit":
                life.needed = event["num_tokens"]
                life.begin(life.computing, time, step=event["step"], row=event["row"], num_tokens=event["num_tokens"])
            case "hit":
                life.args["cached_tokens"] = life.args.get("cached_tokens", 0) + event["num_tokens"]
                if life.has_token and event["num_tokens"] >= life.needed - 1:
                    life.begin("decode", time)
            case "chunk":
                life.begin(life.computing, time)
                if event["start"] + event["num_tokens"] >= life.needed and life.has_token:
                    self._caught_up.append(life)
            case "first_token" | "fork":
                life.has_token = True
                life.begin("decode", time)
            case "finish":
                life.end = time if life.end is None else life.end
                life.args |= {"finish_reason": event["reason"], "num_output_tokens": event["num_output_tokens"]}

    def _life_events(self, request_id: str, life: _Life) -> list[Json]:
        """One slice for the whole, and in it one for each phase."""
        end = self._last if life.end is None else life.end
        whole = {"id": request_id, **life.args, "ended": life.end is not None}
        events = [self._slice("request", REQUESTS, life.thread, life.start, end, whole)]
        ends = [*(phase.start for phase in life.phases), end][1:]
        for phase, until in zip(life.phases, ends, strict=True):
            if until > phase.start:
                events.append(self._slice(phase.name, REQUESTS, life.thread, phase.start, until, phase.args))
        return events

    # ---- steps ----------------------------------------------------------------------------------------------------

    def _step(self, event: Json) -> None:
        """Who has computed all its tokens again in this step decodes from its end on."""
        for life in self._caught_up:
            if life.end is None and life.phases[-1].name == "recompute":
                life.begin("decode", _end(event))
        self._caught_up = []

    def _step_events(self, step: Json, following: Json | None) -> list[Json]:
        """The step's slice, and what it did to the counters: tokens while it runs, requests and blocks behind it."""
        start, end = _ns(step["started"]), _end(step)
        tokens = {"prefill": step["prefill_tokens"], "decode": step["decode_tokens"]}
        name = "mixed" if all(tokens.values()) else "prefill" if tokens["prefill"] else "decode"
        numbers = ("step", "num_requests", "prefill_tokens", "decode_tokens", "token_budget", "evicted")
        events = [
            self._slice(name, SCHEDULER, STEPS_THREAD, start, end, {number: step[number] for number in numbers}),
            self._counter("tokens per step", start, tokens),
            self._counter("requests", end, {"running": step["num_running"], "waiting": step["num_waiting"]}),
            self._counter("blocks", end, {state: step[state] for state in ("used", "pinned", "cached", "free")}),
        ]
        # Between two steps that follow each other at once there is nothing worth showing.
        if following is None or _ns(following["started"]) - end > end - start:
            events.append(self._counter("tokens per step", end, {"prefill": 0, "decode": 0}))
        return events

    # ---- the format -----------------------------------------------------------------------------------------------

    def _us(self, time: int) -> float:
        return (time - self._origin) / 1e3

    def _slice(self, name: str, process: int, thread: int, start: int, end: int, args: Json) -> Json:
        duration = (end - start) / 1e3
        return {
            "ph": "X",
            "name": name,
            "pid": process,
            "tid": thread,
            "ts": self._us(start),
            "dur": duration,
            "args": args,
        }

    def _instant(self, name: str, process: int, thread: int, time: int, args: Json) -> Json:
        where = {"pid": process, "tid": thread, "ts": self._us(time)}
        return {"ph": "i", "s": "t", "name": name, **where, "args": args}

    def _counter(self, name: str, time: int, values: Json) -> Json:
        return {"ph": "C", "name": name, "pid": SCHEDULER, "ts": self._us(time), "args": values}

    def _names(self) -> list[Json]:
        """Processes and threads by name, in the order in which they are to be shown."""
        names = [("process", SCHEDULER, 0, "scheduler", 0), ("process", REQUESTS, 0, "requests", 1)]
        names.append(("thread", SCHEDULER, STEPS_THREAD, "steps", 0))
        names.append(("thread", SCHEDULER, EVICTIONS_THREAD, "evictions", 1))
        by_arrival = sorted(self._lives.items(), key=lambda item: item[1].start)
        for place, (request_id, life) in enumerate(by_arrival):
            names.append(("thread", REQUESTS, life.thread, request_id, place))
        events = []
        for kind, process, thread, name, place in names:
            where = {"ph": "M", "pid": process, "tid": thread}
            events.append({**where, "name": f"{kind}_name", "args": {"name": name}})
            events.append({**where, "name": f"{kind}_sort_index", "args": {"sort_index": place}})
        return events


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _end(event: Json) -> int:
    """When a step ended; for other events when they happened."""
    return _ns(event["started"]) + _ns(event["seconds"]) if event["kind"] == "step" else _ns(event["time"])
