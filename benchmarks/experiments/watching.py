"""What pages that watch cost a server under load: throughput, and processor time of its HTTP process.

    python -m pageframe.benchmarks.experiments.watching [--watchers 3] [--pairs 8] [--browser] [--quick]

A server of the default model with a pool of 20,000 blocks gets the same closed loop again and again, with and without
readers of /inspect/live, in pairs whose order alternates. A reader takes frames as a page on another machine would: it
reads and counts them, and draws nothing (a browser on this machine would share its cores with the server, and its
drawing is not what is measured). The throughput lost is the median over the pairs, which are printed too, since other
tenants of a machine may slow single runs by a lot; the mean has its 95% interval beside. With --browser,
the dashboard is then opened in this system's Chromium beside the same load, and says how often it drew itself.

Targets: at least 10 frames a second, under 10% of a core in the HTTP process, under 3% of throughput.

Exits with 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, stdev

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pageframe.benchmarks.experiments.grids import count
from pageframe.benchmarks.experiments.peers_http import Load, drive_url
from pageframe.benchmarks.experiments.peers_process import PeerError
from pageframe.benchmarks.experiments.server_process import RunningServer, running_server

NUM_BLOCKS = 20_000
FRAMES_TARGET, CORE_TARGET, LOST_TARGET = 10.0, 0.10, 0.03
#: Counts the frames that come until its standard input is closed, then prints how many a second, in the median of the
#: seconds in which any came (an engine that does nothing has none to tell), and the bytes of these seconds.
READER = """
import collections, statistics, sys, threading, time, urllib.request
response = urllib.request.urlopen(sys.argv[1] + "/inspect/live")
done = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), done.set()), daemon=True).start()
frames, sizes = collections.Counter(), collections.Counter()
print("reading", flush=True)
while not done.is_set():
    line = response.readline()
    second = int(time.monotonic())
    frames[second] += line.startswith(b"event: frame")
    sizes[second] += len(line)
busy = [second for second, number in frames.items() if number]
middle = lambda counts: statistics.median(counts[second] for second in busy) if busy else 0
print(middle(frames), middle(sizes), flush=True)
"""


@dataclass(frozen=True, slots=True)
class Run:
    """Output tokens per second; of a core, what the HTTP process took; frames and bytes a second of each reader."""

    rate: float
    core: float
    frames: tuple[float, ...]
    bytes_per_second: float


def run_once(server: RunningServer, load: Load, watchers: int, seed: int) -> Run:
    """One closed loop, watched by so many.

    Raises:
        PeerError: a request failed.
    """
    readers = [_reader(server.url) for _ in range(watchers)]
    for reader in readers:
        assert reader.stdout is not None
        reader.stdout.readline()
    started, busy = time.monotonic(), _processor_seconds(server.process.pid)
    try:
        served = drive_url(server.url, load, seed)
        core = (_processor_seconds(server.process.pid) - busy) / (time.monotonic() - started)
    finally:
        counted = [_ended(reader) for reader in readers]
    return Run(served.output_rate, core, tuple(frames for frames, _ in counted), sum(size for _, size in counted))


def _reader(url: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", READER, url]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _ended(reader: subprocess.Popen[str]) -> tuple[float, float]:
    """What a reader says once it is told to end; it may have to wait for a line until then."""
    try:
        said, _ = reader.communicate("", timeout=30)
    finally:
        with contextlib.suppress(ProcessLookupError):
            reader.kill()
    frames, size = said.split()
    return float(frames), float(size)


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks: float = os.sysconf("SC_CLK_TCK")
    return (int(fields[11]) + int(fields[12])) / ticks


def measure(
    load: Load, num_blocks: int, watchers: int, pairs: int, *, browser: bool
) -> tuple[list[Run], list[Run], float | None]:
    """Runs without and with readers, pair by pair; with `browser`, the page's updates a second.

    Raises:
        PeerError: a request failed.
        RuntimeError: the server did not start.
    """
    without: list[Run] = []
    watched: list[Run] = []
    updates = None
    flags = ("--num-blocks", str(num_blocks), "--log-level", "warning")
    with Progress(console=Console(stderr=True), transient=True) as bar, running_server(*flags) as server:
        task = bar.add_task("serving", total=2 * pairs)
        for pair in range(pairs):
            for place, is_watched in enumerate((False, True) if pair % 2 == 0 else (True, False)):
                # Other prompts each time: those of the run before would be found computed.
                run = run_once(server, load, watchers if is_watched else 0, seed=1 + 2 * pair + place)
                (watched if is_watched else without).append(run)
                bar.advance(task)
        if browser:
            updates = page_updates(server.url, load)
    return without, watched, updates


def page_updates(url: str, load: Load) -> float:
    """Updates a second of the dashboard in a browser beside one closed loop, as the page counts them.

    Raises:
        PeerError: a request failed, or there is no browser.
    """
    browser_path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser_path is None:
        raise PeerError("there is no Chromium on this system")
    # A dependency of the tests alone.
    from playwright.sync_api import sync_playwright

    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
    with sync_playwright() as playwright, ThreadPoolExecutor(1) as pool:
        browser = playwright.chromium.launch(executable_path=browser_path, args=flags)
        page = browser.new_page()
        page.goto(f"{url}/dashboard")
        page.wait_for_function("window.pageframeState && window.pageframeState() !== null")
        loading = pool.submit(drive_url, url, load, 0)
        seen: list[float] = []
        while not loading.done():
            page.wait_for_timeout(500)
            seen.append(float(page.evaluate("window.pageframeStats.updatesPerSecond")))
        loading.result()
        browser.close()
    return median(seen)


def report(without: list[Run], watched: list[Run], load: Load, num_blocks: int) -> bool:
    """Print the table; whether every target is met."""
    console = Console()
    table = Table(title=f"{load}, a pool of {num_blocks:,} blocks; medians of {len(without)} runs")
    for column in ("", "output tokens/s", "HTTP process, of a core"):
        table.add_column(column, justify="left" if not column else "right")
    for name, runs in (("nobody watches", without), (f"{len(watched[0].frames)} watch", watched)):
        table.add_row(name, f"{median(run.rate for run in runs):.0f}", f"{median(run.core for run in runs):.1%}")
    console.print(table)
    lost = [1 - with_it.rate / alone.rate for with_it, alone in zip(watched, without, strict=True)]
    margin = 1.96 * stdev(lost) / math.sqrt(len(lost)) if len(lost) > 1 else math.inf
    core = median(with_it.core - alone.core for with_it, alone in zip(watched, without, strict=True))
    frames = median(min(run.frames) for run in watched)
    size = median(run.bytes_per_second / len(run.frames) for run in watched)
    console.print(
        f"Throughput lost while {len(watched[0].frames)} watch: {median(lost):.2%} in the median of the pairs, "
        f"{mean(lost):.2%} in the mean (95% interval {mean(lost) - margin:.2%} to {mean(lost) + margin:.2%}); the "
        f"target is under {LOST_TARGET:.0%}. By pair: {', '.join(f'{share:.1%}' for share in lost)}.\n"
        f"Each gets {frames:.1f} frames a second (target {FRAMES_TARGET:.0f}), {size / 1e3:.0f} kB/s; they take "
        f"{core:.1%} of a core in the HTTP process (target under {CORE_TARGET:.0%})."
    )
    return median(lost) < LOST_TARGET and core < CORE_TARGET and frames >= FRAMES_TARGET


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description="What pages that watch cost a server under load.")
    parser.add_argument("--watchers", type=count, default=3, help="readers of /inspect/live (default: 3)")
    parser.add_argument("--pairs", type=count, default=8, help="runs with and without them (default: 8)")
    parser.add_argument("--browser", action="store_true", help="then open the dashboard in Chromium on this machine")
    parser.add_argument("--quick", action="store_true", help="toy sizes, to see that it runs; the targets do not count")
    options = parser.parse_args(arguments)
    load, num_blocks = Load(8, 128, 128, rounds=8), NUM_BLOCKS
    if options.quick:
        load, num_blocks, options.pairs, options.watchers = Load(2, 16, 32, rounds=1), 64, 1, 1
    try:
        without, watched, updates = measure(load, num_blocks, options.watchers, options.pairs, browser=options.browser)
    except (PeerError, RuntimeError) as error:
        print(f"watching: {error}", file=sys.stderr)
        return 1
    is_met = report(without, watched, load, num_blocks)
    if updates is not None:
        print(f"In Chromium on this machine the page draws itself {updates:.1f} times a second, beside the same load.")
        is_met = is_met and updates >= FRAMES_TARGET
    return 0 if is_met or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())
