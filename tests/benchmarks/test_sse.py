"""The event parser: any split of the bytes gives the events of the whole."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pageframe.benchmarks.client.sse import SseEvent, SseParser

LINES = st.one_of(
    st.just(""),
    st.builds(
        lambda field, colon, text: field + colon + text,
        st.sampled_from(["data", "event", "id", "retry", "", "dat"]),
        st.sampled_from([":", ": ", ":  ", ""]),
        st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=6),
    ),
)
STREAMS = st.lists(st.tuples(LINES, st.sampled_from(["\n", "\r\n", "\r"])), max_size=12)


def parse(pieces: list[bytes]) -> list[SseEvent]:
    parser = SseParser()
    return [event for piece in pieces for event in parser.feed(piece)] + parser.close()


def events_of(lines: list[str]) -> list[SseEvent]:
    """What the lines mean, told from whole lines rather than from bytes."""
    events, name, data = [], "", []
    for line in [*lines, ""]:
        field, _, value = line.partition(":")
        value = value[1:] if value.startswith(" ") else value
        if not line:
            if data:
                events.append(SseEvent(name or "message", "\n".join(data)))
            name, data = "", []
        elif field == "data":
            data.append(value)
        elif field == "event":
            name = value
    return events


@settings(max_examples=60, deadline=None)
@given(STREAMS, st.data())
def test_any_split_of_the_bytes_gives_the_same_events(stream: list[tuple[str, str]], data: st.DataObject) -> None:
    text = "".join(line + end for line, end in stream)
    # "\r" before an empty line that ends with "\n" reads as one line end: keep the lines as a reader of bytes sees them
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")[:-1]
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    pieces = [raw[start:end] for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]

    assert parse(pieces) == events_of(lines)
    assert parse([raw[i : i + 1] for i in range(len(raw))]) == events_of(lines)


@pytest.mark.parametrize(
    ("raw", "events"),
    [
        (b"data:[DONE]\n\n", [SseEvent("message", "[DONE]")]),
        (b": keep-alive\n\ndata: a\r\n\r\n", [SseEvent("message", "a")]),
        (b"data: a\ndata: b\n\n", [SseEvent("message", "a\nb")]),
        (b"event: error\ndata: x\n\ndata: y\n\n", [SseEvent("error", "x"), SseEvent("message", "y")]),
        (b"\xef\xbb\xbfdata: a\n\n", [SseEvent("message", "a")]),
        (b"data: cut off", [SseEvent("message", "cut off")]),
        (b"event: ping\n\n", []),
        ("data: é€\n\n".encode(), [SseEvent("message", "é€")]),
    ],
)
def test_known_streams(raw: bytes, events: list[SseEvent]) -> None:
    assert parse([raw]) == events


def test_an_event_is_handed_on_as_soon_as_its_blank_line_is_read() -> None:
    parser = SseParser()
    assert parser.feed(b"data: a\r\n") == []
    assert parser.feed(b"\r") == [SseEvent("message", "a")]
    assert parser.feed(b"\ndata: b\n\n") == [SseEvent("message", "b")]
