"""Gumbel noise that depends on nothing but (seed, output index, token id).

Philox 4x32-10 is the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy
as 1, 2, 3", SC 2011. This module knows nothing of logits or requests.

The layout is fixed for good, since a seed must draw the same tokens on every device and in every version:

    key      (seed's low 32 bits, seed's high 32 bits)
    counter  (token id // 4, 0, output index's low 32 bits, its high 32 bits)
    word     number token id % 4 of the four that the counter gives
    uniform  (word + 0.5) / 2**32, in float64, where it is exact and never 0 or 1
    noise    -log(-log(uniform)), in float64, from -3.14 to 22.88
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# No two tokens' noise is further apart: the largest is -log(-log(1 - 2**-33)) = 22.874, the smallest
# -log(-log(2**-33)) = -3.130.
NOISE_SPAN = 26.01

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW_32 = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)

Int64s = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64] | np.uint64


def choice_seed(request_seed: int, choice_index: int) -> int:
    """The seed of one of a request's choices: output `choice_index` (from 0) of SplitMix64 started at `request_seed`.

    SplitMix64 is from Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    Both seeds are signed 64-bit numbers.
    """
    mask = 2**64 - 1
    word = (request_seed + 0x9E3779B97F4A7C15 * (choice_index + 1)) & mask
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & mask
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & mask
    word ^= word >> 31
    return word - 2**64 if word >= 2**63 else word


def philox4x32(
    counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]
) -> tuple[Words, Words, Words, Words]:
    """Four random 32-bit words per counter and key, by ten rounds.

    Args:
        counter, key: uint64 arrays (or scalars) of values below 2**32, broadcast against one another.

    Returns:
        Four uint64 arrays of values below 2**32.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (product1 >> _32) ^ c1 ^ k0, product1 & _LOW_32
        c2, c3 = (product0 >> _32) ^ c3 ^ k1, product0 & _LOW_32
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW_32, (k1 + _KEY_STEPS[1]) & _LOW_32
    return c0, c1, c2, c3


def token_words(seeds: Int64s, output_indices: Int64s, token_ids: Sequence[Int64s]) -> npt.NDArray[np.uint32]:
    """The word of each token id, all rows' in one array. Rows share the call, never a number.

    Args:
        seeds: int64 [num_rows], the choices'.
        output_indices: int64 [num_rows], how many output tokens come before, from 0.
        token_ids: num_rows arrays, each ascending and not empty.
    """
    counters: list[Int64s] = []
    positions: list[Int64s] = []
    num_words = 0
    for ids in token_ids:
        counter0, position = _counters(ids)
        counters.append(counter0)
        positions.append(position + num_words)
        num_words += 4 * len(counter0)
    per_row = [len(counter0) for counter0 in counters]

    def halves(numbers: Int64s) -> tuple[Words, Words]:
        # One row's number is broadcast, which is faster than an array of it.
        repeated = np.repeat(numbers, per_row) if len(per_row) > 1 else numbers
        return repeated.view(np.uint64) & _LOW_32, repeated.view(np.uint64) >> _32

    counter = (np.concatenate(counters).view(np.uint64), np.uint64(0), *halves(output_indices))
    table = np.empty((num_words // 4, 4), np.uint32)
    for column, words in enumerate(philox4x32(counter, halves(seeds))):
        table[:, column] = words
    return table.reshape(-1)[np.concatenate(positions)]


def _counters(ids: Int64s) -> tuple[Int64s, Int64s]:
    """The first counter words that `ids` need, and where each id's word is when the counters' words are in a row."""
    first, last = int(ids[0]) >> 2, int(ids[-1]) >> 2
    if len(ids) > last - first:
        return np.arange(first, last + 1), ids - 4 * first
    return ids >> 2, np.arange(0, 4 * len(ids), 4) + (ids & 3)


def gumbel(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.float64]:
    """The Gumbel noise of each word, float64 [n]."""
    uniform = (words.astype(np.float64) + 0.5) * 2.0**-32
    noise: npt.NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise


def gumbel_bound(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.float32]:
    """At least `gumbel` and at most 0.4 more for noise above 0, for a fraction of its cost: float32 [n].

    With t = 1 - uniform, -log(1 - t) >= t, so the noise is at most -log(t), and t is computed without cancellation.
    The 1e-3 is for float32's rounding, here and where a number up to 30 in size is added.
    """
    rest = ((~words).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    bound: npt.NDArray[np.float32] = np.float32(1e-3) - np.log(rest)
    return bound
