"""Whole decoders with Triton's layers and attention, against the same weights in torch's operations.

Here, and not among the tests of models, because the interpreter must be on before Triton is imported.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pageframe.kernels.attention import kv_cache_shape, select_backend
from pageframe.kernels.kv_pool import KvPool
from pageframe.kernels.triton import launches
from pageframe.kernels.triton.dtypes import fp8_dtype
from pageframe.runtime.config import ModelConfig
from pageframe.runtime.models.decoder import Decoder
from pageframe.runtime.models.layers import ComposedLayers
from pageframe.runtime.models.triton_layers import TritonLayers, can_fuse

from .cases import Step

BLOCK_SIZE, NUM_BLOCKS = 4, 8
LLAMA = ModelConfig(
    family="llama",
    vocab_size=64,
    hidden_size=36,
    intermediate_size=52,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position=64,
    norm_eps=1e-5,
)
QWEN3 = LLAMA.replace(family="qwen3", head_dim=32, qk_norm=True, tie_word_embeddings=True)
MODELS: dict[str, ModelConfig] = {
    "llama": LLAMA,
    "qwen3": QWEN3,
    "biases and one KV head": LLAMA.replace(qkv_bias=True, output_bias=True, mlp_bias=True, num_kv_heads=1),
    "windows": LLAMA.replace(windows=(5, None), activation="gelu_tanh"),
}
#: Steps of one run: of each request, decode rows first, its row and the range of its tokens.
STEPS = (((1, 0, 5),), ((1, 5, 6), (0, 0, 6)), ((0, 6, 7), (1, 6, 7)), ((1, 7, 8), (0, 7, 11)))


def decoder_of(config: ModelConfig, device: torch.device, dtype: torch.dtype = torch.float32) -> Decoder:
    return Decoder.random(config, storage_dtype=torch.bfloat16, compute_dtype=dtype, device=device, seed=3)


def logits_of(decoder: Decoder, backend_name: str, device: torch.device, kv_dtype: torch.dtype) -> Tensor:
    """float32 [tokens of all STEPS, vocab_size], over a pool of NaN with its blocks out of order."""
    config, backend = decoder.config, select_backend(backend_name, device)
    rng = np.random.default_rng(0)
    tables = torch.from_numpy(rng.permutation(NUM_BLOCKS).astype(np.int32)).view(2, -1).to(device)
    tokens = torch.from_numpy(rng.integers(0, config.vocab_size, (2, 11))).to(device)
    shape = kv_cache_shape(NUM_BLOCKS, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    pool = KvPool(config.num_layers, shape, kv_dtype, device)
    pool.fill(range(NUM_BLOCKS), torch.nan)
    results = []
    with torch.inference_mode():
        for requests in STEPS:
            rows, starts, ends = (np.array(column, dtype=np.int32) for column in zip(*requests, strict=True))
            lengths = ends - starts
            query_start = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
            step = Step(rows, ends, query_start, num_decode=int((lengths == 1).sum()))
            owners = torch.from_numpy(np.repeat(rows, lengths)).to(device)
            positions = torch.cat([torch.arange(start, end) for _, start, end in requests]).to(device)
            slots = tables[owners, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
            plan = backend.plan_attention(step, tables, BLOCK_SIZE)
            hidden = decoder.forward(
                tokens[owners, positions], positions, pool.caches, slots, plan, backend, pool.scales
            )
            results.append(decoder.logits(hidden, backend))
    return torch.cat(results)


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_tritons_layers_compute_what_torchs_do(device: torch.device, config: ModelConfig) -> None:
    decoder = decoder_of(config, device)
    expected = logits_of(decoder, "reference", device, torch.float32)
    before = Counter(launches)
    logits = logits_of(decoder, "triton", device, torch.float32)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    ran = launches - before
    num_calls = config.num_layers * len(STEPS)
    assert ran["rotate_and_write"] == ran["gated"] == num_calls
    assert ran["add_rms_norm"] == 2 * num_calls + len(STEPS), "the last norm of a step is a kernel's too"
    assert ran["write_kv"] == 0, "K and V are written by the kernel that rotates"


def test_bf16_is_no_further_from_float32_than_torchs_is(device: torch.device) -> None:
    exact = logits_of(decoder_of(QWEN3, device), "reference", device, torch.float32)
    decoder = decoder_of(QWEN3, device, torch.bfloat16)
    composed, fused = (logits_of(decoder, name, device, torch.bfloat16) for name in ("reference", "triton"))
    assert (fused - exact).any(), "hidden states should have been rounded"
    # The interpreter cuts bits off where a GPU rounds: twice the error.
    factor = 1.2 if device.type == "cuda" else 2.4
    assert (fused - exact).abs().mean() < factor * (composed - exact).abs().mean()


@pytest.mark.parametrize(("kv", "bound"), [("int8", 0.03), ("fp8", 0.08)])
def test_codes_for_keys_and_values(device: torch.device, kv: str, bound: float) -> None:
    kv_dtype = torch.int8 if kv == "int8" else fp8_dtype(device)
    if kv_dtype is None:
        pytest.skip("this device has no fp8")
    decoder = decoder_of(QWEN3, device)
    exact = logits_of(decoder, "reference", device, torch.float32)
    rounded = logits_of(decoder, "triton", device, kv_dtype)
    error = (rounded - exact).abs().mean() / exact.abs().mean()
    assert 1e-3 < error < bound


@pytest.mark.parametrize(
    "changes",
    [{"learned_positions": 64, "norm": "layer"}, {"gated_mlp": False}],
    ids=str,
)
def test_kinds_of_layers_without_kernels_are_put_together(device: torch.device, changes: dict[str, Any]) -> None:
    config = LLAMA.replace(**changes)
    assert not can_fuse(config)
    decoder = decoder_of(config, device)
    before = Counter(launches)
    logits = logits_of(decoder, "triton", device, torch.float32)
    assert isinstance(decoder._kernels_for(select_backend("triton", device)).layers, ComposedLayers)
    assert (launches - before)["rotate_and_write"] == 0
    torch.testing.assert_close(logits, logits_of(decoder, "reference", device, torch.float32), rtol=0, atol=1e-4)


def test_the_layers_follow_the_backend(device: torch.device) -> None:
    decoder = decoder_of(LLAMA, device)
    fused = decoder._kernels_for(select_backend("triton", device)).layers
    assert isinstance(fused, TritonLayers)
    assert decoder._kernels_for(select_backend("triton", device)).layers is fused
    assert isinstance(decoder._kernels_for(select_backend("reference", device)).layers, ComposedLayers)
