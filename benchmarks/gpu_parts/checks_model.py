"""What is around attention, on the device against float32: norm, rotation, activation, sampling, and graph replay."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from pageframe.benchmarks.gpu_parts.sizes import TOY
from pageframe.kernels.attention import kv_cache_shape
from pageframe.kernels.triton.activation import gated
from pageframe.kernels.triton.backend import TritonBackend
from pageframe.kernels.triton.norm import add_rms_norm
from pageframe.kernels.triton.rope import rotate_and_write
from pageframe.runtime.batch import Batch
from pageframe.runtime.block_table import TableUpdates
from pageframe.runtime.model_runner import ModelRunner
from pageframe.runtime.models.decoder import Decoder
from pageframe.runtime.sampler import Sampler
from pageframe.runtime.step_plan import SamplingBatch

EPS = 1e-6
Int64s = npt.NDArray[np.int64]
BF16 = torch.bfloat16


def _norm(device: torch.device) -> float:
    """The residual stream after the addition, and its norm."""
    hidden, delta = (torch.randn(5, 1000, device=device).to(BF16) for _ in range(2))
    weight = torch.randn(1000, device=device)
    added = (hidden.float() + delta.float()).to(BF16).float()
    expected = F.rms_norm(added, (1000,), weight, EPS)
    normed = add_rms_norm(hidden, delta, weight, EPS)
    return max(_error(hidden, added), _error(normed, expected))


def _activation(device: torch.device) -> float:
    gate_up = torch.randn(5, 2 * 1500, device=device).to(BF16)
    gate, up = gate_up.float().chunk(2, dim=1)
    expected = {
        "silu": F.silu(gate) * up,
        "gelu": F.gelu(gate) * up,
        "gelu_tanh": F.gelu(gate, approximate="tanh") * up,
    }
    return max(_error(gated(gate_up, name), result) for name, result in expected.items())


def _rotate(device: torch.device) -> float:
    """QK norm, rotation, and K and V in their slots."""
    num_tokens, num_heads, num_kv_heads, head_dim, block_size = 6, 8, 2, 128, 16
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, device=device).to(BF16)
    angles = torch.rand(64, head_dim // 2, device=device) * 6
    cos, sin = angles.cos(), angles.sin()
    positions = torch.randint(0, 64, (num_tokens,), device=device)
    slots = torch.randperm(3 * block_size, device=device)[:num_tokens]
    weight = torch.randn(num_heads + num_kv_heads, head_dim, device=device)
    kv_cache = torch.zeros(kv_cache_shape(3, num_kv_heads, block_size, head_dim), dtype=BF16, device=device)
    q = rotate_and_write(
        qkv.flatten(1), positions, cos, sin, slots, kv_cache, num_heads=num_heads, qk_norm=weight, eps=EPS
    )
    heads = F.rms_norm(qkv[:, : num_heads + num_kv_heads].float(), (head_dim,), eps=EPS) * weight
    first, second = heads.chunk(2, dim=2)
    cos, sin = cos[positions][:, None], sin[positions][:, None]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=2)
    written = kv_cache.permute(0, 3, 1, 2, 4).flatten(0, 1)[slots]
    errors = (
        _error(q, turned[:, :num_heads]),
        _error(written[:, 0], turned[:, num_heads:]),
        _error(written[:, 1], qkv[:, num_heads + num_kv_heads :]),
    )
    return max(errors)


def _sampling(device: torch.device) -> float:
    """The share of tokens that kernels draw otherwise than the host does, over all filters and none."""
    num_rows = 16
    logits = torch.randn(num_rows, 3000, device=device) * 3
    rows = np.arange(num_rows)
    batch = SamplingBatch(
        temperature=np.where(rows % 4 == 3, 0.0, 0.5 + rows / 8).astype(np.float32),
        top_k=np.where(rows % 3 == 1, 50, 0).astype(np.int32),
        top_p=np.where(rows % 2 == 1, 0.9, 1.0).astype(np.float32),
        min_p=np.where(rows % 5 == 2, 0.05, 0.0).astype(np.float32),
        seed=rows * 1_000_003,
        output_index=rows * 7,
        num_logprobs=np.where(rows % 4 == 1, 5, -1).astype(np.int32),
    )
    drawn = [Sampler(lambda hidden: hidden, on_device=there).sample(logits, batch).token_ids for there in (True, False)]
    return float(np.mean(drawn[0] != drawn[1]))


def _replay_exact(device: torch.device) -> float:
    """Decode steps of as many rows as a bucket has: the same bits with graphs and without."""
    return _replay(device, num_requests=2)


def _replay_padded(device: torch.device) -> float:
    """Decode steps that fill a bucket in part: products of other sizes may round differently."""
    return _replay(device, num_requests=3)


def _replay(device: torch.device, num_requests: int) -> float:
    """A step of prompts, then decode steps over them: the largest error of a step."""
    model = next(iter(TOY.models.values()))
    decoder = Decoder.random(model, storage_dtype=BF16, compute_dtype=BF16, device=device, seed=0)
    runners = [
        ModelRunner(
            decoder,
            TritonBackend(device),
            num_blocks=4 * num_requests,
            block_size=16,
            max_num_requests=num_requests,
            max_blocks=4,
            kv_dtype=BF16,
            device=device,
            graphs=graphs,
        )
        for graphs in (False, True)
    ]
    lengths = np.arange(num_requests) * 7 + 5
    errors = []
    for step in range(3):
        new = lengths if step == 0 else np.ones_like(lengths)
        batch = _batch(lengths + step, new, model.vocab_size, updates=step == 0)
        plain, replayed = (runner.forward(batch) for runner in runners)
        errors.append(_error(replayed, plain))
    return max(errors)


def _batch(contexts: Int64s, new: Int64s, vocab_size: int, *, updates: bool) -> Batch:
    """A step of requests in rows 0, 1, …, each with 4 blocks of 16, whose last `new` tokens are computed."""
    count = len(contexts)
    rows = np.repeat(np.arange(count), new)
    positions = np.concatenate(
        [np.arange(context - length, context) for context, length in zip(contexts, new, strict=True)]
    )
    query_start = np.concatenate(([0], np.cumsum(new))).astype(np.int32)
    # Row r's block i is number i * count + r: neighbours in a row are no neighbours in the pool.
    entries = [(row, index, index * count + row) for row in range(count) for index in range(4)]
    return Batch(
        token_ids=(positions * 7 + rows) % vocab_size,
        positions=positions,
        slots=(positions // 16 * count + rows) * 16 + positions % 16,
        query_start=query_start,
        context_lens=contexts.astype(np.int32),
        rows=np.arange(count, dtype=np.int32),
        num_decode=count if int(new.max()) == 1 else 0,
        wanted=query_start[1:].astype(np.int64) - 1,
        sampling=SamplingBatch.empty(),
        table_updates=TableUpdates(entries if updates else []),
    )


def _error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    return float((ours.double() - expected.double()).norm() / expected.double().norm())


#: Name, largest error, and what measures it on a device.
MODEL_CHECKS: tuple[tuple[str, float, Callable[[torch.device], float]], ...] = (
    ("norm", 5e-3, _norm),
    ("activation", 5e-3, _activation),
    ("rotate and write", 5e-3, _rotate),
    ("sampling", 0.0, _sampling),
    ("graph replay, bucket full", 0.0, _replay_exact),
    ("graph replay, padded", 1e-2, _replay_padded),
)
