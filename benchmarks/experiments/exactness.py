"""Are the tokens right? Teacher-forced exactness against transformers, however the requests were scheduled.

    python -m pageframe.benchmarks.experiments.exactness [--prompts 50] [--tokens 64] [--weights file] [--quick]

The engine answers every prompt in eight ways. Four are about scheduling: alone, all in one batch, with a token budget
of 32 (so prompts are computed in chunks beside decoding), and in a pool so small that requests are preempted. Four are
about sharing: behind one long prefix and twice each (prefix hits), three choices of each (forks), in a small pool
beside host memory (copies), and in a small pool without a prefix cache (all is computed again). Then transformers, in
float32 with the values that the file stores, is fed each prompt with our tokens: each, greedy or drawn with a seed,
must be its choice or within a tolerance of it. What is compared is thus every single choice, and one tie cannot hide
what follows.

By default the engine computes in float32, and the tolerance is 1e-3. With --weights file or bf16 it computes as it
does by default, the weights held as the file stores them or rounded to bf16, and the tolerance is 0.05. That engine's
answers depend on nothing but the request, so all eight ways must also give each request the very tokens that it gets
alone.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from pageframe.benchmarks.experiments.exactness_judge import Draw, Verdict, judge, load_oracle
from pageframe.benchmarks.experiments.poison import PoisonedRunner
from pageframe.benchmarks.experiments.prompts import CHAT_QUESTIONS, PLAIN_TEXTS
from pageframe.benchmarks.experiments.ties import TIE_TOLERANCE
from pageframe.runtime.chat_template import load_chat_template
from pageframe.runtime.config import EngineConfig
from pageframe.runtime.engine import Engine
from pageframe.runtime.engine_builder import build_engine
from pageframe.runtime.journal import CopyEvent
from pageframe.runtime.models.source import resolve_source
from pageframe.runtime.philox import choice_seed
from pageframe.runtime.request import SamplingParams, choice_ids
from pageframe.runtime.tokenizer import load_tokenizer


@dataclass(frozen=True, slots=True)
class Precision:
    """What the engine computes in.

    Args:
        settings: of EngineConfig.
        tolerance: how far a token's logit may be below the oracle's maximum.
        row_invariant: a request gets the same bits in all ways.
    """

    settings: Mapping[str, Any]
    tolerance: float
    row_invariant: bool


#: By how weights are held.
PRECISIONS = {
    "float32": Precision({"dtype": "float32"}, TIE_TOLERANCE["float32"], row_invariant=False),
    "bf16": Precision({"weights": "bf16"}, TIE_TOLERANCE["bf16"], row_invariant=True),
    "file": Precision({"weights": "file"}, TIE_TOLERANCE["bf16"], row_invariant=True),
}


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


def run_way(
    way: Way,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    precision: Precision = PRECISIONS["float32"],
) -> Outcome:
    """Answer all prompts, `num_tokens` tokens each."""
    engine = build_engine(EngineConfig(**precision.settings, **way.settings))
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
                outcome.draws.append(Draw(temperature, choice_seed(index, choice)) if temperature else Draw())
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


class SoloAnswers:
    """What requests get alone, one after the other, with no prefix cache: in an engine of one arithmetic for any
    number of rows they get the same in whatever way."""

    def __init__(
        self, ways: Sequence[Way], prompts: Sequence[Sequence[int]], num_tokens: int, precision: Precision
    ) -> None:
        self._outputs: dict[tuple[tuple[int, ...], Draw], list[int]] = {}
        for shared_prefix, choices in dict.fromkeys((way.shared_prefix, way.choices) for way in ways):
            settings = {"max_num_requests": choices, "prefix_cache": False}
            alone = Way("alone", settings, one_by_one=True, shared_prefix=shared_prefix, choices=choices)
            outcome = run_way(alone, prompts, num_tokens, precision)
            for prompt, draw, output in zip(outcome.prompts, outcome.draws, outcome.outputs, strict=True):
                self._outputs.setdefault((tuple(prompt), draw), output)

    def num_different(self, outcome: Outcome) -> int:
        """How many answers are not those that their requests get alone."""
        answers = zip(outcome.prompts, outcome.draws, outcome.outputs, strict=True)
        return sum(self._outputs[tuple(prompt), draw] != output for prompt, draw, output in answers)


Report = Callable[[Way, Outcome, Verdict, int | None], None]


def run(
    prompts: Sequence[Sequence[int]], num_tokens: int, report: Report, precision: Precision = PRECISIONS["float32"]
) -> bool:
    """All eight ways; whether every token of each was right.

    Args:
        report: called with each way, what it gave, how the oracle judged that, and how many of its answers are not
            those that their requests get alone (None where they need not be the same).
    """
    oracle = load_oracle()
    ways = (*SCHEDULING_WAYS, *SHARING_WAYS)
    alone = SoloAnswers(ways, prompts, num_tokens, precision) if precision.row_invariant else None
    right = True
    for way in track(ways, description="exactness", transient=True):
        outcome = run_way(way, prompts, num_tokens, precision)
        verdict = judge(oracle, outcome.prompts, outcome.outputs, outcome.draws, precision.tolerance)
        num_different = None if alone is None else alone.num_different(outcome)
        report(way, outcome, verdict, num_different)
        right = right and verdict.wrong == 0 and not num_different
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description="Teacher-forced exactness against transformers in float32.")
    parser.add_argument("--prompts", type=int, default=50, help="how many prompts, at most 50 (default: 50)")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of each (default: 64)")
    parser.add_argument(
        "--weights",
        choices=PRECISIONS,
        default="float32",
        help="float32 arithmetic, or the default one with weights as the file stores them or in bf16 (%(default)s)",
    )
    parser.add_argument("--quick", action="store_true", help="4 prompts, 8 tokens: to see that it runs")
    args = parser.parse_args()
    num_prompts, num_tokens = (4, 8) if args.quick else (args.prompts, args.tokens)
    prompts = prompt_token_ids(num_prompts)
    table = Table(title=f"{len(prompts)} prompts, {num_tokens} tokens each, weights {args.weights}")
    for column in ("way", "tokens", "exact", "ties", "wrong", "worst gap", "not as alone", "meanwhile"):
        table.add_column(column, justify="left" if column in ("way", "meanwhile") else "right")

    def report(way: Way, outcome: Outcome, verdict: Verdict, num_different: int | None) -> None:
        counts = (str(verdict.tokens), f"{verdict.exact:.2%}", str(verdict.ties), str(verdict.wrong))
        different = "" if num_different is None else f"{num_different} of {len(outcome.outputs)}"
        table.add_row(way.name, *counts, f"{verdict.worst_gap:.1e}", different, str(outcome))

    right = run(prompts, num_tokens, report, PRECISIONS[args.weights])
    Console().print(table)
    print("Every token is right." if right else "Some tokens are wrong.")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
