"""The four measurements of `pageframe bench batching`: what runs, and what is kept of each run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from pageframe.benchmarks.experiments.batching_parts import Bench, Metrics, Part, take_turns
from pageframe.benchmarks.experiments.batching_sizes import RUNNER_PROMPT, Sizes
from pageframe.benchmarks.experiments.driver import Answer, Ask, serve
from pageframe.benchmarks.experiments.report import InputError, TimeBudget
from pageframe.benchmarks.experiments.sessions import Holder, Sessions, longest_drawn, prompt_of
from pageframe.benchmarks.experiments.traces import TraceRequest, at_rate
from pageframe.runtime.engine import Engine

REQUEST_LEVEL, ITERATION_LEVEL = "by request", "by iteration"
AT_ONCE, AT_A_RATE = "all at once", "at a rate"
CACHE_ON, CACHE_OFF = "cache on", "cache off"
#: Requests at a rate come at this share of what iteration-level batching served when all came at once.
LOAD = 0.8
#: Of fewer values the 99th percentile is no more than the longest.
FEWEST_FOR_P99 = 100
#: Why a way that needs a rate has no run.
NO_RATE = "no rate, as nothing was served at once"


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


def level_ways(arrivals: str) -> list[str]:
    return [f"{level}, {arrivals}" for level in (REQUEST_LEVEL, ITERATION_LEVEL)]


def measure_levels(
    bench: Bench, requests: Sequence[TraceRequest], rate: float | None, part: Part, seconds: float
) -> None:
    """Whole batches against the engine as it is; all requests at once, then at a rate.

    Args:
        rate: requests a second; None: LOAD of what was served at once.
    """
    budget = TimeBudget(seconds)
    at_once, later = level_ways(AT_ONCE), level_ways(AT_A_RATE)
    part.expect([*at_once, *later])
    _compare_levels(bench, at_rate(requests, 0), part, at_once, seconds / 2)
    throughput = part.median(at_once[1], "tokens_per_second")
    if rate is None and throughput is not None:
        rate = LOAD * throughput * len(requests) / sum(request.output_tokens for request in requests)
    if rate is None:
        part.give_up(later, NO_RATE)
        return
    part.notes.append(f"the rate is {rate:.2f} requests/s")
    _compare_levels(bench, at_rate(requests, rate), part, later, budget.left)


def _compare_levels(
    bench: Bench, requests: Sequence[TraceRequest], part: Part, ways: Sequence[str], seconds: float
) -> None:
    sizes = bench.sizes
    asks = trace_asks(requests, bench.vocab_size, bench.seed)

    def run(way: str, budget: TimeBudget) -> None:
        engine = bench.renew(max_num_requests=sizes.batch)
        batch_size = sizes.batch if way.startswith(REQUEST_LEVEL) else None
        answers = serve(engine, asks, budget, batch_size=batch_size)
        part.keep(way, latency_metrics(answers), answers, bench.renew())

    take_turns(part, ways, bench, seconds, run)


# ---- chunked prefill ------------------------------------------------------------------------------------------------


def chunk_asks(sizes: Sizes, vocab_size: int, seed: int) -> list[Ask]:
    """Short prompts with long answers, and long prompts that come while those decode, evenly spread."""
    generator = np.random.default_rng(seed)
    asks = [
        Ask(f"runner-{index}", prompt_of(RUNNER_PROMPT, generator, vocab_size), sizes.runner_tokens)
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


def measure_chunks(bench: Bench, part: Part, seconds: float) -> None:
    """A small token budget against one that takes every prompt whole."""
    sizes = bench.sizes
    chunked, whole = chunk_ways(sizes)
    # One prompt gets half of what is left while another waits: with this much even that is all of it.
    plenty = 4 * (sizes.long_prompts * sizes.long_tokens + sizes.runners)
    budgets = {chunked: sizes.chunk, whole: plenty}

    def run(way: str, budget: TimeBudget) -> None:
        engine = bench.renew(
            max_num_requests=sizes.chunk_requests,
            max_num_batched_tokens=budgets[way],
            mixed_token_budget=None,
            prefix_cache=False,
        )
        answers = serve(engine, chunk_asks(sizes, bench.vocab_size, bench.seed), budget)
        part.keep(way, gap_metrics(answers), answers, bench.renew())

    take_turns(part, (chunked, whole), bench, seconds, run)


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
    length is drawn.

    Raises:
        InputError: no session has a prompt that fits.
    """
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
    metrics = latency_metrics(answers) | turn_metrics(answers)
    metrics["hit_rate"] = sum(one.num_cached for one in answers) / sum(len(one.ask.prompt) for one in answers)
    metrics["wasted"] = tails.wasted / tails.taken if tails.taken else 0.0
    return metrics, answers, holder.cut_short


def turn_metrics(answers: Sequence[Answer]) -> Metrics:
    """The median milliseconds to the first token, by the turn of the session."""
    by_turn: dict[int, list[float]] = {}
    for answer in answers:
        turn = int(answer.ask.name.rpartition("-")[2])
        by_turn.setdefault(turn, []).append(answer.first_token_seconds * 1e3)
    return {f"ttft_turn_{turn + 1}_ms": float(np.median(times)) for turn, times in by_turn.items()}


def measure_prefix_cache(bench: Bench, sessions: Sessions, part: Part, seconds: float, *, ignore_eos: bool) -> None:
    def run(way: str, budget: TimeBudget) -> None:
        engine = bench.renew(prefix_cache=way == CACHE_ON)
        metrics, answers, cut = hold_sessions(
            engine, bench.sizes, sessions, budget, ignore_eos=ignore_eos, seed=bench.seed
        )
        _note_cut(part, cut)
        part.keep(way, metrics, answers, bench.renew())

    take_turns(part, (CACHE_ON, CACHE_OFF), bench, seconds, run)


def measure_block_sizes(bench: Bench, sessions: Sessions, part: Part, seconds: float, *, ignore_eos: bool) -> None:
    """Half of the sessions, since there are many sizes."""
    sizes = dataclasses.replace(bench.sizes, sessions=-(-bench.sizes.sessions // 2))

    def run(way: str, budget: TimeBudget) -> None:
        engine = bench.with_block_size(int(way), budget)
        metrics, answers, cut = hold_sessions(engine, sizes, sessions, budget, ignore_eos=ignore_eos, seed=bench.seed)
        _note_cut(part, cut)
        part.keep(way, metrics, answers, bench.renew())

    take_turns(part, [str(size) for size in sizes.block_sizes], bench, seconds, run)


def _note_cut(part: Part, cut_short: int) -> None:
    note = f"{cut_short} sessions ended where a prompt grew too long"
    if cut_short and note not in part.notes:
        part.notes.append(note)
