"""The glass box over HTTP: the engine's own answers, unchanged. Knows nothing of what they mean."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from pageframe.api.errors import shorten
from pageframe.api.service import ServerState
from pageframe.runtime.errors import InvalidRequestError

MAX_STEP_DIGITS = 18


async def inspect_kv(state: ServerState, request: Request) -> Response:
    """Totals of the KV pool: blocks by state, slots, bytes."""
    return _answer(await state.ready().client.inspect("kv"))


async def inspect_blocks(state: ServerState, request: Request) -> Response:
    """One entry per block."""
    return _answer(await state.ready().client.inspect("blocks"))


async def inspect_requests(state: ServerState, request: Request) -> Response:
    """Every live request: status, tokens, block table, waits."""
    return _answer(await state.ready().client.inspect("requests"))


async def inspect_request(state: ServerState, request: Request) -> Response:
    """One live request, by the id of its response."""
    return _answer(await state.ready().client.inspect("request", request.path_params["request_id"]))


async def inspect_steps(state: ServerState, request: Request) -> Response:
    """The latest steps; `?since=N` gives those from step N on."""
    since = request.query_params.get("since", "0")
    if not (since.isascii() and since.isdigit() and len(since) <= MAX_STEP_DIGITS):
        raise InvalidRequestError(f"since is {shorten(since)}; it must be a step's number, 0 or more", param="since")
    return _answer(await state.ready().client.inspect("steps", since))


def _answer(body: bytes) -> Response:
    return Response(body, media_type="application/json")
