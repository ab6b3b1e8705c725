"""A recording of the journal, read back: lines of JSON in files of bounded size, which journal_recorder.py writes.

    {"kind": "journal", "version": 1, …}            the first line of each file: what was recorded, and of which run
    {"kind": "state", "next": 17, …}                how things stood before event 17; see JournalState
    {"kind": "admit", "id": 17, "step": 3, …}       an event: its number and its fields, see journal.py
    {"kind": "tokens", "request_id": …, "start": 0, "digests": …}
    {"kind": "gap", "from": 3, "to": 9}             these events were dropped: the disk was too slow
    {"kind": "notice", "text": "…"}                 what else the recording lacks from here on

Of texts and tokens nothing is written, unless asked for. A token's digest is BLAKE2b, keyed and of 64 bits, of the
digest before it and the token, the first one's of the request's salt: two requests have the same digests exactly as far
as they may share computed blocks, and without the key nobody can tell for which tokens. `digests` is base64 of 8 bytes
a token.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import math
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO

from pageframe.runtime.journal import EVENT_KINDS, Event
from pageframe.runtime.journal_digests import DIGEST_BYTES
from pageframe.runtime.journal_state import JournalState

VERSION = 1
#: Older files of a recording: FILE.1, the newest of them, to FILE.4.
KEPT_FILES = 4
#: What an engine tells is within these; sums of such numbers, and times in nanoseconds, are numbers still.
MIN_INT, MAX_INT, MAX_SECONDS = -(2**63), 2**64 - 1, 1e15


def numbered(path: Path, number: int) -> Path:
    """A recording's file (0) or one of its older ones."""
    return path if number == 0 else path.with_name(f"{path.name}.{number}")


class JournalFileError(Exception):
    """It is no recording, or cannot be read at all."""


@dataclass(slots=True)
class Recording:
    """What a recording holds.

    Args:
        header: what was recorded, and of which run.
        events: oldest first.
        states: how things stood before the event at an index of `events`, rising; None where events are missing before
            it, so that nobody knows until the next.
        tokens: by request id, (start, digests of 8 bytes or token ids) in the order written.
        notices: what could not be read or was not written, a sentence each.
    """

    header: dict[str, Any]
    events: list[Event] = field(default_factory=list)
    states: list[tuple[int, JournalState | None]] = field(default_factory=list)
    tokens: dict[str, list[tuple[int, list[bytes] | list[int]]]] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)

    def state_at(self, step: int) -> JournalState:
        """How things stood when `step` had ended, or at the end of the recording where that comes first.

        Raises:
            JournalFileError: it is not known, since events before it are missing.
        """
        end = bisect_right(self.events, step, key=lambda event: event.step)
        begin, known = self.states[bisect_right(self.states, end, key=lambda entry: entry[0]) - 1]
        if known is None:
            raise JournalFileError(
                f"how things stood after step {step:,} is not known: events before it are missing, and no state was "
                "recorded since"
            )
        state = JournalState.load(known.snapshot())
        try:
            state.apply(self.events[begin:end])
        except (LookupError, ValueError) as error:
            raise JournalFileError(
                f"how things stood after step {step:,} is not known: the events before it do not fit together"
            ) from error
        return state


def read_journal(path: Path) -> Recording:
    """A recording with its older files, as far as it can be read; `notices` say what is missing.

    It may be being written: what comes after the call is left out.

    Raises:
        JournalFileError: there is nothing of a recording in it.
    """
    with contextlib.ExitStack() as opened:
        # All are opened before any is read, the newest first: one that moves on meanwhile is found again, not missed.
        files = [(name, opened.enter_context(file)) for name, file in _open_files(path)]
        reader: _Reader | None = None
        wanted = []
        for name, file in files:
            header = _decode(file.readline())
            if reader is None:
                reader = _Reader(_checked_header(name, header))
            elif header is None or header.get("run") != reader.recording.header.get("run"):
                break
            wanted.append((name, file))
        assert reader is not None
        try:
            for name, file in reversed(wanted):
                reader.read(name, file)
        except OSError as error:
            raise JournalFileError(f"{path} cannot be read: {error.strerror}") from None
    return reader.recording


def _open_files(path: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """The files that there are, each once, newest first."""
    seen = set()
    for number in range(KEPT_FILES + 1):
        try:
            file = numbered(path, number).open("rb")
        except FileNotFoundError:
            continue
        except OSError as error:
            raise JournalFileError(f"{numbered(path, number)} cannot be read: {error.strerror}") from None
        status = os.fstat(file.fileno())
        if (status.st_dev, status.st_ino) in seen:
            file.close()
            continue
        seen.add((status.st_dev, status.st_ino))
        yield numbered(path, number), file
    if not seen:
        raise JournalFileError(f"{path} cannot be read: {os.strerror(errno.ENOENT)}")


def _checked_header(path: Path, header: dict[str, Any] | None) -> Recording:
    if header is None or header.get("kind") != "journal":
        raise JournalFileError(f"{path} is no recording of a journal: its first line is no header")
    recording = Recording(header)
    if header.get("version") != VERSION:
        recording.notices.append(
            f"{path} is of version {header.get('version')!r} of the format, and this reads version {VERSION}; what is "
            "unknown is left out"
        )
    return recording


class _Reader:
    """Takes a recording's files line by line, the oldest first."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        #: Numbers of the events known, as half-open ranges in the order found: the last one goes on.
        self._ranges: list[tuple[int, int]] = []

    def read(self, path: Path, file: BinaryIO) -> None:
        """Take a file's lines, the first of which has been read."""
        notices, unreadable, unknown, number = self.recording.notices, 0, 0, 1
        for number, line in enumerate(file, 2):
            content = _decode(line)
            if content is None and not line.endswith(b"\n"):
                notices.append(f"{path} is cut off in line {number}")
            elif content is None:
                unreadable += 1
            elif not self._take(content):
                unknown += 1
        if not self.recording.states:
            self.recording.states.append((0, JournalState()))  # nothing has happened yet
        if unreadable:
            notices.append(f"{path}: {unreadable:,} of {number:,} lines are no JSON and were left out")
        if unknown:
            notices.append(f"{path}: {unknown:,} of {number:,} lines are of an unknown form and were left out")

    def _take(self, content: dict[str, Any]) -> bool:
        """Add a line's content; whether it was understood."""
        take = {
            "state": self._take_state,
            "gap": self._take_gap,
            "tokens": self._take_tokens,
            "notice": self._take_notice,
        }
        try:
            kind = _text(content["kind"])
            take.get(kind, self._take_event)(content)
            return True
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
            return False

    def _take_state(self, content: dict[str, Any]) -> None:
        state, number = JournalState.load(content), _int(content["next"])
        if self._is_repeated(number):
            return
        self._go_on(number, number)
        self.recording.states.append((len(self.recording.events), state))

    def _take_gap(self, content: dict[str, Any]) -> None:
        first, last = _int(content["from"]), _int(content["to"])
        if self._is_repeated(last):
            return
        self._go_on(first, last + 1)
        self.recording.notices.append(f"events {first:,} to {last:,} were not recorded")
        self.recording.states.append((len(self.recording.events), None))

    def _take_tokens(self, content: dict[str, Any]) -> None:
        request_id, tokens = _text(content["request_id"]), _read_tokens(content)
        self.recording.tokens.setdefault(request_id, []).append(tokens)

    def _take_notice(self, content: dict[str, Any]) -> None:
        self.recording.notices.append(_text(content["text"]))

    def _take_event(self, content: dict[str, Any]) -> None:
        event, number = read_event(content), _int(content["id"])
        if self._is_repeated(number):
            return
        if not self._ranges:
            # A run's first file begins with nothing; what begins in the middle does so with a state.
            self.recording.states.append((0, JournalState()))
            self._ranges.append((0, 0))
        self._go_on(number, number + 1)
        self.recording.events.append(event)

    def _is_repeated(self, number: int) -> bool:
        """Whether the event is known, and not the next one."""
        return any(first <= number < end for first, end in self._ranges) and number != self._ranges[-1][1]

    def _go_on(self, first: int, end: int) -> None:
        """Events [first, end) come now; those missing before them are told of."""
        if not self._ranges:
            self._ranges.append((first, end))
            return
        begin, expected = self._ranges[-1]
        if first == expected:
            self._ranges[-1] = (begin, end)
            return
        self._ranges.append((first, end))
        missing = f"events {expected:,} to {first - 1:,} are missing"
        self.recording.notices.append(missing if first > expected else f"event {first:,} is not in its place")
        self.recording.states.append((len(self.recording.events), None))


def _read_tokens(content: dict[str, Any]) -> tuple[int, list[bytes] | list[int]]:
    if "token_ids" in content:
        return _int(content["start"]), list(_ints(content["token_ids"]))
    data = base64.b64decode(_text(content["digests"]), validate=True)
    return _int(content["start"]), [data[at : at + DIGEST_BYTES] for at in range(0, len(data), DIGEST_BYTES)]


# ---- values of an event ---------------------------------------------------------------------------------------------


def _int(value: Any) -> int:
    if type(value) is not int or not MIN_INT <= value <= MAX_INT:
        raise ValueError("no integer")
    return value


def _float(value: Any) -> float:
    if type(value) not in (int, float) or not -MAX_SECONDS <= value <= MAX_SECONDS:
        raise ValueError("no number")
    return float(value)


def _estimate(value: Any) -> float:
    return math.inf if value is None else _float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("no text")
    value.encode()  # one half of a surrogate pair is none either
    return value


def _ints(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise TypeError("no list")
    return tuple(map(_int, value))


_BY_TYPE: dict[Any, Callable[[Any], Any]] = {"int": _int, "float": _float, "str": _text, "tuple[int, ...]": _ints}
_ESTIMATES = {"copy_seconds", "compute_seconds"}


def _fields(event_type: type[Event]) -> dict[str, Callable[[Any], Any]]:
    """Names of its fields, and what takes their values."""
    return {field.name: _estimate if field.name in _ESTIMATES else _BY_TYPE[field.type] for field in fields(event_type)}


_FIELDS = {kind: _fields(event_type) for kind, event_type in EVENT_KINDS.items()}


def read_event(content: dict[str, Any]) -> Event:
    """The event that `event_json` told of; what it has besides is left out, words that are unknown are kept.

    Raises:
        KeyError: it is of no kind, or one of its fields is missing.
        TypeError, ValueError: a field is not of its type, or a number beyond what engines tell.
    """
    kind = content["kind"]
    return EVENT_KINDS[kind](**{name: take(content[name]) for name, take in _FIELDS[kind].items()})


def _decode(line: bytes) -> dict[str, Any] | None:
    try:
        content = json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
