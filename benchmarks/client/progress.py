"""Progress of a load on stderr: a live bar on a terminal, a line now and then elsewhere. It measures nothing."""

from __future__ import annotations

import asyncio
import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pageframe.benchmarks.client.exchange import LiveCounts

# drawing holds up the event loop that measures, so the bar moves seldom
BAR_PERIOD_S = 0.5
LINE_PERIOD_S = 10.0


async def show_progress(counts: LiveCounts, total: int, label: str) -> None:
    """Show `counts` on stderr until cancelled."""
    console = Console(stderr=True)
    if console.is_terminal:
        await _show_bar(counts, total, label, console)
    else:
        await _print_lines(counts, total, label)


class _TokenRate:
    """Output tokens per second since the last look."""

    def __init__(self) -> None:
        self._time = time.perf_counter()
        self._tokens = 0

    def look(self, tokens: int) -> float:
        now = time.perf_counter()
        rate = (tokens - self._tokens) / max(now - self._time, 1e-6)
        self._time, self._tokens = now, tokens
        return rate


async def _show_bar(counts: LiveCounts, total: int, label: str, console: Console) -> None:
    rate = _TokenRate()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[running]} running  {task.fields[rate]:.0f} tok/s  {task.fields[failed]} failed"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, auto_refresh=False) as bar:
        task_id = bar.add_task(label, total=total, running=0, rate=0.0, failed=0)

        def redraw() -> None:
            bar.update(
                task_id,
                completed=counts.ended,
                running=counts.running,
                rate=rate.look(counts.tokens),
                failed=counts.failed,
                refresh=True,
            )

        try:
            while True:
                redraw()
                await asyncio.sleep(BAR_PERIOD_S)
        finally:
            redraw()


async def _print_lines(counts: LiveCounts, total: int, label: str) -> None:
    rate = _TokenRate()
    while True:
        await asyncio.sleep(LINE_PERIOD_S)
        print(
            f"{label}: {counts.ended}/{total} done, {counts.running} running, "
            f"{rate.look(counts.tokens):.0f} tok/s, {counts.failed} failed",
            file=sys.stderr,
            flush=True,
        )
