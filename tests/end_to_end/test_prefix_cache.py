"""The default model against transformers, teacher-forced, where requests share blocks: found, forked, copied back.

All memory that nobody wrote is NaN, so a block that is shared, copied or handed out wrongly shows.
"""

from __future__ import annotations

from functools import cache

from pageframe.benchmarks.experiments import exactness

NUM_PROMPTS = 6
#: More than a block, so that answers are published and small pools overflow.
NUM_TOKENS = 24
BLOCK_SIZE = 16

WAYS = {way.name: way for way in exactness.SHARING_WAYS}


@cache
def prompts() -> list[list[int]]:
    return exactness.prompt_token_ids(NUM_PROMPTS)


def answer_all(name: str) -> exactness.Outcome:
    """One way's answers, each token of which has been found to be the oracle's choice."""
    way = WAYS[name]
    outcome = exactness.run_way(way, prompts(), NUM_TOKENS)
    assert [len(output) for output in outcome.outputs] == [NUM_TOKENS] * (NUM_PROMPTS * way.rounds * way.choices)
    verdict = exactness.judge(exactness.load_oracle(), outcome.prompts, outcome.outputs, outcome.draws)
    assert verdict.wrong == 0, f"{verdict.wrong} of {verdict.tokens} tokens are off by up to {verdict.worst_gap}"
    return outcome


def full_blocks(num_tokens: int) -> int:
    """Tokens of a prompt that can be found: full blocks, without the last token, which must be computed."""
    return (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_what_is_found_gives_the_same_tokens() -> None:
    outcome = answer_all("prefix hits")
    first_round, second_round = outcome.prompts[:NUM_PROMPTS], outcome.prompts[NUM_PROMPTS:]
    prefix = full_blocks(len(exactness.shared_prefix()))
    at_once = WAYS["prefix hits"].settings["max_num_requests"]
    shared = prefix * len(first_round[at_once:])
    assert outcome.hit_tokens >= shared + sum(full_blocks(len(prompt)) for prompt in second_round)


def test_forked_choices_go_on_as_if_alone() -> None:
    outcome = answer_all("forks")
    assert outcome.forks == 2 * NUM_PROMPTS
    assert outcome.copies["fork"] > 0
    assert sum(draw.temperature > 0 for draw in outcome.draws) == NUM_PROMPTS // 2 * 3
    seeded = [tuple(ids) for ids, draw in zip(outcome.outputs, outcome.draws, strict=True) if draw.temperature > 0]
    assert len(set(seeded)) == len(seeded), "choices of one request drew the same answer"


def test_blocks_copied_back_from_host_memory_hold_what_was_evicted() -> None:
    outcome = answer_all("host copies")
    assert outcome.copies["to_device"] > 0
    assert outcome.hit_tokens > 0


def test_without_a_prefix_cache_all_is_computed_again() -> None:
    outcome = answer_all("no prefix cache")
    assert outcome.preemptions > 0
    assert outcome.hit_tokens == 0


def test_a_draw_that_is_not_the_seeds_is_noticed() -> None:
    """The judge itself: the same tokens under another seed are wrong."""
    (prompt, *_) = prompts()
    way = exactness.Way("seeded", {"max_num_requests": 3, "num_blocks": 16, "max_model_len": 256}, choices=3)
    outcome = exactness.run_way(way, [prompt, prompt], 8)
    assert exactness.judge(exactness.load_oracle(), outcome.prompts, outcome.outputs, outcome.draws).wrong == 0
    other = [exactness.Draw(draw.temperature, draw.seed + 1) for draw in outcome.draws]
    assert exactness.judge(exactness.load_oracle(), outcome.prompts, outcome.outputs, other).wrong > 0
