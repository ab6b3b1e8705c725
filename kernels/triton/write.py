"""The kernel that stores new K and V in their slots. Knows nothing of whose they are."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Kernels are written in Triton's language, whose types are not Python's.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pageframe.kernels.triton import launches


@triton.jit
def write_kv_kernel(
    k_ptr,  # [num_tokens, num_kv_heads, HEAD_DIM], the last axis contiguous
    v_ptr,  # as k
    kv_cache_ptr,  # [num_blocks, 2, num_kv_heads, BLOCK_SIZE, HEAD_DIM], contiguous
    slots_ptr,  # int64 [num_tokens]
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    PADDED_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """One program stores one token: [NUM_KV_HEADS, HEAD_DIM] of K and of V."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    head = tl.arange(0, PADDED_KV_HEADS).to(tl.int64)[:, None]
    dim = tl.arange(0, HEAD_DIM)[None, :]
    exists = head < NUM_KV_HEADS
    k = tl.load(k_ptr + token * k_token_stride + head * k_head_stride + dim, mask=exists)
    v = tl.load(v_ptr + token * v_token_stride + head * v_head_stride + dim, mask=exists)

    block_id = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    k_lane = block_id * 2 * NUM_KV_HEADS + head
    v_lane = k_lane + NUM_KV_HEADS
    kv_dtype = kv_cache_ptr.dtype.element_ty
    tl.store(kv_cache_ptr + (k_lane * BLOCK_SIZE + offset) * HEAD_DIM + dim, k.to(kv_dtype), mask=exists)
    tl.store(kv_cache_ptr + (v_lane * BLOCK_SIZE + offset) * HEAD_DIM + dim, v.to(kv_dtype), mask=exists)


def write_kv(k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
    """See `Backend.write_kv`."""
    assert k.stride(2) == v.stride(2) == 1, "the kernel counts on a contiguous head_dim"
    assert kv_cache.is_contiguous(), "the kernel counts on a contiguous cache"
    num_tokens = slots.shape[0]
    if num_tokens == 0:
        return
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    write_kv_kernel[(num_tokens,)](
        k,
        v,
        kv_cache,
        slots,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        NUM_KV_HEADS=num_kv_heads,
        PADDED_KV_HEADS=triton.next_power_of_2(num_kv_heads),
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
    )
    launches["write_kv"] += 1
