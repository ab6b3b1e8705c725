"""Paged attention of decode rows: one query token a request, K and V read through the block table.

A context is cut into splits of a fixed size, each attended by a program of its own; a second kernel merges the
splits by their log-sum-exp. Because the size is fixed, a row's sums do not depend on its neighbours.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Kernels are written in Triton's language, whose types are not Python's.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pageframe.kernels.triton import launches

#: Positions of a context that one program attends.
SPLIT_SIZE = 256
#: Positions attended at once: at most MAX_TILE, fewer where K would take more than TILE_BYTES, since K and V of
#: several tiles in flight must fit in shared memory.
MAX_TILE = 64
TILE_BYTES = 8192
#: The least rows of a matrix product on the tensor cores.
MIN_DOT_ROWS = 16
LOG2_E = tl.constexpr(1.4426950408889634)
TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def attend_splits_kernel(
    q_ptr,  # [num_tokens, num_heads, HEAD_DIM], the last axis contiguous; token i is decode row i
    kv_cache_ptr,  # [num_blocks, 2, num_kv_heads, BLOCK_SIZE, HEAD_DIM], contiguous
    tables_ptr,  # int32 [max_requests, max_blocks], rows contiguous
    rows_ptr,  # int32 [num_decode]
    context_lens_ptr,  # int32 [num_decode]
    partial_ptr,  # float32 [num_decode, num_heads, num_splits, HEAD_DIM], out
    log_sums_ptr,  # float32 [num_decode, num_heads, num_splits], out, base 2
    scale,
    softcap,
    window,
    q_token_stride,
    q_head_stride,
    table_stride,
    num_kv_heads,
    num_splits,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """One program: one request, one KV head with its GROUP of query heads as rows, one split of the context."""
    request = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    context = tl.load(context_lens_ptr + request)
    begin = split * SPLIT_SIZE
    end = tl.minimum(begin + SPLIT_SIZE, context)
    if HAS_WINDOW:
        begin = tl.maximum(begin, context - window)
    if begin >= end:
        return

    group = tl.arange(0, PADDED_GROUP)
    in_group = group < GROUP
    head = kv_head * GROUP + group
    dim = tl.arange(0, HEAD_DIM)
    q_at = request * q_token_stride + head[:, None] * q_head_stride + dim[None, :]
    q = tl.load(q_ptr + q_at, mask=in_group[:, None], other=0.0).to(DOT_DTYPE)
    table_ptr = tables_ptr + tl.load(rows_ptr + request).to(tl.int64) * table_stride

    highest = tl.full([PADDED_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([PADDED_GROUP], tl.float32)
    attended = tl.zeros([PADDED_GROUP, HEAD_DIM], tl.float32)
    for start in range(begin // TILE * TILE, end, TILE):
        position = start + tl.arange(0, TILE)
        visible = (position >= begin) & (position < end)
        # Neither a table entry nor a slot is read where nothing is visible: both may hold anything.
        block_id = tl.load(table_ptr + position // BLOCK_SIZE, mask=visible, other=0).to(tl.int64)
        k_lane = block_id * 2 * num_kv_heads + kv_head
        v_lane = k_lane + num_kv_heads
        offset = position % BLOCK_SIZE
        k_at = (k_lane * BLOCK_SIZE + offset)[:, None] * HEAD_DIM + dim[None, :]
        v_at = (v_lane * BLOCK_SIZE + offset)[:, None] * HEAD_DIM + dim[None, :]
        k = tl.load(kv_cache_ptr + k_at, mask=visible[:, None], other=0.0).to(DOT_DTYPE)
        v = tl.load(kv_cache_ptr + v_at, mask=visible[:, None], other=0.0).to(DOT_DTYPE)

        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if HAS_SOFTCAP:
            # tanh(x) = 1 - 2 / (1 + exp(2x)), right also where exp overflows
            scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 * LOG2_E / softcap))))
        scores = tl.where(visible[None, :], scores * LOG2_E, float("-inf"))
        now_highest = tl.maximum(highest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - now_highest[:, None])
        shrink = tl.exp2(highest - now_highest)
        total = total * shrink + tl.sum(weights, axis=1)
        attended = attended * shrink[:, None] + tl.dot(weights.to(DOT_DTYPE), v, input_precision="ieee")
        highest = now_highest

    lane = (request * num_kv_heads * GROUP + head) * num_splits + split
    tl.store(partial_ptr + lane[:, None] * HEAD_DIM + dim[None, :], attended / total[:, None], mask=in_group[:, None])
    tl.store(log_sums_ptr + lane, highest + tl.log2(total), mask=in_group)


@triton.jit
def merge_splits_kernel(
    partial_ptr,  # float32 [num_decode, num_heads, num_splits, HEAD_DIM]
    log_sums_ptr,  # float32 [num_decode, num_heads, num_splits], base 2
    context_lens_ptr,  # int32 [num_decode]
    out_ptr,  # [num_tokens, num_heads, HEAD_DIM], the last axis contiguous, out
    window,
    out_token_stride,
    out_head_stride,
    num_splits,
    HEAD_DIM: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """One program: one query head of one request. Zeros for a context of 0."""
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    context = tl.load(context_lens_ptr + request)
    first_split = 0
    if HAS_WINDOW:
        first_split = tl.maximum(context - window, 0) // SPLIT_SIZE
    dim = tl.arange(0, HEAD_DIM)
    lane = (request * tl.num_programs(1) + head) * num_splits

    highest = float("-inf")
    total = 0.0
    attended = tl.zeros([HEAD_DIM], tl.float32)
    for split in range(first_split, tl.cdiv(context, SPLIT_SIZE)):
        log_sum = tl.load(log_sums_ptr + lane + split)
        partial = tl.load(partial_ptr + (lane + split) * HEAD_DIM + dim)
        now_highest = tl.maximum(highest, log_sum)
        shrink = tl.exp2(highest - now_highest)
        weight = tl.exp2(log_sum - now_highest)
        total = total * shrink + weight
        attended = attended * shrink + partial * weight
        highest = now_highest

    result = attended / tl.where(total > 0.0, total, 1.0)
    out_at = request * out_token_stride + head * out_head_stride + dim
    tl.store(out_ptr + out_at, result.to(out_ptr.dtype.element_ty))


def kernel_constants(
    group: int, head_dim: int, block_size: int, q_dtype: torch.dtype, cache_dtype: torch.dtype
) -> dict[str, object]:
    """The compile-time arguments of `attend_splits_kernel` that follow from shapes and dtypes."""
    dot_dtype = torch.promote_types(q_dtype, cache_dtype)
    if dot_dtype == torch.bfloat16 and triton.knobs.runtime.interpret:
        # The interpreter keeps bfloat16 as its bits in uint16, and its matrix product multiplies those.
        dot_dtype = torch.float32
    return {
        "GROUP": group,
        "PADDED_GROUP": max(MIN_DOT_ROWS, triton.next_power_of_2(group)),
        "BLOCK_SIZE": block_size,
        "HEAD_DIM": head_dim,
        "TILE": max(MIN_DOT_ROWS, min(MAX_TILE, TILE_BYTES // (head_dim * dot_dtype.itemsize))),
        "SPLIT_SIZE": SPLIT_SIZE,
        "DOT_DTYPE": TRITON_DTYPES[dot_dtype],
    }


def attend_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    tables: torch.Tensor,
    rows: torch.Tensor,
    context_lens: torch.Tensor,
    max_context: int,
    out: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> None:
    """Fill out[i] with the attention of q[i] over the context of decode row i.

    Args:
        q, out: [at least num_decode, num_heads, head_dim], head_dim contiguous.
        tables: int32 [max_requests, max_blocks], the resident block tables.
        rows, context_lens: int32 [num_decode].
        max_context: the longest of context_lens, known without asking the device.
    """
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    num_decode, num_heads = rows.shape[0], q.shape[1]
    assert q.stride(2) == out.stride(2) == 1, "the kernel counts on a contiguous head_dim"
    assert kv_cache.is_contiguous(), "the kernel counts on a contiguous cache"
    num_splits = max(1, triton.cdiv(max_context, SPLIT_SIZE))
    partial = torch.empty((num_decode, num_heads, num_splits, head_dim), dtype=torch.float32, device=q.device)
    log_sums = torch.empty((num_decode, num_heads, num_splits), dtype=torch.float32, device=q.device)
    window_size = 0 if window is None else window
    attend_splits_kernel[(num_decode, num_kv_heads, num_splits)](
        q,
        kv_cache,
        tables,
        rows,
        context_lens,
        partial,
        log_sums,
        scale,
        1.0 if softcap is None else softcap,
        window_size,
        q.stride(0),
        q.stride(1),
        tables.stride(0),
        num_kv_heads,
        num_splits,
        **kernel_constants(num_heads // num_kv_heads, head_dim, block_size, q.dtype, kv_cache.dtype),
        HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None,
    )
    launches["attend_splits"] += 1
    merge_splits_kernel[(num_decode, num_heads)](
        partial,
        log_sums,
        context_lens,
        out,
        window_size,
        out.stride(0),
        out.stride(1),
        num_splits,
        HEAD_DIM=head_dim,
        SPLIT_SIZE=SPLIT_SIZE,
        HAS_WINDOW=window is not None,
    )
    launches["merge_splits"] += 1
