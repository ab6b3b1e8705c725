"""What the decode and the prefill kernel do alike with a tile of keys: load it, cap its scores, weigh its values."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Kernels are written in Triton's language, whose types are not Python's.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_tile(
    kv_cache_ptr, slot, live, k_to_v,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """K and V, DOT_DTYPE [TILE, PADDED_DIM], of the slots (int64 [TILE], in heads) that are `live`; zeros in place of
    the others, which are not read. A slot's V lies `k_to_v` heads behind its K."""
    dim = tl.arange(0, PADDED_DIM)
    read = live[:, None]
    if HEAD_DIM != PADDED_DIM:
        read = read & (dim < HEAD_DIM)[None, :]
    k_ptr = kv_cache_ptr + slot[:, None] * HEAD_DIM + dim[None, :]
    k = tl.load(k_ptr, mask=read, other=0.0).to(DOT_DTYPE)
    v = tl.load(k_ptr + k_to_v * HEAD_DIM, mask=read, other=0.0).to(DOT_DTYPE)
    return k, v


@triton.jit
def capped(scores, tanh_scale):
    """The hyperbolic tangent of scores in base 2: tanh(x) = 1 - 2 / (1 + exp(2x)), right also where exp overflows."""
    return tl.fma(1.0 / (1.0 + tl.exp2(scores * tanh_scale)), -2.0, 1.0)


@triton.jit
def weigh_values(
    attended, weights, v, kv_scales_ptr, slot, live, k_to_v, DOT_DTYPE: tl.constexpr, HAS_SCALES: tl.constexpr
):  # fmt: skip
    """attended + weights @ v, in float32 but for the factors; with HAS_SCALES v are codes. See `load_tile`."""
    if HAS_SCALES:
        v_scale = tl.load(kv_scales_ptr + slot + k_to_v, mask=live, other=0.0)
        if DOT_DTYPE.is_fp16():
            # A weight times a scale may be less than any float16: V itself, which was one once, is not.
            v = (v.to(tl.float32) * v_scale[:, None]).to(DOT_DTYPE)
        else:
            weights = weights * v_scale[None, :]
    return tl.dot(weights.to(DOT_DTYPE), v, attended, input_precision="ieee")
