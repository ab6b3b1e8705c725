"""From what a person asked for to a running engine: resolves every open setting once, then builds the parts."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from pageframe.runtime import memory_plan
from pageframe.runtime.arithmetic import Arithmetic, choose_arithmetic
from pageframe.runtime.config import DEFAULT_MODEL, EngineConfig, ModelConfig, ResolvedConfig
from pageframe.runtime.engine import Engine
from pageframe.runtime.errors import ConfigError, MemoryPlanError, StartupError
from pageframe.runtime.grammar_compiler import GrammarCompiler
from pageframe.runtime.grammar_service import GrammarService
from pageframe.runtime.model_runner import ModelRunner
from pageframe.runtime.models.config import load_model_config
from pageframe.runtime.models.decoder import Decoder
from pageframe.runtime.models.loader import load_decoder
from pageframe.runtime.models.source import ModelSource, one_line, resolve_source, verify_default_model
from pageframe.runtime.sampler import Sampler
from pageframe.runtime.start_measurements import measure_copy_costs, measure_mixed_token_budget
from pageframe.runtime.tokenizer import load_tokenizer
from pageframe.runtime.warm_up import refused_at_start, warm_up

Progress = Callable[[int, int], None]


def build_engine(config: EngineConfig, progress: Progress | None = None) -> Engine:
    """Load the model, take the KV pool's memory and put an engine together.

    Args:
        progress: called with (tensors loaded, tensors in all).

    Raises:
        StartupError: the model, a setting or the machine does not allow it; one clear line.
    """
    source, model = _read_description(config)
    threads = config.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    arithmetic = choose_arithmetic(config, model, source)
    memory_plan.check_model_len(config, model)
    decoder = _load(config, source, model, arithmetic, progress)
    pool = _size_pool(config, model, arithmetic)
    per_token = memory_plan.kv_bytes_per_token(model, config.stored_kv_dtype)
    pool_bytes = per_token * config.block_size * pool.num_blocks
    host_free = memory_plan.free_memory() - (pool_bytes if arithmetic.device.type == "cpu" else 0)
    resolved = ResolvedConfig(
        model_name=source.name,
        model=model,
        dtype=config.dtype,
        compute_dtype=str(arithmetic.compute).removeprefix("torch."),
        device=str(arithmetic.device),
        backend=arithmetic.backend.name,
        weights=arithmetic.weights,
        kv_dtype=config.stored_kv_dtype,
        instruction_set=arithmetic.kernels.instruction_set if arithmetic.kernels else "",
        batch_invariant=arithmetic.batch_invariant,
        block_size=config.block_size,
        num_blocks=pool.num_blocks,
        max_model_len=pool.max_model_len,
        max_num_requests=config.max_num_requests,
        max_num_batched_tokens=config.token_budget(arithmetic.device.type),
        mixed_token_budget=config.mixed_budget(arithmetic.device.type),
        graphs=config.graphs and arithmetic.device.type == "cuda" and arithmetic.backend.name == "triton",
        threads=threads,
        kv_bytes_per_token=per_token,
        pool_bytes=pool_bytes,
        prefix_cache=config.prefix_cache,
        host_slots=memory_plan.plan_host_slots(config.host_cache, per_token * config.block_size, host_free),
        slide_by=_slide_by(config, pool.max_model_len),
        notes=arithmetic.notes,
    )
    with refused_at_start(f"the {resolved.backend} backend on {resolved.device}"):
        runner, sampler = _ready_model(decoder, resolved, arithmetic)
    resolved = _measure(runner, resolved)
    unread = dataclasses.replace(source)  # one that keeps no file open until a grammar comes
    grammars = GrammarService(lambda: GrammarCompiler(load_tokenizer(unread), model.vocab_size, model.eos_token_ids))
    return Engine(resolved, runner, sampler, grammars=grammars, seed=config.seed)


def _measure(runner: ModelRunner, resolved: ResolvedConfig) -> ResolvedConfig:
    """Settle what the machine's speed decides."""
    try:
        if resolved.host_slots:
            resolved = dataclasses.replace(resolved, copy_costs=measure_copy_costs(runner, resolved))
        is_open = resolved.mixed_token_budget is None and resolved.max_num_requests > 1
        # The Triton backend computes on a CPU only in its interpreter, whose speed says nothing.
        if is_open and resolved.device == "cpu" and resolved.backend != "triton":
            resolved = dataclasses.replace(resolved, mixed_token_budget=measure_mixed_token_budget(runner, resolved))
    except RuntimeError as error:
        raise StartupError(f"the forward pass failed: {one_line(error)}") from error
    return resolved


def _read_description(config: EngineConfig) -> tuple[ModelSource, ModelConfig]:
    source = resolve_source(config.model)
    if config.model != DEFAULT_MODEL:
        return source, load_model_config(source)
    with ThreadPoolExecutor(1) as other_thread:
        verified = other_thread.submit(verify_default_model, source.path)
        try:
            return source, load_model_config(source)
        finally:
            verified.result()  # if both fail, this one says what to do


def _load(
    config: EngineConfig, source: ModelSource, model: ModelConfig, arithmetic: Arithmetic, progress: Progress | None
) -> Decoder:
    free = _available_memory(arithmetic.device)
    try:
        return load_decoder(
            source,
            # Positions past the longest context need no rotary table: of a million it would take half a gigabyte.
            model.replace(max_position=min(model.max_position, config.max_model_len or model.max_position)),
            storage_dtype=arithmetic.storage,
            compute_dtype=arithmetic.compute,
            device=arithmetic.device,
            kernels=arithmetic.kernels,
            keep_blocks=arithmetic.keep_blocks,
            progress=progress,
        )
    except MemoryPlanError as error:
        needed = memory_plan.num_parameters(model) * memory_plan.DTYPE_BYTES[config.dtype]
        raise MemoryPlanError(
            f"{error}; in {config.dtype} they take about {memory_plan.format_bytes(needed)}, "
            f"{memory_plan.format_bytes(free)} were free"
        ) from error


def _slide_by(config: EngineConfig, max_model_len: int) -> int | None:
    if config.on_context_full == "stop":
        return None
    slide_by = config.slide_by or max(1, max_model_len // 2)
    if slide_by > max_model_len:
        raise ConfigError(f"slide_by is {slide_by}; it must be at most max_model_len, which is {max_model_len}")
    return slide_by


def _size_pool(config: EngineConfig, model: ModelConfig, arithmetic: Arithmetic) -> memory_plan.PoolSize:
    """A GPU's memory goes to the pool but for what the largest step needs; of a CPU's, others need some too."""
    available = _available_memory(arithmetic.device)
    if arithmetic.device.type == "cpu":
        return memory_plan.size_pool(config, model, available=available, cap=memory_plan.CPU_POOL_CAP)
    reserve = memory_plan.activation_bytes(
        model,
        num_tokens=config.token_budget(arithmetic.device.type),
        num_rows=config.max_num_requests,
        number_bytes=arithmetic.compute.itemsize,
    )
    return memory_plan.size_pool(
        config, model, available=available, cap=None, share=memory_plan.GPU_POOL_SHARE, reserve=reserve
    )


def _ready_model(decoder: Decoder, resolved: ResolvedConfig, arithmetic: Arithmetic) -> tuple[ModelRunner, Sampler]:
    """Take the memory of K and V, and make all that runs ready.

    Raises:
        MemoryPlanError: memory cannot be had, for the pool or for the largest step beside it.
    """
    free = _available_memory(arithmetic.device)
    try:
        runner = ModelRunner(
            decoder,
            arithmetic.backend,
            num_blocks=resolved.num_blocks,
            block_size=resolved.block_size,
            max_num_requests=resolved.max_num_requests,
            max_blocks=resolved.max_blocks,
            kv_dtype=arithmetic.kv,
            device=arithmetic.device,
            host_slots=resolved.host_slots,
            graphs=resolved.graphs,
        )
        sampler = Sampler(runner.logits, runner.arg_max)
        warm_up(runner, sampler, resolved)
        return runner, sampler
    except RuntimeError as error:
        if not any(words in str(error).lower() for words in ("out of memory", "allocate memory")):
            raise
        needed = f"the KV pool of {resolved.num_blocks} blocks takes {memory_plan.format_bytes(resolved.pool_bytes)}"
        if resolved.host_slots:
            host_bytes = resolved.host_slots * resolved.block_size * resolved.kv_bytes_per_token
            needed += f", host memory for {resolved.host_slots} more {memory_plan.format_bytes(host_bytes)}"
        raise MemoryPlanError(
            f"{needed}; {memory_plan.format_bytes(free)} of the memory of {arithmetic.device} were free beside the "
            f"weights, and that was not enough: {one_line(error)}"
        ) from error


def _available_memory(device: torch.device) -> int:
    """Bytes that are free on a device."""
    return memory_plan.free_memory() if device.type == "cpu" else int(torch.cuda.mem_get_info(device)[0])
