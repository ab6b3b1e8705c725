"""The glass box over HTTP: the engine's own answers, unchanged. Knows nothing of what they mean."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from pageframe.api.encoding import json_response
from pageframe.api.errors import shorten
from pageframe.api.event_stream import EventStreamResponse
from pageframe.api.journal_stream import journal_events, journal_lines
from pageframe.api.service import ServerState
from pageframe.runtime.errors import InvalidRequestError, RequestNotFoundError

MAX_DIGITS = 18
DEFAULT_CHAINS = "500"


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


async def cancel_request(state: ServerState, request: Request) -> Response:
    """Ends a live request now, or one of its choices; its client gets what there is, with finish_reason "cancelled"."""
    client, request_id = state.ready().client, request.path_params["request_id"]
    choices = [choice_id for choice_id in client.choices_of(request_id) if client.cancel(choice_id)]
    if not choices:
        raise RequestNotFoundError(request_id[:200])
    return json_response({"id": request_id, "cancelled": True})


async def inspect_story(state: ServerState, request: Request) -> Response:
    """What happened to one request, in sentences."""
    return _answer(await state.ready().client.inspect("story", request.path_params["request_id"]))


async def inspect_steps(state: ServerState, request: Request) -> Response:
    """The latest steps; `?since=N` gives those from step N on."""
    return _answer(await state.ready().client.inspect("steps", _number(request, "since", "0")))


async def inspect_prefixes(state: ServerState, request: Request) -> Response:
    """The prefix cache as chains of blocks; `?limit=N` gives those used last."""
    return _answer(await state.ready().client.inspect("prefixes", _number(request, "limit", DEFAULT_CHAINS)))


async def inspect_live(state: ServerState, request: Request) -> Response:
    """Frames for the dashboard, as server-sent events: the whole state, then what changes."""
    return EventStreamResponse(await state.ready().live.watch(), state.stopping)


async def inspect_events(state: ServerState, request: Request) -> Response:
    """The journal, as server-sent events: from the oldest held, with `?since=N` from number N, or behind Last-Event-ID.

    With `?follow=0` it is what is held now, as lines of JSON.
    """
    client = state.ready().client
    follow = request.query_params.get("follow", "1")
    if follow not in ("0", "1"):
        raise InvalidRequestError(f"follow is {shorten(follow)}; it must be 0 or 1", param="follow")
    since = int(_number(request, "since", "0"))
    last = request.headers.get("last-event-id")
    if last is not None:
        since = int(_checked_number("Last-Event-ID", last)) + 1
    if follow == "0":
        return Response(await journal_lines(client, since), media_type="application/x-ndjson")
    return EventStreamResponse(journal_events(client, since), state.stopping)


def _number(request: Request, name: str, default: str) -> str:
    return _checked_number(name, request.query_params.get(name, default))


def _checked_number(name: str, text: str) -> str:
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
        raise InvalidRequestError(f"{name} is {shorten(text)}; it must be a number, 0 or more", param=name)
    return text


def _answer(body: bytes) -> Response:
    return Response(body, media_type="application/json")
