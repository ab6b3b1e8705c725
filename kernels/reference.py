"""Paged attention in plain torch: what other kernels are compared with, and what serves where none is built.

All arithmetic is float32, whatever the cache's dtype. Slots that are not live (a block's unwritten tail, a context
before the window) may hold NaN and never reach a result. Nothing here knows where the tables come from.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pageframe.kernels.layout import DecodeGroup, Layout, StepLayouts, causal_bias
from pageframe.kernels.plan import AttentionPlan, StepBatch, check_cache, check_no_scales, make_plan


class ReferenceBackend:
    """Runs on any device torch has. Not for two threads at once: layers and steps share one scratch buffer."""

    name = "reference"

    def __init__(self) -> None:
        self._scratch: dict[torch.dtype, torch.Tensor] = {}

    def check_supported(self, head_dim: int, block_size: int, dtype: torch.dtype) -> None:
        """See `Backend.check_supported`; any head_dim will do."""
        check_cache(block_size, dtype)

    def plan_attention(self, batch: StepBatch, tables: torch.Tensor, block_size: int) -> AttentionPlan:
        """See `Backend.plan_attention`. The table entries are copied here: later changes do not reach this plan."""
        return make_plan(batch, tables.device, block_size, StepLayouts(batch, tables, block_size))

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
        if slots.numel() == 0:
            return
        kv = torch.stack((k, v), dim=1).to(kv_cache.dtype)
        if int(slots.min()) < 0:
            written = slots >= 0
            slots, kv = slots[written], kv[written]
        block_size = kv_cache.shape[3]
        blocks = slots >> (block_size.bit_length() - 1)
        offsets = slots & (block_size - 1)
        # [num_blocks, block_size, 2, num_kv_heads, head_dim]: one slot is then two leading indices away.
        kv_cache.permute(0, 3, 1, 2, 4)[blocks, offsets] = kv

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
        assert isinstance(plan.parts, StepLayouts), "the plan was made by another backend"
        assert q.shape[0] == plan.num_tokens, f"q has {q.shape[0]} tokens, the plan {plan.num_tokens}"
        if out is None:
            out = torch.empty_like(q)
        layout = plan.parts.layout(kv_cache.shape[2], window)
        for group in layout.decode:
            self._attend_decode(q, kv_cache, group, scale, softcap, out)
        self.attend_prefill(q, kv_cache, layout, scale, softcap, out)
        return out

    def attend_prefill(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        layout: Layout,
        scale: float,
        softcap: float | None,
        out: torch.Tensor,
    ) -> None:
        """Fill `out` at the tokens of the prefill chunks, one request after the other, and at those without context."""
        for chunk in layout.prefill:
            keys, values = self._gather(kv_cache, chunk.gather_index, 1)[:, :, chunk.live]
            queries = q[chunk.tokens].to(torch.float32).transpose(0, 1)
            if softcap is None:
                attended = F.scaled_dot_product_attention(
                    queries[None],
                    keys[None],
                    values[None],
                    attn_mask=chunk.bias,
                    is_causal=chunk.bias is None,
                    scale=scale,
                    enable_gqa=True,
                )[0]
            else:
                attended = _attend_softcapped(queries, keys, values, chunk.bias, scale, softcap)
            out[chunk.tokens] = attended.transpose(0, 1).to(out.dtype)
        if layout.empty_tokens is not None:
            out.index_fill_(0, layout.empty_tokens, 0)

    def _attend_decode(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        group: DecodeGroup,
        scale: float,
        softcap: float | None,
        out: torch.Tensor,
    ) -> None:
        """Fill `out` at the tokens of one group. The query heads of a KV head are the rows of one product."""
        gathered = self._gather(kv_cache, group.gather_index, group.num_requests)
        if group.dead_slots is not None:
            # Adding -inf to a NaN score, or multiplying a NaN value by 0, would leave a NaN.
            gathered.view(-1, gathered.shape[3]).index_fill_(0, group.dead_slots, 0)
        keys, values = gathered
        queries = q[group.tokens].to(torch.float32).reshape(keys.shape[0], -1, keys.shape[2])
        if softcap is None:
            scores = torch.baddbmm(group.bias, queries, keys.mT, alpha=scale)
        else:
            scores = _softcap(torch.bmm(queries, keys.mT), scale, softcap).add_(group.bias)
        attended = torch.bmm(torch.softmax(scores, dim=-1), values)
        out[group.tokens] = attended.view(-1, *out.shape[1:]).to(out.dtype)

    def _gather(self, kv_cache: torch.Tensor, index: torch.Tensor, num_requests: int) -> torch.Tensor:
        """K and V, float32 [2, num_requests * num_kv_heads, slots, head_dim], valid until the next gather.

        One index is one block of one head, contiguous in the cache, so what is gathered needs no transposition.
        """
        _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
        heads = kv_cache.view(-1, block_size * head_dim)
        shape = (index.shape[0], block_size * head_dim)
        gathered = self._buffer(shape, kv_cache.dtype, kv_cache.device)
        torch.index_select(heads, 0, index, out=gathered)
        if kv_cache.dtype != torch.float32:
            gathered = self._buffer(shape, torch.float32, kv_cache.device).copy_(gathered)
        return gathered.view(2, num_requests * num_kv_heads, -1, head_dim)

    def _buffer(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Scratch memory that grows and is used again: fresh memory costs more in page faults than the copy into it."""
        size = shape[0] * shape[1]
        buffer = self._scratch.get(dtype)
        if buffer is None or buffer.numel() < size or buffer.device != device:
            buffer = self._scratch[dtype] = torch.empty(size, dtype=dtype, device=device)
        return buffer[:size].view(shape)


def _softcap(products: torch.Tensor, scale: float, softcap: float) -> torch.Tensor:
    return products.mul_(scale / softcap).tanh_().mul_(softcap)


def _attend_softcapped(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """One chunk's attention: queries [num_heads, tokens, head_dim], keys, values [num_kv_heads, slots, head_dim]."""
    num_heads, num_tokens, head_dim = queries.shape
    packed = queries.reshape(keys.shape[0], -1, head_dim)
    scores = _softcap(torch.bmm(packed, keys.mT), scale, softcap)
    if bias is None:
        bias = causal_bias(num_tokens, keys.shape[1], None, keys.device)
    scores = scores.view(num_heads, num_tokens, -1).add_(bias)
    weights = torch.softmax(scores, dim=-1).view(keys.shape[0], -1, keys.shape[1])
    return torch.bmm(weights, values).view(num_heads, num_tokens, head_dim)
