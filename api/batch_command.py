"""`pageframe generate`: answers a file of requests without a server, and goes on where it was stopped.

An engine process is started as for a server, and each line takes the way of an HTTP request, all but the socket.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pageframe.api.auth import Access
from pageframe.api.batch_lines import BadLine, BatchRequest, open_file, read_requests, scan_requests
from pageframe.api.batch_results import ResultFile, ResultFileError, open_results
from pageframe.api.batch_run import BatchCounts, run_batch
from pageframe.api.config import MAX_MAX_QUEUE, ServerConfig
from pageframe.api.flags import add_flags, read_flags
from pageframe.api.service import ServerState, Service
from pageframe.runtime.config import EngineConfig
from pageframe.runtime.engine_launch import end_engine, launch_engine, without_collections
from pageframe.runtime.errors import ConfigError, EngineDeadError

LOG_LEVEL = "warning"
MAX_CONCURRENCY = 65_536


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--input", type=Path, required=True, metavar="FILE", help="requests, a line each, in OpenAI's batch format"
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="results are appended to it, a line each, as they come; requests that have one there are passed over",
    )
    parser.add_argument(
        "--concurrency",
        type=_concurrency,
        metavar="REQUESTS",
        help="requests that are answered at once (default: --max-num-requests)",
    )
    parser.add_argument(
        "--served-model-name", metavar="NAME", help="the model's name in the requests; default: its own name"
    )
    add_flags(parser, EngineConfig)


def _concurrency(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    if not 1 <= number <= MAX_CONCURRENCY:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to {MAX_CONCURRENCY}")
    return number


class Batch:
    """A run of the command: what is to be done, and how much of it is.

    Args:
        lines: those without a result.
        num_lines: of the whole file of requests.
        concurrency: None for as many as the engine runs at once.
        pause: waits so many seconds before a request is sent again.
    """

    def __init__(
        self,
        lines: Iterator[BatchRequest | BadLine],
        results: ResultFile,
        num_lines: int,
        concurrency: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._lines = lines
        self._results = results
        self._num_lines = num_lines
        self._concurrency = concurrency
        self._clock = clock
        self._pause = pause
        self._started = clock()
        self.counts = BatchCounts()

    @property
    def num_open(self) -> int:
        """Lines that had no result at the start."""
        return self._num_lines - self._results.num_results

    async def answer(self, service: Service, config: ServerConfig) -> None:
        """Answers them all.

        Raises:
            EngineDeadError: the engine has ended before.
        """
        from pageframe.api.app import create_app  # after the engine process is on its way: it takes time to import

        client = service.client

        def check_alive() -> None:
            if not client.is_alive:
                raise EngineDeadError(f"the engine has ended: {client.death_note}")

        self._started = self._clock()
        with progress_bar(Console(stderr=True), self.num_open) as progress:
            await run_batch(
                create_app(ServerState(config, Access(), service)),
                self._lines,
                self._results,
                self.counts,
                concurrency=self._concurrency or client.resolved.max_num_requests,
                check_alive=check_alive,
                progress=progress,
                pause=self._pause,
            )

    def summary(self) -> str:
        """Counts and speed in words."""
        counts, seconds = self.counts, max(self._clock() - self._started, 1e-3)
        num_before = self._results.num_results
        before = f" ({num_before} had their results before)" if num_before else ""
        return (
            f"{counts.answered} requests answered and {counts.failed} failed of {self._num_lines}{before}; "
            f"{counts.output_tokens} output tokens in {seconds:.1f} s, {counts.output_tokens / seconds:.1f} a second"
        )


def run(args: argparse.Namespace) -> int:
    """Answers all requests that have no result; 1 and one line on stderr where that cannot go on."""
    logging.basicConfig(level=LOG_LEVEL.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    engine_config = read_flags(args, EngineConfig)
    # Whoever waits for the engine here is this command's own, so none is turned away.
    server_config = ServerConfig(served_model_name=args.served_model_name, max_queue=MAX_MAX_QUEUE)
    requests = scan_requests(args.input)
    if args.output.exists() and args.output.samefile(args.input):
        raise ConfigError(f"--input and --output are both {args.output}; results need a file of their own")
    with open_file(args.input, "rb") as file, open_results(args.output, requests) as results:
        lines = (line for line in read_requests(file) if not results.has(line))
        batch = Batch(lines, results, requests.num_lines, args.concurrency)
        if not batch.num_open:
            sys.stderr.write(f"All {requests.num_lines} requests have their results in {args.output} already\n")
            return 0
        status, beginning, end = _finish(batch, engine_config, server_config)
    sys.stderr.write(f"{beginning}{batch.summary()}{end}\n")
    return status


def _finish(batch: Batch, engine_config: EngineConfig, server_config: ServerConfig) -> tuple[int, str, str]:
    """Exit status, and what is said before and behind the summary."""
    again = "; the same command goes on from there"
    try:
        asyncio.run(_with_engine(batch, engine_config, server_config))
    except (EngineDeadError, ResultFileError) as error:
        return 1, f"pageframe: {error}; ", again
    except KeyboardInterrupt:
        return 128 + signal.SIGINT, "Stopped: ", again
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM, "Stopped: ", again
    return 0, "", ""


async def _with_engine(batch: Batch, engine_config: EngineConfig, server_config: ServerConfig) -> None:
    running = asyncio.current_task()
    assert running is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)  # Ctrl-C cancels it anyway
    process = await launch_engine(LOG_LEVEL)
    try:
        with without_collections():
            from pageframe.api.server import load_service

        service = await load_service(process, engine_config, server_config)
        try:
            await batch.answer(service, server_config)
        finally:
            await service.client.shutdown()
    finally:
        await end_engine(process)


@contextmanager
def progress_bar(console: Console, num_open: int) -> Iterator[Callable[[BatchCounts], None]]:
    """A bar that is gone when the block ends, none where nobody sees it; gives what to call with the counts so far."""
    columns = (
        TextColumn("answering"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=num_open)

        def show(counts: BatchCounts) -> None:
            text = f"{counts.output_tokens:,} tokens" + (f", {counts.failed} failed" if counts.failed else "")
            bar.update(task, completed=counts.answered + counts.failed, description=text)

        yield show
