"""LiteLLM, as proxies and agents call it: answers and streams of the default model, and its exceptions."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import pytest

from pageframe.benchmarks.experiments.server_process import RunningServer

from .conftest import MODEL

# Else it asks the internet for a list of prices when it is imported.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
litellm = pytest.importorskip("litellm", reason="litellm is not installed (extra: clients)")


@pytest.fixture(scope="module", autouse=True)
def _loop() -> Iterator[None]:
    """It takes the thread's event loop, or makes one that it never closes."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    asyncio.set_event_loop(None)
    loop.close()


@pytest.fixture(scope="module")
def fields(server: RunningServer) -> dict[str, Any]:
    return {
        "model": f"openai/{MODEL}",
        "api_base": f"{server.url}/v1",
        "api_key": "none",
        "messages": [{"role": "user", "content": "Say hello."}],
        "max_tokens": 4,
        "temperature": 0,
        "max_retries": 0,
    }


def test_completion_and_stream_say_the_same(fields: dict[str, Any]) -> None:
    answer = litellm.completion(**fields)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 4
    chunks = list(litellm.completion(**fields, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == answer.choices[0].message.content
    assert text
    assert chunks[-1].choices[0].finish_reason == "length"


def test_errors_are_its_own_exceptions(fields: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature is 11"):
        litellm.completion(**{**fields, "temperature": 11})
    with pytest.raises(litellm.NotFoundError, match="gpt-9"):
        litellm.completion(**{**fields, "model": "openai/gpt-9"})
