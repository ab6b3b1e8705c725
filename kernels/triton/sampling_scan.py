"""The first reading of a step's logits: every row in parts that all of the GPU's processors share.

Of each part it finds the largest logit, that of each of its lanes, and, of a row that no filter limits, which token
wins. The kernels in `sampling` put a row's parts together, with the functions below.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
# Kernels are written in Triton's language, whose types are not Python's.

from __future__ import annotations

import triton
import triton.language as tl

from pageframe.kernels.triton import sampling_table
from pageframe.kernels.triton.sampling_filters import NO_ID, is_kept, load_logits, order_key
from pageframe.kernels.triton.sampling_noise import contest, exact_score, words_from, words_of

TEMPERATURE, SPAN, REACH, TOP_K, TOP_P, SEED, OUTPUT_INDEX, NUM_TOP = map(tl.constexpr, sampling_table.DRAW_COLUMNS)
TOKEN, LOGIT, BEST, TOTAL, FIRST_TOP = map(tl.constexpr, sampling_table.RESULT_COLUMNS)
NUM_COLUMNS = tl.constexpr(len(sampling_table.DRAW_COLUMNS))
#: What the scan finds of a part of a row.
PART_BEST, PART_BEST_ID, PART_WINNER, PART_LOGIT, PART_TOTAL = map(tl.constexpr, range(5))
PART_COLUMNS = tl.constexpr(5)


@triton.jit
def load_float64(ptr):
    return tl.load(ptr).to(tl.float64, bitcast=True)


@triton.jit
def is_free(draw_ptr, vocab_size):
    """Whether no filter limits what a row may draw."""
    top_k = tl.load(draw_ptr + TOP_K)
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    has_top_p = load_float64(draw_ptr + TOP_P) < 1.0
    has_min_p = load_float64(draw_ptr + REACH) < load_float64(draw_ptr + SPAN)
    return (has_top_k | has_top_p | has_min_p) == 0


@triton.jit
def key_below(best, distance):
    """The key of the logit that lies this float64 below `best`."""
    return order_key((best.to(tl.float64) - distance).to(tl.float32))


@triton.jit
def scan_kernel(
    logits_ptr,  # float32 [num_rows, vocab_size], rows contiguous
    draws_ptr,  # int64 [num_rows, NUM_COLUMNS]
    parts_ptr,  # float64 [num_rows, num_parts, PART_COLUMNS], out
    lanes_ptr,  # float32 [num_rows, num_parts, LANES], out: the largest logit of each lane
    logits_stride,
    vocab_size,
    PART: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program scans PART tokens of one row."""
    row = tl.program_id(0).to(tl.int64)
    part = row * tl.num_programs(1) + tl.program_id(1)
    start = tl.program_id(1) * PART
    ids = start + tl.arange(0, PART)
    logits = load_logits(logits_ptr + row * logits_stride, ids, vocab_size)
    best, lane = tl.max(logits, axis=0, return_indices=True)
    part_ptr = parts_ptr + part * PART_COLUMNS
    tl.store(part_ptr + PART_BEST, best.to(tl.float64))
    tl.store(part_ptr + PART_BEST_ID, (start + lane).to(tl.float64))
    lanes = tl.max(tl.reshape(logits, [PART // LANES, LANES]), axis=0)
    tl.store(lanes_ptr + part * LANES + tl.arange(0, LANES), lanes)

    draw_ptr = draws_ptr + row * NUM_COLUMNS
    if (tl.load(draw_ptr + NUM_TOP) >= 0) & (best > float("-inf")):
        tl.store(part_ptr + PART_TOTAL, tl.sum(tl.exp(logits - best), axis=0).to(tl.float64))
    temperature = load_float64(draw_ptr + TEMPERATURE)
    if (temperature > 0) & (best > float("-inf")) & is_free(draw_ptr, vocab_size):
        # Scores are relative to the part's best here. What is too far below that cannot win against it either.
        kept = is_kept(order_key(logits), ids, key_below(best, load_float64(draw_ptr + SPAN)), vocab_size - 1)
        words = words_from(tl.load(draw_ptr + SEED), tl.load(draw_ptr + OUTPUT_INDEX), start, PART)
        score = tl.full([], float("-inf"), tl.float64)
        winner = tl.full([], NO_ID, tl.int32)
        score, winner, logit = contest(score, winner, best, logits, ids, words, kept, best, temperature, PART)
        tl.store(part_ptr + PART_WINNER, winner.to(tl.float64))
        tl.store(part_ptr + PART_LOGIT, logit.to(tl.float64))


@triton.jit
def load_parts(parts_ptr, num_parts, COLUMN: tl.constexpr, other, PARTS: tl.constexpr):
    """One column of a row's parts, float64 [PARTS]."""
    part = tl.arange(0, PARTS)
    return tl.load(parts_ptr + part * PART_COLUMNS + COLUMN, mask=part < num_parts, other=other)


@triton.jit
def load_best(parts_ptr, num_parts, PARTS: tl.constexpr):
    """A row's largest logit and its lowest id."""
    bests = load_parts(parts_ptr, num_parts, PART_BEST, float("-inf"), PARTS)
    ids = load_parts(parts_ptr, num_parts, PART_BEST_ID, NO_ID, PARTS)
    best = tl.max(bests, axis=0)
    return best.to(tl.float32), tl.min(tl.where(bests == best, ids, NO_ID), axis=0).to(tl.int32)


@triton.jit
def best_winner(parts_ptr, num_parts, best, temperature, seed, output_index, PARTS: tl.constexpr):
    """The id with the largest score among the parts' winners, the lowest of equals."""
    bests = load_parts(parts_ptr, num_parts, PART_BEST, float("-inf"), PARTS)
    has_winner = bests > float("-inf")
    ids = tl.where(has_winner, load_parts(parts_ptr, num_parts, PART_WINNER, 0.0, PARTS), 0.0).to(tl.int32)
    logits = load_parts(parts_ptr, num_parts, PART_LOGIT, 0.0, PARTS)
    scores = exact_score(logits, words_of(seed, output_index, ids), best, temperature)
    scores = tl.where(has_winner, scores, float("-inf"))
    return tl.min(tl.where(scores == tl.max(scores, axis=0), ids, NO_ID), axis=0)


@triton.jit
def load_lanes(lanes_ptr, num_parts, LANES: tl.constexpr, PARTS: tl.constexpr):
    """The largest logit of each lane of a row, [PARTS * LANES]."""
    lane = tl.arange(0, PARTS * LANES)
    return tl.load(lanes_ptr + lane, mask=lane < num_parts * LANES, other=float("-inf"))
