"""The kernel between the QKV product and attention: QK norm, rotary positions, and K and V into their slots."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Kernels are written in Triton's language, whose types are not Python's.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pageframe.kernels.triton import UNFUSED, launches
from pageframe.kernels.triton.write import check_contiguous, store_heads

#: Numbers of heads that one program takes, where it has as many.
TILE_NUMBERS = 1024


@triton.jit
def rotate_and_write_kernel(
    qkv_ptr,  # [num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM], contiguous: heads of q, then of k, then of v
    positions_ptr,  # int64 [num_tokens]
    cos_ptr,  # float32 [max_position, HEAD_DIM / 2], the last axis contiguous
    sin_ptr,  # as cos
    norm_ptr,  # float32 [NUM_HEADS + NUM_KV_HEADS, HEAD_DIM]; not read without HAS_NORM
    slots_ptr,  # int64 [num_tokens]
    q_ptr,  # [num_tokens, NUM_HEADS, HEAD_DIM], contiguous, out
    kv_cache_ptr,  # [num_blocks, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM], contiguous, out
    kv_scales_ptr,  # float32 [num_blocks, 2, NUM_KV_HEADS, BLOCK_SIZE], out; not written without HAS_SCALES
    angle_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """One program: one token, and TILE of its heads: of q, or of k and v. Those of q come first."""
    NUM_Q_TILES: tl.constexpr = (NUM_HEADS + TILE - 1) // TILE
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    is_q = tile < NUM_Q_TILES
    head = tl.where(is_q, tile * TILE, NUM_HEADS + (tile - NUM_Q_TILES) * TILE) + tl.arange(0, TILE)
    in_heads = head < tl.where(is_q, NUM_HEADS, NUM_HEADS + 2 * NUM_KV_HEADS)
    dim = tl.arange(0, PADDED_DIM)
    exists = in_heads[:, None] & (dim < HEAD_DIM)[None, :]
    at = head[:, None] * HEAD_DIM + dim[None, :]
    token_ptr = qkv_ptr + token * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    numbers = tl.load(token_ptr + at, mask=exists, other=0.0).to(tl.float32)

    # Heads of v are neither normed nor rotated. The other number of each pair (i, i + HALF) is loaded a second time,
    # rather than sent from thread to thread.
    turns = (head < NUM_HEADS + NUM_KV_HEADS)[:, None] & exists
    in_first_half = dim < HALF
    partner_at = head[:, None] * HEAD_DIM + tl.where(in_first_half, dim + HALF, dim - HALF)[None, :]
    partners = tl.load(token_ptr + partner_at, mask=turns, other=0.0).to(tl.float32)
    if HAS_NORM:
        factor = tl.rsqrt(tl.sum(numbers * numbers, axis=1) / HEAD_DIM + eps)[:, None]
        numbers = tl.where(turns, numbers * factor * tl.load(norm_ptr + at, mask=turns, other=0.0), numbers)
        partners = partners * factor * tl.load(norm_ptr + partner_at, mask=turns, other=0.0)
    angle_at = tl.load(positions_ptr + token) * angle_stride + tl.where(in_first_half, dim, dim - HALF)
    cos = tl.load(cos_ptr + angle_at, mask=dim < HEAD_DIM, other=0.0)
    sin = tl.load(sin_ptr + angle_at, mask=dim < HEAD_DIM, other=0.0)
    turned = numbers * cos[None, :] + partners * tl.where(in_first_half, -sin, sin)[None, :]
    numbers = tl.where(turns, turned, numbers)

    if is_q:
        q_at = token * (NUM_HEADS * HEAD_DIM) + at
        tl.store(q_ptr + q_at, numbers.to(q_ptr.dtype.element_ty), mask=exists)
    else:
        slot = tl.load(slots_ptr + token)
        # In a block as in qkv, the heads of v follow those of k.
        store_heads(
            numbers, kv_cache_ptr, kv_scales_ptr, slot, head - NUM_HEADS, in_heads & (slot >= 0),
            NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, PADDED_DIM, HAS_SCALES,
        )  # fmt: skip


def rotate_and_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
    *,
    num_heads: int,
    qk_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Norm and rotate q and k, and write K and V to their slots: in float32, rounded once.

    Args:
        qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], contiguous: heads of q, then of k, then of v.
        positions: int64 [num_tokens].
        cos, sin: float32 [max_position, head_dim / 2], head_dim contiguous, with the same strides: how far each
            position turns the pairs (i, i + head_dim / 2) of a head.
        slots: int64 [num_tokens]; -1 writes nothing.
        kv_cache: one layer, contiguous, see `kv_cache_shape`; written.
        kv_scales: of a cache of codes, contiguous; written too.
        qk_norm: float32 [num_heads + num_kv_heads, head_dim], contiguous: the RMSNorm of each head of q and k; None
            for none.
        eps: of that norm.

    Returns:
        q [num_tokens, num_heads, head_dim], a new tensor in qkv's dtype.
    """
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    num_tokens = qkv.shape[0]
    assert qkv.shape[1] == (num_heads + 2 * num_kv_heads) * head_dim, f"qkv has {qkv.shape[1]} columns"
    _check_layout(qkv, cos, sin, qk_norm)
    check_contiguous(kv_cache, kv_scales)
    q = qkv.new_empty((num_tokens, num_heads, head_dim))
    padded_dim = triton.next_power_of_2(head_dim)
    tile = max(1, min(TILE_NUMBERS // padded_dim, triton.next_power_of_2(num_heads)))
    rotate_and_write_kernel[(num_tokens, triton.cdiv(num_heads, tile) + triton.cdiv(2 * num_kv_heads, tile))](
        qkv,
        positions,
        cos,
        sin,
        qk_norm,
        slots,
        q,
        kv_cache,
        kv_scales,
        cos.stride(0),
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        TILE=tile,
        HAS_NORM=qk_norm is not None,
        HAS_SCALES=kv_scales is not None,
        **UNFUSED,
    )
    launches["rotate_and_write"] += 1
    return q


def _check_layout(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, qk_norm: torch.Tensor | None) -> None:
    assert qkv.is_contiguous(), "the kernel counts on contiguous rows"
    assert qk_norm is None or qk_norm.is_contiguous(), "the kernel counts on contiguous weights"
    assert cos.stride() == sin.stride(), "the kernel has one stride for both tables"
    assert cos.stride(1) == 1, "the kernel counts on a contiguous head_dim"
