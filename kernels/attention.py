"""The one entry to attention over the paged KV cache: picks a backend, and owns the cache's layout.

A layer's cache is `[num_blocks, 2, num_kv_heads, block_size, head_dim]`, K at index 0 and V at index 1 of the
second axis. One of int8 or fp8 holds codes; beside it stand `kv_scales`, float32
`[num_blocks, 2, num_kv_heads, block_size]`: a slot of a head is its codes times its scale. What is inside is private to
the kernels: others write through `write_kv` and `copy_blocks` and look through `read_block`. Nothing here knows which
block is free, whose it is, or what a request is.
"""

from __future__ import annotations

from typing import Protocol

import torch

from pageframe.kernels.plan import AttentionPlan, StepBatch, UnsupportedError
from pageframe.kernels.reference import ReferenceBackend

__all__ = [
    "AttentionPlan",
    "Backend",
    "StepBatch",
    "UnsupportedError",
    "copy_blocks",
    "fill_block",
    "kv_cache_shape",
    "read_block",
    "select_backend",
]

BACKENDS = ("auto", "cpu", "reference", "triton")


class Backend(Protocol):
    """One implementation of paged attention. All have the same signatures and pass the same tests."""

    @property
    def name(self) -> str: ...

    def check_supported(self, head_dim: int, block_size: int, dtype: torch.dtype) -> None:
        """Ask before the first step; `dtype` is the cache's.

        Raises:
            UnsupportedError: this backend has no kernel for that shape or dtype.
        """

    def plan_attention(self, batch: StepBatch, tables: torch.Tensor, block_size: int) -> AttentionPlan:
        """Work out once per step what every layer will use.

        Args:
            tables: int32 [max_requests, max_blocks] on the device, the resident block tables. Entries before a
                window may be -1, entries past a context may hold anything; neither is followed.
        """

    def write_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
        kv_scales: torch.Tensor | None = None,
    ) -> None:
        """Store the K and V of a step's tokens, cast to the cache's dtype.

        Args:
            k, v: [num_tokens, num_kv_heads, head_dim], of any dtype; views will do if head_dim is contiguous.
            kv_cache: one layer, contiguous.
            slots: int64 [num_tokens], `block_id * block_size + offset`, each at most once; -1 writes nothing.
            kv_scales: of a cache of codes, contiguous; written too.

        Raises:
            UnsupportedError: there are scales, and `check_supported` refuses their dtype.
        """

    def paged_attention(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        plan: AttentionPlan,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        kv_scales: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of a step's queries over their contexts, K and V of this step already written.

        Args:
            q: [plan.num_tokens, num_heads, head_dim], a view will do if head_dim is contiguous; num_heads is a
                multiple of num_kv_heads, query head h reads KV head h // (num_heads // num_kv_heads).
            scale: factor of q . k.
            window: how many positions back a query sees, itself included; None sees everything.
            softcap: scores become softcap * tanh(score / softcap).
            kv_scales: of a cache of codes, contiguous.
            out: where to put the result; a new tensor by default.

        Returns:
            [plan.num_tokens, num_heads, head_dim] in q's dtype, zeros for a request whose context is 0.

        Raises:
            UnsupportedError: as `write_kv`.
        """


def select_backend(name: str, device: torch.device) -> Backend:
    """The backend of this name; "auto" is triton on a GPU and reference elsewhere: the compiled one is for bfloat16
    alone, so whoever knows the dtype chooses it.

    Raises:
        UnsupportedError: the name is unknown, or the backend does not run on this device.
    """
    if name not in BACKENDS:
        raise UnsupportedError(f"backend is {name!r}; it must be one of {', '.join(BACKENDS)}")
    if name == "reference" or (name == "auto" and device.type != "cuda"):
        return ReferenceBackend()
    if name == "cpu":
        from pageframe.kernels.cpu import BuildError, load
        from pageframe.kernels.cpu.backend import CpuBackend

        if device.type != "cpu":
            raise UnsupportedError(f"backend is 'cpu', but the device is {device.type}")
        try:
            return CpuBackend(load().library)
        except BuildError as error:
            raise UnsupportedError(f"backend is 'cpu', but there are no compiled kernels: {error}") from error
    # Imported only when wanted: it pulls in the compiler, which is slow to load and absent on some platforms.
    try:
        from pageframe.kernels.triton.backend import TritonBackend
    except ImportError as error:
        raise UnsupportedError(f"backend is {name!r}, but triton cannot be imported here: {error}") from error
    return TritonBackend(device)


def kv_cache_shape(num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int) -> tuple[int, ...]:
    """The shape of one layer's K/V."""
    return (num_blocks, 2, num_kv_heads, block_size, head_dim)


def read_block(
    kv_cache: torch.Tensor, block_id: int, kv_scales: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one block, each [num_kv_heads, block_size, head_dim], in the cache's dtype, or float32 where there are
    scales; slots not written hold anything."""
    block = kv_cache[block_id]
    if kv_scales is not None:
        block = block * kv_scales[block_id].unsqueeze(-1)
    return block[0], block[1]


def copy_blocks(kv_cache: torch.Tensor, src_ids: torch.Tensor, dst_ids: torch.Tensor) -> None:
    """Copy block src_ids[i] over block dst_ids[i], all sources read before any is overwritten.

    Args:
        kv_cache: one layer's; its scales are copied likewise.
        src_ids, dst_ids: int64 [num_copies] on the cache's device; no id twice in dst_ids.
    """
    kv_cache.index_copy_(0, dst_ids, kv_cache.index_select(0, src_ids))


def fill_block(
    kv_cache: torch.Tensor, block_ids: torch.Tensor, value: float, kv_scales: torch.Tensor | None = None
) -> None:
    """Set every slot of these blocks (int64 [n] on the cache's device) to `value`: NaN poisons what nobody may read."""
    if kv_scales is None:
        kv_cache.index_fill_(0, block_ids, value)
    else:
        kv_cache.index_fill_(0, block_ids, 1)
        kv_scales.index_fill_(0, block_ids, value)
