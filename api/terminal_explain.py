"""`pageframe explain`: what happened to one request, in sentences, from a running server or from a recording."""

from __future__ import annotations

import argparse
import json
import sys
import urllib.parse
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from pageframe.api.terminal_drawing import printable
from pageframe.api.terminal_http import DEFAULT_URL, Json, ServerError, fetch_json, print_error, server_url
from pageframe.api.terminal_journal import fetch_events, read_events
from pageframe.runtime.errors import PageframeError
from pageframe.runtime.journal import ArriveEvent, EvictEvent, LoseEvent
from pageframe.runtime.journal_file import JournalFileError, numbered
from pageframe.runtime.story import tell

NOT_WHOLE = "It began earlier: what came before is no longer known."
SHOWN_IDS = 5
#: These name who computed a block, which may be long gone.
_AFTERWARDS = (EvictEvent.kind, LoseEvent.kind)


class NoStoryError(PageframeError):
    """No request has that id, or several do."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request", metavar="ID", help="the id of its response; the beginning of it will do")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--url", type=server_url, default=DEFAULT_URL, help=f"the server (default: {DEFAULT_URL})")
    source.add_argument(
        "--journal", type=Path, metavar="FILE", help="read a recording, as `serve --journal` writes it, not a server"
    )
    parser.add_argument("--json", action="store_true", help="print the story as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the story; 1 and one line on stderr where there is none."""
    try:
        story = read_story(args.journal, args.request) if args.journal else fetch_story(args.url, args.request)
    except (ServerError, JournalFileError, NoStoryError) as error:
        print_error(str(error))
        return 1
    if args.json:
        sys.stdout.write(json.dumps(story) + "\n")
    else:
        Console(highlight=False, markup=False, emoji=False).print(draw_story(story))
    return 0


def fetch_story(url: str, request_id: str) -> Json:
    """A story by the request's id, or by a beginning that only one id in the server's journal has.

    Raises:
        ServerError: no answer, or none as Pageframe gives.
        NoStoryError: no id, or several, begin so.
    """
    try:
        return fetch_exact_story(url, request_id)
    except ServerError as error:
        if error.status != 404:
            raise
    ids = {event["request_id"] for event in fetch_events(url) if event["kind"] not in _AFTERWARDS}
    return fetch_exact_story(url, _only_one(ids, request_id))


def fetch_exact_story(url: str, request_id: str) -> Json:
    """A story by the request's whole id.

    Raises:
        ServerError: the server knows of none (404), or does not answer.
    """
    path = f"/inspect/requests/{urllib.parse.quote(request_id, safe='')}/story"
    story = fetch_json(url, path)
    if "sentences" not in story:
        raise ServerError(f'{url} does not answer {path} as Pageframe does: no "sentences"')
    return story


def read_story(path: Path, request_id: str) -> Json:
    """A story from a recording, as a server would tell it.

    Raises:
        JournalFileError: it is no recording.
        NoStoryError: no id, or several, begin so.
    """
    events = read_events(path)
    ids = {event.request_id for event in events if event.kind not in _AFTERWARDS}
    try:
        found = request_id if request_id and request_id in ids else _only_one(ids, request_id)
    except NoStoryError as error:
        older = numbered(path, 1)
        # A server that is started again moves the recording before it aside.
        hint = f"; an older recording may be in {older}" if older.exists() else ""
        raise NoStoryError(f"{error}{hint}") from None
    sentences = [asdict(sentence) for sentence in tell(events, found)]
    return {"id": found, "sentences": sentences, "complete": sentences[0]["kind"] == ArriveEvent.kind}


def _only_one(ids: Iterable[str], beginning: str) -> str:
    found = sorted(request_id for request_id in ids if beginning and request_id.startswith(beginning))
    if not found:
        raise NoStoryError(f"nothing is known of a request {beginning!r}")
    if len(found) > 1:
        more = ", …" if len(found) > SHOWN_IDS else ""
        raise NoStoryError(
            f"the ids of {len(found):,} requests begin with {beginning!r}: {', '.join(found[:SHOWN_IDS])}{more}"
        )
    return found[0]


def draw_story(story: Json) -> RenderableType:
    """Its sentences, each with its step and its time since the arrival."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("after", justify="right", no_wrap=True)
    table.add_column(Text(printable(story["id"])))
    for sentence in story["sentences"]:
        text = Text(printable(sentence["text"]))
        table.add_row(Text(f"{sentence['step']:,}", "dim"), Text(f"{sentence['time']:.3f} s", "dim"), text)
    return table if story["complete"] else Group(table, Text(NOT_WHOLE, "yellow"))
