"""Are the tokens right? Teacher-forced exactness against transformers, however the requests were scheduled.

    python -m pageframe.benchmarks.experiments.exactness [--prompts 50] [--tokens 64]

The engine answers every prompt greedily in float32 in four ways: alone, all in one batch, with a token budget of 32
(so prompts are computed in chunks beside decoding), and in a pool so small that requests are preempted. Then
transformers, with the same weights in float32, is fed each prompt with our tokens: each must be its maximum or within
1e-3 of it. What is compared is thus every single choice, and one tie cannot hide what follows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from pageframe.benchmarks.experiments.prompts import CHAT_QUESTIONS, PLAIN_TEXTS
from pageframe.runtime.chat_template import load_chat_template
from pageframe.runtime.config import EngineConfig
from pageframe.runtime.engine import Engine
from pageframe.runtime.engine_builder import build_engine
from pageframe.runtime.model_runner import ModelRunner
from pageframe.runtime.models.source import resolve_source
from pageframe.runtime.request import SamplingParams
from pageframe.runtime.tokenizer import load_tokenizer

TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Way:
    """One way to schedule the same requests.

    Args:
        poison: the whole pool starts as NaN, and so does every block that is free after a step: whatever reads a slot
            that nobody wrote for it shows.
    """

    name: str
    settings: dict[str, Any]
    one_by_one: bool = False
    poison: bool = False


WAYS = (
    Way("alone", {"max_num_requests": 1}, one_by_one=True),
    Way("one batch", {"max_num_requests": 64, "max_num_batched_tokens": 4096}),
    Way("chunks of 32", {"max_num_requests": 16, "max_num_batched_tokens": 32}),
    Way(
        "tiny pool, poisoned",
        {"max_num_requests": 16, "max_num_batched_tokens": 128, "num_blocks": 32, "max_model_len": 256},
        poison=True,
    ),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one way gave.

    Args:
        outputs: token ids of each prompt's answer.
        mixed_steps: steps that computed prompts and decoded at once.
    """

    outputs: list[list[int]]
    steps: int
    mixed_steps: int
    chunked_steps: int
    preemptions: int


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


def run_way(way: Way, prompts: Sequence[Sequence[int]], num_tokens: int) -> Outcome:
    """Answer all prompts greedily in float32, `num_tokens` tokens each."""
    engine = build_engine(EngineConfig(dtype="float32", **way.settings))
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    outputs: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    if way.poison:
        _poison_free_blocks(engine)
    for index, ids in enumerate(prompts):
        engine.add(str(index), ids, params)
        if way.one_by_one:
            _drain(engine, outputs, way.poison)
    _drain(engine, outputs, way.poison)
    return Outcome(
        outputs=list(outputs.values()),
        steps=len(engine.steps),
        mixed_steps=sum(1 for step in engine.steps if step.prefill_tokens and step.decode_tokens),
        chunked_steps=sum(1 for event in engine.journal if event.kind == "chunk" and getattr(event, "start", 0) > 0),
        preemptions=engine.scheduler.num_preemptions,
    )


def _drain(engine: Engine, outputs: dict[str, list[int]], poison: bool) -> None:
    while engine.has_work:
        for output in engine.step():
            assert output.finish_reason != "error", output.error
            outputs[output.request_id] += output.token_ids
        if poison:
            _poison_free_blocks(engine)
    engine.scheduler.check_invariants()


def _poison_free_blocks(engine: Engine) -> None:
    free = [block_id for block_id, count in enumerate(engine.scheduler.allocator.ref_counts()) if count == 0]
    assert isinstance(engine.runner, ModelRunner)
    engine.runner.fill_blocks(free, float("nan"))


def load_oracle() -> Any:
    """transformers' model of the default file, in float32."""
    from transformers import AutoModelForCausalLM

    path = resolve_source("default").path
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


def judge(oracle: Any, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> Verdict:
    """Feed the oracle each prompt with our answer and look up each of our tokens."""
    tokens = ties = wrong = 0
    worst = 0.0
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([[*prompt, *output]])
        with torch.inference_mode():
            logits = oracle(ids).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        gaps = logits.max(dim=1).values - chosen
        tokens += len(output)
        ties += int(((gaps > 0) & (gaps <= TOLERANCE)).sum())
        wrong += int((gaps > TOLERANCE).sum())
        worst = max(worst, float(gaps.max()))
    return Verdict(tokens, ties, wrong, worst)


def run(prompts: Sequence[Sequence[int]], num_tokens: int, report: Callable[[Way, Outcome, Verdict], None]) -> bool:
    """All four ways; whether every token of each was right."""
    oracle = load_oracle()
    right = True
    for way in track(WAYS, description="exactness", transient=True):
        outcome = run_way(way, prompts, num_tokens)
        verdict = judge(oracle, prompts, outcome.outputs)
        report(way, outcome, verdict)
        right = right and verdict.wrong == 0
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description="Teacher-forced exactness against transformers, float32.")
    parser.add_argument("--prompts", type=int, default=50, help="how many prompts, at most 50 (default: 50)")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of each (default: 64)")
    args = parser.parse_args()
    prompts = prompt_token_ids(args.prompts)
    table = Table(title=f"{len(prompts)} prompts, {args.tokens} tokens each, float32")
    for column in ("way", "tokens", "ties", "wrong", "worst gap", "steps", "mixed", "later chunks", "preemptions"):
        table.add_column(column, justify="left" if column == "way" else "right")

    def report(way: Way, outcome: Outcome, verdict: Verdict) -> None:
        numbers = (verdict.tokens, verdict.ties, verdict.wrong, f"{verdict.worst_gap:.1e}")
        counts = (outcome.steps, outcome.mixed_steps, outcome.chunked_steps, outcome.preemptions)
        table.add_row(way.name, *(str(number) for number in (*numbers, *counts)))

    right = run(prompts, args.tokens, report)
    Console().print(table)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
