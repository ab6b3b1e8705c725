"""A whole server on a free port of 127.0.0.1, in a thread of its own, over a fake engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from pageframe.api.auth import load_access
from pageframe.api.config import ServerConfig
from pageframe.api.launch import bind
from pageframe.api.metrics import Metrics
from pageframe.api.server import serve
from pageframe.api.service import ServerState, Service

from .fakes import WAIT_SECONDS, ByteTokenizer, FakeEngine, PlainTemplate


class RunningServer:
    """A server with its engine and a client for it. `close` stops it as SIGTERM would."""

    def __init__(self, engine: FakeEngine, service: dict[str, Any] | None = None, **config: Any) -> None:
        self.engine = engine
        self.config = ServerConfig(port=0, **config)
        self._service = {
            "client": engine,
            "tokenizer": ByteTokenizer(),
            "template": PlainTemplate(),
            "model_name": "tiny",
            "sampling_defaults": {},
            "metrics": Metrics("tiny", engine.resolved, lambda: engine.stats),
            **(service or {}),
        }
        self.may_load = threading.Event()
        self.may_load.set()
        self._listener = bind(self.config)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.failure: BaseException | None = None
        self.client = httpx.Client(base_url=self.url, timeout=WAIT_SECONDS)

    def start(self, *, wait: bool = True) -> RunningServer:
        self._thread.start()
        if wait:
            self.wait_ready()
        return self

    def wait_ready(self) -> None:
        assert self._ready.wait(WAIT_SECONDS)

    def stop(self) -> None:
        """As a signal does; returns at once."""
        self._loop.call_soon_threadsafe(self.state.stop)

    def wait_idle(self) -> None:
        """Until no generation is under way: an answer is read a moment before its generation is left."""
        asyncio.run_coroutine_threadsafe(self.state.idle.wait(), self._loop).result(WAIT_SECONDS)

    def join(self) -> None:
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive(), "the server did not end"

    def close(self) -> None:
        self.client.close()
        if self._thread.is_alive():
            self.stop()
        self.join()

    def chat(self, **fields: Any) -> httpx.Response:
        return self.client.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], **fields}
        )

    def complete(self, **fields: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={"prompt": "hi", **fields})

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.state = ServerState(self.config, load_access(self.config, {}))
        try:
            await serve(self._listener, self.state, self._load)
        except Exception as error:
            self.failure = error
        finally:
            self._listener.close()
            self._ready.set()

    async def _load(self) -> Service:
        await asyncio.to_thread(self.may_load.wait, WAIT_SECONDS)
        self._announcing = asyncio.create_task(self._announce())
        return Service(**self._service)

    async def _announce(self) -> None:
        """Says that the server is ready when it has taken what was loaded, some turns of its loop later."""
        while self.state.service is None:
            await asyncio.sleep(0)
        self._ready.set()


Start = Callable[..., RunningServer]


@pytest.fixture
def start() -> Iterator[Start]:
    """Makes servers of a test's own, ended after it."""
    servers: list[RunningServer] = []

    def make(
        engine: FakeEngine | None = None, *, wait: bool = True, hold: bool = False, **settings: Any
    ) -> RunningServer:
        server = RunningServer(engine or FakeEngine(), **settings)
        servers.append(server)
        if hold:
            server.may_load.clear()
        return server.start(wait=wait)

    yield make
    for server in servers:
        server.may_load.set()
        server.close()


@pytest.fixture(scope="module")
def _shared() -> Iterator[RunningServer]:
    server = RunningServer(FakeEngine()).start()
    yield server
    server.close()


@pytest.fixture
def server(_shared: RunningServer) -> RunningServer:
    """One server for a module's tests; its engine starts each test anew."""
    engine = _shared.engine
    engine.script = FakeEngine().script
    engine.held_from = None
    engine.added, engine.aborted, engine.finished, engine.questions, engine.blocks_cached = [], [], [], [], 7
    return _shared
