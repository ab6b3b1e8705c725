"""Runs of `pageframe generate` over a fake engine, in this process."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from pageframe.api.batch_command import Batch
from pageframe.api.batch_lines import Scan, read_requests, scan_requests
from pageframe.api.batch_results import ResultFile, open_results
from pageframe.api.batch_run import BatchCounts
from pageframe.api.config import MAX_MAX_QUEUE, ServerConfig
from pageframe.api.metrics import Metrics
from pageframe.api.service import Service

from .fakes import WAIT_SECONDS, ByteTokenizer, FakeEngine, PlainTemplate

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def line(custom_id: Any, url: str = COMPLETION, **body: Any) -> dict[str, Any]:
    messages = {"messages": [{"role": "user", "content": "hi"}]}
    content = {**({"prompt": "hi"} if url == COMPLETION else messages), **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": content}


def to_bytes(lines: list[Any]) -> bytes:
    return b"".join((item if isinstance(item, bytes) else json.dumps(item).encode()) + b"\n" for item in lines)


class Run:
    """A batch in a folder and an engine for it; each `run` is one of the command's, without its engine process."""

    def __init__(self, folder: Path, lines: list[Any], engine: FakeEngine | None = None) -> None:
        self.input, self.output = folder / "requests.jsonl", folder / "results.jsonl"
        self.input.write_bytes(to_bytes(lines))
        self.engine = engine or FakeEngine()
        self.results_file: Callable[[Path, Scan], AbstractContextManager[ResultFile]] = open_results
        self.batch: Batch | None = None
        self.max_queue = MAX_MAX_QUEUE
        #: Seconds, of each pause before a request was sent again. None of them is really taken.
        self.pauses: list[float] = []
        self.on_pause: Callable[[], None] = lambda: None

    def service(self) -> Service:
        metrics = Metrics("tiny", self.engine.resolved, lambda: self.engine.stats)
        return Service(self.engine, ByteTokenizer(), PlainTemplate(), "tiny", {}, metrics)  # type: ignore[arg-type]

    def run(self, concurrency: int | None = None) -> BatchCounts:
        requests = scan_requests(self.input)
        config = ServerConfig(max_queue=self.max_queue)
        with self.input.open("rb") as file, self.results_file(self.output, requests) as results:
            lines = (item for item in read_requests(file) if not results.has(item))
            self.batch = batch = Batch(lines, results, requests.num_lines, concurrency, pause=self._pause)

            async def work() -> None:
                self.loop = asyncio.get_running_loop()
                self.task = asyncio.current_task()
                await batch.answer(self.service(), config)

            asyncio.run(work())
        return batch.counts

    async def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.on_pause()

    def start(self, concurrency: int | None = None) -> None:
        """`run`, in a thread."""
        self.failure: BaseException | None = None

        def work() -> None:
            try:
                self.run(concurrency)
            except BaseException as error:
                self.failure = error

        self.thread = threading.Thread(target=work)
        self.thread.start()

    def stop(self) -> None:
        """As SIGTERM does; returns when it has ended."""
        assert self.task is not None
        self.loop.call_soon_threadsafe(self.task.cancel)
        self.join()

    def join(self) -> None:
        self.thread.join(WAIT_SECONDS)
        assert not self.thread.is_alive()

    def results(self) -> list[dict[str, Any]]:
        return [json.loads(text) for text in self.output.read_text().splitlines()]
