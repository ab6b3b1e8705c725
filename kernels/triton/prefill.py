"""Paged attention of prefill chunks: ragged, causal on top of the cached context, K and V read through the block table.

A program attends one tile of a chunk's query tokens with the query heads of one KV head, all packed into the rows of
one matrix product. It walks the keys in tiles that begin at multiples of TILE, in order: those that the window cuts,
those that all its rows see whole, without a mask, and last those that the diagonal cuts. One softmax runs along in base
2 (FlashAttention-2, Dao 2023). A key tile's arithmetic is the same with a mask and without (a product is fused with a
sum where tl.fma says so, and there is no other for a compiler to fuse), and one that a row does not see leaves the row
as it was. So a row's bits depend on its own query and context alone, not on how its prompt was cut into chunks nor on
what else is in the step; only a chunk of one token that a step counts among its decode rows is another kernel's.

K and V bytes read: a tile of tokens at the positions [first, last] reads, for each KV head, the slots of the positions
[max(0, first - window + 1), last] once each, K and V: 2 * head_dim * itemsize bytes a slot, and with scales 2 * 4 more.
A tile has tile_rows // group tokens, the last of a chunk what is left.

head_dim 80 and 96 are padded to 128 in registers: memory is read as it is, but the products are of 128.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Kernels are written in Triton's language, whose types are not Python's.

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from pageframe.kernels.plan import AttentionPlan, StepBatch
from pageframe.kernels.triton import launches
from pageframe.kernels.triton.dtypes import TRITON_DTYPES, dot_dtype
from pageframe.kernels.triton.tables import Settings, settings
from pageframe.kernels.triton.tile import capped, load_tile, weigh_values
from pageframe.kernels.triton.transfer import to_device
from pageframe.kernels.triton.write import check_contiguous

#: Rows of a program's products (query tokens x query heads of a KV head) for each of its warps. Hopper's products have
#: 64 rows for 4 warps. Float32 has no tensor cores to multiply it exactly, and more rows do not fit in the registers.
ROWS_PER_WARP = 16
FLOAT32_ROWS_PER_WARP = 4
LOG2_E = math.log2(math.e)
#: Stands for minus infinity as a score, but times a scale of 0 it is 0.
LOWEST = tl.constexpr(-1e30)

Ints = npt.NDArray[np.int64]


@triton.jit
def attend_tiles(
    highest, total, attended, q, position, begin, end, oldest, num_keys, kv_cache_ptr, kv_scales_ptr, table_ptr,
    kv_head, num_kv_heads, log2_scale, tanh_scale, window,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, TILE: tl.constexpr, DOT_DTYPE: tl.constexpr,
    HAS_SCALES: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The softmax after the key tiles from `begin` on that start before `end`. With MASKED only the keys in
    [oldest, num_keys) are touched; without, every row sees every key of these tiles.

    Args:
        highest, total, attended: float32 [ROWS] twice and [ROWS, PADDED_DIM], in base 2: the softmax so far.
        q: DOT_DTYPE [ROWS, PADDED_DIM].
        position: int32 [ROWS].
    """
    k_to_v = num_kv_heads * BLOCK_SIZE
    # Neither a table entry nor a slot that no row sees is read: both may hold anything.
    key = begin + tl.arange(0, TILE)
    next_id = tl.load(table_ptr + key // BLOCK_SIZE, mask=(key >= oldest) & (key < num_keys), other=0)
    for start in range(begin, end, TILE):
        key = start + tl.arange(0, TILE)
        live = tl.full([TILE], True, tl.int1)
        if MASKED:
            live = (key >= oldest) & (key < num_keys)
        # The blocks of the next tile are looked up while this one is attended.
        block_id = next_id.to(tl.int64)
        next_id = tl.load(table_ptr + (key + TILE) // BLOCK_SIZE, mask=key + TILE < num_keys, other=0)
        slot = (block_id * 2 * num_kv_heads + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE
        k, v = load_tile(kv_cache_ptr, slot, live, k_to_v, HEAD_DIM, q.shape[1], DOT_DTYPE)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if HAS_SCALES:
            scores = scores * tl.load(kv_scales_ptr + slot, mask=live, other=0.0)[None, :]
        if HAS_SOFTCAP:
            scores = capped(scores, tanh_scale)
        if MASKED:
            seen = key[None, :] <= position[:, None]
            if HAS_WINDOW:
                seen = seen & (key[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, LOWEST)
        now_highest = tl.maximum(highest, tl.max(scores, axis=1) * log2_scale)
        weights = tl.exp2(tl.fma(scores, log2_scale, -now_highest[:, None]))
        if MASKED:
            weights = tl.where(seen, weights, 0.0)
        shrink = tl.exp2(highest - now_highest)
        total = tl.fma(total, shrink, tl.sum(weights, axis=1))
        attended = weigh_values(
            attended * shrink[:, None], weights, v, kv_scales_ptr, slot, live, k_to_v, DOT_DTYPE, HAS_SCALES
        )
        highest = now_highest
    return highest, total, attended


@triton.jit
def attend_context(
    q, first_position, position, num_keys, kv_cache_ptr, kv_scales_ptr, table_ptr, kv_head, num_kv_heads,
    log2_scale, tanh_scale, window,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, TILE: tl.constexpr, DOT_DTYPE: tl.constexpr,
    HAS_SCALES: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """The attention, float32 [ROWS, PADDED_DIM], of queries at these positions, the first and lowest being
    first_position, over num_keys keys. Zeros for a row without keys.

    Three parts: key tiles that the window cuts, that all rows see whole, and that the diagonal cuts.
    """
    highest = tl.full([q.shape[0]], LOWEST, tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    attended = tl.zeros(q.shape, tl.float32)
    oldest = 0
    full_begin = 0
    full_end = tl.maximum(first_position + 1, 0) // TILE * TILE
    if HAS_WINDOW:
        oldest = tl.maximum(first_position + 1 - window, 0)
        full_begin = tl.minimum((tl.maximum(num_keys - window, 0) + TILE - 1) // TILE * TILE, full_end)
    for part in tl.static_range(0 if HAS_WINDOW else 1, 3):
        begin = oldest // TILE * TILE if part == 0 else (full_begin if part == 1 else full_end)
        end = full_begin if part == 0 else (full_end if part == 1 else num_keys)
        highest, total, attended = attend_tiles(
            highest, total, attended, q, position, begin, end, oldest, num_keys, kv_cache_ptr, kv_scales_ptr,
            table_ptr, kv_head, num_kv_heads, log2_scale, tanh_scale, window, BLOCK_SIZE, HEAD_DIM, TILE, DOT_DTYPE,
            HAS_SCALES, HAS_WINDOW, HAS_SOFTCAP, MASKED=part != 1,
        )  # fmt: skip
    return attended / tl.where(total > 0.0, total, 1.0)[:, None]


@triton.jit
def attend_prefill_kernel(
    q_ptr,  # [num_tokens, num_heads, HEAD_DIM], the last axis contiguous
    kv_cache_ptr,  # [num_blocks, 2, num_kv_heads, BLOCK_SIZE, HEAD_DIM], contiguous
    kv_scales_ptr,  # float32 [num_blocks, 2, num_kv_heads, BLOCK_SIZE], contiguous; None without HAS_SCALES
    tables_ptr,  # int32 [max_requests, max_blocks], rows contiguous
    rows_ptr,  # int32 [num_requests]
    items_ptr,  # int32 [num_items, 4], see PrefillTiles.items
    out_ptr,  # [num_tokens, num_heads, HEAD_DIM], the last axis contiguous, out
    log2_scale,
    tanh_scale,
    window,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    table_stride,
    num_kv_heads,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """One program: one tile of a chunk's tokens, one KV head with its GROUP of query heads. Zeros without keys."""
    program = tl.program_id(0)
    kv_head = (program % num_kv_heads).to(tl.int64)
    item_ptr = items_ptr + program // num_kv_heads * 4
    request = tl.load(item_ptr)
    first_token = tl.load(item_ptr + 1).to(tl.int64)
    num_tokens = tl.load(item_ptr + 2)
    num_keys = tl.load(item_ptr + 3)
    table_ptr = tables_ptr + tl.load(rows_ptr + request).to(tl.int64) * table_stride

    row = tl.arange(0, ROWS)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    first_position = num_keys - num_tokens
    position = first_position + token
    dim = tl.arange(0, PADDED_DIM)
    exists = (token < num_tokens)[:, None]
    if HEAD_DIM != PADDED_DIM:
        exists = exists & (dim < HEAD_DIM)[None, :]
    q_at = (first_token + token) * q_token_stride + head * q_head_stride
    q = tl.load(q_ptr + q_at[:, None] + dim[None, :], mask=exists, other=0.0).to(DOT_DTYPE)

    result = attend_context(
        q, first_position, position, num_keys, kv_cache_ptr, kv_scales_ptr, table_ptr, kv_head, num_kv_heads,
        log2_scale, tanh_scale, window, BLOCK_SIZE, HEAD_DIM, TILE, DOT_DTYPE, HAS_SCALES, HAS_WINDOW, HAS_SOFTCAP,
    )  # fmt: skip
    out_at = (first_token + token) * out_token_stride + head * out_head_stride
    tl.store(out_ptr + out_at[:, None] + dim[None, :], result.to(out_ptr.dtype.element_ty), mask=exists)


@dataclass(frozen=True, slots=True, eq=False)
class PrefillTiles:
    """The prefill chunks of a step, and the tiles that they are cut into, for each number of tokens a tile has.

    Args:
        requests, first_tokens, num_tokens, context_lens: int64 [num_chunks]: the chunk's request and first token in the
            step, its tokens, and the tokens in the cache after this step's write.
        device: where the kernel runs.
    """

    requests: Ints
    first_tokens: Ints
    num_tokens: Ints
    context_lens: Ints
    device: torch.device
    _items: dict[int, torch.Tensor] = field(default_factory=dict)

    def items(self, tile_tokens: int) -> torch.Tensor:
        """Int32 [num_items, 4] on the device: request, first token in the step, number of tokens (tile_tokens at most)
        and number of keys that the last of them sees, 0 or less without context. Longest first, so that no program
        begins a long one when the others are done.
        """
        items = self._items.get(tile_tokens)
        if items is None:
            items = to_device(self._cut(tile_tokens).astype(np.int32), self.device)
            self._items[tile_tokens] = items
        return items

    def _cut(self, tile_tokens: int) -> Ints:
        num_tiles = -(-self.num_tokens // tile_tokens)
        chunk = np.repeat(np.arange(len(num_tiles)), num_tiles)
        tile = np.arange(len(chunk)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
        skipped = tile * tile_tokens
        count = np.minimum(self.num_tokens[chunk] - skipped, tile_tokens)
        num_keys = self.context_lens[chunk] - self.num_tokens[chunk] + skipped + count
        items = np.stack((self.requests[chunk], self.first_tokens[chunk] + skipped, count, num_keys), axis=1)
        return items[np.argsort(-num_keys, kind="stable")]


def plan_prefill(batch: StepBatch, device: torch.device) -> PrefillTiles:
    """The prefill chunks of a step: its requests from num_decode on."""
    first_tokens = batch.query_start[batch.num_decode :].astype(np.int64)
    num_tokens = np.diff(first_tokens)
    context_lens = batch.context_lens[batch.num_decode :].astype(np.int64)
    assert ((context_lens >= num_tokens) | (context_lens == 0)).all(), "a chunk is longer than its context"
    requests = np.arange(batch.num_decode, len(batch.context_lens), dtype=np.int64)
    return PrefillTiles(requests, first_tokens[:-1], num_tokens, context_lens, device)


def tile_rows(group: int, q_dtype: torch.dtype, num_warps: int) -> int:
    """Rows of a program's products where a KV head has `group` query heads: a tile has tile_rows // group tokens."""
    rows_per_warp = FLOAT32_ROWS_PER_WARP if q_dtype == torch.float32 else ROWS_PER_WARP
    return max(rows_per_warp * num_warps, int(triton.next_power_of_2(group)))


def _constants(
    group: int, head_dim: int, block_size: int, q_dtype: torch.dtype, cache_dtype: torch.dtype, launch: Settings
) -> dict[str, object]:
    """The compile-time arguments of `attend_prefill_kernel` that follow from shapes, dtypes and launch settings."""
    return {
        "GROUP": group,
        "ROWS": tile_rows(group, q_dtype, launch.num_warps),
        "BLOCK_SIZE": block_size,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": triton.next_power_of_2(head_dim),
        "TILE": launch.tile,
        "DOT_DTYPE": TRITON_DTYPES[dot_dtype(q_dtype, cache_dtype)],
    }


def attend_prefill(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    tables: torch.Tensor,
    plan: AttentionPlan,
    tiles: PrefillTiles,
    out: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    kv_scales: torch.Tensor | None,
) -> None:
    """Fill `out` at the tokens of the prefill chunks, with zeros where a context is 0; other tokens are left alone.

    Args:
        q, out: [num_tokens, num_heads, head_dim], head_dim contiguous.
        tables: int32 [max_requests, max_blocks], the resident block tables.
        tiles: of the batch that `plan` was made of.
        scale: factor of q . k, at least 0.
        window, softcap, kv_scales: as in `Backend.paged_attention`.
    """
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    group = q.shape[1] // num_kv_heads
    assert q.stride(2) == out.stride(2) == 1, "the kernel counts on a contiguous head_dim"
    check_contiguous(kv_cache, kv_scales)
    assert scale >= 0, f"scale is {scale}; the kernel counts on the highest product giving the highest score"
    launch = settings("attend_prefill", head_dim=head_dim, cache_dtype=kv_cache.dtype, group=group, device=q.device)
    items = tiles.items(tile_rows(group, q.dtype, launch.num_warps) // group)
    if items.shape[0] == 0:
        return
    # A softcap's kernel takes tanh(score / softcap) for its score.
    log2_scale = (scale if softcap is None else softcap) * LOG2_E
    attend_prefill_kernel[(items.shape[0] * num_kv_heads,)](
        q,
        kv_cache,
        kv_scales,
        tables,
        plan.rows,
        items,
        out,
        log2_scale,
        0.0 if softcap is None else 2.0 * LOG2_E * scale / softcap,
        0 if window is None else window,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        tables.stride(0),
        num_kv_heads,
        **_constants(group, head_dim, block_size, q.dtype, kv_cache.dtype, launch),
        HAS_SCALES=kv_scales is not None,
        HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    launches["attend_prefill"] += 1
