"""Where K and V can be codes, and what is said where they cannot."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from fakes.engines import tiny_model

from pageframe.kernels.attention import UnsupportedError
from pageframe.kernels.cpu import BuildError
from pageframe.runtime import arithmetic
from pageframe.runtime.arithmetic import choose_arithmetic
from pageframe.runtime.config import EngineConfig, ModelConfig
from pageframe.runtime.errors import ConfigError
from pageframe.runtime.models.source import resolve_source

MODEL = tiny_model(head_dim=64)
NO_ENGINE = (
    "kv_dtype is 'int8', but only the compiled CPU engine and the triton backend have it; the first does not compute "
    "here: "
)


def stored_as(model: ModelConfig, device: str = "cpu", **settings: str) -> torch.dtype:
    """What these settings make of K and V."""
    return choose_arithmetic(EngineConfig(device=device, **settings), model, resolve_source("default")).kv


def test_left_open_they_are_of_the_arithmetics_type() -> None:
    assert EngineConfig().stored_kv_dtype == "bf16"
    assert EngineConfig(dtype="float32").stored_kv_dtype == "float32"
    assert stored_as(MODEL) == torch.bfloat16
    assert stored_as(MODEL, dtype="float32") == torch.float32


@pytest.mark.usefixtures("compiled_kernels")
def test_the_compiled_engine_has_int8() -> None:
    assert EngineConfig(kv_dtype="int8").stored_kv_dtype == "int8"
    assert stored_as(MODEL, kv_dtype="int8") == stored_as(MODEL, kv_dtype="int8", backend="cpu") == torch.int8
    message = "kv_dtype is 'int8', but head_dim is 80; the cpu backend needs a multiple of 32 up to 256"
    with pytest.raises(ConfigError, match=message):
        stored_as(tiny_model(head_dim=80), kv_dtype="int8")


def test_the_reference_has_not() -> None:
    with pytest.raises(ConfigError, match=f"^{NO_ENGINE}backend is reference$"):
        stored_as(MODEL, kv_dtype="int8", backend="reference")


def test_nor_has_a_machine_without_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler() -> None:
        raise BuildError("there is no C++ compiler")

    monkeypatch.setattr(arithmetic, "load", no_compiler)
    with pytest.raises(ConfigError, match=f"^{NO_ENGINE}there is no C\\+\\+ compiler$"):
        stored_as(MODEL, kv_dtype="int8")


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_nor_has_float32(kv_dtype: str) -> None:
    with pytest.raises(ConfigError, match=rf"^kv_dtype is '{kv_dtype}', but dtype is 'float32'; it must be 'bf16'$"):
        EngineConfig(dtype="float32", kv_dtype=kv_dtype)


@pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
def test_fp8_is_for_gpus(backend: str) -> None:
    with pytest.raises(ConfigError, match=r"^kv_dtype is 'fp8', but only the triton backend has it, on a GPU$"):
        stored_as(MODEL, kv_dtype="fp8", backend=backend)


def test_another_type_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"^kv_dtype is 'int4'; it must be one of auto, int8, fp8$"):
        EngineConfig(kv_dtype="int4")


# ---- on a GPU, of which only what torch says of it is there ---------------------------------------------------------


@dataclass
class FakeBackend:
    """Takes head_dim 64 and says what it was asked for."""

    device: torch.device
    name: str = "triton"

    def check_supported(self, head_dim: int, block_size: int, dtype: torch.dtype) -> None:
        if head_dim != 64:
            raise UnsupportedError(f"head_dim is {head_dim}; the triton backend has 64")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A GPU of NVIDIA's, of the compute capability that the test asks for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: request.param)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(arithmetic, "select_backend", lambda name, device: FakeBackend(device))


@pytest.mark.parametrize(
    ("gpu", "kv_dtype", "stored"),
    [
        ((8, 0), "auto", torch.bfloat16),
        ((8, 0), "int8", torch.int8),
        ((8, 9), "fp8", torch.float8_e4m3fn),
        ((9, 0), "fp8", torch.float8_e4m3fn),
    ],
    indirect=["gpu"],
)
def test_what_a_gpu_stores(gpu: None, kv_dtype: str, stored: torch.dtype) -> None:
    assert stored_as(MODEL, device="cuda", kv_dtype=kv_dtype) == stored


@pytest.mark.parametrize("gpu", [(8, 6)], indirect=True)
def test_a_gpu_without_fp8_is_named(gpu: None) -> None:
    with pytest.raises(ConfigError, match=r"^kv_dtype is 'fp8', but a GPU does not compute with it: .* 8\.9 on.*int8"):
        stored_as(MODEL, device="cuda", kv_dtype="fp8")


@pytest.mark.parametrize("gpu", [(7, 5)], indirect=True)
def test_a_gpu_without_bf16_is_refused_with_what_is_supported(gpu: None) -> None:
    with pytest.raises(
        ConfigError, match=r"^a GPU has compute capability 7\.5; the triton backend needs 8\.0 or later"
    ):
        stored_as(MODEL, device="cuda")


@pytest.mark.parametrize("gpu", [(9, 0)], indirect=True)
def test_a_head_size_that_a_gpu_has_not_is_refused_with_those_it_has(gpu: None) -> None:
    with pytest.raises(ConfigError, match=r"^kv_dtype is 'fp8', but head_dim is 48; the triton backend has 64$"):
        stored_as(tiny_model(head_dim=48), device="cuda", kv_dtype="fp8")


@pytest.mark.parametrize("gpu", [(9, 0)], indirect=True)
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_the_reference_has_no_codes_on_a_gpu_either(gpu: None, kv_dtype: str) -> None:
    with pytest.raises(ConfigError, match=f"^kv_dtype is '{kv_dtype}', but only the .*triton backend"):
        stored_as(MODEL, device="cuda", kv_dtype=kv_dtype, backend="reference")
