"""Numbers on their way from the host to a device, without waiting for it. Needs no Triton."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch


def staged(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """`values` as a tensor on the host, from which a copy to `device` need not wait: for a GPU in pinned memory, which
    torch gives to no other copy before this one is done; elsewhere the array's own memory."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def to_device(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """`values` on `device`: in the order of its stream, and the host does not wait. On a CPU it is the same memory."""
    return staged(values, device).to(device, non_blocking=True)
