"""What the experiments share: time budgets, the line about the machine, plots that read well, results as JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from pageframe.runtime.config import ResolvedConfig
from pageframe.runtime.errors import EngineError, InvalidRequestError, StartupError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
NOT_MEASURED = "not measured"
#: Okabe and Ito's colours, told apart also by people who see red and green alike; black and yellow left out.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
MARKERS = ("o", "s", "^", "D", "v", "P")
LINES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)))
INK = "#333333"
PLOT_WIDTH_INCHES = 9.0
PLOT_DPI = 150
PLOT_SUFFIXES = (".png", ".svg", ".pdf")


class InputError(Exception):
    """What was asked for can't be measured: one line that names the field, the value and the limit."""


class TimeBudget:
    """Seconds that a way may take in all; what does not fit is not measured."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._ends = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return max(0.0, self._ends - time.monotonic())

    def allows(self, expected_seconds: float = 0.0) -> bool:
        """Whether something that takes about so long can still be measured."""
        return expected_seconds < self.left


def run_experiment(measure: Callable[[], int]) -> int:
    """What `measure` returns; where it can't be done as asked for, fails or is interrupted, one line on standard error
    and the exit status of that."""
    try:
        return measure()
    except (InputError, StartupError, InvalidRequestError) as error:
        status, complaint = EXIT_BAD_INPUT, str(error)
    except (EngineError, MemoryError) as error:
        status, complaint = EXIT_FAILED, str(error) or "out of memory"  # only MemoryError comes without a word
    except KeyboardInterrupt:
        status, complaint = EXIT_INTERRUPTED, "interrupted"
    console = Console(stderr=True)
    console.print(f"pageframe: {complaint}", style="red", markup=False, highlight=False, soft_wrap=True)
    return status


def add_output_flags(parser: argparse.ArgumentParser, plot_name: str) -> None:
    """--quick, --plot, --no-plot and --json, the same in every experiment."""
    parser.add_argument("--quick", action="store_true", help="smaller sizes, done within a minute")
    plot = parser.add_mutually_exclusive_group()
    plot.add_argument(
        "--plot", type=Path, metavar="FILE", default=Path(plot_name), help="where the plot goes (%(default)s)"
    )
    plot.add_argument("--no-plot", dest="plot", action="store_const", const=None, help="draw no plot")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured to FILE")


def check_outputs(plot: Path | None, json_file: Path | None) -> None:
    """Find out before anything is measured whether its results can be written.

    Raises:
        InputError: a path has no folder, is a folder or may not be written, or the plot is of no known kind.
    """
    for name, path in (("plot", plot), ("json", json_file)):
        if path is None:
            continue
        if not path.parent.is_dir():
            raise InputError(f"{name} is {path}; there is no folder {path.parent}")
        if path.is_dir():
            raise InputError(f"{name} is {path}; that is a folder, not a file")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise InputError(f"{name} is {path}; it may not be written")
    if plot is not None and plot.suffix.lower() not in PLOT_SUFFIXES:
        raise InputError(f"plot is {plot}; its name must end in one of {', '.join(PLOT_SUFFIXES)}")


def hardware_line(threads: int, dtype: str) -> str:
    """Processor, cores, threads, arithmetic: what a figure means nothing without."""
    return f"{processor_name()}, {len(os.sched_getaffinity(0))} cores, {threads} threads, {dtype}"


def engine_line(resolved: ResolvedConfig) -> str:
    """`hardware_line` of an engine."""
    computed = f"{resolved.dtype} computed in {resolved.compute_dtype}"
    if resolved.instruction_set:
        weights = "as in the file" if resolved.weights == "file" else f"in {resolved.weights}"
        computed = f"{resolved.dtype} in compiled kernels ({resolved.instruction_set}), weights {weights}"
    return hardware_line(resolved.threads, f"{computed}, backend {resolved.backend}")


def processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def write_json(path: Path, results: Mapping[str, Any]) -> None:
    """Raw results, with the machine beside them.

    Raises:
        InputError: the file can't be written.
    """
    content = {"machine": processor_name(), "cores": len(os.sched_getaffinity(0)), **results}
    try:
        path.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise InputError(f"json is {path}; it can't be written: {error.strerror}") from error


def new_figure(rows: int = 1, columns: int = 1, *, height: float = 5.0) -> tuple[Figure, list[Axes]]:
    """A white figure for print and dark pages, and its axes row by row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style: Any = {
        "figure.facecolor": "white",
        "axes.facecolor": "white",
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.grid": True,
        "grid.color": "#DDDDDD",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "font.size": 11,
        "legend.frameon": False,
        "svg.hashsalt": "pageframe",
    }
    pyplot.rcParams.update(style)
    figure, axes = pyplot.subplots(rows, columns, figsize=(PLOT_WIDTH_INCHES, height), squeeze=False)
    return figure, list(axes.flat)


def draw_line(axes: Axes, index: int, label: str, x: Sequence[float], y: Sequence[float]) -> None:
    """The `index`-th line of a plot: its own colour, marker and dashes."""
    axes.plot(
        x,
        y,
        color=COLORS[index % len(COLORS)],
        marker=MARKERS[index % len(MARKERS)],
        linestyle=LINES[index % len(LINES)],
        linewidth=2,
        markersize=6,
        label=label,
    )


def save_figure(figure: Figure, path: Path) -> None:
    """Write a PNG, SVG or PDF, as the name says.

    Raises:
        InputError: the file can't be written, or its kind is unknown.
    """
    from matplotlib import pyplot

    figure.tight_layout()
    try:
        figure.savefig(path, dpi=PLOT_DPI)
    except (OSError, ValueError) as error:
        raise InputError(f"plot is {path}; it can't be written: {error}") from error
    finally:
        pyplot.close(figure)
