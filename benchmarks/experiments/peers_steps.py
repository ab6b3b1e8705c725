"""Steps of pure decode in our own engine, against rows and context, and how much of each is outside of the kernels."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from pageframe.benchmarks.experiments.floor import Floors
from pageframe.runtime.batch import Batch
from pageframe.runtime.engine import Engine
from pageframe.runtime.model_runner import ModelRunner
from pageframe.runtime.request import SamplingParams
from pageframe.runtime.sampler import Sampler

STEPS, QUICK_STEPS = 24, 4
ROWS, QUICK_ROWS = (1, 2, 4, 8, 16, 32, 64), (1, 2)
ROWS_CONTEXT, QUICK_ROWS_CONTEXT = 192, 16
CONTEXTS, QUICK_CONTEXTS = (128, 512, 1024, 2048), (32,)
CONTEXTS_ROWS, QUICK_CONTEXTS_ROWS = 8, 2


@dataclass(frozen=True, slots=True)
class Size:
    """A step of `rows` requests that decode, each behind `context` tokens at the first of the steps timed."""

    rows: int
    context: int


@dataclass(frozen=True, slots=True)
class StepCost:
    """Medians in seconds.

    Args:
        step: a whole `Engine.step`.
        outside: what of it is neither the runner's forward pass nor its logits or their arg-max.
        floor: the least that reading weights and K/V, or their products, allow.
    """

    size: Size
    step: float
    outside: float
    floor: float


def step_sizes(quick: bool) -> list[Size]:
    if quick:
        return [
            *(Size(rows, QUICK_ROWS_CONTEXT) for rows in QUICK_ROWS),
            *(Size(QUICK_CONTEXTS_ROWS, context) for context in QUICK_CONTEXTS),
        ]
    return [*(Size(rows, ROWS_CONTEXT) for rows in ROWS), *(Size(CONTEXTS_ROWS, context) for context in CONTEXTS)]


class KernelClock:
    """A runner, and the time that its calls take."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.seconds = 0.0

    def forward(self, batch: Batch) -> Any:
        return self._timed(lambda: self._runner.forward(batch))

    def synchronize(self) -> None:
        self._runner.synchronize()

    def logits(self, hidden: Any) -> Any:
        return self._timed(lambda: self._runner.logits(hidden))

    def arg_max(self, hidden: Any) -> Any:
        return self._timed(lambda: self._runner.arg_max(hidden))

    def _timed(self, call: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = call()
        self._runner.synchronize()
        self.seconds += time.perf_counter() - started
        return result


class StepMeter:
    """Times the steps of an engine that shares another one's model and pool.

    Args:
        engine: idle from here on; the prefixes that it knows are overwritten, so it forgets them.
    """

    def __init__(self, engine: Engine, floors: Floors) -> None:
        assert isinstance(engine.runner, ModelRunner)
        engine.reset_prefix_cache()
        self._clock = KernelClock(engine.runner)
        self._engine = Engine(engine.resolved, self._clock, Sampler(self._clock.logits, self._clock.arg_max))
        self._floors = floors
        self._numbers = itertools.count()
        self._prompts: list[list[int]] = []

    def measure(self, sizes: Sequence[Size], steps: int, keep: Callable[[StepCost], object]) -> None:
        """Hand each size's cost to `keep` as soon as it is known."""
        shape = max(size.rows for size in sizes), max(size.context for size in sizes)
        tokens = np.random.default_rng(0).integers(0, self._engine.resolved.model.vocab_size, shape)
        # All sizes take beginnings of the same prompts: what one has computed, the prefix cache has for the next.
        self._prompts = tokens.tolist()
        for size in sizes:
            keep(self._cost(size, steps))

    def _cost(self, size: Size, steps: int) -> StepCost:
        self._add(size, num_tokens=1)
        while self._engine.has_work:
            self._engine.step()
        # Their prompts are cached now, so that all begin to decode within a few steps of each other.
        self._add(size, num_tokens=steps + 1)
        whole: list[float] = []
        outside: list[float] = []
        while self._engine.has_work:
            inside = self._clock.seconds
            started = time.perf_counter()
            outputs = self._engine.step()
            taken = time.perf_counter() - started
            assert not any(output.error for output in outputs), "a forward pass failed"
            record = self._engine.steps[-1]
            if record.decode_tokens == size.rows and record.prefill_tokens == 0:
                whole.append(taken)
                outside.append(taken - (self._clock.seconds - inside))
        floor = self._floors.decode([size.context + steps // 2] * size.rows).seconds
        return StepCost(size, median(whole), median(outside), floor)

    def _add(self, size: Size, num_tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        for prompt in self._prompts[: size.rows]:
            self._engine.add(f"step-{next(self._numbers)}", prompt[: size.context], params)
