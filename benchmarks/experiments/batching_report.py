"""The four measurements of `pageframe bench batching` as tables, sentences and one plot of four panels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from pageframe.benchmarks.experiments.batching_parts import (
    CACHE_OFF,
    CACHE_ON,
    ITERATION_LEVEL,
    REQUEST_LEVEL,
    Part,
)
from pageframe.benchmarks.experiments.report import COLORS, INK, NOT_MEASURED, draw_line, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BATCHING, CHUNKS, PREFIX, BLOCKS = PARTS = ("batching", "chunks", "prefix", "blocks")
TITLES = {
    BATCHING: "batching by request and by iteration",
    CHUNKS: "gaps between tokens while long prompts arrive",
    PREFIX: "sessions that share prefixes",
    BLOCKS: "block size, on half of these sessions",
}
#: Per part: (metric, heading, format) of each column.
COLUMNS = {
    BATCHING: (
        ("tokens_per_second", "tokens/s", ",.1f"),
        ("latency_mean_ms", "latency mean", ",.0f"),
        ("latency_p50_ms", "latency p50", ",.0f"),
        ("latency_p99_ms", "latency p99", ",.0f"),
        ("ttft_mean_ms", "TTFT mean", ",.0f"),
        ("ttft_p50_ms", "TTFT p50", ",.0f"),
        ("ttft_p99_ms", "TTFT p99", ",.0f"),
    ),
    CHUNKS: (
        ("gap_p50_ms", "gap p50", ",.0f"),
        ("gap_p99_ms", "gap p99", ",.0f"),
        ("gap_max_ms", "longest gap", ",.0f"),
        ("num_gaps", "gaps", ",.0f"),
        ("long_ttft_p50_ms", "TTFT of long prompts, p50", ",.0f"),
        ("tokens_per_second", "tokens/s", ",.1f"),
    ),
    PREFIX: (
        ("hit_rate", "hit rate", ".1%"),
        ("ttft_mean_ms", "TTFT mean", ",.0f"),
        ("ttft_p50_ms", "TTFT p50", ",.0f"),
        ("ttft_p99_ms", "TTFT p99", ",.0f"),
        ("tokens_per_second", "tokens/s", ",.1f"),
    ),
    BLOCKS: (
        ("wasted", "slots wasted", ".2%"),
        ("hit_rate", "hit rate", ".1%"),
        ("ttft_p50_ms", "TTFT p50", ",.0f"),
        ("tokens_per_second", "tokens/s", ",.1f"),
    ),
}


def draw_table(part: Part) -> Table:
    """Medians over each way's runs; times are in milliseconds."""
    columns = _columns(part)
    rows = [["block size" if part.name == BLOCKS else "way", *(heading for _, heading, _ in columns), "runs"]]
    for way, runs in part.ways.items():
        values = [(part.median(way, metric), form) for metric, _, form in columns]
        cells = [NOT_MEASURED if value is None else format(value, form) for value, form in values]
        rows.append([way, *cells, str(len(runs))])
    if part.name != BLOCKS:  # few ways and many numbers
        rows = [list(column) for column in zip(*rows, strict=True)]
    table = Table(title=f"{TITLES[part.name]}; times in ms")
    for index, heading in enumerate(rows[0]):
        table.add_column(heading, justify="right" if index else "left")
    for row in rows[1:]:
        table.add_row(*row)
    return table


def _columns(part: Part) -> list[tuple[str, str, str]]:
    """COLUMNS of the part, with the longest value where there are too few for a 99th percentile."""
    columns = []
    for metric, heading, form in COLUMNS[part.name]:
        if metric.endswith("_p99_ms"):
            tail, word = _tail(part, metric.removesuffix("_p99_ms"))
            if tail != metric and any(other == tail for other, _, _ in COLUMNS[part.name]):
                continue
            columns.append((tail, heading.replace("p99", word), form))
        else:
            columns.append((metric, heading, form))
    return columns


def _tail(part: Part, name: str) -> tuple[str, str]:
    """The metric of the slowest values, and its name: p99 where every run has enough values for it, else longest."""
    runs = [run for runs in part.ways.values() for run in runs]
    metric = f"{name}_p99_ms"
    return (metric, "p99") if runs and all(metric in run for run in runs) else (f"{name}_max_ms", "longest")


def describe_agreement(part: Part) -> str:
    """Whether the ways gave the same tokens."""
    found = part.agreement
    total = found.equal + found.ties + found.one_step + found.different
    if not total and not found.skipped:
        return "Fewer than two ways were measured: no answers to compare."
    text = f"Same tokens in {found.equal} of {total} answers compared between the ways"
    if found.ties:
        text += f", {found.ties} part at a tie of the two best logits"
    if found.one_step:
        text += (
            f", {found.one_step} where the two best logits are neighbours in this arithmetic, which is more than a "
            "tie's tolerance but no more than rounding"
        )
    if found.skipped:
        text += f", {found.skipped} follow such an answer and are not compared"
    return text + (f"; {found.different} DIFFER." if found.different else ".")


# ---- sentences ------------------------------------------------------------------------------------------------------


def sentences(part: Part) -> list[str]:
    """Two, whose numbers are the medians measured; none where what they need was not."""
    write = {BATCHING: _batching_words, CHUNKS: _chunks_words, PREFIX: _prefix_words, BLOCKS: _blocks_words}
    try:
        return write[part.name](part)
    except _NotMeasuredError:
        return []


class _NotMeasuredError(Exception):
    """A sentence lacks a number."""


def _value(part: Part, way: str, metric: str) -> float:
    value = part.median(way, metric)
    if value is None:
        raise _NotMeasuredError
    return value


def _batching_words(part: Part) -> list[str]:
    words = []
    tail, word = _tail(part, "ttft")
    slowest = "the p99 of the time to first token" if word == "p99" else "the longest time to first token"
    for arrivals in ("all at once", "at a rate"):
        old, new = f"{REQUEST_LEVEL}, {arrivals}", f"{ITERATION_LEVEL}, {arrivals}"
        try:
            speed = [_value(part, way, "tokens_per_second") for way in (old, new)]
            mean = [_value(part, way, "latency_mean_ms") / 1e3 for way in (old, new)]
            first = [_value(part, way, tail) / 1e3 for way in (old, new)]
        except _NotMeasuredError:
            continue
        words.append(
            f"With requests {arrivals}, batching by iteration makes {speed[1]:.1f} output tokens/s against "
            f"{speed[0]:.1f} by request ({speed[1] / speed[0]:.2f}x); mean latency is {mean[1]:.2f} s against "
            f"{mean[0]:.2f} s, {slowest} {first[1]:.2f} s against {first[0]:.2f} s."
        )
    return words


def _chunks_words(part: Part) -> list[str]:
    chunked, whole = part.ways
    tail, word = _tail(part, "gap")
    gaps = [_value(part, way, tail) for way in (whole, chunked)]
    longest = [_value(part, way, "gap_max_ms") for way in (whole, chunked)]
    first = [_value(part, way, "long_ttft_p50_ms") for way in (whole, chunked)]
    speed = [_value(part, way, "tokens_per_second") for way in (whole, chunked)]
    also = f"; the longest gaps are {longest[1]:,.0f} and {longest[0]:,.0f} ms" if word == "p99" else ""
    return [
        f"While long prompts arrive, the {word} gap between tokens of running requests is {gaps[1]:,.0f} ms in chunks "
        f"and {gaps[0]:,.0f} ms with whole prompts ({gaps[0] / gaps[1]:.1f}x){also}.",
        f"The price: a long prompt's first token takes {first[1]:,.0f} ms in chunks and {first[0]:,.0f} ms whole "
        f"(medians), and all together make {speed[1]:.1f} and {speed[0]:.1f} tokens/s.",
    ]


def _prefix_words(part: Part) -> list[str]:
    hits = _value(part, CACHE_ON, "hit_rate")
    first = [_value(part, way, "ttft_p50_ms") for way in (CACHE_ON, CACHE_OFF)]
    speed = [_value(part, way, "tokens_per_second") for way in (CACHE_ON, CACHE_OFF)]
    return [
        f"With the prefix cache {hits:.1%} of prompt tokens were found computed, and the median time to first token is "
        f"{first[0]:,.0f} ms against {first[1]:,.0f} ms without ({first[0] / first[1]:.2f}x).",
        f"Throughput is {speed[0]:.1f} output tokens/s with it and {speed[1]:.1f} without "
        f"({speed[0] / speed[1]:.2f}x).",
    ]


def _blocks_words(part: Part) -> list[str]:
    measured = [way for way, runs in part.ways.items() if runs]
    if len(measured) < 2:
        raise _NotMeasuredError
    small, large = measured[0], measured[-1]
    wasted = [_value(part, way, "wasted") for way in (small, large)]
    hits = [_value(part, way, "hit_rate") for way in (small, large)]
    speeds = {way: _value(part, way, "tokens_per_second") for way in measured}
    fastest, slowest = max(speeds, key=speeds.__getitem__), min(speeds, key=speeds.__getitem__)
    return [
        f"From blocks of {small} to blocks of {large} the slots wasted go from {wasted[0]:.1%} to {wasted[1]:.1%}, and "
        f"the hit rate from {hits[0]:.1%} to {hits[1]:.1%}.",
        f"The fastest size is {fastest} with {speeds[fastest]:.1f} output tokens/s, the slowest {slowest} with "
        f"{speeds[slowest]:.1f} ({speeds[slowest] / speeds[fastest]:.2f}x).",
    ]


# ---- the plot -------------------------------------------------------------------------------------------------------


def save_plot(parts: Sequence[Part], title: str, path: Path) -> None:
    """Four panels, one for each part; one that was not measured says so."""
    figure, panels = new_figure(2, 2, height=8.0)
    draw = {BATCHING: _plot_batching, CHUNKS: _plot_chunks, PREFIX: _plot_prefix, BLOCKS: _plot_blocks}
    by_name = {part.name: part for part in parts}
    for axes, name in zip(panels, PARTS, strict=True):
        axes.set_title(TITLES[name], fontsize=11)
        part = by_name.get(name)
        if part is None or not any(part.ways.values()):
            axes.text(0.5, 0.5, NOT_MEASURED, ha="center", va="center", transform=axes.transAxes)
            axes.set_xticks([])
            axes.set_yticks([])
        else:
            draw[name](axes, part)
    figure.suptitle(title, fontsize=11)
    save_figure(figure, path)


def _plot_batching(axes: Axes, part: Part) -> None:
    """Latency, mean and slowest, of each way; throughput in its name."""
    tail, word = _tail(part, "latency")
    ways = [way for way, runs in part.ways.items() if runs]
    names = []
    for way in ways:
        level, arrivals = way.split(", ")
        names.append(f"{level},\n{arrivals}\n{_value(part, way, 'tokens_per_second'):,.0f} tok/s")
    _grouped_bars(axes, part, ways, names, (("mean", "latency_mean_ms"), (word, tail)), 1e-3, "{:.1f}")
    axes.set_ylabel("request latency (s)")


def _plot_chunks(axes: Axes, part: Part) -> None:
    ways = [way for way in part.ways if part.median(way, "gap_max_ms") is not None]
    tail, word = _tail(part, "gap")
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
        heights = [_value(part, way, metric) * factor for way in ways]
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
            label = f"{way} (hit rate {_value(part, way, 'hit_rate'):.0%})" if way == CACHE_ON else way
            times = [_value(part, way, f"ttft_turn_{turn}_ms") for turn in turns]
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
    speeds = [_value(part, way, "tokens_per_second") for way in sizes]
    lines = (
        ("slots wasted", [_value(part, way, "wasted") * 100 for way in sizes]),
        ("prompt tokens found computed", [_value(part, way, "hit_rate") * 100 for way in sizes]),
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
