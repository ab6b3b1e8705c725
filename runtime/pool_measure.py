"""Takes the memory of a small KV pool as a server would and measures it: the memory formula's other side."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from pageframe.kernels.attention import select_backend
from pageframe.runtime.arithmetic import TORCH_DTYPES
from pageframe.runtime.config import ModelConfig
from pageframe.runtime.model_runner import ModelRunner
from pageframe.runtime.models.decoder import Decoder

MEMORY_MAP = Path("/proc/self/smaps_rollup")


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """What a pool takes, in bytes.

    Args:
        allocated: size of the storage behind its tensors.
        resident: by how much the process's memory in RAM grew until every slot was written; None where the system
            does not tell.
    """

    allocated: int
    resident: int | None


def measure_pool(model: ModelConfig, kv_dtype: str, *, num_blocks: int, block_size: int) -> PoolMemory:
    """Allocate a pool of `num_blocks` blocks of this model in main memory, and write to all of it.

    No weights are read: the decoder is one of the model's layers, KV heads and head_dim, as narrow as can be in
    everything that no K or V depends on.
    """
    narrow = model.replace(hidden_size=1, intermediate_size=1, vocab_size=1, num_heads=model.num_kv_heads)
    decoder = Decoder.random(
        narrow.replace(max_position=1, windows=()),
        storage_dtype=torch.float32,
        compute_dtype=torch.float32,
        device=torch.device("cpu"),
        seed=0,
    )
    # What the first pool ever loads and keeps, code and buffers, is no memory of the pool that is measured.
    _written_pool(decoder, kv_dtype, num_blocks=1, block_size=block_size)
    before = _resident_bytes()
    runner = _written_pool(decoder, kv_dtype, num_blocks=num_blocks, block_size=block_size)
    after = _resident_bytes()
    resident = None if before is None or after is None else after - before
    return PoolMemory(runner.pool_bytes, resident)


def _written_pool(decoder: Decoder, kv_dtype: str, *, num_blocks: int, block_size: int) -> ModelRunner:
    device = torch.device("cpu")
    runner = ModelRunner(
        decoder,
        select_backend("reference", device),
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_requests=1,
        max_blocks=1,
        kv_dtype=TORCH_DTYPES[kv_dtype],
        device=device,
    )
    runner.fill_blocks(range(num_blocks), 1.0)
    return runner


def _resident_bytes() -> int | None:
    """Memory of this process that is in RAM and no file's; None where the system does not tell."""
    if MEMORY_MAP.exists():
        for line in MEMORY_MAP.read_text().splitlines():
            if line.startswith("Anonymous:"):
                return int(line.split()[1]) * 1024
    return None
