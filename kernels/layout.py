"""Which slots of the cache the torch attention gathers for each request of a step, and which of them count.

Made once per step for each kind of layer (number of KV heads, window) and used by all layers of that kind. Index
arithmetic on block tables only: no K/V is read here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from pageframe.kernels.plan import StepBatch

Ints = npt.NDArray[np.int64]

#: Most slots x KV heads of one decode group: with head_dim 64, K and V are then 8 MiB in float32. More at a time
#: falls out of the CPU's caches between the gather, the two products and the next layer.
MAX_GROUP_ROWS = 1 << 14


@dataclass(frozen=True, slots=True, eq=False)
class DecodeGroup:
    """Decode rows of about the same context, attended together.

    Args:
        tokens: which tokens of the step these are, in the group's order: a slice where they are contiguous.
        gather_index: int64, flat [2, num_requests, num_kv_heads, blocks], see `_head_index`.
        dead_slots: int64, flat positions in [2, num_requests, num_kv_heads, slots] of gathered slots that may hold
            anything and are to be overwritten with 0; None for none.
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
        gather_index: int64, flat [2, 1, num_kv_heads, blocks], see `_head_index`.
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
class StepLayouts:
    """The layouts of one step, each made when the first layer that needs it asks.

    Args:
        tables: the resident block tables. Only the entries that this step may follow are kept, as int64
            [num_requests, blocks of the longest context].
        decode: whether decode rows are wanted at all.
    """

    batch: StepBatch
    tables: torch.Tensor
    block_size: int
    decode: bool = True
    _layouts: dict[tuple[int, int | None], Layout] = field(default_factory=dict)

    def __post_init__(self) -> None:
        context_lens = self.batch.context_lens
        widest = -(-int(context_lens.max(initial=0)) // self.block_size)
        rows = torch.from_numpy(np.where(context_lens > 0, self.batch.rows, 0)).to(self.tables.device)
        self.tables = self.tables[:, :widest].index_select(0, rows).to(torch.int64)

    def layout(self, num_kv_heads: int, window: int | None) -> Layout:
        key = (num_kv_heads, window)
        layout = self._layouts.get(key)
        if layout is None:
            groups = self._decode_groups(num_kv_heads, window) if self.decode else []
            layout = Layout(groups, self._prefill_chunks(num_kv_heads, window), self._empty_tokens())
            self._layouts[key] = layout
        return layout

    def _decode_groups(self, num_kv_heads: int, window: int | None) -> list[DecodeGroup]:
        context_lens = self.batch.context_lens[: self.batch.num_decode].astype(np.int64)
        visible_from = np.zeros_like(context_lens) if window is None else np.maximum(context_lens - window, 0)
        first_block = visible_from // self.block_size
        num_blocks = -(-context_lens // self.block_size) - first_block
        padded_blocks = np.where(context_lens > 0, _size_class(num_blocks), 0)
        ranges = np.stack((first_block, num_blocks, visible_from, context_lens))
        entries = self.tables[: len(context_lens)].cpu().numpy()
        groups = []
        for width in np.unique(padded_blocks[padded_blocks > 0]).tolist():
            members = np.flatnonzero(padded_blocks == width)
            step = max(1, MAX_GROUP_ROWS // (width * self.block_size * num_kv_heads))
            for start in range(0, len(members), step):
                part = members[start : start + step]
                groups.append(self._decode_group(entries, part, width, ranges[:, part, None], num_kv_heads))
        return groups

    def _decode_group(self, entries: Ints, members: Ints, width: int, ranges: Ints, num_kv_heads: int) -> DecodeGroup:
        """The group of these decode requests, each padded to `width` blocks.

        Args:
            entries: the tables' entries [decode requests, blocks].
            ranges: [4, members, 1]: first visible block, number of visible blocks, first visible position, context.
        """
        first, count, visible_from, context = ranges
        num, block_size, device = len(members), self.block_size, self.tables.device
        # A padding block is read and masked, so it must be one without dead slots: the second visible one is, since
        # only contexts of three visible blocks or more are padded.
        column = np.arange(width)
        block_ids = entries[members[:, None], np.where(column < count, column, 1) + first]

        slot = np.arange(width * block_size)
        hidden = slot >= context - first * block_size
        if visible_from.any():
            hidden |= slot < visible_from - first * block_size
        bias = torch.from_numpy(np.where(hidden, np.float32(-np.inf), np.float32(0)))
        bias = bias[:, None, :].expand(num, num_kv_heads, -1).reshape(num * num_kv_heads, 1, -1)

        request, dead = np.nonzero(hidden & (slot < count * block_size))
        lane = np.arange(2)[:, None, None] * num + request[:, None]
        dead_slots = (lane * num_kv_heads + np.arange(num_kv_heads)) * len(slot) + dead[:, None]
        return DecodeGroup(
            tokens=_as_slice(members, device),
            num_requests=num,
            gather_index=_head_index(torch.from_numpy(block_ids), num_kv_heads).to(device),
            dead_slots=torch.from_numpy(dead_slots.reshape(-1)).to(device) if len(dead) else None,
            bias=bias.to(device),
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
            bias = None if plain else causal_bias(end - begin, num_live, window, self.tables.device)
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


def _size_class(num_blocks: Ints) -> Ints:
    """Blocks to pad to: the next of 1, 2, 4, 6, 8, 12, 16, 24, ….

    It depends on the request's own context alone, so that its sums do not depend on its neighbours; at most a
    third of what is gathered is padding.
    """
    power = 2 ** np.ceil(np.log2(np.maximum(num_blocks, 1))).astype(np.int64)
    smaller = power // 4 * 3
    return np.where((num_blocks <= smaller) & (power >= 8), smaller, power)


def _head_index(block_ids: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Of block_ids [n, blocks]: int64, flat [2, n, num_kv_heads, blocks], rows of the cache seen one head a row."""
    heads = torch.arange(2 * num_kv_heads, device=block_ids.device).view(2, 1, num_kv_heads, 1)
    return (block_ids[None, :, None, :] * (2 * num_kv_heads) + heads).flatten()


def _as_slice(members: Ints, device: torch.device) -> slice | torch.Tensor:
    """A slice for tokens in a row, which spares a gather and a scatter per layer; else their ids."""
    first, last = int(members[0]), int(members[-1])
    if last - first + 1 == len(members):
        return slice(first, last + 1)
    return torch.from_numpy(members).to(device)


def causal_bias(num_tokens: int, num_slots: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Float32 [num_tokens, num_slots]: 0 where a query sees a slot, else -inf; the last query is at the last slot."""
    query = torch.arange(num_slots - num_tokens, num_slots, device=device)[:, None]
    slot = torch.arange(num_slots, device=device)[None, :]
    hidden = slot > query
    if window is not None:
        hidden |= slot <= query - window
    return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -torch.inf)
