"""From the start of `pageframe serve` to the first token of a chat, as someone who waits for it sees it.

    python -m pageframe.benchmarks.experiments.start_up [--repeats 5] [--limit 8] [--model MODEL]

Every run starts a server of its own, asks /health until it answers, and then for a short chat, streamed; the table has
medians. The first server is not counted: it warms the disk's cache, and compiles the engine where nobody has. Exits
with 1 if the first token takes longer than the limit.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from statistics import median

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pageframe.benchmarks.client.record import RequestRecord
from pageframe.benchmarks.client.sse import SseParser
from pageframe.benchmarks.client.stream import AnswerStream
from pageframe.benchmarks.experiments.grids import count
from pageframe.benchmarks.experiments.report import EXIT_FAILED, processor_name, run_experiment
from pageframe.benchmarks.experiments.server_process import ServerError, running_server
from pageframe.runtime.config import DEFAULT_MODEL
from pageframe.runtime.errors import EngineError

LIMIT_SECONDS = 8.0
ANSWER_SECONDS = 60.0
CHAT = {"messages": [{"role": "user", "content": "Hello!"}], "stream": True, "max_tokens": 4, "temperature": 0}


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds from the start of the process: until /health answers, and until the first token of an answer."""

    healthy: float
    first_token: float


def start_once(*flags: str) -> Start:
    """Serve, ask and end.

    Args:
        flags: of `pageframe serve`.

    Raises:
        EngineError: it did not start, or sent no token.
    """
    try:
        return _start_once(flags)
    except ServerError as error:
        raise EngineError(str(error)) from error
    except (OSError, HTTPException) as error:
        raise EngineError(f"the chat failed: {error!r}") from error


def _start_once(flags: Sequence[str]) -> Start:
    started = time.perf_counter()
    with running_server(*flags, "--log-level", "warning", poll_seconds=0.01) as server:
        healthy = time.perf_counter() - started
        _wait_for_token(server.url)
        return Start(healthy, time.perf_counter() - started)


def _wait_for_token(url: str) -> None:
    """Ask for a chat, and read until it has a token."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(CHAT).encode(), headers)
    parser, record = SseParser(), RequestRecord(index=0, intended_s=0.0)
    stream = AnswerStream(record)
    with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
        while not record.chunks:
            received = answer.read1()
            for event in parser.feed(received):
                stream.take(event, now_s=0.0)
            if stream.failure is not None:
                raise EngineError(f"the chat failed: {stream.failure.message}")
            if not received:
                raise EngineError("the answer ended without a token")


def show(starts: Sequence[Start], limit: float) -> bool:
    """Print the table; whether the limit is kept."""
    first_token = median(start.first_token for start in starts)
    table = Table(title=f"seconds from the start of the process, medians of {len(starts)}; {processor_name()}")
    for column in ("healthy", "first token of a chat", "limit", "met"):
        table.add_column(column, justify="right")
    met = first_token <= limit
    healthy = median(start.healthy for start in starts)
    table.add_row(f"{healthy:.2f}", f"{first_token:.2f}", f"{limit:g}", "yes" if met else "NO")
    Console().print(table)
    return met


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description="From the start of the server to the first token of a chat.")
    parser.add_argument("--repeats", type=count, default=5, help="servers that count (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds (default: %(default)g)")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="as for `pageframe serve` (%(default)s)")
    args = parser.parse_args(arguments)
    flags = () if args.model == DEFAULT_MODEL else ("--model", args.model)

    def measure() -> int:
        starts = []
        with Progress(console=Console(stderr=True), transient=True) as bar:
            for _ in bar.track(range(args.repeats + 1), description="starting"):
                starts.append(start_once(*flags))
        return 0 if show(starts[1:], args.limit) else EXIT_FAILED

    return run_experiment(measure)


if __name__ == "__main__":
    sys.exit(main())
