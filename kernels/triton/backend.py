"""The Triton backend: which kernel runs for which part of a step.

Decode rows run on the Triton kernel, prefill chunks on the torch reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from pageframe.kernels.layout import StepLayouts
from pageframe.kernels.plan import (
    AttentionPlan,
    StepBatch,
    UnsupportedError,
    check_cache,
    check_no_scales,
    make_plan,
)
from pageframe.kernels.reference import ReferenceBackend
from pageframe.kernels.triton.decode import attend_decode
from pageframe.kernels.triton.write import write_kv

MIN_HEAD_DIM = 16
MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True, eq=False)
class TritonParts:
    """This backend's part of a plan: the resident tables, the longest decode context, and the prefill chunks."""

    tables: torch.Tensor
    max_decode_context: int
    prefill: StepLayouts | None


class TritonBackend:
    """Runs on NVIDIA and AMD GPUs, and on CPU tensors under TRITON_INTERPRET=1 (for tests: it is slow).

    Raises:
        UnsupportedError: the device is no GPU and the interpreter is off.
    """

    name = "triton"

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda" and not triton.knobs.runtime.interpret:
            raise UnsupportedError(f"device is {device.type!r}; the triton backend needs a GPU (cuda)")
        self._reference = ReferenceBackend()

    def check_supported(self, head_dim: int, block_size: int, dtype: torch.dtype) -> None:
        """See `Backend.check_supported`: head_dim must be a power of two from 16 to 256."""
        check_cache(block_size, dtype)
        if not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM or head_dim & (head_dim - 1):
            raise UnsupportedError(
                f"head_dim is {head_dim}; the triton backend needs a power of two from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
            )

    def plan_attention(self, batch: StepBatch, tables: torch.Tensor, block_size: int) -> AttentionPlan:
        """See `Backend.plan_attention`. Decode rows read the resident tables themselves, when the kernel runs."""
        prefill = None
        if batch.num_decode < len(batch.context_lens):
            prefill = StepLayouts(batch, tables, block_size, decode=False)
        max_context = int(batch.context_lens[: batch.num_decode].max(initial=0))
        return make_plan(batch, tables.device, block_size, TritonParts(tables, max_context, prefill))

    def write_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
        kv_scales: torch.Tensor | None = None,
    ) -> None:
        """See `Backend.write_kv`."""
        check_no_scales(self.name, kv_scales)
        write_kv(k, v, kv_cache, slots)

    def paged_attention(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        plan: AttentionPlan,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        kv_scales: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Backend.paged_attention`."""
        check_no_scales(self.name, kv_scales)
        parts = plan.parts
        assert isinstance(parts, TritonParts), "the plan was made by another backend"
        assert q.shape[0] == plan.num_tokens, f"q has {q.shape[0]} tokens, the plan {plan.num_tokens}"
        if out is None:
            out = torch.empty_like(q)
        if plan.num_decode:
            attend_decode(
                q,
                kv_cache,
                parts.tables,
                plan.rows[: plan.num_decode],
                plan.context_lens[: plan.num_decode],
                parts.max_decode_context,
                out,
                scale=scale,
                window=window,
                softcap=softcap,
            )
        if parts.prefill is not None:
            layout = parts.prefill.layout(kv_cache.shape[2], window)
            self._reference.attend_prefill(q, kv_cache, layout, scale, softcap, out)
        return out
