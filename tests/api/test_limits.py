"""Limits that hold before any work is done, and large requests that hold nobody else up."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from typing import Any

import pytest

from pageframe.api.body import HUGE_BODY_BYTES, LARGE_BODY_BYTES, MAX_FULL_BODIES, BodyReader, parse_object
from pageframe.api.errors import ApiError
from pageframe.runtime.errors import InvalidRequestError
from pageframe.runtime.models.source import resolve_source
from pageframe.runtime.tokenizer import load_tokenizer

from .conftest import RunningServer, Start
from .fakes import MAX_MODEL_LEN, VOCAB_SIZE, WAIT_SECONDS
from .raw_bodies import JSON, HeldTokenizer, posting, request_of, status_of_head, take

LARGE, HUGE = LARGE_BODY_BYTES + 1, HUGE_BODY_BYTES + 1


# ---- nobody waits for a large request -------------------------------------------------------------------------------


def padded(prompt: str, size: int, field: str = "prompt") -> bytes:
    body = json.dumps({field: prompt}).encode()
    return body + b" " * (size - len(body))


@pytest.mark.parametrize("size", [LARGE, HUGE])
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_others_are_served_while_a_large_text_is_tokenised(start: Start, size: int, path: str) -> None:
    tokenizer = HeldTokenizer()
    server = start(service={"tokenizer": tokenizer})
    with posting(server, tokenizer) as post:
        held = post(path, padded("hold", size))
        tokenizer.wait_for(1)
        assert server.client.get("/health").json()["status"] == "ok"
        assert server.complete().status_code == 200
        assert server.chat(stream=True).text.endswith("[DONE]\n\n")
        assert not held.done()
        tokenizer.let_go.set()
        assert held.result(WAIT_SECONDS).status_code == 200


def test_huge_texts_come_one_at_a_time_and_hold_up_no_smaller_ones(start: Start) -> None:
    tokenizer = HeldTokenizer()
    server = start(service={"tokenizer": tokenizer})
    with posting(server, tokenizer) as post:
        huge = [post("/tokenize", padded(f"hold {number}", HUGE)) for number in range(3)]
        tokenizer.wait_for(1)
        large = [post("/tokenize", padded(f"hold large {number}", LARGE)) for number in range(2)]
        tokenizer.wait_for(3)
        assert sum("large" in text for text in tokenizer.entered) == 2
        assert server.client.get("/health").status_code == 200
        tokenizer.let_go.set()
        assert [call.result(WAIT_SECONDS).status_code for call in huge + large] == [200] * 5
    assert sorted(tokenizer.entered) == ["hold 0", "hold 1", "hold 2", "hold large 0", "hold large 1"]


def test_other_threads_run_while_a_real_text_is_tokenised() -> None:
    """Otherwise a thread of its own would be of no use."""
    tokenizer = load_tokenizer(resolve_source("default"))
    text = "The quick brown fox, 1234 times. " * 20_000
    begun, ended = threading.Event(), threading.Event()

    def encode() -> None:
        begun.set()
        tokenizer.encode(text, add_special_tokens=True)
        ended.set()

    thread = threading.Thread(target=encode)
    thread.start()
    assert begun.wait(WAIT_SECONDS)
    num_turns = 0
    while not ended.wait(0.001):
        num_turns += 1
    thread.join()
    # The text takes some tenths of a second; a thread that held the others up would leave them a turn or two.
    assert num_turns >= 20


# ---- refused before it is read --------------------------------------------------------------------------------------


def test_a_body_that_is_too_large_is_refused_by_its_length(server: RunningServer) -> None:
    assert status_of_head(server, "/v1/completions", server.config.max_body_bytes + 1) == 413


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_a_body_is_taken_as_it_is(server: RunningServer, path: str) -> None:
    fields = {"prompt": "hi"} if "chat" not in path else {"messages": [{"role": "user", "content": "hi"}]}
    response = server.client.post(path, json=fields, headers={"content-encoding": "gzip"})
    assert response.status_code == 415
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("content-encoding", "unsupported_encoding")
    assert "content-encoding header is 'gzip'" in error["message"]
    for plain in ("identity", "Identity", ""):
        assert server.client.post(path, json=fields, headers={"content-encoding": plain}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_full_queue_refuses_a_large_body_by_its_length(start: Start, path: str) -> None:
    server = start(max_queue=0)
    server.engine.stats.num_waiting = 1
    assert status_of_head(server, path, LARGE) == 429
    assert 'pageframe:num_refused_total{model_name="tiny"} 1.0' in server.client.get("/metrics").text
    # A small one is read all the same, so that its own faults are told.
    response = server.client.post(path, json={"temperature": 11})
    assert response.status_code == 400
    # Without a length it is refused when it has become large.
    response = server.client.post(path, content=(b" " * 4096 for _ in range(5)), headers=JSON)
    assert response.json()["error"]["code"] == "queue_full"
    assert server.client.post("/tokenize", content=padded("a", LARGE), headers=JSON).status_code == 200


def test_a_text_beyond_any_context_is_refused_before_it_is_tokenised(start: Start) -> None:
    tokenizer = HeldTokenizer()
    tokenizer.let_go.set()
    server = start(service={"tokenizer": tokenizer})
    text = "hold" + "x" * (MAX_MODEL_LEN * tokenizer.longest_token)
    for path, body in (
        ("/v1/completions", {"prompt": text}),
        ("/tokenize", {"prompt": text}),
        ("/tokenize", {"messages": [{"role": "user", "content": text}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
    ):
        error = server.client.post(path, json=body).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["param"] in body
        assert f"max_model_len {MAX_MODEL_LEN}" in error["message"]
    assert not tokenizer.entered
    assert server.client.post("/tokenize", json={"prompt": text[4:]}).status_code == 200


# ---- all bodies together --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("declare", [True, False])
def test_large_bodies_together_have_a_limit_that_small_ones_do_not_feel(declare: bool) -> None:
    async def scene() -> None:
        reader = BodyReader(LARGE)
        body = padded("a", LARGE)
        open_chunks = []
        waiting = []
        for _ in range(MAX_FULL_BODIES):  # all of each body has come, but for its end
            chunks: asyncio.Queue[bytes] = asyncio.Queue()
            chunks.put_nowait(body)
            open_chunks.append(chunks)
            waiting.append(asyncio.create_task(reader.take(request_of(chunks, LARGE), lambda content: content)))
        while not all(chunks.empty() for chunks in open_chunks):
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match=f"bytes; together at most {MAX_FULL_BODIES * LARGE} are held") as raised:
            await take(reader, body, declare=declare)
        assert (raised.value.status, raised.value.code) == (429, "too_many_bytes")
        assert raised.value.headers == {"retry-after": "1"}
        assert await take(reader, b'{"a": 1}') == {"a": 1}
        waiting[0].cancel()  # its client went away
        open_chunks[1].put_nowait(b"")
        assert await waiting[1] == {"prompt": "a"}
        assert await take(reader, body, declare=declare) == {"prompt": "a"}
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(asyncio.wait_for(scene(), WAIT_SECONDS))


def test_bodies_that_fail_are_not_held() -> None:
    async def scene() -> None:
        reader = BodyReader(LARGE)
        for _ in range(2 * MAX_FULL_BODIES):
            with pytest.raises(InvalidRequestError):
                await take(reader, b"{" + b" " * LARGE_BODY_BYTES)
            with pytest.raises(ApiError):
                await take(reader, b" " * (LARGE + 1), declare=False)
        assert await take(reader, padded("a", LARGE)) == {"prompt": "a"}

    asyncio.run(asyncio.wait_for(scene(), WAIT_SECONDS))


# ---- counting values ------------------------------------------------------------------------------------------------


def random_value(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(6 if depth else 4)
    if kind == 0:
        return rng.choice([None, True, 17, -1.5])
    if kind < 4:
        return "".join(rng.choice('ab",[]{}:\\\n é\U0001f600') for _ in range(rng.randrange(12)))
    items = [random_value(rng, depth - 1) for _ in range(rng.randrange(5))]
    return items if kind == 4 else {f'{number}"\\,[': item for number, item in enumerate(items)}


def num_values(value: Any) -> int:
    """Of a value and all in it; an empty list or object counts twice."""
    if not isinstance(value, (list, dict)):
        return 1
    return 1 + (sum(map(num_values, value.values() if isinstance(value, dict) else value)) or 1)


@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_body_has_exactly_as_many_values_as_it_may(ascii_only: bool) -> None:
    rng = random.Random(7)
    num_refused = 0
    for _ in range(300):
        content = {"x": [random_value(rng, 4) for _ in range(4)], "y" * 40: " \\"}
        body = json.dumps(content, ensure_ascii=ascii_only).encode()
        number = num_values(content)
        assert parse_object(body, number) == content
        if len(body) > number - 1:
            num_refused += 1
            with pytest.raises(InvalidRequestError, match=f"more than {number - 1} values") as raised:
                parse_object(body, number - 1)
            assert raised.value.code == "too_many_values"
    assert num_refused == 300


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": [' + b"1," * 2**19 + b"1]}",
        b'{"prompt": [' + b"[]," * 2**19 + b"1]}",
        b'{"prompt": ' + b'""' * (2**19 + 200),
        b'{"prompt": [' + b'"\\"",' * 2**19 + b"1]}",
    ],
    ids=["ids", "lists", "no-json", "texts"],
)
def test_many_values_are_refused_before_they_are_made(server: RunningServer, body: bytes) -> None:
    error = server.client.post("/v1/completions", content=body, headers=JSON).json()["error"]
    assert error["code"] == "too_many_values"


def test_brackets_and_commas_in_a_text_are_no_values(server: RunningServer) -> None:
    body = json.dumps({"text": ',[{"\\' * 400_000}).encode()
    error = server.client.post("/v1/completions", content=body, headers=JSON).json()["error"]
    assert error["code"] == "unknown_field"


def test_a_long_list_of_token_ids_is_told_its_length(server: RunningServer) -> None:
    response = server.complete(prompt=[1] * 200_000)
    assert response.status_code == 400
    assert f"200000 tokens; with max_model_len {MAX_MODEL_LEN}" in response.json()["error"]["message"]
    ids = [VOCAB_SIZE - 1] * 100_000
    assert server.client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": ""}


# ---- what is not here -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v1/responses", "instead, POST /v1/chat/completions answers"),
        ("/v1/responses/resp_1/input_items", "POST /v1/chat/completions"),
        ("/v1/embeddings", "makes no embeddings"),
    ],
)
def test_a_route_of_openais_that_is_not_here_says_what_is(
    server: RunningServer, method: str, path: str, said: str
) -> None:
    response = server.client.request(method, path)
    assert response.status_code == 404
    error = response.json()["error"]
    assert error["code"] == "route_not_found"
    assert error["message"].startswith(f"there is no route '{path}': ")
    assert said in error["message"]
    assert "instead" not in server.client.get("/v1/responses2").json()["error"]["message"]
