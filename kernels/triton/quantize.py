"""K and V as codes of 8 bits with a scale for each row: how a kernel makes them, and the largest code of each dtype.

int8 codes are integers; fp8 codes have 4 bits of exponent and 3 of mantissa (OCP's e4m3, or AMD's variant of it).
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Kernels are written in Triton's language, whose types are not Python's.

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Dtypes of codes, each with its largest code.
KV_LIMITS: dict[torch.dtype, float] = {
    torch.int8: 127.0,
    torch.float8_e4m3fn: 448.0,
    torch.float8_e4m3fnuz: 240.0,
}
#: A sum with so many steps (1.5 * 2^23) has no bits for a part of one: it is rounded to the nearest, ties to even.
STEPS = tl.constexpr(12582912.0)
#: What a row's largest number counts as at the least: a row of zeros must not be divided by 0.
SMALLEST = tl.constexpr(1e-30)


@triton.jit
def quantize_rows(x, KV_DTYPE: tl.constexpr):
    """Codes and scale of each row: a row is about its codes times its scale.

    Args:
        x: float32 [ROWS, DIM].
        KV_DTYPE: int8, float8e4nv or float8e4b8.

    Returns:
        (codes KV_DTYPE [ROWS, DIM], scale float32 [ROWS]). The row's largest number has the largest code, each other
        the code nearest to it, ties to even: the same codes as the CPU's kernels make. A row of zeros has scale 0.
    """
    FP8_LIMIT: tl.constexpr = 448.0 if KV_DTYPE.is_fp8e4nv() else 240.0
    LIMIT: tl.constexpr = 127.0 if KV_DTYPE.is_int8() else FP8_LIMIT
    largest = tl.max(tl.abs(x), axis=1)
    codes = x * tl.div_rn(LIMIT, tl.maximum(largest, SMALLEST))[:, None]
    # Rounded here and not by the conversion: to int8 it truncates, to fp8 it rounds wrongly in Triton's interpreter.
    if KV_DTYPE.is_int8():
        steps = STEPS
    else:
        # The step is 1/8 of the power of two at or below a code, and does not shrink further below the least normal.
        LEAST_NORMAL: tl.constexpr = 2.0**-6 if KV_DTYPE.is_fp8e4nv() else 2.0**-7
        power = (codes.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        steps = tl.maximum(power, LEAST_NORMAL) * (STEPS / 8)
    codes = (codes + steps) - steps
    return codes.to(KV_DTYPE), tl.div_rn(largest, LIMIT)
