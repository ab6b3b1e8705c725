"""LangChain's client for OpenAI's API: answers, streams, structured output and tools of the default model."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from pageframe.benchmarks.experiments.server_process import RunningServer

from .conftest import MODEL

langchain_openai = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed (extra: clients)")


class Verdict(BaseModel):
    """What you think of it."""

    answer: Literal["yes", "no"] = Field(description="yes or no")


@pytest.fixture(scope="module")
def chat(server: RunningServer) -> Any:
    return langchain_openai.ChatOpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        model=MODEL,
        temperature=0,
        max_tokens=60,
        max_retries=0,
        timeout=120,
        stream_usage=True,
    )


@pytest.fixture(scope="module")
def answer(chat: Any) -> Any:
    return chat.bind(max_tokens=4).invoke("Say hello.")


def test_invoke(answer: Any) -> None:
    assert answer.content
    assert answer.response_metadata["finish_reason"] == "length"
    assert answer.response_metadata["model_name"] == MODEL
    assert answer.usage_metadata["output_tokens"] == 4
    assert answer.usage_metadata["input_tokens"] > 4


def test_stream(chat: Any, answer: Any) -> None:
    total = None
    for chunk in chat.bind(max_tokens=4).stream("Say hello."):
        total = chunk if total is None else total + chunk
    assert total is not None
    assert total.content == answer.content
    assert total.response_metadata["finish_reason"] == "length"
    assert total.usage_metadata["output_tokens"] == 4


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat: Any, method: str) -> None:
    verdict = chat.with_structured_output(Verdict, method=method).invoke("Is water wet? yes or no")
    assert isinstance(verdict, Verdict)


def test_bind_tools(chat: Any) -> None:
    bound = chat.bind_tools([Verdict], tool_choice="any", parallel_tool_calls=False)
    answer = bound.invoke("Is water wet?")
    [call] = answer.tool_calls
    assert call["name"] == "Verdict"
    assert call["args"]["answer"] in ("yes", "no")
    assert answer.invalid_tool_calls == []
    total = None
    for chunk in bound.stream("Is water wet?"):
        total = chunk if total is None else total + chunk
    assert total is not None
    assert [(call["name"], call["args"]) for call in total.tool_calls] == [("Verdict", call["args"])]
