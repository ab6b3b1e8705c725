"""A device that runs out of memory at start: one clear line with what is needed and what was free."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from fakes.engines import tiny_config, tiny_model

from pageframe.kernels.attention import select_backend
from pageframe.runtime import engine_builder
from pageframe.runtime.arithmetic import Arithmetic
from pageframe.runtime.config import EngineConfig
from pageframe.runtime.errors import MemoryPlanError, ModelError
from pageframe.runtime.models.decoder import Decoder
from pageframe.runtime.models.source import resolve_source

CPU = torch.device("cpu")
ARITHMETIC = Arithmetic(CPU, torch.float32, torch.float32, torch.float32, select_backend("reference", CPU))
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB.")


@pytest.fixture(autouse=True)
def _three_mib_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_builder, "_available_memory", lambda device: 3 * 2**20)


def fail_with(error: Exception) -> Any:
    def fail(*args: object, **settings: object) -> None:
        raise error

    return fail


def make_runner(**changes: Any) -> None:
    model = tiny_model(vocab_size=8)
    decoder = Decoder.random(
        model.replace(max_position=8),
        storage_dtype=torch.float32,
        compute_dtype=torch.float32,
        device=CPU,
        seed=0,
    )
    engine_builder._ready_model(decoder, dataclasses.replace(tiny_config(num_blocks=100), **changes), ARITHMETIC)


def test_for_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    make_runner()
    monkeypatch.setattr(engine_builder, "ModelRunner", fail_with(OUT_OF_MEMORY))
    # 100 blocks of 4 slots of 64 bytes.
    pool = (
        r"^the KV pool of 100 blocks takes 25\.0 KiB{}; 3\.0 MiB of the memory of cpu were free beside the weights, "
        r"and that was not enough: CUDA out of memory\. Tried to allocate 2\.00 GiB\.$"
    )
    with pytest.raises(MemoryPlanError, match=pool.format("")):
        make_runner()
    with pytest.raises(MemoryPlanError, match=pool.format(r", host memory for 8 more 2\.0 KiB")):
        make_runner(host_slots=8)


@pytest.mark.parametrize("error", [OUT_OF_MEMORY, RuntimeError("CUDA error: out of memory")], ids=["torch", "driver"])
def test_for_the_steps_beside_it(monkeypatch: pytest.MonkeyPatch, error: RuntimeError) -> None:
    monkeypatch.setattr(engine_builder, "warm_up", fail_with(error))
    with pytest.raises(MemoryPlanError, match=r"^the KV pool of 100 blocks takes 25\.0 KiB; 3\.0 MiB .* out of memory"):
        make_runner()


def test_a_host_that_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")
    monkeypatch.setattr(engine_builder, "ModelRunner", fail_with(error))
    with pytest.raises(MemoryPlanError, match=r"^the KV pool of 100 blocks takes 25\.0 KiB; 3\.0 MiB .* 9 bytes\.$"):
        make_runner()


def test_another_failure_is_no_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_builder, "ModelRunner", fail_with(RuntimeError("no kernel image")))
    with pytest.raises(RuntimeError, match=r"^no kernel image$"):
        make_runner()


def test_for_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    config, source = EngineConfig(), resolve_source("default")
    model = tiny_model(vocab_size=2**20)
    monkeypatch.setattr(engine_builder, "load_decoder", fail_with(MemoryPlanError("the weights do not fit")))
    # Two tables of 2^20 rows of 4 numbers of 2 bytes, and next to nothing else.
    message = r"^the weights do not fit; in bf16 they take about 16\.0 MiB, 3\.0 MiB were free$"
    with pytest.raises(MemoryPlanError, match=message):
        engine_builder._load(config, source, model, ARITHMETIC, None)
    monkeypatch.setattr(engine_builder, "load_decoder", fail_with(ModelError("a tensor is missing")))
    with pytest.raises(ModelError, match=r"^a tensor is missing$"):
        engine_builder._load(config, source, model, ARITHMETIC, None)


def test_a_gpus_pool_leaves_room_for_the_largest_step() -> None:
    gpu = dataclasses.replace(ARITHMETIC, device=torch.device("cuda"))
    model = tiny_model(vocab_size=8, max_position=2**20)
    config = EngineConfig(dtype="float32", max_num_requests=4)
    # A block takes 1 KiB. A token's activations take 4 * (4 * 4 + 5 * 4) bytes: of 8192 tokens, over a third of all.
    reserve = 8192 * 144 + 4 * 8 * 16
    assert engine_builder._size_pool(config, model, gpu).num_blocks == (3 * 2**20 - reserve) // 1024
    small = dataclasses.replace(config, max_num_batched_tokens=4)
    assert engine_builder._size_pool(small, model, gpu).num_blocks == int(3 * 1024 * 0.85)
    assert engine_builder._size_pool(small, model, ARITHMETIC).num_blocks == 3 * 1024 // 2
