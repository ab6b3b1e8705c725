"""Gumbel noise, and the contest for the largest logit / temperature + noise, as device functions.

The generator and its layout are those of runtime/philox.py: Philox 4x32-10 with key = seed and counter = (token id //
4, 0, output index's low and high 32 bits), word token id % 4, noise -log(-log((word + 0.5) / 2**32)) in float64.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
# Kernels are written in Triton's language, whose types are not Python's.

from __future__ import annotations

import triton
import triton.language as tl

UNIFORM_STEP = tl.constexpr(2.0**-32)
# Float32's rounding, here and where a number up to 30 in size is added, is well below this.
BOUND_SLACK = tl.constexpr(1e-3)


@triton.jit
def counter_words(seed, output_index, counters):
    """Four uint32 words for each of the int32 `counters`; seed and output_index are int64."""
    low = (output_index & 0xFFFFFFFF).to(tl.uint32)
    high = (output_index >> 32).to(tl.uint32)
    return tl.philox(seed, counters, (output_index & 0).to(tl.uint32), low, high)


@triton.jit
def words_from(seed, output_index, start, SIZE: tl.constexpr):
    """The words of tokens start to start + SIZE, uint32 [SIZE]; both are multiples of 4."""
    counters = start // 4 + tl.arange(0, SIZE // 4)
    word0, word1, word2, word3 = counter_words(seed, output_index, counters)
    return tl.interleave(tl.interleave(word0, word2), tl.interleave(word1, word3))


@triton.jit
def words_of(seed, output_index, ids):
    """The words of these tokens, uint32 of their shape: four times the work of `words_from`."""
    word0, word1, word2, word3 = counter_words(seed, output_index, ids // 4)
    even = tl.where(ids % 4 == 0, word0, word2)
    odd = tl.where(ids % 4 == 1, word1, word3)
    return tl.where(ids % 2 == 0, even, odd)


@triton.jit
def noise_bound(words):
    """At least the noise of each word and at most 0.4 more for noise above 0, in float32.

    With t = 1 - uniform, -log(1 - t) >= t, so the noise is at most -log(t), and t is computed without cancellation.
    """
    rest = ((words ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * UNIFORM_STEP
    return -tl.log(rest) + BOUND_SLACK


@triton.jit
def exact_score(logits, words, best, temperature):
    """(logit - best) / temperature + noise, in float64."""
    uniform = (words.to(tl.float64) + 0.5) * UNIFORM_STEP
    return (logits.to(tl.float64) - best.to(tl.float64)) / temperature - tl.log(-tl.log(uniform))


@triton.jit
def contest(score, winner, winner_logit, logits, ids, words, kept, best, temperature, SIZE: tl.constexpr):
    """The largest score so far, whose, and that token's logit, after the kept tokens; the lower id of equals.

    Two float64 logarithms for every token would take longer than all the rest, on GPUs that are slow at float64 far
    longer. Only tokens whose bound reaches the best score so far can win, and they are few.
    """
    bounds = (logits - best) / temperature.to(tl.float32) + noise_bound(words)
    bounds = tl.where(kept, bounds, float("-inf"))
    lanes = tl.arange(0, SIZE)
    bound, lane = tl.max(bounds, axis=0, return_indices=True)
    while (bound > float("-inf")) & (bound >= score):
        chosen = lanes == lane
        logit = tl.sum(tl.where(chosen, logits, 0.0), axis=0)
        word = tl.sum(tl.where(chosen, words, 0), axis=0)
        token = tl.sum(tl.where(chosen, ids, 0), axis=0)
        reached = exact_score(logit, word, best, temperature)
        wins = (reached > score) | ((reached == score) & (token < winner))
        score = tl.where(wins, reached, score)
        winner = tl.where(wins, token, winner)
        winner_logit = tl.where(wins, logit, winner_logit)
        bounds = tl.where(chosen, float("-inf"), bounds)
        bound, lane = tl.max(bounds, axis=0, return_indices=True)
    return score, winner, winner_logit
