"""Runs a generation and sends its answer, whole or as server-sent events, for as long as the client is there.

Knows nothing of the answer's JSON.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pageframe.api.answers import Answer
from pageframe.api.encoding import sse_event
from pageframe.api.errors import ApiError, internal_error, shutting_down, to_api_error
from pageframe.api.generation import Generation
from pageframe.api.job import Job, join_pieces
from pageframe.api.middleware import request_caller, request_label
from pageframe.api.service import ServerState
from pageframe.runtime.errors import PageframeError

logger = logging.getLogger(__name__)

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class GenerationResponse(Response):
    """The response that makes its own content.

    Nothing is sent before the first output of the engine, so that a failure until then is a proper status. A client
    that goes away, waiting or reading, ends the generation at once.
    """

    def __init__(self, state: ServerState, job: Job, answer: Answer) -> None:
        super().__init__()
        self._state = state
        self._job = job
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        label = request_label(scope)
        label.value = self._job.request_id or label.value or self._answer.response_id
        tenant = request_caller(scope).tenant
        with Generation(self._state, self._job, self._answer.response_id, tenant=tenant) as generation:
            work = self._send_stream if self._job.stream else self._send_whole
            await self._while_wanted(generation, receive, work(generation, scope, receive, send))

    async def _while_wanted(self, generation: Generation, receive: Receive, work: Coroutine[None, None, None]) -> None:
        """Runs `work` to its end, or until the client goes away; a server that stops makes the generation fail."""
        running = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait((running, gone, self._state.cut), return_when=asyncio.FIRST_COMPLETED)
            if not running.done() and not gone.done():
                generation.failure = shutting_down()
                running.cancel()
                await asyncio.wait((running, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            running.cancel()
            gone.cancel()
            await asyncio.wait((running, gone))
        if running.cancelled():
            logger.info("%s: the client went away (499)", generation.response_id)
        else:
            running.result()

    async def _write(self, make: Callable[[], bytes]) -> bytes:
        """What `make` makes of the answer; in a thread where a prompt's logprobs may make that long."""
        return make() if self._job.params.prompt_logprobs is None else await asyncio.to_thread(make)

    async def _send_whole(self, generation: Generation, scope: Scope, receive: Receive, send: Send) -> None:
        pieces = []
        while not generation.finished:
            pieces.append(await generation.next())
        whole = join_pieces(pieces, generation.num_choices)
        content = await self._write(functools.partial(self._answer.whole, whole, generation.usage()))
        await Response(content, media_type="application/json")(scope, receive, send)

    async def _send_stream(self, generation: Generation, scope: Scope, receive: Receive, send: Send) -> None:
        piece = await generation.next()
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        try:
            events = await self._write(functools.partial(self._answer.events, piece, generation.usage()))
            while not generation.finished:
                if events:
                    await send({"type": "http.response.body", "body": events, "more_body": True})
                piece = await generation.next()
                events = await self._write(functools.partial(self._answer.events, piece, generation.usage()))
            events += self._answer.last_events(generation.usage())
        except Exception as error:
            events = sse_event(_error_in_stream(error, generation).content())
        await send({"type": "http.response.body", "body": events, "more_body": False})


def _error_in_stream(error: Exception, generation: Generation) -> ApiError:
    if isinstance(error, PageframeError):
        return to_api_error(error)
    logger.error("%s failed", generation.response_id, exc_info=error)
    return internal_error()


async def disconnected(receive: Receive) -> None:
    """Returns when the client has gone; the body has been read, so nothing else can come."""
    while (await receive())["type"] != "http.disconnect":
        pass
