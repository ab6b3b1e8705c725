"""What is measured at start, with a runner that takes as long as the test says."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.engines import tiny_config

from pageframe.runtime import start_measurements
from pageframe.runtime.config import EngineConfig
from pageframe.runtime.engine_builder import build_engine
from pageframe.runtime.errors import StartupError
from pageframe.runtime.model_runner import ModelRunner
from pageframe.runtime.start_measurements import measure_mixed_token_budget


class SlowRunner:
    """Computes `token_seconds` for each token, and once in three times twice that; the time is its own."""

    def __init__(self, token_seconds: float) -> None:
        self.token_seconds = token_seconds
        self.seconds = 0.0
        self.num_steps = 0

    def forward(self, batch: Any) -> None:
        self.num_steps += 1
        self.seconds += self.token_seconds * len(batch.token_ids) * (2 if self.num_steps % 3 == 1 else 1)


def measure(monkeypatch: pytest.MonkeyPatch, token_seconds: float, **config: int) -> tuple[int, int]:
    runner = SlowRunner(token_seconds)
    monkeypatch.setattr(start_measurements.time, "perf_counter", lambda: runner.seconds)
    resolved = tiny_config(**{"num_blocks": 64, "max_num_batched_tokens": 512} | config)
    return measure_mixed_token_budget(runner, resolved), runner.num_steps  # type: ignore[arg-type]


def test_the_budget_is_what_takes_35_ms(monkeypatch: pytest.MonkeyPatch) -> None:
    budget, _ = measure(monkeypatch, 0.25e-3)
    assert budget == pytest.approx(140, abs=1)


def test_a_slow_model_is_measured_once_and_gets_at_least_32_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measure(monkeypatch, 0.1) == (32, 1)


def test_a_fast_model_gets_at_most_the_budget_of_any_step(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measure(monkeypatch, 1e-5)[0] == 512
    assert measure(monkeypatch, 1e-5, max_num_batched_tokens=48)[0] == 48


def test_a_pool_smaller_than_a_measured_step_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    budget, _ = measure(monkeypatch, 0.25e-3, num_blocks=5, block_size=4)
    assert budget == pytest.approx(140, abs=1)


def test_a_first_forward_pass_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: ModelRunner, batch: Any) -> None:
        raise RuntimeError("no such operation\nin this build")

    monkeypatch.setattr(ModelRunner, "forward", fail)
    with pytest.raises(StartupError, match=r"^the forward pass failed: no such operation in this build$"):
        build_engine(EngineConfig(num_blocks=16, max_model_len=64))


def test_nothing_is_measured_where_a_budget_is_given_or_no_two_requests_can_meet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ModelRunner, "forward", None)
    config = EngineConfig(num_blocks=16, max_model_len=64, mixed_token_budget=48)
    assert build_engine(config).resolved.mixed_token_budget == 48
    offline = EngineConfig.offline(num_blocks=16, max_model_len=64)
    assert build_engine(offline).resolved.mixed_token_budget == build_engine(offline).resolved.max_num_batched_tokens
    chosen = EngineConfig.offline(num_blocks=16, max_model_len=64, mixed_token_budget=48)
    assert build_engine(chosen).resolved.mixed_token_budget == 48
    alone = EngineConfig(num_blocks=16, max_model_len=64, max_num_requests=1)
    assert build_engine(alone).resolved.mixed_token_budget is None
