"""A recording of the journal, read back: lines of JSON in files of bounded size, which journal_recorder.py writes.

    {"kind": "journal", "version": 1, …}            the first line of each file: what was recorded, and of which run
    {"kind": "state", …}                            how things stood before the events that follow; see JournalState
    {"kind": "admit", "id": 17, "step": 3, …}       an event: its number and its fields, see journal.py
    {"kind": "tokens", "request_id": …, "start": 0, "digests": …}
    {"kind": "gap", "from": 3, "to": 9}             these events were dropped: the disk was too slow

Of texts and tokens nothing is written, unless asked for. A token's digest is BLAKE2b, keyed and of 64 bits, of the
digest before it and the token, the first one's of the request's salt: two requests have the same digests exactly as far
as they may share computed blocks, and without the key nobody can tell for which tokens. `digests` is base64 of 8 bytes
a token.
"""

from __future__ import annotations

import base64
import json
import math
from bisect import bisect_right
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from pageframe.runtime.journal import EVENT_KINDS, Event
from pageframe.runtime.journal_state import JournalState

VERSION = 1
DIGEST_BYTES = 8
#: Older files of a recording: FILE.1, the newest of them, to FILE.4.
KEPT_FILES = 4


def numbered(path: Path, number: int) -> Path:
    """A recording's file (0) or one of its older ones."""
    return path if number == 0 else path.with_name(f"{path.name}.{number}")


class JournalFileError(Exception):
    """It is no recording, or cannot be read at all."""


@dataclass(slots=True)
class Recording:
    """What a recording holds.

    Args:
        header: of its oldest file.
        events: oldest first.
        states: how things stood before the event at an index of `events`; rising.
        tokens: by request id, (start, digests of 8 bytes or token ids) in the order written.
        notices: what could not be read, a sentence each.
    """

    header: dict[str, Any]
    events: list[Event] = field(default_factory=list)
    states: list[tuple[int, JournalState]] = field(default_factory=list)
    tokens: dict[str, list[tuple[int, list[bytes] | list[int]]]] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)

    def state_at(self, step: int) -> JournalState:
        """How things stood when `step` had ended, or at the end of the recording where that comes first."""
        end = bisect_right(self.events, step, key=lambda event: event.step)
        begin, known = max((entry for entry in self.states if entry[0] <= end), key=lambda entry: entry[0])
        state = JournalState.load(known.snapshot())
        state.apply(self.events[begin:end])
        return state


def read_journal(path: Path) -> Recording:
    """A recording with its older files, as far as it can be read; `notices` say what is missing.

    Raises:
        JournalFileError: there is nothing of a recording in it.
    """
    recording = _read_header(path)
    older = []
    for number in range(1, KEPT_FILES + 1):
        file = numbered(path, number)
        if not file.exists() or _run_of(file) != recording.header.get("run"):
            break
        older.append(file)
    for file in [*reversed(older), path]:
        _read_file(file, recording)
    if not recording.states or recording.states[0][0] > 0:
        # A run's first file begins with nothing.
        recording.states.insert(0, (0, JournalState()))
    return recording


def _read_header(path: Path) -> Recording:
    try:
        with path.open("rb") as file:
            header = _decode(file.readline())
    except OSError as error:
        raise JournalFileError(f"{path} cannot be read: {error.strerror}") from None
    if header is None or header.get("kind") != "journal":
        raise JournalFileError(f"{path} is no recording of a journal: its first line is no header")
    recording = Recording(header)
    if header.get("version") != VERSION:
        recording.notices.append(
            f"{path} is of version {header.get('version')!r} of the format, and this reads version {VERSION}; what is "
            "unknown is left out"
        )
    return recording


def _run_of(path: Path) -> Any:
    with path.open("rb") as file:
        header = _decode(file.readline())
    return None if header is None else header.get("run")


def _read_file(path: Path, recording: Recording) -> None:
    unreadable, unknown, number = 0, 0, 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            content = _decode(line)
            if content is None and not line.endswith(b"\n"):
                recording.notices.append(f"{path} is cut off in line {number}")
            elif content is None:
                unreadable += 1
            elif not _take(content, recording):
                unknown += 1
    if unreadable:
        recording.notices.append(f"{path}: {unreadable:,} of {number:,} lines are no JSON and were left out")
    if unknown:
        recording.notices.append(f"{path}: {unknown:,} of {number:,} lines are of an unknown form and were left out")


def _take(content: dict[str, Any], recording: Recording) -> bool:
    """Add a line's content; whether it was understood."""
    kind = content.get("kind")
    try:
        if kind == "journal":
            return True
        if kind == "state":
            recording.states.append((len(recording.events), JournalState.load(content)))
            return True
        if kind == "gap":
            recording.notices.append(f"events {int(content['from']):,} to {int(content['to']):,} were not recorded")
            return True
        if kind == "tokens":
            recording.tokens.setdefault(content["request_id"], []).append(_read_tokens(content))
            return True
        recording.events.append(read_event(content))
        return True
    except (KeyError, TypeError, ValueError, AttributeError):
        return False


def _read_tokens(content: dict[str, Any]) -> tuple[int, list[bytes] | list[int]]:
    if "token_ids" in content:
        return int(content["start"]), [int(token) for token in content["token_ids"]]
    data = base64.b64decode(content["digests"], validate=True)
    return int(content["start"]), [data[at : at + DIGEST_BYTES] for at in range(0, len(data), DIGEST_BYTES)]


def read_event(content: dict[str, Any]) -> Event:
    """The event that `event_json` told of; what it has besides is left out.

    Raises:
        KeyError: it is of no kind, or one of its numbers is missing.
    """
    event_type = EVENT_KINDS[content["kind"]]
    values = {field.name: content[field.name] for field in fields(event_type)}
    if "block_ids" in values:
        values["block_ids"] = tuple(values["block_ids"])
    for name in ("copy_seconds", "compute_seconds"):
        if name in values and values[name] is None:
            values[name] = math.inf
    return event_type(**values)


def _decode(line: bytes) -> dict[str, Any] | None:
    try:
        content = json.loads(line)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None
