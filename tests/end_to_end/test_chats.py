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
    # Not all of them: a short answer may have ended before the last prompt had its turn.
    assert max(step["num_requests"] for step in steps) > NUM_CHATS // 2, "the chats never shared a step"
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


@dataclass(frozen=True, slots=True)
class Choices:
    texts: list[str]
    reasons: list[str | None]
    usage: tuple[int, int, int]


async def ask_for_choices(client: AsyncOpenAI, n: int, **fields: Any) -> Choices:
    """Streamed, and put together by index alone."""
    texts, reasons, usage = [""] * n, [None] * n, (0, 0, 0)
    stream: Any = await client.chat.completions.create(
        model="SmolLM2-135M-Instruct",
        messages=conversations()[0],  # type: ignore[arg-type]
        n=n,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
        **fields,
    )
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        if chunk.usage is not None:
            cached = chunk.usage.prompt_tokens_details.cached_tokens
            usage = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens, cached)
    return Choices(texts, reasons, usage)


def ask_in_turn(url: str, *asked: dict[str, Any]) -> list[Choices]:
    async def ask() -> list[Choices]:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client:
            return [await ask_for_choices(client, **fields) for fields in asked]

    return asyncio.run(ask())


def test_greedy_choices_are_all_the_one_answer(server: RunningServer) -> None:
    one, three = ask_in_turn(server.url, {"n": 1, "temperature": 0}, {"n": 3, "temperature": 0})
    for text in three.texts:
        if text != one.texts[0]:
            assert_a_tie_set_them_apart(conversations()[0], text, one.texts[0])
    assert None not in three.reasons
    assert three.usage[0] == one.usage[0], "the prompt counts once"
    assert three.usage[1] == 3 * one.usage[1]
    block_size = get_json(f"{server.url}/inspect/kv")["block_size"]
    assert three.usage[2] == (three.usage[0] - 1) // block_size * block_size > 0, "the prompt was computed a moment ago"


def test_seeded_choices_differ_and_come_back_the_same(server: RunningServer) -> None:
    seeded = {"n": 3, "temperature": 1, "seed": 11}
    first, again, alone = ask_in_turn(server.url, seeded, seeded, {**seeded, "n": 1})
    assert len(set(first.texts)) == 3
    assert again.texts == first.texts
    assert alone.texts == first.texts[:1]
    assert (again.reasons, again.usage[:2]) == (first.reasons, first.usage[:2])


def test_choices_are_seen_under_their_own_ids(server: RunningServer) -> None:
    async def ask() -> tuple[str, list[Any], Any]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
            stream = await client.completions.create(
                model="SmolLM2-135M-Instruct", prompt=CONTEXT, n=2, max_tokens=500, stream=True, seed=1
            )
            first = await anext(aiter(stream))
            live = [
                await asyncio.to_thread(get_json, f"{server.url}/inspect/requests/{first.id}-{index}")
                for index in range(2)
            ]
            kv = await asyncio.to_thread(get_json, f"{server.url}/inspect/kv")
            await stream.close()
            return first.id, live, kv

    response_id, live, kv = asyncio.run(ask())
    assert [request["id"] for request in live] == [f"{response_id}-0", f"{response_id}-1"]
    tables = [request["block_table"] for request in live]
    shared = live[0]["num_prompt_tokens"] // kv["block_size"]
    assert tables[0][:shared] == tables[1][:shared]
    assert set(tables[0][shared:]).isdisjoint(tables[1][shared:])
    assert kv["blocks_saved_by_sharing"] == shared > 0


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
