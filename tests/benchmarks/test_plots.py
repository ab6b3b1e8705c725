"""Every plot of the experiments and of the plan reads well: labelled axes with units, dark ink on an opaque white box,
so that it stands on a dark page and in print too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib import image
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

from pageframe.api.plan_command import make_plan
from pageframe.api.plan_drawing import save_plot
from pageframe.benchmarks.experiments import cache_report, fit, phases_report
from pageframe.benchmarks.experiments.cache_memory import Kind, KvShape
from pageframe.benchmarks.experiments.cache_results import Race
from pageframe.benchmarks.experiments.cache_results import Results as CacheResults
from pageframe.benchmarks.experiments.phases_report import Cell
from pageframe.benchmarks.experiments.phases_report import Results as PhasesResults
from pageframe.runtime.config import EngineConfig, ModelConfig

SHAPE = ModelConfig("shape", 0, 64, 0, 2, 4, 4, 16, 4096, 1e-5)


def plot_kv_cache(path: Path) -> None:
    results = CacheResults(32, (16, 64), 2**30, KvShape(23_040, 30, 16, 96), [Race(1), Race(8)])
    for kind in Kind:
        results.races[0].laps[kind].seconds = {token: [0.1] for token in range(1, 65)}
    cache_report.plot(results, path)


def plot_phases(path: Path) -> None:
    results = PhasesResults((64, 256), (64, 256), (1, 8), ())
    results.first_tokens = {64: Cell(0.5, 0.1, "arithmetic"), 256: Cell(0.8, 0.2, "arithmetic")}
    results.decode = {(context, n): Cell(0.02, 0.01, "reading") for context in (64, 256) for n in (1, 8)}
    phases_report.plot(results, path)


def plot_fit(path: Path) -> None:
    pool = fit.Pool(num_blocks=10, block_size=10, max_len=50, max_tokens=5)
    fit.draw_plot(pool, {way: [fit.Filled(3, 70, 20, 10, False)] for way in fit.WAYS}, "a pool", path)


def plot_plan(path: Path) -> None:
    save_plot(make_plan(EngineConfig(), model=SHAPE, free_bytes=2**34), path)


@pytest.mark.parametrize(
    ("draw", "labels"),
    [
        (
            plot_kv_cache,
            [("new tokens", "seconds per new token, prompt included"), ("K/V used, MiB", "K/V reserved, MiB")],
        ),
        (
            plot_phases,
            [("prompt tokens", "seconds to the first token"), ("context, tokens", "decoded tokens per second")],
        ),
        (
            plot_fit,
            [
                ("how memory is set aside", "requests at once"),
                ("how memory is set aside", "share of the pool's slots (%)"),
            ],
        ),
        (plot_plan, [("context of each request (tokens)", "requests that fit at once")]),
    ],
)
def test_a_plot_has_units_and_dark_ink_on_an_opaque_white_box(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    draw: Callable[[Path], None],
    labels: list[tuple[str, str]],
) -> None:
    figures: list[Figure] = []
    save = Figure.savefig

    def keep_and_save(self: Figure, path: Path, **settings: float) -> None:
        figures.append(self)
        save(self, path, **settings)

    monkeypatch.setattr(Figure, "savefig", keep_and_save)
    draw(tmp_path / "plot.png")
    (figure,) = figures
    assert [(axes.get_xlabel(), axes.get_ylabel()) for axes in figure.axes] == labels
    for text in figure.findobj(Text):
        if text.get_text():
            assert max(to_rgb(text.get_color())) <= 0.35, f"{text.get_text()!r} is too light for white"
    pixels = image.imread(tmp_path / "plot.png")
    assert pixels.shape[1] >= 1200, "wide enough for print"
    for row in (0, -1):
        for column in (0, -1):
            assert pixels[row, column].tolist() == [1, 1, 1, 1], "a white, opaque box"
