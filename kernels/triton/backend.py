"""The Triton backend: which kernel runs for which part of a step.

Decode rows and prefill chunks of one step run each on a kernel of their own.
"""

from __future__ import annotations

import torch
import triton

from pageframe.kernels.plan import AttentionPlan, StepBatch, UnsupportedError, check_cache
from pageframe.kernels.triton.decode import attend_decode
from pageframe.kernels.triton.dtypes import fp8_dtype
from pageframe.kernels.triton.plan import TritonParts, plan_step, update_plan
from pageframe.kernels.triton.prefill import attend_prefill
from pageframe.kernels.triton.quantize import KV_LIMITS
from pageframe.kernels.triton.write import write_kv

HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)
#: Of every device; fp8 joins them where a device has it.
CACHE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int8)


class TritonBackend:
    """Runs on NVIDIA and AMD GPUs, and on CPU tensors under TRITON_INTERPRET=1 (for tests: it is slow).

    K and V may be numbers, or codes with scales: int8, and fp8 where the device converts it (from compute capability
    8.9 on, and on gfx942 in AMD's own format).

    Raises:
        UnsupportedError: the device is no GPU and the interpreter is off.
    """

    name = "triton"

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda" and not triton.knobs.runtime.interpret:
            raise UnsupportedError(f"device is {device.type!r}; the triton backend needs a GPU (cuda)")
        self._device = device

    def check_supported(self, head_dim: int, block_size: int, dtype: torch.dtype) -> None:
        """See `Backend.check_supported`: the sizes of HEAD_DIMS, the dtypes of CACHE_DTYPES and the device's fp8."""
        fp8 = fp8_dtype(self._device)
        check_cache(block_size, dtype, CACHE_DTYPES if fp8 is None else (*CACHE_DTYPES, fp8))
        if head_dim not in HEAD_DIMS:
            supported = ", ".join(str(size) for size in HEAD_DIMS)
            raise UnsupportedError(f"head_dim is {head_dim}; the triton backend has {supported}")

    def plan_attention(self, batch: StepBatch, tables: torch.Tensor, block_size: int) -> AttentionPlan:
        """See `Backend.plan_attention`. The resident tables are read when the kernels run."""
        return plan_step(batch, tables, block_size)

    def update_plan(self, plan: AttentionPlan, batch: StepBatch) -> None:
        """Make a plan that a graph was captured with, of decode rows alone, the plan of `batch`, before a replay.

        Args:
            plan: made by `plan_attention`; its tensors keep their memory. Rows past the batch's get context 0.
            batch: decode rows alone, at most as many as the plan has.
        """
        update_plan(plan, batch)

    def write_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
        kv_scales: torch.Tensor | None = None,
    ) -> None:
        """See `Backend.write_kv`. Codes and their scale: see `quantize_rows`."""
        _check_scales(kv_cache, kv_scales)
        write_kv(k, v, kv_cache, slots, kv_scales)

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
        _check_scales(kv_cache, kv_scales)
        parts = plan.parts
        assert isinstance(parts, TritonParts), "the plan was made by another backend"
        assert q.shape[0] == plan.num_tokens, f"q has {q.shape[0]} tokens, the plan {plan.num_tokens}"
        assert kv_cache.shape[3] == plan.block_size, f"blocks of {kv_cache.shape[3]}, the plan's {plan.block_size}"
        if out is None:
            out = torch.empty_like(q)
        if plan.num_decode:
            attend_decode(
                q,
                kv_cache,
                parts.tables,
                plan.rows[: plan.num_decode],
                plan.context_lens[: plan.num_decode],
                out,
                scale=scale,
                window=window,
                softcap=softcap,
                kv_scales=kv_scales,
            )
        if parts.prefill is not None:
            attend_prefill(
                q,
                kv_cache,
                parts.tables,
                plan,
                parts.prefill,
                out,
                scale=scale,
                window=window,
                softcap=softcap,
                kv_scales=kv_scales,
            )
        return out


def _check_scales(kv_cache: torch.Tensor, kv_scales: torch.Tensor | None) -> None:
    has_codes = kv_cache.dtype in KV_LIMITS
    assert has_codes == (kv_scales is not None), f"K and V are {kv_cache.dtype}; scales come with codes, and only then"
    assert kv_scales is None or kv_scales.shape == kv_cache.shape[:4], f"scales of shape {tuple(kv_scales.shape)}"
