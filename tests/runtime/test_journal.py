"""The journal: a bounded, numbered ring whose events alone tell who held which block, and why it changed."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from fakes.engines import tiny_config
from fakes.journal_replay import JournalReplay
from fakes.scheduling import add_request, events, make_request, make_scheduler, run_step, run_until
from fakes.simulation import Simulation

from pageframe.runtime import journal
from pageframe.runtime.journal import Event, FinishEvent, FreeEvent, Journal, PreemptEvent, WaitEvent
from pageframe.runtime.request import SamplingParams
from pageframe.runtime.scheduler import Scheduler


def finish(number: int) -> FinishEvent:
    return FinishEvent(step=number, time=float(number), request_id="a", reason="stop", num_output_tokens=1)


def test_the_oldest_events_are_dropped_and_numbers_go_on() -> None:
    ring = Journal(capacity=3)
    assert (len(ring), ring.written, list(ring)) == (0, 0, [])
    for number in range(5):
        ring.write(finish(number))
    assert (len(ring), ring.written) == (3, 5)
    assert [event.step for event in ring] == [2, 3, 4]


@pytest.mark.parametrize("written", [0, 1, 3, 4, 7, 9])
def test_any_part_of_what_is_held_can_be_read(written: int) -> None:
    ring = Journal(capacity=4)
    for number in range(written):
        ring.write(finish(number))
    assert ring.first == max(0, written - 4)
    for since in range(written + 2):
        for limit in (None, 0, 1, 2, 4, 9):
            expected = [number for number in range(written) if number >= max(since, ring.first)][:limit]
            assert [event.step for event in ring.since(since, limit)] == expected


def test_events_are_written_under_the_step_and_time_that_were_set_last() -> None:
    ring = Journal()
    ring.note(FreeEvent, "before", row=0, block_ids=())
    ring.at(7, 1.5)
    for row in (1, 2):
        ring.note(FreeEvent, "a", row=row, block_ids=(row,))
    ring.at(8, 2.5)
    ring.note(FinishEvent, "a", reason="stop", num_output_tokens=3)
    assert list(ring) == [
        FreeEvent(step=0, time=0.0, request_id="before", row=0, block_ids=()),
        FreeEvent(step=7, time=1.5, request_id="a", row=1, block_ids=(1,)),
        FreeEvent(step=7, time=1.5, request_id="a", row=2, block_ids=(2,)),
        FinishEvent(step=8, time=2.5, request_id="a", reason="stop", num_output_tokens=3),
    ]
    assert ring.written == 4


def test_a_note_without_one_of_its_numbers_is_an_error_of_ours() -> None:
    ring = Journal()
    with pytest.raises(TypeError, match="block_ids"):
        ring.note(FreeEvent, "a", row=1)
    assert ring.written == 0


NO_COPIES = {"copy_seconds": 0.0, "compute_seconds": 0.0}


def test_each_kind_of_event_has_its_own_name_and_goes_out_as_json() -> None:
    kinds = [kind for kind in vars(journal).values() if isinstance(kind, type) and issubclass(kind, Event)]
    names = [kind.kind for kind in kinds]
    assert len(set(names)) == len(names) == 25
    event = FreeEvent(step=1, time=0.5, request_id="a", row=2, block_ids=(3, 4))
    assert json.loads(json.dumps(dataclasses.asdict(event))) == {
        "step": 1,
        "time": 0.5,
        "request_id": "a",
        "row": 2,
        "block_ids": [3, 4],
    }


def told(scheduler: Scheduler, first: int = 0) -> list[tuple[int, str, str, dict[str, Any]]]:
    """(step, kind, request id, its own numbers) of the events from the `first` on."""
    shared = ("step", "time", "request_id")
    return [
        (
            event.step,
            event.kind,
            event.request_id,
            {key: value for key, value in dataclasses.asdict(event).items() if key not in shared},
        )
        for event in list(scheduler.journal)[first:]
    ]


def wait(reason: str, **numbers: Any) -> dict[str, Any]:
    return {"reason": reason, "needed": 0, "free": 0, "behind": "", **numbers}


def test_a_requests_way_by_hand() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4, max_num_requests=2, max_num_batched_tokens=8)
    add_request(scheduler, "a", 9, max_tokens=2)
    for _ in range(3):
        run_step(scheduler)
    arrival = {
        "arrived": 0.0,
        "num_prompt_tokens": 9,
        "max_total_tokens": 11,
        "tenant": "",
        "priority": 0,
        "seed": 0,
        "leader": "",
    }
    assert told(scheduler) == [
        (0, "arrive", "a", arrival),
        (0, "wait", "a", wait("queue")),
        (1, "admit", "a", {"row": 0, "num_tokens": 9}),
        (1, "miss", "a", {"reason": "differs", "num_blocks": 0, "evicted_step": -1, **NO_COPIES}),
        (1, "allocate", "a", {"row": 0, "first_index": 0, "block_ids": (0, 1, 2)}),
        (1, "chunk", "a", {"row": 0, "start": 0, "num_tokens": 8}),
        (1, "publish", "a", {"row": 0, "first_index": 0, "block_ids": (0, 1)}),
        (2, "first_token", "a", {}),
        (3, "free", "a", {"row": 0, "block_ids": (0, 1, 2)}),
        (3, "finish", "a", {"reason": "length", "num_output_tokens": 2}),
    ]


def test_two_choices_way_by_hand() -> None:
    """They find two blocks of another's prompt, fork in the middle of the third, and fill it with the same tokens."""
    scheduler = make_scheduler(num_blocks=6, block_size=4, max_num_requests=2, max_num_batched_tokens=16)
    add_request(scheduler, "a", 8, max_tokens=1)
    run_step(scheduler)
    first = scheduler.journal.written
    params = SamplingParams(n=2, max_tokens=3)
    scheduler.add([make_request(f"r-{index}", [1] * 10, params, arrival=1 + index) for index in range(2)], 1.0)
    for _ in range(3):
        run_step(scheduler)
    arrival = {"arrived": 1.0, "num_prompt_tokens": 10, "max_total_tokens": 13, "tenant": "", "priority": 0, "seed": 0}
    hit = {"num_blocks": 2, "num_tokens": 8, "num_copied": 0, "copy_seconds": 0.0, "compute_seconds": 0.0}
    assert told(scheduler, first) == [
        (1, "arrive", "r-0", arrival | {"leader": ""}),
        (1, "arrive", "r-1", arrival | {"leader": "r-0", "arrived": 2.0}),
        (1, "wait", "r-0", wait("queue")),
        (1, "wait", "r-1", wait("group", behind="r-0")),
        (2, "admit", "r-0", {"row": 0, "num_tokens": 10}),
        (2, "hit", "r-0", hit),
        (2, "miss", "r-0", {"reason": "partial block", "num_blocks": 2, "evicted_step": -1, **NO_COPIES}),
        (2, "share", "r-0", {"row": 0, "first_index": 0, "block_ids": (0, 1)}),
        (2, "allocate", "r-0", {"row": 0, "first_index": 2, "block_ids": (3,)}),
        (2, "chunk", "r-0", {"row": 0, "start": 8, "num_tokens": 2}),
        (2, "first_token", "r-1", {}),
        (2, "fork", "r-1", {"row": 1, "leader": "r-0", "num_tokens": 10}),
        (2, "share", "r-1", {"row": 1, "first_index": 0, "block_ids": (0, 1)}),
        (2, "allocate", "r-1", {"row": 1, "first_index": 2, "block_ids": (4,)}),
        (2, "copy", "r-1", {"copy_kind": "fork", "src": 3, "dst": 4}),
        (2, "pin", "r-1", {"block_ids": (3, 4)}),
        (2, "first_token", "r-0", {}),
        (3, "unpin", "", {"block_ids": (3, 4)}),
        (4, "publish", "r-0", {"row": 0, "first_index": 2, "block_ids": (3,)}),
        (4, "publish", "r-1", {"row": 1, "first_index": 2, "block_ids": (-1,)}),
        (4, "free", "r-0", {"row": 0, "block_ids": (0, 1, 3)}),
        (4, "finish", "r-0", {"reason": "length", "num_output_tokens": 3}),
        (4, "free", "r-1", {"row": 1, "block_ids": (0, 1, 4)}),
        (4, "finish", "r-1", {"reason": "length", "num_output_tokens": 3}),
    ]


def test_a_wait_is_told_once_with_the_numbers_it_began_with() -> None:
    scheduler = make_scheduler(num_blocks=4, max_num_batched_tokens=16)
    add_request(scheduler, "running", 5, max_tokens=8)
    run_step(scheduler)
    add_request(scheduler, "waiting", [2] * 12, max_tokens=2)
    for _ in range(5):
        run_step(scheduler)
    waits = [event for event in events(scheduler, WaitEvent) if event.request_id == "waiting"]
    assert [(event.step, event.reason, event.needed, event.free, event.behind) for event in waits] == [
        (1, "queue", 0, 0, "running"),
        (2, "blocks", 4, 2, "running"),
    ]
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
    simulation = Simulation(tiny_config(num_blocks=12, host_slots=4))
    for number in range(6):
        prompt = [1] * (3 + 2 * number)
        simulation.add(prompt, SamplingParams(n=1 + number % 2, max_tokens=20, ignore_eos=True))
    for _ in range(30):
        simulation.step()
    replay = JournalReplay(block_size=4, lenient=True)
    replay.salts = simulation.replay.salts
    replay.apply(simulation.engine.journal)
    scheduler = simulation.engine.scheduler
    assert replay.tables == {row: scheduler.tables.block_ids(row) for row in replay.running.values()}
    assert replay.running == {
        request.request_id: request.row for request in scheduler.live_requests() if request.row >= 0
    }
    states = [scheduler.allocator.state(block_id) for block_id in range(12)]
    assert [replay.state(block_id) for block_id in range(12)] == states
    assert len(replay.running) > 1
    happened = ("preempt", "hit", "share", "publish", "evict", "copy", "fork")
    assert all(replay.counts[kind] for kind in happened), replay.counts
