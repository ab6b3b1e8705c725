"""The kernel that stores new K and V in their slots, as numbers or as codes with scales. Knows nothing of whose they
are."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Kernels are written in Triton's language, whose types are not Python's.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pageframe.kernels.triton import UNFUSED, launches
from pageframe.kernels.triton.quantize import quantize_rows


@triton.jit
def store_heads(
    heads,  # float32 [TILE, PADDED_DIM], 0 past HEAD_DIM
    kv_cache_ptr,  # [num_blocks, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM], contiguous, out
    kv_scales_ptr,  # float32 [num_blocks, 2, NUM_KV_HEADS, BLOCK_SIZE], contiguous, out; None without HAS_SCALES
    slot,  # int64, where in the cache they go
    head,  # [TILE], each one's number among those of K and then those of V
    in_heads,  # [TILE], which of them exist
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """Store heads in the cache's dtype, with HAS_SCALES as codes with a scale for each."""
    lane = (slot // BLOCK_SIZE * (2 * NUM_KV_HEADS) + head) * BLOCK_SIZE + slot % BLOCK_SIZE
    KV_DTYPE: tl.constexpr = kv_cache_ptr.dtype.element_ty
    if HAS_SCALES:
        codes, scale = quantize_rows(heads, KV_DTYPE)
        tl.store(kv_scales_ptr + lane, scale, mask=in_heads)
    else:
        codes = heads.to(KV_DTYPE)
    dim = tl.arange(0, PADDED_DIM)
    exists = in_heads[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(kv_cache_ptr + lane[:, None] * HEAD_DIM + dim[None, :], codes, mask=exists)


@triton.jit
def write_kv_kernel(
    k_ptr,  # [num_tokens, NUM_KV_HEADS, HEAD_DIM], the last axis contiguous
    v_ptr,  # as k
    kv_cache_ptr,  # [num_blocks, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM], contiguous, out
    kv_scales_ptr,  # float32 [num_blocks, 2, NUM_KV_HEADS, BLOCK_SIZE], contiguous, out; None without HAS_SCALES
    slots_ptr,  # int64 [num_tokens]
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    PADDED_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """One program stores one token: [NUM_KV_HEADS, HEAD_DIM] of K and of V."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    head = tl.arange(0, PADDED_KV_HEADS).to(tl.int64)
    dim = tl.arange(0, PADDED_DIM)[None, :]
    in_heads = head < NUM_KV_HEADS
    exists = in_heads[:, None] & (dim < HEAD_DIM)
    k_at = token * k_token_stride + head[:, None] * k_head_stride + dim
    v_at = token * v_token_stride + head[:, None] * v_head_stride + dim
    k = tl.load(k_ptr + k_at, mask=exists, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + v_at, mask=exists, other=0.0).to(tl.float32)
    store_heads(
        k, kv_cache_ptr, kv_scales_ptr, slot, head, in_heads,
        NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, PADDED_DIM, HAS_SCALES,
    )  # fmt: skip
    store_heads(
        v, kv_cache_ptr, kv_scales_ptr, slot, NUM_KV_HEADS + head, in_heads,
        NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, PADDED_DIM, HAS_SCALES,
    )  # fmt: skip


def check_contiguous(kv_cache: torch.Tensor, kv_scales: torch.Tensor | None) -> None:
    """What every kernel that reads or writes the cache counts on."""
    assert kv_cache.is_contiguous(), "the kernel counts on a contiguous cache"
    assert kv_scales is None or kv_scales.is_contiguous(), "the kernel counts on contiguous scales"


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """See `Backend.write_kv`. K and V become float32 and are rounded once from there, or made codes."""
    assert k.stride(2) == v.stride(2) == 1, "the kernel counts on a contiguous head_dim"
    check_contiguous(kv_cache, kv_scales)
    num_tokens = slots.shape[0]
    if num_tokens == 0:
        return
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    write_kv_kernel[(num_tokens,)](
        k,
        v,
        kv_cache,
        kv_scales,
        slots,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        NUM_KV_HEADS=num_kv_heads,
        PADDED_KV_HEADS=triton.next_power_of_2(num_kv_heads),
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        HAS_SCALES=kv_scales is not None,
        **UNFUSED,
    )
    launches["write_kv"] += 1
