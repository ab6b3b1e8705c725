"""Where K and V can be int8, and what is said where they cannot."""

from __future__ import annotations

import pytest
import torch
from fakes.engines import tiny_model

from pageframe.kernels.cpu import BuildError, load
from pageframe.runtime import arithmetic
from pageframe.runtime.arithmetic import choose_arithmetic
from pageframe.runtime.config import EngineConfig, ModelConfig
from pageframe.runtime.errors import ConfigError
from pageframe.runtime.models.source import resolve_source

MODEL = tiny_model(head_dim=64)
ONLY_COMPILED = "kv_dtype is 'int8', but only the compiled CPU engine has it, and it does not compute here: "


def stored_as(model: ModelConfig, **settings: str) -> torch.dtype:
    """What these settings make of K and V."""
    return choose_arithmetic(EngineConfig(device="cpu", **settings), model, resolve_source("default")).kv


def test_left_open_they_are_of_the_arithmetics_type() -> None:
    assert EngineConfig().stored_kv_dtype == "bf16"
    assert EngineConfig(dtype="float32").stored_kv_dtype == "float32"
    assert stored_as(MODEL) == torch.bfloat16
    assert stored_as(MODEL, dtype="float32") == torch.float32


def test_the_compiled_engine_has_int8() -> None:
    try:
        load()
    except BuildError as error:
        pytest.skip(f"no compiled kernels: {error}")
    assert EngineConfig(kv_dtype="int8").stored_kv_dtype == "int8"
    assert stored_as(MODEL, kv_dtype="int8") == stored_as(MODEL, kv_dtype="int8", backend="cpu") == torch.int8
    message = "kv_dtype is 'int8', but head_dim is 80; the cpu backend needs a multiple of 32 up to 256"
    with pytest.raises(ConfigError, match=message):
        stored_as(tiny_model(head_dim=80), kv_dtype="int8")


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_other_backends_have_not(backend: str) -> None:
    with pytest.raises(ConfigError, match=f"^{ONLY_COMPILED}backend is {backend}$"):
        stored_as(MODEL, kv_dtype="int8", backend=backend)


def test_nor_has_a_machine_without_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler() -> None:
        raise BuildError("there is no C++ compiler")

    monkeypatch.setattr(arithmetic, "load", no_compiler)
    with pytest.raises(ConfigError, match=f"^{ONLY_COMPILED}there is no C\\+\\+ compiler$"):
        stored_as(MODEL, kv_dtype="int8")


def test_nor_has_float32() -> None:
    with pytest.raises(ConfigError, match=r"^kv_dtype is 'int8', but dtype is 'float32'; it must be 'bf16'$"):
        EngineConfig(dtype="float32", kv_dtype="int8")


def test_another_type_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"^kv_dtype is 'fp8'; it must be one of auto, int8$"):
        EngineConfig(kv_dtype="fp8")
