"""Dtypes of the Triton kernels: what a torch dtype is called there, what products are made in, and where fp8 exists."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pageframe.kernels.triton.quantize import KV_LIMITS

TRITON_DTYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.int8: tl.int8,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e4m3fnuz: tl.float8e4b8,
}
#: From this compute capability on NVIDIA's processors convert fp8.
FP8_CAPABILITY = (8, 9)


def dot_dtype(q_dtype: torch.dtype, cache_dtype: torch.dtype) -> torch.dtype:
    """What queries and keys, weights and values are multiplied in; the products are added in float32.

    Codes of 8 bits are exact in each dtype that queries have, so those are multiplied in it.
    """
    dtype = q_dtype if cache_dtype in KV_LIMITS else torch.promote_types(q_dtype, cache_dtype)
    if dtype == torch.bfloat16 and triton.knobs.runtime.interpret:
        # The interpreter keeps bfloat16 as its bits in uint16, and its matrix product multiplies those.
        return torch.float32
    return dtype


def fp8_dtype(device: torch.device) -> torch.dtype | None:
    """The fp8 dtype that this device's kernels convert; None where they convert none."""
    if device.type != "cuda":
        return torch.float8_e4m3fn if triton.knobs.runtime.interpret else None
    if torch.version.hip is not None:
        name = torch.cuda.get_device_properties(device).gcnArchName
        return torch.float8_e4m3fnuz if name.startswith("gfx942") else None
    return torch.float8_e4m3fn if torch.cuda.get_device_capability(device) >= FP8_CAPABILITY else None
