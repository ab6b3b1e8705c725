"""That an engine is made ready before it serves, and what is said where it cannot be. What that runs is tested with the
kernels."""

from __future__ import annotations

from typing import Any

import pytest

from pageframe.runtime import engine_builder
from pageframe.runtime.config import EngineConfig
from pageframe.runtime.engine_builder import build_engine
from pageframe.runtime.errors import StartupError
from pageframe.runtime.model_runner import ModelRunner

CONFIG = EngineConfig(num_blocks=16, max_model_len=64, mixed_token_budget=32)


def test_the_engines_own_runner_is_warmed_before_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []
    measure = engine_builder._measure

    def watched(runner: ModelRunner, resolved: Any) -> Any:
        calls.append(("measure", runner))
        return measure(runner, resolved)

    monkeypatch.setattr(engine_builder, "_measure", watched)
    monkeypatch.setattr(engine_builder, "warm_up", lambda runner, *rest: calls.append(("warm up", runner)))
    engine = build_engine(CONFIG)
    assert calls == [("warm up", engine.runner), ("measure", engine.runner)]


@pytest.mark.parametrize("part", ["ModelRunner", "warm_up"])
def test_a_compiler_that_fails_while_an_engine_is_made_is_one_line(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("Internal Triton\nPTX codegen error")

    monkeypatch.setattr(engine_builder, part, fail)
    said = r"^the \w+ backend on cpu cannot be made ready: RuntimeError: Internal Triton PTX codegen error$"
    with pytest.raises(StartupError, match=said):
        build_engine(CONFIG)
