"""What is around attention, on the device against float32: norm, rotation, activation; and the list of all such checks,
of which sampling is in checks_sampling.py and graph replay in checks_replay.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from pageframe.benchmarks.gpu_parts.checks_replay import replay_full, replay_padded
from pageframe.benchmarks.gpu_parts.checks_sampling import logprobs, penalized_logits, tokens_that_differ
from pageframe.benchmarks.gpu_parts.sizes import cache_dtype
from pageframe.kernels.attention import kv_cache_shape
from pageframe.kernels.triton.activation import gated
from pageframe.kernels.triton.norm import add_rms_norm
from pageframe.kernels.triton.quantize import KV_LIMITS
from pageframe.kernels.triton.rope import rotate_and_write

EPS = 1e-6
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


def _codes(kv_dtype: str, device: torch.device) -> float | None:
    """The share of codes and scales, written by the kernel that rotates too, that are not the host's."""
    dtype = cache_dtype(kv_dtype, device)
    if dtype is None:
        return None
    num_tokens, num_heads, num_kv_heads, head_dim, block_size = 33, 8, 2, 128, 16
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, device=device).to(BF16)
    # Some heads have small numbers beside a large one, or none at all: codes of every size, and a scale of 0.
    qkv[::3] *= torch.rand(head_dim, device=device) ** 8
    qkv[5] = 0
    angles = torch.rand(64, head_dim // 2) * 6
    cos, sin = angles.cos(), angles.sin()
    positions = torch.randint(0, 64, (num_tokens,))
    slots = torch.randperm(3 * block_size)[:num_tokens]
    shape = kv_cache_shape(3, num_kv_heads, block_size, head_dim)
    kv_cache, scales = torch.zeros(shape, device=device).to(dtype), torch.zeros(shape[:-1], device=device)
    rotate_and_write(
        qkv.flatten(1),
        positions.to(device),
        cos.to(device),
        sin.to(device),
        slots.to(device),
        kv_cache,
        scales,
        num_heads=num_heads,
    )
    numbers = qkv.cpu().float()[:, num_heads:]
    first, second = numbers[:, :num_kv_heads].chunk(2, dim=2)
    cos, sin = cos[positions][:, None], sin[positions][:, None]
    numbers[:, :num_kv_heads] = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=2)
    expected_codes, expected_scales = _nearest_codes(numbers, dtype)
    # [slots, 2 * num_kv_heads, …]: the heads of v follow those of k, as in qkv.
    codes = kv_cache.cpu().float().permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)[slots]
    found_scales = scales.cpu().permute(0, 3, 1, 2).flatten(2, 3).flatten(0, 1)[slots]
    wrong = int((codes != expected_codes.float()).sum() + (found_scales != expected_scales).sum())
    return wrong / (codes.numel() + found_scales.numel())


def _nearest_codes(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Of float32 rows [..., head_dim]: codes, rounded to the nearest by torch, and scales, in the same arithmetic."""
    limit = torch.tensor(KV_LIMITS[dtype])
    largest = rows.abs().amax(dim=-1)
    scaled = rows * (limit / largest.clamp(min=1e-30)).unsqueeze(-1)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), largest / limit


def _error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    return float((ours.double() - expected.double()).norm() / expected.double().norm())


#: Name, largest error, and what measures it on a device: None where it has no such dtype.
MODEL_CHECKS: tuple[tuple[str, float, Callable[[torch.device], float | None]], ...] = (
    ("norm", 5e-3, _norm),
    ("activation", 5e-3, _activation),
    ("rotate and write", 5e-3, _rotate),
    ("rotate and write, int8 codes", 0.0, partial(_codes, "int8")),
    ("rotate and write, fp8 codes", 0.0, partial(_codes, "fp8")),
    ("sampling", 0.0, tokens_that_differ),
    ("penalties", 0.0, penalized_logits),
    ("logprobs", 1e-4, logprobs),
    ("graph replay, bucket full", 0.0, replay_full),
    ("graph replay, padded", 0.0, replay_padded),
)
