"""Grids of sizes: as flags of a command, checked, and as logarithmic axes of a plot."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pageframe.benchmarks.experiments.report import InputError
from pageframe.runtime.config import DEFAULT_MODEL, DTYPES, EngineConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Far beyond what can be measured in a day; they keep arrays and loops sound.
MAX_REQUESTS, MAX_REPEATS, MAX_BUDGET_SECONDS = 1024, 1000, 86_400


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """--model and --dtype, as `pageframe serve` has them."""
    parser.add_argument("--model", default=DEFAULT_MODEL, help="as for `pageframe serve` (%(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default=EngineConfig().dtype, help="as for serve (%(default)s)")


def add_grid_flag(
    parser: argparse.ArgumentParser, flag: str, what: str, usual: Sequence[int], quick: Sequence[int]
) -> None:
    """A flag with one or more whole numbers; None where it is not given."""
    help_text = f"{what} ({shown(usual)}; quick: {shown(quick)})"
    parser.add_argument(flag, type=count, nargs="+", metavar="N", help=help_text)


def add_budget_flag(parser: argparse.ArgumentParser, what: str, usual: float, quick: float) -> None:
    """--budget; None where it is not given."""
    parser.add_argument(
        "--budget", type=seconds, metavar="SECONDS", help=f"time for {what} ({usual:g}; quick: {quick:g})"
    )


def check_range(name: str, value: float, low: float, high: float) -> None:
    """See that a flag's value is in its range.

    Raises:
        InputError: it is not.
    """
    if not low <= value <= high:
        raise InputError(f"{name} is {value}; it must be from {low} to {high}")


def lengths_that_fit(
    name: str, asked: Sequence[int] | None, usual: Sequence[int], room: int, where: str
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Lengths, ascending, and a sentence on those left out, if any. Of the usual ones only those are taken that the
    model has room for, and where that is none, the longest that it has room for.

    Args:
        room: the longest that fits. where: beside what, for people.

    Raises:
        InputError: one that was asked for does not fit, or nothing does.
    """
    if asked is not None:
        if max(asked) > room:
            raise InputError(f"{name} is {max(asked)}; this model has room for {max(0, room)} {where}")
        return tuple(sorted(set(asked))), ()
    if room < 1:
        raise InputError(f"{name}: this model has room for none {where}")
    lengths = tuple(length for length in usual if length <= room)
    left_out = ", ".join(f"{length:,}" for length in usual if length > room)
    notes = (f"{name}: {left_out} left out; this model has room for {room:,} {where}.",) if left_out else ()
    return lengths or (room,), notes


def count(text: str) -> int:
    """A flag's whole number of at least 1.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def seconds(text: str) -> float:
    """A flag's number of seconds above 0.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def shown(numbers: Sequence[int]) -> str:
    """As they are typed behind a flag."""
    return " ".join(str(number) for number in numbers)


def plain_log_axes(axes: Axes, *ticks: Sequence[float]) -> None:
    """Logarithmic axes whose numbers are written out.

    Args:
        ticks: of the x axis, then of the y axis; without them 1, 2, 5, 10, …, and more where the data span little.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    axes.set(xscale="log", yscale="log")
    for index, axis in enumerate((axes.xaxis, axes.yaxis)):
        low, high = axis.get_data_interval()
        places = (1, 2, 5) if high > 5 * low else (1, 1.5, 2, 3, 4, 5, 6, 8)
        axis.set_major_locator(FixedLocator(ticks[index]) if index < len(ticks) else LogLocator(subs=places))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axis.set_minor_locator(NullLocator())


def legend_below(axes: Axes) -> None:
    """A legend under the axes, where it hides no data; none where nothing was measured."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)
