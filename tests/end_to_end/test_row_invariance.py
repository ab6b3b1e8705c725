"""What a request gets depends on the request alone, to the bit: tokens and log-probabilities in random schedules are
those of its solo run.

All engines share one loaded decoder of the default model in its default arithmetic. They differ in everything that a
schedule is made of: blocks, token budget, rows, threads, prefix cache, host memory, arrivals, and neighbours that are
aborted. All memory that nobody wrote is NaN.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from pageframe.benchmarks.experiments.poison import PoisonedRunner
from pageframe.kernels.attention import select_backend
from pageframe.kernels.cpu import CpuKernels
from pageframe.runtime.arithmetic import TORCH_DTYPES
from pageframe.runtime.config import EngineConfig
from pageframe.runtime.engine import Engine
from pageframe.runtime.engine_builder import build_engine
from pageframe.runtime.journal import ChunkEvent, CopyEvent
from pageframe.runtime.model_runner import ModelRunner
from pageframe.runtime.request import SamplingParams
from pageframe.runtime.sampler import Sampler

SEED = int(os.environ.get("PAGEFRAME_TEST_SEED", "20240607"))
CPU = torch.device("cpu")
LONGEST_PROMPT = 400
MAX_MODEL_LEN = 448
VOCAB_SIZE = 49152


@dataclass(frozen=True)
class Ask:
    """A request that asks for the log-probabilities of its tokens."""

    prompt: list[int]
    params: SamplingParams


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Schedule:
    """An engine's sizes, and how requests come to it.

    Args:
        arrivals: most requests that come between two steps.
        num_doomed: neighbours, the same prompts once more, that are aborted on their way.
    """

    block_size: int = 16
    max_num_requests: int = 1
    max_num_batched_tokens: int = 512
    prefix_cache: bool = False
    host_slots: int = 0
    threads: int = 2
    arrivals: int = 1
    num_doomed: int = 0


SOLO = Schedule()
BUSY = Schedule(
    block_size=8, max_num_requests=8, max_num_batched_tokens=40, prefix_cache=True, arrivals=8, num_doomed=2
)


class SharedModel:
    """One decoder, and as many engines over it as are asked for."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        built = build_engine(EngineConfig(num_blocks=MAX_MODEL_LEN // 16, max_model_len=MAX_MODEL_LEN, **settings))
        assert isinstance(built.runner, ModelRunner)
        self.resolved = built.resolved
        self._decoder = built.runner.decoder

    def engine(self, schedule: Schedule) -> Engine:
        resolved = dataclasses.replace(
            self.resolved,
            block_size=schedule.block_size,
            num_blocks=MAX_MODEL_LEN // schedule.block_size,
            max_num_requests=schedule.max_num_requests,
            max_num_batched_tokens=schedule.max_num_batched_tokens,
            prefix_cache=schedule.prefix_cache,
            host_slots=schedule.host_slots,
        )
        runner = ModelRunner(
            self._decoder,
            select_backend(resolved.backend, CPU),
            num_blocks=resolved.num_blocks,
            block_size=resolved.block_size,
            max_num_requests=resolved.max_num_requests,
            max_blocks=resolved.max_blocks,
            kv_dtype=TORCH_DTYPES[resolved.kv_dtype],
            device=CPU,
            host_slots=resolved.host_slots,
        )
        return Engine(resolved, runner, Sampler(runner.logits, runner.arg_max))


def random_asks(rng: random.Random, count: int) -> list[Ask]:
    """Prompts of random tokens, many short and some long; each third begins like others do."""

    def tokens(length: int) -> list[int]:
        return [rng.randrange(VOCAB_SIZE) for _ in range(length)]

    prefixes = [tokens(length) for length in (40, 150)]
    asks = []
    for index in range(count):
        beginning = rng.choice(prefixes) if index % 3 == 0 else []
        prompt = (beginning + tokens(round(LONGEST_PROMPT ** rng.random())))[:LONGEST_PROMPT]
        params = SamplingParams(
            max_tokens=rng.randint(1, 32),
            temperature=rng.choice([0.0, 0.0, 0.7, 1.3]),
            top_p=rng.choice([0.8, 1.0]),
            seed=index,
            logprobs=0,
            ignore_eos=True,
        )
        asks.append(Ask(prompt, params))
    return asks


def random_schedules(seed: int, count: int) -> list[Schedule]:
    rng = random.Random(seed)
    return [random_schedule(rng) for _ in range(count)]


def random_schedule(rng: random.Random) -> Schedule:
    """Blocks of 4 to 64 in a pool of one longest context; most engines find prefixes, and half of these also have host
    memory."""
    max_num_requests = rng.randint(6, 16)
    prefix_cache = rng.random() < 0.7
    return Schedule(
        block_size=rng.choice([4, 8, 16, 32, 64]),
        max_num_requests=max_num_requests,
        max_num_batched_tokens=rng.choice([16, 24, 48, 100, 256, 512]),
        prefix_cache=prefix_cache,
        host_slots=rng.choice([0, 100]) if prefix_cache else 0,
        threads=rng.randint(1, 2),
        arrivals=rng.choice([2, 16]),
        num_doomed=rng.randint(1, 4),
    )


class Serving:
    """One schedule on its way.

    Args:
        quiet: indices of requests that do not ask for log-probabilities this time.
    """

    def __init__(self, model: SharedModel, schedule: Schedule, rng: random.Random, quiet: frozenset[int]) -> None:
        torch.set_num_threads(schedule.threads)
        self._engine = model.engine(schedule)
        self._poisoned = PoisonedRunner(self._engine)
        self._schedule = schedule
        self._rng = rng
        self._quiet = quiet
        self._answers: dict[str, Answer] = {}
        self.counts: Counter[str] = Counter()

    def run(self, asks: Sequence[Ask]) -> dict[int, Answer]:
        """Each request's answer, by its index."""
        left = [(str(index), ask) for index, ask in enumerate(asks)]
        left += [(f"doomed {index}", self._rng.choice(asks)) for index in range(self._schedule.num_doomed)]
        self._rng.shuffle(left)
        lengths = {name: len(ask.prompt) for name, ask in left}
        while left or self._engine.has_work:
            for _ in range(self._rng.randint(not self._engine.has_work, self._schedule.arrivals)):
                if left:
                    self._add(*left.pop())
            self._step()
        self._engine.scheduler.check_invariants()
        self._count(lengths)
        return {index: self._answers[str(index)] for index in range(len(asks))}

    def _add(self, name: str, ask: Ask) -> None:
        quiet = name.isdigit() and int(name) in self._quiet
        params = dataclasses.replace(ask.params, logprobs=None) if quiet else ask.params
        self._answers[name] = Answer()
        self._engine.add(name, ask.prompt, params)

    def _step(self) -> None:
        for output in self._engine.step():
            assert output.finish_reason != "error", output.error
            self._answers[output.request_id].token_ids += output.token_ids
            self._answers[output.request_id].logprobs += [each.logprob for each in output.logprobs]
        for name in [name for name in self._answers if name.startswith("doomed")]:
            if self._rng.random() < 0.2:
                self.counts["aborts"] += self._engine.abort(name)
        self._poisoned.poison_free_blocks()

    def _count(self, prompt_lengths: Mapping[str, int]) -> None:
        engine = self._engine
        assert engine.journal.written == len(engine.journal)
        self.counts["mixed steps"] += sum(bool(step.prefill_tokens and step.decode_tokens) for step in engine.steps)
        self.counts["preemptions"] += engine.scheduler.num_preemptions
        self.counts["tokens found"] += engine.scheduler.num_hit_tokens
        for event in engine.journal:
            if isinstance(event, ChunkEvent):
                self.counts["partial chunks"] += event.start + event.num_tokens < prompt_lengths[event.request_id]
            if isinstance(event, CopyEvent):
                self.counts[f"copies {event.copy_kind}"] += 1


@pytest.fixture(autouse=True)
def _compiled_kernels_and_the_same_threads_afterwards(compiled_kernels: CpuKernels) -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def check(settings: Mapping[str, str], seed: int, num_asks: int, schedules: Sequence[Schedule]) -> Counter[str]:
    """Serve the same random requests alone and in these schedules; what happened in these."""
    model = SharedModel(settings)
    assert model.resolved.batch_invariant
    rng = random.Random(seed)
    asks = random_asks(rng, num_asks)
    alone = {index: Serving(model, SOLO, rng, frozenset()).run([ask])[0] for index, ask in enumerate(asks)}
    greedy = [index for index, ask in enumerate(asks) if ask.params.temperature == 0]
    counts: Counter[str] = Counter()
    for schedule in schedules:
        # Where a step's rows are all greedy and quiet, tokens come from a pass that keeps no logits.
        quiet = frozenset(greedy) if rng.random() < 0.3 else frozenset(rng.sample(greedy, len(greedy) // 2))
        serving = Serving(model, schedule, rng, quiet)
        answers = serving.run(asks)
        for index, answer in answers.items():
            expected = dataclasses.replace(alone[index], logprobs=[]) if index in quiet else alone[index]
            assert answer == expected, f"request {index} of {schedule}"
        counts += serving.counts
    return counts


HAPPENED = ("mixed steps", "partial chunks", "preemptions", "tokens found", "copies to_device", "aborts")


def test_every_answer_is_that_of_the_solo_run() -> None:
    counts = check({}, SEED, 14, random_schedules(SEED, 4))
    assert all(counts[what] > 0 for what in HAPPENED), counts


@pytest.mark.long
@pytest.mark.parametrize("settings", [{"weights": "bf16"}, {"kv_dtype": "int8"}], ids=["weights bf16", "K/V int8"])
def test_in_other_arithmetics_too(settings: dict[str, str]) -> None:
    counts = check(settings, SEED, 6, [BUSY])
    assert all(counts[what] > 0 for what in ("mixed steps", "partial chunks")), counts


@pytest.mark.long
@pytest.mark.parametrize("settings", [{}, {"weights": "bf16"}, {"kv_dtype": "int8"}], ids=["default", "bf16", "int8"])
@pytest.mark.parametrize("seed", range(4))
def test_much_longer(settings: dict[str, str], seed: int) -> None:
    counts = check(settings, SEED + 1 + seed, 40, random_schedules(SEED + 1 + seed, 15))
    assert all(counts[what] > 0 for what in HAPPENED), counts
