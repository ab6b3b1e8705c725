"""Are the tokens right? Teacher-forced exactness against transformers, however the requests were scheduled.

    python -m pageframe.benchmarks.experiments.exactness [--prompts 50] [--tokens 64] [--quick]

The engine answers every prompt in float32 in eight ways. Four are about scheduling: alone, all in one batch, with a
token budget of 32 (so prompts are computed in chunks beside decoding), and in a pool so small that requests are
preempted. Four are about sharing: behind one long prefix and twice each (prefix hits), three choices of each (forks),
in a small pool beside host memory (copies), and in a small pool without a prefix cache (all is computed again). Then
transformers, with the same weights in float32, is fed each prompt with our tokens: each must be its maximum or within
1e-3 of it. What is compared is thus every single choice, and one tie cannot hide what follows.

A seeded choice is checked in the same way. With temperature T the sampler takes the maximum of logit + T * noise, and
the noise is known: it depends on the seed, the output's index and the token alone. So T * noise is added to
transformers' logits, and our token must be the maximum of the sum, or within 1e-3 of it.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from pageframe.benchmarks.experiments.prompts import CHAT_QUESTIONS, PLAIN_TEXTS
from pageframe.runtime.batch import Batch
from pageframe.runtime.block_copy import CopyKind
from pageframe.runtime.chat_template import load_chat_template
from pageframe.runtime.config import EngineConfig
from pageframe.runtime.engine import Engine
from pageframe.runtime.engine_builder import build_engine
from pageframe.runtime.journal import AllocateEvent, CopyEvent, Event
from pageframe.runtime.model_runner import ModelRunner
from pageframe.runtime.models.source import resolve_source
from pageframe.runtime.philox import choice_seed, gumbel, token_words
from pageframe.runtime.request import SamplingParams, choice_ids
from pageframe.runtime.tokenizer import load_tokenizer

TOLERANCE = 1e-3
NAN = float("nan")


@dataclass(frozen=True, slots=True)
class Way:
    """One way to schedule the same requests.

    Args:
        settings: of EngineConfig.
        one_by_one: a request comes when the one before it has ended.
        rounds: all prompts are answered that often, one round after the other.
        shared_prefix: every prompt stands behind the same long text.
        choices: answers to each prompt. With more than one every second request is seeded, at temperature 1.
        poison: memory that nobody wrote is NaN; see PoisonedRunner.
    """

    name: str
    settings: dict[str, Any]
    one_by_one: bool = False
    rounds: int = 1
    shared_prefix: bool = False
    choices: int = 1
    poison: bool = False


SCHEDULING_WAYS = (
    Way("alone", {"max_num_requests": 1}, one_by_one=True),
    Way("one batch", {"max_num_requests": 64, "max_num_batched_tokens": 4096}),
    Way("chunks of 32", {"max_num_requests": 16, "max_num_batched_tokens": 32}),
    Way(
        "tiny pool, poisoned",
        {"max_num_requests": 16, "max_num_batched_tokens": 128, "num_blocks": 32, "max_model_len": 256},
        poison=True,
    ),
)
SHARING_WAYS = (
    Way(
        "prefix hits",
        {"max_num_requests": 4, "max_num_batched_tokens": 256, "num_blocks": 256, "max_model_len": 512},
        rounds=2,
        shared_prefix=True,
        poison=True,
    ),
    Way(
        "forks",
        {"max_num_requests": 12, "max_num_batched_tokens": 256, "num_blocks": 128, "max_model_len": 256},
        choices=3,
        poison=True,
    ),
    Way(
        "host copies",
        {
            "max_num_requests": 4,
            "max_num_batched_tokens": 128,
            "num_blocks": 8,
            "max_model_len": 128,
            "host_cache": 256 * 2**20,
        },
        rounds=2,
        poison=True,
    ),
    Way(
        "no prefix cache",
        {
            "max_num_requests": 8,
            "max_num_batched_tokens": 128,
            "num_blocks": 16,
            "max_model_len": 256,
            "prefix_cache": False,
        },
        poison=True,
    ),
)


@dataclass(frozen=True, slots=True)
class Draw:
    """How one answer's tokens were drawn.

    Args:
        temperature: 0 is greedy.
        seed: the choice's own.
    """

    temperature: float = 0.0
    seed: int = 0


@dataclass(slots=True)
class Outcome:
    """What one way gave.

    Args:
        prompts, outputs, draws: one for each answer, in the order of requests and their choices.
        mixed_steps: steps that computed prompts and decoded at once.
        hit_tokens: found computed when requests first entered.
        copies: blocks copied for a request, by kind.
    """

    prompts: list[list[int]] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)
    steps: int = 0
    mixed_steps: int = 0
    chunked_steps: int = 0
    preemptions: int = 0
    hit_tokens: int = 0
    forks: int = 0
    copies: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        counts = {
            "steps": self.steps,
            "mixed": self.mixed_steps,
            "later chunks": self.chunked_steps,
            "preemptions": self.preemptions,
            "tokens found": self.hit_tokens,
            "forks": self.forks,
            **{f"copies {kind}": count for kind, count in self.copies.items()},
        }
        return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


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


class PoisonedRunner:
    """An engine's runner with NaN in all memory that nobody wrote: whoever reads a slot that is not his, or not yet
    written, gets NaN and shows.

    NaN are the whole pool and host memory at first, every free block after a step, and every block that was handed out
    since the last forward pass, once the copies of this one are made: a cached block goes from one request to the next
    without being free in between.
    """

    def __init__(self, engine: Engine) -> None:
        assert isinstance(engine.runner, ModelRunner)
        self._runner = engine.runner
        self._engine = engine
        self._num_events = engine.journal.written
        #: Handed out since they were last NaN.
        self._written: set[int] = set()
        self._runner.fill_blocks(range(engine.resolved.num_blocks), NAN)
        if engine.resolved.host_slots:
            self._runner.fill_host_slots(range(engine.resolved.host_slots), NAN)
        engine.runner = self

    def forward(self, batch: Batch) -> torch.Tensor:
        self._runner.copy_blocks(batch.copies)
        copied = {copy.dst for copy in batch.copies if copy.kind is not CopyKind.TO_HOST}
        handed_out = {
            block_id for event in self._new_events() if isinstance(event, AllocateEvent) for block_id in event.block_ids
        }
        self._written |= handed_out
        self._runner.fill_blocks(sorted(handed_out - copied), NAN)
        return self._runner.forward(replace(batch, copies=()))

    def poison_free_blocks(self) -> None:
        allocator = self._engine.scheduler.allocator
        free = {block_id for block_id in self._written if allocator.state(block_id) == "free"}
        self._written -= free
        self._runner.fill_blocks(sorted(free), NAN)

    def _new_events(self) -> Iterator[Event]:
        journal = self._engine.journal
        num_new, self._num_events = journal.written - self._num_events, journal.written
        assert num_new <= len(journal), "the journal dropped events before they were seen"
        return islice(journal, len(journal) - num_new, None)


def prompt_token_ids(count: int) -> list[list[int]]:
    """The first `count` prompts of the default model, chat and plain text in turn, as token ids."""
    source = resolve_source("default")
    tokenizer = load_tokenizer(source)
    template = load_chat_template(source, tokenizer)
    assert template is not None
    chats = [
        tokenizer.encode(template.render([{"role": "user", "content": question}]), add_special_tokens=False)
        for question in CHAT_QUESTIONS
    ]
    plain = [tokenizer.encode(text, add_special_tokens=True) for text in PLAIN_TEXTS]
    mixed = [ids for pair in zip(chats, plain, strict=False) for ids in pair] + chats[len(plain) :]
    return mixed[:count]


def shared_prefix() -> list[int]:
    """A text of some hundred tokens to stand before every prompt."""
    return load_tokenizer(resolve_source("default")).encode("\n\n".join(PLAIN_TEXTS), add_special_tokens=True)


def run_way(way: Way, prompts: Sequence[Sequence[int]], num_tokens: int) -> Outcome:
    """Answer all prompts in float32, `num_tokens` tokens each."""
    engine = build_engine(EngineConfig(dtype="float32", **way.settings))
    poisoned = PoisonedRunner(engine) if way.poison else None
    prefix = shared_prefix() if way.shared_prefix else []
    outcome = Outcome()
    outputs: dict[str, list[int]] = {}
    for round_index in range(way.rounds):
        for index, ids in enumerate(prompts):
            prompt = [*prefix, *ids]
            temperature = float(way.choices > 1 and index % 2)
            params = SamplingParams(
                n=way.choices, temperature=temperature, seed=index, max_tokens=num_tokens, ignore_eos=True
            )
            request_id = f"{round_index}/{index}"
            for choice, choice_id in enumerate(choice_ids(request_id, way.choices)):
                outcome.prompts.append(prompt)
                outcome.draws.append(Draw(temperature, choice_seed(index, choice)))
                outputs[choice_id] = []
            engine.add(request_id, prompt, params)
            if way.one_by_one:
                _drain(engine, outputs, poisoned)
        _drain(engine, outputs, poisoned)
    outcome.outputs = list(outputs.values())
    _count(engine, outcome)
    return outcome


def _drain(engine: Engine, outputs: dict[str, list[int]], poisoned: PoisonedRunner | None) -> None:
    while engine.has_work:
        for output in engine.step():
            assert output.finish_reason != "error", output.error
            outputs[output.request_id] += output.token_ids
        if poisoned is not None:
            poisoned.poison_free_blocks()
    engine.scheduler.check_invariants()


def _count(engine: Engine, outcome: Outcome) -> None:
    events = list(engine.journal)
    outcome.steps = len(engine.steps)
    outcome.mixed_steps = sum(1 for step in engine.steps if step.prefill_tokens and step.decode_tokens)
    outcome.chunked_steps = sum(1 for event in events if event.kind == "chunk" and getattr(event, "start", 0) > 0)
    outcome.preemptions = engine.scheduler.num_preemptions
    outcome.hit_tokens = engine.scheduler.num_hit_tokens
    outcome.forks = sum(event.kind == "fork" for event in events)
    outcome.copies = Counter(event.copy_kind for event in events if isinstance(event, CopyEvent))


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
) -> Verdict:
    """Feed the oracle each prompt with our answer and look up each of our tokens. All greedy without `draws`."""
    answers = list(zip(map(tuple, prompts), map(tuple, outputs), draws or [Draw()] * len(outputs), strict=True))
    gaps_of = {answer: _gaps(oracle, *answer) for answer in set(answers)}
    gaps = torch.cat([gaps_of[answer] for answer in answers])
    ties = int(((gaps > 0) & (gaps <= TOLERANCE)).sum())
    return Verdict(len(gaps), ties, int((gaps > TOLERANCE).sum()), float(gaps.max()))


def _gaps(oracle: Any, prompt: Sequence[int], output: Sequence[int], draw: Draw) -> torch.Tensor:
    """How far each of our tokens is below the maximum, float64 [len(output)]."""
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


def run(prompts: Sequence[Sequence[int]], num_tokens: int, report: Callable[[Way, Outcome, Verdict], None]) -> bool:
    """All eight ways; whether every token of each was right."""
    oracle = load_oracle()
    right = True
    for way in track((*SCHEDULING_WAYS, *SHARING_WAYS), description="exactness", transient=True):
        outcome = run_way(way, prompts, num_tokens)
        verdict = judge(oracle, outcome.prompts, outcome.outputs, outcome.draws)
        report(way, outcome, verdict)
        right = right and verdict.wrong == 0
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description="Teacher-forced exactness against transformers, float32.")
    parser.add_argument("--prompts", type=int, default=50, help="how many prompts, at most 50 (default: 50)")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of each (default: 64)")
    parser.add_argument("--quick", action="store_true", help="4 prompts, 8 tokens: to see that it runs")
    args = parser.parse_args()
    num_prompts, num_tokens = (4, 8) if args.quick else (args.prompts, args.tokens)
    prompts = prompt_token_ids(num_prompts)
    table = Table(title=f"{len(prompts)} prompts, {num_tokens} tokens each, float32")
    for column in ("way", "tokens", "ties", "wrong", "worst gap", "meanwhile"):
        table.add_column(column, justify="left" if column in ("way", "meanwhile") else "right")

    def report(way: Way, outcome: Outcome, verdict: Verdict) -> None:
        numbers = (verdict.tokens, verdict.ties, verdict.wrong)
        table.add_row(way.name, *(str(number) for number in numbers), f"{verdict.worst_gap:.1e}", str(outcome))

    right = run(prompts, num_tokens, report)
    Console().print(table)
    print("Every token is right." if right else "Some tokens are wrong.")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
