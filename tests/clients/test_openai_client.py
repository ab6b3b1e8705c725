"""OpenAI's own Python client: every way it has of asking for an answer, its errors and its retries."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from pageframe.benchmarks.experiments.server_process import RunningServer

from ..api.conftest import RunningServer as FakeServer
from ..api.fakes import FakeEngine
from .conftest import MODEL

MESSAGES: Any = [{"role": "user", "content": "Say hello."}]
SHORT: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4, "temperature": 0}
DIGIT: Any = {
    "type": "function",
    "function": {
        "name": "pick",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"digit": {"enum": [3, 5, 7]}},
            "required": ["digit"],
            "additionalProperties": False,
        },
    },
}


class Verdict(BaseModel):
    answer: Literal["yes", "no"]


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture(scope="module")
def text(client: openai.OpenAI) -> str:
    """The plain answer, which every other way of asking must give too."""
    answer = client.chat.completions.create(**SHORT)
    [choice] = answer.choices
    assert answer.model == MODEL
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
    assert choice.message.content
    return choice.message.content


def test_models(client: openai.OpenAI) -> None:
    [model] = client.models.list()
    assert model.id == MODEL
    assert client.models.retrieve(MODEL) == model


def test_a_stream_says_what_the_answer_says(client: openai.OpenAI, text: str) -> None:
    chunks = list(client.chat.completions.create(**SHORT, stream=True, stream_options={"include_usage": True}))
    *deltas, last = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in deltas) == text
    assert [chunk.choices[0].finish_reason for chunk in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 4
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


def test_the_stream_helper_puts_an_answer_together(client: openai.OpenAI) -> None:
    # It takes an answer that max_tokens ended for a failure.
    fields = {**SHORT, "max_tokens": 40, "stop": ["!", ".", "?", ","]}
    with client.chat.completions.stream(**fields) as stream:
        kinds = {event.type for event in stream}
        answer = stream.get_final_completion()
    whole = client.chat.completions.create(**fields)
    assert answer.choices[0].message.content == whole.choices[0].message.content
    assert answer.choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    assert {"chunk", "content.delta", "content.done"} <= kinds


def test_the_async_client(server: RunningServer, text: str) -> None:
    async def ask() -> tuple[Any, str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            whole = await client.chat.completions.create(**SHORT)
            stream: Any = await client.chat.completions.create(**SHORT, stream=True)
            return whole, "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    whole, streamed = asyncio.run(ask())
    assert whole.choices[0].message.content == streamed == text


def test_a_stream_that_is_closed_early_leaves_nothing_behind(client: openai.OpenAI, server: RunningServer) -> None:
    with client.chat.completions.create(**{**SHORT, "max_tokens": 2000}, stream=True) as stream:
        next(iter(stream))
    # Whoever is answered after it waits for the step that ends it.
    client.chat.completions.create(**SHORT)
    assert httpx.get(f"{server.url}/inspect/requests").json()["requests"] == []


def test_raw_responses(client: openai.OpenAI, text: str) -> None:
    raw = client.chat.completions.with_raw_response.create(**SHORT, extra_headers={"x-request-id": "mine-1"})
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.headers["content-type"] == "application/json"
    answer = raw.parse()
    assert answer.choices[0].message.content == text
    assert answer._request_id == "mine-1"
    with client.chat.completions.with_streaming_response.create(**SHORT, stream=True) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert all(json.loads(line.removeprefix("data: "))["choices"] for line in lines[:-1])


def test_completions_of_several_prompts(client: openai.OpenAI) -> None:
    prompts = ["One, two,", "A, B,"]
    answer = client.completions.create(model=MODEL, prompt=prompts, max_tokens=2, temperature=0, logprobs=1)
    alone = [
        client.completions.create(model=MODEL, prompt=prompt, max_tokens=2, temperature=0).choices[0].text
        for prompt in prompts
    ]
    assert [choice.text for choice in answer.choices] == alone
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == alone[0]


def test_logprobs(client: openai.OpenAI, text: str) -> None:
    answer = client.chat.completions.create(**SHORT, logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == text
    for entry in logprobs.content:
        best, second = entry.top_logprobs
        assert (best.token, best.logprob) == (entry.token, entry.logprob), "greedy takes the likeliest"
        assert second.logprob <= best.logprob <= 0


def test_parse_gives_a_pydantic_model(client: openai.OpenAI) -> None:
    fields = {**SHORT, "max_tokens": 40}
    answer = client.chat.completions.parse(**fields, response_format=Verdict)
    verdict = answer.choices[0].message.parsed
    assert isinstance(verdict, Verdict)
    with client.chat.completions.stream(**fields, response_format=Verdict) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == verdict


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "pick"}}])
def test_tools_that_must_be_called_are_called_as_their_schema_says(client: openai.OpenAI, choice: Any) -> None:
    fields = {**SHORT, "max_tokens": 60, "tools": [DIGIT], "tool_choice": choice, "parallel_tool_calls": False}
    answer = client.chat.completions.create(**fields)
    assert answer.choices[0].finish_reason == "tool_calls"
    [call] = answer.choices[0].message.tool_calls or []
    assert call.function.name == "pick"
    assert json.loads(call.function.arguments)["digit"] in (3, 5, 7)


def test_streamed_tool_calls_and_their_answers_go_back(client: openai.OpenAI) -> None:
    fields = {**SHORT, "max_tokens": 60, "tools": [DIGIT], "parallel_tool_calls": False}
    with client.chat.completions.stream(**fields, tool_choice="required") as stream:
        message = stream.get_final_completion().choices[0].message
    [call] = message.tool_calls or []
    assert call.function.parsed_arguments["digit"] in (3, 5, 7)
    said = {"role": "assistant", "content": "", "tool_calls": [call.model_dump(include={"id", "type", "function"})]}
    said["tool_calls"][0]["function"].pop("parsed_arguments")
    heard = {"role": "tool", "tool_call_id": call.id, "content": "It was right."}
    fields = {**SHORT, "tools": [DIGIT], "messages": [*MESSAGES, said, heard]}
    answer = client.chat.completions.create(**fields, tool_choice="none")
    assert answer.choices[0].message.content


def test_errors_are_the_clients_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(**{**SHORT, "temperature": 11})
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    assert bad.value.request_id
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(**{**SHORT, "model": "gpt-9"})
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError, match="/v1/chat/completions"):
        client.responses.create(model=MODEL, input="hi")
    with pytest.raises(openai.NotFoundError, match="makes no embeddings"):
        client.embeddings.create(model=MODEL, input="hi")


def ask_fake(server: FakeServer, statuses: list[int], **fields: Any) -> Any:
    """A chat with two retries; every response's status is noted, and after the first the queue has room."""

    def note(response: httpx.Response) -> None:
        statuses.append(response.status_code)
        server.engine.stats.num_waiting = 0

    http = httpx.Client(event_hooks={"response": [note]})
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=2, http_client=http) as client:
        return client.chat.completions.create(model="tiny", messages=MESSAGES, **fields)


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer(FakeEngine(), max_queue=0).start()
    yield server
    server.close()


def test_a_full_queue_is_tried_again_and_a_bad_request_is_not(fake: FakeServer) -> None:
    statuses: list[int] = []
    assert ask_fake(fake, statuses).choices[0].message.content == "hello"
    assert statuses == [429, 200]
    statuses.clear()
    with pytest.raises(openai.BadRequestError):
        ask_fake(fake, statuses, temperature=11)
    assert statuses == [400]


def test_a_stream_that_fails_raises_instead_of_ending(fake: FakeServer) -> None:
    fake.engine.stats.num_waiting = 0
    fake.engine.held_from = 2
    with openai.OpenAI(base_url=f"{fake.url}/v1", api_key="none", max_retries=0) as client:
        stream = iter(client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True))
        text = "".join(next(stream).choices[0].delta.content or "" for _ in range(3))
        fake.engine.die()
        with pytest.raises(openai.APIError, match="the engine ended"):
            list(stream)
    assert text == "he"


def test_keys(tmp_path: Path) -> None:
    key = "sk-0123456789abcdef"
    (tmp_path / "keys").write_text(key)
    server = FakeServer(FakeEngine(), api_keys=str(tmp_path / "keys")).start()
    try:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
            assert client.models.list().data
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="sk-wrong", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()
    finally:
        server.close()
