"""Fields that steer the engine: each reaches it as it was given; and what it answers to a deadline or a bad grammar."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from pageframe.runtime.grammar import GrammarSpec
from pageframe.runtime.request import RequestOutput, SamplingParams

from .conftest import RunningServer
from .fakes import VOCAB_SIZE, merged, outputs_of, reply

USER = [{"role": "user", "content": "hi"}]
ROUTES = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "hi"},
}


def params_of(server: RunningServer, route: str, **fields: Any) -> SamplingParams:
    response = server.client.post(route, json={**ROUTES[route], **fields})
    assert response.status_code == 200, response.text
    return server.engine.added[-1].params


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 10},
        {"presence_penalty": 2, "frequency_penalty": -2, "repetition_penalty": 1e-3},
        {"timeout_seconds": 3600},
        {"timeout_seconds": 0.001},
        {"allowed_token_ids": [0, VOCAB_SIZE - 1]},
    ],
)
def test_fields_reach_the_engine_as_they_were_given(server: RunningServer, route: str, fields: dict[str, Any]) -> None:
    assert params_of(server, route, **fields) == SamplingParams(**fields)


@pytest.mark.parametrize("route", ROUTES)
def test_logit_bias_has_ids_as_keys(server: RunningServer, route: str) -> None:
    bias = {"0": -100, "259": 100, "7": 0.5}
    assert params_of(server, route, logit_bias=bias).logit_bias == {0: -100.0, 259: 100.0, 7: 0.5}


@pytest.mark.parametrize("route", ROUTES)
def test_bad_words_are_banned_at_a_texts_start_and_behind_a_space(server: RunningServer, route: str) -> None:
    words = ["no", " é", " ", "no"]
    expected = [b"no", b" no", "é".encode(), " é".encode(), b" "]
    assert params_of(server, route, bad_words=words).bad_words_ids == tuple(map(tuple, expected))


@pytest.mark.parametrize("route", ROUTES)
def test_neutral_values_leave_the_engines_defaults(server: RunningServer, route: str) -> None:
    neutral = {
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1,
        "logit_bias": {},
        "bad_words": [],
        "allowed_token_ids": [],
        "response_format": {"type": "text"},
        "structured_outputs": {"json": None, "regex": None},
        "timeout_seconds": None,
    }
    assert params_of(server, route, **neutral) == SamplingParams()
    assert params_of(server, route, **dict.fromkeys(neutral)) == SamplingParams()


# ---- grammars -------------------------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"const": "é"}}, "required": ["z"]}
TEXT = json.dumps(SCHEMA, ensure_ascii=False)


def json_schema(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", **fields}}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("fields", "spec"),
    [
        ({"response_format": {"type": "json_object"}}, GrammarSpec("json_object")),
        ({"response_format": json_schema(schema=SCHEMA, strict=True)}, GrammarSpec("json_schema", TEXT)),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, GrammarSpec("json_schema", TEXT)),
        ({"structured_outputs": {"json": '{"a": 1e400}'}}, GrammarSpec("json_schema", '{"a": 1e400}')),
        ({"structured_outputs": {"regex": "[a-z]+"}}, GrammarSpec("regex", "[a-z]+")),
        ({"structured_outputs": {"choice": ["é", "b"]}}, GrammarSpec("choice", '["é", "b"]')),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, GrammarSpec("lark", 'start: "a"')),
        ({"structured_outputs": {}, "response_format": {"type": "text"}}, None),
    ],
)
def test_a_form_of_the_text_is_a_grammar(
    server: RunningServer, route: str, fields: dict[str, Any], spec: GrammarSpec | None
) -> None:
    assert params_of(server, route, **fields).grammar == spec


@pytest.mark.parametrize("strict", [False, None])
def test_a_schema_that_is_not_strict_is_enforced_where_it_can_be(server: RunningServer, strict: bool | None) -> None:
    given = {**SCHEMA, "x-guidance": {"item_separator": ","}}
    spec = params_of(server, "/v1/completions", response_format=json_schema(schema=given, strict=strict)).grammar
    assert spec is not None
    assert json.loads(spec.source) == {**SCHEMA, "x-guidance": {"lenient": True, "item_separator": ","}}
    assert list(json.loads(spec.source)["properties"]) == ["z", "a"]


def refused(prompt: list[int], params: SamplingParams) -> list[RequestOutput]:
    return [
        RequestOutput(
            "", [], finish_reason="refused", error="grammar has a Lark grammar that is not valid", param="grammar"
        )
    ]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("field", "value"),
    [("structured_outputs", {"regex": "("}), ("response_format", json_schema(schema={"type": 5}))],
)
def test_a_grammar_that_the_engine_refuses_is_the_clients_fault(
    server: RunningServer, route: str, stream: bool, field: str, value: Any
) -> None:
    server.engine.script = refused
    response = server.client.post(route, json={**ROUTES[route], field: value, "stream": stream, "n": 2})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["message"] == f"{field} has a Lark grammar that is not valid"
    assert (error["param"], error["type"]) == (field, "invalid_request_error")
    server.wait_idle()


# ---- deadlines ------------------------------------------------------------------------------------------------------


def late(*texts: str) -> list[RequestOutput]:
    """Tokens, and then the deadline."""
    return [*outputs_of([text.encode() for text in texts] or [[]], reason=""), *outputs_of([[]], reason="timeout")]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_before_the_first_token_is_a_408_that_is_not_tried_again(
    server: RunningServer, route: str, stream: bool
) -> None:
    server.engine.script = lambda prompt, params: outputs_of([[]], reason="timeout")
    response = server.client.post(route, json={**ROUTES[route], "timeout_seconds": 2.5, "stream": stream})
    assert response.status_code == 408
    assert response.headers["x-should-retry"] == "false"
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert "timeout_seconds, which is 2.5" in error["message"]
    assert (error["param"], error["code"]) == ("timeout_seconds", "timeout")


def test_a_deadline_in_an_answer_is_a_408_and_in_a_stream_its_last_event(server: RunningServer) -> None:
    server.engine.script = lambda prompt, params: late("a", "b")
    assert server.complete(timeout_seconds=1).status_code == 408
    response = server.complete(timeout_seconds=1, stream=True)
    assert response.status_code == 200
    *chunks, last, end = response.text.split("\n\n")
    assert end == ""
    assert [json.loads(chunk.removeprefix("data: "))["choices"][0]["text"] for chunk in chunks] == ["a", "b"]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"


def test_a_deadline_ends_every_choice(server: RunningServer) -> None:
    server.engine.script = lambda prompt, params: merged(late("a"), outputs_of([b"b"], reason=""), reply("done"))
    assert server.chat(timeout_seconds=1, n=3).status_code == 408
    server.wait_idle()
    request_id = server.engine.added[0].request_id
    assert f"{request_id}-1" in server.engine.aborted


def test_openais_client_does_not_repeat_what_came_too_late(server: RunningServer) -> None:
    server.engine.script = lambda prompt, params: outputs_of([[]], reason="timeout")
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=2) as client,
        pytest.raises(openai.APIStatusError) as raised,
    ):
        client.chat.completions.create(model="tiny", messages=USER, extra_body={"timeout_seconds": 1})
    assert raised.value.status_code == 408
    assert len(server.engine.added) == 1
