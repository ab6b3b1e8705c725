"""A step's plan as the Triton kernels read it. One copy to the device makes it, one brings it up to date in place.

Decode rows need no work list: their kernel finds its work in the context lengths, on the device. So a captured graph
replays over any lengths that `update_plan` writes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pageframe.kernels.plan import AttentionPlan, StepBatch
from pageframe.kernels.triton.prefill import PrefillTiles, plan_prefill
from pageframe.kernels.triton.transfer import staged, to_device

#: Entries of a row of `TritonParts.arrays` are a multiple of this, so that each row starts at a multiple of 16 bytes:
#: Triton would compile kernels once more for one that does not.
ALIGNED_ENTRIES = 4


@dataclass(frozen=True, slots=True, eq=False)
class TritonParts:
    """This backend's part of a plan.

    Args:
        tables: int32 [max_requests, max_blocks], the resident block tables.
        arrays: int32 [3, at least num_requests + 1], of which the plan's rows, context_lens and query_start are views.
        prefill: the tiles of the prefill chunks; None where all requests are decode rows.
    """

    tables: torch.Tensor
    arrays: torch.Tensor
    prefill: PrefillTiles | None


def plan_step(batch: StepBatch, tables: torch.Tensor, block_size: int) -> AttentionPlan:
    """See `Backend.plan_attention`."""
    num_requests = len(batch.context_lens)
    width = -(-(num_requests + 1) // ALIGNED_ENTRIES) * ALIGNED_ENTRIES
    host = np.zeros((3, width), dtype=np.int32)
    host[:2] = _requests(batch, width)
    host[2, : num_requests + 1] = batch.query_start
    arrays = to_device(host, tables.device)
    prefill = plan_prefill(batch, tables.device) if batch.num_decode < num_requests else None
    return AttentionPlan(
        rows=arrays[0, :num_requests],
        context_lens=arrays[1, :num_requests],
        query_start=arrays[2, : num_requests + 1],
        num_decode=batch.num_decode,
        num_tokens=int(batch.query_start[-1]),
        block_size=block_size,
        parts=TritonParts(tables, arrays, prefill),
    )


def update_plan(plan: AttentionPlan, batch: StepBatch) -> None:
    """Make a plan of decode rows that of another step of at most as many rows, in the same memory of the device.

    The rows that the step does not have get context 0: their result is zeros.
    """
    parts = plan.parts
    assert isinstance(parts, TritonParts), "the plan was made by another backend"
    assert parts.prefill is None, "a plan with prefill chunks serves its own step alone"
    assert batch.num_decode == len(batch.context_lens), "only steps of decode rows are replayed"
    assert batch.num_decode <= plan.num_decode, f"{batch.num_decode} decode rows, the plan has {plan.num_decode}"
    requests = _requests(batch, parts.arrays.shape[1])
    parts.arrays[:2].copy_(staged(requests, parts.arrays.device), non_blocking=True)


def _requests(batch: StepBatch, width: int) -> npt.NDArray[np.int32]:
    """Rows and context lengths [2, width], zeros where there is no request."""
    requests = np.zeros((2, width), dtype=np.int32)
    requests[0, : len(batch.rows)] = batch.rows
    requests[1, : len(batch.rows)] = batch.context_lens
    return requests
