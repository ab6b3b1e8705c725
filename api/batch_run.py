"""Answers the requests of a batch through the server's own routes, many at once, without a socket.

Knows nothing of where requests come from, nor of engines.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import msgspec
from starlette.types import ASGIApp, Message

from pageframe.api.batch_lines import BadLine, BatchRequest, answer_line, error_line
from pageframe.api.batch_results import ResultFile
from pageframe.api.encoding import encode_json
from pageframe.api.errors import internal_error

logger = logging.getLogger(__name__)

#: How often a request is sent in all, before an answer that says nothing about the request is its result.
MAX_TRIES = 4
#: Before the second try, where the answer does not say how long; twice as long before each further one.
FIRST_PAUSE_SECONDS = 0.5
MAX_PAUSE_SECONDS = 60.0
_HEADERS = [(b"host", b"localhost"), (b"content-type", b"application/json")]


@dataclass(frozen=True, slots=True)
class RouteAnswer:
    """What a route answers.

    Args:
        request_id: its `x-request-id`.
        body: JSON.
        retry_after: seconds, as its header says them; None: it does not.
    """

    status: int
    request_id: str
    body: bytes
    retry_after: int | None = None

    @property
    def is_passing(self) -> bool:
        """It tells of the server's state and not of the request: the next answer may be another."""
        return self.status == 429 or self.status >= 500


@dataclass(slots=True)
class BatchCounts:
    """What a run has done so far.

    Args:
        answered: requests that got what they asked for.
        failed: requests that got an error, and lines that are none.
        output_tokens: of all answers.
    """

    answered: int = 0
    failed: int = 0
    output_tokens: int = 0


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Body(msgspec.Struct):
    usage: _Usage


_body_decoder = msgspec.json.Decoder(_Body)


async def post(app: ASGIApp, path: str, body: bytes) -> RouteAnswer:
    """What `app` answers to a POST of JSON; a 500 where its answer breaks off. Cancelled, it leaves the request as a
    client that goes away does."""
    answer: list[Message] = []
    body_comes = True

    async def receive() -> Message:
        nonlocal body_comes
        if body_comes:
            body_comes = False
            return {"type": "http.request", "body": body, "more_body": False}
        never: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        return await never  # this client stays until it has its answer

    async def send(message: Message) -> None:
        answer.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [*_HEADERS, (b"content-length", str(len(body)).encode())],
        "client": None,
        "server": None,
    }
    try:
        await app(scope, receive, send)
    except Exception:
        logger.exception("a request to %s broke off", path)
    if not answer or "body" not in answer[-1] or answer[-1].get("more_body", False):
        return RouteAnswer(500, "", encode_json(internal_error("the answer broke off").content()))
    start, *parts = answer
    headers = dict(start["headers"])
    after = headers.get(b"retry-after", b"")
    return RouteAnswer(
        start["status"],
        headers[b"x-request-id"].decode("ascii"),
        b"".join(part.get("body", b"") for part in parts),
        int(after) if after.isdigit() else None,
    )


async def post_until_answered(
    app: ASGIApp,
    request: BatchRequest,
    check_alive: Callable[[], None],
    pause: Callable[[float], Awaitable[None]],
) -> RouteAnswer:
    """The first answer that is about the request, or the last of MAX_TRIES.

    Args:
        check_alive, pause: as `run_batch` has them.
    """
    seconds = FIRST_PAUSE_SECONDS
    for _ in range(MAX_TRIES - 1):
        answer = await post(app, request.url, request.body)
        if not answer.is_passing:
            return answer
        check_alive()
        await pause(seconds if answer.retry_after is None else min(answer.retry_after, MAX_PAUSE_SECONDS))
        seconds *= 2
    return await post(app, request.url, request.body)


async def run_batch(
    app: ASGIApp,
    lines: Iterator[BatchRequest | BadLine],
    results: ResultFile,
    counts: BatchCounts,
    *,
    concurrency: int,
    check_alive: Callable[[], None],
    progress: Callable[[BatchCounts], None],
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Appends a result for each line, as they end; cancelled, those that have not ended get none.

    A request whose answer is a 429 or a 5xx, or breaks off, is sent again, up to MAX_TRIES times in all.

    Args:
        counts: is kept up to date.
        concurrency: requests that are answered at once.
        check_alive: raises where a failure is not the request's own: the engine is dead.
        progress: called after each result.
        pause: waits so many seconds before a request is sent again.
    """

    async def work() -> None:
        for line in lines:  # shared: each worker takes the next
            if isinstance(line, BadLine):
                results.append(error_line(line))
                counts.failed += 1
            else:
                answer = await post_until_answered(app, line, check_alive, pause)
                if answer.status >= 500:
                    check_alive()
                results.append(answer_line(line, answer.status, answer.request_id, answer.body))
                _count(counts, answer)
            progress(counts)

    workers = [asyncio.create_task(work()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


def _count(counts: BatchCounts, answer: RouteAnswer) -> None:
    if answer.status == 200:
        counts.answered += 1
        counts.output_tokens += _body_decoder.decode(answer.body).usage.completion_tokens
    else:
        counts.failed += 1
