"""A small OpenAI server whose answers a test scripts, in a thread of its own on 127.0.0.1."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from aiohttp import web

MODEL = "fake-model"
PIECE = 3  # its tokenizer cuts text into pieces of that many characters
BOS = 0


class Call:
    """One streaming request as its script sees it."""

    def __init__(self, server: FakeOpenAI, request: web.Request, body: dict[str, Any]) -> None:
        self.server = server
        self.request = request
        self.body = body
        self.chat = "messages" in body
        self.prompt: str = body["messages"][-1]["content"] if self.chat else body["prompt"]
        self.response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        self.sent_tokens = 0

    async def start(self) -> None:
        await self.response.prepare(self.request)
        if self.chat:
            await self.send({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})

    async def send(self, event: dict[str, Any] | str) -> None:
        text = event if isinstance(event, str) else json.dumps(event)
        await self.response.write(f"data: {text}\n\n".encode())

    async def token(self, text: str = " tok") -> None:
        self.sent_tokens += 1
        content = {"delta": {"content": text}} if self.chat else {"text": text}
        await self.send({"choices": [{"index": 0, "finish_reason": None, **content}]})

    async def finish(self, reason: str = "length") -> None:
        content: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
        await self.send({"choices": [{"index": 0, "finish_reason": reason, **content}]})
        if self.body.get("stream_options", {}).get("include_usage"):
            prompt_tokens = len(self.server.encode(self.prompt)) + 1
            usage = {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": self.sent_tokens,
                "total_tokens": prompt_tokens + self.sent_tokens,
                "prompt_tokens_details": {"cached_tokens": self.server.cached_tokens},
            }
            await self.send({"choices": [], "usage": usage})
        await self.send("[DONE]")

    async def hold(self) -> None:
        """Until the client has gone."""
        await asyncio.Event().wait()

    def drop(self) -> None:
        assert self.request.transport is not None
        self.request.transport.abort()


Script = Callable[[Call], Awaitable[web.StreamResponse | None]]


async def all_tokens(call: Call) -> None:
    await call.start()
    for _ in range(call.body["max_tokens"]):
        await call.token()
    await call.finish()


class FakeOpenAI:
    """`scripts` by prompt, `default` for the others. `calls` are the requests of the load, without the probes."""

    def __init__(self) -> None:
        self.base_url = ""
        self.scripts: dict[str, Script] = {}
        self.default: Script = all_tokens
        self.refused_fields: set[str] = set()
        self.tokenizer: str | None = None  # "vllm" or "llama.cpp": the shape of its routes
        self.api_key: str | None = None
        self.cached_tokens = 0
        self.probes: list[dict[str, Any]] = []
        self.calls: list[Call] = []
        self._gone: list[str] = []  # prompts whose client went away before the end
        self._one_more_gone = threading.Condition()
        self.arrived = asyncio.Condition()
        self._pieces: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        pieces = [text[i : i + PIECE] for i in range(0, len(text), PIECE)]
        return [self._pieces.setdefault(piece, len(self._pieces) + 1) for piece in pieces]

    async def wait_for_calls(self, count: int) -> None:
        """Until that many requests of the load have arrived."""
        async with self.arrived:
            await self.arrived.wait_for(lambda: len(self.calls) >= count)

    def wait_for_gone(self, count: int) -> list[str]:
        """The prompts whose clients went away before the end, once they are that many. For another thread: the
        server learns of a closed connection some time after the client has ended."""
        with self._one_more_gone:
            self._one_more_gone.wait_for(lambda: len(self._gone) >= count, timeout=10.0)
            return list(self._gone)

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        return self._refuse_key(request) or web.json_response({"object": "list", "data": [{"id": MODEL}]})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        refused = self._refuse_key(request) or self._refuse_fields(body)
        call = Call(self, request, body)
        if call.prompt == "Hello":
            self.probes.append(body)
        if refused:
            return refused
        script: Script = all_tokens
        if call.prompt != "Hello":
            script = self.scripts.get(call.prompt, self.default)
            async with self.arrived:
                self.calls.append(call)
                self.arrived.notify_all()
        try:
            return await script(call) or call.response
        except (asyncio.CancelledError, ConnectionResetError):
            with self._one_more_gone:
                self._gone.append(call.prompt)
                self._one_more_gone.notify_all()
            raise

    def _refuse_key(self, request: web.Request) -> web.Response | None:
        given = request.headers.get("Authorization", "")
        if self.api_key is None or given == f"Bearer {self.api_key}":
            return None
        return web.json_response({"error": {"message": f"Incorrect API key provided: {given[7:]}"}}, status=401)

    def _refuse_fields(self, body: dict[str, Any]) -> web.Response | None:
        unknown = sorted(self.refused_fields & set(body))
        if not unknown:
            return None
        return web.json_response({"error": {"message": f"unknown field {unknown[0]}"}}, status=400)

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        text, special = ("prompt", "add_special_tokens") if self.tokenizer == "vllm" else ("content", "add_special")
        if self.tokenizer is None or not set(body) <= {text, special, "model"}:
            return web.json_response({"error": {"message": "no"}}, status=404)
        return web.json_response({"tokens": [BOS] * body[special] + self.encode(body[text])})

    async def _detokenize(self, request: web.Request) -> web.Response:
        pieces = {token: piece for piece, token in self._pieces.items()}
        text = "".join(pieces[token] for token in (await request.json())["tokens"])
        return web.json_response({"prompt" if self.tokenizer == "vllm" else "content": text})


@pytest.fixture
def server() -> Iterator[FakeOpenAI]:
    fake = FakeOpenAI()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    ready = threading.Event()

    async def serve() -> None:
        # a handler learns by its cancellation that the client has gone
        runner = web.AppRunner(fake.app(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        fake.base_url = f"http://{host}:{port}"
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    yield fake
    loop.call_soon_threadsafe(stop.set)
    thread.join(10)
    loop.close()
