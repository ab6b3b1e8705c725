"""What a client may not send: each rule with the message it must carry, and junk that must never be more than a 400."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from .conftest import RunningServer
from .fakes import MAX_MODEL_LEN, RESOLVED, VOCAB_SIZE, WAIT_SECONDS

MIB = 1024**2
MAX_NUM_REQUESTS = RESOLVED.max_num_requests
USER = [{"role": "user", "content": "hi"}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
IMAGE = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}


def schema_format(**fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", **fields}}}


SCHEMA_WITHOUT = schema_format(strict=True)
SCHEMA_WRONG_STRICT = schema_format(schema={}, strict=1)
SCHEMA_UNKNOWN = schema_format(schema={}, mode="x")

# Fields, the field the error names, and what the message must say: value and limit.
GENERATION_RULES: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"temperature": -0.1}, "temperature", ["-0.1", "0 to 10"]),
    ({"temperature": 10.1}, "temperature", ["10.1", "0 to 10"]),
    ({"temperature": True}, "temperature", ["true", "number"]),
    ({"temperature": "1"}, "temperature", ['"1"', "number"]),
    ({"top_p": 0}, "top_p", ["0", "above 0", "at most 1"]),
    ({"top_p": 1.01}, "top_p", ["1.01", "at most 1"]),
    ({"min_p": 1.5}, "min_p", ["1.5", "0 to 1"]),
    ({"min_p": -1e-9}, "min_p", ["-1e-09", "0 to 1"]),
    ({"top_k": -2}, "top_k", ["-2", "at least -1"]),
    ({"top_k": 1.5}, "top_k", ["1.5", "an integer"]),
    ({"seed": 2**63}, "seed", [str(2**63), str(2**63 - 1)]),
    ({"seed": -(2**63) - 1}, "seed", [str(-(2**63) - 1), str(-(2**63))]),
    ({"seed": False}, "seed", ["false", "an integer"]),
    ({"max_tokens": 0}, "max_tokens", ["0", "at least 1"]),
    ({"max_tokens": -1}, "max_tokens", ["-1", "at least 1"]),
    ({"max_tokens": 10**9}, "max_tokens", [str(10**9), str(MAX_MODEL_LEN)]),
    ({"max_tokens": 10**30}, "max_tokens", ["1000", "at most"]),
    ({"max_tokens": 5.0}, "max_tokens", ["5.0", "an integer"]),
    ({"min_tokens": -1}, "min_tokens", ["-1", "at least 0"]),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", ["5", "at most max_tokens (4)"]),
    ({"min_tokens": 10**9}, "min_tokens", [str(10**9), str(MAX_MODEL_LEN)]),
    ({"stop": ["a"] * 17}, "stop", ["17", "16"]),
    ({"stop": [""]}, "stop", ["0 characters", "1 to 1024"]),
    ({"min_tokens": 2, "structured_outputs": {"regex": "a"}}, "min_tokens", ["2", "beside structured_outputs", "be 0"]),
    (
        {"ignore_eos": True, "response_format": {"type": "json_object"}},
        "ignore_eos",
        ["beside response_format", "false"],
    ),
    ({"stop": ["x" * 1025]}, "stop", ["1025 characters", "1 to 1024"]),
    ({"stop": 7}, "stop", ["7", "a string or a list of strings"]),
    ({"stop": ["a", None]}, "stop", ["a list of 2", "a list of strings"]),
    ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids", [str(VOCAB_SIZE), "below"]),
    ({"stop_token_ids": [-1]}, "stop_token_ids", ["-1", "at least 0"]),
    ({"stop_token_ids": [True]}, "stop_token_ids", ["stop_token_ids[0]", "true", "an integer"]),
    ({"ignore_eos": 1}, "ignore_eos", ["1", "true or false"]),
    ({"skip_special_tokens": "no"}, "skip_special_tokens", ['"no"', "true or false"]),
    ({"stream": "true"}, "stream", ['"true"', "true or false"]),
    ({"stream_options": {"include_usage": True}}, "stream_options", ["stream is not true"]),
    ({"stream": True, "stream_options": 3}, "stream_options", ["3", "an object"]),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", ["1", "true or false"]),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", ["not a known field"]),
    ({"user": 5}, "user", ["5", "a string"]),
    ({"model": ["tiny"]}, "model", ["a list of 1", "a string"]),
    ({"request_id": "a b"}, "request_id", ['"a b"', "1 to 128"]),
    ({"request_id": "x" * 129}, "request_id", ["129 characters", "1 to 128"]),
    ({"unheard_of": 1}, "unheard_of", ["unheard_of", "not a known field"]),
    ({"presence_penalty": 2.1}, "presence_penalty", ["2.1", "-2 to 2"]),
    ({"presence_penalty": "1"}, "presence_penalty", ['"1"', "number"]),
    ({"frequency_penalty": -2.1}, "frequency_penalty", ["-2.1", "-2 to 2"]),
    ({"frequency_penalty": True}, "frequency_penalty", ["true", "number"]),
    ({"repetition_penalty": 0}, "repetition_penalty", ["0", "above 0", "at most 10"]),
    ({"repetition_penalty": 10.5}, "repetition_penalty", ["10.5", "at most 10"]),
    ({"logit_bias": [1]}, "logit_bias", ["a list of 1", "an object"]),
    ({"logit_bias": {"5": 100.5}}, "logit_bias", ["logit_bias[5]", "100.5", "-100 to 100"]),
    ({"logit_bias": {"5": -(10**400)}}, "logit_bias", ["400 digits", "-100 to 100"]),
    ({"logit_bias": {"5": True}}, "logit_bias", ["true", "a number"]),
    ({"logit_bias": {"a": 1}}, "logit_bias", ['"a"', "a token id"]),
    ({"logit_bias": {"05": 1}}, "logit_bias", ['"05"', "a token id"]),
    ({"logit_bias": {"-1": 1}}, "logit_bias", ["-1", "at least 0"]),
    ({"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias", [str(VOCAB_SIZE), "below"]),
    ({"logit_bias": {str(2**31): 1}}, "logit_bias", [str(2**31), "below"]),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", ["1025", "at most 1024"]),
    ({"bad_words": "a"}, "bad_words", ['"a"', "a list of strings"]),
    ({"bad_words": ["a", 1]}, "bad_words", ["a list of 2", "a list of strings"]),
    ({"bad_words": [""]}, "bad_words", ["0 characters", "1 to 200"]),
    ({"bad_words": ["x" * 201]}, "bad_words", ["201 characters", "1 to 200"]),
    ({"bad_words": ["a"] * 513}, "bad_words", ["513", "at most 512"]),
    ({"allowed_token_ids": 5}, "allowed_token_ids", ["5", "a list of token ids"]),
    ({"allowed_token_ids": [1, "2"]}, "allowed_token_ids", ["allowed_token_ids[1]", '"2"', "an integer"]),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids", ["-1", "at least 0"]),
    ({"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids", [str(VOCAB_SIZE), "below"]),
    ({"prompt_logprobs": 21}, "prompt_logprobs", ["21", "at most 20"]),
    ({"prompt_logprobs": -1}, "prompt_logprobs", ["-1", "at least 0"]),
    ({"prompt_logprobs": True}, "prompt_logprobs", ["true", "an integer"]),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", ["0", "at least 1", "-1"]),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", ["-2", "at least 1"]),
    ({"truncate_prompt_tokens": 5.0}, "truncate_prompt_tokens", ["5.0", "an integer"]),
    ({"truncate_prompt_tokens": 65}, "truncate_prompt_tokens", ["65", "max_model_len (64)"]),
    ({"response_format": "json"}, "response_format", ['"json"', "an object"]),
    ({"response_format": {}}, "response_format.type", ["null", "text, json_object, json_schema"]),
    ({"response_format": {"type": "xml"}}, "response_format.type", ['"xml"', "json_schema"]),
    ({"response_format": {"type": "text", "x": 1}}, "response_format.x", ["not a known field"]),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", ["null", "an object"]),
    (SCHEMA_WITHOUT, "response_format.json_schema.schema", ["null", "an object"]),
    (SCHEMA_WRONG_STRICT, "response_format.json_schema.strict", ["1", "true or false"]),
    (SCHEMA_UNKNOWN, "response_format.json_schema.mode", ["not a known field"]),
    ({"structured_outputs": "a"}, "structured_outputs", ['"a"', "json, regex, choice, grammar"]),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", ["regex and json", "only one"]),
    ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml", ["not a known field"]),
    ({"structured_outputs": {"regex": "a" * 262_145}}, "structured_outputs.regex", ["262145 bytes", "at most 262144"]),
    ({"structured_outputs": {"choice": ["é" * 200_000]}}, "structured_outputs.choice", ["400004 bytes", "262144"]),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex", ["5", "a string"]),
    ({"structured_outputs": {"json": True}}, "structured_outputs.json", ["true", "an object or its text"]),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", ["a list of 0", "at least one"]),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice", ["none of them empty"]),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
        ["both ask", "one of them"],
    ),
    ({"n": 0}, "n", ["0", "at least 1"]),
    ({"n": -1}, "n", ["-1", "at least 1"]),
    ({"n": 129}, "n", ["129", "at most 128"]),
    ({"n": 10**400}, "n", ["400 digits", "at most 128"]),
    ({"n": MAX_NUM_REQUESTS + 1}, "n", [str(MAX_NUM_REQUESTS + 1), f"at most {MAX_NUM_REQUESTS}", "max_num_requests"]),
    ({"n": 2.0}, "n", ["2.0", "an integer"]),
    ({"n": True}, "n", ["true", "an integer"]),
    ({"n": "2"}, "n", ['"2"', "an integer"]),
    ({"priority": 2**31}, "priority", [str(2**31), f"at most {2**31 - 1}"]),
    ({"priority": -(2**31) - 1}, "priority", [str(-(2**31) - 1), f"at least {-(2**31)}"]),
    ({"priority": 1.5}, "priority", ["1.5", "an integer"]),
    ({"priority": False}, "priority", ["false", "an integer"]),
    ({"cache_salt": 5}, "cache_salt", ["5", "a string"]),
    ({"cache_salt": ["x"]}, "cache_salt", ["a list of 1", "a string"]),
    ({"cache_salt": "x" * 257}, "cache_salt", ["257 characters", "at most 256"]),
    ({"timeout_seconds": 0}, "timeout_seconds", ["0", "above 0", "at most 3600"]),
    ({"timeout_seconds": 3600.5}, "timeout_seconds", ["3600.5", "at most 3600"]),
    ({"timeout_seconds": "5"}, "timeout_seconds", ['"5"', "a number"]),
    ({"timeout_seconds": False}, "timeout_seconds", ["false", "a number"]),
]

CHAT_RULES: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"messages": None}, "messages", ["null", "a list"]),
    ({"messages": []}, "messages", ["empty", "at least 1"]),
    ({"messages": "hi"}, "messages", ['"hi"', "a list"]),
    ({"messages": ["hi"]}, "messages[0]", ['"hi"', "an object"]),
    ({"messages": [{"content": "x"}]}, "messages[0].role", ["null", "system, developer, user, assistant, tool"]),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", ['"wizard"', "system"]),
    ({"messages": [{"role": "user"}]}, "messages[0].content", ["null", "a string"]),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", ["5", "a string"]),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", ["a list of 0"]),
    ({"messages": [*USER, {"role": "user", "content": [IMAGE]}]}, "messages[1].content[0].type", ["image_url", "text"]),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", ["a string"]),
    ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood", ["not a known field"]),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages[0].tool_calls", ["not a known"]),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]", ["tool_call_id is missing"]),
    ({"messages": [*USER, *USER]}, "messages", ["alternate"]),
    ({"functions": [{"name": "f"}]}, "functions", ["a list of 1", "not supported"]),
    ({"function_call": {"name": "f"}}, "function_call", ["an object", "not supported"]),
    ({"audio": {"voice": "x"}}, "audio", ["an object", "not supported", "only be null"]),
    ({"modalities": ["text", "audio"]}, "modalities", ["a list of 2", 'null or ["text"]']),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction", ["an object", "not supported"]),
    ({"web_search_options": {}}, "web_search_options", ["an object", "not supported"]),
    ({"prompt_cache_retention": "24h"}, "prompt_cache_retention", ['"24h"', "not supported"]),
    ({"max_completion_tokens": 0}, "max_completion_tokens", ["0", "at least 1"]),
    ({"max_completion_tokens": 10**9}, "max_completion_tokens", ["max_completion_tokens is 1000000000", "64"]),
    ({"max_completion_tokens": 3, "max_tokens": 4}, "max_completion_tokens", ["3", "4"]),
    ({"logprobs": 1}, "logprobs", ["1", "true or false"]),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", ["21", "at most 20"]),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", ["-1", "at least 0"]),
    ({"top_logprobs": 2}, "top_logprobs", ["2", "logprobs is not true"]),
    ({"tools": [{"type": "function"}]}, "tools[0].function", ["null", "an object"]),
    ({"tools": "f"}, "tools", ['"f"', "a list"]),
    ({"tool_choice": "required"}, "tool_choice", ["tool_choice", "tools has no tool"]),
    ({"tool_choice": "any"}, "tool_choice", ['"any"', '"required"']),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls", ["1", "true or false"]),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", ["'messages'"]),
    ({"chat_template_kwargs": 1}, "chat_template_kwargs", ["1", "an object"]),
    ({"continue_final_message": True}, "continue_final_message", ["'user'", "'assistant'"]),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", ["only one"]),
    ({"chat_template": "{{ x }}"}, "chat_template", ["not a known field"]),
]

COMPLETION_RULES: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"prompt": None}, "prompt", ["null", "a string or a list of token ids"]),
    ({"prompt": ""}, "prompt", ["empty", "at least 1"]),
    ({"prompt": []}, "prompt", ["empty", "at least 1"]),
    ({"prompt": [""]}, "prompt", ["empty", "at least 1"]),
    ({"prompt": [[]]}, "prompt", ["empty", "at least 1"]),
    ({"prompt": ["a", ""]}, "prompt[1]", ["prompt[1] is empty"]),
    ({"prompt": ["a", 5]}, "prompt[1]", ["prompt[1] is 5", "a string or a list of token ids"]),
    ({"prompt": [[1], [2, True]]}, "prompt[1]", ["prompt[1][1]", "true", "an integer"]),
    ({"prompt": ["a"] * 129}, "prompt", ["129 prompts", "at most 128"]),
    ({"prompt": ["a"] * 65, "n": 2}, "n", ["2", "65 prompts", "130 choices", "at most 128"]),
    ({"prompt": [[1], [VOCAB_SIZE]]}, "prompt[1]", ["prompt[1]", str(VOCAB_SIZE), "below"]),
    ({"prompt": ["a", "x" * MAX_MODEL_LEN]}, "prompt[1]", ["prompt[1]", f"{MAX_MODEL_LEN + 1} tokens"]),
    ({"prompt": {"text": "a"}}, "prompt", ["an object", "a string"]),
    ({"prompt": [1, True]}, "prompt", ["prompt[1]", "true", "an integer"]),
    ({"prompt": [1.0]}, "prompt", ["1.0", "an integer"]),
    ({"prompt": [-1]}, "prompt", ["-1", "at least 0"]),
    ({"prompt": [VOCAB_SIZE]}, "prompt", [str(VOCAB_SIZE), "below"]),
    ({"prompt": [1] * MAX_MODEL_LEN}, "prompt", [f"{MAX_MODEL_LEN} tokens", f"at most {MAX_MODEL_LEN - 1}"]),
    ({"prompt": [1] * 60, "max_tokens": 5}, "max_tokens", ["5", "60", "64", "4"]),
    ({"logprobs": 21}, "logprobs", ["21", "at most 20"]),
    ({"logprobs": True}, "logprobs", ["true", "an integer"]),
    ({"echo": 1}, "echo", ["1", "true or false"]),
    ({"suffix": "x"}, "suffix", ['"x"', "not supported"]),
    ({"best_of": 2}, "best_of", ["2", "not supported"]),
    ({"messages": USER}, "messages", ["not a known field"]),
]


def check_error(response: Any, status: int, param: str | None, said: list[str]) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    missing = [words for words in said if words not in error["message"]]
    assert not missing, f"{error['message']!r} does not say {missing}"
    assert response.headers["x-request-id"]


@pytest.mark.parametrize(("fields", "param", "said"), GENERATION_RULES + CHAT_RULES)
def test_a_chat_request_outside_the_rules(
    server: RunningServer, fields: dict[str, Any], param: str, said: list[str]
) -> None:
    check_error(server.chat(**fields), 400, param, said)
    assert not server.engine.added


@pytest.mark.parametrize(("fields", "param", "said"), GENERATION_RULES + COMPLETION_RULES)
def test_a_completion_request_outside_the_rules(
    server: RunningServer, fields: dict[str, Any], param: str, said: list[str]
) -> None:
    check_error(server.complete(**fields), 400, param, said)
    assert not server.engine.added


NEUTRAL = {
    "n": [1, MAX_NUM_REQUESTS, None],
    "presence_penalty": [0, 0.0, None],
    "frequency_penalty": [0, None],
    "repetition_penalty": [1, 1.0, None],
    "logit_bias": [{}, None],
    "bad_words": [[], None],
    "allowed_token_ids": [[], None],
    "prompt_logprobs": [None],
    "truncate_prompt_tokens": [None],
    "response_format": [{"type": "text"}, None],
    "structured_outputs": [{}, None],
    "priority": [0, 2**31 - 1, -(2**31), None],
    "cache_salt": ["", "é" * 256, None],
    "timeout_seconds": [None],
    "metadata": [{"a": "b"}],
    "store": [True, False],
    "service_tier": ["auto"],
    "prompt_cache_key": ["x"],
    "safety_identifier": ["x"],
    "verbosity": ["low"],
    "reasoning_effort": ["low", None],
    "stop": [None, [], ""],
    "logprobs": [None],
    "stream_options": [None, {}, {"include_usage": False, "continuous_usage_stats": None}],
    "min_tokens": [0, None],
    "ignore_eos": [False, None],
    "temperature": [None, 0, 1e-38, 10],
    "top_k": [None, 0, -1, 1, 2**31, 10**30],
    "top_p": [None, 1, 1e-9],
    "seed": [None, 2**63 - 1, -(2**63)],
    "max_tokens": [None, 1],
    "user": [None, "someone"],
    "model": [None, "tiny"],
}
CHAT_NEUTRAL = {
    "tools": [[], None],
    "tool_choice": ["none", "auto", None],
    "parallel_tool_calls": [True, False, None],
    "top_logprobs": [None, 0],
    "functions": [[], None],
    "function_call": ["none", "auto", None],
    "audio": [None],
    "modalities": [["text"], None],
    "prediction": [None],
    "web_search_options": [None],
    "prompt_cache_retention": ["in-memory", None],
}
COMPLETION_NEUTRAL = {"echo": [False, None], "suffix": ["", None], "best_of": [1, None]}


def _cases(table: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, values in table.items() for value in values]


@pytest.mark.parametrize(("name", "value"), _cases(NEUTRAL | CHAT_NEUTRAL))
def test_a_value_that_asks_for_nothing_more_is_accepted_in_chat(server: RunningServer, name: str, value: Any) -> None:
    response = server.chat(**{name: value})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(("name", "value"), _cases(NEUTRAL | COMPLETION_NEUTRAL))
def test_a_value_that_asks_for_nothing_more_is_accepted_in_completions(
    server: RunningServer, name: str, value: Any
) -> None:
    response = server.complete(**{name: value})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
def test_an_unknown_model_is_a_404(server: RunningServer, route: str) -> None:
    body = {"model": "gpt-9", **({"messages": USER} if "chat" in route else {"prompt": "hi"})}
    response = server.client.post(route, json=body)
    check_error(response, 404, "model", ["'gpt-9'", "'tiny'"])
    assert response.json()["error"]["code"] == "model_not_found"


def test_a_prompt_without_room_has_its_own_code(server: RunningServer) -> None:
    response = server.complete(prompt=[1] * MAX_MODEL_LEN)
    assert response.json()["error"]["code"] == "context_length_exceeded"
    response = server.chat(messages=[{"role": "user", "content": "x" * MAX_MODEL_LEN}])
    check_error(response, 400, "messages", [f"{MAX_MODEL_LEN + 10} tokens"])
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_max_tokens_takes_exactly_the_room_that_is_left(server: RunningServer) -> None:
    assert server.complete(prompt=[1] * 60, max_tokens=4).status_code == 200
    assert server.complete(prompt=[1] * 60, max_tokens=5).status_code == 400
    assert server.complete(prompt=[1] * 63).status_code == 200


BAD_JSON = [
    (b"", "truncated"),
    (b"{", "truncated"),
    (b"[]", "JSON object"),
    (b'"text"', "JSON object"),
    (b'{"temperature": NaN}', "invalid character"),
    (b'{"temperature": Infinity}', "invalid character"),
    (b'{"temperature": -Infinity}', "no valid JSON"),
    (b'{"temperature": 1e999}', "out of range"),
    (b'{"prompt": "\\ud800"}', "no valid JSON"),
    (b'{"prompt": "\xff"}', "UTF-8"),
    (b'{"prompt": "a",}', "no valid JSON"),
    (b"{'prompt': 'a'}", "no valid JSON"),
    (b'{"prompt": ' + b"[" * 100_000, "too deep"),
    (b'{"prompt": ' + b'{"a":' * 100_000, "too deep"),
]


@pytest.mark.parametrize(("body", "said"), BAD_JSON, ids=range(len(BAD_JSON)))
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_a_body_that_is_no_json_object(server: RunningServer, route: str, body: bytes, said: str) -> None:
    response = server.client.post(route, content=body, headers={"content-type": "application/json"})
    check_error(response, 400, None, [said])


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonp"])
def test_any_other_content_type_is_refused(server: RunningServer, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    response = server.client.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
    check_error(response, 400, "content-type", [content_type or "missing", "application/json"])


def test_json_with_a_charset_is_json(server: RunningServer) -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert server.client.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers).status_code == 200


def test_a_body_over_the_limit_is_a_413_with_and_without_its_length(server: RunningServer) -> None:
    headers = {"content-type": "application/json"}
    limit = server.config.max_body_bytes
    assert limit == 16 * MIB
    response = server.client.post("/v1/completions", content=b" " * (limit + 1), headers=headers)
    check_error(response, 413, None, [str(limit + 1), str(limit)])
    # No content-length: it is sent in chunks, and counted as it comes.
    response = server.client.post("/v1/completions", content=(b" " * MIB for _ in range(17)), headers=headers)
    check_error(response, 413, None, [str(limit)])
    padded = b'{"prompt": "a"' + b" " * (limit - 15) + b"}"
    assert server.client.post("/v1/completions", content=padded, headers=headers).status_code == 200


def test_a_large_body_is_served_like_a_small_one(server: RunningServer) -> None:
    body = json.dumps({"prompt": "a"}) + " " * 100_000
    headers = {"content-type": "application/json"}
    response = server.client.post("/v1/completions", content=body, headers=headers)
    assert response.json()["choices"][0]["text"] == "hello"
    response = server.client.post("/v1/completions", content=body[:-100_000] + "x" * 100_000, headers=headers)
    check_error(response, 400, None, ["no valid JSON"])


JUNK = [
    None,
    True,
    False,
    0,
    -1,
    1.5,
    1e308,
    2**64,
    10**400,
    "",
    "x",
    "\x00",
    "é" * 3000,
    [],
    [[]],
    [None],
    {},
    {"a": {}},
]
SEEDS = [
    {"messages": USER, "max_tokens": 3, "stop": ["a"], "stream": False, "temperature": 0.5, "logprobs": True},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "stream_options": {}, "tools": []},
    {"messages": [*USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}], "chat_template_kwargs": {}},
]


def replace_something(rng: random.Random, value: Any) -> Any:
    """A copy with one part, at any depth, replaced by junk, or a key renamed."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {**value, rng.choice(["", "\x00", "self", "x" * 1000]): value[key]}
        return {**value, key: replace_something(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        return [*value[:place], replace_something(rng, value[place]), *value[place + 1 :]]
    return rng.choice(JUNK)


def _damage(rng: random.Random, body: bytes) -> bytes:
    place = rng.randrange(len(body))
    how = rng.randrange(4)
    if how == 0:
        return body[:place]
    if how == 1:
        return body[:place] + bytes([rng.randrange(256)]) + body[place + 1 :]
    if how == 2:
        return body[:place] + rng.choice([b"\\ud800", b"NaN", b"{", b"]", b'"', b"1e999", b"\xff", b"-"]) + body[place:]
    return body[:place] + body[rng.randrange(len(body)) :]


def test_500_malformed_bodies_are_the_clients_fault_and_the_server_lives(server: RunningServer) -> None:
    rng = random.Random(20)
    statuses = {200: 0, 400: 0, 404: 0}
    headers = {"content-type": "application/json"}
    for number in range(500):
        content = replace_something(rng, rng.choice(SEEDS))
        body = json.dumps(content).encode()
        if number % 2:
            body = _damage(rng, body)
        response = server.client.post("/v1/chat/completions", content=body, headers=headers, timeout=WAIT_SECONDS)
        assert response.status_code in statuses, (body, response.text)
        statuses[response.status_code] += 1
        if response.status_code != 200:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
            assert len(response.text) < 1000
    assert statuses[400] > 300
    assert server.chat().json()["choices"][0]["message"]["content"] == "hello"
