"""Frames: whoever applies them has at every moment what the inspection answers, of one step."""

from __future__ import annotations

import base64
import json
import random
from typing import Any

import numpy as np
import pytest
from fakes.engines import tiny_config
from fakes.simulation import Simulation
from fakes.workload import Workload, random_config

from pageframe.runtime.inspection import inspect
from pageframe.runtime.live_frames import CELL, MAX_EVENTS, LiveFrames
from pageframe.runtime.request import SamplingParams

STATES = ("free", "cached", "used", "pinned")


class Watcher:
    """What a page keeps, put together from JSON text alone."""

    def __init__(self) -> None:
        self.cells = np.zeros(0, dtype=CELL)
        self.since = np.zeros(0, dtype=np.int32)
        self.requests: dict[str, dict[str, Any]] = {}
        self.tables: dict[str, list[int]] = {}
        self.ended: list[str] = []
        self.steps: list[int] = []
        self.events: list[int] = []
        self.left_out = 0
        self.frames: list[int] = []
        self.text = ""

    def apply(self, text: str) -> None:
        self.text = text
        frame = json.loads(text)
        self.frames.append(frame["frame"])
        if frame["full"]:
            self.cells = decode(frame["cells"]["data"], CELL).copy()
            self.since = decode(frame["since"], np.int32).copy()
            self.requests, self.tables = {}, {}
        else:
            ids = decode(frame["cells"]["ids"], np.uint32)
            self.cells[ids] = decode(frame["cells"]["data"], CELL)
            self.since[ids] = decode(frame["since"], np.int32)
        self.requests = {entry["id"]: {**self.requests.get(entry["id"], {}), **entry} for entry in frame["requests"]}
        for request_id, entry in self.requests.items():
            table = entry.pop("table", None)
            if table is not None:
                self.tables[request_id] = self.tables.get(request_id, [])[: table["first"]] + table["ids"]
        self.tables = {request_id: self.tables.get(request_id, []) for request_id in self.requests}
        self.ended += [entry["id"] for entry in frame["ended"]]
        self.steps += [step["step"] for step in frame["steps"]]
        self.events += [event["id"] for event in frame["events"]]
        self.left_out += frame["events_left_out"]


def decode(text: str, dtype: Any) -> Any:
    return np.frombuffer(base64.b64decode(text), dtype=dtype)


def watch(frames: LiveFrames, watcher: Watcher) -> None:
    frame = frames.next() if watcher.frames else frames.start()
    if frame is not None:
        watcher.apply(json.dumps(frame, allow_nan=False))


def join(frames: LiveFrames, watcher: Watcher) -> None:
    """Begin to look beside others, who have just got their frame."""
    watcher.apply(json.dumps(frames.whole(), allow_nan=False))


def check(simulation: Simulation, watcher: Watcher) -> None:
    engine = simulation.engine
    blocks = inspect(engine, "blocks")["blocks"]
    rows = {request.row: request.request_id for request in engine.scheduler.live_requests() if request.row >= 0}
    for block, cell in zip(blocks, watcher.cells, strict=True):
        assert STATES[cell["state"]] == block["state"]
        assert cell["ref_count"] == block["ref_count"]
        assert cell["filled"] == block["filled"]
        owner = rows.get(int(cell["owner"]) - 1)
        assert (owner is None) == (not block["owners"])
        assert owner is None or owner in block["owners"]
        assert owner is None or all(rows_of(rows, owner) <= rows_of(rows, other) for other in block["owners"])
    requests = inspect(engine, "requests")["requests"]
    assert [request["id"] for request in requests] == list(watcher.requests)
    for request in requests:
        known = watcher.requests[request["id"]]
        assert watcher.tables[request["id"]] == request["block_table"]
        for key in set(request) - {"block_table", "waits"}:
            assert known[key] == request[key], f"{key} of {request['id']}"
        waiting = [wait for wait in request["waits"] if wait["until"] is None]
        assert (known["wait"] is not None) >= bool(waiting)


def rows_of(rows: dict[int, str], request_id: str) -> int:
    return next(row for row, other in rows.items() if other == request_id)


@pytest.mark.parametrize("seed", range(6))
def test_frames_put_together_are_what_the_inspection_answers(seed: int) -> None:
    rng = random.Random(seed)
    simulation = Simulation(random_config(rng))
    frames, watcher = LiveFrames(simulation.engine), Watcher()
    later: list[Watcher] = []
    looked = 0

    def look(num_steps: int) -> None:
        nonlocal looked
        if num_steps % 3 == 0 or rng.random() < 0.3:
            watch(frames, watcher)
            frame = watcher.frames[-1]
            for other in later:
                if other.frames[-1] < frame:
                    other.apply(watcher.text)
                check(simulation, other)
            if rng.random() < 0.03:
                later.append(Watcher())
                join(frames, later[-1])
                check(simulation, later[-1])
            check(simulation, watcher)
            looked += 1

    Workload(simulation, rng, on_step=look).run(250)
    look(0)
    assert looked > 50
    assert len(later) > 1
    assert all(other.since.tolist() == watcher.since.tolist() for other in later[-1:]), "who joins is told the same"
    assert set(simulation.ended) >= set(watcher.ended)
    assert len(watcher.ended) > 10
    assert watcher.frames == sorted(set(watcher.frames))


def test_steps_and_events_are_told_once_each() -> None:
    simulation = Simulation(tiny_config(num_blocks=16))
    frames, watcher = LiveFrames(simulation.engine), Watcher()
    watch(frames, watcher)
    for number in range(4):
        simulation.add([1 + number] * 9, SamplingParams(max_tokens=6))
        for _ in range(3):
            simulation.step()
        watch(frames, watcher)
    simulation.drain()
    watch(frames, watcher)
    last = simulation.engine.scheduler.step
    assert watcher.steps == [record.step for record in simulation.engine.steps]
    assert watcher.steps[-1] <= last
    assert watcher.events == list(range(simulation.engine.journal.written))
    assert watcher.left_out == 0


def test_nothing_is_told_where_nothing_happened() -> None:
    simulation = Simulation(tiny_config())
    frames = LiveFrames(simulation.engine)
    first = frames.start()
    assert frames.next() is None
    simulation.add([1, 2, 3])
    told = frames.next()
    assert told is not None
    assert [entry["id"] for entry in told["requests"]] == ["r0"]
    assert frames.next() is None
    whole = frames.whole()
    assert (whole["frame"], whole["full"]) == (told["frame"], True)
    assert first["run"] == told["run"] == whole["run"] != LiveFrames(simulation.engine).start()["run"]


def test_of_many_events_the_newest_are_told_and_the_rest_are_counted() -> None:
    simulation = Simulation(tiny_config(num_blocks=64, max_model_len=256))
    frames, watcher = LiveFrames(simulation.engine), Watcher()
    watch(frames, watcher)
    for number in range(120):
        simulation.add([number + 1] * 9, SamplingParams(max_tokens=2, ignore_eos=True))
        simulation.step()
        simulation.step()
    written = simulation.engine.journal.written
    assert written > MAX_EVENTS
    watch(frames, watcher)
    assert watcher.events == list(range(written - MAX_EVENTS, written))
    assert watcher.left_out == written - MAX_EVENTS


def test_who_begins_to_look_does_not_know_since_when_a_block_is_as_it_is() -> None:
    simulation = Simulation(tiny_config(num_blocks=8))
    simulation.add([1] * 9, SamplingParams(max_tokens=8, ignore_eos=True))
    simulation.step()
    frames, watcher = LiveFrames(simulation.engine), Watcher()
    watch(frames, watcher)
    assert watcher.since.tolist() == [0] * 8
    simulation.add([2] * 4, SamplingParams(max_tokens=8, ignore_eos=True))
    while len(simulation.engine.scheduler.rows_in_use()) < 2:
        simulation.step()
    watch(frames, watcher)
    taken = simulation.engine.scheduler.tables.entries(1)
    assert [watcher.since[block_id] for block_id in taken] == [simulation.engine.scheduler.step] * len(taken)
