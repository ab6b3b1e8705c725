"""How `pageframe bench kv-cache` shows what it measured: tables, words and the plot. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pageframe.benchmarks.experiments.cache_memory import Kind
from pageframe.benchmarks.experiments.cache_results import Lap, Race, Results
from pageframe.benchmarks.experiments.grids import legend_below, plain_log_axes
from pageframe.benchmarks.experiments.report import INK, NOT_MEASURED, draw_line, new_figure, save_figure
from pageframe.benchmarks.experiments.ties import Parting
from pageframe.runtime.memory_plan import format_bytes

#: What a token cell calls another token than expected.
PARTINGS = {Parting.TIE: "at ties", Parting.ONE_STEP: "a step below", Parting.DIFFERENT: "DIFFERENT"}
#: A speed-up that is larger by this factor has grown; less is noise.
GROWN = 1.05


def print_report(console: Console, results: Results, partial: bool) -> None:
    """Tables and sentences."""
    console.print(results.machine)
    for note in results.notes:
        console.print(note, style="dim")
    if partial:
        console.print("Interrupted: this is partial, only what was measured until then.", style="bold")
    console.print(_times(results))
    if any(not lap.is_whole(lap.last) for race in results.races for lap in race.laps.values()):
        console.print("~: some tokens' times are on the line between their neighbours'.", style="dim")
    if not partial and any(lap.last < results.new_tokens[-1] for race in results.races for lap in race.laps.values()):
        console.print(f"{NOT_MEASURED}: the way's time (--budget) was up.", style="dim")
    console.print(_growths(results))
    console.print(_memories(results))
    for sentence in sentences(results):
        console.print(sentence, soft_wrap=True)


def _times(results: Results) -> Table:
    table = Table(
        title="seconds for all new tokens (ms for each), how many times as fast as without a cache, and n, the runs of "
        "which each token's time is the median"
    )
    table.add_column("requests", justify="right")
    table.add_column("new tokens", justify="right")
    for kind in Kind:
        table.add_column(kind, justify="right")
    for race in results.races:
        for num_new in results.new_tokens:
            cells = [_time_cell(race, kind, num_new) for kind in Kind]
            table.add_row(f"{race.num_requests:,}", f"{num_new:,}", *cells)
        table.add_row("", "tokens", *(_token_cell(race.laps[kind], kind) for kind in Kind), end_section=True)
    return table


def _time_cell(race: Race, kind: Kind, num_new: int) -> str:
    lap = race.laps[kind]
    total = lap.total(num_new)
    if total is None:
        return NOT_MEASURED
    cell = f"{'' if lap.is_whole(num_new) else '~'}{total:.2f} s ({total / num_new * 1e3:.1f})"
    speed_up = race.speed_up(kind, num_new)
    if kind is not Kind.NOTHING and speed_up is not None:
        cell += f", {speed_up:.2f}x"
    return f"{cell}, n={lap.runs(num_new)}"


def _token_cell(lap: Lap, kind: Kind) -> str:
    """Are the tokens the others'?"""
    if not lap.compared:
        return "compared with" if kind is Kind.PAGED and lap.seconds else NOT_MEASURED
    same = lap.compared - lap.parted.total()
    parted = [f"{lap.parted[parting]:,} {name}" for parting, name in PARTINGS.items() if lap.parted[parting]]
    return ", ".join([f"{same:,} same", *parted])


def _growths(results: Results) -> Table:
    span = " to ".join(f"{num_new:,}" for num_new in results.new_tokens[-2:])
    table = Table(title="total time for n tokens behind the first one, fitted: a n + b n^2 + c n^3")
    for column in ("requests", "way", "a, ms", "b, us", "c, ns", "share of a n, b n^2, c n^3", f"slope, {span}"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for race in results.races:
        for kind in Kind:
            lap = race.laps[kind]
            growth, slope = results.growth(lap, kind), results.slope(lap)
            cells = [NOT_MEASURED] * 4
            if growth is not None:
                cells = [f"{growth.linear * 1e3:.2f}", f"{growth.quadratic * 1e6:.2f}"]
                cells.append(f"{growth.cubic * 1e9:.2f}" if kind is Kind.NOTHING else "-")
                shares = " ".join(f"{part / growth.seconds(lap.last):.0%}" for part in growth.parts(lap.last))
                cells.append(f"{shares} at {lap.last:,}")
            cells.append(NOT_MEASURED if slope is None else f"{slope:.2f}")
            table.add_row(f"{race.num_requests:,}", kind, *cells, end_section=kind is Kind.PAGED)
    return table


def _memories(results: Results) -> Table:
    table = Table(
        title=f"K/V memory at the last token, {results.shape.token_bytes:,} bytes a token, in all ways whole blocks of "
        f"{results.shape.block_size}: reserved (wasted)"
    )
    table.add_column("requests", justify="right")
    table.add_column("new tokens", justify="right")
    for kind in Kind:
        table.add_column(kind, justify="right")
    for race in results.races:
        for num_new in results.new_tokens:
            held = [results.held(kind, race, num_new) for kind in Kind]
            cells = [f"{format_bytes(each.reserved)} ({each.waste_share:.1%})" for each in held]
            table.add_row(f"{race.num_requests:,}", f"{num_new:,}", *cells)
        table.add_section()
    for num_new in results.new_tokens:
        fits = [results.fits(kind, num_new) for kind in Kind]
        cells = ["no limit" if number is None else f"{number:,}" for number in fits]
        table.add_row(f"in {format_bytes(results.memory)}", f"{num_new:,}", *cells)
    return table


def sentences(results: Results) -> Iterator[str]:
    """The answers in words."""
    yield from _partings(results)
    answers = [answer for race in results.races if (answer := _advantage(results, race))]
    yield "Does the advantage of a paged cache grow with length? " + (" ".join(answers) or f"It was {NOT_MEASURED}.")
    slopes = [
        f"{slope:.2f} {name}"
        for kind, name in ((Kind.NOTHING, "without a cache"), (Kind.PAGED, "with a paged one"))
        if (slope := results.slope(results.races[0].laps[kind])) is not None
    ]
    if slopes:
        few, many = results.new_tokens[-2:]
        yield (
            f"From {few:,} to {many:,} new tokens of {_requests(results.races[0])} the total time grows with the power "
            f"{' and '.join(slopes)}."
        )
    yield from _faster_than_the_square(results)
    yield _memory_in_words(results)


def _faster_than_the_square(results: Results) -> Iterator[str]:
    """Without a cache each token attends from every position before it to every other: a sum of squares."""
    lap = results.races[0].laps[Kind.NOTHING]
    growth = results.growth(lap, Kind.NOTHING)
    if growth is None or growth.square_passed_at is None:
        return
    passed, share = growth.square_passed_at, growth.parts(lap.last)[2] / growth.seconds(lap.last)
    beyond = f", beyond the {lap.last:,} measured" if passed > lap.last else ""
    yield (
        f"Without a cache the total of {_requests(results.races[0])} has a part that grows with the cube of the "
        f"tokens, {share:.0%} at {lap.last:,} as fitted: from {passed:,.0f} tokens on{beyond} it grows faster than "
        "their square."
    )


def _partings(results: Results) -> Iterator[str]:
    """What it means that all tokens are the other way's, bit for bit, or that some are not."""
    if results.same_bits and results.num_compared and not any(results.num_parted(parting) for parting in Parting):
        yield (
            f"All {results.num_compared:,} tokens compared are the same, as they must be: the compiled kernels give "
            "the same bits in all four ways."
        )
    if num_different := results.num_parted(Parting.DIFFERENT):
        kinds = [kind for kind in Kind if any(race.laps[kind].parted[Parting.DIFFERENT] for race in results.races)]
        yield (
            f"The ways do NOT make the same tokens: {num_different:,} differ where the logits are no tie "
            f"({', '.join(kinds)}), so one of the ways is wrong."
        )
    if num_ties := results.num_parted(Parting.TIE):
        yield (
            f"At ties: {num_ties:,} of {results.num_compared:,} tokens compared are another one whose logit is within "
            f"{results.tolerance:g} of the best."
        )
    if num_steps := results.num_parted(Parting.ONE_STEP):
        yield (
            f"A step below: {num_steps:,} of {results.num_compared:,} tokens compared are another one whose logit is "
            f"more than a tie's {results.tolerance:g} below the best, but the next lower number that the arithmetic "
            "has (with bf16 0.125 below at 16 to 32): rounding, and no tie by that tolerance."
        )


def _advantage(results: Results, race: Race) -> str:
    measured = [
        (num_new, speed_up)
        for num_new in results.new_tokens
        if (speed_up := race.speed_up(Kind.PAGED, num_new)) is not None
    ]
    if len(measured) < 2:
        return ""
    (few, before), (many, after) = measured[0], measured[-1]
    grows = after > before * GROWN
    rest = "" if many == results.new_tokens[-1] else f" ({results.new_tokens[-1]:,} was {NOT_MEASURED})"
    return (
        f"With {_requests(race)} {'yes' if grows else 'no'}: it is {before:.1f} times as fast as no cache at {few:,} "
        f"new tokens and {after:.1f} times at {many:,}{rest}."
    )


def _memory_in_words(results: Results) -> str:
    few, race = results.new_tokens[0], results.races[-1]

    def of(kind: Kind) -> str:
        share = results.held(kind, race, few).waste_share
        return f"wastes {share:.1%} of what it reserves, and {results.fits(kind, few):,} requests fit"

    return (
        f"At {few:,} new tokens a cache reserved for {results.shape.max_len:,} tokens {of(Kind.RESERVED)} in "
        f"{format_bytes(results.memory)}; a paged one {of(Kind.PAGED)}."
    )


def _requests(race: Race) -> str:
    return f"{race.num_requests:,} request{'' if race.num_requests == 1 else 's'}"


# ---- the plot -------------------------------------------------------------------------------------------------------


def plot(results: Results, path: Path) -> None:
    """Seconds per new token against new tokens, and memory reserved against used."""
    figure, (times, memory) = new_figure(1, 2)
    race = results.races[0]
    for index, kind in enumerate(Kind):
        totals = race.laps[kind].totals()
        if totals:
            marks = _spread(len(totals))
            draw_line(times, index, kind, marks, [totals[mark - 1] / mark for mark in marks])
    plain_log_axes(times, sorted({1, 4, *results.new_tokens}))
    times.set(
        xlabel="new tokens",
        ylabel="seconds per new token, prompt included",
        title=_requests(race),
    )
    legend_below(times)

    race = results.races[-1]
    for index, kind in enumerate(Kind):
        held = [results.held(kind, race, num_new) for num_new in results.new_tokens]
        if kind is not Kind.NOTHING:
            used = [each.used / 2**20 for each in held]
            reserved = [each.reserved / 2**20 for each in held]
            draw_line(memory, index, kind, used, reserved)
    ends = [held.used / 2**20 for held in (results.held(Kind.PAGED, race, n) for n in results.new_tokens)]
    memory.plot(ends, ends, color=INK, linewidth=1, label="nothing wasted")
    plain_log_axes(memory)
    memory.set(xlabel="K/V used, MiB", ylabel="K/V reserved, MiB", title=_requests(race))
    legend_below(memory)
    save_figure(figure, path)


def _spread(last: int) -> list[int]:
    """Whole numbers from 1 to `last`, two to a doubling."""
    return sorted({round(2 ** (step / 2)) for step in range(2 * last.bit_length()) if 2 ** (step / 2) <= last} | {last})
