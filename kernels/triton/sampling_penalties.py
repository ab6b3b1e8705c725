"""Penalties on tokens that a request already has, from sparse arrays: only those tokens' logits are touched."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
# Kernels are written in Triton's language, whose types are not Python's.

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pageframe.kernels.triton import UNFUSED, launches

#: Tokens that a program changes at once.
TILE = 1024


@dataclass(frozen=True, slots=True)
class Penalties:
    """What num_rows rows are penalised for: tensors on the logits' device.

    With l a token's logit, l / repetition where it is positive, else l * repetition, for tokens of prompt and output
    (Keskar et al., "CTRL", arXiv:1909.05858); then l - presence - frequency * count for tokens that are `count` times
    in the output (as the OpenAI API defines them).

    Args:
        row_start: int32 [num_rows + 1], each row's range of the arrays over tokens.
        token_ids: int32, of prompt and output, each once in a row; those beyond the vocabulary have no effect.
        output_counts: int32, how often each is in the output; 0 for one that only the prompt has.
        repetition, presence, frequency: float32 [num_rows]; 1, 0 and 0 change nothing.
    """

    row_start: torch.Tensor
    token_ids: torch.Tensor
    output_counts: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor


# Three rows of one table, whose width is the number of rows: where each begins must not decide what is compiled.
@triton.jit(do_not_specialize_on_alignment=["repetition_ptr", "presence_ptr", "frequency_ptr"])
def penalize_kernel(
    logits_ptr,  # float32 [num_rows, vocab_size], rows contiguous, in and out
    row_start_ptr,  # int32 [num_rows + 1]
    token_ids_ptr,  # int32
    output_counts_ptr,  # int32
    repetition_ptr,  # float32 [num_rows]
    presence_ptr,  # float32 [num_rows]
    frequency_ptr,  # float32 [num_rows]
    logits_stride,
    vocab_size,
    TILE: tl.constexpr,
):
    """One program changes one row.

    In float64, where every product is exact, so that it does not matter whether the compiler fuses it with the
    subtraction; rounded to float32 once.
    """
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    repetition = tl.load(repetition_ptr + row).to(tl.float64)
    presence = tl.load(presence_ptr + row).to(tl.float64)
    frequency = tl.load(frequency_ptr + row).to(tl.float64)
    end = tl.load(row_start_ptr + row + 1)
    for start in range(tl.load(row_start_ptr + row), end, TILE):
        at = start + tl.arange(0, TILE)
        ids = tl.load(token_ids_ptr + at, mask=at < end, other=-1)
        exists = (ids >= 0) & (ids < vocab_size)
        counts = tl.load(output_counts_ptr + at, mask=at < end, other=0)
        logits = tl.load(row_ptr + ids, mask=exists, other=0.0).to(tl.float64)
        logits = tl.where(logits > 0, logits / repetition, logits * repetition)
        logits -= tl.where(counts > 0, presence + frequency * counts.to(tl.float64), 0.0)
        tl.store(row_ptr + ids, logits.to(tl.float32), mask=exists)


def penalize(logits: torch.Tensor, penalties: Penalties) -> None:
    """Apply the penalties to float32 logits [num_rows, vocab_size], rows contiguous, in place."""
    num_rows, vocab_size = logits.shape
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1, "the kernel counts on contiguous rows"
    if num_rows == 0:
        return
    penalize_kernel[(num_rows,)](
        logits,
        penalties.row_start,
        penalties.token_ids,
        penalties.output_counts,
        penalties.repetition,
        penalties.presence,
        penalties.frequency,
        logits.stride(0),
        vocab_size,
        TILE=TILE,
        **UNFUSED,
    )
    launches["penalize"] += 1
