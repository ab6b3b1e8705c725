"""Memory in huge pages, where the system has them.

What a step reads lies all over hundreds of megabytes: with pages of 4 KB each run of a few lines needs an address
translation of its own, on a virtual machine two nested ones.
"""

from __future__ import annotations

import mmap

import torch

__all__ = ["huge_page_memory"]


def huge_page_memory(num_bytes: int) -> torch.Tensor:
    """Zeros, uint8 [num_bytes]; they take room as they are first written.

    Raises:
        RuntimeError: the system does not give so much, in torch's words: cannot allocate memory.
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    try:
        memory = _private_memory(num_bytes)
    except OSError as error:
        raise RuntimeError(f"{num_bytes:,} bytes: cannot allocate memory") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _private_memory(num_bytes: int) -> mmap.mmap:
    """Python's default is memory shared with children, which systems rarely put into huge pages."""
    if hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, num_bytes)
