"""Requests that clients should not send, drawn from a seed: broken as JSON, as HTTP, or in what they mean."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "Does it.",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
        "strict": True,
    },
}
_SCHEMA = {"type": "object", "properties": {"a": {"enum": ["b", 1]}}, "required": ["a"], "additionalProperties": False}
#: What a request without a fault looks like, by its route. None makes more than a few tokens.
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "1"},
        ],
        "max_tokens": 2,
        "temperature": 0.5,
        "stop": ["a", "b"],
        "logit_bias": {"5": 1.5},
        "bad_words": ["c"],
        "presence_penalty": 0.5,
        "min_tokens": 0,
        "logprobs": True,
        "top_logprobs": 2,
        "tools": [_TOOL],
        "tool_choice": "none",
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA, "strict": True}},
        "timeout_seconds": 5,
    },
    "/v1/completions": {
        "prompt": "hi",
        "max_tokens": 2,
        "seed": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "structured_outputs": {"regex": "[a-z]{1,9}"},
        "stop_token_ids": [5],
        "n": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "timeout_seconds": 5,
    },
    "/tokenize": {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": True, "tools": [_TOOL]},
    "/detokenize": {"tokens": [1, 2, 3]},
}
JUNK: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, -(2**63) - 1, 2**64, 10**400, 0.1, -0.0, 1e308, "", "\x00", "ü" * 300, "💥",
    "\ufffd", [], [[]], [None], [0] * 50, {}, {"": {}}, {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
    {"$ref": "#"}, "{{ self.__init__.__globals__ }}", "-1", "1e400", "null",
]  # fmt: skip
CONTENT_TYPES = [
    None, b"", b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data; boundary=x", b"application",
    b"application/jsonp", b"json", b"application/xml", b"application/json, text/plain", b";application/json",
    b"\xff\xfe",
]  # fmt: skip
HOSTS = [
    b"evil.example", b"", b"localhost.evil.example", b"127.0.0.1.nip.io", b"localhost@evil.example", b"[::1", b"[evil]",
    b"0x7f.evil", b"1.2.3.4.5", b"a" * 5000, b"\xff\xfe", b"evil.example:80", b"localhost:80:80:evil",
]  # fmt: skip
NUMBERS = [b"1e400", b"-1e999999", b"9" * 5000, b"0." + b"0" * 3000 + b"1", b"1" + b"0" * 400, b"-0e-1", b"1E+1000"]
NO_JSON = [b"NaN", b"Infinity", b"-Infinity", b"nan", b"01", b"+1", b".5", b"0x10", b"'a'", b"undefined", b"/**/1", b""]
NO_UTF8 = [b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\x80", b"\xe2\x82"]


@dataclass(frozen=True, slots=True)
class Malformed:
    """One request.

    Args:
        kind: a key of KINDS.
        wrong: it has a fault for certain, so the answer must be a refusal.
    """

    kind: str
    path: str
    body: bytes
    wrong: bool
    headers: dict[str, bytes] = field(default_factory=lambda: {"content-type": b"application/json"})


def malformed(rng: random.Random, kind: str | None = None) -> Malformed:
    kind = kind or rng.choice(list(KINDS))
    path = rng.choice(list(GOOD))
    return KINDS[kind](rng, kind, path)


def _truncated(rng: random.Random, kind: str, path: str) -> Malformed:
    body = _good(path)
    return Malformed(kind, path, body[: rng.randrange(len(body))], wrong=True)


def _replaced(rng: random.Random, kind: str, path: str) -> Malformed:
    """A value of another kind somewhere, or a name that is not known; which may be right after all."""
    content: Any = GOOD[path]
    for _ in range(rng.choice([1, 1, 3])):
        content = _replace(rng, content)
    return Malformed(kind, path, json.dumps(content).encode(), wrong=False)


def _replace(rng: random.Random, value: Any) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.85:
        name = rng.choice(list(value))
        if rng.random() < 0.1:
            return {**value, rng.choice(["", "\x00", "self", "x" * 5000, "__class__", "messages"]): value[name]}
        return {**value, name: _replace(rng, value[name])}
    if isinstance(value, list) and value and rng.random() < 0.7:
        place = rng.randrange(len(value))
        return [*value[:place], _replace(rng, value[place]), *value[place + 1 :]]
    return rng.choice(JUNK)


def _nested(rng: random.Random, kind: str, path: str) -> Malformed:
    depth = rng.choice([50, 500, 5_000, 100_000])
    opening, closing = rng.choice([(b"[", b"]"), (b'{"a":', b"}")])
    value = opening * depth + b"1" + closing * (depth if rng.random() < 0.7 else rng.randrange(depth))
    # These four take no nested value, where they know the field at all.
    return Malformed(
        kind, path, _with_value(rng.choice([b"messages", b"prompt", b"tokens", b"stop"]), value), wrong=True
    )


def _huge(rng: random.Random, kind: str, path: str) -> Malformed:
    name = rng.choice([b"max_tokens", b"temperature", b"seed", b"tokens", b"prompt", b"n", b"min_p", b"priority"])
    value = rng.choice(NUMBERS)
    value = b"[" + value + b"]" if rng.random() < 0.2 else value
    return Malformed(kind, path, _good(path)[:-1] + b', "' + name + b'": ' + value + b"}", wrong=False)


def _no_json(rng: random.Random, kind: str, path: str) -> Malformed:
    return Malformed(
        kind, path, _with_value(rng.choice([b"temperature", b"model", b"stop"]), rng.choice(NO_JSON)), True
    )


def _duplicates(rng: random.Random, kind: str, path: str) -> Malformed:
    """The last one of a name counts."""
    name = rng.choice(list(GOOD[path]))
    last = json.dumps(rng.choice([GOOD[path][name], *JUNK]))
    return Malformed(kind, path, _good(path)[:-1] + f', "{name}": {last}}}'.encode(), wrong=False)


def _no_utf8(rng: random.Random, kind: str, path: str) -> Malformed:
    body = _good(path)
    places = [place for place in range(len(body)) if body[:place].count(b'"') % 2]
    place = rng.choice(places)
    return Malformed(kind, path, body[:place] + rng.choice(NO_UTF8) + body[place:], wrong=True)


def _content_type(rng: random.Random, kind: str, path: str) -> Malformed:
    value = rng.choice(CONTENT_TYPES)
    return Malformed(kind, path, _good(path), True, {} if value is None else {"content-type": value})


def _host(rng: random.Random, kind: str, path: str) -> Malformed:
    headers = {"content-type": b"application/json", "host": rng.choice(HOSTS)}
    return Malformed(kind, path, _good(path), wrong=True, headers=headers)


def _bytes(rng: random.Random, kind: str, path: str) -> Malformed:
    """Anything at all, or a good body with bytes changed."""
    if rng.random() < 0.3:
        return Malformed(kind, path, rng.randbytes(rng.randrange(300)), wrong=True)
    body = bytearray(_good(path))
    for _ in range(rng.randint(1, 4)):
        body[rng.randrange(len(body))] = rng.randrange(256)
    return Malformed(kind, path, bytes(body), wrong=False)


def _no_object(rng: random.Random, kind: str, path: str) -> Malformed:
    value = rng.choice([value for value in JUNK if not isinstance(value, dict)])
    return Malformed(kind, path, json.dumps(value).encode(), wrong=True)


def _good(path: str) -> bytes:
    return json.dumps(GOOD[path]).encode()


def _with_value(name: bytes, value: bytes) -> bytes:
    return b'{"' + name + b'": ' + value + b"}"


KINDS: dict[str, Callable[[random.Random, str, str], Malformed]] = {
    "truncated": _truncated,
    "replaced": _replaced,
    "nested": _nested,
    "huge numbers": _huge,
    "no JSON": _no_json,
    "duplicate names": _duplicates,
    "no UTF-8": _no_utf8,
    "content type": _content_type,
    "host": _host,
    "bytes": _bytes,
    "no object": _no_object,
}
