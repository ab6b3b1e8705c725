"""The door: what is let in, and that a refusal names the field, the value and the limit."""

from __future__ import annotations

import pytest
from fakes.chain_hash import VOCAB_SIZE
from fakes.engines import tiny_config

from pageframe.runtime.admission import max_total_tokens
from pageframe.runtime.errors import InvalidRequestError
from pageframe.runtime.request import SamplingParams

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
