"""The compiled CPU engine: linear maps over stored weights, paged attention in place, and whole decoder layers.

Compiled from engine.cpp when first asked for. A row's result is the same bits whatever the number of rows and threads.
Knows nothing of models, files or requests.
"""

from __future__ import annotations

from functools import cache

from pageframe.kernels.cpu.arena import Arena
from pageframe.kernels.cpu.engine import CompiledLayer, CompiledStep, CpuKernels, LayerShape
from pageframe.kernels.cpu.isa import BuildError
from pageframe.kernels.cpu.linear import PackedWeight, RowNorm
from pageframe.kernels.cpu.packing import BLOCK_BYTES, GROUP, STRIP, pack_bf16, pack_blocks

__all__ = [
    "BLOCK_BYTES",
    "GROUP",
    "STRIP",
    "Arena",
    "BuildError",
    "CompiledLayer",
    "CompiledStep",
    "CpuKernels",
    "LayerShape",
    "PackedWeight",
    "RowNorm",
    "load",
    "pack_bf16",
    "pack_blocks",
]


@cache
def load() -> CpuKernels:
    """The compiled engine, the same one each time.

    Raises:
        BuildError: this machine cannot have it; the message says why, in one line.
    """
    return CpuKernels()
