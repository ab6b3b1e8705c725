"""The kernel that adds to the residual stream and norms the sum: RMSNorm, one read and one write of the stream."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Kernels are written in Triton's language, whose types are not Python's.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pageframe.kernels.triton import UNFUSED, launches

#: Columns that one warp takes: 16 numbers a thread, so that a row of any usual width stays in registers.
COLUMNS_PER_WARP = 512
MAX_WARPS = 16


@triton.jit
def add_rms_norm_kernel(
    hidden_ptr,  # [num_tokens, SIZE], contiguous; the sum goes here with HAS_DELTA
    delta_ptr,  # as hidden; not read without HAS_DELTA
    weight_ptr,  # float32 [SIZE]
    out_ptr,  # as hidden, out
    eps,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    HAS_DELTA: tl.constexpr,
):
    """One program: one token's row."""
    start = tl.program_id(0).to(tl.int64) * SIZE
    column = tl.arange(0, PADDED_SIZE)
    exists = column < SIZE
    row = tl.load(hidden_ptr + start + column, mask=exists, other=0.0).to(tl.float32)
    if HAS_DELTA:
        row += tl.load(delta_ptr + start + column, mask=exists, other=0.0).to(tl.float32)
        kept = row.to(hidden_ptr.dtype.element_ty)
        tl.store(hidden_ptr + start + column, kept, mask=exists)
        # What is normed is what the stream holds, rounded as it is.
        row = kept.to(tl.float32)
    factor = tl.rsqrt(tl.sum(row * row, axis=0) / SIZE + eps)
    weight = tl.load(weight_ptr + column, mask=exists, other=0.0)
    tl.store(out_ptr + start + column, (row * factor * weight).to(out_ptr.dtype.element_ty), mask=exists)


def add_rms_norm(
    hidden: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """hidden += delta, and the RMSNorm of the sum: x / sqrt(mean(x^2) + eps) * weight, in float32, rounded once.

    Args:
        hidden: [num_tokens, hidden_size], contiguous, the residual stream; changed unless delta is None.
        delta: as hidden, or None for nothing to add.
        weight: float32 [hidden_size].
        out: as hidden, where to put the result; a new tensor by default.

    Returns:
        [num_tokens, hidden_size] in hidden's dtype.
    """
    num_tokens, size = hidden.shape
    if out is None:
        out = torch.empty_like(hidden)
    assert hidden.is_contiguous(), "the kernel counts on contiguous rows"
    assert out.is_contiguous(), "the kernel counts on contiguous rows"
    assert delta is None or (delta.is_contiguous() and delta.shape == hidden.shape), "what is added must fit"
    padded_size = triton.next_power_of_2(size)
    add_rms_norm_kernel[(num_tokens,)](
        hidden,
        delta,
        weight,
        out,
        eps,
        SIZE=size,
        PADDED_SIZE=padded_size,
        HAS_DELTA=delta is not None,
        num_warps=num_warps(padded_size),
        **UNFUSED,
    )
    launches["add_rms_norm"] += 1
    return out


def num_warps(padded_size: int) -> int:
    """Warps of a program whose row has that many columns, a power of two."""
    return min(MAX_WARPS, max(1, padded_size // COLUMNS_PER_WARP))
