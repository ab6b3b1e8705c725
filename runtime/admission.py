"""The door: what a request must satisfy before it is queued, as one pure check used by both processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pageframe.runtime.config import ResolvedConfig
from pageframe.runtime.errors import InvalidRequestError
from pageframe.runtime.request import MAX_TOTAL_TOKENS, SamplingParams


class Door:
    """The check, for one engine. What prompts have in common is checked once where they come one after the other."""

    def __init__(self, resolved: ResolvedConfig) -> None:
        self._resolved = resolved
        self._checked: SamplingParams | None = None

    def max_total_tokens(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> int:
        """Most tokens, prompt and output together, that this request may reach.

        Raises:
            InvalidRequestError: the request can never be served as asked; the message names the numbers.
        """
        total = _check_prompt(prompt_token_ids, params, self._resolved)
        if params is not self._checked:
            _check_params(params, self._resolved)
            self._checked = params
        return total


def max_total_tokens(prompt_token_ids: Sequence[int], params: SamplingParams, resolved: ResolvedConfig) -> int:
    """`Door.max_total_tokens` of a request alone."""
    return Door(resolved).max_total_tokens(prompt_token_ids, params)


def _check_prompt(prompt_token_ids: Sequence[int], params: SamplingParams, resolved: ResolvedConfig) -> int:
    num_prompt_tokens = len(prompt_token_ids)
    limit = resolved.max_model_len
    if num_prompt_tokens == 0:
        raise InvalidRequestError("the prompt is empty; it must have at least 1 token", param="prompt")
    if num_prompt_tokens >= limit:
        raise InvalidRequestError(
            f"the prompt has {num_prompt_tokens} tokens; with max_model_len {limit} it may have at most {limit - 1}",
            param="prompt",
            code="context_length_exceeded",
        )
    room = limit - num_prompt_tokens
    if resolved.slide_by is not None:
        _check_total(params.max_tokens or 0, num_prompt_tokens)
    elif params.max_tokens is not None and params.max_tokens > room:
        raise InvalidRequestError(
            f"max_tokens is {params.max_tokens}; a prompt of {num_prompt_tokens} tokens with max_model_len {limit} "
            f"leaves room for {room}",
            param="max_tokens",
            code="context_length_exceeded",
        )
    if params.min_tokens > room and params.max_tokens is None:
        raise InvalidRequestError(
            f"min_tokens is {params.min_tokens}; a prompt of {num_prompt_tokens} tokens with max_model_len {limit} "
            f"leaves room for {room}",
            param="min_tokens",
            code="context_length_exceeded",
        )
    _check_ids("prompt", prompt_token_ids, resolved.model.vocab_size)
    return num_prompt_tokens + (room if params.max_tokens is None else params.max_tokens)


def _check_params(params: SamplingParams, resolved: ResolvedConfig) -> None:
    """What is the same for every prompt."""
    vocab_size = resolved.model.vocab_size
    if params.n > resolved.max_num_requests:
        raise InvalidRequestError(
            f"n is {params.n}; it must be at most {resolved.max_num_requests}, the requests that may run at once "
            "(max_num_requests)",
            param="n",
        )
    num_allowed = len(params.allowed_token_ids)
    if num_allowed > vocab_size:
        raise InvalidRequestError(
            f"allowed_token_ids has {num_allowed} ids; the vocabulary has {vocab_size}", param="allowed_token_ids"
        )
    if len(set(params.allowed_token_ids)) < num_allowed:
        raise InvalidRequestError("allowed_token_ids has an id more than once", param="allowed_token_ids")
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids, vocab_size)
    _check_ids("logit_bias", params.logit_bias, vocab_size)
    for word in params.bad_words_ids:
        _check_ids("bad_words_ids", word, vocab_size)


def _check_total(max_tokens: int, num_prompt_tokens: int) -> None:
    """Where a context slides, the output may go on beyond it, within what counts can hold."""
    limit = MAX_TOTAL_TOKENS - num_prompt_tokens
    if max_tokens > limit:
        raise InvalidRequestError(
            f"max_tokens is {max_tokens}; a prompt of {num_prompt_tokens} tokens may get at most {limit}",
            param="max_tokens",
        )


def _check_ids(field: str, ids: Iterable[int], vocab_size: int) -> None:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"{field} has token id {token_id}; ids must be at least 0 and below the vocabulary's {vocab_size}",
                param=field,
            )
