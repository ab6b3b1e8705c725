"""Does a server leak? Many requests of mixed lengths, a fifth cancelled mid-stream; then its pool and its memory.

    python -m pageframe.benchmarks.experiments.soak [--requests 500] [--concurrency 16]

Starts a server of the default model on a free port, drives it over real sockets, and checks after every hundred
requests how much memory each of its processes holds. At the end `/inspect/kv` must show nothing used, and after the
first hundred no process may have grown by more than 1 MB per 100 requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pageframe.benchmarks.experiments.server_process import RunningServer, running_server

MIB = 1024**2
LIMIT_MB_PER_100 = 1.0
BATCH = 100
#: Small enough that the first hundred requests touch every block: the pool's own pages are no growth after that.
SOAK_POOL = "128MiB"


@dataclass(frozen=True, slots=True)
class Sample:
    """Resident bytes of each server process, by role, after `requests` requests."""

    requests: int
    resident: dict[str, int]


async def one_request(session: aiohttp.ClientSession, url: str, choice: random.Random, cancel: bool) -> str:
    """One streamed completion of random lengths, closed after its first tokens if `cancel`; how it ended."""
    body = {
        "prompt": [choice.randrange(10, 40_000) for _ in range(choice.randint(1, 200))],
        "max_tokens": choice.randint(12 if cancel else 1, 48),
        "ignore_eos": True,
        "stream": True,
        "seed": choice.randrange(2**31),
    }
    cancel_after = choice.randint(1, 8) if cancel else None
    seen = 0
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"HTTP {response.status}: {await response.text()}")
        async for line in response.content:
            if line.startswith(b"data: {"):
                seen += 1
                if "error" in json.loads(line[6:]):
                    raise RuntimeError(line.decode())
            if cancel_after is not None and seen >= cancel_after:
                response.close()
                return "cancelled"
    return "finished"


def resident_bytes(server: RunningServer) -> dict[str, int]:
    """Resident memory of the server's two processes, from /proc."""
    page = os.sysconf("SC_PAGE_SIZE")
    pids = {"http process": server.process.pid, "engine": server.engine_pid}
    return {role: int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page for role, pid in pids.items()}


async def drive(server: RunningServer, requests: int, concurrency: int) -> tuple[list[Sample], dict[str, int], int]:
    """Samples after every batch, how requests ended, and the blocks still used at the end."""
    choice = random.Random(1)
    endings: dict[str, int] = {"finished": 0, "cancelled": 0}
    samples = []
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        gate = asyncio.Semaphore(concurrency)

        async def limited(number: int) -> None:
            async with gate:
                endings[await one_request(session, server.url, choice, cancel=number % 5 == 0)] += 1

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("soak", total=requests)
            for done in range(0, requests, BATCH):
                count = min(BATCH, requests - done)
                async with asyncio.TaskGroup() as group:
                    for number in range(done, done + count):
                        group.create_task(limited(number)).add_done_callback(lambda _: bar.advance(task))
                samples.append(Sample(done + count, resident_bytes(server)))
        used = await used_blocks(session, server.url)
    return samples, endings, used


async def used_blocks(session: aiohttp.ClientSession, url: str) -> int:
    """Blocks still used once the last closed connection has been noticed, a second at most."""
    used = 0
    for _ in range(20):
        async with session.get(f"{url}/inspect/kv") as response:
            blocks = (await response.json())["blocks"]
        used = blocks["used"] + blocks["pinned"]
        if used == 0:
            break
        await asyncio.sleep(0.05)
    return used


def report(samples: list[Sample], endings: dict[str, int], used: int) -> bool:
    """Print the tables; whether everything is as promised."""
    roles = list(samples[0].resident)
    table = Table(title=f"{endings['finished']} finished, {endings['cancelled']} cancelled; blocks still used: {used}")
    table.add_column("requests", justify="right")
    for role in roles:
        table.add_column(f"{role}, MiB resident", justify="right")
    for sample in samples:
        table.add_row(str(sample.requests), *(f"{sample.resident[role] / MIB:.1f}" for role in roles))
    Console().print(table)
    right = used == 0
    if len(samples) > 1:
        spans = (samples[-1].requests - samples[0].requests) / 100
        for role in roles:
            growth = (samples[-1].resident[role] - samples[0].resident[role]) / 1e6 / spans
            right = right and growth < LIMIT_MB_PER_100
            Console().print(f"{role}: {growth:+.2f} MB per 100 requests (limit {LIMIT_MB_PER_100:g})")
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description="Drive a server with mixed requests and look for leaks.")
    parser.add_argument("--requests", type=int, default=500, help="how many (default: 500)")
    parser.add_argument("--concurrency", type=int, default=16, help="how many at a time (default: 16)")
    args = parser.parse_args()
    with running_server("--kv-memory", SOAK_POOL) as server:
        return 0 if report(*asyncio.run(drive(server, args.requests, args.concurrency))) else 1


if __name__ == "__main__":
    sys.exit(main())
