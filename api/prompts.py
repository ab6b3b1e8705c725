"""From a checked body to what the engine takes: prompt tokens and SamplingParams.

Knows nothing of HTTP; may run in a thread, so it changes nothing.
"""

from __future__ import annotations

import uuid
from typing import Any

from pageframe.api.errors import shorten
from pageframe.api.job import Job
from pageframe.api.schemas import GenerationBody, TemplateFields
from pageframe.api.service import Service
from pageframe.runtime.chat_template import ChatTemplate
from pageframe.runtime.errors import InvalidRequestError
from pageframe.runtime.grammar import GrammarSpec
from pageframe.runtime.request import MAX_CHOICES, SamplingParams

#: Numbers in an answer; more would hold up others while they are written.
MAX_PROMPT_LOGPROBS = 2**18

#: Fields that SamplingParams has under the same name.
_PARAMS = (
    "n",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "timeout_seconds",
    "stop",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
)


def sampling_params(
    body: GenerationBody,
    service: Service,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    grammar: GrammarSpec | None,
    grammar_field: str,
) -> SamplingParams:
    """The body's parameters over the model's own defaults.

    Args:
        grammar_field: the name of the field that asks for the grammar.

    Raises:
        InvalidRequestError: a value is out of range, or asks to go on where a grammar ends.
    """
    if grammar is not None:
        _check_end(body, grammar_field)
    given = {name: value for name in _PARAMS if (value := getattr(body, name)) is not None}
    values: dict[str, Any] = {**service.sampling_defaults, **given}
    if values.get("top_k", 0) > service.vocab_size:
        values["top_k"] = service.vocab_size
    return SamplingParams(
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logit_bias=body.logit_bias,
        bad_words_ids=_bad_words_ids(service, body.bad_words),
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
        grammar=grammar,
        **values,
    )


def _check_end(body: GenerationBody, grammar_field: str) -> None:
    """Raises: InvalidRequestError: the text is to go on though its grammar, whose end ends it, may not."""
    for name, value in (("min_tokens", body.min_tokens), ("ignore_eos", body.ignore_eos)):
        if value:
            neutral = "0" if name == "min_tokens" else "false"
            raise InvalidRequestError(
                f"{name} is {shorten(value)}; beside {grammar_field} it must be {neutral}, since a text that follows a "
                "grammar ends where the grammar does",
                param=name,
            )


def _bad_words_ids(service: Service, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """The words' token ids, as a text begins with one and behind a space, which are other tokens."""
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip(" ")
        for text in (bare, f" {bare}") if bare else (word,):
            sequences[tuple(service.tokenizer.encode(text, add_special_tokens=False))] = None
    return tuple(filter(None, sequences))


def text_grammar(body: GenerationBody) -> tuple[GrammarSpec | None, str]:
    """The grammar that the answer's text follows, and the name of the field that asks for it.

    Raises:
        InvalidRequestError: two fields ask for one.
    """
    if body.response_format is None:
        return body.structured_outputs, "structured_outputs"
    if body.structured_outputs is not None:
        raise InvalidRequestError(
            "response_format and structured_outputs both ask for a form of the text; give one of them",
            param="structured_outputs",
        )
    return body.response_format, "response_format"


def encode_prompt(
    service: Service, text: str, *, add_special_tokens: bool, param: str, num_kept: int | None = None
) -> list[int]:
    """The prompt's token ids.

    Args:
        num_kept: its last tokens that are wanted; None: all.

    Raises:
        InvalidRequestError: the text is too long for any context, which is told before it is tokenised; or its last
            tokens cannot be known without all the others.
    """
    tokenizer, limit = service.tokenizer, service.max_model_len
    if num_kept is not None:
        return _encode_end(service, text, num_kept, add_special_tokens=add_special_tokens, param=param)
    num_bytes = len(text.encode("utf-8", "replace"))
    if num_bytes > limit * tokenizer.longest_token:
        raise InvalidRequestError(
            f"the prompt has {num_bytes} bytes, so at least {-(-num_bytes // tokenizer.longest_token)} tokens; with "
            f"max_model_len {limit} it may have at most {limit - 1}",
            param=param,
            code="context_length_exceeded",
        )
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def _encode_end(service: Service, text: str, num_kept: int, *, add_special_tokens: bool, param: str) -> list[int]:
    tokenizer = service.tokenizer
    max_bytes = 2 * service.max_model_len * tokenizer.longest_token
    ids = tokenizer.encode_end(text, num_kept, add_special_tokens=add_special_tokens, max_bytes=max_bytes)
    if ids is None:
        raise InvalidRequestError(
            f"truncate_prompt_tokens keeps the prompt's last {num_kept} tokens, but its last {max_bytes} bytes have no "
            "place where this model's tokens are sure to begin, such as a space; shorten the text",
            param=param,
            code="context_length_exceeded",
        )
    return ids


def num_kept_tokens(service: Service, wanted: int | None, max_tokens: int | None) -> int | None:
    """How many of a prompt's last tokens are kept; None: all of them.

    Args:
        wanted: truncate_prompt_tokens; -1 for as many as fit beside `max_tokens`, or beside one token.

    Raises:
        InvalidRequestError: it is more than a context holds.
    """
    limit = service.max_model_len
    if wanted is None:
        return None
    if wanted > limit:
        raise InvalidRequestError(
            f"truncate_prompt_tokens is {wanted}; it must be at most max_model_len ({limit})",
            param="truncate_prompt_tokens",
        )
    if wanted > 0:
        return wanted
    # Where the context slides, the output may go on beyond it.
    slides = service.client.resolved.slide_by is not None
    return max(1, limit - (1 if slides or max_tokens is None else max_tokens))


def render_chat(service: Service, messages: list[dict[str, Any]], fields: TemplateFields, **kwargs: Any) -> str:
    """The prompt text the model's own template makes of the messages.

    Args:
        kwargs: for the template, beside those of chat_template_kwargs, which win.

    Raises:
        InvalidRequestError: the model has no template, or it refuses these messages.
    """
    if service.template is None:
        raise InvalidRequestError(
            "messages need a chat template, which this model has not; use prompt with /v1/completions",
            param="messages",
        )
    kwargs = {**kwargs, **fields.chat_template_kwargs}
    if not fields.continue_final_message:
        return service.template.render(
            messages, add_generation_prompt=fields.add_generation_prompt is not False, **kwargs
        )
    if fields.add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message is true and so is add_generation_prompt; only one of them can be",
            param="continue_final_message",
        )
    return _render_open_end(service.template, messages, kwargs)


def _render_open_end(template: ChatTemplate, messages: list[dict[str, Any]], kwargs: dict[str, Any]) -> str:
    """The prompt up to the end of the last message's content, found by a mark that no message contains."""
    mark = uuid.uuid4().hex
    *before, last = messages
    if last["role"] != "assistant":
        raise InvalidRequestError(
            f"continue_final_message is true, but the last message has role {last['role']!r}; it must be 'assistant'",
            param="continue_final_message",
        )
    text = template.render(
        [*before, {**last, "content": last["content"] + mark}], add_generation_prompt=False, **kwargs
    )
    prompt, found, _ = text.rpartition(mark)
    if not found:
        raise InvalidRequestError(
            "continue_final_message is true, but the model's template does not show the last message whole",
            param="continue_final_message",
        )
    return prompt


def engine_fields(body: GenerationBody) -> dict[str, Any]:
    """The part of a Job that the engine takes beside tokens and parameters."""
    return {"priority": body.priority or 0, "cache_salt": body.cache_salt or ""}


def stream_fields(body: GenerationBody) -> dict[str, Any]:
    """The part of a Job that says how to answer.

    Raises:
        InvalidRequestError: stream_options asks for something, but not stream.
    """
    options = body.stream_options
    if options is not None and (options.include_usage or options.continuous_usage_stats) and not body.stream:
        raise InvalidRequestError("stream_options is given, but stream is not true", param="stream_options")
    return {
        "stream": bool(body.stream),
        "include_usage": bool(options and options.include_usage),
        "continuous_usage": bool(options and options.continuous_usage_stats),
        "return_token_ids": bool(body.return_token_ids),
        "num_prompt_logprobs": body.prompt_logprobs,
        "user": body.user,
        "request_id": body.request_id,
    }


def check_num_choices(num_prompts: int, n: int) -> None:
    """Raises: InvalidRequestError: that makes too many choices, which is told before any is made ready."""
    if num_prompts > 1 and num_prompts * n > MAX_CHOICES:
        raise InvalidRequestError(
            f"n is {n}; with {num_prompts} prompts that makes {num_prompts * n} choices, and at most {MAX_CHOICES} are "
            "allowed in one request",
            param="n",
        )


def check_prompt_logprobs(job: Job) -> None:
    """Raises: InvalidRequestError: the prompts' logprobs are too many for one answer."""
    if job.params.prompt_logprobs is None:
        return
    num_logprobs = sum(map(len, job.prompts)) * job.params.n * (job.params.prompt_logprobs + 1)
    if num_logprobs > MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            f"prompt_logprobs would be {num_logprobs} numbers, of all tokens of all choices' prompts; at most "
            f"{MAX_PROMPT_LOGPROBS} are allowed in one answer",
            param="prompt_logprobs",
        )
