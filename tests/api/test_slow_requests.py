"""Requests that are slow hold nobody else up: templates that run long, bodies that come slowly."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from typing import Any

import pytest

from pageframe.api.body import LARGE_BODY_BYTES, MAX_FULL_BODIES, NUM_TEMPLATE_THREADS, BodyReader
from pageframe.api.errors import ApiError

from .conftest import RunningServer, Start
from .fakes import WAIT_SECONDS
from .raw_bodies import HeldTemplate, head, posting, request_of, take

LARGE = LARGE_BODY_BYTES + 1
CHAT, TOKENIZE = "/v1/chat/completions", "/tokenize"


def conversation(text: str) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}]}).encode()


@pytest.mark.parametrize("path", [CHAT, TOKENIZE])
def test_others_are_served_while_the_template_of_a_small_body_runs(start: Start, path: str) -> None:
    template = HeldTemplate()
    server = start(service={"template": template})
    with posting(server, template) as post:
        held = post(path, conversation("hold"))
        template.wait_for(1)
        assert server.client.get("/health").json()["status"] == "ok"
        assert server.complete(stream=True).text.endswith("[DONE]\n\n")
        assert server.chat().status_code == 200
        assert not held.done()
        template.let_go.set()
        assert held.result(WAIT_SECONDS).status_code == 200


def test_few_templates_run_at_once_and_all_have_their_turn() -> None:
    async def scene() -> None:
        reader, let_go, threads = BodyReader(LARGE), threading.Event(), set[str]()

        def work(content: dict[str, Any]) -> Any:
            threads.add(threading.current_thread().name)
            assert let_go.wait(WAIT_SECONDS)
            return content["a"]

        def body_of(number: int) -> asyncio.Queue[bytes]:
            chunks: asyncio.Queue[bytes] = asyncio.Queue()
            chunks.put_nowait(b'{"a": %d}' % number)
            chunks.put_nowait(b"")
            return chunks

        num_bodies = 3 * NUM_TEMPLATE_THREADS
        taking = [
            asyncio.create_task(reader.take(request_of(body_of(number), None), work, has_template=True))
            for number in range(num_bodies)
        ]
        await asyncio.sleep(0)  # each has come and is to be worked on
        let_go.set()
        assert await asyncio.gather(*taking) == list(range(num_bodies))
        assert len(threads) == NUM_TEMPLATE_THREADS

    asyncio.run(asyncio.wait_for(scene(), WAIT_SECONDS))


@pytest.fixture
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that is not there at once is too slow."""
    monkeypatch.setattr("pageframe.api.body.READ_SECONDS", 0.0)
    monkeypatch.setattr("pageframe.api.body.MIN_BYTES_PER_SECOND", 2**60)


@pytest.mark.usefixtures("_no_patience")
@pytest.mark.parametrize("size", [LARGE, None])
def test_bodies_that_come_slowly_are_let_go_of(size: int | None) -> None:
    async def scene() -> None:
        reader = BodyReader(LARGE)
        for _ in range(2 * MAX_FULL_BODIES):  # all of each body comes, but for its end
            chunks: asyncio.Queue[bytes] = asyncio.Queue()
            chunks.put_nowait(b" " * LARGE)
            with pytest.raises(ApiError, match=f"^{LARGE} bytes of the body have come in 0 s; it must") as raised:
                await reader.take(request_of(chunks, size), lambda content: content)
            assert (raised.value.status, raised.value.code) == (408, "body_too_slow")
        body = b'{"a": 1}' + b" " * (LARGE - 8)
        assert await take(reader, body, declare=size is not None) == {"a": 1}

    asyncio.run(asyncio.wait_for(scene(), WAIT_SECONDS))


@pytest.mark.usefixtures("_no_patience")
def test_a_body_that_comes_too_slowly_is_a_408_and_the_end_of_its_connection(server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_SECONDS) as connection:
        connection.sendall(head("/v1/completions", 20) + b'{"prompt"')
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    start_line, _, rest = answer.partition(b"\r\n")
    headers, _, body = rest.partition(b"\r\n\r\n")
    assert start_line.split(b" ")[1] == b"408"
    assert b"x-should-retry: false" in headers
    assert json.loads(body)["error"]["type"] == "timeout_error"


def test_a_body_that_goes_on_coming_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longer it is, the longer it may take."""
    monkeypatch.setattr("pageframe.api.body.READ_SECONDS", 0.0)
    monkeypatch.setattr("pageframe.api.body.MIN_BYTES_PER_SECOND", 1 / WAIT_SECONDS)

    async def scene() -> None:
        chunks: asyncio.Queue[bytes] = asyncio.Queue()
        chunks.put_nowait(b'{"a":')
        taking = asyncio.create_task(BodyReader(LARGE).take(request_of(chunks, None), lambda content: content))
        for _ in range(5):  # the loop's turns
            await asyncio.sleep(0)
        assert not taking.done()
        chunks.put_nowait(b" 1}")
        chunks.put_nowait(b"")
        assert await taking == {"a": 1}

    asyncio.run(asyncio.wait_for(scene(), WAIT_SECONDS))
