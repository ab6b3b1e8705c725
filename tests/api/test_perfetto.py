"""Traces of simulated journals: well-formed, and true to what the scheduler did."""

from __future__ import annotations

import argparse
import functools
import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from fakes.simulation import Simulation
from fakes.workload import Workload, random_config

from pageframe.api.perfetto import Trace, make_trace, write_trace
from pageframe.api.terminal_inspect import add_arguments, run
from pageframe.runtime.journal import Event
from pageframe.runtime.journal_json import event_json

from .scripted_server import ScriptedServer

Json = dict[str, Any]


class Recorded:
    """A random workload's journal as JSON, and the waits of its requests as the scheduler kept them."""

    def __init__(self, seed: int, num_steps: int = 250) -> None:
        rng = random.Random(seed)
        simulation = Simulation(random_config(rng))
        events: list[Event] = []
        #: By request: seconds of waiting by reason, and when its first token came.
        self.waited: dict[str, Counter[str]] = {}
        self.first_token: dict[str, float | None] = {}
        read = 0

        def look(num_steps: int) -> None:
            nonlocal read
            new = simulation.engine.journal.since(read)
            read = simulation.engine.journal.written
            events.extend(new)
            for event in new:
                request = simulation.engine.scheduler.find(event.request_id) if event.kind == "finish" else None
                if request is not None:
                    self.first_token[request.request_id] = request.first_token_time
                    waited = self.waited[request.request_id] = Counter()
                    for wait in request.waits:
                        assert wait.until is not None
                        waited[wait.reason] += round((wait.until - wait.since) * 1e9)

        Workload(simulation, rng, on_step=look).run(num_steps)
        look(0)
        self.num_blocks = simulation.resolved.num_blocks
        self.events = [event_json(number, event) for number, event in enumerate(events)]


SEEDS = range(4)
record = functools.cache(Recorded)


@pytest.fixture(scope="module", params=SEEDS)
def recorded(request: pytest.FixtureRequest) -> Recorded:
    return record(request.param)


def by_phase(trace: Trace, phase: str) -> list[Json]:
    return [event for event in trace.events if event["ph"] == phase]


def span(event: Json) -> tuple[int, int]:
    """Begin and end in nanoseconds."""
    start = round(event["ts"] * 1e3)
    return start, start + round(event["dur"] * 1e3)


def thread_names(trace: Trace) -> dict[int, str]:
    return {event["tid"]: event["args"]["name"] for event in by_phase(trace, "M") if event["name"] == "thread_name"}


def slices(trace: Trace) -> dict[str, list[Json]]:
    """By thread's name, in the order written."""
    names = thread_names(trace)
    found = defaultdict(list)
    for event in by_phase(trace, "X"):
        found[names[event["tid"]]].append(event)
    return found


def check_nesting(events: Iterable[Json]) -> None:
    """Each slice lies in the one open at its begin, and is written after it."""
    open_slices: list[tuple[int, int]] = []
    for start, end in map(span, events):
        assert start <= end
        while open_slices and open_slices[-1][1] <= start and open_slices[-1] != (start, end):
            open_slices.pop()
        assert all(begin <= start and end <= until for begin, until in open_slices), "slices overlap"
        open_slices.append((start, end))


def check_form(trace: Trace) -> None:
    names = thread_names(trace)
    assert len(names) == len(set(names.values())), "two threads of one name"
    for event in by_phase(trace, "X"):
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert event["tid"] in names
    for events in slices(trace).values():
        check_nesting(events)


def test_all_slices_nest_and_the_counters_add_up(recorded: Recorded) -> None:
    trace = make_trace(recorded.events)
    check_form(trace)
    counters = [event for event in by_phase(trace, "C") if event["name"] == "blocks"]
    steps = [event for event in recorded.events if event["kind"] == "step"]
    assert len(counters) == len(steps) == trace.num_steps == len(slices(trace)["steps"])
    assert all(sum(event["args"].values()) == recorded.num_blocks for event in counters)
    for step, event in zip(steps, slices(trace)["steps"], strict=True):
        assert event["args"]["step"] == step["step"]
        assert event["args"]["prefill_tokens"] + event["args"]["decode_tokens"] > 0
        assert event["args"]["token_budget"] == step["token_budget"]
        assert event["dur"] == pytest.approx(step["seconds"] * 1e6)


def test_every_request_begins_and_ends(recorded: Recorded) -> None:
    trace = make_trace(recorded.events)
    times = defaultdict(dict)
    for event in recorded.events:
        times[event["request_id"]].setdefault(event["kind"], event["time"])
    arrived = {request_id: kinds for request_id, kinds in times.items() if "arrive" in kinds}
    assert trace.num_requests == len(arrived) > 20
    origin = min(event["time"] for event in recorded.events)
    drawn = slices(trace)
    for request_id, kinds in arrived.items():
        whole, *phases = drawn[request_id]
        assert whole["name"] == "request"
        assert whole["args"]["ended"]
        assert whole["ts"] == pytest.approx((kinds["arrive"] - origin) * 1e6)
        assert whole["dur"] == pytest.approx((kinds["finish"] - kinds["arrive"]) * 1e6)
        assert sum(phase["dur"] for phase in phases) == pytest.approx(whole["dur"]), "it does nothing for a while"


def test_waits_and_phases_are_as_the_scheduler_had_them(recorded: Recorded) -> None:
    trace = make_trace(recorded.events)
    assert len(recorded.waited) > 20
    origin = min(event["time"] for event in recorded.events)
    seen: Counter[str] = Counter()
    drawn = slices(trace)
    for request_id, waited in recorded.waited.items():
        waits: Counter[str] = Counter()
        first = recorded.first_token[request_id]
        first_ns = None if first is None else round((first - origin) * 1e9)
        for phase in drawn[request_id][1:]:
            start, end = span(phase)
            seen[phase["name"]] += 1
            if phase["name"].startswith("wait: "):
                waits[phase["name"].removeprefix("wait: ")] += end - start
            elif phase["name"] == "prefill":
                assert first_ns is None or end <= first_ns + 1
            elif phase["name"] in ("decode", "recompute"):
                assert first_ns is not None
                assert start >= first_ns - 1
        assert +waits == +waited, request_id
    assert seen["prefill"] > 20
    assert seen["decode"] > 10


def test_a_preempted_request_points_at_whom_it_was_for(recorded: Recorded) -> None:
    trace = make_trace(recorded.events)
    names = thread_names(trace)
    preemptions = [event for event in recorded.events if event["kind"] == "preempt"]
    starts = {event["id"]: event for event in by_phase(trace, "s")}
    ends = {event["id"]: event for event in by_phase(trace, "f")}
    assert starts.keys() == ends.keys()
    arrows = [(names[starts[number]["tid"]], names[ends[number]["tid"]]) for number in starts]
    others = [event for event in preemptions if event["for_request"] != event["request_id"]]
    assert arrows == [(event["request_id"], event["for_request"]) for event in others]
    drawn = slices(trace)
    for event in (*starts.values(), *ends.values()):
        start, end = span(drawn[names[event["tid"]]][0])
        assert start <= round(event["ts"] * 1e3) <= end, "an arrow is bound to a slice"
    marks = Counter(event["name"] for event in by_phase(trace, "i"))
    for kind in ("preempt", "evict", "slide", "fork"):
        assert marks[kind] == sum(event["kind"] == kind for event in recorded.events)


def test_the_workloads_had_what_the_traces_are_tested_for() -> None:
    kinds = Counter(event["kind"] for seed in SEEDS for event in record(seed).events)
    assert min(kinds[kind] for kind in ("preempt", "evict", "slide", "fork", "chunk", "hit")) > 5
    drawn = Counter(event["name"] for seed in SEEDS for event in by_phase(make_trace(record(seed).events), "X"))
    assert {"recompute", "wait: blocks", "wait: queue", "wait: group", "mixed"} <= drawn.keys()


def test_a_journal_whose_beginning_is_gone(recorded: Recorded) -> None:
    for start in (len(recorded.events) // 3, len(recorded.events) // 2, len(recorded.events) - 1, len(recorded.events)):
        trace = make_trace(recorded.events[start:])
        check_form(trace)
    whole = make_trace(recorded.events)
    cut = make_trace(recorded.events[: len(recorded.events) // 2])
    check_form(cut)
    assert cut.num_requests < whole.num_requests
    assert not all(events[0]["args"]["ended"] for name, events in slices(cut).items() if name != "steps")


def happening(*events: tuple[float, str, dict[str, Any]]) -> list[Json]:
    """Events of the request "r" at such seconds, with what they have besides."""
    return [
        {"id": number, "kind": kind, "step": 1, "time": time, "request_id": "r", **fields}
        for number, (time, kind, fields) in enumerate(events)
    ]


ARRIVED: Json = {"num_prompt_tokens": 9, "max_total_tokens": 20, "tenant": "", "priority": 0}
WAITS: Json = {"reason": "queue", "needed": 0, "free": 0, "behind": ""}


def test_a_context_that_is_found_whole_is_not_computed_again() -> None:
    trace = make_trace(
        happening(
            (1.0, "arrive", ARRIVED),
            (1.0, "wait", WAITS),
            (2.0, "admit", {"row": 0, "num_tokens": 9}),
            (3.0, "first_token", {}),
            (4.0, "preempt", {"row": 0, "for_request": "r", "num_computed_tokens": 9}),
            (4.0, "wait", WAITS),
            (5.0, "admit", {"row": 0, "num_tokens": 10}),
            (5.0, "hit", {"num_tokens": 9}),
            (7.0, "finish", {"reason": "length", "num_output_tokens": 8}),
            (8.0, "finish", {"reason": "stop", "num_output_tokens": 7}),
        )
    )
    whole, *phases = slices(trace)["r"]
    assert [(phase["name"], phase["dur"] / 1e6) for phase in phases] == [
        ("wait: queue", 1.0),
        ("prefill", 1.0),
        ("decode", 1.0),
        ("wait: queue", 1.0),
        ("decode", 2.0),
    ]
    # The second end corrects why, not when.
    assert whole["dur"] == 6e6
    assert (whole["args"]["finish_reason"], whole["args"]["num_output_tokens"]) == ("stop", 7)


def test_an_arrow_to_a_request_of_which_nothing_else_is_known_yet() -> None:
    trace = make_trace(
        happening(
            (1.0, "preempt", {"row": 0, "for_request": "first", "num_computed_tokens": 9}),
            (2.0, "finish", {"request_id": "first", "reason": "stop", "num_output_tokens": 7}),
        )
    )
    assert span(slices(trace)["first"][0]) == (0, 10**9)
    assert {event["tid"] for event in by_phase(trace, "f")} == {slices(trace)["first"][0]["tid"]}


def test_all_states_of_blocks_are_counted() -> None:
    step = next(event for event in record(0).events if event["kind"] == "step")
    trace = make_trace([step | {"free": 1, "cached": 2, "used": 3, "pinned": 4}])
    (blocks,) = [event for event in by_phase(trace, "C") if event["name"] == "blocks"]
    assert blocks["args"] == {"free": 1, "cached": 2, "used": 3, "pinned": 4}


def test_request_threads_are_in_the_order_of_arrival(recorded: Recorded) -> None:
    trace = make_trace(recorded.events)
    names = thread_names(trace)
    places = {
        names[event["tid"]]: event["args"]["sort_index"]
        for event in by_phase(trace, "M")
        if event["name"] == "thread_sort_index"
    }
    arrivals = [event["request_id"] for event in recorded.events if event["kind"] == "arrive"]
    assert sorted(arrivals, key=lambda request_id: places[request_id]) == arrivals


# ---- the file and the command ---------------------------------------------------------------------------------------


def test_the_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("before")
    with pytest.raises(TypeError):
        write_trace(path, Trace([{"ph": "X"}, {"ph": object()}], 0, 0, 0.0))
    assert path.read_text() == "before"
    write_trace(path, Trace([{"ph": "X"}], 0, 0, 0.0))
    assert json.loads(path.read_text())["traceEvents"] == [{"ph": "X"}]
    assert list(tmp_path.iterdir()) == [path]


def inspect(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args(argv))


def test_a_recording_becomes_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded, journal, path = record(1), tmp_path / "journal", tmp_path / "trace.json"
    header = {"kind": "journal", "version": 1, "run": "a"}
    journal.write_text("".join(json.dumps(line) + "\n" for line in [header, *recorded.events]) + '{"kind": "st')
    assert inspect("--perfetto", str(path), "--journal", str(journal)) == 0
    captured = capsys.readouterr()
    trace = make_trace(recorded.events)
    assert captured.out == (
        f"{path}: {len(recorded.events):,} events, {trace.seconds:,.2f} s, {trace.num_steps:,} steps, "
        f"{trace.num_requests:,} requests\n"
    )
    assert "is cut off in line" in captured.err
    assert json.loads(path.read_text())["traceEvents"] == json.loads(json.dumps(trace.events))


def test_a_servers_journal_becomes_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    event = next(event for event in record(1).events if event["kind"] == "arrive") | {"id": 70}
    path = tmp_path / "trace.json"
    with ScriptedServer({"/inspect/events?follow=0": [event, ["no event"]]}) as server:
        assert inspect("--url", server.url, "--perfetto", str(path)) == 0
        assert capsys.readouterr().out == (
            f"{path}: 1 events, 0.00 s, 0 steps, 1 requests; 70 events before these are held no more\n"
        )
        assert event["request_id"] in path.read_text()
        assert inspect("--url", server.url, "--perfetto", str(tmp_path / "another")) == 1
    assert "does not answer /inspect/events as Pageframe does" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_read_or_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "journal").write_text('{"kind": "journal", "version": 1}\n')
    nowhere = str(tmp_path / "no" / "trace.json")
    assert inspect("--perfetto", nowhere, "--journal", str(tmp_path / "journal")) == 1
    assert capsys.readouterr().err == f"pageframe: {nowhere} cannot be written: No such file or directory\n"
    assert inspect("--perfetto", str(tmp_path / "x"), "--journal", str(tmp_path / "none")) == 1
    assert "none cannot be read: No such file or directory" in capsys.readouterr().err
    for flags in (["--journal", str(tmp_path / "journal")], ["--perfetto", str(tmp_path / "x"), "--request", "r"]):
        assert inspect(*flags) == 2
        assert "--journal goes with --perfetto, and --request with neither" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
