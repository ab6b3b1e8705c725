"""Numbers on their way from the host to a device, without waiting for it. Needs no Triton."""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def staged(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """`values` as a tensor on the host, from which a copy to `device` need not wait: for a GPU in pinned memory, which
    torch gives to no other copy before this one is done; elsewhere the array's own memory. It must be contiguous: from
    pinned memory with gaps, torch's copy waits."""
    assert values.flags.c_contiguous, f"an array of strides {values.strides} cannot be copied without waiting"
    tensor = torch.from_numpy(values)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def page_locked(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the host, copies between which and a GPU need not wait. torch's own pinned memory would do, but it
    comes in powers of two. To be given to `page_unlock` before it is given back.

    Raises:
        RuntimeError: the driver cannot lock as much.
    """
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    # Whole pages of its own: what is locked is pages, and none of them twice.
    memory = torch.from_numpy(np.frombuffer(mmap.mmap(-1, size), np.uint8))
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(cudart.cudaHostRegister(memory.data_ptr(), size, 0))
    return memory.view(dtype).view(shape)


def page_unlock(memory: torch.Tensor) -> None:
    """Let go of what `page_locked` gave."""
    if memory.nbytes:
        torch.cuda.synchronize()  # a copy may be under way
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(cudart.cudaHostUnregister(memory.data_ptr()))


def to_device(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """`values` on `device`: in the order of its stream, and the host does not wait. On a CPU it is the same memory."""
    tensor = staged(values, device)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)
