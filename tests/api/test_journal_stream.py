"""The journal for who reads along: in order, from where he left, and a gap where the engine was quicker."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from pageframe.api import journal_stream
from pageframe.api.journal_stream import KEEP_ALIVE, journal_events, journal_lines
from pageframe.runtime.errors import EngineDeadError

from .conftest import RunningServer


class Engine:
    """Holds events `first` to `written` and gives three at a time."""

    def __init__(self, written: int, first: int = 0) -> None:
        self.first, self.written = first, written
        self.dead = False
        self.writes_on = 0

    async def inspect(self, what: str, argument: str = "") -> bytes:
        if self.dead:
            raise EngineDeadError("ended")
        assert what == "events"
        first = max(int(argument), self.first) if int(argument) <= self.written else self.first
        numbers = range(first, min(self.written, first + 3))
        events = [{"id": number, "kind": "free", "text": "two\nli\u2028n\x85es"} for number in numbers]
        answer = {"first": first, "next": first + len(numbers), "written": self.written, "events": events}
        self.written += self.writes_on
        return json.dumps(answer).encode()


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_stream, "POLL_SECONDS", 0.001)


def run(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test, 10))


def ids(text: bytes) -> list[int]:
    return [int(line.removeprefix("id: ")) for line in text.decode().split("\n") if line.startswith("id: ")]


def test_events_come_in_order_each_in_one_line_and_go_on() -> None:
    async def test() -> None:
        engine = Engine(5)
        events = journal_events(engine, 0)  # type: ignore[arg-type]
        first, second = await anext(events), await anext(events)
        assert first.startswith(b'id: 0\nevent: free\ndata: {"id":0,')
        assert first.count(b"\n\n") == 3
        assert ids(first + second) == [0, 1, 2, 3, 4]
        coming = asyncio.ensure_future(anext(events))
        engine.written = 6
        assert ids(await coming) == [5]
        engine.dead = True
        assert [event async for event in events] == []

    run(test())


def test_no_reader_takes_a_character_for_a_lines_end() -> None:
    async def test() -> None:
        events = journal_events(Engine(1), 0)  # type: ignore[arg-type]
        number, name, data, end = (await anext(events)).decode().splitlines()
        assert (number, name, end) == ("id: 0", "event: free", "")
        assert json.loads(data.removeprefix("data: "))["text"] == "two\nli\u2028n\x85es"
        await events.aclose()

    run(test())


def test_who_was_too_slow_is_told_what_is_missing() -> None:
    async def test() -> None:
        events = journal_events(Engine(10, first=7), 4)  # type: ignore[arg-type]
        assert await anext(events) == b'event: gap\ndata: {"from":4,"to":6}\n\n'
        assert ids(await anext(events)) == [7, 8, 9]
        await events.aclose()

    run(test())


def test_a_number_of_an_engine_before_is_answered_from_the_beginning_of_this_one() -> None:
    async def test() -> None:
        events = journal_events(Engine(2), 90_000)  # type: ignore[arg-type]
        assert await anext(events) == b'event: restart\ndata: {"first":0}\n\n'
        assert ids(await anext(events)) == [0, 1]
        await events.aclose()

    run(test())


def test_a_quiet_engine_keeps_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_stream, "QUIET_SECONDS", 0.003)

    async def test() -> None:
        events = journal_events(Engine(0), 0)  # type: ignore[arg-type]
        assert await anext(events) == KEEP_ALIVE
        await events.aclose()

    run(test())


def test_what_is_held_comes_as_lines() -> None:
    async def test() -> None:
        lines = await journal_lines(Engine(8, first=2), 0)  # type: ignore[arg-type]
        assert [json.loads(line)["id"] for line in lines.splitlines()] == [2, 3, 4, 5, 6, 7]
        assert await journal_lines(Engine(0), 0) == b""  # type: ignore[arg-type]
        busy = Engine(8)
        busy.writes_on = 5
        lines = await journal_lines(busy, 0)  # type: ignore[arg-type]
        assert [json.loads(line)["id"] for line in lines.splitlines()] == list(range(8)), "it runs after the engine"

    run(test())


@pytest.mark.parametrize(
    ("query", "headers", "param"),
    [
        ("since=x", {}, "since"),
        ("since=-1", {}, "since"),
        ("follow=yes", {}, "follow"),
        ("", {"last-event-id": "x"}, "Last-Event-ID"),
        ("", {"last-event-id": "9" * 30}, "Last-Event-ID"),
    ],
)
def test_what_is_no_number_is_refused(server: RunningServer, query: str, headers: dict[str, str], param: str) -> None:
    response = server.client.get(f"/inspect/events?{query}", headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
