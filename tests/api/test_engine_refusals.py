"""What the engine alone finds out about a request, as HTTP shows it: instead of an answer, and in a stream."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pageframe.runtime.request import RequestOutput

from .conftest import RunningServer
from .fakes import outputs_of

NO_TOKEN = "bad_words and min_tokens (1, before which no end may come) together leave no token that may come next"


def ended(reason: str, error: str, *, param: str = "", text: str = "") -> list[RequestOutput]:
    """Tokens, and then what the engine says instead of more."""
    last = RequestOutput("", [], finish_reason=reason, error=error, param=param)
    return [*outputs_of([[byte] for byte in text.encode()] or [[]], reason=""), last] if text else [last]


def test_rules_that_leave_no_token_are_the_clients_fault(server: RunningServer) -> None:
    """No one field is: they leave none together."""
    for text in ("", "ab"):
        server.engine.script = lambda prompt, params, text=text: ended("refused", NO_TOKEN, text=text)
        response = server.complete(min_tokens=1)
        assert response.status_code == 400
        expected = {"message": NO_TOKEN, "type": "invalid_request_error", "param": None, "code": None}
        assert response.json()["error"] == expected


def test_a_grammar_that_leaves_no_token_beside_another_field_has_the_clients_name(server: RunningServer) -> None:
    words = "and allowed_token_ids (1 ids) together leave no token that may come next"
    server.engine.script = lambda prompt, params: ended("refused", f"grammar {words}")
    response = server.complete(structured_outputs={"regex": "a+"}, allowed_token_ids=[5])
    assert response.json()["error"]["message"] == f"structured_outputs {words}"
    assert response.json()["error"]["param"] is None


@pytest.mark.parametrize(("param", "shown"), [("", None), ("grammar", "structured_outputs")])
def test_in_a_stream_that_has_begun_the_last_event_says_so(
    server: RunningServer, param: str, shown: str | None
) -> None:
    server.engine.script = lambda prompt, params: ended("refused", NO_TOKEN, param=param, text="ab")
    response = server.complete(stream=True, structured_outputs={"regex": "a+"})
    assert response.status_code == 200
    *chunks, last, end = response.text.split("\n\n")
    assert end == ""
    assert [text_of(chunk) for chunk in chunks] == ["a", "b"]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error == {"message": NO_TOKEN, "type": "invalid_request_error", "param": shown, "code": None}


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_finds_no_place_to_be_compiled_is_told_to_come_again(
    server: RunningServer, stream: bool
) -> None:
    server.engine.script = lambda prompt, params: ended("busy", "64 other grammars wait")
    response = server.complete(stream=stream, structured_outputs={"regex": "a+"})
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["message"] == "64 other grammars wait"
    assert response.json()["error"]["code"] == "queue_full"
    server.wait_idle()


def text_of(chunk: str) -> Any:
    return json.loads(chunk.removeprefix("data: "))["choices"][0]["text"]
