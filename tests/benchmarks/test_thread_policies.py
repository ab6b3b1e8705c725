"""The experiment on threads and their waiting, on real servers with toy loads."""

from __future__ import annotations

import pytest

from pageframe.benchmarks.experiments import thread_policies


def test_each_policy_is_served_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert thread_policies.main(["--quick", "--threads", "1", "--spins", "300", "1000"]) == 0
    shown = capsys.readouterr().out
    assert "2 streams" in shown
    for policy in ("1 threads, 300 spins", "1 threads, 1,000 spins"):
        (row,) = (line for line in shown.splitlines() if policy in line)
        rate, first_token, gap = (float(cell) for cell in row.strip("│ ").split("│")[1:])
        assert rate > 0
        assert first_token > 0
        assert gap > 0


def test_a_server_that_does_not_start_is_one_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert thread_policies.main(["--quick", "--threads", "5000", "--spins", "300"]) == 1
    assert "threads is 5000" in capsys.readouterr().err
