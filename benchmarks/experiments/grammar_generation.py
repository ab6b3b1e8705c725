"""The model's own texts under grammars: an engine whose sampler holds every request to its grammar."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pageframe.runtime.engine import Engine
from pageframe.runtime.errors import EngineError
from pageframe.runtime.grammar import CompiledGrammar, MaskFiller, Matcher
from pageframe.runtime.model_runner import ModelRunner
from pageframe.runtime.philox import choice_seed
from pageframe.runtime.request import FinishReason, SamplingParams
from pageframe.runtime.sampler import Sampler
from pageframe.runtime.step_plan import SamplingBatch, StepResult


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """What the model wrote.

    Args:
        token_ids: without the end-of-text token.
        finish_reason: "stop" or "length".
    """

    token_ids: list[int]
    finish_reason: str


class GrammarSampler:
    """The engine's sampler, with masked logits.

    Args:
        matchers: by the seed of the choice they belong to, since that is how a sampler can tell requests apart.
    """

    def __init__(self, runner: ModelRunner, matchers: Mapping[int, Matcher], num_threads: int) -> None:
        self._runner = runner
        self._matchers = matchers
        self._sampler = Sampler(runner.logits)
        self._filler = MaskFiller(num_threads)

    def sample(self, hidden: torch.Tensor, batch: SamplingBatch) -> StepResult:
        """One token per row of `hidden`, each allowed by the row's grammar, which then takes it."""
        logits = self._runner.logits(hidden)
        matchers = [self._matchers[seed] for seed in batch.seed.tolist()]
        vocab_size = logits.shape[1]
        masks = np.zeros((len(batch), -(-vocab_size // 32)), np.uint32)
        self._filler.fill(list(enumerate(matchers)), masks)
        bits = np.unpackbits(masks.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
        allowed = torch.from_numpy(bits).to(logits.device).bool()
        result = self._sampler.sample_logits(torch.where(allowed, logits, -torch.inf), batch)
        for matcher, token_id in zip(matchers, result.token_ids.tolist(), strict=True):
            if matcher.error or not matcher.accept(token_id):
                raise EngineError(f"token {token_id} does not follow the grammar: {matcher.error}")
        return result


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    grammars: Sequence[CompiledGrammar],
    *,
    max_tokens: int,
    temperature: float,
    progress: Callable[[int], None] = lambda done: None,
) -> list[GeneratedText]:
    """Continue each prompt by a text of its grammar; all of them share every step.

    Args:
        engine: its runner computes and its journal records; its own sampler and scheduler are not used.
        progress: called with the number of texts that are done.

    Raises:
        InvalidRequestError: a prompt with max_tokens does not fit the engine.
        EngineError: a step failed.
    """
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    matchers = {choice_seed(index, 0): grammar.matcher() for index, grammar in enumerate(grammars)}
    sampler = GrammarSampler(runner, matchers, engine.resolved.threads)
    masked = Engine(engine.resolved, runner, sampler, journal=engine.journal)
    for index, prompt in enumerate(prompts):
        masked.add(str(index), prompt, SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=index))
    token_ids: list[list[int]] = [[] for _ in prompts]
    texts: dict[int, GeneratedText] = {}
    while masked.has_work:
        for output in masked.step():
            index = int(output.request_id)
            token_ids[index] += output.token_ids
            if output.finish_reason == FinishReason.ERROR.value:
                raise EngineError(output.error)
            if output.finish_reason:
                stopped = output.finish_reason == FinishReason.STOP.value
                texts[index] = GeneratedText(token_ids[index][: -1 if stopped else None], output.finish_reason)
                progress(len(texts))
    return [texts[index] for index in range(len(prompts))]
