"""The default model against transformers, teacher-forced, however its requests are scheduled."""

from __future__ import annotations

from functools import cache

import pytest

from pageframe.benchmarks.experiments import exactness

NUM_PROMPTS = 8
NUM_TOKENS = 64


@cache
def prompts() -> list[list[int]]:
    return exactness.prompt_token_ids(NUM_PROMPTS)


@pytest.mark.parametrize("way", exactness.SCHEDULING_WAYS, ids=lambda way: way.name.replace(",", "").replace(" ", "-"))
def test_every_token_is_the_oracles_maximum(way: exactness.Way) -> None:
    outcome = exactness.run_way(way, prompts(), NUM_TOKENS)
    assert [len(output) for output in outcome.outputs] == [NUM_TOKENS] * NUM_PROMPTS
    verdict = exactness.judge(exactness.load_oracle(), outcome.prompts, outcome.outputs)
    assert verdict.wrong == 0, f"{verdict.wrong} of {verdict.tokens} tokens are off by up to {verdict.worst_gap}"
    assert_it_happened(way, outcome)


def assert_it_happened(way: exactness.Way, outcome: exactness.Outcome) -> None:
    """What a way claims to show must have taken place."""
    if way.name == "alone":
        assert outcome.steps == NUM_PROMPTS * NUM_TOKENS
        assert outcome.mixed_steps == 0
    if way.name == "one batch":
        assert outcome.steps == NUM_TOKENS, "all requests should have shared every step"
    if way.name == "chunks of 32":
        assert outcome.mixed_steps > 0
        assert outcome.chunked_steps > 0
    if way.name == "tiny pool, poisoned":
        assert outcome.preemptions > 0


@pytest.mark.usefixtures("compiled_kernels")
def test_weights_as_the_file_stores_them_give_the_oracles_tokens_and_the_same_in_any_schedule() -> None:
    precision = exactness.PRECISIONS["file"]
    way = exactness.SCHEDULING_WAYS[-1]
    outcome = exactness.run_way(way, prompts(), NUM_TOKENS, precision)
    verdict = exactness.judge(exactness.load_oracle(), outcome.prompts, outcome.outputs, tolerance=precision.tolerance)
    assert verdict.wrong == 0, f"{verdict.wrong} of {verdict.tokens} tokens are off by up to {verdict.worst_gap}"
    assert_it_happened(way, outcome)
    alone = exactness.SoloAnswers([way], prompts(), NUM_TOKENS, precision)
    assert alone.num_different(outcome) == 0
    outcome.outputs[2][5] += 1
    assert alone.num_different(outcome) == 1


def test_a_wrong_token_is_noticed() -> None:
    """The judge itself: one token changed, one found."""
    (prompt, *_) = prompts()
    outcome = exactness.run_way(exactness.SCHEDULING_WAYS[0], [prompt], 4)
    output = list(outcome.outputs[0])
    output[2] = (output[2] + 1) % 49152
    assert exactness.judge(exactness.load_oracle(), [prompt], [output]).wrong >= 1
