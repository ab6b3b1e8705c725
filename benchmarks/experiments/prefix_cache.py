"""What the prefix cache gives and what it costs, with the default model in this process.

    python -m pageframe.benchmarks.experiments.prefix_cache [--mt-bench PATH] [--taubench PATH] [--quick]

Three measurements, each a table and a sentence:

1. Time to first token of a prompt of 1,024 tokens, cold and with its first 960 cached; the two take turns. Target: at
   most 0.25x of cold.
2. The share of prompt tokens found computed, in conversations held several at once, greedily, by the model's own chat
   template. --mt-bench takes two-turn questions (JSON lines with "turns"): the second turn contains the first answer.
   --taubench takes recorded sessions (JSON lines with "session_id", "timestamp" and "input"): each session's inputs are
   asked in turn. PATH is a file or a folder of *.jsonl; without it that part is left out.
3. The cache's cost where nothing is shared: the same random prompts by two engines, one without it, which take turns
   step by step, whoever is first drawn by lot, and swap weights and pool after half of the runs. Of each run the ratio
   of both engines' throughput; over all runs the ratio with its 95% confidence interval, by a bootstrap over the runs.
   Target: a cost below 1%.

Exits with 1 if a target is missed, and for the cost also if the interval does not exclude that.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pageframe.benchmarks.experiments.conversation_files import PromptFileError, read_mt_bench, read_taubench
from pageframe.benchmarks.experiments.conversations import Chat, Conversation, asked_in_turn, recorded
from pageframe.benchmarks.experiments.sessions import Held, Turn, hold
from pageframe.runtime.chat_template import load_chat_template
from pageframe.runtime.config import EngineConfig
from pageframe.runtime.engine import Engine
from pageframe.runtime.engine_builder import build_engine
from pageframe.runtime.model_runner import ModelRunner
from pageframe.runtime.models.source import resolve_source
from pageframe.runtime.request import RequestOutput, SamplingParams
from pageframe.runtime.sampler import Sampler
from pageframe.runtime.tokenizer import load_tokenizer

PROMPT_TOKENS, CACHED_TOKENS = 1024, 960
TTFT_TARGET = 0.25
COST_TARGET = 0.01
RESAMPLES = 10_000

Advance = Callable[[], object]


# ---- time to first token --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """Seconds to the first token, medians."""

    cold: float
    cached: float

    @property
    def ratio(self) -> float:
        return self.cached / self.cold


def first_tokens(engine: Engine, repeats: int, advance: Advance) -> FirstTokens:
    """A cold prompt, then one that begins with its first 960 tokens, `repeats` times."""
    choice = np.random.default_rng(0)
    vocab_size = engine.resolved.model.vocab_size
    cold: list[float] = []
    cached: list[float] = []
    for repeat in range(repeats + 1):
        prefix = choice.integers(10, vocab_size, CACHED_TOKENS).tolist()
        for expected, times in ((0, cold), (CACHED_TOKENS, cached)):
            tail = choice.integers(10, vocab_size, PROMPT_TOKENS - CACHED_TOKENS).tolist()
            seconds = _seconds_to_first_token(engine, [*prefix, *tail], expected)
            if repeat:  # the first one is a warm-up
                times.append(seconds)
        advance()
    return FirstTokens(median(cold), median(cached))


def _seconds_to_first_token(engine: Engine, token_ids: list[int], expected_cached: int) -> float:
    started = time.perf_counter()
    engine.add(f"first-token-{started}", token_ids, SamplingParams(temperature=0, max_tokens=1))
    outputs: list[RequestOutput] = []
    while not outputs:
        outputs = engine.step()
    seconds = time.perf_counter() - started
    (output,) = outputs
    assert output.num_cached_tokens == expected_cached, f"{output.num_cached_tokens} tokens were found"
    return seconds


# ---- the cost where nothing is shared -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Work:
    """`requests` prompts of `prompt` random tokens, `output` tokens each."""

    requests: int
    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class Interval:
    """A ratio and its 95% confidence interval."""

    ratio: float
    low: float
    high: float


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """Ratio of two sums of pairs; the interval is the bootstrap's, over the pairs."""
    top, bottom = np.asarray(numerators), np.asarray(denominators)
    picks = np.random.default_rng(0).integers(0, len(top), (RESAMPLES, len(top)))
    ratios = top[picks].sum(axis=1) / bottom[picks].sum(axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5]).tolist()
    return Interval(float(top.sum() / bottom.sum()), low, high)


def unshared_runs(
    engines: tuple[Engine, Engine], work: Work, num_runs: int, advance: Advance
) -> tuple[list[float], list[float]]:
    """Seconds of each run, for each engine: the same prompts, new ones in each run; the engines take turns step by
    step, in random order."""
    choice = np.random.default_rng(0)
    lot = random.Random(0)
    seconds: tuple[list[float], list[float]] = ([], [])
    for run in range(num_runs + 1):
        prompts = choice.integers(10, engines[0].resolved.model.vocab_size, (work.requests, work.prompt)).tolist()
        taken = _take_turns(engines, prompts, work, lot)
        if run:  # the first one is a warm-up
            for times, time_taken in zip(seconds, taken, strict=True):
                times.append(time_taken)
        advance()
    return seconds


def _take_turns(
    engines: tuple[Engine, Engine], prompts: list[list[int]], work: Work, lot: random.Random
) -> tuple[float, float]:
    params = SamplingParams(temperature=0, max_tokens=work.output, ignore_eos=True)
    taken, tokens = [0.0, 0.0], [0, 0]
    order = [0, 1]
    lot.shuffle(order)
    for index in order:
        started = time.perf_counter()
        for prompt in prompts:
            engines[index].add(f"unshared-{engines[index].scheduler.step}-{prompt[:4]}", prompt, params)
        taken[index] += time.perf_counter() - started
    while engines[0].has_work or engines[1].has_work:
        lot.shuffle(order)
        for index in order:
            started = time.perf_counter()
            outputs = engines[index].step()
            taken[index] += time.perf_counter() - started
            tokens[index] += sum(len(output.token_ids) for output in outputs)
    assert tokens == [work.requests * work.output] * 2, f"{tokens} tokens were made"
    assert all(engine.scheduler.num_hit_tokens == 0 for engine in engines), "the prompts were to share nothing"
    return taken[0], taken[1]


def _another_engine(engine: Engine, *, prefix_cache: bool) -> Engine:
    """An engine of its own over the same weights and pool, which are its alone from now on."""
    assert isinstance(engine.runner, ModelRunner)
    resolved = dataclasses.replace(engine.resolved, prefix_cache=prefix_cache)
    return Engine(resolved, engine.runner, Sampler(engine.runner.logits, engine.runner.arg_max))


def _touch_all_memory(engine: Engine) -> None:
    """A pool's pages take time when they are first written to, which is no cost of either engine."""
    assert isinstance(engine.runner, ModelRunner)
    engine.runner.fill_blocks(range(engine.resolved.num_blocks), 0.0)


# ---- the command ----------------------------------------------------------------------------------------------------


class Report:
    """Progress on standard error, tables and sentences on standard output."""

    def __init__(self) -> None:
        self.out = Console()
        self._err = Console(stderr=True)

    def note(self, text: str) -> None:
        self._err.print(text, style="dim")

    def progress(self, title: str, total: int, measure: Callable[[Advance], Any]) -> Any:
        """What `measure` gives, beside a bar that it advances."""
        with Progress(console=self._err, transient=True) as bar:
            task = bar.add_task(title, total=total)
            return measure(lambda: bar.advance(task))

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        table = Table(title=title)
        for column in columns:
            table.add_column(column, justify="right")
        for row in rows:
            table.add_row(*row)
        self.out.print(table)


def measure_first_tokens(report: Report, repeats: int) -> bool:
    report.note("loading the engine")
    engine = build_engine(EngineConfig(max_model_len=2 * PROMPT_TOKENS, num_blocks=8 * PROMPT_TOKENS // 16))
    _touch_all_memory(engine)
    times: FirstTokens = report.progress(
        "first tokens", repeats + 1, lambda advance: first_tokens(engine, repeats, advance)
    )
    report.table(
        f"time to first token of {PROMPT_TOKENS:,} tokens, ms, medians of {repeats}",
        ("cold", f"first {CACHED_TOKENS} cached", "ratio"),
        [(f"{times.cold * 1e3:.0f}", f"{times.cached * 1e3:.0f}", f"{times.ratio:.3f}x")],
    )
    report.out.print(
        f"With {CACHED_TOKENS} of {PROMPT_TOKENS:,} tokens cached the first token takes {times.ratio:.2f}x of a "
        f"cold one; the target is at most {TTFT_TARGET}x.\n"
    )
    return times.ratio <= TTFT_TARGET


def measure_conversations(
    report: Report, name: str, conversations: list[Conversation], concurrency: int, answer_tokens: int
) -> None:
    report.note("loading the engine")
    engine = build_engine(EngineConfig())
    scheduler = engine.scheduler
    held: Held = report.progress(
        name, len(conversations), lambda advance: hold(engine, conversations, concurrency, answer_tokens, advance)
    )
    turns, later = held.turns, held.turns[1:]
    rows = [_turn_row("first", turns[:1]), _turn_row("later", later), _turn_row("all", turns)]
    report.table(
        f"{name}: {len(conversations)} conversations, {concurrency} at once, answers up to {answer_tokens} tokens",
        ("turns", "requests", "prompt tokens", "found computed", "hit rate"),
        rows,
    )
    assert scheduler.num_lookup_tokens == sum(turn.prompt_tokens for turn in turns)
    assert scheduler.num_hit_tokens == sum(turn.cached_tokens for turn in turns)
    report.out.print(
        f"{name}: {scheduler.num_hit_tokens / max(1, scheduler.num_lookup_tokens):.1%} of all prompt tokens were found "
        f"computed, {_hit_rate(later):.1%} of those in later turns."
        + (f" {held.cut_short} conversations ended where a prompt grew too long." if held.cut_short else "")
        + "\n"
    )


def _turn_row(name: str, turns: list[Turn]) -> tuple[str, ...]:
    sums = (
        sum(turn.requests for turn in turns),
        sum(turn.prompt_tokens for turn in turns),
        sum(turn.cached_tokens for turn in turns),
    )
    return (name, *(f"{number:,}" for number in sums), f"{_hit_rate(turns):.1%}")


def _hit_rate(turns: list[Turn]) -> float:
    return sum(turn.cached_tokens for turn in turns) / max(1, sum(turn.prompt_tokens for turn in turns))


def measure_cost(report: Report, work: Work, num_runs: int) -> bool:
    report.note("loading engines")
    # Two runs fill the pool, so that from the third on every new block evicts a cached one.
    num_blocks = 2 * work.requests * -(-(work.prompt + work.output) // 16)
    settings: dict[str, Any] = {"num_blocks": num_blocks, "max_model_len": work.prompt + work.output}
    built = [build_engine(EngineConfig(**settings)) for _ in range(2)]
    for engine in built:
        _touch_all_memory(engine)
    # Where its weights and its pool happen to lie makes one runner faster than another by as much as what is measured:
    # each runner serves with the cache in half of the pairs, and without it in the other half.
    seconds_on: list[float] = []
    seconds_off: list[float] = []
    for swapped in (False, True):
        with_cache, without = reversed(built) if swapped else built
        engines = (_another_engine(with_cache, prefix_cache=True), _another_engine(without, prefix_cache=False))
        num_pairs = (num_runs + swapped) // 2
        on, off = report.progress("nothing shared", num_pairs + 1, partial(unshared_runs, engines, work, num_pairs))
        order = "swapped" if swapped else "as built"
        report.out.print(f"Runners {order}: ratio {paired_ratio(off, on).ratio:.4f} of {num_pairs} pairs.")
        seconds_on += on
        seconds_off += off
    throughput = paired_ratio(seconds_off, seconds_on)
    tokens = work.requests * (work.prompt + work.output)
    report.table(
        f"nothing shared: {work.requests} requests, {work.prompt} + {work.output} tokens, {num_runs} paired runs",
        ("", "tokens/s, median"),
        [
            ("with the cache", f"{tokens / median(seconds_on):.1f}"),
            ("without", f"{tokens / median(seconds_off):.1f}"),
            ("ratio", f"{throughput.ratio:.4f}"),
            ("95% interval", f"{throughput.low:.4f} to {throughput.high:.4f}"),
        ],
    )
    report.out.print(
        f"Where nothing is shared the cache costs {1 - throughput.ratio:.2%} of throughput (95% interval "
        f"{1 - throughput.high:.2%} to {1 - throughput.low:.2%}); the target is below {COST_TARGET:.0%}."
    )
    return throughput.low > 1 - COST_TARGET


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description="What the prefix cache gives and what it costs, default model.")
    parser.add_argument("--mt-bench", type=Path, metavar="PATH", help='two-turn questions: JSON lines with "turns"')
    parser.add_argument("--taubench", type=Path, metavar="PATH", help="recorded sessions: JSON lines, or a folder")
    parser.add_argument("--max-conversations", type=int, help="at most that many of each (default: all)")
    parser.add_argument("--concurrency", type=int, default=8, help="conversations held at once (default: 8)")
    parser.add_argument("--answer-tokens", type=int, default=128, help="most tokens of an answer (default: 128)")
    parser.add_argument("--repeats", type=int, default=7, help="first tokens of each kind (default: 7)")
    parser.add_argument("--runs", type=int, default=20, help="paired runs of the cost (default: 20)")
    parser.add_argument("--quick", action="store_true", help="toy sizes, to see that it runs; the targets do not count")
    options = parser.parse_args(arguments)
    if options.quick:
        options.repeats, options.runs, options.answer_tokens = 1, 2, 8
        options.max_conversations = min(options.max_conversations or 2, 2)
    try:
        mt_bench = None if options.mt_bench is None else read_mt_bench(options.mt_bench)
        taubench = None if options.taubench is None else read_taubench(options.taubench)
    except PromptFileError as error:
        parser.error(str(error))
    report = Report()
    fast = measure_first_tokens(report, options.repeats)
    source = resolve_source("default")
    tokenizer = load_tokenizer(source)
    template = load_chat_template(source, tokenizer)
    assert template is not None
    chat = Chat(tokenizer, template)
    for name, flag, texts, kind in (
        ("MT-Bench", "--mt-bench", mt_bench, asked_in_turn),
        ("taubench", "--taubench", taubench, recorded),
    ):
        if texts is None:
            report.out.print(f"{name} is left out: {flag} gives its path.\n")
            continue
        conversations = [kind(chat, each) for each in texts[: options.max_conversations]]
        measure_conversations(report, name, conversations, options.concurrency, options.answer_tokens)
    cheap = measure_cost(report, Work(2, 32, 8) if options.quick else Work(8, 128, 64), options.runs)
    return 0 if options.quick or (fast and cheap) else 1


if __name__ == "__main__":
    sys.exit(main())
