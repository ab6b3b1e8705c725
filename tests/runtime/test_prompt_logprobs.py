"""Logprobs of a prompt: complete and in order, however its prompt is cut, preempted or shared."""

from __future__ import annotations

import os
import random
import sys

import numpy as np
import pytest
import torch
from fakes.engines import tiny_config
from fakes.simulation import Simulation

from pageframe.runtime import LLM, SamplingParams
from pageframe.runtime import sampler as sampler_module
from pageframe.runtime.journal import ChunkEvent
from pageframe.runtime.sampler import Sampler
from pageframe.runtime.step_plan import ScoredTokens

SEED = int(os.environ.get("PAGEFRAME_TEST_SEED", "20240607"))


def params(**fields: object) -> SamplingParams:
    given = {"temperature": 0, "max_tokens": 3, "ignore_eos": True, "prompt_logprobs": 2} | fields
    return SamplingParams(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", [1, 3, 8, 64])
@pytest.mark.parametrize("num_tokens", [1, 2, 4, 5, 13])
def test_any_chunks_give_all_of_them(num_tokens: int, budget: int) -> None:
    """`Simulation` compares them with the prompt alone; of one token there are none."""
    simulation = Simulation(tiny_config(max_num_requests=1, max_num_batched_tokens=budget))
    simulation.add(list(range(10, 10 + num_tokens)), params())
    simulation.drain()
    assert simulation.counts["scored prompts"] == (num_tokens > 1)


def test_they_are_computed_though_the_prompt_is_cached_and_others_may_use_it_then() -> None:
    simulation = Simulation(tiny_config(num_blocks=16))
    prompt = list(range(10, 23))
    for fields in ({"prompt_logprobs": None}, {}, {"prompt_logprobs": None}):
        request_id = simulation.add(prompt, params(**fields))
        simulation.drain()
        assert request_id is not None
        request = simulation.engine.scheduler.find(request_id)
        assert request is not None
        assert (request.miss_reason == "logprobs") == (fields == {})
        assert request.num_cached_tokens == (12 if request_id == "r2" else 0)
    assert simulation.counts["scored prompts"] == 1


def test_random_requests_in_a_small_pool_get_theirs() -> None:
    """Preempted in the middle of their prompts, forked, mixed with others; a leader that is aborted leaves them to its
    heir."""
    sys.stdout.write(f"repeat with PAGEFRAME_TEST_SEED={SEED}\n")
    rng = random.Random(SEED)
    simulation = Simulation(tiny_config(num_blocks=8, max_num_requests=4, max_num_batched_tokens=6))
    for _ in range(60):
        scored = rng.random() < 0.6
        simulation.add(
            [rng.randint(1, 2) for _ in range(rng.randint(1, 18))],
            params(prompt_logprobs=rng.choice([0, 3]) if scored else None, n=rng.choice([1, 1, 3]), max_tokens=10),
            priority=rng.randint(0, 2),
        )
        for _ in range(rng.randint(0, 3)):
            simulation.step()
        if simulation.live and rng.random() < 0.2:
            simulation.abort(rng.choice(sorted(simulation.live)))
    simulation.drain()
    assert simulation.counts["scored prompts"] > 20
    assert simulation.counts["preemptions"] > 5
    assert not simulation.engine.scheduler.rows.scored


def test_a_preempted_prompt_is_not_scored_twice() -> None:
    simulation = Simulation(tiny_config(num_blocks=8, max_num_batched_tokens=8))
    late = simulation.add(list(range(10, 30)), params(), priority=1)
    simulation.step()
    assert late is not None
    request = simulation.engine.scheduler.find(late)
    assert request is not None
    assert len(request.prompt_logprobs) == 4, "a scored token counts twice"
    simulation.add(list(range(40, 60)), params(), priority=0)
    simulation.drain()
    assert request.num_preemptions == 1
    assert simulation.counts["scored prompts"] == 2


def test_scored_tokens_count_in_the_budget_of_the_step() -> None:
    """Twice, so that they delay those who decode no longer than a chunk of the same budget; what was scored before a
    preemption counts once, and so do the tokens of others."""
    simulation = Simulation(tiny_config(num_blocks=40, max_num_batched_tokens=16))
    scored = simulation.add(list(range(10, 50)), params(max_tokens=10), priority=1)
    assert scored is not None

    def chunks() -> dict[str, int]:
        simulation.step()
        events = [event for event in simulation.engine.journal if event.step == simulation.engine.scheduler.step]
        return {event.request_id: event.num_tokens for event in events if isinstance(event, ChunkEvent)}

    assert chunks() == {scored: 8}
    plain = simulation.add(list(range(60, 150)), params(max_tokens=2, prompt_logprobs=None))
    assert chunks() == {plain: 8, scored: 4}
    assert chunks() == {plain: 8, scored: 4}
    simulation.add(list(range(160, 220)), params(max_tokens=1, prompt_logprobs=None))
    assert scored not in chunks(), "it was meant to be preempted"
    request = simulation.engine.scheduler.find(scored)
    assert request is not None
    assert (request.num_preemptions, len(request.prompt_logprobs)) == (1, 16)
    found = []
    while simulation.live:
        found.append(chunks().get(scored, 0))
    assert [count for count in found if count] == [10, 10, 8, 8, 4], "16 of the first 20 were known"
    assert simulation.counts["scored prompts"] == 1


def test_a_choice_that_forked_and_waits_finds_the_prompt_its_leader_scored() -> None:
    simulation = Simulation(tiny_config(num_blocks=16, max_num_requests=2, max_num_batched_tokens=16))
    simulation.add(list(range(40, 45)), params(max_tokens=6, prompt_logprobs=None))
    simulation.step()
    simulation.add(list(range(10, 23)), params(n=2, max_tokens=12), request_id="forks")
    simulation.drain()
    follower = simulation.engine.scheduler.find("forks-1")
    assert follower is not None
    assert any(wait.reason in ("queue", "rows") for wait in follower.waits), "it was meant to find no row"
    assert follower.miss_reason != "logprobs"
    assert simulation.counts["scored prompts"] == 1


def test_logits_are_made_in_slices() -> None:
    sizes = []

    def make_logits(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return hidden

    count = 2 * sampler_module._SCORED_AT_ONCE + 5
    hidden = torch.randn(count, 11, generator=torch.Generator().manual_seed(SEED))
    token_ids = np.arange(count, dtype=np.int64) % 11
    scored = ScoredTokens(np.arange(count), token_ids, np.full(count, 3, np.int32), ((4, 100), (1, count - 100)))
    found = Sampler(make_logits).score(hidden, scored)
    assert max(sizes) == sampler_module._SCORED_AT_ONCE
    assert {place: len(logprobs) for place, logprobs in found.items()} == {4: 100, 1: count - 100}
    expected = hidden.double().log_softmax(1)
    for row, logprobs in enumerate([*found[4], *found[1]]):
        assert logprobs.logprob == pytest.approx(float(expected[row, token_ids[row]]), abs=1e-6)
        assert logprobs.top_ids == expected[row].argsort(descending=True)[:3].tolist()


def test_logprobs_made_where_the_logits_are_equal_those_of_the_host() -> None:
    from pageframe.runtime.device_logits import logprobs_of

    rows = np.random.default_rng(SEED).choice([-3.0, 0.0, 0.5, 2.0], (12, 40)).astype(np.float32)
    rows[0], rows[1, 3], rows[2, 4] = -np.inf, np.nan, np.inf
    logits, token_ids = torch.from_numpy(rows), np.arange(12, dtype=np.int64)
    num_top = np.arange(12, dtype=np.int32) * 4  # more than there are, too
    hosts = Sampler(lambda hidden: hidden).score(logits, ScoredTokens(token_ids, token_ids, num_top, ((0, 12),)))[0]
    for here, host in zip(logprobs_of(logits, token_ids, num_top), hosts, strict=True):
        assert here.top_ids == host.top_ids, "ties go to the lower id"
        assert here.logprob == pytest.approx(host.logprob, abs=1e-5)
        assert here.top_logprobs == pytest.approx(host.top_logprobs, abs=1e-5)


def test_the_default_model_scores_a_prompt_as_it_would_go_on() -> None:
    """The scores of a token are those of what comes behind the prompt before it."""
    llm = LLM(num_blocks=16, block_size=4, max_num_batched_tokens=5, show_progress=False, max_num_requests=4)
    text = "The capital of France is Paris."
    greedy = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
    (result,) = llm.generate(text, SamplingParams(temperature=0, max_tokens=2, n=2, prompt_logprobs=20, logprobs=0))
    ids, scores = result.prompt_token_ids, result.prompt_logprobs
    assert scores is not None
    assert len(scores) == len(ids) - 1 >= 5
    prefixes = [ids[: end + 1] for end in range(len(scores))]
    for token_id, score, alone in zip(ids[1:], scores, llm.generate(prefixes, greedy), strict=True):
        (choice,) = alone.outputs
        assert choice.logprobs is not None
        likeliest = choice.logprobs[0]
        assert score.top_ids[:5] == likeliest.top_ids[:5]
        assert score.top_logprobs == pytest.approx(likeliest.top_logprobs, abs=1e-3)
        if token_id in likeliest.top_ids:
            place = likeliest.top_ids.index(token_id)
            assert score.logprob == pytest.approx(likeliest.top_logprobs[place], abs=1e-3)
