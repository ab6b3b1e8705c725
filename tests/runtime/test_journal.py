"""The journal: a bounded, numbered ring whose events alone tell who held which block, and why it changed."""

from __future__ import annotations

import dataclasses
import json

import pytest
from fakes.engines import tiny_config
from fakes.journal_replay import JournalReplay
from fakes.scheduling import add_request, events, make_scheduler, run_step, run_until
from fakes.simulation import Simulation

from pageframe.runtime import journal
from pageframe.runtime.journal import Event, FinishEvent, FreeEvent, Journal, PreemptEvent, WaitEvent
from pageframe.runtime.request import SamplingParams


def finish(number: int) -> FinishEvent:
    return FinishEvent(step=number, time=float(number), request_id="a", reason="stop", num_output_tokens=1)


def test_the_oldest_events_are_dropped_and_numbers_go_on() -> None:
    ring = Journal(capacity=3)
    assert (len(ring), ring.written, list(ring)) == (0, 0, [])
    for number in range(5):
        ring.write(finish(number))
    assert (len(ring), ring.written) == (3, 5)
    assert [event.step for event in ring] == [2, 3, 4]


def test_an_event_cannot_be_changed_once_written() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        finish(0).step = 1  # type: ignore[misc]


def test_each_kind_of_event_has_its_own_name_and_goes_out_as_json() -> None:
    kinds = [kind for kind in vars(journal).values() if isinstance(kind, type) and issubclass(kind, Event)]
    names = [kind.kind for kind in kinds]
    assert len(set(names)) == len(names) == 9
    event = FreeEvent(step=1, time=0.5, request_id="a", row=2, block_ids=(3, 4))
    assert json.loads(json.dumps(dataclasses.asdict(event))) == {
        "step": 1,
        "time": 0.5,
        "request_id": "a",
        "row": 2,
        "block_ids": [3, 4],
    }


def test_a_requests_way_by_hand() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4, max_num_requests=2, max_num_batched_tokens=8)
    add_request(scheduler, "a", 9, max_tokens=2)
    for _ in range(3):
        run_step(scheduler)
    told = [
        (event.step, event.kind, {key: value for key, value in dataclasses.asdict(event).items() if key in NUMBERS})
        for event in scheduler.journal
    ]
    assert told == [
        (0, "arrive", {"num_prompt_tokens": 9, "max_total_tokens": 11}),
        (1, "admit", {"row": 0, "num_tokens": 9}),
        (1, "allocate", {"row": 0, "first_index": 0, "block_ids": (0, 1, 2)}),
        (1, "chunk", {"row": 0, "start": 0, "num_tokens": 8}),
        (3, "free", {"row": 0, "block_ids": (0, 1, 2)}),
        (3, "finish", {"reason": "length", "num_output_tokens": 2}),
    ]


NUMBERS = {
    *("num_prompt_tokens", "max_total_tokens", "row", "num_tokens", "first_index", "block_ids", "start", "reason"),
    "num_output_tokens",
}


def test_a_wait_is_told_once_with_the_numbers_it_began_with() -> None:
    scheduler = make_scheduler(num_blocks=4, max_num_batched_tokens=16)
    add_request(scheduler, "running", 5, max_tokens=8)
    run_step(scheduler)
    add_request(scheduler, "waiting", 12, max_tokens=2)
    for _ in range(5):
        run_step(scheduler)
    waits = [(event.step, event.request_id, event.needed, event.free) for event in events(scheduler, WaitEvent)]
    assert waits == [(2, "waiting", 4, 2)]
    waiting = scheduler.find("waiting")
    assert waiting is not None
    assert (waiting.waits[-1].needed, waiting.waits[-1].free) == (4, 1), "the request itself has the latest numbers"


def test_a_preemption_names_both_requests_and_what_was_lost() -> None:
    scheduler = make_scheduler(num_blocks=4, max_num_requests=2, max_num_batched_tokens=16)
    add_request(scheduler, "first", 7, max_tokens=8)
    add_request(scheduler, "last", 6, max_tokens=4)
    run_until(scheduler, lambda: events(scheduler, PreemptEvent), limit=10)
    (event,) = events(scheduler, PreemptEvent)
    assert (event.request_id, event.for_request, event.num_computed_tokens) == ("last", "first", 7)
    following = list(scheduler.journal)[list(scheduler.journal).index(event) + 1]
    assert isinstance(following, FreeEvent)
    assert (following.request_id, following.row, len(following.block_ids)) == ("last", event.row, 2)


def test_the_whole_journal_read_afterwards_rebuilds_the_block_tables() -> None:
    """Read in one go, by someone who was not there; `Simulation` compares after every step besides."""
    simulation = Simulation(tiny_config(num_blocks=12))
    for number in range(6):
        simulation.add([number + 1] * (3 + 2 * number), SamplingParams(max_tokens=12, ignore_eos=True))
    for _ in range(14):
        simulation.step()
    simulation.abort("r3")
    replay = JournalReplay(block_size=4)
    replay.apply(simulation.engine.journal)
    tables = simulation.engine.scheduler.tables
    assert replay.tables == {row: tables.block_ids(row) for row in replay.running.values()}
    assert replay.running == {
        request.request_id: request.row for request in simulation.engine.scheduler.live_requests() if request.row >= 0
    }
    assert replay.num_preemptions > 0
    assert len(replay.running) > 1
