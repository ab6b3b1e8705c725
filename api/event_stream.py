"""A response of server-sent events that goes on until it ends, its client goes away, or the server stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pageframe.api.stream import STREAM_HEADERS, disconnected


class EventStreamResponse(Response):
    """Args:
    events: each one event as bytes; closed when the stream ends, whatever ends it.
    stopping: set when the server is to end.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], stopping: asyncio.Event) -> None:
        super().__init__()
        self._events = events
        self._stopping = stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": list(STREAM_HEADERS)})
        ends = [
            asyncio.ensure_future(work) for work in (self._send(send), disconnected(receive), self._stopping.wait())
        ]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
            await asyncio.wait(ends)
            await self._events.aclose()
        if not ends[0].cancelled():
            ends[0].result()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send) -> None:
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
