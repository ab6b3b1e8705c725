"""How much memory the KV cache takes, and how many blocks fit.

The formula: one token's K and V take

    2 * num_layers * num_kv_heads * head_dim * bytes_per_element

bytes (2: K and V). With 32 layers, 32 KV heads of 128 and bf16 that is 512 KiB a token, 2 GiB for 4,096 tokens.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from pageframe.runtime.config import EngineConfig, ModelConfig
from pageframe.runtime.errors import ConfigError, MemoryPlanError

DTYPE_BYTES = {"bf16": 2, "float32": 4}
#: Bytes of K or V in one slot of one KV head: of each number, and of what stands beside them, a float32 scale of codes.
KV_DTYPE_BYTES = {"bf16": (2, 0), "int8": (1, 4), "fp8": (1, 4), "float32": (4, 0)}
GIB = 1024**3
#: Without a word from the user the pool takes no more than this on a CPU, whose memory others need too.
CPU_POOL_CAP = 4 * GIB
#: The share of free memory that the pool may take, so that weights in flight and activations have room.
POOL_SHARE = 0.5
#: The same of a GPU's memory, which is nobody else's: the rest is for graphs, kernels, workspaces, activations, and is
#: no less than `activation_bytes`.
GPU_POOL_SHARE = 0.85

#: A context holds at least one token of the prompt and one of the answer.
MIN_MODEL_LEN = 2

#: No machine has as much memory.
MAX_BYTES = 2**60

_UNITS = {"": 1, "b": 1, "kib": 1024, "mib": 1024**2, "gib": GIB, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def parse_bytes(text: str) -> int:
    """Bytes of "1073741824", "512MiB", "4GiB" or "1.5 GB".

    Raises:
        ConfigError: not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match.group(2).lower() not in _UNITS:
        raise ConfigError(f"{text!r} is not a size; write bytes, or a number with KiB, MiB, GiB, KB, MB or GB")
    size = float(match.group(1)) * _UNITS[match.group(2).lower()]
    if size > MAX_BYTES:
        raise ConfigError(f"{text[:40]!r} is too large a size; at most {MAX_BYTES} bytes")
    return int(size)


def format_bytes(count: float) -> str:
    """Bytes for people: "512.0 KiB", "2.00 GiB"."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.2f} GiB"


def kv_bytes_per_token(model: ModelConfig, kv_dtype: str) -> int:
    """Bytes of one token's K and V over all layers; kv_dtype is one of KV_DTYPE_BYTES."""
    number_bytes, scale_bytes = KV_DTYPE_BYTES[kv_dtype]
    return 2 * model.num_layers * model.num_kv_heads * (model.head_dim * number_bytes + scale_bytes)


def num_parameters(model: ModelConfig) -> int:
    """Weights of the decoder, counted from its shape; biases and the norms of q and k, which are few, left out."""
    hidden = model.hidden_size
    attention = 2 * hidden * model.head_dim * (model.num_heads + model.num_kv_heads)
    layer = attention + (2 + model.gated_mlp) * hidden * model.intermediate_size + 2 * hidden
    embeddings = model.vocab_size * hidden * (1 if model.tie_word_embeddings else 2)
    positions = (model.learned_positions or 0) * hidden
    return model.num_layers * layer + embeddings + positions + hidden


def activation_bytes(model: ModelConfig, *, num_tokens: int, num_rows: int, number_bytes: int) -> int:
    """Bytes that a step has beside the weights and the pool, at most: of its tokens in one layer, and of its logits.

        num_tokens * number_bytes * (4 * hidden + max(attention, mlp))    attention: q twice, k, v and the result;
                                                                          mlp: gate, up and their product
        num_rows * vocab_size * (number_bytes + 3 * 4)                    the product, logits, those with rules, a copy

    Args:
        num_tokens: of the largest step; num_rows: tokens that it draws.
        number_bytes: of a number of the arithmetic.
    """
    attention = model.head_dim * (3 * model.num_heads + 2 * model.num_kv_heads)
    mlp = (2 + model.gated_mlp) * model.intermediate_size
    per_token = number_bytes * (4 * model.hidden_size + max(attention, mlp))
    return num_tokens * per_token + num_rows * model.vocab_size * (number_bytes + 3 * 4)


def free_memory() -> int:
    """Bytes of host memory that can be taken without swapping: the kernel's estimate, or what a cgroup leaves."""
    return min(_available_on_machine(), _available_in_cgroup())


def _available_on_machine() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _available_in_cgroup() -> int:
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if not limit.exists() or not used.exists() or limit.read_text().strip() == "max":
        return 2**63 - 1
    return max(0, int(limit.read_text()) - int(used.read_text()) + _reclaimable_in_cgroup())


def _reclaimable_in_cgroup() -> int:
    """File pages that nobody uses: they count as used, but the kernel drops them when memory is asked for."""
    stat = Path("/sys/fs/cgroup/memory.stat")
    if stat.exists():
        for line in stat.read_text().splitlines():
            if line.startswith("inactive_file "):
                return int(line.split()[1])
    return 0


def plan_num_blocks(
    *,
    bytes_per_block: int,
    num_blocks: int | None,
    kv_memory: int | None,
    available: int,
    cap: int | None,
    enough: int,
    share: float = POOL_SHARE,
    reserve: int = 0,
) -> int:
    """How many blocks the pool gets.

    Args:
        num_blocks, kv_memory: what the user asked for; the first wins.
        available: bytes that are free now, weights already loaded.
        cap: most bytes to take unasked, None for no cap.
        enough: blocks past which no set of requests could use more; not exceeded unasked.
        share: of `available`, unasked; reserve: bytes that are left in any case, unasked.

    Raises:
        MemoryPlanError: not one block fits, or what was asked for does not.
    """
    if num_blocks is not None:
        wanted = num_blocks * bytes_per_block
        if wanted > available:
            raise MemoryPlanError(
                f"num_blocks {num_blocks} needs {format_bytes(wanted)} of memory; {format_bytes(available)} are free"
            )
        return num_blocks
    if kv_memory is not None:
        if kv_memory < bytes_per_block:
            raise MemoryPlanError(
                f"kv_memory is {format_bytes(kv_memory)}; one block of the KV cache takes "
                f"{format_bytes(bytes_per_block)}"
            )
        if kv_memory > available:
            raise MemoryPlanError(
                f"kv_memory is {format_bytes(kv_memory)}; {format_bytes(available)} of memory are free"
            )
        return kv_memory // bytes_per_block
    budget = max(0, min(int(available * share), available - reserve))
    budget = budget if cap is None else min(budget, cap)
    if budget < bytes_per_block:
        raise MemoryPlanError(
            f"too little memory for the KV cache: {format_bytes(available)} free, {format_bytes(budget)} of it for the "
            f"cache, and one block takes {format_bytes(bytes_per_block)}"
        )
    return min(budget // bytes_per_block, enough)


def plan_host_slots(host_cache: int | None, bytes_per_block: int, available: int) -> int:
    """How many blocks the host tier gets.

    Args:
        host_cache: bytes that the user asked for; None for no host tier.
        available: bytes of host memory that are free beside the pool.

    Raises:
        MemoryPlanError: not one block fits, or what was asked for does not.
    """
    if host_cache is None:
        return 0
    if host_cache < bytes_per_block:
        raise MemoryPlanError(
            f"host_cache is {format_bytes(host_cache)}; one block of the KV cache takes {format_bytes(bytes_per_block)}"
        )
    if host_cache > available:
        raise MemoryPlanError(
            f"host_cache is {format_bytes(host_cache)}; {format_bytes(max(0, available))} of host memory are free "
            "beside the KV pool"
        )
    return host_cache // bytes_per_block


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The KV pool, and the longest context, which never exceeds it.

    Args:
        enough: blocks past which no set of requests could use more.
    """

    num_blocks: int
    max_model_len: int
    enough: int


def check_model_len(config: EngineConfig, model: ModelConfig) -> None:
    """What can be said before the weights are loaded.

    Raises:
        ConfigError: max_model_len is beyond the model's positions, or too short to serve anything.
    """
    wanted_len = config.max_model_len or model.max_position
    if wanted_len < MIN_MODEL_LEN:
        raise ConfigError(f"max_model_len is {wanted_len}; it must be at least {MIN_MODEL_LEN}")
    if config.max_model_len is not None and config.max_model_len > model.max_position:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}; this model's positions end at {model.max_position}"
        )


def size_pool(
    config: EngineConfig,
    model: ModelConfig,
    *,
    available: int,
    cap: int | None,
    share: float = POOL_SHARE,
    reserve: int = 0,
) -> PoolSize:
    """The pool that these settings get.

    Args:
        available, cap, share, reserve: as in `plan_num_blocks`.

    Raises:
        ConfigError: max_model_len is beyond the model's positions or the pool.
        MemoryPlanError: see `plan_num_blocks`.
    """
    check_model_len(config, model)
    wanted_len = config.max_model_len or model.max_position
    enough = config.max_num_requests * -(-wanted_len // config.block_size)
    num_blocks = plan_num_blocks(
        bytes_per_block=kv_bytes_per_token(model, config.stored_kv_dtype) * config.block_size,
        num_blocks=config.num_blocks,
        kv_memory=config.kv_memory,
        available=available,
        cap=cap,
        enough=enough,
        share=share,
        reserve=reserve,
    )
    capacity = num_blocks * config.block_size
    needed = max(MIN_MODEL_LEN, config.max_model_len or 0)
    if capacity < needed:
        raise ConfigError(
            f"the pool of {num_blocks} blocks of {config.block_size} holds {capacity} tokens; max_model_len must not "
            f"exceed it and is {needed}"
        )
    return PoolSize(num_blocks, min(wanted_len, capacity), enough)
