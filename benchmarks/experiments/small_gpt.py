"""One small GPT with a KV cache and without, and what happens past the end of its context.

    python -m pageframe.benchmarks.experiments.small_gpt FOLDER [--quick]

FOLDER is a model of `train_char_gpt`, or any other. "ROMEO:" is continued with one seed, in float32, in two ways:

- cached: the engine. When the context is full it slides: the oldest token leaves, and all positions start from 0 again
  (on_context_full slide, slide_by 1).
- recomputed: for every token the last `context` tokens go through the same weights and the same kernels, with no
  history at all, their positions from 0.

Both draw with the same sampler and the same noise, so they must write the same text; if they do not, the command says
where and exits with 1. The ways take turns, and the figures are medians over the turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from pageframe.benchmarks.experiments.report import (
    EXIT_BAD_INPUT,
    EXIT_INTERRUPTED,
    INK,
    NOT_MEASURED,
    InputError,
    TimeBudget,
    add_output_flags,
    check_outputs,
    draw_line,
    hardware_line,
    new_figure,
    save_figure,
    write_json,
)
from pageframe.kernels.attention import kv_cache_shape, select_backend
from pageframe.runtime.errors import EngineError, InvalidRequestError, StartupError
from pageframe.runtime.llm import LLM
from pageframe.runtime.models.config import load_model_config
from pageframe.runtime.models.loader import load_decoder
from pageframe.runtime.models.source import resolve_source
from pageframe.runtime.philox import choice_seed
from pageframe.runtime.request import SamplingParams
from pageframe.runtime.sampler import Sampler
from pageframe.runtime.step_plan import SamplingBatch

TARGET_RATIO = 4.0
TEMPERATURE = 0.8
#: Tokens written past the full context, where the command line does not say.
PAST_CONTEXT = 70
WARM_UP_TOKENS = 4
PLOTTED_POINTS = 40
CPU = torch.device("cpu")


class Way(Protocol):
    """A way to continue a prompt."""

    name: str

    def tokens(self, prompt: Sequence[int], count: int, seed: int) -> Iterator[int]:
        """The `count` tokens after the prompt, each when it is there."""
        ...


class Cached:
    """The engine, one request at a time. A prefix cache would find what the turn before computed, so it is off."""

    name = "cached"

    def __init__(self, model: str, threads: int | None = None) -> None:
        self.llm = LLM(
            model,
            dtype="float32",
            threads=threads,
            device="cpu",
            max_num_requests=1,
            prefix_cache=False,
            on_context_full="slide",
            slide_by=1,
        )

    def tokens(self, prompt: Sequence[int], count: int, seed: int) -> Iterator[int]:
        engine = self.llm.engine
        params = SamplingParams(max_tokens=count, temperature=TEMPERATURE, seed=seed, ignore_eos=True)
        engine.add(self.name, prompt, params)
        try:
            while engine.has_work:
                for output in engine.step():
                    if output.error:
                        raise EngineError(output.error)
                    yield from output.token_ids
        finally:
            engine.abort(self.name)


@dataclass(frozen=True, slots=True)
class WholeSequence:
    """A step that computes one request from its first token on."""

    rows: npt.NDArray[np.int32]
    context_lens: npt.NDArray[np.int32]
    query_start: npt.NDArray[np.int32]
    num_decode: int

    @classmethod
    def of(cls, length: int) -> WholeSequence:
        rows, context_lens, query_start = (np.array(values, np.int32) for values in ([0], [length], [0, length]))
        return cls(rows, context_lens, query_start, int(length == 1))


class Recomputed:
    """The decoder alone: the last `context` tokens anew for every token. Its K and V are written and used in one step.

    Args:
        context: most tokens it sees.
        block_size: as the engine's, so that the kernels' work is cut alike.
    """

    name = "recomputed"

    def __init__(self, model: str, context: int, block_size: int) -> None:
        source = resolve_source(model)
        config = load_model_config(source)
        self._context = context
        self._block_size = block_size
        self._decoder = load_decoder(
            source, config, storage_dtype=torch.float32, compute_dtype=torch.float32, device=CPU
        )
        self._sampler = Sampler(self._decoder.logits)
        self._backend = select_backend("reference", CPU)
        num_blocks = -(-context // block_size)
        shape = kv_cache_shape(num_blocks, config.num_kv_heads, block_size, config.head_dim)
        self._kv_caches = [torch.zeros(shape) for _ in range(config.num_layers)]
        self._tables = torch.arange(num_blocks, dtype=torch.int32)[None]

    def tokens(self, prompt: Sequence[int], count: int, seed: int) -> Iterator[int]:
        token_ids = list(prompt)
        for index in range(count):
            token_ids.append(self._next(token_ids[-self._context :], index, seed))
            yield token_ids[-1]

    @torch.inference_mode()
    def _next(self, window: list[int], index: int, seed: int) -> int:
        """The token after `window`, the `index`-th of the output."""
        plan = self._backend.plan_attention(WholeSequence.of(len(window)), self._tables, self._block_size)
        places = torch.arange(len(window))  # blocks lie in order: a position is its slot
        hidden = self._decoder.forward(torch.tensor(window), places, self._kv_caches, places, plan, self._backend)
        return int(self._sampler.sample(hidden[-1:], _sampling(index, seed)).token_ids[0])


def _sampling(index: int, seed: int) -> SamplingBatch:
    """What the engine asks of the sampler for a request's `index`-th token."""
    float32s = [np.array([value], np.float32) for value in (TEMPERATURE, 1.0, 0.0)]
    seeds, indices = np.array([choice_seed(seed, 0)], np.int64), np.array([index], np.int64)
    no_top_k, no_logprobs = np.array([0], np.int32), np.array([-1], np.int32)
    return SamplingBatch(float32s[0], no_top_k, float32s[1], float32s[2], seeds, indices, no_logprobs)


@dataclass(slots=True)
class Run:
    """One turn of a way: its tokens, and the seconds that each took."""

    token_ids: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Output tokens [start, end), and what they are called."""

    name: str
    start: int
    end: int


@dataclass(slots=True)
class Results:
    """What was measured.

    Args:
        runs: by way; a run that was cut short has fewer tokens than `count`.
    """

    context: int
    num_prompt_tokens: int
    count: int
    seed: int
    runs: dict[str, list[Run]]

    def stretches(self) -> list[Stretch]:
        """Until the context is full; as many tokens as the context has; past it."""
        room = self.context - self.num_prompt_tokens
        found = [
            Stretch(f"1-{room}, filling up", 0, room),
            Stretch(f"1-{self.context}", 0, self.context),
            Stretch(f"{room + 1}-{self.count}, sliding", room, self.count),
        ]
        return [stretch for stretch in found if stretch.start < stretch.end <= self.count]

    def seconds(self, way: str, stretch: Stretch) -> float | None:
        """Median over the runs that reached the stretch's end; None where none did."""
        whole = [run for run in self.runs[way] if len(run.seconds) >= stretch.end]
        if not whole:
            return None
        return statistics.median(sum(run.seconds[stretch.start : stretch.end]) for run in whole)

    def ratio(self, stretch: Stretch) -> float | None:
        """How many times as long the recomputed way takes."""
        cached, recomputed = (self.seconds(way, stretch) for way in (Cached.name, Recomputed.name))
        return None if cached is None or recomputed is None else recomputed / cached

    def longest(self) -> Run:
        """The run with most tokens; an empty one where there is none."""
        runs = (run for runs in self.runs.values() for run in runs)
        return max(runs, key=lambda run: len(run.token_ids), default=Run())

    def first_difference(self) -> int | None:
        """The first output token that differs between any two runs, as far as both go."""
        longest = self.longest().token_ids
        differing = (
            index
            for runs in self.runs.values()
            for run in runs
            for index, token_id in enumerate(run.token_ids)
            if token_id != longest[index]
        )
        return min(differing, default=None)


def measure(
    ways: Sequence[Way],
    prompt: Sequence[int],
    results: Results,
    repeats: int,
    budget_seconds: float,
    advance: Callable[[], object],
) -> None:
    """Let the ways take turns, into `results`; each stops where its time is over."""
    budgets = {}
    for way in ways:
        for _ in way.tokens(prompt, min(WARM_UP_TOKENS, results.count), results.seed):
            pass
        budgets[way.name] = budget_seconds
    for _ in range(repeats):
        for way in ways:
            budget = TimeBudget(budgets[way.name])
            if not budget.allows():
                continue
            run = Run()
            results.runs[way.name].append(run)
            started = time.perf_counter()
            for token_id in way.tokens(prompt, results.count, results.seed):
                now = time.perf_counter()
                run.token_ids.append(token_id)
                run.seconds.append(now - started)
                started = now
                advance()
                if not budget.allows():
                    break
            budgets[way.name] = budget.left


def draw_table(results: Results, title: str) -> Table:
    table = Table(title=title)
    table.add_column("output tokens", no_wrap=True)
    for way in results.runs:
        table.add_column(f"{way}, s", justify="right")
        table.add_column("ms each", justify="right")
    table.add_column("ratio", justify="right")
    for stretch in results.stretches():
        cells = []
        for way in results.runs:
            seconds = results.seconds(way, stretch)
            if seconds is None:
                cells += [NOT_MEASURED, NOT_MEASURED]
            else:
                cells += [f"{seconds:.2f}", f"{seconds * 1e3 / (stretch.end - stretch.start):.2f}"]
        ratio = results.ratio(stretch)
        table.add_row(stretch.name, *cells, NOT_MEASURED if ratio is None else f"{ratio:.1f}x")
    return table


def in_words(results: Results) -> list[str]:
    """What the figures say."""
    difference = results.first_difference()
    texts = (
        "and the text is the same" if difference is None else f"but the texts differ from output token {difference} on"
    )
    lines = []
    for stretch in results.stretches():
        cached, ratio = results.seconds(Cached.name, stretch), results.ratio(stretch)
        if cached is None or ratio is None:
            continue
        each = cached * 1e3 / (stretch.end - stretch.start)
        if stretch.start == 0 and stretch.end == results.context:
            lines.append(
                f"With the KV cache {stretch.end:,} tokens take {cached:.2f} s, {ratio:.1f} times as fast as without "
                f"it, {texts}; the target is at least {TARGET_RATIO:.0f} times."
            )
        elif stretch.start > 0:
            lines.append(
                f"Past the full context a token takes {each:.1f} ms with the cache, {ratio:.1f} times as fast as "
                "without it: the window moves by one, so every position in it changes, and nothing can be kept."
            )
    return lines


def draw_plot(results: Results, path: Path) -> None:
    """Milliseconds per token along the output."""
    figure, (axes,) = new_figure()
    bin_size = max(1, results.count // PLOTTED_POINTS)
    for index, (way, runs) in enumerate(results.runs.items()):
        reached = max((len(run.seconds) for run in runs), default=0)
        starts = range(0, reached - bin_size + 1, bin_size)
        middles = [start + (bin_size + 1) / 2 for start in starts]
        medians = [
            statistics.median(value for run in runs for value in run.seconds[start : start + bin_size]) * 1e3
            for start in starts
        ]
        draw_line(axes, index, way, middles, medians)
    room = results.context - results.num_prompt_tokens
    if room < results.count:
        axes.axvline(room, color=INK, linewidth=1, linestyle=":")
        axes.annotate("context full ", (room, 1), xycoords=("data", "axes fraction"), ha="right", va="top", color=INK)
    axes.set_xlabel("output token")
    axes.set_ylabel("ms per token")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left")
    save_figure(figure, path)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One small GPT with a KV cache and without.")
    parser.add_argument("model", metavar="FOLDER", help="a model folder, such as train_char_gpt's")
    parser.add_argument("--prompt", default="ROMEO:", help="the text to continue (%(default)s)")
    parser.add_argument("--tokens", type=int, help=f"output tokens; default: {PAST_CONTEXT} past the full context")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    # A second thread helps a whole sequence and hardly one row of so small a model.
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of both ways (%(default)s)")
    add_output_flags(parser, "small-gpt.png")
    return parser.parse_args(arguments)


def show(results: Results, text: str, options: argparse.Namespace, threads: int, *, is_partial: bool) -> None:
    """The text, the table, the words, the plot and the file.

    Raises:
        InputError: a file can't be written.
    """
    console = Console()
    console.print(options.prompt + text, markup=False, highlight=False, style="dim")
    num_runs = min(len(runs) for runs in results.runs.values())
    title = f"one request, context {results.context:,}, medians of {num_runs}; {hardware_line(threads, 'float32')}"
    console.print(draw_table(results, title))
    if is_partial:
        console.print("Stopped early: these are partial results.")
    for line in in_words(results):
        console.print(line)
    if options.json is not None:
        raw = {way: [asdict(run) for run in runs] for way, runs in results.runs.items()}
        ratios = {stretch.name: results.ratio(stretch) for stretch in results.stretches()}
        settings = {name: getattr(results, name) for name in ("context", "num_prompt_tokens", "count", "seed")}
        content = {"settings": settings, "partial": is_partial, "text": text, "ratios": ratios, "runs": raw}
        write_json(options.json, content)
    if options.plot is not None and results.longest().token_ids:
        draw_plot(results, options.plot)
        console.print(f"plot: {options.plot}")


def run(options: argparse.Namespace) -> int:
    """Measure and show; the exit status.

    Raises:
        InputError, StartupError, InvalidRequestError: what was asked for can't be measured.
    """
    check_outputs(options.plot, options.json)
    cached = Cached(options.model, options.threads)
    resolved = cached.llm.resolved
    prompt = cached.llm.tokenizer.encode(options.prompt, add_special_tokens=True)
    context = resolved.max_model_len
    if not 1 <= len(prompt) < context:
        raise InputError(
            f"prompt has {len(prompt)} tokens; it must have from 1 to {context - 1}, for a context of {context}"
        )
    count = context - len(prompt) + PAST_CONTEXT if options.tokens is None else options.tokens
    if count < 1:
        raise InputError(f"tokens is {count}; it must be at least 1")
    recomputed = Recomputed(options.model, context, resolved.block_size)
    results = Results(context, len(prompt), count, options.seed, {Cached.name: [], Recomputed.name: []})
    repeats, budget_seconds = (1, 25.0) if options.quick else (5, 240.0)
    is_partial = False
    columns = (TextColumn("writing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("writing", total=2 * repeats * count)
            measure((cached, recomputed), prompt, results, repeats, budget_seconds, lambda: bar.advance(task))
    except KeyboardInterrupt:
        is_partial = True
    text = cached.llm.tokenizer.decode(results.longest().token_ids)
    difference = results.first_difference()
    if difference is not None:  # said first: a file that can't be written must not hide it
        print(f"small_gpt: the texts differ from output token {difference} on", file=sys.stderr)
    show(results, text, options, resolved.threads, is_partial=is_partial)
    if difference is not None:
        return 1
    return EXIT_INTERRUPTED if is_partial else 0


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    options = parse(arguments)
    try:
        return run(options)
    except (InputError, StartupError, InvalidRequestError) as error:
        print(f"small_gpt: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
