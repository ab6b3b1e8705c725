"""What attention needs to know of one step, and the error of what no kernel supports.

Shared by all backends. Knows nothing of requests, schedules or models, and reads no K/V.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

CACHE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_BLOCK_SIZE = 256


class UnsupportedError(ValueError):
    """The device, backend, shape or dtype asked for is one that the kernels do not support."""


class StepBatch(Protocol):
    """The requests of one step, decode rows first, as arrays on the host.

    Attributes:
        rows: int32 [num_requests], each request's row of the block tables. Of a request with context 0 (padding)
            the row is never read.
        context_lens: int32 [num_requests], tokens in the cache after this step's write.
        query_start: int32 [num_requests + 1]; request i's queries are the tokens
            [query_start[i], query_start[i + 1]) of the step and the last positions of its context.
        num_decode: the first num_decode requests have exactly one query token; the rest are prefill chunks.
    """

    @property
    def rows(self) -> npt.NDArray[np.int32]: ...
    @property
    def context_lens(self) -> npt.NDArray[np.int32]: ...
    @property
    def query_start(self) -> npt.NDArray[np.int32]: ...
    @property
    def num_decode(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """One step's attention, made once and used by every layer. Valid until the next step's plan is made.

    Args:
        rows, context_lens, query_start: as in `StepBatch`, int32 on the device of the block tables.
        num_decode: leading requests with exactly one query token.
        num_tokens: query tokens of the step.
        block_size: slots of a block.
        parts: what the backend that made the plan keeps in it; private to that backend.
    """

    rows: torch.Tensor
    context_lens: torch.Tensor
    query_start: torch.Tensor
    num_decode: int
    num_tokens: int
    block_size: int
    parts: object


def make_plan(batch: StepBatch, device: torch.device, block_size: int, parts: object) -> AttentionPlan:
    """Copy the batch's arrays to the device, beside a backend's own parts."""
    return AttentionPlan(
        rows=_copied(batch.rows, device),
        context_lens=_copied(batch.context_lens, device),
        query_start=_copied(batch.query_start, device),
        num_decode=batch.num_decode,
        num_tokens=int(batch.query_start[-1]),
        block_size=block_size,
        parts=parts,
    )


def _copied(values: npt.NDArray[np.int32], device: torch.device) -> torch.Tensor:
    if device.type == "cpu":  # torch.tensor takes twenty times as long for a few numbers
        return torch.from_numpy(values.copy())
    return torch.tensor(values, device=device)


def check_cache(block_size: int, dtype: torch.dtype, dtypes: tuple[torch.dtype, ...] = CACHE_DTYPES) -> None:
    """Refuse a block size that no backend has, and a cache dtype that is none of `dtypes`.

    Raises:
        UnsupportedError: block_size is no power of two from 1 to 256, or dtype is none of those.
    """
    if not 1 <= block_size <= MAX_BLOCK_SIZE or block_size & (block_size - 1):
        raise UnsupportedError(f"block_size is {block_size}; it must be a power of two from 1 to {MAX_BLOCK_SIZE}")
    if dtype not in dtypes:
        names = ", ".join(str(known) for known in dtypes)
        raise UnsupportedError(f"the K/V dtype is {dtype}; it must be one of {names}")


def check_no_scales(backend: str, kv_scales: torch.Tensor | None) -> None:
    """For backends that have no int8 K/V.

    Raises:
        UnsupportedError: there are scales.
    """
    if kv_scales is not None:
        raise UnsupportedError(f"K and V are int8 codes with scales; the {backend} backend does not have them")
