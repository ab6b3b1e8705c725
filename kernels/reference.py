"""Paged attention in plain torch: what other kernels are compared with, and what serves where none is built.

All arithmetic is float32, whatever the cache's dtype. Slots that are not live (a block's unwritten tail, a context
before the window) may hold NaN and never reach a result. Nothing here knows where the tables come from.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from pageframe.kernels.plan import AttentionPlan, StepBatch, check_cache, make_plan

#: Most slots x KV heads of one decode group: with head_dim 64, K and V are then 8 MiB in float32. More at a time
#: falls out of the CPU's caches between the gather, the two products and the next layer.
MAX_GROUP_ROWS = 1 << 14


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
        return make_plan(batch, tables.device, block_size, ReferenceParts(batch, tables, block_size))

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
        """See `Backend.write_kv`."""
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
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Backend.paged_attention`."""
        assert isinstance(plan.parts, ReferenceParts), "the plan was made by another backend"
        assert q.shape[0] == plan.num_tokens, f"q has {q.shape[0]} tokens, the plan {plan.num_tokens}"
        if out is None:
            out = torch.empty_like(q)
        layout = plan.parts.layout(kv_cache.shape[2], window)
        for group in layout.decode:
            self._attend_decode(q, kv_cache, group, scale, softcap, out)
        self.attend_prefill(q, kv_cache, layout, scale, softcap, out)
        if layout.empty_tokens is not None:
            out.index_fill_(0, layout.empty_tokens, 0)
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
        """Fill `out` at the tokens of the prefill chunks, one request after the other."""
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
        bias = _causal_bias(num_tokens, keys.shape[1], None, keys.device)
    scores = scores.view(num_heads, num_tokens, -1).add_(bias)
    weights = torch.softmax(scores, dim=-1).view(keys.shape[0], -1, keys.shape[1])
    return torch.bmm(weights, values).view(num_heads, num_tokens, head_dim)


def _causal_bias(num_tokens: int, num_slots: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Float32 [num_tokens, num_slots]: 0 where a query sees a slot, else -inf; the last query is at the last slot."""
    query = torch.arange(num_slots - num_tokens, num_slots, device=device)[:, None]
    slot = torch.arange(num_slots, device=device)[None, :]
    hidden = slot > query
    if window is not None:
        hidden |= slot <= query - window
    return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -torch.inf)


@dataclass(frozen=True, slots=True, eq=False)
class DecodeGroup:
    """Decode rows of about the same context, attended together.

    Args:
        tokens: which tokens of the step these are, in the group's order: a slice where they are contiguous.
        gather_index: int64 [2 * num_requests * num_kv_heads * blocks], see `_head_index`.
        dead_slots: int64, which gathered slots of head_dim numbers to overwrite with 0; None for none.
        bias: float32 [num_requests * num_kv_heads, 1, slots], 0 for a visible slot and -inf for any other.
    """

    tokens: slice | torch.Tensor
    num_requests: int
    gather_index: torch.Tensor
    dead_slots: torch.Tensor | None
    bias: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PrefillChunk:
    """The queries of one request and what they see.

    Args:
        tokens: which tokens of the step.
        gather_index: int64 [2 * num_kv_heads * blocks], see `_head_index`.
        live: which gathered slots the chunk sees.
        bias: float32 [chunk tokens, live slots]; None where the chunk is the whole context: plain causal.
    """

    tokens: slice
    gather_index: torch.Tensor
    live: slice
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """A step as the layers with one number of KV heads and one window see it.

    Args:
        empty_tokens: int64, tokens of requests with context 0; None for none.
    """

    decode: list[DecodeGroup]
    prefill: list[PrefillChunk]
    empty_tokens: torch.Tensor | None


@dataclass(slots=True, eq=False)
class ReferenceParts:
    """The host's view of a step, and the layouts made of it when the first layer that needs one asks."""

    batch: StepBatch
    tables: torch.Tensor
    block_size: int
    _layouts: dict[tuple[int, int | None], Layout] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Keep only the entries this step may follow, [num_requests, blocks of the longest context] int64."""
        context_lens = self.batch.context_lens
        widest = -(-int(context_lens.max(initial=0)) // self.block_size)
        rows = torch.from_numpy(np.where(context_lens > 0, self.batch.rows, 0)).to(self.tables.device)
        self.tables = self.tables[:, :widest].index_select(0, rows).to(torch.int64)

    def layout(self, num_kv_heads: int, window: int | None, *, decode: bool = True) -> Layout:
        """The step's layout for one kind of layer, made at its first use. `decode=False` leaves the groups out."""
        key = (num_kv_heads, window)
        layout = self._layouts.get(key)
        if layout is None:
            groups = self._decode_groups(num_kv_heads, window) if decode else []
            layout = Layout(groups, self._prefill_chunks(num_kv_heads, window), self._empty_tokens())
            self._layouts[key] = layout
        return layout

    def _decode_groups(self, num_kv_heads: int, window: int | None) -> list[DecodeGroup]:
        context_lens = self.batch.context_lens[: self.batch.num_decode].astype(np.int64)
        visible_from = np.zeros_like(context_lens) if window is None else np.maximum(context_lens - window, 0)
        first_block = visible_from // self.block_size
        num_blocks = -(-context_lens // self.block_size) - first_block
        padded_blocks = _size_class(num_blocks)
        groups = []
        for width in np.unique(padded_blocks[context_lens > 0]).tolist():
            members = np.flatnonzero((padded_blocks == width) & (context_lens > 0))
            step = max(1, MAX_GROUP_ROWS // (width * self.block_size * num_kv_heads))
            for start in range(0, len(members), step):
                part = members[start : start + step]
                ranges = np.stack((first_block[part], num_blocks[part], visible_from[part], context_lens[part]))
                groups.append(self._decode_group(part, width, ranges, num_kv_heads))
        return groups

    def _decode_group(
        self, members: npt.NDArray[np.int64], width: int, ranges: npt.NDArray[np.int64], num_kv_heads: int
    ) -> DecodeGroup:
        """The group of these decode requests, each padded to `width` blocks.

        Args:
            ranges: [4, members]: first visible block, number of visible blocks, first visible position, context.
        """
        device, block_size, num = self.tables.device, self.block_size, len(members)
        first, count, visible_from, context = torch.from_numpy(ranges).to(device)[:, :, None]
        column = torch.arange(width, device=device)
        # A padding block is read and masked, so it must be a block without dead slots: the second one is, since
        # only contexts of three blocks or more are ever padded.
        column = torch.where(column < count, column, 1) + first
        requests = torch.from_numpy(members).to(device)
        block_ids = self.tables[requests[:, None], column]

        slot = torch.arange(width * block_size, device=device)
        position = first * block_size + slot
        hidden = (position < visible_from) | (position >= context)
        bias = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -torch.inf)
        bias = bias[:, None, :].expand(num, num_kv_heads, -1).reshape(num * num_kv_heads, 1, -1)

        # Positions as gathered, [2, num, num_kv_heads, slots].
        dead = (hidden & (slot < count * block_size)).nonzero()
        heads = torch.arange(2 * num_kv_heads, device=device).view(2, 1, num_kv_heads)
        which, head = heads // num_kv_heads, heads % num_kv_heads
        request, dead_slot = dead[:, 0, None], dead[:, 1, None]
        dead_slots = ((which * num + request) * num_kv_heads + head) * slot.numel() + dead_slot
        return DecodeGroup(
            tokens=_as_slice(members, requests),
            num_requests=num,
            gather_index=_head_index(block_ids, num_kv_heads),
            dead_slots=dead_slots.flatten() if len(dead) else None,
            bias=bias,
        )

    def _prefill_chunks(self, num_kv_heads: int, window: int | None) -> list[PrefillChunk]:
        chunks = []
        for request in range(self.batch.num_decode, len(self.batch.context_lens)):
            begin, end = (int(start) for start in self.batch.query_start[request : request + 2])
            context = int(self.batch.context_lens[request])
            if context == 0 or begin == end:
                continue
            start = context - (end - begin)
            assert start >= 0, f"request {request} has {end - begin} query tokens and a context of {context}"
            visible_from = 0 if window is None else max(0, start - window + 1)
            first_block = visible_from // self.block_size
            block_ids = self.tables[request, first_block : -(-context // self.block_size)]
            num_live = context - visible_from
            plain = start == 0 and (window is None or window >= context)
            bias = None if plain else _causal_bias(end - begin, num_live, window, self.tables.device)
            skipped = visible_from - first_block * self.block_size
            chunks.append(
                PrefillChunk(
                    tokens=slice(begin, end),
                    gather_index=_head_index(block_ids[None], num_kv_heads),
                    live=slice(skipped, skipped + num_live),
                    bias=bias,
                )
            )
        return chunks

    def _empty_tokens(self) -> torch.Tensor | None:
        empty = np.repeat(self.batch.context_lens == 0, np.diff(self.batch.query_start))
        if not empty.any():
            return None
        return torch.from_numpy(np.flatnonzero(empty)).to(self.tables.device)


def _size_class(num_blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Blocks to pad to: the next of 1, 2, 3, 4, 6, 8, 12, 16, 24, ….

    It depends on the request's own context alone, so that its sums do not depend on its neighbours; at most a
    third of what is gathered is padding.
    """
    power = 2 ** np.ceil(np.log2(np.maximum(num_blocks, 1))).astype(np.int64)
    smaller = power // 4 * 3
    return np.where((num_blocks <= smaller) & (power >= 4), smaller, power)


def _head_index(block_ids: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Of block_ids [n, blocks]: int64, flat [2, n, num_kv_heads, blocks], rows of the cache seen one head a row."""
    heads = torch.arange(2 * num_kv_heads, device=block_ids.device).view(2, 1, num_kv_heads, 1)
    return (block_ids[None, :, None, :] * (2 * num_kv_heads) + heads).flatten()


def _as_slice(members: npt.NDArray[np.int64], requests: torch.Tensor) -> slice | torch.Tensor:
    """A slice for tokens in a row, which spares a gather and a scatter per layer; else their ids."""
    first, last = int(members[0]), int(members[-1])
    return slice(first, last + 1) if last - first + 1 == len(members) else requests
