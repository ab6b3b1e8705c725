"""What the default model says is the same from a cold cache and a warm one, and 64 clients at once are all served."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import httpx
import openai
import pytest

from pageframe.benchmarks.experiments.server_process import RunningServer

from .conftest import MODEL

STORY = "The harbour was quiet, and the lighthouse keeper counted the boats that came home. " * 4
COMMON: dict[str, Any] = {"max_tokens": 5, "seed": 3, "temperature": 0.8, "return_token_ids": True}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        **COMMON,
        "messages": [{"role": "user", "content": STORY}],
        "n": 2,
        "logprobs": True,
        "top_logprobs": 3,
    },
    "/v1/completions": {**COMMON, "prompt": STORY, "logprobs": 3},
}
NUM_CLIENTS = 64


def without_ids(answer: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
    """An answer or a chunk without what is its own, and its cached_tokens."""
    answer = {name: value for name, value in answer.items() if name not in ("id", "created")}
    details = (answer.get("usage") or {}).get("prompt_tokens_details")
    return answer, details.pop("cached_tokens") if details else None


def ask(client: httpx.Client, path: str) -> tuple[dict[str, Any], int | None]:
    response = client.post(path, json=REQUESTS[path])
    assert response.status_code == 200, response.text
    return without_ids(response.json())


def ask_streaming(client: httpx.Client, path: str) -> tuple[list[dict[str, Any]], int | None]:
    fields = {**REQUESTS[path], "stream": True, "stream_options": {"include_usage": True}}
    *events, done, _ = client.post(path, json=fields).text.split("\n\n")
    assert done == "data: [DONE]"
    chunks = [without_ids(json.loads(event.removeprefix("data: "))) for event in events]
    return [chunk for chunk, _ in chunks], chunks[-1][1]


@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize("way", [ask, ask_streaming])
def test_cold_and_warm_answers_are_equal_in_every_field(server: RunningServer, path: str, way: Any) -> None:
    with httpx.Client(base_url=server.url, timeout=120) as client:
        client.post("/reset_prefix_cache").raise_for_status()
        cold, num_cold = way(client, path)
        warm, num_warm = way(client, path)
    assert cold == warm
    assert num_cold == 0
    assert num_warm >= 48, "the story is longer than three blocks"


async def ask_shortly(client: openai.AsyncOpenAI, number: int) -> tuple[str, str | None]:
    fields: Any = {"model": MODEL, "prompt": f"Number {number} is", "max_tokens": 3, "temperature": 0}
    if number % 2:
        answer = await client.completions.create(**fields)
        return answer.choices[0].text, answer.choices[0].finish_reason
    text, reason = "", None
    stream: Any = await client.completions.create(**fields, stream=True)
    async for chunk in stream:
        text += chunk.choices[0].text
        reason = chunk.choices[0].finish_reason or reason
    return text, reason


def test_64_clients_at_once(server: RunningServer) -> None:
    async def ask_all() -> list[tuple[str, str | None]]:
        async with contextlib.AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(
                    openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)
                )
                for _ in range(NUM_CLIENTS)
            ]
            return await asyncio.gather(*(ask_shortly(client, number) for number, client in enumerate(clients)))

    answers = asyncio.run(ask_all())
    assert len(answers) == NUM_CLIENTS
    assert all(text for text, _ in answers)
    assert {reason for _, reason in answers} <= {"length", "stop"}
    assert httpx.get(f"{server.url}/inspect/kv").json()["blocks"]["used"] == 0
