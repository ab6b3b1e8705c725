"""From a checked body to what the engine takes: prompt tokens and SamplingParams.

Knows nothing of HTTP; may run in a thread, so it changes nothing.
"""

from __future__ import annotations

import uuid
from typing import Any

from pageframe.api.schemas import GenerationBody, TemplateFields
from pageframe.api.service import Service
from pageframe.runtime.chat_template import ChatTemplate
from pageframe.runtime.errors import InvalidRequestError
from pageframe.runtime.request import SamplingParams

#: Fields that SamplingParams has under the same name.
_PARAMS = (
    "n",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
)


def sampling_params(
    body: GenerationBody, service: Service, *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """The body's parameters over the model's own defaults.

    Raises:
        InvalidRequestError: a value is out of range.
    """
    given = {name: value for name in _PARAMS if (value := getattr(body, name)) is not None}
    values: dict[str, Any] = {**service.sampling_defaults, **given}
    if values.get("top_k", 0) > service.vocab_size:
        values["top_k"] = service.vocab_size
    return SamplingParams(
        max_tokens=max_tokens,
        logprobs=logprobs,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        **values,
    )


def encode_prompt(service: Service, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
    """The prompt's token ids.

    Raises:
        InvalidRequestError: the text is too long for any context, which is told before it is tokenised.
    """
    tokenizer, limit = service.tokenizer, service.max_model_len
    num_bytes = len(text.encode("utf-8", "replace"))
    if num_bytes > limit * tokenizer.longest_token:
        raise InvalidRequestError(
            f"the prompt has {num_bytes} bytes, so at least {-(-num_bytes // tokenizer.longest_token)} tokens; with "
            f"max_model_len {limit} it may have at most {limit - 1}",
            param=param,
            code="context_length_exceeded",
        )
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


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
    """The part of a Job that says how to stream.

    Raises:
        InvalidRequestError: stream_options without stream.
    """
    options = body.stream_options
    if options is not None and not body.stream:
        raise InvalidRequestError("stream_options is given, but stream is not true", param="stream_options")
    return {
        "stream": bool(body.stream),
        "include_usage": bool(options and options.include_usage),
        "continuous_usage": bool(options and options.continuous_usage_stats),
        "return_token_ids": bool(body.return_token_ids),
    }
