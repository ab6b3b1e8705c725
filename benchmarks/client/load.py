"""The load itself: when each request is sent, in a closed or an open loop. It does not know what is in a request."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pageframe.benchmarks.client.background import running_beside
from pageframe.benchmarks.client.exchange import Clock, Exchange, Job
from pageframe.benchmarks.client.record import RequestRecord

LAG_SAMPLE_S = 0.02


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Records of the requests that were sent, in the order of their index.

    `interrupted`: Ctrl-C ended the load early. `loop_lags_s`: how late the client's event loop woke up, sampled.
    """

    records: list[RequestRecord]
    interrupted: bool
    loop_lags_s: list[float]


def start_clock() -> Clock:
    """A monotonic clock in seconds that is 0 now."""
    start = time.perf_counter()
    return lambda: time.perf_counter() - start


def choose_cancelled(num_requests: int, cancel_rate: float, output_len: int, seed: int) -> dict[int, int]:
    """Which requests the client cancels: index -> received tokens after which it closes the connection.

    `cancel_rate` of the requests, rounded, chosen evenly; each after 0 to `output_len - 1` tokens, evenly. 0 means:
    as soon as the answer begins. An answer that ends sooner is not cancelled.
    """
    draw = random.Random(f"cancelled {seed}")
    chosen = draw.sample(range(num_requests), round(cancel_rate * num_requests))
    return {index: draw.randrange(output_len) for index in sorted(chosen)}


async def run_load(exchange: Exchange, jobs: Sequence[Job], *, concurrency: int | None) -> LoadResult:
    """Send every job and wait for all of them.

    With `concurrency`: a closed loop, that many requests at once, each free place taken at once by the next job,
    whose intended send time is that moment. Without: an open loop, each job sent at its own `intended_s`, however
    many are running.

    Cancelling the task that awaits this (as Ctrl-C does) stops the sending, cancels what runs and returns what was
    measured.
    """
    records: list[RequestRecord] = []
    lags: list[float] = []
    interrupted = False
    try:
        async with running_beside(_sample_lag(lags)):
            if concurrency is None:
                await _open_loop(exchange, jobs, records)
            else:
                await _closed_loop(exchange, jobs, records, concurrency)
    except asyncio.CancelledError:
        interrupted = True
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()
    return LoadResult(sorted(records, key=lambda record: record.index), interrupted, lags)


async def _closed_loop(exchange: Exchange, jobs: Sequence[Job], records: list[RequestRecord], concurrency: int) -> None:
    waiting = iter(jobs)

    async def keep_sending() -> None:
        for job in waiting:  # shared: each job goes to one place
            await _send(exchange, job, records, intended_s=exchange.clock())

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(jobs))):
            group.create_task(keep_sending())


async def _open_loop(exchange: Exchange, jobs: Sequence[Job], records: list[RequestRecord]) -> None:
    async with asyncio.TaskGroup() as group:
        for job in jobs:
            assert job.intended_s is not None, "an open loop needs arrival times"
            await asyncio.sleep(max(0.0, job.intended_s - exchange.clock()))
            group.create_task(_send(exchange, job, records, intended_s=job.intended_s))


async def _send(exchange: Exchange, job: Job, records: list[RequestRecord], *, intended_s: float) -> None:
    record = RequestRecord(job.index, intended_s, known_prompt_tokens=job.known_prompt_tokens)
    records.append(record)
    await exchange.run(job, record)


async def _sample_lag(lags: list[float]) -> None:
    """How late a sleep ends is how late the client sees anything."""
    while True:
        due = time.perf_counter() + LAG_SAMPLE_S
        await asyncio.sleep(LAG_SAMPLE_S)
        lags.append(time.perf_counter() - due)
