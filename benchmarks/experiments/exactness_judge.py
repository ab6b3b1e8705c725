"""transformers as the judge of our tokens: how far is each below the maximum of its logits?

A seeded choice is judged in the same way. With temperature T the sampler takes the maximum of logit + T * noise, and
the noise is known: it depends on the seed, the output's index and the token alone. So T * noise is added to
transformers' logits before the maximum is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from pageframe.benchmarks.experiments.ties import TIE_TOLERANCE
from pageframe.runtime.models.source import resolve_source
from pageframe.runtime.philox import gumbel, token_words


@dataclass(frozen=True, slots=True)
class Draw:
    """How one answer's tokens were drawn.

    Args:
        temperature: 0 is greedy.
        seed: the choice's own.
    """

    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """How our tokens compare with the oracle's logits.

    Args:
        worst_gap: the largest difference between the oracle's maximum and its logit of our token.
        ties: tokens that are not the oracle's maximum, but within the tolerance.
        wrong: tokens farther away.
    """

    tokens: int
    ties: int
    wrong: int
    worst_gap: float

    @property
    def exact(self) -> float:
        """The share of tokens that are the oracle's very maximum."""
        return 1 - (self.ties + self.wrong) / self.tokens


@cache
def load_oracle() -> Any:
    """transformers' model of the default file, in float32; loaded once."""
    from transformers import AutoModelForCausalLM

    path = resolve_source("default").path
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


def judge(
    oracle: Any,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    draws: Sequence[Draw] | None = None,
    tolerance: float = TIE_TOLERANCE["float32"],
) -> Verdict:
    """Feed the oracle each prompt with our answer and look up each of our tokens. All greedy without `draws`."""
    answers = list(zip(map(tuple, prompts), map(tuple, outputs), draws or [Draw()] * len(outputs), strict=True))
    gaps = torch.cat([_gaps(oracle, *answer) for answer in answers])
    ties = int(((gaps > 0) & (gaps <= tolerance)).sum())
    return Verdict(len(gaps), ties, int((gaps > tolerance).sum()), float(gaps.max()))


@cache
def _gaps(oracle: Any, prompt: tuple[int, ...], output: tuple[int, ...], draw: Draw) -> torch.Tensor:
    """How far each of our tokens is below the maximum, float64 [len(output)]. Ways often give the same answers."""
    with torch.inference_mode():
        logits: torch.Tensor = oracle(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1].double()
    if draw.temperature > 0:
        logits = logits + draw.temperature * torch.from_numpy(_noise(draw.seed, *logits.shape))
    return logits.max(dim=1).values - logits.gather(1, torch.tensor(output)[:, None])[:, 0]


def _noise(seed: int, num_tokens: int, vocab_size: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The sampler's Gumbel noise of every token at every output index, float64 [num_tokens, vocab_size]."""
    seeds = np.full(num_tokens, seed, dtype=np.int64)
    every_id = np.arange(vocab_size)
    words = token_words(seeds, np.arange(num_tokens), [every_id] * num_tokens)
    return gumbel(words).reshape(num_tokens, vocab_size)
