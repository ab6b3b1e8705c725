"""Answers the requests of a batch through the server's own routes, many at once, without a socket.

Knows nothing of where requests come from, nor of engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
from starlette.types import ASGIApp, Message

from pageframe.api.batch_lines import BadLine, BatchRequest, answer_line, error_line
from pageframe.api.batch_results import ResultFile

_HEADERS = [(b"host", b"localhost"), (b"content-type", b"application/json")]


@dataclass(frozen=True, slots=True)
class RouteAnswer:
    """What a route answers.

    Args:
        request_id: its `x-request-id`.
        body: JSON.
    """

    status: int
    request_id: str
    body: bytes


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
    """What `app` answers to a POST of JSON. Cancelled, it leaves the request as a client that goes away does."""
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
    await app(scope, receive, send)
    start, *parts = answer
    request_id = dict(start["headers"])[b"x-request-id"].decode("ascii")
    return RouteAnswer(start["status"], request_id, b"".join(part.get("body", b"") for part in parts))


async def run_batch(
    app: ASGIApp,
    lines: Iterator[BatchRequest | BadLine],
    results: ResultFile,
    counts: BatchCounts,
    *,
    concurrency: int,
    check_alive: Callable[[], None],
    progress: Callable[[BatchCounts], None],
) -> None:
    """Appends a result for each line, as they end; cancelled, those that have not ended get none.

    Args:
        counts: is kept up to date.
        concurrency: requests that are answered at once.
        check_alive: raises where a failure is not the request's own: the engine is dead.
        progress: called after each result.
    """

    async def work() -> None:
        for line in lines:  # shared: each worker takes the next
            if isinstance(line, BadLine):
                results.append(error_line(line))
                counts.failed += 1
            else:
                answer = await post(app, line.url, line.body)
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
