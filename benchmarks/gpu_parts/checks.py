"""Every kernel on the device against float32: attention and writing here, what is around them in checks_model.py.

The error is ||ours - expected|| / ||expected||. Inputs are random; what must not be read is NaN, and what must be
written holds NaN before. A NaN in a result is never within a limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from pageframe.benchmarks.gpu_parts.checks_model import MODEL_CHECKS
from pageframe.benchmarks.gpu_parts.layer import Layer
from pageframe.benchmarks.gpu_parts.results import FAILED, NOT_MEASURED, OK, Results, Row, measuring
from pageframe.benchmarks.gpu_parts.sizes import Sizes, cache_dtype
from pageframe.kernels.attention import kv_cache_shape
from pageframe.kernels.triton.backend import TritonBackend
from pageframe.kernels.triton.quantize import KV_LIMITS

PART = "check"
#: By the dtype of the results, and of the weights that multiply V.
LIMITS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True, slots=True)
class Variant:
    """An attention to check, as decode rows and as chunks.

    Args:
        cache: "int8", "fp8", or "" for the queries' dtype.
    """

    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    cache: str = ""
    block_size: int = 16
    group: int = 4
    window: int | None = None
    softcap: float | None = None

    def __str__(self) -> str:
        stored = self.cache or NAMES[self.dtype]
        if self.cache and self.dtype != torch.bfloat16:
            stored = f"{NAMES[self.dtype]} over {self.cache}"
        words = [str(self.head_dim), stored, f"block {self.block_size}", f"group {self.group}"]
        masks = [f"window {self.window}"] * (self.window is not None) + ["cap"] * (self.softcap is not None)
        return ", ".join(words + masks)


VARIANTS = (
    Variant(128),
    Variant(64, block_size=128, group=1),
    Variant(128, dtype=torch.float16, window=300, softcap=30.0),
    Variant(128, dtype=torch.float32, group=7),
    Variant(128, cache="int8", block_size=1),
    Variant(128, cache="fp8"),
    Variant(128, dtype=torch.float16, cache="int8"),
    Variant(80, window=100),
    Variant(96, cache="int8", softcap=30.0, group=8),
    Variant(256, group=2),
)
TOY_VARIANTS = (
    Variant(16, block_size=4),
    Variant(80, dtype=torch.float32, window=10, softcap=30.0, group=1),
    Variant(32, cache="int8"),
    Variant(32, cache="fp8", group=3),
)
#: Contexts of decode rows; contexts of chunks, and the tokens of each chunk.
CONTEXTS = (1, 17, 700, 4097, 0, 15_000)
CHUNKS, CHUNK_TOKENS = (700, 4097, 333), 333
TOY_CONTEXTS = (1, 17, 0, 40)
TOY_CHUNKS, TOY_CHUNK_TOKENS = (17, 40, 11), 11


def run(results: Results, sizes: Sizes, device: torch.device) -> None:
    """A row for each check. One that fails does not keep the rest from running."""
    checks: list[Check] = [
        *_attention_checks(device, toy=device.type != "cuda"),
        *_write_checks(device),
        *((name, limit, partial(check, device)) for name, limit, check in MODEL_CHECKS),
    ]
    for name, limit, check in checks:
        with measuring(results, PART, name):
            results.add(_row(name, limit, check()))


def _row(name: str, limit: float, error: float | None) -> Row:
    if error is None:
        return Row(PART, name, verdict=NOT_MEASURED, note="this device has no such dtype")
    verdict = OK if error <= limit else FAILED  # a NaN fails
    return Row(PART, name, f"{error:.1e}", verdict=verdict, note=f"at most {limit:g}", numbers={"error": error})


Check = tuple[str, float, Callable[[], float | None]]


def _attention_checks(device: torch.device, toy: bool) -> Iterator[Check]:
    chunks, chunk_tokens = (TOY_CHUNKS, TOY_CHUNK_TOKENS) if toy else (CHUNKS, CHUNK_TOKENS)
    kinds = (("decode", TOY_CONTEXTS if toy else CONTEXTS, 1), ("prefill", chunks, chunk_tokens))
    for variant in TOY_VARIANTS if toy else VARIANTS:
        for kind, contexts, new_tokens in kinds:
            yield (
                f"{kind} {variant}",
                LIMITS[variant.dtype],
                partial(_attend, variant, contexts, new_tokens, device),
            )


def _attend(variant: Variant, contexts: tuple[int, ...], new_tokens: int, device: torch.device) -> float | None:
    dtype = cache_dtype(variant.cache, device) if variant.cache else variant.dtype
    if dtype is None:
        return None
    backend = TritonBackend(device)
    backend.check_supported(variant.head_dim, variant.block_size, dtype)
    layer = Layer(
        backend,
        contexts,
        num_sets=1,
        new_tokens=new_tokens,
        num_heads=2 * variant.group,
        num_kv_heads=2,
        head_dim=variant.head_dim,
        block_size=variant.block_size,
        dtype=variant.dtype,
        cache_dtype=dtype,
        device=device,
        poison=True,
    )
    out = torch.full_like(layer.queries[0], float("nan"))
    layer.attend(0, window=variant.window, softcap=variant.softcap, out=out)
    return relative_error(out, layer.expected(0, window=variant.window, softcap=variant.softcap))


def _write_checks(device: torch.device) -> Iterator[Check]:
    for cache, limit in (("", 0.0), ("int8", 1e-2), ("fp8", 5e-2)):
        yield f"write {cache or 'bf16'}", limit, partial(_write, cache, device)


def _write(cache: str, device: torch.device) -> float | None:
    """Random K and V into slots of random order, two tokens into none: what was written, and that no other slot was."""
    dtype = cache_dtype(cache, device)
    if dtype is None:
        return None
    num_tokens, num_kv_heads, head_dim, block_size, num_blocks = 30, 2, 128, 16, 4
    k, v = (torch.randn(num_tokens, num_kv_heads, head_dim, device=device).to(torch.bfloat16) for _ in range(2))
    slots = torch.randperm(num_blocks * block_size, device=device)[:num_tokens]
    slots[[3, 11]] = -1
    shape = kv_cache_shape(num_blocks, num_kv_heads, block_size, head_dim)
    kv_cache = torch.full(shape, 3.0, device=device).to(dtype)
    scales = torch.full(shape[:-1], 5.0, device=device) if dtype in KV_LIMITS else None
    TritonBackend(device).write_kv(k, v, kv_cache, slots, scales)
    expected = torch.full(shape, 3.0 if scales is None else 15.0, device=device)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // block_size, :, :, slot % block_size] = torch.stack((k[token], v[token])).float()
    written = kv_cache.float() if scales is None else kv_cache.float() * scales.unsqueeze(-1)
    return relative_error(written, expected)


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """||ours - expected|| / ||expected||."""
    return float((ours.double() - expected.double()).norm() / expected.double().norm())
