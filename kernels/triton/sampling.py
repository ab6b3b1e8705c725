"""Tokens drawn where the logits are: filters, noise and logprobs of all rows of a step, one copy back.

Two kernels. The scan reads every row once, in parts that all processors share: each part's largest logit, and, of a
row without filters, the part's winner. Then one program a row takes the best of the winners, or filters: that reads
the row once more (from the cache), rarely oftener: see `sampling_filters`. So a step reads num_rows * vocab_size * 4
bytes from memory, the least there is.

The result is, to the token, what runtime/sampler.py draws on the host: filters cut by whole numbers, and scores are
compared in float64. (The logarithms of numpy and of a GPU may differ in a float64's last bit: two tokens whose scores
are closer than that may change places, once in some 10**13 draws.)
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
# Kernels are written in Triton's language, whose types are not Python's.

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from pageframe.kernels.triton import UNFUSED, launches
from pageframe.kernels.triton.sampling_filters import (
    NO_ID,
    filter_row,
    gather_row,
    is_kept,
    load_buffer,
    load_logits,
    order_key,
)
from pageframe.kernels.triton.sampling_noise import contest, words_from, words_of
from pageframe.kernels.triton.sampling_penalties import Penalties, penalize
from pageframe.kernels.triton.sampling_scan import (
    BEST,
    FIRST_TOP,
    LOGIT,
    NUM_COLUMNS,
    NUM_TOP,
    OUTPUT_INDEX,
    PART_BEST,
    PART_COLUMNS,
    PART_TOTAL,
    REACH,
    SEED,
    SPAN,
    TEMPERATURE,
    TOKEN,
    TOP_K,
    TOP_P,
    TOTAL,
    best_winner,
    is_free,
    key_below,
    load_best,
    load_float64,
    load_lanes,
    load_parts,
    scan_kernel,
)
from pageframe.kernels.triton.sampling_table import Drawn, Draws
from pageframe.kernels.triton.transfer import to_device


@dataclass(frozen=True, slots=True)
class Settings:
    """Launch settings. None changes a result.

    Args:
        part: tokens of a row that one program of the scan reads; lanes: of a row, see `guess_key`.
        tile: tokens that the other kernels read at once; capacity: tokens that they keep aside for each row.

    All are powers of two. With these no register is spilled, or four where the vocabulary is past 131,072.
    """

    part: int = 1024
    lanes: int = 2048
    scan_warps: int = 4
    tile: int = 4096
    capacity: int = 2048
    num_warps: int = 8


DEFAULTS = Settings()


@triton.jit
def draw_from_row(row_ptr, vocab_size, best, temperature, key, last, seed, output_index, TILE: tl.constexpr):
    """The id of the kept token with the largest score. Reads the row once."""
    score = tl.full([], float("-inf"), tl.float64)
    winner = tl.full([], NO_ID, tl.int32)
    logit = best
    for start in range(0, vocab_size, TILE):
        ids = start + tl.arange(0, TILE)
        logits = load_logits(row_ptr, ids, vocab_size)
        kept = is_kept(order_key(logits), ids, key, last)
        if tl.max(kept.to(tl.int32), axis=0) > 0:
            words = words_from(seed, output_index, start, TILE)
            score, winner, logit = contest(score, winner, logit, logits, ids, words, kept, best, temperature, TILE)
    return winner


@triton.jit
def draw_from_buffer(
    logits_ptr, ids_ptr, count, best, temperature, key, last, seed, output_index, CAPACITY: tl.constexpr
):  # fmt: skip
    """The same, of the tokens in the buffer."""
    logits, ids = load_buffer(logits_ptr, ids_ptr, count, CAPACITY)
    kept = is_kept(order_key(logits), ids, key, last)
    score = tl.full([], float("-inf"), tl.float64)
    winner = tl.full([], NO_ID, tl.int32)
    words = words_of(seed, output_index, ids)
    _, winner, _ = contest(score, winner, best, logits, ids, words, kept, best, temperature, CAPACITY)
    return winner


# The result is as wide as the step's longest list of likeliest tokens, which must not decide what is compiled.
@triton.jit(do_not_specialize=["result_stride"])
def draw_kernel(
    logits_ptr,  # float32 [num_rows, vocab_size], rows contiguous
    draws_ptr,  # int64 [num_rows, NUM_COLUMNS]
    parts_ptr,  # float64 [num_rows, num_parts, PART_COLUMNS], of `scan_kernel`
    lanes_ptr,  # float32 [num_rows, num_parts, LANES], of `scan_kernel`
    buffer_logits_ptr,  # float32 [num_rows, CAPACITY], scratch
    buffer_ids_ptr,  # int32 [num_rows, CAPACITY], scratch
    result_ptr,  # float64 [num_rows, result_stride], the column TOKEN out
    logits_stride,
    result_stride,
    vocab_size,
    num_parts,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    CAPACITY: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One program draws one row. The token is -1 where no logit is above -inf."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    draw_ptr = draws_ptr + row * NUM_COLUMNS
    row_parts_ptr = parts_ptr + row * num_parts * PART_COLUMNS
    logits_out = buffer_logits_ptr + row * CAPACITY
    ids_out = buffer_ids_ptr + row * CAPACITY
    temperature = load_float64(draw_ptr + TEMPERATURE)
    seed = tl.load(draw_ptr + SEED)
    output_index = tl.load(draw_ptr + OUTPUT_INDEX)
    best, token = load_best(row_parts_ptr, num_parts, PARTS)
    if best == float("-inf"):
        token = -1
    elif temperature > 0:
        if is_free(draw_ptr, vocab_size):
            token = best_winner(row_parts_ptr, num_parts, best, temperature, seed, output_index, PARTS)
        else:
            top_k = tl.load(draw_ptr + TOP_K)
            top_p = load_float64(draw_ptr + TOP_P)
            key = key_below(best, load_float64(draw_ptr + SPAN))
            last = vocab_size - 1
            held = -1
            if ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1.0):
                lanes = load_lanes(lanes_ptr + row * num_parts * LANES, num_parts, LANES, PARTS)
                key, last, held = filter_row(
                    row_ptr, vocab_size, best, lanes, num_parts * LANES, temperature, key, top_k, top_p,
                    logits_out, ids_out, TILE, CAPACITY,
                )  # fmt: skip
            near = key_below(best, load_float64(draw_ptr + REACH))
            last = tl.where(near > key, vocab_size - 1, last)
            key = tl.maximum(near, key)
            if held >= 0:
                token = draw_from_buffer(
                    logits_out, ids_out, held, best, temperature, key, last, seed, output_index, CAPACITY
                )
            else:
                token = draw_from_row(row_ptr, vocab_size, best, temperature, key, last, seed, output_index, TILE)
    tl.store(result_ptr + row * result_stride + TOKEN, token.to(tl.float64))


@triton.jit(do_not_specialize=["result_stride", "max_top"])
def logprobs_kernel(
    logits_ptr,  # as in `draw_kernel`
    draws_ptr,
    parts_ptr,
    lanes_ptr,
    buffer_logits_ptr,
    buffer_ids_ptr,
    result_ptr,  # float64 [num_rows, result_stride], the column TOKEN in, all others out
    logits_stride,
    result_stride,
    vocab_size,
    num_parts,
    max_top,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    CAPACITY: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One program: what one row's logprobs are made of, if it wants any. The likeliest are in order of their ids."""
    row = tl.program_id(0).to(tl.int64)
    num_top = tl.load(draws_ptr + row * NUM_COLUMNS + NUM_TOP)
    row_result_ptr = result_ptr + row * result_stride
    token = tl.load(row_result_ptr + TOKEN).to(tl.int32)
    if (num_top < 0) | (token < 0):
        return
    row_ptr = logits_ptr + row * logits_stride
    row_parts_ptr = parts_ptr + row * num_parts * PART_COLUMNS
    best, _ = load_best(row_parts_ptr, num_parts, PARTS)
    bests = load_parts(row_parts_ptr, num_parts, PART_BEST, float("-inf"), PARTS)
    totals = load_parts(row_parts_ptr, num_parts, PART_TOTAL, 0.0, PARTS)
    totals = tl.where(bests > float("-inf"), totals * tl.exp(bests - best), 0.0)
    tl.store(row_result_ptr + LOGIT, load_logits(row_ptr, token, vocab_size).to(tl.float64))
    tl.store(row_result_ptr + BEST, best.to(tl.float64))
    tl.store(row_result_ptr + TOTAL, tl.sum(totals, axis=0))
    if num_top > 0:
        logits_out = buffer_logits_ptr + row * CAPACITY
        ids_out = buffer_ids_ptr + row * CAPACITY
        one = tl.full([], 1.0, tl.float64)
        floor = order_key(tl.full([], float("-inf"), tl.float32))
        lanes = load_lanes(lanes_ptr + row * num_parts * LANES, num_parts, LANES, PARTS)
        key, last, held = filter_row(
            row_ptr, vocab_size, best, lanes, num_parts * LANES, one, floor, num_top, one,
            logits_out, ids_out, TILE, CAPACITY,
        )  # fmt: skip
        if held < 0:
            held, _amount = gather_row(
                row_ptr, vocab_size, best, one, 0, key, last, key, order_key(best) + 1,
                logits_out, ids_out, TILE, CAPACITY,
            )  # fmt: skip
        logits, ids = load_buffer(logits_out, ids_out, held, CAPACITY)
        kept = is_kept(order_key(logits), ids, key, last)
        place = FIRST_TOP + tl.cumsum(kept.to(tl.int32), axis=0) - 1
        tl.store(row_result_ptr + place, ids.to(tl.float64), mask=kept)
        tl.store(row_result_ptr + max_top + place, logits.to(tl.float64), mask=kept)


def draw_tokens(
    logits: torch.Tensor,
    draws: Draws,
    banned: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None,
    penalties: Penalties | None = None,
    settings: Settings | None = None,
) -> Drawn:
    """Draw a token for each row, on the logits' device, and bring all results to the host in one copy.

    Args:
        logits: float32 [num_rows, vocab_size], rows contiguous; they stay as they are.
        banned: row numbers and token ids, arrays of one length: what may not be drawn.
        penalties: applied before anything else but the logprobs, which are of `logits`.
    """
    settings = settings or DEFAULTS
    num_rows, vocab_size = logits.shape
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1, "the kernels count on contiguous rows"
    max_top = int(draws.num_top.max(initial=0))
    assert max_top <= settings.capacity, "the likeliest tokens pass through the buffer"
    result = torch.empty((num_rows, FIRST_TOP.value + 2 * max_top), dtype=torch.float64, device=logits.device)
    if num_rows:
        table = to_device(draws.pack(), logits.device)
        allowed = _allowed(logits, banned, penalties)
        scratch = _Scratch.make(num_rows, vocab_size, settings, logits.device)
        _scan(allowed, table, scratch, settings)
        _launch(draw_kernel, "draw", allowed, table, scratch, result, settings)
        if draws.num_top.max() >= 0:
            if allowed is not logits:
                _scan(logits, table, scratch, settings)
            _launch(logprobs_kernel, "logprobs", logits, table, scratch, result, settings, max_top)
    return Drawn(result.cpu().numpy(), vocab_size)


@dataclass(frozen=True, slots=True)
class _Scratch:
    """What the kernels hand on to one another: see `draw_kernel`."""

    parts: torch.Tensor
    lanes: torch.Tensor
    buffer_logits: torch.Tensor
    buffer_ids: torch.Tensor

    @classmethod
    def make(cls, num_rows: int, vocab_size: int, settings: Settings, device: torch.device) -> _Scratch:
        num_parts = triton.cdiv(vocab_size, settings.part)
        lanes = max(1, min(settings.part, settings.lanes // triton.next_power_of_2(num_parts)))
        return cls(
            torch.empty((num_rows, num_parts, PART_COLUMNS.value), dtype=torch.float64, device=device),
            torch.empty((num_rows, num_parts, lanes), dtype=torch.float32, device=device),
            torch.empty((num_rows, settings.capacity), dtype=torch.float32, device=device),
            torch.empty((num_rows, settings.capacity), dtype=torch.int32, device=device),
        )


def _scan(logits: torch.Tensor, table: torch.Tensor, scratch: _Scratch, settings: Settings) -> None:
    num_rows, vocab_size = logits.shape
    scan_kernel[(num_rows, scratch.parts.shape[1])](
        logits,
        table,
        scratch.parts,
        scratch.lanes,
        logits.stride(0),
        vocab_size,
        PART=settings.part,
        LANES=scratch.lanes.shape[2],
        num_warps=settings.scan_warps,
        **UNFUSED,
    )
    launches["scan"] += 1


def _launch(
    kernel: Any,
    name: str,
    logits: torch.Tensor,
    table: torch.Tensor,
    scratch: _Scratch,
    result: torch.Tensor,
    settings: Settings,
    *sizes: int,
) -> None:
    """Launch `draw_kernel` or `logprobs_kernel`, which takes `sizes` besides."""
    num_rows, vocab_size = logits.shape
    num_parts = scratch.parts.shape[1]
    kernel[(num_rows,)](
        logits,
        table,
        scratch.parts,
        scratch.lanes,
        scratch.buffer_logits,
        scratch.buffer_ids,
        result,
        logits.stride(0),
        result.stride(0),
        vocab_size,
        num_parts,
        *sizes,
        TILE=settings.tile,
        LANES=scratch.lanes.shape[2],
        CAPACITY=settings.capacity,
        PARTS=triton.next_power_of_2(num_parts),
        num_warps=settings.num_warps,
        **UNFUSED,
    )
    launches[name] += 1


def _allowed(
    logits: torch.Tensor,
    banned: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None,
    penalties: Penalties | None,
) -> torch.Tensor:
    """The logits to draw from: a copy where anything changes."""
    if banned is None and penalties is None:
        return logits
    allowed = logits.clone()
    if penalties is not None:
        penalize(allowed, penalties)
    if banned is not None:
        inside = (banned[1] >= 0) & (banned[1] < logits.shape[1])
        places = to_device(np.stack([numbers[inside] for numbers in banned]), logits.device)
        # Assigning a number of the host's would wait for its copy.
        allowed.index_put_((places[0], places[1]), allowed.new_full((), float("-inf")))
    return allowed
