"""Where the terminal commands get a journal from: a running server, or a recording."""

from __future__ import annotations

import json
from pathlib import Path

from pageframe.api.terminal_http import Json, ServerError, fetch_body, print_error
from pageframe.runtime.journal import Event
from pageframe.runtime.journal_file import read_journal
from pageframe.runtime.journal_json import event_json


def fetch_events(url: str) -> list[Json]:
    """The events that a server's journal holds, oldest first.

    Raises:
        ServerError: no answer, or not Pageframe's.
    """
    body = fetch_body(url, "/inspect/events?follow=0")
    try:
        events = [json.loads(line) for line in body.splitlines()]
    except ValueError:
        events = [None]
    if not all(isinstance(event, dict) and "kind" in event and "request_id" in event for event in events):
        raise ServerError(f"{url} does not answer /inspect/events as Pageframe does")
    return events


def read_events(path: Path) -> list[Event]:
    """A recording's events, oldest first. What of it could not be read is told on stderr.

    Raises:
        JournalFileError: it is no recording.
    """
    recording = read_journal(path)
    for notice in recording.notices:
        print_error(notice)
    return recording.events


def as_json(events: list[Event]) -> list[Json]:
    """Events as a server tells them, numbered from 0."""
    return [event_json(number, event) for number, event in enumerate(events)]
