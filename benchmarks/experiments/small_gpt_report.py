"""`small_gpt`'s results as a table, sentences and a plot."""

from __future__ import annotations

import statistics
from pathlib import Path

from rich.table import Table

from pageframe.benchmarks.experiments.report import INK, NOT_MEASURED, draw_line, new_figure, save_figure
from pageframe.benchmarks.experiments.small_gpt_results import TARGET_RATIO, Results
from pageframe.benchmarks.experiments.small_gpt_ways import Cached

PLOTTED_POINTS = 40


def draw_table(results: Results, title: str) -> Table:
    table = Table(title=title)
    table.add_column("output tokens", no_wrap=True)
    for way in results.runs:
        table.add_column(f"{way}, s", justify="right")
        table.add_column("ms each", justify="right")
    table.add_column("ratio", justify="right")
    table.add_column("runs", justify="right")
    missing = f"{NOT_MEASURED}: {results.stopped}"
    for stretch in results.stretches():
        cells = []
        for way in results.runs:
            seconds = results.seconds(way, stretch)
            if seconds is None:
                cells += [missing, missing]
            else:
                cells += [f"{seconds:.2f}", f"{seconds * 1e3 / (stretch.end - stretch.start):.2f}"]
        ratio = results.ratio(stretch)
        runs = "/".join(str(len(results.whole_runs(way, stretch))) for way in results.runs)
        table.add_row(stretch.name, *cells, missing if ratio is None else f"{ratio:.1f}x", runs)
    return table


def in_words(results: Results) -> list[str]:
    """What the figures say."""
    difference = results.first_difference()
    texts = (
        "and the text is the same" if difference is None else f"but the texts differ from output token {difference} on"
    )
    lines = []
    for stretch in results.stretches():
        cached, ratio = results.seconds(Cached.name, stretch), results.ratio(stretch)
        if cached is None or ratio is None:
            continue
        each = cached * 1e3 / (stretch.end - stretch.start)
        if stretch == results.whole_context:
            lines.append(
                f"With the KV cache {stretch.end:,} tokens take {cached:.2f} s, {ratio:.1f} times as fast as without "
                f"it, {texts}; the target is at least {TARGET_RATIO:.0f} times."
            )
        elif stretch.start > 0:
            lines.append(
                f"Past the full context a token takes {each:.1f} ms with the cache, {ratio:.1f} times as fast as "
                "without it: the window moves by one, so every position in it changes, and nothing can be kept."
            )
    return lines


def draw_plot(results: Results, path: Path) -> None:
    """Milliseconds per token along the output."""
    figure, (axes,) = new_figure()
    bin_size = max(1, results.count // PLOTTED_POINTS)
    for index, (way, runs) in enumerate(results.runs.items()):
        reached = max((len(run.seconds) for run in runs), default=0)
        starts = range(0, reached - bin_size + 1, bin_size)
        middles = [start + (bin_size + 1) / 2 for start in starts]
        medians = [
            statistics.median(value for run in runs for value in run.seconds[start : start + bin_size]) * 1e3
            for start in starts
        ]
        draw_line(axes, index, way, middles, medians)
    if results.room < results.count:
        axes.axvline(results.room, color=INK, linewidth=1, linestyle=":")
        axes.annotate(
            "context full ", (results.room, 1), xycoords=("data", "axes fraction"), ha="right", va="top", color=INK
        )
    axes.set_xlabel("output token")
    axes.set_ylabel("ms per token")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left")
    save_figure(figure, path)
