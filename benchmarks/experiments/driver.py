"""Drives an Engine in this process: requests that come at set times, batches that run to their end, sessions.

It keeps when each token came, by the wall clock. What it measures is the engine alone: no HTTP, no text.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pageframe.benchmarks.experiments.report import TimeBudget
from pageframe.benchmarks.experiments.ties import LogitGap, spacing, tie_tolerance
from pageframe.runtime.engine import Engine
from pageframe.runtime.errors import EngineError
from pageframe.runtime.model_runner import ModelRunner
from pageframe.runtime.request import RequestOutput, SamplingParams
from pageframe.runtime.sampler import Sampler


class OutOfTimeError(Exception):
    """The time budget ended in the middle of a run."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A greedy request.

    Args:
        arrival: seconds after the start of the run.
        after_tokens: it comes once so many tokens were made in all (or nothing else is left to do).
        ignore_eos: it ends at max_tokens only.
    """

    name: str
    prompt: list[int]
    max_tokens: int
    arrival: float = 0.0
    after_tokens: int = 0
    ignore_eos: bool = True

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=self.max_tokens, ignore_eos=self.ignore_eos)


@dataclass(slots=True)
class Answer:
    """What became of a request. Times are seconds after the start of the run.

    Args:
        arrival: when it was to come; what it waited outside the engine counts.
        times: one for each token.
    """

    ask: Ask
    arrival: float
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    num_cached: int = 0

    @property
    def first_token_seconds(self) -> float:
        return self.times[0] - self.arrival

    @property
    def seconds(self) -> float:
        return self.times[-1] - self.arrival


@dataclass(frozen=True, slots=True)
class Agreement:
    """How answers to the same prompts compare.

    Args:
        equal: answers that are the same throughout.
        ties, one_step, different: those that part, by what that means (`Parting`); what follows is not compared.
        skipped: those whose prompts are different already, since they hold an answer that parted before, and those of
            only one of the runs: what is asked next can hang on the answer before.
    """

    equal: int = 0
    ties: int = 0
    one_step: int = 0
    different: int = 0
    skipped: int = 0

    def __add__(self, other: Agreement) -> Agreement:
        return Agreement(
            self.equal + other.equal,
            self.ties + other.ties,
            self.one_step + other.one_step,
            self.different + other.different,
            self.skipped + other.skipped,
        )


def serve(
    engine: Engine,
    asks: Sequence[Ask],
    budget: TimeBudget,
    *,
    batch_size: int | None = None,
    follow: Callable[[Answer], Iterable[Ask]] | None = None,
    watch: Callable[[Engine], None] | None = None,
) -> list[Answer]:
    """Serve all requests to their ends; the answers are in the order in which the requests entered.

    Args:
        batch_size: requests enter only when nothing runs, at most so many, and none joins until all have ended:
            batching by whole requests. None lets the engine decide at every step.
        follow: called with each ended answer; gives the requests that come because of it, at once.
        watch: called after each step.

    Raises:
        OutOfTimeError: the budget has ended.
        EngineError: a forward pass failed.
    """
    waiting = deque(sorted(asks, key=lambda ask: (ask.arrival, ask.after_tokens)))
    answers: dict[str, Answer] = {}
    num_tokens = 0
    start = time.perf_counter()

    def enter(ask: Ask, arrival: float) -> None:
        answers[ask.name] = Answer(ask, arrival)
        engine.add(ask.name, ask.prompt, ask.params)

    while waiting or engine.has_work:
        if not budget.allows():
            raise OutOfTimeError
        now = time.perf_counter() - start
        room = len(waiting) if batch_size is None else 0 if engine.has_work else batch_size
        while waiting and room and waiting[0].arrival <= now and _has_come(waiting[0], num_tokens, engine):
            ask = waiting.popleft()
            enter(ask, now if ask.after_tokens else ask.arrival)
            room -= 1
        if not engine.has_work:
            time.sleep(min(max(0.0, waiting[0].arrival - now), budget.left))
            continue
        outputs = engine.step()
        now = time.perf_counter() - start
        for output in outputs:
            answer = answers[output.request_id]
            num_tokens += len(output.token_ids)
            _take(answer, output, now)
            if output.finish_reason and follow is not None:
                for ask in follow(answer):
                    enter(ask, now)
        if watch is not None:
            watch(engine)
    return list(answers.values())


def _has_come(ask: Ask, num_tokens: int, engine: Engine) -> bool:
    return ask.after_tokens <= num_tokens or not engine.has_work


def _take(answer: Answer, output: RequestOutput, now: float) -> None:
    if output.error:
        raise EngineError(output.error)
    answer.tokens += output.token_ids
    answer.times += [now] * len(output.token_ids)
    answer.num_cached += output.num_cached_tokens


def compare(ours: Sequence[Answer], theirs: Sequence[Answer], engine: Engine) -> Agreement:
    """Compare the answers of two runs to the same requests, by name.

    Args:
        engine: idle; its runner computes what is needed to see whether two answers part at a tie.
    """
    one, other = ({answer.ask.name: answer for answer in answers} for answers in (ours, theirs))
    counts = dict.fromkeys(("equal", "ties", "one_step", "different", "skipped"), 0)
    counts["skipped"] = len(one.keys() ^ other.keys())
    for name in one.keys() & other.keys():
        counts[_verdict(one[name], other[name], engine)] += 1
    return Agreement(**counts)


def _verdict(ours: Answer, theirs: Answer, engine: Engine) -> str:
    if ours.ask.prompt != theirs.ask.prompt:
        return "skipped"
    if ours.tokens == theirs.tokens:
        return "equal"
    pairs = list(zip(ours.tokens, theirs.tokens, strict=False))
    index = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
    if index is None:
        return "different"  # one is a beginning of the other
    best, lower = _logits(engine, ours.ask.prompt + ours.tokens[:index], pairs[index])
    gap = LogitGap(best - lower, spacing(best, engine.resolved.compute_dtype))
    return gap.parting(tie_tolerance(engine.resolved))


def _logits(engine: Engine, prompt: list[int], tokens: tuple[int, int]) -> tuple[float, float]:
    """Behind `prompt`: the highest logit, and the lower one of these two tokens'.

    Raises:
        EngineError: a forward pass failed.
    """
    runner, kept = engine.runner, []
    assert isinstance(runner, ModelRunner)

    def logits(hidden: Any) -> Any:
        kept.append(runner.logits(hidden))
        return kept[-1]

    probe = Engine(engine.resolved, runner, Sampler(logits))
    probe.add("tie", prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    while probe.has_work:
        for output in probe.step():
            if output.error:
                raise EngineError(f"while two answers that part were looked at: {output.error}")
    (row,) = kept[-1].tolist()
    return max(row), min(row[token] for token in tokens)
