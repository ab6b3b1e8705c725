"""The commands that say what looking inside costs: they run, and a missed target shows."""

from __future__ import annotations

import pytest

from pageframe.benchmarks.experiments import cpu_attention, glass_box_cost, watching
from pageframe.benchmarks.experiments.peers_http import Load
from pageframe.benchmarks.experiments.watching import Run
from pageframe.runtime.journal import FinishEvent, Journal, StepEvent


def test_the_engines_compared_do_the_same_and_one_of_them_tells_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    silent, told = glass_box_cost.SilentJournal(), Journal()
    served = [glass_box_cost.make_traffic(journal, 4, 400) for journal in (silent, told)]
    for _ in range(200):
        for traffic in served:
            assert glass_box_cost.step_microseconds(traffic) > 0
            assert traffic.engine.scheduler.num_running >= 3
    assert silent.written == 0
    assert sum(isinstance(event, StepEvent) for event in told) == 1 + 200
    rows = [traffic.engine.scheduler.rows.num_tokens[:4].tolist() for traffic in served]
    assert rows[0] == rows[1]
    assert served[0].num_arrived == served[1].num_arrived > 4, "they come and go"
    assert any(isinstance(event, FinishEvent) for event in told)
    assert glass_box_cost.main(["--quick"]) == 0
    printed = capsys.readouterr().out
    assert "The journal takes" in printed
    assert "Its recording takes" in printed


@pytest.mark.parametrize(
    ("journal_us", "recording_us", "frame_us", "is_met"),
    [
        (30.0, 30.0, 2_500.0, True),
        (31.0, 30.0, 2_500.0, False),
        (30.0, 31.0, 2_500.0, False),
        (30.0, 30.0, 2_600.0, False),
    ],
)
def test_a_target_missed_is_told(journal_us: float, recording_us: float, frame_us: float, is_met: bool) -> None:
    ways = [[100.0] * 3, [100.0 + journal_us] * 3, [100.0 + journal_us + recording_us] * 3, [100.0] * 3]
    assert glass_box_cost.report(ways, [frame_us] * 3, 256, 20_000) is is_met


@pytest.mark.parametrize(
    ("lost", "core", "frames", "is_met"),
    [(0.02, 0.05, 11.0, True), (0.04, 0.05, 11.0, False), (0.02, 0.11, 11.0, False), (0.02, 0.05, 9.0, False)],
)
def test_what_watching_costs_is_taken_pair_by_pair(
    capsys: pytest.CaptureFixture[str], lost: float, core: float, frames: float, is_met: bool
) -> None:
    alone = [Run(rate, 0.1, (), 0.0) for rate in (100.0, 200.0)]
    watched = [Run(run.rate * (1 - lost), 0.1 + core, (frames, 12.0), 6e4) for run in alone]
    assert watching.report(alone, watched, Load(8, 128, 128), 20_000) is is_met
    told = " ".join(capsys.readouterr().out.split())
    assert f"Throughput lost while 2 watch: {lost:.2%} in the median" in told
    assert f"Each gets {frames:.1f} frames a second" in told
    assert "30 kB/s" in told


@pytest.mark.usefixtures("compiled_kernels")
def test_attention_of_one_layer_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    for kv_dtype in ("bf16", "int8"):
        assert cpu_attention.main(["--quick", "--kv-dtype", kv_dtype]) == 0
        assert f"one layer, {kv_dtype} K/V" in capsys.readouterr().out
