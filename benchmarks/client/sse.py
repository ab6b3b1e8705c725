"""Server-sent events from bytes that may be split anywhere. It does not know what the events mean.

The line and field rules are those of the WHATWG HTML standard, "Server-sent events", section 9.2.6, with one
addition: `close()` hands on an event whose blank line never came, since some servers leave out the last one.
"""

from __future__ import annotations

from dataclasses import dataclass

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class SseEvent:
    """One event. `name` is the `event` field ("message" without one); `data` the data lines, joined by newlines."""

    name: str
    data: str


class SseParser:
    """Feed it bytes as they arrive; it returns the events that they completed."""

    def __init__(self) -> None:
        self._rest = b""  # the line that has not ended yet
        self._skip_newline = False  # the last byte was \r: a \n that follows belongs to the same line end
        self._at_start = True
        self._name = ""
        self._data: list[str] = []

    def feed(self, received: bytes) -> list[SseEvent]:
        """The events completed by `received`, in order."""
        if self._skip_newline and received:
            received = received.removeprefix(b"\n")
            self._skip_newline = False
        lines = (self._rest + received).splitlines(keepends=True)
        self._rest = b""
        if lines and not lines[-1].endswith((b"\r", b"\n")):
            self._rest = lines.pop()
        elif lines:
            self._skip_newline = lines[-1].endswith(b"\r")
        events = [self._take_line(line.rstrip(b"\r\n")) for line in lines]
        return [event for event in events if event is not None]

    def close(self) -> list[SseEvent]:
        """The event that the end of the stream leaves unfinished, if there is one."""
        line, self._rest = self._rest, b""
        if line:
            self._take_line(line)
        last = self._take_line(b"")
        return [last] if last is not None else []

    def _take_line(self, line: bytes) -> SseEvent | None:
        if self._at_start:
            line = line.removeprefix(BYTE_ORDER_MARK)
            self._at_start = False
        if not line:
            return self._dispatch()
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value.decode("utf-8", errors="replace"))
        elif field == b"event":
            self._name = value.decode("utf-8", errors="replace")
        return None  # a comment (an empty field name), or a field that the client has no use for

    def _dispatch(self) -> SseEvent | None:
        name, data = self._name or "message", self._data
        self._name, self._data = "", []
        return SseEvent(name, "\n".join(data)) if data else None
