"""What JSON schema can say of the fields of request bodies beyond their types, for /openapi.json.

The server takes a body that follows them, but for what no schema says: that names differ, what a grammar means, how
many tokens a text has. The checks themselves stand elsewhere, and each has the last word. Knows no routes.
"""

from __future__ import annotations

from typing import Any

from pageframe.api.messages import ROLES
from pageframe.api.middleware import REQUEST_ID
from pageframe.api.schemas import (
    MAX_BIAS,
    MAX_PROMPTS,
    MAX_WORD_LENGTH,
    MAX_WORDS,
    RESERVED_TEMPLATE_KEYS,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from pageframe.api.tools import MAX_TOOLS, TOOL_NAME
from pageframe.runtime.request import (
    MAX_BIASED_TOKENS,
    MAX_STOP_IDS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_TIMEOUT_SECONDS,
)

Schema = dict[str, Any]

#: Formats whose limits are a model's own: an id in its vocabulary, and a number of tokens that its context holds.
TOKEN_ID, TOKEN_COUNT = "token-id", "token-count"
#: A name that the server has for its model.
MODEL_NAME = "model-name"
#: The text of a JSON object.
JSON_OBJECT = "json-object"

_NULL: Schema = {"type": "null"}
_BOOL: Schema = {"type": ["boolean", "null"]}
_TEXT: Schema = {"type": "string"}
_SOME_TEXT: Schema = {"type": "string", "minLength": 1}
_OBJECT: Schema = {"type": "object"}
_ID: Schema = {"type": "integer", "minimum": 0, "format": TOKEN_ID}
_IDS: Schema = {"type": "array", "items": _ID}
_COUNT: Schema = {"type": "integer", "minimum": 1, "format": TOKEN_COUNT}


def _or_null(*schemas: Schema) -> Schema:
    return {"anyOf": [*schemas, _NULL]}


def _number(low: float, high: float, *, above: bool = False) -> Schema:
    """A number from `low`, or above it, to `high`."""
    return {"type": ["number", "null"], "exclusiveMinimum" if above else "minimum": low, "maximum": high}


def _closed(required: Schema, **optional: Schema) -> Schema:
    """An object with these fields alone."""
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
        "additionalProperties": False,
    }


def _const(value: str) -> Schema:
    return {"const": value}


_CALL = _closed(
    {
        "id": _TEXT,
        "type": _const("function"),
        "function": _closed(
            {"name": _TEXT, "arguments": {"anyOf": [_const(""), {"type": "string", "format": JSON_OBJECT}]}}
        ),
    }
)
_PART = _closed({"type": _const("text"), "text": _TEXT})
_CONTENT: Schema = {"anyOf": [_TEXT, {"type": "array", "minItems": 1, "items": _PART}]}
_NAME: Schema = {"type": ["string", "null"]}
_MODEL: Schema = {**_NAME, "format": MODEL_NAME}


def _message(role: str) -> Schema:
    fields = {"role": _const(role), "content": _CONTENT}
    if role == "tool":
        return _closed({**fields, "tool_call_id": _TEXT}, name=_NAME)
    calls = {"tool_calls": {"type": ["array", "null"], "items": _CALL}} if role == "assistant" else {}
    return _closed(fields, name=_NAME, **calls)


_MESSAGES: Schema = {"type": "array", "minItems": 1, "items": {"anyOf": [_message(role) for role in ROLES]}}
_TOOL_NAME: Schema = {"type": "string", "pattern": f"^{TOOL_NAME.pattern}$"}
_PARAMETERS: Schema = {"type": "object", "properties": {"type": _const("object"), "properties": _OBJECT}}
_TOOLS: Schema = _or_null(
    {
        "type": "array",
        "maxItems": MAX_TOOLS,
        "items": _closed(
            {
                "type": _const("function"),
                "function": _closed(
                    {"name": _TOOL_NAME}, description=_NAME, parameters=_or_null(_PARAMETERS), strict=_BOOL
                ),
            }
        ),
    }
)
_TOOL_CHOICE = _or_null(
    {"enum": ["none", "auto", "required"]},
    _closed({"type": _const("function"), "function": _closed({"name": _TOOL_NAME})}),
)
_JSON_SCHEMA = _closed({"schema": _OBJECT}, name=_NAME, description=_NAME, strict=_BOOL)
_RESPONSE_FORMAT = _or_null(
    _closed({"type": {"enum": ["text", "json_object"]}}),
    _closed({"type": _const("json_schema"), "json_schema": _JSON_SCHEMA}),
)
_STRUCTURED_OUTPUTS = _or_null(
    _closed({"json": {"anyOf": [_OBJECT, _TEXT]}}),
    _closed({"regex": _TEXT}),
    _closed({"grammar": _TEXT}),
    _closed({"choice": {"type": "array", "minItems": 1, "items": _SOME_TEXT}}),
)
_STOP: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}

_TEMPLATE: dict[str, Schema] = {
    "messages": _MESSAGES,
    "chat_template_kwargs": _or_null({**_OBJECT, "propertyNames": {"not": {"enum": list(RESERVED_TEMPLATE_KEYS)}}}),
    "tools": _TOOLS,
}
_GENERATION: dict[str, Schema] = {
    "temperature": _number(0, 10),
    "top_p": _number(0, 1, above=True),
    "min_p": _number(0, 1),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repetition_penalty": _number(0, 10, above=True),
    "timeout_seconds": _number(0, MAX_TIMEOUT_SECONDS, above=True),
    "max_tokens": _or_null(_COUNT),
    "min_tokens": _or_null({**_COUNT, "minimum": 0}),
    "truncate_prompt_tokens": _or_null(_COUNT, {"const": -1}),
    "logit_bias": _or_null(
        {
            "type": "object",
            "maxProperties": MAX_BIASED_TOKENS,
            "propertyNames": {"type": "string", "format": TOKEN_ID},
            "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
        }
    ),
    "bad_words": _or_null(
        {
            "type": "array",
            "maxItems": MAX_WORDS,
            "items": {"type": "string", "minLength": 1, "maxLength": MAX_WORD_LENGTH},
        }
    ),
    "allowed_token_ids": _or_null(_IDS),
    "stop_token_ids": _or_null({**_IDS, "maxItems": MAX_STOP_IDS}),
    "stop": _or_null(_const(""), _STOP, {"type": "array", "maxItems": MAX_STOP_STRINGS, "items": _STOP}),
    "response_format": _RESPONSE_FORMAT,
    "structured_outputs": _STRUCTURED_OUTPUTS,
    "request_id": _or_null({"type": "string", "pattern": f"^{REQUEST_ID.pattern}$"}),
}
_CHAT: dict[str, Schema] = {
    **_TEMPLATE,
    "max_completion_tokens": _or_null(_COUNT),
    "tool_choice": _TOOL_CHOICE,
}
_PROMPT = [_SOME_TEXT, {**_IDS, "minItems": 1}]
_COMPLETION: dict[str, Schema] = {
    "prompt": {
        "anyOf": [*_PROMPT, {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": {"anyOf": _PROMPT}}]
    }
}
_TOKENIZE: dict[str, Schema] = {**_TEMPLATE, "messages": _or_null(_MESSAGES)}

#: The fields of each body that need more than their types say.
_FIELDS: dict[type[Body], dict[str, Schema]] = {
    ChatBody: {**_GENERATION, **_CHAT},
    CompletionBody: {**_GENERATION, **_COMPLETION},
    TokenizeBody: _TOKENIZE,
    DetokenizeBody: {"tokens": _IDS},
}


def _has(name: str, value: Schema) -> Schema:
    return {"properties": {name: value}, "required": [name]}


def _if_there(name: str, value: Schema) -> Schema:
    return {"properties": {name: value}}


def _any_of(*schemas: Schema) -> Schema:
    return {"anyOf": [*schemas]}


_NO_TOOLS: Schema = {"type": ["array", "null"], "maxItems": 0}
_SOME_TOOLS: Schema = {"type": "array", "minItems": 1}
_ANY_TEXT = _if_there("response_format", {"enum": [None, {"type": "text"}]})
_ANY_OUTPUT = _if_there("structured_outputs", _NULL)
#: Beside a grammar.
_GRAMMARS_END = (("min_tokens", {"enum": [0, None]}), ("ignore_eos", {"enum": [False, None]}))
_GENERATION_RULES = [
    _any_of(_if_there("stream_options", {"enum": [None, {}]}), _has("stream", {"const": True})),
    _any_of(_ANY_OUTPUT, _ANY_TEXT),
    _any_of({"allOf": [_ANY_OUTPUT, _ANY_TEXT]}, {"allOf": [_if_there(*pair) for pair in _GRAMMARS_END]}),
]
#: What the fields of a body ask of one another; where it is seldom broken, it is left to the checks: who makes requests
#: of a schema takes the product of all these alternatives.
_RULES: dict[type[Body], list[Schema]] = {
    ChatBody: [
        *_GENERATION_RULES,
        _any_of(_if_there("top_logprobs", {"enum": [0, None]}), _has("logprobs", {"const": True})),
        _any_of(_if_there("tool_choice", {"enum": ["none", "auto", None]}), _has("tools", _SOME_TOOLS)),
        _any_of(
            _if_there("tools", _NO_TOOLS),
            _has("tool_choice", _const("none")),
            {"allOf": [_ANY_TEXT, _ANY_OUTPUT]},
        ),
    ],
    CompletionBody: _GENERATION_RULES,
    TokenizeBody: [
        _any_of(
            {"allOf": [_has("prompt", _TEXT), _if_there("messages", _NULL), _if_there("tools", _NO_TOOLS)]},
            {"allOf": [_has("messages", {"type": "array"}), _if_there("prompt", _NULL)]},
        ),
    ],
}


def refine(kind: type[Body], schema: Schema) -> Schema:
    """The schema of a body with all that is known of its fields."""
    refined = {**schema, "properties": {**schema["properties"], "model": _MODEL, **_FIELDS[kind]}}
    return {**refined, "allOf": _RULES[kind]} if kind in _RULES else refined
