"""One layer's attention with random K and V in blocks of random order: what the checks and the timings run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pageframe.kernels.attention import AttentionPlan, kv_cache_shape
from pageframe.kernels.reference import ReferenceBackend
from pageframe.kernels.triton.backend import TritonBackend
from pageframe.kernels.triton.quantize import KV_LIMITS


@dataclass(frozen=True, slots=True)
class Step:
    """A `StepBatch` in which every request has as many new tokens: decode rows if that is one."""

    rows: npt.NDArray[np.int32]
    context_lens: npt.NDArray[np.int32]
    query_start: npt.NDArray[np.int32]
    num_decode: int

    @classmethod
    def of(cls, contexts: Sequence[int], new_tokens: int, first_row: int = 0) -> Step:
        count = len(contexts)
        return cls(
            rows=np.arange(first_row, first_row + count, dtype=np.int32),
            context_lens=np.array(contexts, dtype=np.int32),
            query_start=np.arange(count + 1, dtype=np.int32) * new_tokens,
            num_decode=count if new_tokens == 1 else 0,
        )


class Layer:
    """The cache of one layer, filled, with several sets of requests alike, each in blocks of its own.

    Args:
        contexts: of each request of a set.
        num_sets: sets.
        poison: blocks' slots past a context hold NaN, where the cache's dtype has one.

    Attributes:
        kv_cache, kv_scales: see `Backend.paged_attention`.
        tables: int32 [num_sets * len(contexts), blocks of the longest context].
    """

    def __init__(
        self,
        backend: TritonBackend,
        contexts: Sequence[int],
        *,
        num_sets: int,
        new_tokens: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        cache_dtype: torch.dtype,
        device: torch.device,
        poison: bool = False,
    ) -> None:
        self.backend = backend
        self.device = device
        self.contexts = list(contexts) * num_sets
        self.steps = [Step.of(contexts, new_tokens, index * len(contexts)) for index in range(num_sets)]
        blocks = [-(-context // block_size) for context in self.contexts]
        ids = iter(np.random.default_rng(1).permutation(sum(blocks)).tolist())
        table = np.zeros((len(blocks), max(blocks)), dtype=np.int32)
        for row, count in enumerate(blocks):
            table[row, :count] = [next(ids) for _ in range(count)]
        self.tables = torch.from_numpy(table).to(device)
        shape = kv_cache_shape(sum(blocks), num_kv_heads, block_size, head_dim)
        self.kv_cache, self.kv_scales = _random_cache(shape, cache_dtype, device)
        if poison and cache_dtype not in KV_LIMITS:
            self._poison(block_size)
        heads = (len(contexts) * new_tokens, num_heads, head_dim)
        self.queries = [torch.randn(heads, device=device).to(dtype) for _ in self.steps]
        self.plans = [self.plan(step) for step in self.steps]

    def plan(self, step: Step) -> AttentionPlan:
        """See `Backend.plan_attention`."""
        return self.backend.plan_attention(step, self.tables, self.kv_cache.shape[3])

    def attend(
        self, index: int, *, window: int | None = None, softcap: float | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attention of one set."""
        query = self.queries[index]
        return self.backend.paged_attention(
            query,
            self.kv_cache,
            self.plans[index],
            scale=query.shape[2] ** -0.5,
            window=window,
            softcap=softcap,
            kv_scales=self.kv_scales,
            out=out,
        )

    def expected(self, index: int, *, window: int | None = None, softcap: float | None = None) -> torch.Tensor:
        """What `attend` must give, by torch's operations in float32."""
        cache = self.kv_cache.float()
        if self.kv_scales is not None:
            cache *= self.kv_scales.unsqueeze(-1)
        reference, query = ReferenceBackend(), self.queries[index].float()
        plan = reference.plan_attention(self.steps[index], self.tables, cache.shape[3])
        return reference.paged_attention(
            query, cache, plan, scale=query.shape[2] ** -0.5, window=window, softcap=softcap
        )

    def gathered(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a set's requests, one after the other without gaps: each [sum of contexts, num_kv_heads,
        head_dim]."""
        step, block_size = self.steps[index], self.kv_cache.shape[3]
        kept = []
        for row, context in zip(step.rows.tolist(), step.context_lens.tolist(), strict=True):
            blocks = self.tables[row, : -(-context // block_size)].long()
            whole = self.kv_cache[blocks].permute(1, 0, 3, 2, 4).flatten(1, 2)
            kept.append(whole[:, :context])
        keys, values = torch.cat(kept, dim=1)
        return keys, values

    def _poison(self, block_size: int) -> None:
        for row, context in enumerate(self.contexts):
            if context % block_size:
                last = int(self.tables[row, context // block_size])
                self.kv_cache[last, :, :, context % block_size :] = float("nan")


def _random_cache(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if dtype not in KV_LIMITS:
        return torch.randn(shape, device=device, dtype=torch.bfloat16).to(dtype), None
    scales = torch.rand(shape[:-1], device=device) / KV_LIMITS[dtype] + 1e-3
    if dtype == torch.int8:
        return torch.randint(-127, 128, shape, device=device, dtype=dtype), scales
    codes = torch.randn(shape, device=device, dtype=torch.bfloat16) * 100
    # Not every torch saturates: what is beyond the limit would become NaN.
    return codes.clamp_(-KV_LIMITS[dtype], KV_LIMITS[dtype]).to(dtype), scales


def kv_bytes(contexts: Sequence[int], num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of K and V that attention over these contexts must read once: the floor of a decode step's layer."""
    per_slot = head_dim * dtype.itemsize + (4 if dtype in KV_LIMITS else 0)
    return 2 * sum(contexts) * num_kv_heads * per_slot
