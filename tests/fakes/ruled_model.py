"""A model of a few tokens whose logits come from the chain-hash model's contexts, and what its requests must give: the
rules written out plainly.

The engine's side is the real sampler over the chain-hash model as runner, so a wrong slot, a wrong row's rules and
rules of the wrong moment all change the output.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fakes.chain_hash import EOS, ChainHashModel
from fakes.engines import VirtualClock, tiny_config, tiny_model
from pageframe.runtime.batch import Batch
from pageframe.runtime.engine import Engine
from pageframe.runtime.grammar import MaskWords, Matcher
from pageframe.runtime.philox import gumbel, token_words
from pageframe.runtime.request import GREEDY_BELOW, Request, SamplingParams
from pageframe.runtime.sampler import Sampler
from pageframe.runtime.step_plan import SamplingBatch
from pageframe.runtime.token_masks import TokenMasks
from pageframe.runtime.token_rules import TokenRules

#: Not a multiple of a mask's 32 bits.
VOCAB_SIZE = 70

Float32s = npt.NDArray[np.float32]


def logits_of(context: int) -> Float32s:
    return np.random.default_rng(context % 2**63).normal(0, 2, VOCAB_SIZE).astype(np.float32)


class Runner:
    """The chain-hash model's forward pass, for a sampler that takes tensors."""

    def __init__(self, model: ChainHashModel) -> None:
        self.model = model

    def forward(self, batch: Batch) -> torch.Tensor:
        return torch.from_numpy(self.model.forward(batch).view(np.int64))

    def synchronize(self) -> None:
        self.model.synchronize()


def all_logits(hidden: torch.Tensor) -> torch.Tensor:
    rows = [logits_of(context) for context in hidden.numpy().view(np.uint64).tolist()]
    return torch.from_numpy(np.array(rows, np.float32).reshape(-1, VOCAB_SIZE))


class FakeMatcher:
    """A grammar in which about two of three tokens may come after any text, its end from 3 tokens on, and nothing else
    after `length`. With `fails_at` it runs into a limit after so many tokens."""

    def __init__(self, length: int, fails_at: int = -1, accepted: Sequence[int] = ()) -> None:
        self.length, self.fails_at = length, fails_at
        self.accepted = list(accepted)

    def allowed(self) -> set[int]:
        place = len(self.accepted)
        if place >= self.length or place == self.fails_at:
            return {EOS}
        words = {token for token in range(1, VOCAB_SIZE) if (7 * token + 3 * sum(self.accepted) + place) % 3}
        return words | ({EOS} if place >= 3 else set())

    def accept(self, token_id: int) -> bool:
        if self.error or token_id not in self.allowed():
            return False
        self.accepted.append(token_id)
        return True

    def write_mask(self, row: MaskWords) -> None:
        row[:] = 0
        for token in self.allowed():
            row[token // 32] |= np.uint32(1 << token % 32)

    @property
    def must_stop(self) -> bool:
        return not self.error and (len(self.accepted) >= self.length or EOS in self.accepted)

    @property
    def error(self) -> str:
        return "a limit of the test's" if len(self.accepted) == self.fails_at else ""


@dataclass
class FakeGrammar:
    length: int
    fails_at: int = -1

    def matcher(self) -> Matcher:
        return FakeMatcher(self.length, self.fails_at)  # type: ignore[return-value]


class FakeFiller:
    def fill(self, matchers: Sequence[tuple[int, Matcher]], masks: MaskWords) -> None:
        for row, matcher in matchers:
            matcher.write_mask(masks[row])


def make_engine(clock: VirtualClock | None = None, **settings: int) -> tuple[Engine, ChainHashModel]:
    """An engine over such a model; `settings` are tiny_config's."""
    resolved = replace(tiny_config(**settings), model=tiny_model(vocab_size=VOCAB_SIZE))  # type: ignore[arg-type]
    model = ChainHashModel(
        num_blocks=resolved.num_blocks,
        block_size=resolved.block_size,
        max_num_requests=resolved.max_num_requests,
        max_blocks=resolved.max_blocks,
    )
    masks = TokenMasks(resolved.max_num_requests, VOCAB_SIZE, 1, lambda num_threads: FakeFiller())
    engine = Engine(resolved, Runner(model), Sampler(all_logits), masks=masks, seed=0, clock=clock or VirtualClock())
    return engine, model


# ---- requests with rules -------------------------------------------------------------------------------------------


def random_params(rng: random.Random, **given: Any) -> SamplingParams:
    """About half of the fields at their neutral value."""
    fields: dict[str, Any] = {
        "presence_penalty": rng.choice([0, 0, 2, -1.5]),
        "frequency_penalty": rng.choice([0, 0, 1.25, -2]),
        "repetition_penalty": rng.choice([1, 1, 1.3, 0.5]),
        "logit_bias": {rng.randrange(VOCAB_SIZE): rng.choice([-100, 3.5, 5]) for _ in range(rng.choice([0, 0, 6]))},
        "allowed_token_ids": rng.sample(range(VOCAB_SIZE), 20) if rng.random() < 0.3 else (),
        "bad_words_ids": [
            [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 1, 2, 2, 3]))] for _ in range(rng.choice([0, 300]))
        ],
        "temperature": rng.choice([0, 0.8]),
        "top_k": rng.choice([0, 10]),
        "max_tokens": rng.randint(8, 20),
        "min_tokens": rng.choice([0, 0, 5]),
        "seed": rng.randrange(2**40),
    }
    return SamplingParams(**(fields | given))


def rules_of(params: SamplingParams, prompt: list[int], output: list[int], matcher: object = None) -> TokenRules:
    request = Request(
        request_id="r",
        token_ids=np.array([*prompt, *output], np.int32),
        params=params,
        tenant="",
        priority=0,
        arrival=0,
        arrival_time=0.0,
        request_seed=0,
        seed=0,
        max_total_tokens=1000,
        stop_ids=frozenset(),
        eos_ids=frozenset(),
        matcher=matcher,  # type: ignore[arg-type]
    )
    request.num_prompt_tokens = len(prompt)
    return TokenRules(request)


def batch_of(rows: list[tuple[SamplingParams, TokenRules | None]], banned: tuple = ()) -> SamplingBatch:
    params = [one for one, _ in rows]
    return SamplingBatch(
        temperature=np.array([one.temperature for one in params], np.float32),
        top_k=np.array([one.top_k for one in params], np.int32),
        top_p=np.ones(len(rows), np.float32),
        min_p=np.zeros(len(rows), np.float32),
        seed=np.array([one.seed for one in params], np.int64),
        output_index=np.arange(len(rows), dtype=np.int64),
        num_logprobs=np.array([-1 if one.logprobs is None else one.logprobs for one in params], np.int32),
        banned=banned,
        rules=tuple((index, rules) for index, (_, rules) in enumerate(rows) if rules is not None),
    )


# ---- the rules, written out plainly -------------------------------------------------------------------------------


def forbidden(params: SamplingParams, output: Sequence[int], allowed: Collection[int] | None) -> set[int]:
    """Tokens that may not come next. `allowed`: by the grammar, None without one."""
    tokens: set[int] = set()
    for token in range(VOCAB_SIZE):
        text = [*output, token]
        if any(text[-len(word) :] == list(word) for word in params.bad_words_ids):
            tokens.add(token)
        if params.allowed_token_ids and token not in params.allowed_token_ids:
            tokens.add(token)
        if allowed is not None and token not in allowed:
            tokens.add(token)
    return tokens


def changed_logits(logits: Float32s, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> Float32s:
    """Bias and penalties, one token at a time; float32 after each of the two."""
    changed = logits.copy()
    for token in range(len(logits)):
        if token in params.logit_bias:
            changed[token] += np.float32(params.logit_bias[token])
        value = float(changed[token])
        if token in prompt or token in output:
            repetition = float(np.float32(params.repetition_penalty))
            value = value / repetition if value > 0 else value * repetition
        if token in output:
            count = list(output).count(token)
            value -= float(np.float32(params.presence_penalty)) + float(np.float32(params.frequency_penalty)) * count
        changed[token] = value
    return changed


def draw(logits: Float32s, params: SamplingParams, seed: int, output_index: int) -> int:
    """The token of a row of logits in float64; of filters only top_k."""
    temperature = float(np.float32(params.temperature))
    values = logits.astype(np.float64)
    if temperature < GREEDY_BELOW:
        return int(values.argmax())
    ids = np.array(sorted(range(len(values)), key=lambda token: (-values[token], token)))
    if params.top_k > 0:
        ids = ids[: params.top_k]
    ids = np.sort(ids[np.isfinite(values[ids])])
    noise = gumbel(token_words(np.array([seed]), np.array([output_index]), [ids]))
    return int(ids[((values[ids] - values.max()) / temperature + noise).argmax()])


@dataclass
class Alone:
    """What a choice gives alone."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""


def alone(
    model: ChainHashModel, prompt: Sequence[int], params: SamplingParams, seed: int, matcher: FakeMatcher | None = None
) -> Alone:
    """By the definition: no blocks, no batches, no counts kept from one token to the next."""
    result = Alone()
    output = result.token_ids
    context = model._context(prompt)
    assert params.max_tokens is not None
    while not result.finish_reason:
        if matcher is not None and matcher.must_stop:  # whatever else is asked for
            may_not = set(range(VOCAB_SIZE)) - {EOS}
        else:
            may_not = forbidden(params, output, None if matcher is None else matcher.allowed())
            may_not |= {EOS} if len(output) < params.min_tokens else set()
        if len(may_not) == VOCAB_SIZE:
            result.finish_reason = "refused"
            break
        logits = changed_logits(logits_of(context.seen(None)), params, prompt, output)
        logits[sorted(may_not)] = -np.inf
        token = draw(logits, params, seed, len(output))
        if matcher is not None and not matcher.accept(token):
            result.finish_reason = "refused"
            break
        output.append(token)
        context.append(token)
        if token == EOS:
            result.finish_reason = "stop"
        elif len(output) == params.max_tokens:
            result.finish_reason = "length"
    return result
