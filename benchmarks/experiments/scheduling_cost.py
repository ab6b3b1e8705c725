"""What a step costs beside its forward pass, and what finding a prefix costs: the scheduler alone, no model.

    python -m pageframe.benchmarks.experiments.scheduling_cost [--steps 300] [--quick]

Pure decode: 256 and 1,024 requests run, with contexts of 200 to 400 tokens, blocks of 16, the journal and the prefix
cache on. Each step is what an engine does around its forward pass: decide (`schedule`), gather the arrays
(`Batch.build`), take the tokens drawn (`update`); about one request in 16 needs a new block and has filled one. The
figures are medians over the steps, divided by the number of requests; the target is 5 us for all three together.

Prefix matching: a prompt of 1,025 tokens whose 64 full blocks are cached, and one that differs in its first block,
beside all that those requests have made findable. The target is 50 us for 1,024 tokens.

Exits with 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pageframe.runtime.batch import Batch
from pageframe.runtime.journal import Journal
from pageframe.runtime.prefix_cache import make_salt
from pageframe.runtime.request import Request, SamplingParams
from pageframe.runtime.scheduler import Scheduler
from pageframe.runtime.step_plan import StepPlan, StepResult

BLOCK_SIZE = 16
SHORTEST, LONGEST = 200, 400
MATCHED_BLOCKS = 64
MATCHED_TOKENS = MATCHED_BLOCKS * BLOCK_SIZE
VOCAB_SIZE = 32_000
TOKEN = 7
#: How many prompts the matching goes through in turn, so that it does not find everything in the processor's caches.
NUM_PROMPTS = 32

STEP_TARGET_US = 5.0
MATCH_TARGET_US = 50.0


@dataclass(frozen=True, slots=True)
class StepCost:
    """Microseconds per running request and step: medians of each part, and of their sum."""

    num_requests: int
    schedule: float
    build: float
    update: float
    total: float


@dataclass(frozen=True, slots=True)
class MatchCost:
    """Microseconds per 1,024 tokens looked up.

    Args:
        num_findable: blocks in the index.
    """

    num_findable: int
    hit: float
    miss: float


class LoneScheduler:
    """A scheduler whose every step draws one and the same token, with `num_requests` requests that decode."""

    def __init__(self, num_requests: int, num_steps: int) -> None:
        self._random = np.random.default_rng(0)
        self._arrivals = itertools.count()
        max_model_len = max(LONGEST + num_steps, MATCHED_TOKENS) + 2
        blocks_each = -(-(LONGEST + num_steps + 1) // BLOCK_SIZE)
        self.scheduler = Scheduler(
            num_blocks=num_requests * blocks_each + NUM_PROMPTS * (MATCHED_BLOCKS + 1),
            block_size=BLOCK_SIZE,
            max_num_requests=num_requests + 1,
            max_num_batched_tokens=num_requests * LONGEST + MATCHED_TOKENS + 1,
            max_model_len=max_model_len,
            journal=Journal(),
        )
        for length in self._random.integers(SHORTEST, LONGEST, num_requests).tolist():
            self.scheduler.add([self.request(self.prompt(length), max_tokens=num_steps + 2)], 0.0)
        self.step()
        assert self.scheduler.num_running == num_requests, "all prompts are computed in the first step"

    def prompt(self, length: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """Random tokens, which share nothing with any other prompt."""
        return self._random.integers(0, VOCAB_SIZE, length, dtype=np.int32)

    def request(self, token_ids: np.ndarray[tuple[int], np.dtype[np.int32]], max_tokens: int) -> Request:
        arrival = next(self._arrivals)
        return Request(
            request_id=f"r{arrival}",
            token_ids=token_ids,
            params=SamplingParams(temperature=0, max_tokens=max_tokens),
            tenant="",
            priority=0,
            arrival=arrival,
            arrival_time=0.0,
            request_seed=arrival,
            seed=arrival,
            max_total_tokens=len(token_ids) + max_tokens,
            stop_ids=frozenset({0}),
            eos_ids=frozenset({0}),
            salt=make_salt("", ""),
        )

    def step(self) -> tuple[float, float, float]:
        """Seconds of schedule, build and update."""
        started = time.perf_counter()
        plan = self.scheduler.schedule(started)
        scheduled = time.perf_counter()
        Batch.build(plan, self.scheduler.rows, self.scheduler.tables)
        built = time.perf_counter()
        result = _result(plan)
        drawn = time.perf_counter()
        self.scheduler.update(plan, result, drawn)
        return scheduled - started, built - scheduled, time.perf_counter() - drawn


def _result(plan: StepPlan) -> StepResult:
    return StepResult(np.full(int(plan.num_samples.sum()), TOKEN, dtype=np.int32), {})


def step_cost(lone: LoneScheduler, num_steps: int, advance: Callable[[], object] = lambda: None) -> StepCost:
    """Medians over `num_steps` steps of pure decode."""
    num_requests = lone.scheduler.num_running
    seconds = []
    for _ in range(num_steps):
        seconds.append(lone.step())
        advance()
    assert lone.scheduler.num_running == num_requests, "nobody came or went"
    assert lone.scheduler.num_preemptions == 0
    parts = [median(part) for part in zip(*seconds, strict=True)]
    microseconds = [part * 1e6 / num_requests for part in (*parts, median(map(sum, seconds)))]
    return StepCost(num_requests, *microseconds)


def match_cost(lone: LoneScheduler, repeats: int) -> MatchCost:
    """Medians over `repeats` passes through prompts of which all blocks are found, and through others."""
    scheduler = lone.scheduler
    cached = [lone.prompt(MATCHED_TOKENS + 1) for _ in range(NUM_PROMPTS)]
    for token_ids in cached:
        scheduler.add([lone.request(token_ids, max_tokens=1)], 0.0)
        lone.step()
    hits = [lone.request(token_ids, max_tokens=1) for token_ids in cached]
    misses = [lone.request(lone.prompt(MATCHED_TOKENS + 1), max_tokens=1) for _ in range(NUM_PROMPTS)]
    assert all(len(scheduler.blocks.lookup(request).entries) == MATCHED_BLOCKS for request in hits)
    assert not any(scheduler.blocks.lookup(request).entries for request in misses)

    def microseconds(requests: list[Request]) -> float:
        def passes() -> Iterator[float]:
            for _ in range(repeats):
                started = time.perf_counter()
                for request in requests:
                    scheduler.blocks.lookup(request)
                yield (time.perf_counter() - started) / len(requests)

        return median(passes()) * 1e6

    assert scheduler.blocks.prefix_cache is not None
    return MatchCost(len(scheduler.blocks.prefix_cache), microseconds(hits), microseconds(misses))


def measure(sizes: tuple[int, ...], num_steps: int, repeats: int) -> bool:
    """Print both tables; whether every target is met."""
    costs: list[StepCost] = []
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("decoding", total=len(sizes) * num_steps)
        for size in sizes:
            lone = LoneScheduler(size, num_steps)
            costs.append(step_cost(lone, num_steps, lambda: bar.advance(task)))
            matching = match_cost(lone, repeats)
    console = Console()
    table = Table(title=f"us per running request and step, medians of {num_steps} steps of pure decode")
    for column in ("requests", "schedule", "build", "update", "together"):
        table.add_column(column, justify="right")
    for cost in costs:
        parts = (cost.schedule, cost.build, cost.update, cost.total)
        table.add_row(f"{cost.num_requests:,}", *(f"{part:.2f}" for part in parts))
    console.print(table)
    worst = max(cost.total for cost in costs)
    console.print(
        f"A step costs {worst:.1f} us per running request beside its forward pass, where it costs most; the target is "
        f"at most {STEP_TARGET_US:.0f}.\n"
    )
    table = Table(title=f"us per {MATCHED_TOKENS:,} tokens, {matching.num_findable:,} blocks can be found")
    for column in (f"hit of {MATCHED_BLOCKS} blocks", "miss at the first block"):
        table.add_column(column, justify="right")
    table.add_row(f"{matching.hit:.1f}", f"{matching.miss:.1f}")
    console.print(table)
    console.print(
        f"Finding a prefix of {MATCHED_TOKENS:,} tokens takes {matching.hit:.0f} us; the target is at most "
        f"{MATCH_TARGET_US:.0f}."
    )
    return worst <= STEP_TARGET_US and max(matching.hit, matching.miss) <= MATCH_TARGET_US


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description="What scheduling and prefix matching cost, without a model.")
    parser.add_argument("--steps", type=int, default=300, help="decode steps measured at each size (default: 300)")
    parser.add_argument("--quick", action="store_true", help="toy sizes, to see that it runs; the targets do not count")
    options = parser.parse_args(arguments)
    if options.quick:
        measure((8, 16), num_steps=20, repeats=2)
        return 0
    return 0 if measure((256, 1024), options.steps, repeats=50) else 1


if __name__ == "__main__":
    sys.exit(main())
