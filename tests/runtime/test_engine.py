"""The engine as a whole over the chain-hash model: faults that people reported of such servers, one by one.

The model's output changes with any slot read or written wrongly, and `Simulation` compares every output with the
same request alone, so a test here often has nothing to add but the situation.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fakes.chain_hash import COMMON, EOS, POISON, ChainHashModel
from fakes.engines import VirtualClock, tiny_config
from fakes.simulation import Simulation

from pageframe.runtime.engine import Engine
from pageframe.runtime.errors import EngineDeadError
from pageframe.runtime.request import RequestOutput, RequestStatus, SamplingParams


def params(max_tokens: int) -> SamplingParams:
    """Greedy, and no token ends it before `max_tokens`."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def add(simulation: Simulation, num_tokens: int, max_tokens: int, *, priority: int = 0, first: int = 1) -> str:
    request_id = simulation.add([first, *range(10, 9 + num_tokens)], params(max_tokens), priority=priority)
    assert request_id is not None
    return request_id


def status(simulation: Simulation, request_id: str) -> RequestStatus:
    request = simulation.engine.scheduler.find(request_id)
    assert request is not None
    return request.status


# ---- the oracle is sensitive --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("position", [0, 5, 8])
def test_the_model_notices_any_slot_that_is_not_what_was_written(layer: int, position: int) -> None:
    """What all tests here rest on: one wrong slot of one layer changes the next token."""
    simulation = Simulation()
    request_id = add(simulation, 8, 5)
    simulation.step()
    simulation.step()
    (row,) = simulation.replay.running.values()
    slot = simulation.replay.tables[row][position // 4] * 4 + position % 4
    assert simulation.model.pool[layer, slot] != POISON
    simulation.model.pool[layer, slot] = POISON
    with pytest.raises(AssertionError, match=f"{request_id} differs from its solo run"):
        simulation.step()


# ---- prompts and endings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 7, 8, 9, 11, 12, 13, 27, 28, 31])
@pytest.mark.parametrize("budget", [1, 3, 4, 8, 64])
def test_prompts_at_and_beside_block_boundaries_with_any_chunk(num_tokens: int, budget: int) -> None:
    """Fault 8, and chunks that end before, at and behind a block."""
    simulation = Simulation(tiny_config(max_num_requests=1, max_num_batched_tokens=budget))
    add(simulation, num_tokens, 32 - num_tokens)
    simulation.drain()
    assert simulation.counts["ended by length"] == 1
    assert simulation.counts["steps"] == -(-num_tokens // budget) + 31 - num_tokens


def test_an_end_token_ends_a_request_and_is_its_last_token() -> None:
    simulation = Simulation()
    outputs: list[RequestOutput] = []
    for seed in range(30):
        simulation.add([1, 2, seed + 10], SamplingParams(seed=seed, stop_token_ids=(COMMON,)))
    for _ in range(simulation.steps_to_drain()):
        outputs += simulation.step() if simulation.live else []
    simulation.check_idle()
    ends = {(output.token_ids[-1], output.finish_reason, output.stop_token_id) for output in outputs}
    assert {(EOS, "stop", -1), (COMMON, "stop", COMMON)} <= ends
    assert all(reason == ("stop" if token in (EOS, COMMON) else reason) for token, reason, _ in ends)


def test_end_tokens_are_not_drawn_before_min_tokens_and_never_end_where_ignored() -> None:
    simulation = Simulation(tiny_config(num_blocks=64))
    for seed in range(20):
        simulation.add([1], SamplingParams(seed=seed, min_tokens=15, max_tokens=60))
    simulation.drain()
    assert min(len(expected.token_ids) for expected in simulation.ended.values()) > 15
    assert simulation.counts["ended by stop"] > 5
    simulation.ended.clear()
    for seed in range(5):
        simulation.add([1], SamplingParams(seed=seed, max_tokens=60, ignore_eos=True))
    simulation.drain()
    assert [len(expected.token_ids) for expected in simulation.ended.values()] == [60] * 5


def test_a_request_never_gets_more_than_max_tokens_or_the_context() -> None:
    """Fault 28, inside the engine: exactly 1, some, and as many as there is room for."""
    simulation = Simulation()
    for max_tokens in (1, 2, 27):
        add(simulation, 5, max_tokens)
        simulation.drain()
    request_id = simulation.add(range(10, 15), SamplingParams(ignore_eos=True))
    simulation.drain()
    lengths = [len(expected.token_ids) for expected in simulation.ended.values()]
    assert (lengths, request_id) == ([1, 2, 27, 27], "r3")


# ---- seeds --------------------------------------------------------------------------------------------------------


def test_unseeded_requests_differ_and_repeat_with_the_engines_seed() -> None:
    def seeds(engine_seed: int) -> list[int]:
        model = ChainHashModel(num_blocks=8, block_size=4, max_num_requests=4, max_blocks=8)
        engine = Engine(tiny_config(), model, model, seed=engine_seed, clock=VirtualClock())
        for name in ("a", "b"):
            engine.add(name, [1, 2], SamplingParams())
        return [request.seed for request in engine.scheduler.live_requests()]

    assert seeds(1) == seeds(1)
    assert len({*seeds(1), *seeds(2)}) == 4


def test_a_seeded_request_draws_the_same_beside_others_and_after_preemption() -> None:
    """Faults 14 and 22: its draws depend on its seed and output index, not on the step or the row."""
    simulation = Simulation(tiny_config(num_blocks=8, max_num_requests=4))
    sampled = SamplingParams(seed=5, temperature=0.9, max_tokens=20, ignore_eos=True)
    add(simulation, 5, 20)
    request_id = simulation.add([1, 2, 3], sampled)
    add(simulation, 6, 20)
    simulation.drain()
    assert request_id is not None
    request = simulation.engine.scheduler.find(request_id)
    assert request is not None
    assert request.num_preemptions > 0


# ---- clients that go away -----------------------------------------------------------------------------------------


def start_queued(simulation: Simulation) -> str:
    add(simulation, 20, 5)
    add(simulation, 20, 5)
    simulation.step()
    return "r1"


def start_prefilling(simulation: Simulation) -> str:
    request_id = add(simulation, 20, 5)
    simulation.step()
    return request_id


def start_decoding(simulation: Simulation) -> str:
    request_id = add(simulation, 5, 9)
    add(simulation, 6, 9)
    for _ in range(4):
        simulation.step()
    return request_id


def start_preempted(simulation: Simulation) -> str:
    add(simulation, 10, 16)
    request_id = add(simulation, 10, 16, first=2)
    for _ in range(9):
        simulation.step()
    assert simulation.counts["preemptions"] == 1
    return request_id


STATES = [start_queued, start_prefilling, start_decoding, start_preempted]


@pytest.mark.parametrize("start", STATES)
@pytest.mark.parametrize("how", ["abort", "finish"])
def test_a_request_can_end_in_any_state_and_leaves_nothing(start: Callable[[Simulation], str], how: str) -> None:
    """Faults 2 and 11: its neighbours go on as if it had never been there."""
    simulation = Simulation()
    request_id = start(simulation)
    assert status(simulation, request_id) == ("waiting" if start in (start_queued, start_preempted) else "running")
    if how == "abort":
        simulation.abort(request_id)
        simulation.abort(request_id)
    else:
        simulation.finish(request_id, len(simulation.live[request_id].token_ids) // 2)
    simulation.drain()


def test_dropping_500_streams_after_one_chunk_leaks_nothing() -> None:
    """Fault 1; fault 42: each abort is counted."""
    simulation = Simulation()
    for number in range(500):
        request_id = add(simulation, 9, 10, first=number + 1000)
        simulation.step()
        simulation.abort(request_id)
    assert simulation.engine.scheduler.num_aborts == 500
    simulation.check_idle()
    add(simulation, 9, 10)
    simulation.drain()
    assert simulation.counts["ended by length"] == 1


def test_a_step_without_work_runs_no_model() -> None:
    """Fault 20: everything that was scheduled has gone."""
    simulation = Simulation()
    for _ in range(3):
        add(simulation, 5, 5)
    simulation.step()
    for request_id in sorted(simulation.live):
        simulation.abort(request_id)
    assert simulation.engine.step() == []
    assert simulation.model.num_forwards == 1
    assert not simulation.engine.has_work


# ---- blocks that change hands -------------------------------------------------------------------------------------


def test_a_prompt_gives_the_same_again_after_others_overwrote_its_blocks() -> None:
    """Fault 5."""
    simulation = Simulation()
    for first in (1, 2, 1, 1):
        add(simulation, 28, 4, first=first)
        simulation.drain()
    outputs = [expected.token_ids for expected in simulation.ended.values()]
    assert outputs[0] == outputs[2] == outputs[3] != outputs[1]


def test_equal_prompts_prefilled_together_stay_apart_when_one_is_cancelled() -> None:
    """Fault 6: a third takes the cancelled one's blocks while the other still runs."""
    simulation = Simulation(tiny_config(num_blocks=8, max_num_batched_tokens=16))
    first, second = add(simulation, 9, 8), add(simulation, 9, 8)
    simulation.step()
    simulation.abort(first)
    add(simulation, 12, 6, first=2)
    simulation.drain()
    assert second in simulation.ended
    assert simulation.counts["ended by length"] == 2


def test_cancelling_two_of_eight_equal_prompts_mid_prefill_leaves_the_others_right() -> None:
    """Fault 11."""
    simulation = Simulation(tiny_config(num_blocks=32, max_num_requests=8, max_model_len=32))
    ids = [add(simulation, 13, 6) for _ in range(8)]
    simulation.step()
    simulation.step()
    simulation.abort(ids[1])
    simulation.abort(ids[6])
    simulation.drain()
    assert simulation.counts["ended by length"] == 6


def test_an_urgent_request_takes_row_and_blocks_of_one_that_has_just_grown() -> None:
    """The victim's new block and the urgent one's are entries of one place in the table, in one step."""
    simulation = Simulation(tiny_config(num_blocks=4, max_num_requests=2, max_num_batched_tokens=16))
    add(simulation, 3, 9, priority=1)
    simulation.step()
    simulation.step()
    add(simulation, 10, 2)
    simulation.step()
    assert simulation.counts["preemptions"] == 1
    simulation.drain()


# ---- failures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("start", STATES)
def test_one_failed_forward_ends_its_own_requests_and_no_others(start: Callable[[Simulation], str], when: str) -> None:
    """Fault 40."""
    simulation = Simulation()
    start(simulation)
    waiting = [request_id for request_id in simulation.live if status(simulation, request_id) == "waiting"]
    outputs = simulation.step(fail=when)
    assert {output.finish_reason for output in outputs} == {"error"}
    assert all("cache was written" in output.error for output in outputs)
    assert simulation.engine.scheduler.allocator.num_used == 0
    assert set(simulation.live) == set(waiting)
    add(simulation, 7, 7)
    simulation.drain()
    assert simulation.counts["ended by length"] == len(waiting) + 1


def test_a_failed_step_on_a_lost_device_is_the_last() -> None:
    """Each later one would fail the same way, while all looks well."""
    simulation = Simulation()
    add(simulation, 7, 7)
    model = simulation.engine.runner
    assert isinstance(model, ChainHashModel)
    model.device_is_lost, model.fail_next = True, "before"
    with pytest.raises(EngineDeadError, match=r"^the device no longer works: .*the device is lost"):
        simulation.engine.step()
    assert simulation.engine.scheduler.allocator.num_used == 0


def test_a_running_request_without_tokens_in_the_failed_step_goes_on() -> None:
    """Its first blocks were announced in that step, and the device never heard of them."""
    simulation = Simulation(tiny_config(num_blocks=16, max_num_requests=3, max_num_batched_tokens=3))
    ids = [add(simulation, 10, 3) for _ in range(3)]
    outputs = simulation.step(fail="before")
    assert [output.request_id for output in outputs] == [ids[0]]
    assert [status(simulation, request_id) for request_id in ids[1:]] == ["running", "running"]
    simulation.drain()
    assert simulation.counts["ended by length"] == 2


def test_each_step_leaves_a_record() -> None:
    simulation = Simulation(tiny_config(num_blocks=16, max_num_requests=2, max_num_batched_tokens=8))
    add(simulation, 10, 2)
    add(simulation, 2, 2)
    simulation.drain()
    records = [
        (record.step, record.num_requests, record.prefill_tokens, record.decode_tokens, record.finished)
        for record in simulation.engine.steps
    ]
    assert records == [(1, 2, 8, 0, ()), (2, 2, 4, 1, ("r1",)), (3, 1, 0, 1, ("r0",))]
    assert {record.token_budget for record in simulation.engine.steps} == {8}


def test_a_refused_request_leaves_no_trace() -> None:
    """Fault 16: what can never fit is refused at once, and the queue behind it moves."""
    simulation = Simulation()
    assert simulation.add([1] * 32) is None
    assert simulation.add([1] * 30, params(3)) is None
    assert simulation.add([]) is None
    assert not simulation.engine.has_work
    assert len(simulation.engine.journal) == 0
    add(simulation, 31, 1)
    simulation.drain()
