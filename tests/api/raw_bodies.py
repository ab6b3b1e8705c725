"""Requests whose body comes as a test says, and neighbours that hold what they are given until it lets them go."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
from starlette.requests import Request

from pageframe.api.body import BodyReader

from .conftest import RunningServer
from .fakes import WAIT_SECONDS, ByteTokenizer, PlainTemplate

JSON = {"content-type": "application/json"}


class Held:
    """Holds texts that begin with "hold" until the test lets them go."""

    def __init__(self) -> None:
        self.entered: list[str] = []
        self.let_go = threading.Event()
        self._changed = threading.Condition()

    def hold(self, text: str) -> None:
        if not text.startswith("hold"):
            return
        with self._changed:
            self.entered.append(text)
            self._changed.notify_all()
        assert self.let_go.wait(WAIT_SECONDS)

    def wait_for(self, num_entered: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.entered) == num_entered, WAIT_SECONDS)


class HeldTokenizer(ByteTokenizer, Held):
    def encode(self, text: str, **options: Any) -> list[int]:
        self.hold(text)
        return super().encode(text, **options)


class HeldTemplate(PlainTemplate, Held):
    """Holds conversations by their first message."""

    def render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        self.hold(messages[0]["content"])
        return super().render(messages, **options)


@contextmanager
def posting(server: RunningServer, held: Held) -> Iterator[Callable[..., Any]]:
    """Posts on connections of their own and threads of their own; lets held texts go at the end."""
    with ThreadPoolExecutor(8) as pool:

        def post(path: str, body: bytes) -> Any:
            return pool.submit(httpx.post, server.url + path, content=body, headers=JSON, timeout=WAIT_SECONDS)

        try:
            yield post
        finally:
            held.let_go.set()


def head(path: str, size: int) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
    ).encode()


def status_of_head(server: RunningServer, path: str, size: int, body: bytes = b"") -> int:
    """The status of an answer that comes when no more than that has been sent."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_SECONDS) as connection:
        connection.sendall(head(path, size) + body)
        return int(connection.recv(65536).split(b" ")[1])


def request_of(chunks: asyncio.Queue[bytes], length: int | None) -> Request:
    """A POST whose body comes as the test puts it; b"" ends it."""
    headers = [(b"content-type", b"application/json")]
    if length is not None:
        headers.append((b"content-length", str(length).encode()))

    async def receive() -> dict[str, Any]:
        chunk = await chunks.get()
        return {"type": "http.request", "body": chunk, "more_body": chunk != b""}

    return Request({"type": "http", "method": "POST", "headers": headers}, receive)


async def take(reader: BodyReader, body: bytes, *, declare: bool = True) -> dict[str, Any]:
    chunks: asyncio.Queue[bytes] = asyncio.Queue()
    for chunk in (body, b""):
        chunks.put_nowait(chunk)
    return await reader.take(request_of(chunks, len(body) if declare else None), lambda content: content)
