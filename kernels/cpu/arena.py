"""Weights side by side in memory, in the order in which a step reads them.

The linears ask for memory ahead of what they multiply, past the end of a weight too: then that is the next weight.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pageframe.kernels.cpu.linear import PackedWeight
from pageframe.kernels.huge_pages import huge_page_memory

__all__ = ["Arena"]

_ALIGNMENT = 64


class Arena:
    """Memory for the values of some weights. It lives as long as any of them.

    Args:
        sizes: bytes of each weight's values, in order.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._memory = huge_page_memory(sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes))
        self._start = 0

    def move(self, weight: PackedWeight) -> PackedWeight:
        """The same weight with its values behind those that were moved before."""
        data = weight.values.data
        end = self._start + data.nbytes
        place = self._memory[self._start : end].view(data.dtype).view(data.shape)
        self._start += -(-data.nbytes // _ALIGNMENT) * _ALIGNMENT
        place.copy_(data)
        return PackedWeight(dataclasses.replace(weight.values, data=place), weight.bias)
