"""The four measurements of `pageframe bench batching`: what runs, and what is kept of each run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from pageframe.benchmarks.experiments.driver import Agreement, Answer, Ask, OutOfTimeError, compare, serve
from pageframe.benchmarks.experiments.report import InputError, TimeBudget
from pageframe.benchmarks.experiments.sessions import Holder, Sessions, longest_drawn, prompt_of
from pageframe.benchmarks.experiments.traces import TraceRequest, at_rate
from pageframe.runtime.config import EngineConfig
from pageframe.runtime.engine import Engine
from pageframe.runtime.engine_builder import build_engine
from pageframe.runtime.model_runner import ModelRunner
from pageframe.runtime.sampler import Sampler

BLOCK_SIZES = tuple(2**power for power in range(9))
QUICK_BLOCK_SIZES = (1, 16, 256)
REQUEST_LEVEL, ITERATION_LEVEL = "by request", "by iteration"
CACHE_ON, CACHE_OFF = "cache on", "cache off"
#: Requests at a rate come at this share of what iteration-level batching served when all came at once.
LOAD = 0.8
#: Of fewer values the 99th percentile is no more than the longest.
FEWEST_FOR_P99 = 100

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is run.

    Args:
        requests, max_len: of the trace: requests, and most tokens of each.
        batch: most requests at once.
        runners, runner_tokens: requests that decode while long prompts arrive, and the tokens of each.
        long_prompts, long_tokens: those prompts, and the tokens of each.
        chunk: the token budget of a step where prompts are computed in chunks.
        sessions, turns, system_tokens: of the conversations. No length is one of whole blocks, paging's best case.
        user_tokens, answer_tokens: around which the lengths of each turn are drawn.
        open_sessions: held at once.
        repeats: of each way, taking turns.
        budget: seconds for each part.
    """

    requests: int = 32
    max_len: int = 512
    batch: int = 8
    runners: int = 4
    runner_tokens: int = 96
    long_prompts: int = 4
    long_tokens: int = 1024
    chunk: int = 128
    sessions: int = 6
    turns: int = 4
    system_tokens: int = 277
    user_tokens: int = 48
    answer_tokens: int = 32
    open_sessions: int = 3
    block_sizes: tuple[int, ...] = BLOCK_SIZES
    repeats: int = 3
    budget: float = 125.0


QUICK = Sizes(
    requests=8,
    max_len=64,
    batch=4,
    runners=2,
    runner_tokens=24,
    long_prompts=2,
    long_tokens=384,
    chunk=64,
    sessions=2,
    turns=3,
    system_tokens=101,
    user_tokens=16,
    answer_tokens=8,
    open_sessions=2,
    block_sizes=QUICK_BLOCK_SIZES,
    repeats=1,
    budget=13.0,
)


@dataclass(slots=True)
class Part:
    """One measurement.

    Args:
        ways: the metrics of each way's runs; no run for one that was not measured.
        notes: what was run, for people.
        agreement: all ways' answers against the first measured way's.
        reference: those answers.
        failure: why the part ended early, if it did.
    """

    name: str
    ways: dict[str, list[Metrics]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    agreement: Agreement = field(default_factory=Agreement)
    reference: list[Answer] = field(default_factory=list)
    failure: str = ""

    def keep(self, way: str, metrics: Metrics, answers: list[Answer], engine: Engine) -> None:
        """Add a run; its answers are compared where it is the way's first."""
        runs = self.ways[way]
        runs.append(metrics)
        if not self.reference:
            self.reference = answers
        elif len(runs) == 1:
            self.agreement += compare(answers, self.reference, engine)

    def median(self, way: str, metric: str) -> float | None:
        """Over the way's runs; None where it was not measured."""
        values = [run[metric] for run in self.ways.get(way, []) if metric in run]
        return float(np.median(values)) if values else None


class Bench:
    """The model, loaded once, and engines over it.

    Args:
        config: of the engine that is built; `renew` makes others over the same weights and pool.
        advance: called after each run that was measured or given up.
    """

    def __init__(self, config: EngineConfig, sizes: Sizes, seed: int, advance: Callable[[], object]) -> None:
        self.config = config
        self.sizes = sizes
        self.seed = seed
        self.advance = advance
        self.engine = build_engine(config)
        _prepare(self.engine)

    @property
    def dtype(self) -> str:
        return self.config.dtype

    @property
    def vocab_size(self) -> int:
        return self.engine.resolved.model.vocab_size

    def renew(self, **changes: Any) -> Engine:
        """An engine that has seen no request, over the same runner."""
        runner = self.engine.runner
        assert isinstance(runner, ModelRunner)
        return Engine(dataclasses.replace(self.engine.resolved, **changes), runner, Sampler(runner.logits), seed=0)

    def with_block_size(self, block_size: int) -> Engine:
        """An engine with a pool of as many slots in blocks of another size."""
        resolved = self.engine.resolved
        if block_size == resolved.block_size:
            return self.renew()
        slots = resolved.num_blocks * resolved.block_size
        config = dataclasses.replace(self.config, block_size=block_size, num_blocks=-(-slots // block_size))
        engine = build_engine(config)
        _prepare(engine)
        return engine


def _prepare(engine: Engine) -> None:
    """Touch the pool's memory and run one request: neither is a cost of any way."""
    assert isinstance(engine.runner, ModelRunner)
    engine.runner.fill_blocks(range(engine.resolved.num_blocks), 0.0)
    serve(engine, [Ask("warm-up", [10] * 32, 4)], TimeBudget(60))
    engine.reset_prefix_cache()


def take_turns(
    part: Part, ways: Sequence[str], bench: Bench, seconds: float, run_once: Callable[[str, TimeBudget], None]
) -> None:
    """Measure the ways in turn, `repeats` rounds, within these seconds.

    A way's first run may take half as much again as an equal share of what is left; a later one starts only where the
    way's longest so far would still fit.
    """
    whole = TimeBudget(seconds)
    longest = dict.fromkeys(ways, 0.0)
    for way in ways:
        part.ways[way] = []
    for repeat in range(bench.sizes.repeats):
        for index, way in enumerate(ways):
            share = whole.left if repeat else min(whole.left, 1.5 * whole.left / (len(ways) - index))
            if longest[way] < share:
                budget = TimeBudget(share)
                try:
                    run_once(way, budget)
                except OutOfTimeError:
                    longest[way] = float("inf")
                else:
                    longest[way] = max(longest[way], share - budget.left)
            bench.advance()


# ---- batching by request and by iteration ---------------------------------------------------------------------------


def trace_asks(requests: Sequence[TraceRequest], vocab_size: int, seed: int) -> list[Ask]:
    """Random prompts of the trace's lengths; answers run to the trace's lengths."""
    generator = np.random.default_rng(seed)
    return [
        Ask(f"trace-{index}", prompt_of(one.prompt_tokens, generator, vocab_size), one.output_tokens, one.arrival)
        for index, one in enumerate(requests)
    ]


def latency_metrics(answers: Sequence[Answer]) -> Metrics:
    """Output tokens a second, and milliseconds from arrival to the first and the last token."""
    first = np.array([answer.first_token_seconds for answer in answers]) * 1e3
    whole = np.array([answer.seconds for answer in answers]) * 1e3
    span = max(answer.times[-1] for answer in answers) - min(answer.arrival for answer in answers)
    metrics = {"tokens_per_second": sum(len(answer.tokens) for answer in answers) / span}
    for name, values in (("ttft", first), ("latency", whole)):
        metrics[f"{name}_mean_ms"] = float(values.mean())
        metrics |= spread_metrics(name, values)
    return metrics


def spread_metrics(name: str, values: npt.NDArray[np.float64]) -> Metrics:
    """Median and longest of milliseconds, and the 99th percentile where there are enough values for one."""
    metrics = {f"{name}_p50_ms": float(np.median(values)), f"{name}_max_ms": float(np.max(values))}
    if len(values) >= FEWEST_FOR_P99:
        metrics[f"{name}_p99_ms"] = float(np.percentile(values, 99))
    return metrics


def measure_levels(bench: Bench, requests: Sequence[TraceRequest], rate: float | None, part: Part) -> None:
    """Whole batches against the engine as it is; all requests at once, then at a rate."""
    sizes = bench.sizes

    def run(way: str, arriving: Sequence[TraceRequest], budget: TimeBudget) -> None:
        engine = bench.renew(max_num_requests=sizes.batch)
        asks = trace_asks(arriving, bench.vocab_size, bench.seed)
        batch_size = sizes.batch if way.startswith(REQUEST_LEVEL) else None
        answers = serve(engine, asks, budget, batch_size=batch_size)
        part.keep(way, latency_metrics(answers), answers, bench.renew())

    together = at_rate(requests, 0)
    ways = [f"{level}, all at once" for level in (REQUEST_LEVEL, ITERATION_LEVEL)]
    take_turns(part, ways, bench, sizes.budget / 2, lambda way, budget: run(way, together, budget))
    throughput = part.median(ways[1], "tokens_per_second")
    if rate is None and throughput is not None:
        rate = LOAD * throughput * len(requests) / sum(request.output_tokens for request in requests)
    later = [f"{level}, at a rate" for level in (REQUEST_LEVEL, ITERATION_LEVEL)]
    if rate is None:
        part.ways |= {way: [] for way in later}
        return
    part.notes.append(f"the rate is {rate:.2f} requests/s")
    spread = at_rate(requests, rate)
    take_turns(part, later, bench, sizes.budget / 2, lambda way, budget: run(way, spread, budget))


# ---- chunked prefill ------------------------------------------------------------------------------------------------


def chunk_asks(sizes: Sizes, vocab_size: int, seed: int) -> list[Ask]:
    """Short prompts with long answers, and long prompts that come while those decode, evenly spread."""
    generator = np.random.default_rng(seed)
    asks = [
        Ask(f"runner-{index}", prompt_of(16, generator, vocab_size), sizes.runner_tokens)
        for index in range(sizes.runners)
    ]
    every = sizes.runners * sizes.runner_tokens // (sizes.long_prompts + 1)
    for index in range(sizes.long_prompts):
        prompt = prompt_of(sizes.long_tokens, generator, vocab_size)
        asks.append(Ask(f"long-{index}", prompt, 1, after_tokens=max(1, every * (index + 1))))
    return asks


def gap_metrics(answers: Sequence[Answer]) -> Metrics:
    """Milliseconds between tokens of the runners while some long prompt waits for its first token."""
    long = [(answer.arrival, answer.times[0]) for answer in answers if answer.ask.name.startswith("long-")]
    gaps = [
        (end - begin) * 1e3
        for answer in answers
        if answer.ask.name.startswith("runner-")
        for begin, end in pairwise(answer.times)
        if any(begin < first_token and arrival < end for arrival, first_token in long)
    ]
    metrics = {
        "tokens_per_second": sum(len(answer.tokens) for answer in answers)
        / max(answer.times[-1] for answer in answers),
        "long_ttft_p50_ms": float(np.median([end - begin for begin, end in long])) * 1e3,
        "num_gaps": float(len(gaps)),
    }
    if gaps:
        metrics |= spread_metrics("gap", np.array(gaps))
    return metrics


def chunk_ways(sizes: Sizes) -> list[str]:
    return [f"chunks of {sizes.chunk}", "whole prompts"]


def measure_chunks(bench: Bench, part: Part) -> None:
    """A small token budget against one that takes every prompt whole."""
    sizes = bench.sizes
    chunked, whole = chunk_ways(sizes)
    # One prompt gets half of what is left while another waits: with this much even that is all of it.
    plenty = 4 * (sizes.long_prompts * sizes.long_tokens + sizes.runners)
    budgets = {chunked: sizes.chunk, whole: plenty}

    def run(way: str, budget: TimeBudget) -> None:
        engine = bench.renew(
            max_num_requests=sizes.runners + sizes.long_prompts, max_num_batched_tokens=budgets[way], prefix_cache=False
        )
        answers = serve(engine, chunk_asks(sizes, bench.vocab_size, bench.seed), budget)
        part.keep(way, gap_metrics(answers), answers, bench.renew())

    take_turns(part, (chunked, whole), bench, sizes.budget, run)


# ---- sessions: prefix cache and block size --------------------------------------------------------------------------


@dataclass(slots=True)
class TailWatch:
    """Sums over steps: slots of blocks in use, and those of them that no token of their request has."""

    taken: int = 0
    wasted: int = 0

    def __call__(self, engine: Engine) -> None:
        scheduler = engine.scheduler
        rows = scheduler.rows_in_use()
        block_size = scheduler.tables.block_size
        held = scheduler.tables.num_blocks[rows] * block_size
        self.wasted += int(np.maximum(0, held - scheduler.rows.num_tokens[rows]).sum())
        self.taken += scheduler.allocator.num_used * block_size


def hold_sessions(
    engine: Engine, sizes: Sizes, sessions: Sessions, budget: TimeBudget, *, ignore_eos: bool, seed: int
) -> tuple[Metrics, list[Answer], int]:
    """Hold the sessions; metrics, answers and how many sessions were cut short. Where no answer ends by itself, its
    length is drawn."""
    most_answered = longest_drawn(sizes.answer_tokens) if ignore_eos else sizes.answer_tokens
    longest = engine.resolved.max_model_len - most_answered
    holder = Holder(
        sessions(sizes.sessions),
        answer_tokens=sizes.answer_tokens,
        ignore_eos=ignore_eos,
        longest=longest,
        seed=seed if ignore_eos else None,
    )
    tails = TailWatch()
    answers = serve(engine, holder.first(sizes.open_sessions), budget, follow=holder.follow, watch=tails)
    if not answers:
        raise InputError(f"sessions hold no prompt of at most {longest} tokens")
    metrics = latency_metrics(answers)
    metrics["hit_rate"] = sum(one.num_cached for one in answers) / sum(len(one.ask.prompt) for one in answers)
    metrics["wasted"] = tails.wasted / tails.taken if tails.taken else 0.0
    by_turn: dict[int, list[float]] = {}
    for answer in answers:
        turn = int(answer.ask.name.rpartition("-")[2])
        by_turn.setdefault(turn, []).append(answer.first_token_seconds * 1e3)
    for turn, times in by_turn.items():
        metrics[f"ttft_turn_{turn + 1}_ms"] = float(np.median(times))
    return metrics, answers, holder.cut_short


def measure_prefix_cache(bench: Bench, sessions: Sessions, part: Part, *, ignore_eos: bool) -> None:
    def run(way: str, budget: TimeBudget) -> None:
        engine = bench.renew(prefix_cache=way == CACHE_ON)
        metrics, answers, cut = hold_sessions(
            engine, bench.sizes, sessions, budget, ignore_eos=ignore_eos, seed=bench.seed
        )
        _note_cut(part, cut)
        part.keep(way, metrics, answers, bench.renew())

    take_turns(part, (CACHE_ON, CACHE_OFF), bench, bench.sizes.budget, run)


def measure_block_sizes(bench: Bench, sessions: Sessions, part: Part, *, ignore_eos: bool) -> None:
    """Half of the sessions, since there are many sizes."""
    sizes = dataclasses.replace(bench.sizes, sessions=-(-bench.sizes.sessions // 2))

    def run(way: str, budget: TimeBudget) -> None:
        engine = bench.with_block_size(int(way))
        metrics, answers, cut = hold_sessions(engine, sizes, sessions, budget, ignore_eos=ignore_eos, seed=bench.seed)
        _note_cut(part, cut)
        part.keep(way, metrics, answers, bench.renew())

    take_turns(part, [str(size) for size in sizes.block_sizes], bench, sizes.budget, run)


def _note_cut(part: Part, cut_short: int) -> None:
    note = f"{cut_short} sessions ended where a prompt grew too long"
    if cut_short and note not in part.notes:
        part.notes.append(note)
