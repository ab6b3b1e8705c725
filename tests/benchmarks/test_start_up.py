"""The experiment on start-up: a real server, and the limit."""

from __future__ import annotations

import pytest

from pageframe.benchmarks.experiments import start_up
from pageframe.benchmarks.experiments.start_up import Start


def test_a_server_is_timed_until_its_first_token(capsys: pytest.CaptureFixture[str]) -> None:
    assert start_up.main(["--repeats", "1", "--limit", "600"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "yes" in line)
    healthy, first_token = (float(cell) for cell in row.strip("│ ").split("│")[:2])
    assert 0 < healthy <= first_token < 600


def test_the_limit_is_for_the_median(capsys: pytest.CaptureFixture[str]) -> None:
    starts = [Start(1.0, 2.0), Start(1.0, 9.0), Start(1.0, 3.0)]
    assert start_up.show(starts, limit=3.0)
    assert not start_up.show(starts, limit=2.9)
    assert "NO" in capsys.readouterr().out


def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*flags: str) -> Start:
        raise KeyboardInterrupt

    monkeypatch.setattr(start_up, "start_once", interrupted)
    assert start_up.main(["--repeats", "1"]) == 130
    assert capsys.readouterr().err.strip().endswith("pageframe: interrupted")


def test_a_server_that_does_not_start_is_one_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert start_up.main(["--repeats", "1", "--model", "/no/such/model"]) != 0
    assert "the server ended with status" in capsys.readouterr().err
