"""Grids of sizes: as flags of a command, and as logarithmic axes of a plot."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
        ticks: of the x axis, then of the y axis; without them 1, 2, 5, 10, ….
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    axes.set(xscale="log", yscale="log")
    for index, axis in enumerate((axes.xaxis, axes.yaxis)):
        axis.set_major_locator(FixedLocator(ticks[index]) if index < len(ticks) else LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axis.set_minor_locator(NullLocator())


def legend_below(axes: Axes) -> None:
    """A legend under the axes, where it hides no data; none where nothing was measured."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)
