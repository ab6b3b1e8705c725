"""How an engine is driven, and how the answers of two runs are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fakes.chain_hash import ChainHashModel
from fakes.engines import tiny_config

from pageframe.benchmarks.experiments import batching, batching_sizes, driver
from pageframe.benchmarks.experiments.batching_measures import TailWatch
from pageframe.benchmarks.experiments.driver import Agreement, Answer, Ask, OutOfTimeError, compare, serve
from pageframe.benchmarks.experiments.report import TimeBudget
from pageframe.benchmarks.experiments.sessions import Holder, synthetic_session, synthetic_sessions
from pageframe.benchmarks.experiments.ties import TIE_TOLERANCE
from pageframe.runtime.config import EngineConfig
from pageframe.runtime.engine import Engine
from pageframe.runtime.engine_builder import build_engine
from pageframe.runtime.errors import EngineError
from pageframe.runtime.model_runner import ModelRunner
from pageframe.runtime.sampler import Sampler


def chain_hash_engine(**changes: Any) -> Engine:
    """Its next token depends on every token before it, read back through the block tables."""
    settings = {"num_blocks": 64, "max_num_requests": 4, "max_num_batched_tokens": 64, "max_model_len": 60} | changes
    resolved = tiny_config(**settings)
    model = ChainHashModel(
        num_blocks=resolved.num_blocks,
        block_size=resolved.block_size,
        max_num_requests=resolved.max_num_requests,
        max_blocks=resolved.max_blocks,
    )
    return Engine(resolved, model, model, seed=0)


def plenty() -> TimeBudget:
    return TimeBudget(600)


def asks_of(*lengths: tuple[int, int]) -> list[Ask]:
    return [Ask(f"r{i}", [100 * i + j for j in range(prompt)], output) for i, (prompt, output) in enumerate(lengths)]


class Company:
    """Which requests ran together, step by step."""

    def __init__(self) -> None:
        self.steps: list[set[str]] = []

    def __call__(self, engine: Engine) -> None:
        self.steps.append({request.request_id for request in engine.scheduler.live_requests()})


# ---- driving -------------------------------------------------------------------------------------------------------


def test_whole_batches_admit_nobody_until_the_last_has_ended() -> None:
    asks = asks_of((3, 2), (3, 9), (3, 3), (3, 8), (3, 4))
    company = Company()
    answers = serve(chain_hash_engine(), asks, plenty(), batch_size=2, watch=company)
    batches = [{"r0", "r1"}, {"r2", "r3"}, {"r4"}]
    assert all(any(step <= batch for batch in batches) for step in company.steps)
    assert [len(answer.tokens) for answer in answers] == [2, 9, 3, 8, 4]
    # Each batch takes as many steps as its longest answer; the watch sees one step less of those that end with it.
    assert len(company.steps) == 9 + 8 + 4
    ends = {answer.ask.name: answer.times[-1] for answer in answers}
    starts = {answer.ask.name: answer.times[0] for answer in answers}
    assert max(ends["r0"], ends["r1"]) < min(starts["r2"], starts["r3"])


def test_by_iteration_a_request_joins_when_another_ends() -> None:
    asks = asks_of((3, 2), (3, 9), (3, 3), (3, 8), (3, 4))
    company = Company()
    engine = chain_hash_engine(max_num_requests=2, max_num_batched_tokens=64)
    answers = serve(engine, asks, plenty(), watch=company)
    assert len(company.steps) < 9 + 8 + 4
    by_request = serve(chain_hash_engine(), asks, plenty(), batch_size=2)
    assert compare(answers, by_request, engine) == Agreement(equal=5)


def test_a_request_comes_after_so_many_tokens() -> None:
    asks = [*asks_of((3, 10)), Ask("late", [7, 8], 1, after_tokens=4)]
    company = Company()
    serve(chain_hash_engine(), asks, plenty(), watch=company)
    together = [index for index, step in enumerate(company.steps) if "r0" in step]
    assert len(company.steps) == 10
    assert together == list(range(9))
    early = serve(chain_hash_engine(), asks, plenty())
    assert [answer.ask.name for answer in early] == ["r0", "late"]
    assert early[0].times[3] <= early[1].arrival <= early[1].times[0] <= early[0].times[4]


def test_a_request_that_waits_for_more_tokens_than_are_made_comes_at_last() -> None:
    asks = [*asks_of((3, 2)), Ask("late", [7, 8], 1, after_tokens=1000)]
    assert [len(answer.tokens) for answer in serve(chain_hash_engine(), asks, plenty())] == [2, 1]


def test_latency_counts_from_the_set_arrival() -> None:
    first, second = [Ask("a", [1], 3), Ask("b", [2], 2, arrival=0.05)]
    answers = serve(chain_hash_engine(), [second, first], plenty(), batch_size=1)
    assert [answer.arrival for answer in answers] == [0.0, 0.05]
    assert all(answer.first_token_seconds > 0 for answer in answers)


def test_a_budget_that_has_ended_ends_the_run() -> None:
    with pytest.raises(OutOfTimeError):
        serve(chain_hash_engine(), asks_of((3, 2)), TimeBudget(0))


def test_sessions_are_held_a_few_at_a_time_and_grow_by_their_answers() -> None:
    talks = [synthetic_session([1, 2], [[10 * i, 3], [4, 5]]) for i in range(1, 4)]
    holder = Holder(talks, answer_tokens=3, ignore_eos=True, longest=50)
    company = Company()
    answers = serve(chain_hash_engine(), holder.first(2), plenty(), follow=holder.follow, watch=company)
    assert max(len(step) for step in company.steps) == 2
    by_name = {answer.ask.name: answer for answer in answers}
    assert by_name.keys() == {f"session-{s}-turn-{t}" for s in range(3) for t in range(2)}
    for session in range(3):
        first, second = (by_name[f"session-{session}-turn-{turn}"] for turn in range(2))
        assert second.ask.prompt == [*first.ask.prompt, *first.tokens, 4, 5]
    assert holder.cut_short == 0


def test_a_session_that_outgrows_the_context_makes_room_for_the_next() -> None:
    talks = [
        synthetic_session([1], [[2] * 5, [3] * 50]),
        synthetic_session([1], [[2] * 80]),
        synthetic_session([1], [[4]]),
    ]
    holder = Holder(talks, answer_tokens=3, ignore_eos=True, longest=50)
    answers = serve(chain_hash_engine(), holder.first(1), plenty(), follow=holder.follow)
    assert [answer.ask.name for answer in answers] == ["session-0-turn-0", "session-2-turn-0"]
    assert holder.cut_short == 2


def test_drawn_sessions_share_one_system_prompt() -> None:
    make: Callable[[int], Any] = lambda seed: [  # noqa: E731
        next(talk)
        for talk in synthetic_sessions(3, turns=2, system_tokens=20, user_tokens=5, vocab_size=1000, seed=seed)
    ]
    prompts = make(1)
    assert prompts == make(1) != make(2)
    assert {tuple(prompt[:20]) for prompt in prompts} == {tuple(prompts[0][:20])}
    assert len({tuple(prompt) for prompt in prompts}) == 3
    assert all(20 + 3 <= len(prompt) <= 20 + 7 for prompt in prompts)


def test_drawn_lengths_do_not_end_with_their_blocks() -> None:
    talks = synthetic_sessions(8, turns=2, system_tokens=21, user_tokens=8, vocab_size=1000, seed=1)
    holder = Holder(talks, answer_tokens=4, ignore_eos=True, longest=54, seed=1)
    answers = serve(chain_hash_engine(), holder.first(4), plenty(), follow=holder.follow)
    assert {len(answer.tokens) for answer in answers} == {2, 3, 4, 5, 6}
    assert len({len(answer.ask.prompt) % 16 for answer in answers}) > 5
    again = Holder(
        synthetic_sessions(8, turns=2, system_tokens=21, user_tokens=8, vocab_size=1000, seed=1),
        answer_tokens=4,
        ignore_eos=True,
        longest=54,
        seed=1,
    )
    # Another number at once, another order of the turns: the same lengths.
    theirs = serve(chain_hash_engine(), again.first(1), plenty(), follow=again.follow)
    assert compare(theirs, answers, chain_hash_engine()) == Agreement(equal=16)
    sizes = batching_sizes.Sizes()
    assert sizes.system_tokens % batching.BLOCK_SIZE
    assert batching_sizes.QUICK.system_tokens % batching.BLOCK_SIZE


def test_tails_are_the_slots_that_no_token_has() -> None:
    tails = TailWatch()
    engine = chain_hash_engine(block_size=8, num_blocks=8)
    serve(engine, asks_of((6, 5)), plenty(), watch=tails)
    # After a step the request has 7, 8, 9, 10 tokens; it enters with blocks for 7, and gets one more for its ninth. The
    # fifth token ends it.
    assert (tails.taken, tails.wasted) == (8 + 8 + 8 + 16, 1 + 0 + 0 + 6)


# ---- comparing -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Engine:
    """One whose bits may depend on what else is in a step."""
    return build_engine(EngineConfig(backend="reference", num_blocks=16, max_model_len=128, max_num_requests=4))


def test_answers_that_part_are_told_apart_from_ties(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    asks = [Ask("a", [50, 60, 70], 4), Ask("b", [80, 90], 4)]
    answers = serve(engine, asks, plenty())

    def changed(index: int, token: int) -> list[Answer]:
        tokens = list(answers[0].tokens)
        tokens[index] = token
        return [Answer(asks[0], 0.0, tokens, answers[0].times), answers[1]]

    assert compare(answers, changed(2, answers[0].tokens[2]), engine) == Agreement(equal=2)
    assert compare(answers, changed(2, 5), engine) == Agreement(equal=1, different=1)
    prompt = [*asks[0].prompt, *answers[0].tokens[:2]]
    engine.add("top", prompt, driver.SamplingParams(temperature=0, max_tokens=1, logprobs=2))
    (output,) = engine.step()
    best, second = output.logprobs[0].top_ids
    assert best == answers[0].tokens[2]
    gap = output.logprobs[0].top_logprobs[0] - output.logprobs[0].top_logprobs[1]
    monkeypatch.setitem(TIE_TOLERANCE, "bf16", gap * 1.01)
    assert compare(answers, changed(2, second), engine) == Agreement(equal=1, ties=1)
    monkeypatch.setitem(TIE_TOLERANCE, "bf16", gap * 0.5)
    monkeypatch.setattr(driver, "spacing", lambda value, dtype: gap * 1.01)
    assert compare(answers, changed(2, second), engine) == Agreement(equal=1, one_step=1)
    monkeypatch.setattr(driver, "spacing", lambda value, dtype: gap * 0.99)
    assert compare(answers, changed(2, second), engine) == Agreement(equal=1, different=1)
    shorter = [Answer(asks[0], 0.0, answers[0].tokens[:3], answers[0].times[:3]), answers[1]]
    assert compare(answers, shorter, engine) == Agreement(equal=1, different=1)
    other_prompt = [Answer(Ask("a", [1, 2, 3], 4), 0.0, [1], [1.0]), answers[1]]
    assert compare(answers, other_prompt, engine) == Agreement(equal=1, skipped=1)
    assert compare(answers, answers[1:], engine) == Agreement(equal=1, skipped=1)
    assert compare(answers[:1], answers[1:], engine) == Agreement(skipped=2)


@pytest.mark.parametrize(
    ("compute", "expected"), [("bfloat16", Agreement(one_step=1)), ("float32", Agreement(different=1))]
)
def test_neighbours_are_those_of_the_arithmetic_not_of_the_stored_type(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, compute: str, expected: Agreement
) -> None:
    assert engine.resolved.dtype == "bf16"
    monkeypatch.setattr(driver, "_logits", lambda *args: (20.0, 19.9))  # 0.1 apart: past a tie, within bf16's 0.125
    assert isinstance(engine.runner, ModelRunner)
    resolved = replace(engine.resolved, compute_dtype=compute)
    machine = Engine(resolved, engine.runner, Sampler(engine.runner.logits))
    ask = Ask("a", [1, 2], 1)
    assert compare([Answer(ask, 0.0, [3], [1.0])], [Answer(ask, 0.0, [4], [1.0])], machine) == expected


def test_where_bits_depend_on_a_request_alone_there_is_no_tie(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(engine.runner, ModelRunner)
    resolved = replace(engine.resolved, compute_dtype="float32", batch_invariant=True)
    compiled = Engine(resolved, engine.runner, Sampler(engine.runner.logits))
    ask = Ask("a", [1, 2], 1)
    answers = [Answer(ask, 0.0, [3], [1.0])], [Answer(ask, 0.0, [4], [1.0])]
    monkeypatch.setattr(driver, "_logits", lambda *args: (20.0, 19.999))  # by far a tie elsewhere
    assert compare(*answers, compiled) == Agreement(different=1)
    assert compare(*answers, engine) == Agreement(ties=1)


def test_a_forward_pass_that_fails_while_a_tie_is_looked_at_is_named(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: ModelRunner, batch: object) -> object:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(ModelRunner, "forward", fail)
    ask = Ask("a", [1, 2], 1)
    with pytest.raises(EngineError, match=r"two answers that part were looked at: .*the device is gone"):
        compare([Answer(ask, 0.0, [3], [1.0])], [Answer(ask, 0.0, [4], [1.0])], engine)


def test_the_next_number_of_a_type() -> None:
    assert [driver.spacing(value, "bfloat16") for value in (16.0, 17.5, -31.9, 32.0, 1.0)] == [0.125] * 3 + [
        0.25,
        2**-7,
    ]
    assert driver.spacing(20.0, "float32") == 2**-19
