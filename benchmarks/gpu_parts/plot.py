"""The GPU script's figures as one plot: attention's share of the machine's limits, and the engine's tokens/s."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pageframe.benchmarks.gpu_parts.results import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Okabe and Ito's blue and vermilion, told apart also by people who see red and green alike.
COLORS = ("#0072B2", "#D55E00")
INK = "#333333"


def save_plot(rows: Sequence[Row], path: Path, *, rehearsal: bool) -> None:
    """Write a PNG, SVG or PDF, as the name says.

    Raises:
        ImportError: there is no matplotlib.
        OSError, ValueError: the file can't be written, or its kind is unknown.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5.5))
    _draw_bars(left, [row for row in rows if row.part == "attention"], "share", 100.0, "{:.0f}%")
    left.set_xlabel("share of the measured copy or matrix rate (%)")
    left.set_title("attention of one layer")
    _draw_bars(right, [row for row in rows if row.part == "engine"], "tokens_per_second", 1.0, "{:,.0f}")
    right.set_xlabel("tokens/s")
    right.set_title("engine, random weights")
    device = next((row.note for row in rows if row.case == "device"), "device unknown")
    title = f"REHEARSAL, the figures mean nothing: {device}" if rehearsal else device
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=130)
    finally:
        pyplot.close(figure)


def _draw_bars(axes: Axes, rows: Sequence[Row], number: str, factor: float, form: str) -> None:
    """A bar for each row that has this number, the first at the top."""
    drawn = [row for row in rows if number in row.numbers]
    values = [row.numbers[number] * factor for row in drawn]
    colors = [COLORS["prefill" in row.case or "no graphs" in row.case] for row in drawn]
    bars = axes.barh(range(len(drawn)), values, color=colors, edgecolor=INK)
    axes.bar_label(bars, [form.format(value) for value in values], padding=3, fontsize=9)
    axes.set_yticks(range(len(drawn)), [row.case for row in drawn], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, max(values, default=1.0) * 1.2)
    axes.spines[["top", "right"]].set_visible(False)
