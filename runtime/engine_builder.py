"""From what a person asked for to a running engine: resolves every open setting once, then builds the parts."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pageframe.kernels.attention import Backend, UnsupportedError, select_backend
from pageframe.runtime import memory_plan
from pageframe.runtime.config import DEFAULT_MODEL, EngineConfig, ModelConfig, ResolvedConfig
from pageframe.runtime.copy_costs import measure_copy_costs
from pageframe.runtime.engine import Engine
from pageframe.runtime.errors import ConfigError, MemoryPlanError
from pageframe.runtime.model_runner import ModelRunner
from pageframe.runtime.models.config import load_model_config
from pageframe.runtime.models.loader import load_decoder
from pageframe.runtime.models.source import resolve_source, verify_default_model
from pageframe.runtime.models.weights import compiled_kernels
from pageframe.runtime.sampler import Sampler

Progress = Callable[[int, int], None]

TORCH_DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Types and place of the computation.

    Args:
        storage: what weights are rounded to and K/V stored as.
        compute: what products and hidden states are.
        notes: what the machine lacks and what that costs.
    """

    device: torch.device
    storage: torch.dtype
    compute: torch.dtype
    notes: tuple[str, ...]


def build_engine(config: EngineConfig, progress: Progress | None = None) -> Engine:
    """Load the model, take the KV pool's memory and put an engine together.

    Args:
        progress: called with (tensors loaded, tensors in all).

    Raises:
        StartupError: the model, a setting or the machine does not allow it; one clear line.
    """
    if config.model == DEFAULT_MODEL:
        verify_default_model()
    source = resolve_source(config.model)
    model = load_model_config(source)
    threads = config.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    arithmetic = _arithmetic(config)
    backend = _backend(config, model, arithmetic)
    memory_plan.check_model_len(config, model)
    decoder = load_decoder(
        source,
        # Positions past the longest context need no rotary table: at a million of them it would take half a gigabyte.
        model.replace(max_position=min(model.max_position, config.max_model_len or model.max_position)),
        storage_dtype=arithmetic.storage,
        compute_dtype=arithmetic.compute,
        device=arithmetic.device,
        progress=progress,
    )
    pool = memory_plan.size_pool(
        config,
        model,
        available=_available_memory(arithmetic.device),
        cap=memory_plan.CPU_POOL_CAP if arithmetic.device.type == "cpu" else None,
    )
    per_token = memory_plan.kv_bytes_per_token(model, config.dtype)
    pool_bytes = per_token * config.block_size * pool.num_blocks
    host_free = memory_plan.free_memory() - (pool_bytes if arithmetic.device.type == "cpu" else 0)
    resolved = ResolvedConfig(
        model_name=source.name,
        model=model,
        dtype=config.dtype,
        compute_dtype=str(arithmetic.compute).removeprefix("torch."),
        device=str(arithmetic.device),
        backend=backend.name,
        block_size=config.block_size,
        num_blocks=pool.num_blocks,
        max_model_len=pool.max_model_len,
        max_num_requests=config.max_num_requests,
        max_num_batched_tokens=config.max_num_batched_tokens,
        threads=threads,
        kv_bytes_per_token=per_token,
        pool_bytes=pool_bytes,
        prefix_cache=config.prefix_cache,
        host_slots=memory_plan.plan_host_slots(config.host_cache, per_token * config.block_size, host_free),
        slide_by=_slide_by(config, pool.max_model_len),
        notes=arithmetic.notes,
    )
    runner = _runner(decoder, backend, resolved, arithmetic)
    if resolved.host_slots:
        resolved = dataclasses.replace(resolved, copy_costs=measure_copy_costs(runner, resolved))
    return Engine(resolved, runner, Sampler(runner.logits), seed=config.seed)


def _slide_by(config: EngineConfig, max_model_len: int) -> int | None:
    if config.on_context_full == "stop":
        return None
    slide_by = config.slide_by or max(1, max_model_len // 2)
    if slide_by > max_model_len:
        raise ConfigError(f"slide_by is {slide_by}; it must be at most max_model_len, which is {max_model_len}")
    return slide_by


def _runner(decoder: object, backend: Backend, resolved: ResolvedConfig, arithmetic: Arithmetic) -> ModelRunner:
    try:
        return ModelRunner(
            decoder,  # type: ignore[arg-type]
            backend,
            num_blocks=resolved.num_blocks,
            block_size=resolved.block_size,
            max_num_requests=resolved.max_num_requests,
            max_blocks=resolved.max_blocks,
            kv_dtype=arithmetic.storage,
            device=arithmetic.device,
            host_slots=resolved.host_slots,
        )
    except RuntimeError as error:
        raise MemoryPlanError(
            f"the KV pool of {resolved.num_blocks} blocks ({memory_plan.format_bytes(resolved.pool_bytes)}) and host "
            f"memory for {resolved.host_slots} could not be allocated: {error}"
        ) from error


def _arithmetic(config: EngineConfig) -> Arithmetic:
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError("device is 'cuda', but no CUDA device is available; use 'cpu'")
    device = torch.device("cuda" if has_cuda and config.device != "cpu" else "cpu")
    storage = TORCH_DTYPES[config.dtype]
    if storage is torch.bfloat16 and device.type == "cpu" and not _cpu_multiplies_bf16():
        compiled = compiled_kernels(storage, torch.float32, device) is not None
        note = "this processor has no bf16 arithmetic: " + (
            "products read bf16 weights and K/V and add in float32"
            if compiled
            else "weights and K/V are bf16 values, but products run in float32 and weights take 4 bytes each, since "
            "there are no compiled kernels (the log says why; most often there is no C++ compiler)"
        )
        return Arithmetic(device, storage, torch.float32, (note,))
    return Arithmetic(device, storage, storage, ())


def _cpu_multiplies_bf16() -> bool:
    """Whether this processor has bf16 products; emulated ones are many times slower than float32."""
    if platform.machine() in ("x86_64", "AMD64"):
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _backend(config: EngineConfig, model: ModelConfig, arithmetic: Arithmetic) -> Backend:
    try:
        backend = select_backend(config.backend, arithmetic.device)
        backend.check_supported(head_dim=model.head_dim, block_size=config.block_size, dtype=arithmetic.storage)
    except UnsupportedError as error:
        raise ConfigError(str(error)) from error
    return backend


def _available_memory(device: torch.device) -> int:
    """Bytes the pool may come from, weights already loaded."""
    return memory_plan.free_memory() if device.type == "cpu" else int(torch.cuda.mem_get_info(device)[0])
