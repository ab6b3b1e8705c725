"""`pageframe inspect`: a running server's pool and block tables, drawn in a terminal.

Draws what GET /inspect/... answers and nothing else: it knows no engine, allocator or scheduler.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import urllib.parse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live

from pageframe.api.terminal_drawing import OwnerColors, Snapshot, draw_request, draw_snapshot
from pageframe.api.terminal_http import DEFAULT_URL, Json, ServerError, fetch_json, print_error, server_url

WATCH_SECONDS = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--url", type=server_url, default=DEFAULT_URL, help=f"the server (default: {DEFAULT_URL})")
    source.add_argument(
        "--journal", type=Path, metavar="RECORDING", help="with --perfetto: read a recording, not a running server"
    )
    parser.add_argument("--request", metavar="ID", help="show one request in full; the beginning of its id will do")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--watch",
        nargs="?",
        type=watch_seconds,
        const=WATCH_SECONDS,
        metavar="SECONDS",
        help=f"draw again and again, every {WATCH_SECONDS:g} s unless said, until Ctrl-C",
    )
    form.add_argument("--json", action="store_true", help="print the server's answers as JSON")
    form.add_argument(
        "--perfetto",
        type=Path,
        metavar="FILE",
        help="write what the journal holds as a trace, to be opened in ui.perfetto.dev or chrome://tracing",
    )


def watch_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0 and at most 3600")
    return seconds


def run(args: argparse.Namespace) -> int:
    """Draw once, or until Ctrl-C; 1 and one line on stderr where the server cannot be asked."""
    if args.perfetto is not None and args.request is None:
        return _write_trace(args.url, args.perfetto, args.journal)
    if args.perfetto is not None or args.journal is not None:
        print_error(
            "--journal goes with --perfetto, and --request with neither: `pageframe explain` tells of one request"
        )
        return 2
    console = Console(highlight=False, markup=False, emoji=False)
    colors = OwnerColors()
    try:
        if args.json:
            answer = fetch_request(args.url, args.request) if args.request else fetch_answers(args.url)
            sys.stdout.write(json.dumps(answer) + "\n")
        elif args.watch is not None:
            watch(console, lambda: _picture(console, args, colors), args.watch)
        else:
            console.print(_picture(console, args, colors))
    except ServerError as error:
        print_error(str(error))
        return 1
    return 0


def _write_trace(url: str, path: Path, recording: Path | None) -> int:
    """Write a journal as a trace, and say what it holds."""
    # Only this needs them, and numpy with them.
    from pageframe.api.perfetto import make_trace, write_trace
    from pageframe.api.terminal_journal import as_json, fetch_events, read_events
    from pageframe.runtime.journal_file import JournalFileError

    try:
        events = fetch_events(url) if recording is None else as_json(read_events(recording))
        trace = make_trace(events)
        write_trace(path, trace)
    except (ServerError, JournalFileError) as error:
        print_error(str(error))
        return 1
    except OSError as error:
        print_error(f"{path} cannot be written: {error.strerror}")
        return 1
    first = events[0]["id"] if events else 0
    missing = f"; {first:,} events before these are held no more" if first else ""
    sys.stdout.write(
        f"{path}: {len(events):,} events, {trace.seconds:,.2f} s, {trace.num_steps:,} steps, "
        f"{trace.num_requests:,} requests{missing}\n"
    )
    return 0


def watch(
    console: Console,
    draw: Callable[[], RenderableType],
    seconds: float,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Draw every so many seconds until Ctrl-C: in place in a terminal, one below the other elsewhere."""
    try:
        if not console.is_terminal:
            while True:
                console.print(draw())
                sleep(seconds)
        with Live(draw(), console=console, auto_refresh=False) as live:
            while True:
                sleep(seconds)
                live.update(draw(), refresh=True)
    except KeyboardInterrupt:
        return


def _picture(console: Console, args: argparse.Namespace, colors: OwnerColors) -> RenderableType:
    if args.request:
        request = fetch_request(args.url, args.request)
        return draw_request(request, _inspect(args.url, "kv")["block_size"])
    height = console.height if args.watch is not None and console.is_terminal else None
    return draw_snapshot(fetch_snapshot(args.url), colors, console.width, height)


def _inspect(url: str, path: str) -> Json:
    answer = fetch_json(url, f"/inspect/{path}")
    if "step" not in answer:
        raise ServerError(f'{url} does not answer /inspect/{path} as Pageframe does: no "step"')
    return answer


def fetch_answers(url: str) -> Json:
    """{"kv", "blocks", "requests"} as the routes answer; asked at once, so that one step may answer all three."""
    names = ("kv", "blocks", "requests")
    with ThreadPoolExecutor(len(names)) as pool:
        answers = pool.map(lambda name: _inspect(url, name), names)
        return dict(zip(names, answers, strict=True))


def fetch_snapshot(url: str) -> Snapshot:
    """Totals, blocks and requests, of one step if one of two tries gives that."""
    snapshot = _snapshot(fetch_answers(url))
    return snapshot if snapshot.of_one_step else _snapshot(fetch_answers(url))


def _snapshot(answers: Json) -> Snapshot:
    kv, blocks, requests = answers["kv"], answers["blocks"], answers["requests"]
    steps = (kv["step"], blocks["step"], requests["step"])
    return Snapshot(kv, blocks["blocks"], requests["requests"], steps)


def fetch_request(url: str, request_id: str) -> Json:
    """One request by its id, or by a beginning that only one live request's id has.

    Raises:
        ServerError: there is none, or several begin so.
    """
    try:
        return _inspect(url, "requests/" + urllib.parse.quote(request_id, safe=""))
    except ServerError as error:
        if error.status != 404:
            raise
        requests: list[Json] = _inspect(url, "requests")["requests"]
        found = [request for request in requests if request["id"].startswith(request_id)]
        if len(found) > 1:
            raise ServerError(f"the ids of {len(found)} requests begin with {request_id!r}") from error
        if not found:
            raise
        return _inspect(url, "requests/" + urllib.parse.quote(found[0]["id"], safe=""))
