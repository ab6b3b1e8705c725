"""Requests with a deadline: whatever they wait for, they end when it has come, and give back what they hold."""

from __future__ import annotations

from fakes.chain_hash import ChainHashModel
from fakes.engines import VirtualClock, tiny_config

from pageframe.runtime.engine import Engine
from pageframe.runtime.journal import FinishEvent
from pageframe.runtime.request import RequestOutput, RequestStatus, SamplingParams


def make_engine(**settings: int) -> tuple[Engine, VirtualClock]:
    resolved, clock = tiny_config(**settings), VirtualClock()  # type: ignore[arg-type]
    model = ChainHashModel(
        num_blocks=resolved.num_blocks,
        block_size=resolved.block_size,
        max_num_requests=resolved.max_num_requests,
        max_blocks=resolved.max_blocks,
    )
    return Engine(resolved, model, model, seed=0, clock=clock), clock


def params(seconds: float | None, *, n: int = 1) -> SamplingParams:
    return SamplingParams(temperature=0, n=n, max_tokens=12, ignore_eos=True, timeout_seconds=seconds)


def ends(outputs: list[RequestOutput]) -> dict[str, str]:
    return {output.request_id: output.finish_reason for output in outputs if output.finish_reason}


def drain(engine: Engine) -> dict[str, str]:
    outputs = []
    while engine.has_work:
        outputs += engine.step()
        engine.scheduler.check_invariants()
    return ends(outputs)


def test_a_running_and_a_waiting_request_end_at_their_deadlines_and_the_others_go_on() -> None:
    engine, clock = make_engine(max_num_requests=2)
    engine.add("first", [1, 2, 3], params(5.0))
    engine.add("patient", [4, 5, 6], params(60.0))
    engine.add("waiting", [7, 8, 9], params(5.5))
    assert ends(engine.step()) == {}
    clock.advance(4.99)
    assert ends(engine.step()) == {}
    clock.advance(0.01)
    outputs = engine.step()
    assert ends(outputs) == {"first": "timeout"}
    assert next(output for output in outputs if output.finish_reason).token_ids == []
    assert engine.steps[-1].finished == ("first",)
    found = engine.scheduler.find("waiting")
    assert found is not None
    assert found.status is RequestStatus.RUNNING, "the row was free in the very step"
    clock.advance(1)
    assert ends(engine.step()) == {"waiting": "timeout"}
    assert drain(engine) == {"patient": "length"}
    reasons = {event.request_id: event.reason for event in engine.journal if isinstance(event, FinishEvent)}
    assert reasons == {"first": "timeout", "waiting": "timeout", "patient": "length"}


def test_all_choices_end_also_those_that_wait_for_their_first() -> None:
    engine, clock = make_engine(max_num_batched_tokens=4)
    engine.add("many", list(range(1, 12)), params(1.0, n=3))
    engine.step()
    assert engine.scheduler.num_following == 2
    clock.advance(1.5)
    assert ends(engine.step()) == {f"many-{index}": "timeout" for index in range(3)}
    assert not engine.has_work
    assert engine.scheduler.allocator.num_used == 0
    assert engine.scheduler.num_waits["queue"] == 1, "none was to lead in the first one's place"


def test_a_deadline_counts_from_the_arrival() -> None:
    engine, clock = make_engine()
    arrived = engine.now()
    clock.advance(2)
    engine.add("late", [1, 2, 3], params(1.0), arrival_time=arrived)
    assert ends(engine.step()) == {"late": "timeout"}
    assert not engine.has_work


def test_deadlines_of_requests_that_have_ended_stop_nobody() -> None:
    engine, clock = make_engine()
    engine.add("ended", [1, 2, 3], params(1.0))
    engine.add("other", [1, 2, 3], params(None))
    engine.step()
    engine.abort("ended")
    clock.advance(2)
    assert drain(engine) == {"other": "length"}
