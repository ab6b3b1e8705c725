"""Frames for those who watch: one question for all of them, a whole frame first, and a gap for who does not keep up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from pageframe.api import live
from pageframe.api.errors import ApiError
from pageframe.api.live import GAP, MAX_FRAMES_BEHIND, MAX_WATCHERS, LiveFeed
from pageframe.runtime.errors import EngineDeadError

from .conftest import RunningServer

LATENCY = {"ttft": {"count": 0}}


class Engine:
    """Answers questions for frames one by one, as the test lets it."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.may_answer = asyncio.Semaphore(0)
        self.quiet = False
        self.more: dict[str, str] = {}
        self.dead = False

    def allow(self, count: int) -> None:
        for _ in range(count):
            self.may_answer.release()

    async def inspect(self, what: str, argument: str = "") -> bytes:
        assert what == "frame"
        self.asked.append(argument)
        await self.may_answer.acquire()
        if self.dead:
            raise EngineDeadError("ended")
        frame = {"frame": len(self.asked), **self.more}
        changes = None if self.quiet or argument == "start" else {**frame, "full": False}
        whole = {**frame, "full": True} if argument else None
        return json.dumps([changes, whole], ensure_ascii=False).encode()


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "FRAME_SECONDS", 0.0)


async def begin(feed: LiveFeed) -> AsyncGenerator[bytes, None]:
    events = await feed.watch()
    assert (await anext(events)).startswith(b"retry:")
    return events


def parse(event: bytes) -> dict[str, Any]:
    name, data, *_ = event.decode().split("\n")
    assert name == "event: frame"
    content: dict[str, Any] = json.loads(data.removeprefix("data: "))
    assert content.pop("latency") == LATENCY
    return content


def feed_of(engine: Engine) -> LiveFeed:
    return LiveFeed(engine, lambda: LATENCY)  # type: ignore[arg-type]


def run(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test, 10))


def test_one_question_serves_all_who_watch_and_none_is_asked_for_nobody() -> None:
    async def test() -> None:
        engine = Engine()
        feed = feed_of(engine)
        first = await begin(feed)
        engine.may_answer.release()
        assert parse(await anext(first)) == {"frame": 1, "full": True}
        second = await begin(feed)
        engine.may_answer.release()
        assert parse(await anext(first)) == {"frame": 2, "full": False}
        engine.may_answer.release()
        # The second one begins with a whole frame; the first goes on as if it had not come.
        assert parse(await anext(second)) == {"frame": 3, "full": True}
        assert parse(await anext(first)) == {"frame": 3, "full": False}
        assert engine.asked[:3] == ["start", "", "join"]
        engine.may_answer.release()
        assert parse(await anext(second)) == parse(await anext(first)) == {"frame": 4, "full": False}
        await first.aclose()
        await second.aclose()
        engine.allow(2)
        await asyncio.sleep(0.01)
        asked = len(engine.asked)
        engine.allow(5)
        await asyncio.sleep(0.01)
        assert len(engine.asked) == asked, "nobody watches, and frames are asked for"

    run(test())


def test_no_reader_takes_a_character_for_a_lines_end() -> None:
    async def test() -> None:
        engine = Engine()
        engine.more = {"tenant": "a\u2028b\u2029c\x85d"}
        events = await begin(feed_of(engine))
        engine.may_answer.release()
        event = await anext(events)
        assert len(event.decode().splitlines()) == len(["event", "data", ""])
        assert parse(event)["tenant"] == engine.more["tenant"]
        await events.aclose()

    run(test())


def test_no_news_is_no_event() -> None:
    async def test() -> None:
        engine = Engine()
        events = await begin(feed_of(engine))
        engine.may_answer.release()
        parse(await anext(events))
        engine.quiet = True
        engine.allow(3)
        coming = asyncio.ensure_future(anext(events))
        while len(engine.asked) < 5:
            await asyncio.sleep(0)
        assert not coming.done()
        engine.quiet = False
        engine.may_answer.release()
        assert parse(await coming)["full"] is False
        await events.aclose()

    run(test())


def test_who_does_not_keep_up_gets_a_gap_and_is_let_go() -> None:
    async def test() -> None:
        engine = Engine()
        feed = feed_of(engine)
        slow, quick = await begin(feed), await begin(feed)
        engine.allow(MAX_FRAMES_BEHIND + 2)
        read = [parse(await anext(quick))["frame"] for _ in range(MAX_FRAMES_BEHIND + 2)]
        assert read == list(range(1, MAX_FRAMES_BEHIND + 3))
        assert [event async for event in slow] == [GAP]
        engine.may_answer.release()
        assert parse(await anext(quick))["full"] is False
        await quick.aclose()

    run(test())


def test_a_dead_engine_ends_the_stream() -> None:
    async def test() -> None:
        engine = Engine()
        events = await begin(feed_of(engine))
        engine.dead = True
        engine.may_answer.release()
        assert [event async for event in events] == []

    run(test())


def test_the_number_of_those_who_watch_is_bounded() -> None:
    async def test() -> None:
        feed = feed_of(Engine())
        watching = [await begin(feed) for _ in range(MAX_WATCHERS)]
        with pytest.raises(ApiError, match=f"{MAX_WATCHERS} pages watch already") as raised:
            await feed.watch()
        assert raised.value.status == 429
        await watching.pop().aclose()
        watching.append(await begin(feed))
        for events in watching:
            await events.aclose()

    run(test())


def test_over_http(server: RunningServer) -> None:
    with server.client.stream("GET", "/inspect/live") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.iter_lines()
        event = next(line for line in lines if line.startswith("data: "))
        content = json.loads(event.removeprefix("data: "))
        assert content["full"] is True
        assert set(content["latency"]) == {"ttft", "itl", "e2e"}


def test_a_server_that_stops_ends_the_streams(server: RunningServer) -> None:
    with server.client.stream("GET", "/inspect/live") as response:
        lines = response.iter_lines()
        next(line for line in lines if line.startswith("data: "))
        server.stop()
        assert list(lines), "what was on its way comes, and then the end"
    server.join()
