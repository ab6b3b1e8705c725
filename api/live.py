"""The engine's live frames, for all who watch: asked for once, whatever the number of watchers.

Nothing is asked while nobody watches. A watcher who does not keep up gets a gap marker and no more; its browser comes
back by itself and begins with a whole frame. Knows nothing of what frames say.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec

from pageframe.api.encoding import encode_json, on_one_line
from pageframe.api.errors import ApiError
from pageframe.runtime.engine_client import EngineClient
from pageframe.runtime.errors import PageframeError

#: From one frame to the next, unless a step takes longer.
FRAME_SECONDS = 0.08
#: A line that says nothing, so that whoever is between keeps the connection.
QUIET_SECONDS = 5.0
MAX_WATCHERS = 64
MAX_FRAMES_BEHIND = 32

#: What the engine answers: two frames, not looked into.
_decoder = msgspec.json.Decoder(tuple[msgspec.Raw, msgspec.Raw])

KEEP_ALIVE = b": nothing new\n\n"
RETRY = b"retry: 1000\n\n"
GAP = b"event: gap\ndata: {}\n\n"
_END = b""


class _Watcher:
    """Frames on their way to one who watches."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[bytes] = asyncio.Queue()
        self.needs_full = True


class LiveFeed:
    """Frames of one engine.

    Args:
        client: asked for frames.
        latencies: what goes out as "latency" with each.
    """

    def __init__(self, client: EngineClient, latencies: Callable[[], dict[str, Any]]) -> None:
        self._client = client
        self._latencies = latencies
        self._watchers: set[_Watcher] = set()
        self._asking: asyncio.Task[None] | None = None

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events, from a whole frame on, until the engine ends or the watcher falls too far behind.

        Raises:
            ApiError: 429, too many watch.
        """
        if len(self._watchers) >= MAX_WATCHERS:
            raise ApiError(429, f"{MAX_WATCHERS} pages watch already; close one", code="too_many_watchers")
        watcher = _Watcher()
        self._watchers.add(watcher)
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask())
        return self._events(watcher)

    async def _events(self, watcher: _Watcher) -> AsyncGenerator[bytes, None]:
        try:
            yield RETRY
            while True:
                try:
                    event = await asyncio.wait_for(watcher.frames.get(), QUIET_SECONDS)
                except TimeoutError:
                    event = KEEP_ALIVE
                if event == _END:
                    return
                yield event
        finally:
            self._watchers.discard(watcher)

    async def _ask(self) -> None:
        """Ask for frames as long as anybody watches."""
        try:
            loop = asyncio.get_running_loop()
            is_first = True
            while self._watchers:
                asked_at = loop.time()
                newcomers = [watcher for watcher in self._watchers if watcher.needs_full]
                who = "start" if is_first else "join" if newcomers else ""
                is_first = False
                self._hand_out(newcomers, *_decoder.decode(await self._client.inspect("frame", who)))
                await asyncio.sleep(max(0.0, asked_at + FRAME_SECONDS - loop.time()))
        except PageframeError:
            pass  # /health says that the engine is dead, or its log what failed
        finally:
            self._asking = None
            for watcher in self._watchers:
                watcher.frames.put_nowait(_END)

    def _hand_out(self, newcomers: list[_Watcher], changes: msgspec.Raw, whole: msgspec.Raw) -> None:
        """The changes to those who have seen the frame before, the whole to those who have seen none."""
        for watcher in newcomers:
            watcher.needs_full = False
            watcher.frames.put_nowait(self._event(whole))
        if bytes(changes) == b"null":
            return
        event = self._event(changes)
        # Whoever has come while the engine was asked waits for the next whole frame.
        for watcher in [other for other in self._watchers if not other.needs_full and other not in newcomers]:
            if watcher.frames.qsize() < MAX_FRAMES_BEHIND:
                watcher.frames.put_nowait(event)
            else:
                self._watchers.discard(watcher)
                _tell_of_gap(watcher)

    def _event(self, frame: msgspec.Raw) -> bytes:
        latency = b'event: frame\ndata: {"latency":' + encode_json(self._latencies()) + b","
        return latency + on_one_line(bytes(frame)[1:]) + b"\n\n"


def _tell_of_gap(watcher: _Watcher) -> None:
    """It is too far behind: what it has not read yet is worth nothing."""
    while not watcher.frames.empty():
        watcher.frames.get_nowait()
    watcher.frames.put_nowait(GAP)
    watcher.frames.put_nowait(_END)
