"""Paged attention of decode rows: one query token a request, K and V read through the block table.

A context is cut into splits, each attended on its own; a second kernel merges a row's splits by their log-sum-exp. The
cut follows from the row's own context alone (`split_size`): so its sums depend on neither its neighbours nor the grid.

The grid is fixed by the number of rows and the device: programs walk the splits of all rows and KV heads by a fixed
stride, and find them in the context lengths as these stand on the device. So a captured graph replays with others.

Splits grow with a long context, so that a row has at most MAX_SPLITS. The width of the block tables bounds a context,
so memory for num_decode * num_heads * most_splits(longest context) partial results suffices whatever the lengths are.

head_dim 80 and 96 are padded to 128 in registers and shared memory. Padding is not read, and a decode step waits for
memory, not for products. Cut into 64 and the rest, the same bytes would come in twice as many loads.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Kernels are written in Triton's language, whose types are not Python's.

from __future__ import annotations

import math
from functools import cache

import torch
import triton
import triton.language as tl

from pageframe.kernels.triton import UNFUSED, launches
from pageframe.kernels.triton.dtypes import TRITON_DTYPES, dot_dtype
from pageframe.kernels.triton.tables import settings
from pageframe.kernels.triton.tile import capped, load_tile, weigh_values
from pageframe.kernels.triton.write import check_contiguous

#: Positions of a split, unless a context of so many would have more than MAX_SPLITS.
SPLIT_SIZE = 256
#: Enough for one long request with few KV heads to keep a large GPU busy, few enough for one load to merge them.
MAX_SPLITS = 64
#: Programs for each multiprocessor: a few times what fits at once, so that none ends long after the others, and few
#: enough that those without work take no time that counts.
PROGRAMS_PER_PROCESSOR = 8
#: Programs under the interpreter, where each costs time.
INTERPRETED_PROGRAMS = 3
#: The least rows of a matrix product on the tensor cores.
MIN_DOT_ROWS = 16
#: Up to so many decode rows one compiled kernel serves.
MIN_PADDED_DECODE = 256
#: A window that no context is longer than.
NO_WINDOW = 2**31 - 1
LOG2_E = math.log2(math.e)
#: Less than any log-sum-exp, and finite.
LOWEST = tl.constexpr(-1e30)


@triton.jit
def cut(context, window, SPLIT_SIZE: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """How a context is cut: the oldest position that is visible, the size of each split, and how many there are.

    The first split begins at the last multiple of SPLIT_SIZE from which all that is visible follows. The size is the
    least multiple of SPLIT_SIZE with which MAX_SPLITS are enough.
    """
    MOST: tl.constexpr = SPLIT_SIZE * MAX_SPLITS
    oldest = tl.maximum(context - window, 0)
    length = context - oldest // SPLIT_SIZE * SPLIT_SIZE
    size = tl.maximum((length + MOST - 1) // MOST, 1) * SPLIT_SIZE
    return oldest, size, (length + size - 1) // size


@triton.jit
def attend_positions(
    q, begin, oldest, end, kv_cache_ptr, kv_scales_ptr, table_ptr, kv_head, log2_scale, tanh_scale,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, TILE: tl.constexpr,
    DOT_DTYPE: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """The softmax over the positions [max(begin, oldest), end), begin a multiple of TILE: the weighted mean of V
    [PADDED_GROUP, PADDED_DIM], and the sum of the weights [PADDED_GROUP] in base 2 as its logarithm.

    A tile may span any number of blocks, or be a part of one.

    Args:
        q: DOT_DTYPE [PADDED_GROUP, PADDED_DIM].
        table_ptr: int32, the request's row of the block tables.
    """
    PADDED_GROUP: tl.constexpr = q.shape[0]
    PADDED_DIM: tl.constexpr = q.shape[1]
    K_TO_V: tl.constexpr = NUM_KV_HEADS * BLOCK_SIZE
    kv_cache_ptr += kv_head * (BLOCK_SIZE * HEAD_DIM)
    if HAS_SCALES:
        kv_scales_ptr += kv_head * BLOCK_SIZE
    lane = tl.arange(0, TILE)
    highest = tl.full([PADDED_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([PADDED_GROUP], tl.float32)
    attended = tl.zeros([PADDED_GROUP, PADDED_DIM], tl.float32)
    # Both sizes are powers of two and a tile begins at a multiple of TILE: so lane // BLOCK_SIZE and lane % BLOCK_SIZE
    # add to those of its start, and stay the same from tile to tile.
    ids_ptr = table_ptr + lane // BLOCK_SIZE
    # Neither the table's entry of a position out of range nor its slot is read: both may hold anything.
    in_range = (begin + lane >= oldest) & (begin + lane < end)
    block_id = tl.load(ids_ptr + begin // BLOCK_SIZE, mask=in_range, other=-1)
    for start in range(begin, end, TILE):
        # The next tile's block ids come in with this tile's K and V, which therefore wait for no other load.
        next_start = start + TILE
        next_block_id = tl.load(ids_ptr + next_start // BLOCK_SIZE, mask=next_start + lane < end, other=-1)
        visible = block_id >= 0
        slot = block_id.to(tl.int64) * (2 * K_TO_V) + (start % BLOCK_SIZE + lane % BLOCK_SIZE)
        k, v = load_tile(kv_cache_ptr, slot, visible, K_TO_V, HEAD_DIM, PADDED_DIM, DOT_DTYPE)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if HAS_SCALES:
            scores = scores * tl.load(kv_scales_ptr + slot, mask=visible, other=0.0)[None, :]
        if HAS_SOFTCAP:
            scores = capped(scores, tanh_scale)
        scores = tl.where(visible[None, :], scores * log2_scale, float("-inf"))
        now_highest = tl.maximum(highest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - now_highest[:, None])
        shrink = tl.exp2(highest - now_highest)
        total = total * shrink + tl.sum(weights, axis=1)
        attended = weigh_values(
            attended * shrink[:, None], weights, v, kv_scales_ptr, slot, visible, K_TO_V, DOT_DTYPE, HAS_SCALES
        )
        highest = now_highest
        block_id = next_block_id
    return attended / total[:, None], highest + tl.log2(total)


@triton.jit(do_not_specialize=["num_decode"])
def attend_splits_kernel(
    q_ptr,  # [num_tokens, NUM_KV_HEADS * GROUP, HEAD_DIM], the last axis contiguous; token i is decode row i
    kv_cache_ptr,  # [num_blocks, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM], contiguous
    kv_scales_ptr,  # float32 [num_blocks, 2, NUM_KV_HEADS, BLOCK_SIZE], contiguous; None without HAS_SCALES
    tables_ptr,  # int32 [max_requests, max_blocks], rows contiguous
    rows_ptr,  # int32 [num_decode]
    context_lens_ptr,  # int32 [num_decode]
    partial_ptr,  # float32 [num_decode, NUM_KV_HEADS * GROUP, row_splits, HEAD_DIM], out
    log_sums_ptr,  # float32 [num_decode, NUM_KV_HEADS * GROUP, row_splits], out, base 2
    log2_scale,
    tanh_scale,
    window,
    q_token_stride,
    q_head_stride,
    table_stride,
    num_decode,
    row_splits,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_DECODE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """One program: every so many of the items, which are one KV head, with its GROUP of query heads as rows, of one
    split of one request. A split's KV heads, whose slots lie side by side, are items in a row."""
    decode_row = tl.arange(0, PADDED_DECODE)
    contexts = tl.load(context_lens_ptr + decode_row, mask=decode_row < num_decode, other=0)
    _all_oldest, _all_sizes, counts = cut(contexts, window, SPLIT_SIZE, MAX_SPLITS)
    splits_end = tl.cumsum(counts, axis=0)

    group = tl.arange(0, PADDED_GROUP)
    dim = tl.arange(0, PADDED_DIM)
    exists = (group < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    for item in range(tl.program_id(0), tl.max(splits_end, axis=0) * NUM_KV_HEADS, tl.num_programs(0)):
        kv_head = tl.cast(item % NUM_KV_HEADS, tl.int64)
        is_before = splits_end <= item // NUM_KV_HEADS
        request = tl.sum(is_before.to(tl.int32), axis=0).to(tl.int64)
        split = item // NUM_KV_HEADS - tl.max(tl.where(is_before, splits_end, 0), axis=0)

        context = tl.load(context_lens_ptr + request)
        table_ptr = tables_ptr + tl.load(rows_ptr + request).to(tl.int64) * table_stride
        head = kv_head * GROUP + group
        q_at = request * q_token_stride + head[:, None] * q_head_stride + dim[None, :]
        q = tl.load(q_ptr + q_at, mask=exists, other=0.0).to(DOT_DTYPE)
        oldest, size, _count = cut(context, window, SPLIT_SIZE, MAX_SPLITS)
        begin = oldest // SPLIT_SIZE * SPLIT_SIZE + split * size
        attended, log_sum = attend_positions(
            q, tl.maximum(begin, oldest // TILE * TILE), oldest, tl.minimum(begin + size, context), kv_cache_ptr,
            kv_scales_ptr, table_ptr, kv_head, log2_scale, tanh_scale, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, TILE,
            DOT_DTYPE, HAS_SCALES, HAS_SOFTCAP,
        )  # fmt: skip

        lane = (request * NUM_KV_HEADS * GROUP + head) * row_splits + split
        tl.store(partial_ptr + lane[:, None] * HEAD_DIM + dim[None, :], attended, mask=exists)
        tl.store(log_sums_ptr + lane, log_sum, mask=group < GROUP)


@triton.jit
def merge_splits_kernel(
    partial_ptr,  # float32 [num_decode, num_heads, row_splits, HEAD_DIM]
    log_sums_ptr,  # float32 [num_decode, num_heads, row_splits], base 2
    context_lens_ptr,  # int32 [num_decode]
    out_ptr,  # [num_tokens, num_heads, HEAD_DIM], the last axis contiguous, out
    window,
    out_token_stride,
    out_head_stride,
    row_splits,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """One program: one query head of one request. Zeros for a context of 0."""
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    _oldest, _size, count = cut(tl.load(context_lens_ptr + request), window, SPLIT_SIZE, MAX_SPLITS)
    split = tl.arange(0, PADDED_SPLITS)
    is_split = split < count
    dim = tl.arange(0, PADDED_DIM)
    in_head = dim < HEAD_DIM

    lane = (request * tl.num_programs(1) + head) * row_splits + split
    log_sums = tl.load(log_sums_ptr + lane, mask=is_split, other=float("-inf"))
    partial_at = lane[:, None] * HEAD_DIM + dim[None, :]
    partial = tl.load(partial_ptr + partial_at, mask=is_split[:, None] & in_head[None, :], other=0.0)
    # Finite also where there is no split: all weights are 0 there.
    weights = tl.exp2(log_sums - tl.maximum(tl.max(log_sums, axis=0), LOWEST))
    total = tl.sum(weights, axis=0)
    result = tl.sum(partial * weights[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    out_at = request * out_token_stride + head * out_head_stride + dim
    tl.store(out_ptr + out_at, result.to(out_ptr.dtype.element_ty), mask=in_head)


def most_splits(longest: int, window: int) -> int:
    """The most splits that a row of at most `longest` positions has."""
    longest = min(longest, window + SPLIT_SIZE - 1)
    return max(1, min(MAX_SPLITS, -(-longest // SPLIT_SIZE)))


@cache
def num_programs(device: torch.device) -> int:
    """Programs that walk the items, where there are as many."""
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS
    num_processors: int = torch.cuda.get_device_properties(device).multi_processor_count
    return PROGRAMS_PER_PROCESSOR * num_processors


def kernel_constants(
    group: int, num_kv_heads: int, head_dim: int, block_size: int, q_dtype: torch.dtype, cache_dtype: torch.dtype
) -> dict[str, object]:
    """The compile-time arguments of `attend_splits_kernel` that follow from a model's shapes and dtypes."""
    return {
        "GROUP": group,
        "PADDED_GROUP": max(MIN_DOT_ROWS, triton.next_power_of_2(group)),
        "NUM_KV_HEADS": num_kv_heads,
        "BLOCK_SIZE": block_size,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": triton.next_power_of_2(head_dim),
        "SPLIT_SIZE": SPLIT_SIZE,
        "MAX_SPLITS": MAX_SPLITS,
        "DOT_DTYPE": TRITON_DTYPES[dot_dtype(q_dtype, cache_dtype)],
    }


def attend_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    tables: torch.Tensor,
    rows: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    kv_scales: torch.Tensor | None,
) -> None:
    """Fill out[i] with the attention of q[i] over the context of decode row i. Asks the device nothing.

    Args:
        q, out: [at least num_decode, num_heads, head_dim], head_dim contiguous.
        tables: int32 [max_requests, max_blocks], the resident block tables.
        rows, context_lens: int32 [num_decode].
        window, softcap, kv_scales: as in `Backend.paged_attention`.
    """
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    num_decode, group = rows.shape[0], q.shape[1] // num_kv_heads
    assert q.stride(2) == out.stride(2) == 1, "the kernel counts on a contiguous head_dim"
    check_contiguous(kv_cache, kv_scales)
    window = NO_WINDOW if window is None else window
    row_splits = most_splits(tables.shape[1] * block_size, window)
    partial = torch.empty((num_decode, q.shape[1], row_splits, head_dim), dtype=torch.float32, device=q.device)
    log_sums = torch.empty(partial.shape[:3], dtype=torch.float32, device=q.device)
    launch = settings("attend_splits", head_dim=head_dim, cache_dtype=kv_cache.dtype, group=group, device=q.device)
    assert SPLIT_SIZE % launch.tile == 0, f"tiles of {launch.tile} do not fill a split of {SPLIT_SIZE}"
    attend_splits_kernel[(min(num_decode * row_splits * num_kv_heads, num_programs(q.device)),)](
        q,
        kv_cache,
        kv_scales,
        tables,
        rows,
        context_lens,
        partial,
        log_sums,
        # With a softcap, tanh(score / softcap) takes the score's place.
        LOG2_E * (scale if softcap is None else softcap),
        0.0 if softcap is None else 2.0 * LOG2_E * scale / softcap,
        window,
        q.stride(0),
        q.stride(1),
        tables.stride(0),
        num_decode,
        row_splits,
        **kernel_constants(group, num_kv_heads, head_dim, block_size, q.dtype, kv_cache.dtype),
        PADDED_DECODE=max(MIN_PADDED_DECODE, triton.next_power_of_2(num_decode)),
        TILE=launch.tile,
        HAS_SCALES=kv_scales is not None,
        HAS_SOFTCAP=softcap is not None,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **UNFUSED,
    )
    launches["attend_splits"] += 1
    _merge_splits(partial, log_sums, context_lens, window, out)


def _merge_splits(
    partial: torch.Tensor, log_sums: torch.Tensor, context_lens: torch.Tensor, window: int, out: torch.Tensor
) -> None:
    num_decode, num_heads, row_splits, head_dim = partial.shape
    merge_splits_kernel[(num_decode, num_heads)](
        partial,
        log_sums,
        context_lens,
        out,
        window,
        out.stride(0),
        out.stride(1),
        row_splits,
        HEAD_DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        PADDED_SPLITS=triton.next_power_of_2(row_splits),
        SPLIT_SIZE=SPLIT_SIZE,
        MAX_SPLITS=MAX_SPLITS,
        **UNFUSED,
    )
    launches["merge_splits"] += 1
