"""The four measurements of `pageframe bench batching` as one plot of four panels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pageframe.benchmarks.experiments.batching_measures import CACHE_ON
from pageframe.benchmarks.experiments.batching_parts import Part
from pageframe.benchmarks.experiments.batching_report import TITLES, tail_of, value_of
from pageframe.benchmarks.experiments.batching_sizes import BATCHING, BLOCKS, CHUNKS, PARTS, PREFIX
from pageframe.benchmarks.experiments.report import COLORS, INK, NOT_MEASURED, draw_line, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def save_plot(parts: Sequence[Part], title: str, path: Path) -> None:
    """Four panels, one for each part; one that was not measured says so."""
    figure, panels = new_figure(2, 2, height=8.0)
    draw = {BATCHING: _plot_batching, CHUNKS: _plot_chunks, PREFIX: _plot_prefix, BLOCKS: _plot_blocks}
    by_name = {part.name: part for part in parts}
    for axes, name in zip(panels, PARTS, strict=True):
        axes.set_title(TITLES[name], fontsize=11)
        part = by_name.get(name)
        if part is None or not part.is_measured:
            _say_missing(axes, part)
        else:
            draw[name](axes, part)
    figure.suptitle(title, fontsize=10)
    save_figure(figure, path)


def _say_missing(axes: Axes, part: Part | None) -> None:
    reasons = ["not asked for"] if part is None else part.reasons()
    text = f"{NOT_MEASURED}: {', '.join(reasons)}"
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes)
    axes.set_xticks([])
    axes.set_yticks([])


def _plot_batching(axes: Axes, part: Part) -> None:
    """Latency, mean and slowest, of each way; throughput in its name."""
    tail, word = tail_of(part, "latency")
    ways = [way for way, runs in part.ways.items() if runs]
    names = []
    for way in ways:
        level, arrivals = way.split(", ")
        names.append(f"{level},\n{arrivals}\n{value_of(part, way, 'tokens_per_second'):,.0f} tok/s")
    _grouped_bars(axes, part, ways, names, (("mean", "latency_mean_ms"), (word, tail)), 1e-3, "{:.2f}")
    axes.set_ylabel("request latency (s)")


def _plot_chunks(axes: Axes, part: Part) -> None:
    ways = [way for way in part.ways if part.median(way, "gap_max_ms") is not None]
    tail, word = tail_of(part, "gap")
    bars = [("median", "gap_p50_ms"), ("longest", "gap_max_ms")]
    if word == "p99":
        bars.insert(1, (word, tail))
    _grouped_bars(axes, part, ways, ways, bars, 1, "{:,.0f}")
    axes.set_ylabel("gap between tokens (ms)")


def _grouped_bars(
    axes: Axes,
    part: Part,
    ways: Sequence[str],
    names: Sequence[str],
    bars: Sequence[tuple[str, str]],
    factor: float,
    form: str,
) -> None:
    """One group for each way, one bar for each (label, metric)."""
    width = 0.8 / len(bars)
    highest = 0.0
    for index, (label, metric) in enumerate(bars):
        positions = [group + (index - (len(bars) - 1) / 2) * width for group in range(len(ways))]
        heights = [value_of(part, way, metric) * factor for way in ways]
        highest = max([highest, *heights])
        drawn = axes.bar(
            positions, heights, width, label=label, color=COLORS[index], hatch=("", "//", "..")[index], edgecolor=INK
        )
        axes.bar_label(drawn, [form.format(height) for height in heights], fontsize=10, padding=2)
    axes.set_xticks(range(len(ways)), names, fontsize=10)
    axes.set_ylim(0, highest * 1.35 or 1)
    axes.legend(loc="upper center", ncols=len(bars), fontsize=10)
    axes.grid(axis="x", visible=False)
    axes.set_axisbelow(True)


def _plot_prefix(axes: Axes, part: Part) -> None:
    for index, (way, runs) in enumerate(part.ways.items()):
        turns = sorted({_turn(metric) for run in runs for metric in run if metric.startswith("ttft_turn_")})
        if turns:
            label = f"{way} (hit rate {value_of(part, way, 'hit_rate'):.0%})" if way == CACHE_ON else way
            times = [value_of(part, way, f"ttft_turn_{turn}_ms") for turn in turns]
            draw_line(axes, index, label, turns, times)
            axes.set_xticks(turns)
    axes.set_xlabel("turn of the session")
    axes.set_ylabel("time to first token, median (ms)")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.25)
    axes.legend(loc="upper left", fontsize=10)


def _turn(metric: str) -> int:
    return int(metric.removeprefix("ttft_turn_").removesuffix("_ms"))


def _plot_blocks(axes: Axes, part: Part) -> None:
    sizes = [way for way, runs in part.ways.items() if runs]
    speeds = [value_of(part, way, "tokens_per_second") for way in sizes]
    lines = (
        ("slots wasted", [value_of(part, way, "wasted") * 100 for way in sizes]),
        ("prompt tokens found computed", [value_of(part, way, "hit_rate") * 100 for way in sizes]),
        (f"speed, of {max(speeds):,.0f} tok/s", [speed / max(speeds) * 100 for speed in speeds]),
    )
    for index, (label, values) in enumerate(lines):
        draw_line(axes, index, label, [int(way) for way in sizes], values)
    axes.set_xscale("log", base=2)
    axes.set_xticks([int(way) for way in sizes], sizes)
    axes.minorticks_off()
    axes.set_xlabel("block size (tokens)")
    axes.set_ylabel("share (%)")
    axes.set_ylim(-3, 150)
    axes.set_yticks(range(0, 101, 20))
    axes.legend(loc="upper left", fontsize=10)
