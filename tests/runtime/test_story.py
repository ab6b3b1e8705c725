"""A request's story: by hand, and every wait and number in it as the simulation saw them."""

from __future__ import annotations

import itertools
import random
import re

import pytest
from fakes.engines import tiny_config
from fakes.simulation import Simulation
from fakes.workload import Workload, random_config

from pageframe.runtime.errors import RequestNotFoundError
from pageframe.runtime.inspection import inspect
from pageframe.runtime.journal import Event, FreeEvent, WaitEvent
from pageframe.runtime.request import SamplingParams
from pageframe.runtime.story import tell


def texts(simulation: Simulation, request_id: str) -> list[str]:
    return [sentence["text"] for sentence in inspect(simulation.engine, "story", request_id)["sentences"]]


def test_a_whole_story() -> None:
    simulation = Simulation(tiny_config(num_blocks=8, block_size=4, max_num_batched_tokens=4))
    simulation.add([1] * 9, SamplingParams(max_tokens=4, ignore_eos=True), tenant="ann", priority=2)
    simulation.drain()
    assert texts(simulation, "r0") == [
        "It arrived with 9 prompt tokens and may grow to 13 tokens, for tenant ann, with priority 2.",
        "It waited 10.0 ms, until step 1, for the next step to begin.",
        "It entered in step 1, in row 0, with 9 tokens of context.",
        "The prefix lookup ended after 0 blocks: no computed prefix goes on with its tokens.",
        "It got 3 blocks (0, 1, 2).",
        "8 tokens of its context were computed in 2 chunks, in steps 1 to 2.",
        "2 full blocks can be found by others from then on, in steps 1 to 2.",
        "Its first token came in step 3, 30.0 ms after its arrival.",
        "1 full block can be found by others from then on.",
        "It gave its 3 blocks and its row back in step 6.",
        "It ended in step 6, 60.0 ms after its arrival: it reached the most tokens it may have (length), "
        "with 4 output tokens.",
    ]


def test_a_wait_for_blocks_and_a_hit_in_words() -> None:
    simulation = Simulation(tiny_config(num_blocks=6, block_size=4, max_num_batched_tokens=32))
    simulation.add([1] * 13, SamplingParams(max_tokens=6, ignore_eos=True))
    simulation.step()
    simulation.add([1] * 8 + [2] * 8, SamplingParams(max_tokens=2, ignore_eos=True), tenant="other")
    simulation.step()
    waits = "for blocks: it needs 5, 2 can be had, behind r0"
    assert inspect(simulation.engine, "request", "r1")["wait"] == waits
    assert texts(simulation, "r1")[-1] == f"It waits {waits}."
    simulation.drain()
    story = " ".join(texts(simulation, "r1"))
    assert re.search(
        r"It waited \d+\.\d ms, until step \d+, for blocks: it needed 5, 2 could be had, behind r0\.", story
    )
    assert "was computed for a tenant or a cache_salt that it may not share with" in story
    simulation.add([1] * 8 + [2] * 8, SamplingParams(max_tokens=2), tenant="other")
    simulation.drain()
    assert "Its first 12 tokens (3 blocks) were found computed." in texts(simulation, "r2")


def test_the_wait_for_a_grammar_is_told_from_the_arrival_on() -> None:
    simulation = Simulation(tiny_config(num_blocks=16))
    now = simulation.clock.now
    simulation.engine.add("r0", [1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True), arrival_time=now - 2.5)
    while simulation.engine.has_work:
        simulation.engine.step()
        simulation.clock.advance(0.5)
    told = texts(simulation, "r0")
    assert told[0].endswith("It waited 2.50 s for its grammar to be compiled.")
    timings = inspect(simulation.engine, "request", "r0")["timings"]
    first = timings["first_token"] - timings["arrived"]
    assert f"Its first token came in step 1, {first:.2f} s after its arrival." in told


def test_both_sides_of_a_preemption_are_told() -> None:
    simulation = Simulation(tiny_config(num_blocks=4, block_size=4, max_num_requests=2, max_num_batched_tokens=16))
    simulation.add([1] * 7, SamplingParams(max_tokens=8, ignore_eos=True))
    simulation.add([2] * 6, SamplingParams(max_tokens=4, ignore_eos=True))
    simulation.drain()
    assert simulation.counts["preemptions"] == 1
    assert "it was preempted for r0; it had computed 7 tokens" in " ".join(texts(simulation, "r1"))
    assert any(
        text.startswith("It stands before r1, which was preempted for it in step") for text in texts(simulation, "r0")
    )


def test_a_story_whose_beginning_the_journal_has_dropped_says_so() -> None:
    simulation = Simulation(tiny_config(num_blocks=64, max_model_len=256))
    simulation.add([1] * 9, SamplingParams(max_tokens=2))
    simulation.drain()
    assert inspect(simulation.engine, "story", "r0")["complete"] is True
    capacity = 1024
    for number in range(400):
        if simulation.engine.journal.written > capacity + 4:
            break
        simulation.add([number + 2] * 5, SamplingParams(max_tokens=1))
        simulation.step()
    answer = inspect(simulation.engine, "story", "r0")
    assert answer["complete"] is False
    assert answer["sentences"][0]["kind"] != "arrive"


def test_an_unknown_request_has_no_story() -> None:
    simulation = Simulation()
    assert tell(simulation.engine.journal, "nobody") == []
    with pytest.raises(RequestNotFoundError):
        inspect(simulation.engine, "story", "nobody")


@pytest.mark.parametrize("seed", range(4))
def test_every_wait_is_named_with_the_numbers_of_the_time(seed: int) -> None:
    """The numbers are counted here from what the simulation's replay held when the wait began."""
    rng = random.Random(seed)
    simulation = Simulation(random_config(rng))
    events: list[Event] = []
    read, expected, known_free = 0, {}, {}

    def look(num_steps: int) -> None:
        nonlocal read
        new = simulation.engine.journal.since(read)
        read = simulation.engine.journal.written
        events.extend(new)

    Workload(simulation, rng, on_step=look).run(200)
    look(0)
    waits = [event for event in events if isinstance(event, WaitEvent)]
    expected = {(event.request_id, event.step, event.reason): event for event in waits}
    assert {event.reason for event in waits} >= {"queue", "blocks"}
    known_free = states_before(events, simulation.resolved.num_blocks)
    for request_id in {event.request_id for event in waits}:
        told = [sentence for sentence in tell(events, request_id) if sentence.kind == "wait"]
        # One that took another form within the same moment is not told.
        own = [event for event in waits if event.request_id == request_id and not changed_at_once(event, events)]
        assert [sentence.step for sentence in told] == [event.step for event in own]
        for sentence, event in zip(told, own, strict=True):
            if event.reason == "blocks":
                assert event.free == known_free[id(event)]
                assert re.search(rf"need(s|ed) {event.needed}, {event.free} (can|could) be had", sentence.text)
                assert event.needed > event.free
            if event.behind:
                assert event.behind in sentence.text
    assert len(expected) > 20


def changed_at_once(wait: WaitEvent, events: list[Event]) -> bool:
    later = events[next(index for index, event in enumerate(events) if event is wait) + 1 :]
    kinds = ("wait", "admit", "chunk", "fork", "finish", "preempt")
    end = next((event for event in later if event.request_id == wait.request_id and event.kind in kinds), None)
    return end is not None and end.time == wait.time


def states_before(events: list[Event], num_blocks: int) -> dict[int, int]:
    """By identity of each wait for blocks: free and cached blocks when it began, rebuilt from the events alone."""
    from pageframe.runtime.journal_state import JournalState

    state, found = JournalState(), {}
    for event in events:
        if isinstance(event, WaitEvent) and event.reason == "blocks":
            found[id(event)] = sum(state.state(block_id) in ("free", "cached") for block_id in range(num_blocks))
        state.apply((event,))
    assert any(isinstance(event, FreeEvent) for event in events)
    return found


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_the_blocks_a_request_waits_for_are_those_of_its_prompt_and_one_token(prefix_cache: bool) -> None:
    """By what the requests were added with: without shared prefixes all of them, else no more."""
    simulation = Simulation(tiny_config(num_blocks=8, block_size=4, max_num_requests=4, prefix_cache=prefix_cache))
    rng, prompts = random.Random(5), {}
    for number in range(40):
        prompts[f"r{number}"] = [rng.randrange(1, 3)] * rng.randint(5, 24)
        simulation.add(prompts[f"r{number}"], SamplingParams(max_tokens=4, ignore_eos=True))
        simulation.step()
    simulation.drain()
    told = 0
    for request_id, prompt in prompts.items():
        events = [event for event in simulation.engine.journal if event.request_id == request_id]
        fresh = itertools.takewhile(lambda event: event.kind != "admit", events)
        for event in fresh:
            if isinstance(event, WaitEvent) and event.reason == "blocks":
                all_blocks = -(-(len(prompt) + 1) // 4)
                assert event.needed <= all_blocks if prefix_cache else event.needed == all_blocks
                told += any(
                    f"needed {event.needed}, {event.free} could be had" in text
                    for text in texts(simulation, request_id)
                )
    assert told > 5
