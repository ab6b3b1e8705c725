"""The door: what is let in, and that a refusal names the field, the value and the limit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from fakes.chain_hash import VOCAB_SIZE
from fakes.engines import tiny_config, tiny_model

from pageframe.runtime.admission import Door, max_total_tokens
from pageframe.runtime.errors import InvalidRequestError
from pageframe.runtime.request import MAX_TOTAL_TOKENS, SamplingParams

RESOLVED = tiny_config(num_blocks=8, block_size=4)  # max_model_len 32


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "total"),
    [(1, None, 32), (31, None, 32), (10, 1, 11), (10, 22, 32), (31, 1, 32)],
)
def test_a_request_that_fits_may_reach_prompt_plus_max_tokens(
    num_prompt_tokens: int, max_tokens: int | None, total: int
) -> None:
    assert max_total_tokens([5] * num_prompt_tokens, SamplingParams(max_tokens=max_tokens), RESOLVED) == total


@pytest.mark.parametrize(
    ("prompt", "params", "param", "message"),
    [
        ([], SamplingParams(), "prompt", "at least 1 token"),
        ([5] * 32, SamplingParams(), "prompt", "has 32 tokens; with max_model_len 32 it may have at most 31"),
        ([5] * 10, SamplingParams(max_tokens=23), "max_tokens", "max_tokens is 23; .* leaves room for 22"),
        ([5] * 10, SamplingParams(max_tokens=10**9), "max_tokens", "max_tokens is 1000000000; .* room for 22"),
        ([5] * 10, SamplingParams(min_tokens=23), "min_tokens", "min_tokens is 23; .* leaves room for 22"),
        ([5, -1], SamplingParams(), "prompt", f"token id -1; ids must be at least 0 and below .* {VOCAB_SIZE}"),
        ([5, VOCAB_SIZE], SamplingParams(), "prompt", f"token id {VOCAB_SIZE}; "),
        ([5], SamplingParams(stop_token_ids=(2**40,)), "stop_token_ids", f"token id {2**40}; "),
        ([5], SamplingParams(stop_token_ids=(0, -1)), "stop_token_ids", "token id -1; "),
    ],
)
def test_a_request_that_can_never_be_served_is_refused(
    prompt: list[int], params: SamplingParams, param: str, message: str
) -> None:
    """Faults 16, 25, 28: at once, with the numbers; not queued, not logged and dropped."""
    with pytest.raises(InvalidRequestError, match=message) as caught:
        max_total_tokens(prompt, params, RESOLVED)
    assert caught.value.param == param


def test_what_does_not_fit_the_context_has_openais_code() -> None:
    for prompt, params in (([5] * 32, SamplingParams()), ([5], SamplingParams(max_tokens=32))):
        with pytest.raises(InvalidRequestError) as caught:
            max_total_tokens(prompt, params, RESOLVED)
        assert caught.value.code == "context_length_exceeded"


def test_ids_at_the_ends_of_the_vocabulary_are_let_in() -> None:
    params = SamplingParams(stop_token_ids=(0, VOCAB_SIZE - 1))
    assert max_total_tokens([0, VOCAB_SIZE - 1], params, RESOLVED) == 32


def test_the_context_may_be_shorter_than_the_pool() -> None:
    resolved = tiny_config(num_blocks=8, block_size=4, max_model_len=9)
    assert max_total_tokens([5] * 8, SamplingParams(), resolved) == 9
    with pytest.raises(InvalidRequestError, match="at most 8"):
        max_total_tokens([5] * 9, SamplingParams(), resolved)


def test_as_many_choices_as_requests_may_run_at_once() -> None:
    """Each of them must fit alone: n takes nothing from the room."""
    assert max_total_tokens([5] * 10, SamplingParams(n=RESOLVED.max_num_requests), RESOLVED) == 32
    with pytest.raises(InvalidRequestError, match=r"n is 5; it must be at most 4, .*\(max_num_requests\)") as caught:
        max_total_tokens([5] * 10, SamplingParams(n=5), RESOLVED)
    assert caught.value.param == "n"


SLIDING = dataclasses.replace(RESOLVED, slide_by=16)


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "total"),
    [(31, 1000, 1031), (10, 23, 33), (10, 22, 32), (10, None, 32), (1, MAX_TOTAL_TOKENS - 1, MAX_TOTAL_TOKENS)],
)
def test_where_a_context_slides_only_the_prompt_must_fit(
    num_prompt_tokens: int, max_tokens: int | None, total: int
) -> None:
    """Fault 28. Without max_tokens the room is the limit as ever, so that no answer goes on for ever."""
    assert max_total_tokens([5] * num_prompt_tokens, SamplingParams(max_tokens=max_tokens), SLIDING) == total


@pytest.mark.parametrize(
    ("num_prompt_tokens", "params", "param", "message"),
    [
        (32, SamplingParams(max_tokens=1), "prompt", "has 32 tokens; .* at most 31"),
        (
            10,
            SamplingParams(max_tokens=MAX_TOTAL_TOKENS - 9),
            "max_tokens",
            f"max_tokens is {MAX_TOTAL_TOKENS - 9}; a prompt of 10 tokens may get at most {MAX_TOTAL_TOKENS - 10}",
        ),
        (10, SamplingParams(max_tokens=2**40), "max_tokens", f"max_tokens is {2**40}; "),
        (10, SamplingParams(min_tokens=23), "min_tokens", "min_tokens is 23; .* leaves room for 22"),
        (10, SamplingParams(n=5, max_tokens=100), "n", "n is 5; "),
    ],
)
def test_what_even_a_sliding_context_does_not_hold_is_refused(
    num_prompt_tokens: int, params: SamplingParams, param: str, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        max_total_tokens([5] * num_prompt_tokens, params, SLIDING)
    assert caught.value.param == param


def test_min_tokens_may_exceed_the_room_where_max_tokens_does() -> None:
    params = SamplingParams(min_tokens=100, max_tokens=200)
    assert max_total_tokens([5] * 10, params, SLIDING) == 210
    with pytest.raises(InvalidRequestError, match="max_tokens is 200"):
        max_total_tokens([5] * 10, params, RESOLVED)


@pytest.mark.parametrize(
    ("allowed", "message"),
    [
        ([3, 5, 3], "allowed_token_ids has an id more than once"),
        ([0] * 71, "allowed_token_ids has 71 ids; the vocabulary has 70"),
        ([0, 70], "allowed_token_ids has token id 70"),
    ],
)
def test_allowed_ids_differ_and_are_no_more_than_there_are(allowed: list[int], message: str) -> None:
    resolved = dataclasses.replace(RESOLVED, model=tiny_model(vocab_size=70))
    assert max_total_tokens([5], SamplingParams(allowed_token_ids=list(range(70))), resolved) == 32
    with pytest.raises(InvalidRequestError, match=message) as caught:
        max_total_tokens([5], SamplingParams(allowed_token_ids=allowed), resolved)
    assert caught.value.param == "allowed_token_ids"


class CountedIds(tuple[int, ...]):
    """How often it was gone through."""

    times = 0

    def __iter__(self) -> Iterator[int]:
        type(self).times += 1
        return super().__iter__()


def test_what_the_prompts_of_a_request_share_is_checked_once() -> None:
    door = Door(RESOLVED)
    params = SamplingParams(max_tokens=20)
    object.__setattr__(params, "stop_token_ids", CountedIds([1, 2]))
    for _ in range(5):
        assert door.max_total_tokens([5, 6], params) == 22
    assert CountedIds.times == 1
    with pytest.raises(InvalidRequestError, match="max_tokens is 20"):
        door.max_total_tokens([5] * 13, params)
    for wrong in (SamplingParams(stop_token_ids=[VOCAB_SIZE]),) * 2:
        with pytest.raises(InvalidRequestError, match="stop_token_ids"):
            door.max_total_tokens([5], wrong)
