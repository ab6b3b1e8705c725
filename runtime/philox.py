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

import numpy as np
import numpy.typing as npt

# No two tokens' noise is further apart: the largest is -log(-log(1 - 2**-33)) = 22.874, the smallest
# -log(-log(2**-33)) = -3.130.
NOISE_SPAN = 26.01

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW_32 = 0xFFFFFFFF

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


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[int, int]) -> tuple[Words, Words, Words, Words]:
    """Four random 32-bit words per counter, by ten rounds.

    Args:
        counter: four uint64 arrays (or scalars) of values below 2**32, broadcast against one another.
        key: two values below 2**32.

    Returns:
        Four uint64 arrays of values below 2**32.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    low, half = np.uint64(_LOW_32), np.uint64(32)
    for _ in range(10):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (product1 >> half) ^ c1 ^ np.uint64(k0), product1 & low
        c2, c3 = (product0 >> half) ^ c3 ^ np.uint64(k1), product0 & low
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW_32, (k1 + _KEY_STEPS[1]) & _LOW_32
    return c0, c1, c2, c3


def token_words(seed: int, output_index: int, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    """The word of each token id.

    Args:
        seed: the choice's, signed 64 bits.
        output_index: how many output tokens come before, from 0.
        token_ids: [n], ascending, at least one.
    """
    blocks = token_ids >> 2
    first, last = int(blocks[0]), int(blocks[-1])
    if len(blocks) < last - first:
        counter0, positions = blocks, np.arange(0, 4 * len(blocks), 4) + (token_ids & 3)
    else:
        counter0, positions = np.arange(first, last + 1), token_ids - 4 * first
    counter = (
        counter0.astype(np.uint64),
        np.uint64(0),
        np.uint64(output_index & _LOW_32),
        np.uint64(output_index >> 32),
    )
    table = np.empty((len(counter0), 4), np.uint32)
    for column, words in enumerate(philox4x32(counter, (seed & _LOW_32, (seed >> 32) & _LOW_32))):
        table[:, column] = words
    return table.reshape(-1)[positions]


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
