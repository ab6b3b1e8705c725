"""The journal for whoever reads along: each reader asks the engine for what is next, at its own pace.

A reader that is slower than the engine misses what the journal has dropped meanwhile, and is told so.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from pageframe.api.encoding import encode_json, on_one_line
from pageframe.runtime.engine_client import EngineClient
from pageframe.runtime.errors import PageframeError

#: A reader that has read everything asks again after so long.
POLL_SECONDS = 0.1
QUIET_SECONDS = 5.0
KEEP_ALIVE = b": nothing new\n\n"


async def journal_events(client: EngineClient, since: int) -> AsyncGenerator[bytes, None]:
    """Events from number `since` on as server-sent events, until the engine ends. Where some are held no more, an
    event "gap" says which: {"from", "to"}, both included. Where this engine has not come so far, it is another one than
    before, and an event "restart" says from which number on it is told: {"first"}."""
    quiet = 0.0
    while True:
        try:
            answer = await _next(client, since)
        except PageframeError:
            return  # the engine is dead; /health and every new request say so
        if answer["first"] < since:
            yield b"event: restart\ndata: " + encode_json({"first": answer["first"]}) + b"\n\n"
        elif answer["first"] > since:
            yield b"event: gap\ndata: " + encode_json({"from": since, "to": answer["first"] - 1}) + b"\n\n"
        since = answer["next"]
        if answer["events"]:
            quiet = 0.0
            yield b"".join(map(_sse, answer["events"]))
            continue
        quiet += POLL_SECONDS
        if quiet >= QUIET_SECONDS:
            quiet = 0.0
            yield KEEP_ALIVE
        await asyncio.sleep(POLL_SECONDS)


async def journal_lines(client: EngineClient, since: int) -> bytes:
    """The events from number `since` on that are held now, a line of JSON each."""
    answer = await _next(client, since)
    # An engine that works writes on; what it writes from now on is not asked for.
    end = answer["written"]
    lines = [encode_json(event) for event in answer["events"]]
    while answer["next"] < end:
        answer = await _next(client, answer["next"])
        lines += [encode_json(event) for event in answer["events"] if event["id"] < end]
    return b"\n".join([*lines, b""])


async def _next(client: EngineClient, since: int) -> dict[str, Any]:
    answer: dict[str, Any] = msgspec.json.decode(await client.inspect("events", str(since)))
    return answer


def _sse(event: dict[str, Any]) -> bytes:
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (event["id"], event["kind"].encode(), on_one_line(encode_json(event)))
