"""Rows with bias, penalties and masks drawn by the kernels: token by token what the host draws."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from fakes.ruled_model import VOCAB_SIZE, FakeFiller, FakeMatcher, batch_of, random_params, rules_of

from pageframe.kernels.triton import launches
from pageframe.runtime.request import SamplingParams
from pageframe.runtime.sampler import Sampler
from pageframe.runtime.step_plan import NO_TOKEN
from pageframe.runtime.token_masks import TokenMasks


def test_the_kernels_follow_the_rules_as_the_host_does(rng: np.random.Generator, device: torch.device) -> None:
    cases, numbers = [], random.Random(int(rng.integers(2**40)))
    for _ in range(16):
        params = random_params(numbers, logprobs=numbers.choice([None, 0, 3]))
        prompt, output = ([numbers.randrange(VOCAB_SIZE) for _ in range(numbers.randint(0, 15))] for _ in range(2))
        matcher = FakeMatcher(99, accepted=output) if numbers.random() < 0.4 else None
        cases.append((params, rules_of(params, prompt, output, matcher) if numbers.random() < 0.8 else None))
    none = SamplingParams(seed=0, allowed_token_ids=[4], bad_words_ids=[(4,)])
    cases.append((none, rules_of(none, [1], [])))
    batch = batch_of(cases, banned=((3, (0, 9)),))
    TokenMasks(32, VOCAB_SIZE, 1, lambda num_threads: FakeFiller()).begin(batch)
    table = rng.normal(0, 2, (len(cases), VOCAB_SIZE)).astype(np.float32)
    table[5] = -np.inf
    logits = torch.from_numpy(table).to(device)
    before, penalised = logits.clone(), launches["penalize"]
    with np.errstate(all="ignore"):
        drawn = Sampler(lambda hidden: hidden, on_device=True).sample_logits(logits, batch)
    expected = Sampler(lambda hidden: hidden, on_device=False).sample_logits(torch.from_numpy(table), batch)
    assert launches["penalize"] == penalised + 1
    assert torch.equal(logits, before), "the logits were written to"
    assert drawn.token_ids.tolist() == expected.token_ids.tolist()
    assert drawn.token_ids[-1] == NO_TOKEN
    assert sorted(drawn.logprobs) == sorted(expected.logprobs)
    assert drawn.logprobs
    for row, logprobs in drawn.logprobs.items():
        assert logprobs.top_ids == expected.logprobs[row].top_ids
        assert logprobs.logprob == pytest.approx(expected.logprobs[row].logprob, abs=1e-5)
        assert logprobs.top_logprobs == pytest.approx(expected.logprobs[row].top_logprobs, abs=1e-5)
