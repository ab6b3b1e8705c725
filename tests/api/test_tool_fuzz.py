"""Random answers in random pieces: what streams is what does not, down to tool calls, usage and finish reasons."""

from __future__ import annotations

import json
import os
import random
import sys
import zlib
from typing import Any

import pytest

from pageframe.runtime.request import RequestOutput, SamplingParams
from pageframe.runtime.text import TextStream

from .conftest import RunningServer
from .fakes import EOS, merged, outputs_of
from .tool_cases import PARSERS, check_deltas, ids, join_tool_calls, parse

SEED = int(os.environ.get("PAGEFRAME_TEST_SEED", "20240607"))
WORDS = ["a", " ", "\n", "é", "日本", "👩‍👩‍👧", "\ufffd", "{", "}", "[", "]", "<", '"', "\\", ",", ";", "1", "null"]
MARKS = {
    "hermes": ["<tool_call>", "</tool_call>", "<tool_call>\n", "<tool_", "call>"],
    "llama3": ["<|python_tag|>", "; ", "<|python"],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS] [", "[ARGS]", "[CALL_ID]abc", ", ", "[TOOL_", "f", "g"],
}
STOPS = ["a", "}\n", "</tool_call>", "é", "日", '"}', "null", "<|", "\n\n", "ll>", "name"]
CONTENT = ["Sure.", "é 日本 {}", '{"name": "f"} <tool> [TOOL]', 'I said: "call".', "👩‍👩‍👧 <3"]


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """A test's own numbers, the same in every run with this seed."""
    sys.stdout.write(f"repeat with PAGEFRAME_TEST_SEED={SEED}\n")
    return random.Random(SEED + zlib.crc32(request.node.nodeid.encode()))


def arguments(rng: random.Random) -> str:
    def value(depth: int) -> Any:
        kind = rng.randrange(3 if depth > 2 else 5)
        if kind == 0:
            return rng.choice([None, True, -1, 2.5e-9, 10**18])
        if kind < 3:
            return "".join(rng.choices(WORDS, k=rng.randrange(4)))
        if kind == 3:
            return [value(depth + 1) for _ in range(rng.randrange(3))]
        return {rng.choice(WORDS): value(depth + 1) for _ in range(rng.randrange(3))}

    return json.dumps({f"k{index}": value(0) for index in range(rng.randrange(3))}, ensure_ascii=rng.random() < 0.3)


def call(rng: random.Random, kind: str, name: str, written: str) -> str:
    """A call as models of the kind write it, alone."""
    if kind == "mistral" and rng.random() < 0.5:
        return f"[TOOL_CALLS]{name}{rng.choice(['', '[CALL_ID]abcdef123'])}[ARGS]{written}"
    key = "parameters" if kind == "llama3" else "arguments"
    text = f'{{"name": "{name}", "{key}": {written}}}'
    if kind == "hermes":
        return f"<tool_call>\n{text}\n</tool_call>"
    return f"[TOOL_CALLS] [{text}]" if kind == "mistral" else text


def anything(rng: random.Random, kind: str) -> str:
    """Text that is full of what calls are made of, some of it calls."""
    parts = []
    for _ in range(rng.randrange(1, 7)):
        part = call(rng, kind, rng.choice("fgh"), arguments(rng)) if rng.random() < 0.4 else ""
        if rng.random() < 0.3:
            part = part[: rng.randrange(len(part) + 1)]
        parts += [part, *rng.choices([*WORDS, *MARKS[kind]], k=rng.randrange(4))]
    return "".join(parts)


def tokens_of(rng: random.Random, text: str, kind: str) -> list[bytes]:
    """The text's bytes in tokens of any length, so that characters and marks come apart."""
    data, tokens = text.encode(), []
    longest = rng.choice([1, 2, 5, 20])
    while data:
        length = rng.randint(1, longest)
        tokens.append(data[:length])
        data = data[length:]
    return tokens


class Tokens:
    def __init__(self, tokens: list[bytes]) -> None:
        self._tokens = tokens

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokens[token_id]

    def is_special(self, token_id: int) -> bool:
        return False


def plain(tokens: list[bytes], params: SamplingParams) -> tuple[str, str | None, int]:
    """The text, the stop string that ends it and the tokens that count, without anything incremental."""
    text = b"".join(tokens).decode()
    end = min((text.index(stop) + len(stop) for stop in params.stop if stop in text), default=None)
    if end is None:
        return text, None, len(tokens)
    stop = max((stop for stop in params.stop if text[:end].endswith(stop)), key=len)
    num_bytes, num_tokens = len(text[:end].encode()), 0
    while num_bytes > 0:
        num_bytes -= len(tokens[num_tokens])
        num_tokens += 1
    return text[: end - len(stop)], stop, num_tokens


def streamed(
    rng: random.Random, kind: str, tokens: list[bytes], params: SamplingParams, *, parallel: bool, longest: int
) -> tuple[Any, str | None, int]:
    """The same through both incremental parts, in pushes of up to `longest` tokens, sometimes of none."""
    stream = TextStream(Tokens(tokens), params)
    parser = PARSERS[kind](["f", "g"], parallel=parallel, make_id=ids().__next__)
    content, deltas, start = "", [], 0
    while True:
        end = min(len(tokens), start + rng.randint(0 if longest > 1 else 1, longest))
        is_last = end == len(tokens) and rng.random() < 0.7
        text = stream.push(list(range(start, end)), final=is_last)
        is_last |= text.stop is not None
        delta = parser.push(text.text, final=is_last)
        content += delta.content
        deltas += delta.tool_calls
        start = end
        if is_last:
            check_deltas(deltas)
            calls = [(one["function"]["name"], one["function"]["arguments"]) for one in join_tool_calls(deltas)]
            return (content, calls, parser.finish_reason("stop")), text.stop, text.num_tokens


def check_pieces(rng: random.Random, kind: str) -> int:
    """One random answer; the number of its calls."""
    text = anything(rng, kind)
    tokens = tokens_of(rng, text, kind)
    params = SamplingParams(stop=tuple(rng.sample(STOPS, rng.choice([0, 0, 1, 3]))))
    parallel = rng.random() < 0.7
    kept, stop, num_tokens = plain(tokens, params)
    message = parse(kind, [kept], parallel=parallel)
    expected = (message, stop, num_tokens)
    for longest in (1, 3, 50):
        assert streamed(rng, kind, tokens, params, parallel=parallel, longest=longest) == expected, text
    content, calls, reason = message
    if reason == "tool_calls":
        assert all(isinstance(json.loads(written), dict) for _, written in calls)
    if not calls:
        assert content == kept, "what is no call is content, to the letter"
    return len(calls)


def check_round_trip(rng: random.Random, kind: str) -> None:
    """Calls written well come back as they are, with the text around them."""
    named = [(rng.choice("fg"), arguments(rng)) for _ in range(rng.randrange(1, 4))]
    texts = [call(rng, kind, name, written) for name, written in named]
    before = rng.choice(["", *CONTENT]) if kind != "llama3" else ""
    after = rng.choice(["", *CONTENT]) if kind == "hermes" and rng.random() < 0.3 else ""
    between = "; " if kind == "llama3" else rng.choice(["", "\n", " "])
    text = before + rng.choice(["", "\n"]) + between.join(texts) + rng.choice(["", "\n"]) * (not after) + after
    tokens = tokens_of(rng, text, kind)
    got, _, num_tokens = streamed(rng, kind, tokens, SamplingParams(), parallel=True, longest=4)
    assert got == (before + after, named, "tool_calls"), text
    assert num_tokens == len(tokens)


def check_many(rng: random.Random, kind: str, count: int) -> None:
    num_calls = 0
    for _ in range(count):
        num_calls += check_pieces(rng, kind)
        check_round_trip(rng, kind)
    assert num_calls > count / 10, "there were too few calls to say anything"


@pytest.mark.parametrize("kind", PARSERS)
def test_pieces_joined_are_the_whole(kind: str, rng: random.Random) -> None:
    check_many(rng, kind, 150)


@pytest.mark.long
@pytest.mark.parametrize("kind", PARSERS)
def test_pieces_joined_are_the_whole_of_10000_answers(kind: str, rng: random.Random) -> None:
    check_many(rng, kind, 10_000)


# ---- over HTTP ------------------------------------------------------------------------------------------------------


def random_outputs(rng: random.Random) -> list[RequestOutput]:
    """An engine's outputs of one choice: bytes in random chunks, valid UTF-8 or not, and an end of either kind."""
    data = "".join(rng.choices(WORDS, k=rng.randrange(1, 12))).encode()
    if rng.random() < 0.2:
        data += bytes([rng.choice([0xC0, 0xE2, 0x80, 0xF0])])
    data = data[:40]
    chunks: list[list[int]] = []
    while data:
        size = rng.randint(1, 5)
        chunks.append(list(data[:size]))
        data = data[size:]
    if rng.random() < 0.5:
        return outputs_of([*chunks, [EOS]], reason="stop")
    return outputs_of(chunks, reason="length")


def events(text: str) -> list[dict[str, Any]]:
    assert text.endswith("\n\ndata: [DONE]\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:-2]]


def check_answer(rng: random.Random, server: RunningServer) -> None:
    num_choices = rng.choice([1, 1, 1, 3])
    seed = rng.random()

    def script(prompt: list[int], params: SamplingParams) -> list[RequestOutput]:
        same = random.Random(seed)
        return merged(*(random_outputs(same) for _ in range(num_choices)))

    server.engine.script = script
    fields = {"n": num_choices, "stop": rng.sample(WORDS, rng.randrange(3))}
    whole = server.chat(**fields).json()
    chunks = events(server.chat(**fields, stream=True, stream_options={"include_usage": True}).text)
    texts, ends = [""] * num_choices, [("", "")] * num_choices
    for chunk in chunks[:-1]:
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        if choice["finish_reason"] is not None:
            assert ends[choice["index"]] == ("", "")
            ends[choice["index"]] = (choice["finish_reason"], choice["stop_reason"])
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]
    assert ends == [(choice["finish_reason"], choice["stop_reason"]) for choice in whole["choices"]]
    assert chunks[-1]["usage"] == whole["usage"]
    server.engine.added.clear()


def test_streamed_answers_are_the_whole_ones(server: RunningServer, rng: random.Random) -> None:
    for _ in range(60):
        check_answer(rng, server)


@pytest.mark.long
def test_3000_streamed_answers_are_the_whole_ones(server: RunningServer, rng: random.Random) -> None:
    for _ in range(3_000):
        check_answer(rng, server)
