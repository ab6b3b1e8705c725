"""Eight people chat at once with the default model through the official client, each as if alone."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI

from pageframe.benchmarks.experiments import exactness
from pageframe.benchmarks.experiments.prompts import CHAT_QUESTIONS
from pageframe.benchmarks.experiments.server_process import RunningServer
from pageframe.runtime.chat_template import load_chat_template
from pageframe.runtime.models.source import resolve_source
from pageframe.runtime.tokenizer import load_tokenizer

NUM_CHATS = 8
MAX_TOKENS = 48
# Repeated for a part of them, so that prompts differ in length and prefills meet decoding requests.
CONTEXT = "The harbour was quiet, and the lighthouse keeper counted the boats that came home. " * 12


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    finish_reason: str | None
    completion_tokens: int


def conversations() -> list[list[dict[str, str]]]:
    texts = [
        question if index % 2 else f"{CONTEXT}\n\n{question}"
        for index, question in enumerate(CHAT_QUESTIONS[:NUM_CHATS])
    ]
    return [[{"role": "user", "content": text}] for text in texts]


async def stream_one(client: AsyncOpenAI, messages: list[dict[str, str]]) -> Answer:
    text, reason, tokens = "", None, 0
    stream: Any = await client.chat.completions.create(
        model="SmolLM2-135M-Instruct",
        messages=messages,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=MAX_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
    return Answer(text, reason, tokens)


async def stream_all(url: str, together: bool) -> list[Answer]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        if together:
            return list(await asyncio.gather(*(stream_one(client, messages) for messages in conversations())))
        return [await stream_one(client, messages) for messages in conversations()]


def get_json(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=60) as response:
        return json.load(response)


def test_eight_streams_at_once_equal_each_alone(server: RunningServer) -> None:
    first_step = get_json(f"{server.url}/inspect/kv")["step"]
    together = asyncio.run(stream_all(server.url, together=True))
    steps = get_json(f"{server.url}/inspect/steps?since={first_step + 1}")["steps"]
    assert max(step["num_requests"] for step in steps) == NUM_CHATS, "the chats never shared a step"
    assert any(step["prefill_tokens"] and step["decode_tokens"] for step in steps), "no step mixed prompts and decoding"

    alone = asyncio.run(stream_all(server.url, together=False))
    for messages, shared, solo in zip(conversations(), together, alone, strict=True):
        assert shared.finish_reason in ("stop", "length")
        assert shared.completion_tokens > 0
        if shared != solo:
            assert_a_tie_set_them_apart(messages, shared.text, solo.text)
    assert get_json(f"{server.url}/inspect/kv")["blocks"]["used"] == 0


def assert_a_tie_set_them_apart(messages: list[dict[str, str]], shared: str, solo: str) -> None:
    """Two texts may differ only where the oracle's best two tokens are within the tolerance of one another."""
    source = resolve_source("default")
    tokenizer = load_tokenizer(source)
    template = load_chat_template(source, tokenizer)
    assert template is not None
    prompt = tokenizer.encode(template.render(messages), add_special_tokens=False)
    outputs = [tokenizer.encode(text, add_special_tokens=False) for text in (shared, solo)]
    verdict = exactness.judge(exactness.load_oracle(), [prompt, prompt], outputs)
    assert verdict.wrong == 0, f"the answers differ, and not by a tie: {shared!r} and {solo!r}"


def test_the_plain_client_gets_the_same_text_unstreamed(server: RunningServer) -> None:
    async def ask() -> tuple[Answer, Any]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
            streamed = await stream_one(client, conversations()[1])
            whole = await client.chat.completions.create(
                model="SmolLM2-135M-Instruct",
                messages=conversations()[1],  # type: ignore[arg-type]
                temperature=0,
                max_tokens=MAX_TOKENS,
            )
            return streamed, whole

    streamed, whole = asyncio.run(ask())
    (choice,) = whole.choices
    assert choice.message.content == streamed.text
    assert choice.finish_reason == streamed.finish_reason
    assert whole.usage.completion_tokens == streamed.completion_tokens
