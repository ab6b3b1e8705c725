"""top_k and top_p of one row without sorting it, as device functions.

What a filter keeps is a cut: every token above one logit, and of those at it the lowest ids. A cut is a pair (key,
last): `key` the logit's place among all float32s, `last` the largest id kept at it.

The scan of a row finds its largest logit and the largest of each of some thousand lanes. The n-th largest of the lanes
is a lower bound of the row's n-th largest, so a second reading collects the tokens from there on, which are little more
than n, in a buffer, and the cut is searched among those. (Bounding the top k by the largest of parts: Gaihre et al.,
"Dr. Top-k: delegate-centric top-k on GPUs", SC 2021.) Where the cut lies below them, or too many are equal, a bisection
over the row finds a range of logits that fits the buffer (threshold search instead of sorting, as FlashInfer's sampling
kernels do it: Ye et al., arXiv:2501.01005), a reading a step.

Amounts are whole numbers, so neither the order of tokens nor the way a row is cut into tiles changes a result.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
# Kernels are written in Triton's language, whose types are not Python's.

from __future__ import annotations

import triton
import triton.language as tl

from pageframe.kernels.triton.sampling_rules import MASS_EXPONENT as MASS_EXPONENT_VALUE

MASS_EXPONENT = tl.constexpr(MASS_EXPONENT_VALUE)
#: Added and taken away again it rounds a float64 to a whole number, ties to even.
ROUNDER = tl.constexpr(1.5 * 2.0**52)
LARGEST = tl.constexpr(3.4028234663852886e38)
NO_ID = tl.constexpr(2**31 - 1)


@triton.jit
def order_key(logits):
    """int32 that ascends with float32 logits, which hold neither NaN nor -0."""
    bits = logits.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_logit(key):
    """The float32 whose `order_key` this is."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def load_logits(row_ptr, ids, vocab_size):
    """A row's logits with NaN and ids beyond the vocabulary as -inf, +inf as the largest float32, -0 as 0."""
    logits = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
    logits = tl.where(logits == logits, logits, float("-inf"))
    logits = tl.where(logits > LARGEST, LARGEST, logits)
    return tl.where(logits == 0.0, 0.0, logits)


@triton.jit
def is_kept(keys, ids, key, last):
    return (keys > key) | ((keys == key) & (ids <= last))


@triton.jit
def token_amounts(logits, best, temperature, weighted, SIZE: tl.constexpr):
    """int64 [SIZE]: each token's mass where `weighted`, else 1. See `sampling_rules` for the mass."""
    amounts = tl.full([SIZE], 1, tl.int64)
    if weighted != 0:
        distances = tl.div_rn(best - logits, temperature.to(tl.float32))
        masses = tl.exp(-distances.to(tl.float64) + MASS_EXPONENT)
        amounts = ((masses + ROUNDER) - ROUNDER).to(tl.int64)
    return amounts


@triton.jit
def mass_target(top_p, total):
    """The least mass that is at least `top_p` (a float64) of `total`."""
    return tl.maximum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def guess_key(lanes, num_lanes, floor, best_key, wanted, vocab_size, CAPACITY: tl.constexpr):
    """A key from which on there are at least `wanted` tokens, and hardly more than CAPACITY, where there is one.

    Args:
        lanes: float32, the largest logit of each lane, of which num_lanes have tokens. Where 3/4 of them reach a
            logit, 1.4 tokens a lane do, if tokens are spread evenly.
    """
    most = tl.minimum(num_lanes * 3 // 4, CAPACITY // 2)
    least = tl.minimum(tl.maximum(wanted, most // 2), most)
    keys = order_key(lanes)
    low = floor
    high = best_key + 1
    if vocab_size <= CAPACITY:
        high = low + 1
    while high.to(tl.int64) - low > 1:
        middle = low + ((high.to(tl.int64) - low) // 2).to(tl.int32)
        reached = tl.sum((keys >= middle).to(tl.int32), axis=0)
        # Both are `middle` where it will do.
        low = tl.where(reached >= least, middle, low)
        high = tl.where(reached <= most, middle, high)
    return low


@triton.jit
def gather_row(
    row_ptr, vocab_size, best, temperature, weighted, key, last, low, high, logits_ptr, ids_ptr,
    TILE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Store the kept tokens with keys in [low, high), ascending ids, as many as fit into the buffer.

    Returns how many there are, and the amount of all kept tokens. Reads the row once.
    """
    count = 0
    amounts = tl.zeros([TILE], tl.int64)
    # Barriers: threads read what others store.
    tl.debug_barrier()
    for start in range(0, vocab_size, TILE):
        ids = start + tl.arange(0, TILE)
        logits = load_logits(row_ptr, ids, vocab_size)
        keys = order_key(logits)
        kept = is_kept(keys, ids, key, last)
        amounts += tl.where(kept, token_amounts(logits, best, temperature, weighted, TILE), 0)
        inside = (kept & (keys >= low) & (keys < high)).to(tl.int32)
        place = count + tl.cumsum(inside, axis=0) - 1
        fits = (inside != 0) & (place < CAPACITY)
        tl.store(logits_ptr + place, logits, mask=fits)
        tl.store(ids_ptr + place, ids, mask=fits)
        count += tl.sum(inside, axis=0)
    tl.debug_barrier()
    return count, tl.sum(amounts, axis=0)


@triton.jit
def load_buffer(logits_ptr, ids_ptr, count, CAPACITY: tl.constexpr):
    """The first `count` tokens of the buffer: logits and ids, [CAPACITY]; NO_ID where there is none."""
    lanes = tl.arange(0, CAPACITY)
    logits = tl.load(logits_ptr + lanes, mask=lanes < count, other=float("-inf"))
    ids = tl.load(ids_ptr + lanes, mask=lanes < count, other=NO_ID)
    return logits, ids


@triton.jit
def measure_row(row_ptr, vocab_size, best, temperature, weighted, key, last, pivot, TILE: tl.constexpr):
    """Of the kept tokens with a key of at least `pivot`: how many there are, their amount, and their smallest key.

    And the largest key of the others. Reads the row once.
    """
    counts = tl.zeros([TILE], tl.int32)
    amounts = tl.zeros([TILE], tl.int64)
    smallest = tl.full([TILE], 2**31 - 1, tl.int32)
    largest = tl.full([TILE], -(2**31), tl.int32)
    for start in range(0, vocab_size, TILE):
        ids = start + tl.arange(0, TILE)
        logits = load_logits(row_ptr, ids, vocab_size)
        keys = order_key(logits)
        kept = is_kept(keys, ids, key, last)
        reached = kept & (keys >= pivot)
        counts += reached.to(tl.int32)
        amounts += tl.where(reached, token_amounts(logits, best, temperature, weighted, TILE), 0)
        smallest = tl.where(reached, tl.minimum(smallest, keys), smallest)
        largest = tl.where(kept & (keys < pivot), tl.maximum(largest, keys), largest)
    return tl.sum(counts, axis=0), tl.sum(amounts, axis=0), tl.min(smallest, axis=0), tl.max(largest, axis=0)


@triton.jit
def between(low, high, step):
    """A key inside (low, high), which are at least 2 apart: halfway by logit, each fourth step halfway by key.

    Logits lie more evenly than keys, half of which are of numbers below 1 in size; but only keys always end.
    """
    middle = order_key(key_logit(low) * 0.5 + key_logit(high) * 0.5)
    by_key = low + ((high.to(tl.int64) - low) // 2).to(tl.int32)
    middle = tl.where(step % 4 == 3, by_key, middle)
    return tl.minimum(tl.maximum(middle, low + 1), high - 1)


@triton.jit
def narrow_row(
    row_ptr, vocab_size, best, temperature, weighted, key, last, top_k, top_p,
    TILE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Keys [low, high) in which the cut lies, of at most CAPACITY tokens or of one key, by a reading a step.

    Returns low, high, the amount of the kept tokens above, and the amount to be reached.
    """
    low = key
    high = order_key(best) + 1
    count = vocab_size
    count_above = 0
    target = top_k * 0
    amount_above = top_k * 0
    step = 0
    # The first step measures all that is kept.
    while (step == 0) | ((count > CAPACITY) & (high.to(tl.int64) - low > 1)):
        pivot = low
        if step > 0:
            pivot = between(low, high, step)
        reached, amount, smallest, largest = measure_row(
            row_ptr, vocab_size, best, temperature, weighted, key, last, pivot, TILE
        )
        if step == 0:
            count = reached
            target = tl.minimum(top_k, amount)
            if weighted != 0:
                target = mass_target(top_p, amount)
        enough = amount >= target
        inside = reached - count_above
        count = tl.where(enough, inside, count - inside)
        count_above = tl.where(enough, count_above, reached)
        amount_above = tl.where(enough, amount_above, amount)
        low = tl.where(enough, smallest, low)
        high = tl.where(enough, high, largest + 1)
        step += 1
    return low, high, amount_above, target


@triton.jit
def nth_id(row_ptr, vocab_size, key, n, TILE: tl.constexpr):
    """The n-th lowest id, from 1, of the tokens with this key. Reads the row once."""
    found = vocab_size - 1
    for start in range(0, vocab_size, TILE):
        ids = start + tl.arange(0, TILE)
        equal = (order_key(load_logits(row_ptr, ids, vocab_size)) == key).to(tl.int32)
        rank = tl.cumsum(equal, axis=0)
        found = tl.minimum(found, tl.min(tl.where((equal != 0) & (rank == n), ids, NO_ID), axis=0))
        n -= tl.sum(equal, axis=0)
    return found


@triton.jit
def settle(
    row_ptr, vocab_size, keys, amounts, count, low, high, amount_above, target, key, last,
    TILE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """The cut that keeps the fewest tokens whose amount reaches `target`; it lies in [low, high).

    Args:
        keys, amounts: [CAPACITY], of the `count` tokens in [low, high); amounts are 0 where there is none. Where more
            than CAPACITY are inside, all have one key.
        amount_above: what the tokens at or above `high` amount to.
        key, last: the cut so far.
    """
    while high.to(tl.int64) - low > 1:
        middle = low + ((high.to(tl.int64) - low) // 2).to(tl.int32)
        enough = amount_above + tl.sum(tl.where(keys >= middle, amounts, 0), axis=0) >= target
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    at = (keys == low) & (amounts > 0)
    each = tl.max(tl.where(at, amounts, 0), axis=0)
    num_equal = tl.where(count > CAPACITY, count, tl.sum(at.to(tl.int32), axis=0))
    missing = target - amount_above - tl.sum(tl.where(keys > low, amounts, 0), axis=0)
    wanted = ((missing + each - 1) // each).to(tl.int32)
    end = tl.where(low == key, last, vocab_size - 1)
    if wanted < num_equal:
        end = nth_id(row_ptr, vocab_size, low, wanted, TILE)
    return low, end


@triton.jit
def filter_row(
    row_ptr, vocab_size, best, lanes, num_lanes, temperature, floor, top_k, top_p, logits_ptr, ids_ptr,
    TILE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """The cut of top_k and then of top_p, tokens with keys below `floor` left out of all.

    Args:
        top_k: int64, 0 for none; top_p: float64, 1 for none.
        lanes, num_lanes: see `guess_key`.
        floor: a key; below it no token has a mass.
        logits_ptr, ids_ptr: the row's buffer, [CAPACITY] each.

    Returns:
        key, last, and how many tokens the buffer holds, all that are kept among them; -1 where it holds others.
    """
    best_key = order_key(best)
    key = floor
    last = vocab_size - 1
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    top_k = tl.where(has_top_k, top_k, 0)
    has_top_p = top_p < 1.0
    guess = guess_key(lanes, num_lanes, floor, best_key, top_k, vocab_size, CAPACITY)
    weigh_row = ((top_k == 0) & has_top_p).to(tl.int32)
    held, row_amount = gather_row(
        row_ptr, vocab_size, best, temperature, weigh_row, key, last, guess, best_key + 1, logits_ptr, ids_ptr,
        TILE, CAPACITY,
    )  # fmt: skip
    held = tl.where(held > CAPACITY, -1, held)
    for weighted in range(2):
        if ((weighted == 0) & has_top_k) | ((weighted == 1) & has_top_p):
            low = guess
            high = best_key + 1
            count = held
            above = row_amount * 0
            logits, ids = load_buffer(logits_ptr, ids_ptr, held, CAPACITY)
            keys = order_key(logits)
            amounts = token_amounts(logits, best, temperature, weighted, CAPACITY)
            amounts = tl.where(is_kept(keys, ids, key, last), amounts, 0)
            held_amount = tl.sum(amounts, axis=0)
            # Where the buffer holds all, fewer than top_k are no reason to look for more.
            target = tl.where(guess == floor, tl.minimum(top_k, held_amount), top_k)
            if weighted == 1:
                target = mass_target(top_p, tl.where(has_top_k, held_amount, row_amount))
            if (held < 0) | (held_amount < target):
                held = -1
                low, high, above, target = narrow_row(
                    row_ptr, vocab_size, best, temperature, weighted, key, last, top_k, top_p, TILE, CAPACITY
                )
                count, _amount = gather_row(
                    row_ptr, vocab_size, best, temperature, 0, key, last, low, high, logits_ptr, ids_ptr,
                    TILE, CAPACITY,
                )  # fmt: skip
                logits, ids = load_buffer(logits_ptr, ids_ptr, count, CAPACITY)
                keys = order_key(logits)
                amounts = token_amounts(logits, best, temperature, weighted, CAPACITY)
                amounts = tl.where(is_kept(keys, ids, key, last), amounts, 0)
            key, last = settle(
                row_ptr, vocab_size, keys, amounts, count, low, high, above, target, key, last, TILE, CAPACITY
            )
    return key, last, held
