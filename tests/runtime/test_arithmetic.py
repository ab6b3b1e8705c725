"""What the chosen arithmetic promises of an answer's bits, for models that the compiled engine has and has not."""

from __future__ import annotations

from typing import Any

import pytest

from pageframe.runtime.arithmetic import choose_arithmetic
from pageframe.runtime.config import EngineConfig
from pageframe.runtime.models.config import load_model_config
from pageframe.runtime.models.source import resolve_source


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"norm": "layer"}, "torch's operations"),
        ({"activation": "gelu"}, "torch's operations"),
        ({"head_dim": 48}, "the reference backend's"),
    ],
)
@pytest.mark.usefixtures("compiled_kernels")
def test_only_whole_compiled_layers_promise_the_same_bits(changes: dict[str, Any], reason: str) -> None:
    source = resolve_source("default")
    model = load_model_config(source).replace(**changes)
    chosen = choose_arithmetic(EngineConfig(device="cpu"), model, source)
    assert chosen.batch_invariant == (reason == "")
    assert all(reason in note for note in chosen.notes)
    assert bool(chosen.notes) == bool(reason)
