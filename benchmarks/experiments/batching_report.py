"""The four measurements of `pageframe bench batching` as tables and sentences."""

from __future__ import annotations

from rich.table import Table

from pageframe.benchmarks.experiments.batching_measures import AT_A_RATE, AT_ONCE, CACHE_OFF, CACHE_ON, level_ways
from pageframe.benchmarks.experiments.batching_parts import Part
from pageframe.benchmarks.experiments.batching_sizes import BATCHING, BLOCKS, CHUNKS, PREFIX
from pageframe.benchmarks.experiments.report import NOT_MEASURED

TITLES = {
    BATCHING: "batching by request and by iteration",
    CHUNKS: "gaps between tokens while long prompts arrive",
    PREFIX: "sessions that share prefixes",
    BLOCKS: "block size, on half of these sessions",
}
#: Why a way that has runs lacks a value: there were no gaps, say.
NO_SUCH_VALUE = "none in its runs"
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
        rows.append([way, *(_cell(part, way, metric, form) for metric, _, form in columns), str(len(runs))])
    if part.name != BLOCKS:  # few ways and many numbers
        rows = [list(column) for column in zip(*rows, strict=True)]
    table = Table(title=f"{TITLES[part.name]}; times in ms, medians over the runs")
    for index, heading in enumerate(rows[0]):
        table.add_column(heading, justify="right" if index else "left")
    for row in rows[1:]:
        table.add_row(*row)
    return table


def _cell(part: Part, way: str, metric: str, form: str) -> str:
    value = part.median(way, metric)
    if value is not None:
        return format(value, form)
    return f"{NOT_MEASURED}: {NO_SUCH_VALUE if part.ways[way] else part.reason(way)}"


def _columns(part: Part) -> list[tuple[str, str, str]]:
    """COLUMNS of the part, with the longest value where there are too few for a 99th percentile."""
    columns = []
    for metric, heading, form in COLUMNS[part.name]:
        if metric.endswith("_p99_ms"):
            tail, word = tail_of(part, metric.removesuffix("_p99_ms"))
            if tail != metric and any(other == tail for other, _, _ in COLUMNS[part.name]):
                continue
            columns.append((tail, heading.replace("p99", word), form))
        else:
            columns.append((metric, heading, form))
    return columns


def tail_of(part: Part, name: str) -> tuple[str, str]:
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


def value_of(part: Part, way: str, metric: str) -> float:
    value = part.median(way, metric)
    if value is None:
        raise _NotMeasuredError
    return value


def _batching_words(part: Part) -> list[str]:
    words = []
    tail, word = tail_of(part, "ttft")
    slowest = "the p99 of the time to first token" if word == "p99" else "the longest time to first token"
    for arrivals in (AT_ONCE, AT_A_RATE):
        old, new = level_ways(arrivals)
        try:
            speed = [value_of(part, way, "tokens_per_second") for way in (old, new)]
            mean = [value_of(part, way, "latency_mean_ms") / 1e3 for way in (old, new)]
            first = [value_of(part, way, tail) / 1e3 for way in (old, new)]
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
    tail, word = tail_of(part, "gap")
    gaps = [value_of(part, way, tail) for way in (whole, chunked)]
    longest = [value_of(part, way, "gap_max_ms") for way in (whole, chunked)]
    first = [value_of(part, way, "long_ttft_p50_ms") for way in (whole, chunked)]
    speed = [value_of(part, way, "tokens_per_second") for way in (whole, chunked)]
    also = f"; the longest gaps are {longest[1]:,.0f} and {longest[0]:,.0f} ms" if word == "p99" else ""
    return [
        f"While long prompts arrive, the {word} gap between tokens of running requests is {gaps[1]:,.0f} ms in chunks "
        f"and {gaps[0]:,.0f} ms with whole prompts ({gaps[0] / gaps[1]:.1f}x){also}.",
        f"The price: a long prompt's first token takes {first[1]:,.0f} ms in chunks and {first[0]:,.0f} ms whole "
        f"(medians), and all together make {speed[1]:.1f} and {speed[0]:.1f} tokens/s.",
    ]


def _prefix_words(part: Part) -> list[str]:
    hits = value_of(part, CACHE_ON, "hit_rate")
    first = [value_of(part, way, "ttft_p50_ms") for way in (CACHE_ON, CACHE_OFF)]
    speed = [value_of(part, way, "tokens_per_second") for way in (CACHE_ON, CACHE_OFF)]
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
    wasted = [value_of(part, way, "wasted") for way in (small, large)]
    hits = [value_of(part, way, "hit_rate") for way in (small, large)]
    speeds = {way: value_of(part, way, "tokens_per_second") for way in measured}
    fastest, slowest = max(speeds, key=speeds.__getitem__), min(speeds, key=speeds.__getitem__)
    return [
        f"From blocks of {small} to blocks of {large} the slots wasted go from {wasted[0]:.1%} to {wasted[1]:.1%}, and "
        f"the hit rate from {hits[0]:.1%} to {hits[1]:.1%}.",
        f"The fastest size is {fastest} with {speeds[fastest]:.1f} output tokens/s, the slowest {slowest} with "
        f"{speeds[slowest]:.1f} ({speeds[slowest] / speeds[fastest]:.2f}x).",
    ]
