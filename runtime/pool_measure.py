"""Takes the memory of a small KV pool as a server would and counts its bytes: the memory formula's other side."""

from __future__ import annotations

import torch

from pageframe.kernels.attention import select_backend
from pageframe.runtime.config import ModelConfig
from pageframe.runtime.engine_builder import TORCH_DTYPES
from pageframe.runtime.model_runner import ModelRunner
from pageframe.runtime.models.decoder import Decoder


def measure_pool_bytes(model: ModelConfig, dtype: str, *, num_blocks: int, block_size: int) -> int:
    """Bytes of the pool that a ModelRunner allocates for `num_blocks` blocks of this model in main memory.

    No weights are read: the decoder is one of the model's layers, KV heads and head_dim, as narrow as can be in
    everything that no K or V depends on.
    """
    narrow = model.replace(hidden_size=1, intermediate_size=1, vocab_size=1, num_heads=model.num_kv_heads)
    device = torch.device("cpu")
    decoder = Decoder.random(
        narrow.replace(max_position=1, windows=()),
        storage_dtype=torch.float32,
        compute_dtype=torch.float32,
        device=device,
        seed=0,
    )
    runner = ModelRunner(
        decoder,
        select_backend("reference", device),
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_requests=1,
        max_blocks=1,
        kv_dtype=TORCH_DTYPES[dtype],
        device=device,
    )
    return runner.pool_bytes
