"""What is drawn on the device against what the host draws of the same logits: tokens, penalties, logprobs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pageframe.kernels.triton.sampling_penalties import penalize
from pageframe.runtime.device_logits import logprobs_of, penalties_of
from pageframe.runtime.request import Request, SamplingParams, TokenLogprobs
from pageframe.runtime.sampler import Sampler
from pageframe.runtime.step_plan import SamplingBatch, ScoredTokens
from pageframe.runtime.token_rules import TokenRules

NUM_ROWS = 16
#: Logits of a row: as many as Llama-3.1 has; toy.
VOCAB_SIZE, TOY_VOCAB_SIZE = 128_256, 3000
#: Tokens of the prompt and of the output of rows with penalties.
PROMPT, OUTPUT = 1500, 700
TOP_LOGPROBS = 5


@dataclass(frozen=True, slots=True)
class Case:
    """Logits float32 [NUM_ROWS, vocab_size] on a device, and how they are drawn."""

    logits: torch.Tensor
    batch: SamplingBatch


def make_case(device: torch.device, num_rows: int = NUM_ROWS) -> Case:
    """All filters and none, some rows greedy; every third row has penalties on what it has had, a bias, and banned
    ids; some want logprobs."""
    vocab_size = VOCAB_SIZE if device.type == "cuda" else TOY_VOCAB_SIZE
    rows = np.arange(num_rows)
    rng = np.random.default_rng(0)
    ruled = np.flatnonzero(rows % 3 == 2).tolist()
    tokens = {row: rng.integers(0, vocab_size, PROMPT + OUTPUT).astype(np.int32) for row in ruled}
    batch = SamplingBatch(
        temperature=np.where(rows % 4 == 3, 0.0, 0.5 + rows % 16 / 8).astype(np.float32),
        top_k=np.where(rows % 3 == 1, 50, 0).astype(np.int32),
        top_p=np.where(rows % 2 == 1, 0.9, 1.0).astype(np.float32),
        min_p=np.where(rows % 5 == 2, 0.05, 0.0).astype(np.float32),
        seed=rows * 1_000_003,
        output_index=rows * 7,
        num_logprobs=np.where(rows % 4 == 1, TOP_LOGPROBS, np.where(rows % 4 == 2, 0, -1)).astype(np.int32),
        banned=tuple((row, tuple(range(row, vocab_size, 2))) for row in ruled),
        rules=tuple((row, _rules(tokens[row])) for row in ruled),
    )
    logits = torch.randn(num_rows, vocab_size, device=device) * 3
    return Case(logits, batch)


def _rules(token_ids: np.ndarray[tuple[int], np.dtype[np.int32]]) -> TokenRules:
    """Of a request that has had these tokens, the last OUTPUT of them as its output."""
    params = SamplingParams(
        logit_bias={3: 2.5, 4: -1.0}, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25
    )
    request = Request("", token_ids, params, "", 0, 0, 0.0, 0, 0, len(token_ids) + 1, frozenset(), frozenset())
    request.num_prompt_tokens = len(token_ids) - OUTPUT
    return TokenRules(request)


def tokens_that_differ(device: torch.device) -> float:
    """The share of tokens that kernels draw otherwise than the host does."""
    case = make_case(device)
    drawn = [
        Sampler(lambda hidden: hidden, on_device=there).sample_logits(case.logits, case.batch).token_ids
        for there in (True, False)
    ]
    return float(np.mean(drawn[0] != drawn[1]))


def penalized_logits(device: torch.device) -> float:
    """The largest difference of a logit after penalties; the host's bias goes before."""
    case = make_case(device)
    ours = case.logits.clone()
    expected = case.logits.cpu().numpy().copy()
    for row, rules in case.batch.rules:
        ours[row, torch.from_numpy(rules.bias_ids)] += torch.from_numpy(rules.bias).to(device)
        rules.apply(expected[row])
    penalties = penalties_of(case.batch, device)
    assert penalties is not None
    penalize(ours, penalties)
    assert not np.array_equal(expected, case.logits.cpu().numpy())
    return float(np.abs(ours.cpu().numpy() - expected).max())


def logprobs(device: torch.device) -> float:
    """The largest difference of a logprob, of drawn tokens and of a prompt's, between the device and the host; infinite
    where other tokens are the likeliest."""
    case = make_case(device)
    ours, theirs = (
        Sampler(lambda hidden: hidden, on_device=there).sample_logits(case.logits, case.batch).logprobs
        for there in (True, False)
    )
    if ours.keys() != theirs.keys():
        return float("inf")
    token_ids, num_top = np.arange(NUM_ROWS, dtype=np.int64) * 11, np.full(NUM_ROWS, TOP_LOGPROBS, np.int32)
    scored = ScoredTokens(np.arange(NUM_ROWS), token_ids, num_top, ((0, NUM_ROWS),))
    found = [*(ours[row] for row in theirs), *logprobs_of(case.logits, token_ids, num_top)]
    expected = [*theirs.values(), *Sampler(lambda hidden: hidden).score(case.logits.cpu(), scored)[0]]
    return max(_difference(*pair) for pair in zip(found, expected, strict=True))


def _difference(ours: TokenLogprobs, theirs: TokenLogprobs) -> float:
    if ours.top_ids != theirs.top_ids:
        return float("inf")
    pairs = zip([ours.logprob, *ours.top_logprobs], [theirs.logprob, *theirs.top_logprobs], strict=True)
    return max(abs(mine - other) for mine, other in pairs)
