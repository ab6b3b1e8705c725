"""The fields of each request body: types, ranges, what is not built yet and what is left unread, as tables.

Ranges that SamplingParams and the engine's door check (temperature, top_p, ids, …) are theirs; here stand only
types and what the engine never sees. Knows nothing of what a field does.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError

from pageframe.api.checks import refuse_unknown, wrong
from pageframe.api.errors import shorten
from pageframe.api.messages import check_messages
from pageframe.api.middleware import REQUEST_ID_RULE, is_request_id
from pageframe.api.structured import check_response_format, check_structured_outputs
from pageframe.api.tools import Tool, ToolChoice, check_tool_choice, check_tools
from pageframe.runtime.errors import InvalidRequestError
from pageframe.runtime.grammar import GrammarSpec
from pageframe.runtime.request import (
    MAX_BAD_WORDS,
    MAX_BIASED_TOKENS,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_PRIORITY,
    MAX_STOP_IDS,
    MIN_PRIORITY,
)

MIN_INT64, MAX_INT64 = -(2**63), 2**63 - 1
MAX_CACHE_SALT = 256
MAX_PROMPTS = 128
MAX_BIAS = 100
#: bad_words' strings: two sequences of tokens are made of each, of which the engine takes so many, and so long ones.
MAX_WORDS, MAX_WORD_LENGTH = MAX_BAD_WORDS // 2, 200
#: A template's own parameters that a request may not set through chat_template_kwargs.
RESERVED_TEMPLATE_KEYS = ("self", "messages", "add_generation_prompt", "bos_token", "eos_token", "tools")
_ID_KEY = re.compile(r"0|-?[1-9][0-9]{0,18}")

#: Fields that are not built: null is always accepted, else only these values, which ask for nothing.
COMPLETION_NOT_BUILT: dict[str, tuple[object, ...]] = {"suffix": ("",), "best_of": (1,)}
CHAT_NOT_BUILT: dict[str, tuple[object, ...]] = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_cache_retention": ("in-memory", "in_memory"),
    "web_search_options": (),
}
#: Accepted with any value and left unread: they steer a provider's bookkeeping, not the answer.
IGNORED = frozenset({"metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier", "verbosity"})

Int64 = Annotated[int, Field(ge=MIN_INT64, le=MAX_INT64)]
PositiveInt64 = Annotated[int, Field(ge=1, le=MAX_INT64)]

#: What a value must be, by pydantic's name of the fault. Braces are filled from the fault's own numbers.
_RULES = {
    "string_type": "must be a string",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "string_too_long": "must have at most {max_length} characters",
}

BodyT = TypeVar("BodyT", bound="Body")


def _check_stop(value: object) -> tuple[str, ...]:
    strings = [] if value is None or value == "" else [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(text, str) for text in strings):
        raise wrong("stop", value, "must be a string or a list of strings")
    return tuple(strings)


def _check_prompts(value: object) -> list[str | list[int]]:
    """The prompts, each as text or as token ids."""
    prompts = value if isinstance(value, list) and value and isinstance(value[0], (str, list)) else [value]
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequestError(
            f"prompt is a list of {len(prompts)} prompts; at most {MAX_PROMPTS} are allowed", param="prompt"
        )
    many = len(prompts) > 1
    return [_check_prompt(prompt, f"prompt[{index}]" if many else "prompt") for index, prompt in enumerate(prompts)]


def _check_prompt(value: object, path: str) -> str | list[int]:
    if value in ("", []):
        raise InvalidRequestError(f"{path} is empty; it must have at least 1 token", param=path)
    if isinstance(value, str):
        return value
    return _check_ids(path, value, "a string or a list of token ids")


def _check_ids(field: str, value: object, kind: str = "a list of token ids") -> list[int]:
    if not isinstance(value, list):
        raise wrong(field, value, f"must be {kind}")
    for index, token_id in enumerate(value):
        if type(token_id) is not int or not MIN_INT64 <= token_id <= MAX_INT64:
            path = f"{field}[{index}]"
            raise InvalidRequestError(f"{path} is {shorten(token_id)}; it must be a token id, an integer", param=field)
    return value


def _check_stop_ids(value: object) -> list[int]:
    """Checked here, in front of the items: a list of a million wrong ones is refused at the first."""
    if isinstance(value, list) and len(value) > MAX_STOP_IDS:
        raise InvalidRequestError(
            f"stop_token_ids has {len(value)} ids; at most {MAX_STOP_IDS} are allowed", param="stop_token_ids"
        )
    return _check_ids("stop_token_ids", value)


def _check_optional_ids(value: object) -> list[int] | None:
    return None if value is None else _check_ids("allowed_token_ids", value)


def _check_logit_bias(value: object) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong("logit_bias", value, "must be an object of token ids and numbers")
    if len(value) > MAX_BIASED_TOKENS:
        raise InvalidRequestError(
            f"logit_bias has {len(value)} token ids; at most {MAX_BIASED_TOKENS} are allowed", param="logit_bias"
        )
    for key, bias in value.items():
        if not _ID_KEY.fullmatch(key):
            raise InvalidRequestError(
                f"logit_bias has the key {shorten(key)}; it must be a token id, an integer", param="logit_bias"
            )
        is_number = isinstance(bias, (int, float)) and not isinstance(bias, bool)
        if not is_number or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise InvalidRequestError(
                f"logit_bias[{key}] is {shorten(bias)}; it must be a number from -{MAX_BIAS} to {MAX_BIAS}",
                param="logit_bias",
            )
    return {int(key): float(bias) for key, bias in value.items()}


def _check_bad_words(value: object) -> tuple[str, ...]:
    words = [] if value is None else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise wrong("bad_words", value, "must be a list of strings")
    if len(words) > MAX_WORDS:
        raise InvalidRequestError(
            f"bad_words has {len(words)} strings; at most {MAX_WORDS} are allowed", param="bad_words"
        )
    for word in words:
        if not 1 <= len(word) <= MAX_WORD_LENGTH:
            raise InvalidRequestError(
                f"bad_words has a string of {len(word)} characters; each must have 1 to {MAX_WORD_LENGTH}",
                param="bad_words",
            )
    return tuple(words)


def _check_truncation(value: object) -> int | None:
    if value is None or (type(value) is int and (value == -1 or 1 <= value <= MAX_INT64)):
        return value
    raise wrong("truncate_prompt_tokens", value, "must be an integer of at least 1, or -1 for what fits")


def _check_stream_options(value: object) -> object:
    if isinstance(value, dict):
        refuse_unknown(value, StreamOptions.model_fields, "stream_options")
    return value


def _check_request_id(value: object) -> str | None:
    if value is not None and not (isinstance(value, str) and is_request_id(value)):
        raise wrong("request_id", value, f"must be a string of {REQUEST_ID_RULE}")
    return value


def _check_optional_messages(value: object) -> list[dict[str, Any]] | None:
    return None if value is None else check_messages(value)


def _check_template_kwargs(value: object) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong("chat_template_kwargs", value, "must be an object")
    for key in RESERVED_TEMPLATE_KEYS:
        if key in value:
            raise InvalidRequestError(
                f"chat_template_kwargs has {key!r}, which the server sets itself", param="chat_template_kwargs"
            )
    return value


class Body(BaseModel):
    """What every request body has. Strict: a boolean is no number, "1" is no integer, a field is known or refused."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    not_built: ClassVar[dict[str, tuple[object, ...]]] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()

    model: str | None = None


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(Body):
    """What chat and completion requests have in common. Null is the default, everywhere."""

    ignored: ClassVar[frozenset[str]] = IGNORED

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: PositiveInt64 | None = None
    min_tokens: Int64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], PlainValidator(_check_logit_bias)] = {}
    bad_words: Annotated[tuple[str, ...], PlainValidator(_check_bad_words)] = ()
    allowed_token_ids: Annotated[list[int] | None, PlainValidator(_check_optional_ids)] = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    truncate_prompt_tokens: Annotated[int | None, PlainValidator(_check_truncation)] = None
    seed: Int64 | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_check_stop)] = ()
    stop_token_ids: Annotated[list[int], BeforeValidator(_check_stop_ids)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    response_format: Annotated[GrammarSpec | None, PlainValidator(check_response_format)] = None
    structured_outputs: Annotated[GrammarSpec | None, PlainValidator(check_structured_outputs)] = None
    stream: bool | None = None
    stream_options: Annotated[StreamOptions | None, BeforeValidator(_check_stream_options)] = None
    user: str | None = None
    request_id: Annotated[str | None, BeforeValidator(_check_request_id)] = None
    return_token_ids: bool | None = None
    priority: Annotated[int, Field(ge=MIN_PRIORITY, le=MAX_PRIORITY)] | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_CACHE_SALT)] | None = None
    timeout_seconds: float | None = None


class TemplateFields(BaseModel):
    """How messages become a prompt."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(_check_template_kwargs)] = {}


class ChatBody(GenerationBody, TemplateFields):
    not_built: ClassVar[dict[str, tuple[object, ...]]] = CHAT_NOT_BUILT

    messages: Annotated[list[dict[str, Any]], BeforeValidator(check_messages)]
    max_completion_tokens: PositiveInt64 | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[tuple[Tool, ...], PlainValidator(check_tools)] = ()
    tool_choice: Annotated[ToolChoice | None, PlainValidator(check_tool_choice)] = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None


class CompletionBody(GenerationBody):
    not_built: ClassVar[dict[str, tuple[object, ...]]] = COMPLETION_NOT_BUILT
    ignored: ClassVar[frozenset[str]] = IGNORED | {"reasoning_effort"}

    prompt: Annotated[list[str | list[int]], PlainValidator(_check_prompts)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None


class TokenizeBody(Body, TemplateFields):
    """Text or messages, one of the two. Special tokens are added to text, not to what a template wrote."""

    not_built: ClassVar[dict[str, tuple[object, ...]]] = {"return_token_strs": (False,)}

    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]] | None, BeforeValidator(_check_optional_messages)] = None
    tools: Annotated[tuple[Tool, ...], PlainValidator(check_tools)] = ()
    add_special_tokens: bool | None = None


class DetokenizeBody(Body):
    tokens: Annotated[list[int], BeforeValidator(lambda value: _check_ids("tokens", value))]


def check_body(kind: type[BodyT], content: dict[str, Any]) -> BodyT:
    """The body as `kind`.

    Raises:
        InvalidRequestError: a field is unknown, missing, not built, or has a wrong type or value.
    """
    fields = {}
    for name, value in content.items():
        if name in kind.not_built:
            _check_neutral(name, value, kind.not_built[name])
        elif name not in kind.ignored:
            fields[name] = value
    refuse_unknown(fields, kind.model_fields)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _first_fault(error) from None


def _check_neutral(name: str, value: object, neutral: tuple[object, ...]) -> None:
    if value is None or any(_same(value, accepted) for accepted in neutral):
        return
    accepted = " or ".join(["null", *map(json.dumps, neutral)])
    raise InvalidRequestError(
        f"{name} is {shorten(value)}; {name} is not supported yet, so it may only be {accepted}",
        param=name,
        code="unsupported_field",
    )


def _same(value: object, accepted: object) -> bool:
    return value == accepted and isinstance(value, bool) == isinstance(accepted, bool)


def _first_fault(error: ValidationError) -> InvalidRequestError:
    fault = error.errors(include_url=False)[0]
    path = ""
    for part in fault["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    path = path[:200]
    if fault["type"] == "extra_forbidden":
        return InvalidRequestError(f"{path} is not a known field", param=path, code="unknown_field")
    if fault["type"] == "missing":
        return InvalidRequestError(f"{path} is missing; it is required", param=path, code="missing_field")
    rule = _RULES.get(fault["type"], "must be of another kind").format(**fault.get("ctx", {}))
    return wrong(path, fault["input"], rule)
