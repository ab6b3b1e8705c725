"""Linear maps on a CPU without bf16 instructions: weights read as bfloat16, products and sums in float32.

Compiled from linear.cpp when first asked for; a machine without a compiler has none, and callers use torch instead.
Knows nothing of models or layers.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache

import torch
from torch import Tensor

from pageframe.kernels.cpu.build import BuildError, load_library

__all__ = ["CpuKernels", "load", "pack_bf16"]

logger = logging.getLogger(__name__)

#: Outputs in a strip of the packed layout; linear.cpp has the same number.
STRIP = 16


class CpuKernels:
    """The compiled functions. `load` makes the one there is."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._linear_bf16 = library.pageframe_linear_bf16
        self._linear_bf16.restype = None
        self._linear_bf16.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 3 + [ctypes.c_int]

    def linear_bf16(
        self, x: Tensor, packed: Tensor, n: int, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """x @ W.T + bias in float32, on as many threads as torch uses.

        A row's result is the same bits whatever the number of rows and threads.

        Args:
            x: float32 [rows, k].
            packed: what `pack_bf16` made of W [n, k].
            bias: float32 [n] or None.
            out: float32 [rows, n] to be overwritten; it shares no memory with the others.

        Returns:
            float32 [rows, n]: `out` if given.

        Raises:
            ValueError: a tensor has another dtype or shape, is not contiguous or not on the CPU.
        """
        rows, k = x.shape
        _check("x", x, torch.float32, (rows, k))
        _check("packed", packed, torch.bfloat16, (-(-n // STRIP), k, 8, 2))
        if out is None:
            out = x.new_empty(rows, n)
        _check("out", out, torch.float32, (rows, n))
        if bias is not None:
            _check("bias", bias, torch.float32, (n,))
        if rows > 0:
            self._linear_bf16(
                x.data_ptr(),
                packed.data_ptr(),
                None if bias is None else bias.data_ptr(),
                out.data_ptr(),
                rows,
                n,
                k,
                torch.get_num_threads(),
            )
        return out


def pack_bf16(weight: Tensor) -> Tensor:
    """W's values in the order the kernel reads them.

    Args:
        weight: bfloat16 [n, k] on the CPU.

    Returns:
        bfloat16 [ceil(n / 16), k, 8, 2], where [s, i, j, h] is W[16 s + 8 h + j, i], or 0 for an output past the last.

    Raises:
        ValueError: another dtype, device or number of dimensions.
    """
    if weight.dtype != torch.bfloat16 or not weight.is_cpu or weight.dim() != 2:
        raise ValueError(f"weight must be bfloat16 [n, k] on the CPU; it is {weight.dtype} {list(weight.shape)}")
    n, k = weight.shape
    packed = weight.new_zeros(-(-n // STRIP), k, 8, 2)
    whole = n // STRIP
    packed[:whole] = weight[: whole * STRIP].view(whole, 2, 8, k).permute(0, 3, 2, 1)
    for output in range(whole * STRIP, n):
        half, place = divmod(output % STRIP, 8)
        packed[whole, :, place, half] = weight[output]
    return packed


@cache
def load() -> CpuKernels | None:
    """The compiled kernels, or None, with the reason logged once, where this machine cannot have them."""
    try:
        return CpuKernels(load_library())
    except BuildError as error:
        logger.warning("no compiled CPU kernels: %s", error)
        return None


def _check(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_cpu or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous {dtype} {list(shape)} on the CPU; it is {tensor.dtype} {list(tensor.shape)} "
            f"with strides {list(tensor.stride())} on {tensor.device}"
        )
