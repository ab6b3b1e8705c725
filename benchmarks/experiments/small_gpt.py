"""One small GPT with a KV cache and without, and what happens past the end of its context.

    python -m pageframe.benchmarks.experiments.small_gpt FOLDER [--quick]

FOLDER is a model of `train_char_gpt`, or any other. "ROMEO:" is continued with one seed, in float32, in two ways:

- cached: the engine. When the context is full it slides: the oldest token leaves, and all positions start from 0 again
  (on_context_full slide, slide_by 1).
- recomputed: for every token the last `context` tokens go through the same weights and the same kernels, with no
  history at all, their positions from 0.

Both draw with the same sampler and the same noise, so they must write the same text, past the end of the context too,
and as many tokens as the context has must come at least TARGET_RATIO times as fast with the cache. The command says
which of this does not hold, or could not be seen in its time, and exits with 1 then. The ways take turns, and the
figures are medians over the turns. The default is one thread: a second one helps a whole sequence alone.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pageframe.benchmarks.experiments.report import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    InputError,
    TimeBudget,
    add_output_flags,
    check_outputs,
    hardware_line,
    write_json,
)
from pageframe.benchmarks.experiments.small_gpt_report import draw_plot, draw_table, in_words
from pageframe.benchmarks.experiments.small_gpt_results import FAILED, INTERRUPTED, OUT_OF_TIME, Results, Run
from pageframe.benchmarks.experiments.small_gpt_ways import Cached, Recomputed, Way
from pageframe.runtime.errors import EngineError, InvalidRequestError, StartupError

EXIT_MISSED = 1
#: Tokens written past the full context, where the command line does not say.
PAST_CONTEXT = 70
WARM_UP_TOKENS = 4


def measure(
    ways: Sequence[Way],
    prompt: Sequence[int],
    results: Results,
    repeats: int,
    budget_seconds: float,
    advance: Callable[[], object],
) -> None:
    """Let the ways take turns, into `results`; each stops where its time is over."""
    for way in ways:
        for _ in way.tokens(prompt, min(WARM_UP_TOKENS, results.count), results.seed):
            pass
    seconds_left = {way.name: budget_seconds for way in ways}
    for _ in range(repeats):
        for way in ways:
            budget = TimeBudget(seconds_left[way.name])
            if budget.allows():
                run = Run()
                results.runs[way.name].append(run)
                _fill(run, way, prompt, results, budget, advance)
                seconds_left[way.name] = budget.left


def _fill(
    run: Run, way: Way, prompt: Sequence[int], results: Results, budget: TimeBudget, advance: Callable[[], object]
) -> None:
    """One turn, until its tokens are written or its budget has ended."""
    started = time.perf_counter()
    for token_id in way.tokens(prompt, results.count, results.seed):
        now = time.perf_counter()
        run.token_ids.append(token_id)
        run.seconds.append(now - started)
        started = now
        advance()
        if not budget.allows():
            break


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


def show(results: Results, text: str, options: argparse.Namespace, threads: int) -> None:
    """The text, the table, the words, the plot and the file.

    Raises:
        InputError: a file can't be written.
    """
    is_partial = results.stopped != OUT_OF_TIME
    console = Console()
    console.print(options.prompt + text, markup=False, highlight=False, style="dim")
    title = f"one request, context {results.context:,}, medians over the runs; {hardware_line(threads, 'float32')}"
    console.print(draw_table(results, title))
    if is_partial:
        console.print(f"Stopped early ({results.stopped}): these are partial results.")
    for line in [*in_words(results), *results.unasked()]:
        console.print(line)
    if options.json is not None:
        raw = {way: [asdict(run) for run in runs] for way, runs in results.runs.items()}
        ratios = {stretch.name: results.ratio(stretch) for stretch in results.stretches()}
        settings = {name: getattr(results, name) for name in ("context", "num_prompt_tokens", "count", "seed")}
        content = {"settings": settings, "partial": is_partial, "text": text, "ratios": ratios, "runs": raw}
        write_json(options.json, content)
    if options.plot is not None and results.longest().token_ids:
        draw_plot(results, options.plot)
        console.print(f"plot: {options.plot}", soft_wrap=True)  # a path that is broken cannot be copied


def run(options: argparse.Namespace) -> int:
    """Measure and show; the exit status.

    Raises:
        InputError, StartupError, InvalidRequestError: what was asked for can't be measured.
    """
    check_outputs(options.plot, options.json)
    cached = Cached(options.model, options.threads)
    resolved = cached.llm.resolved
    prompt = cached.llm.tokenizer.encode(options.prompt, add_special_tokens=True)
    results = empty_results(len(prompt), resolved.max_model_len, options)
    recomputed = Recomputed(options.model, results.context, resolved.block_size)
    repeats, budget_seconds = (3, 22.0) if options.quick else (5, 240.0)
    columns = (TextColumn("writing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    status = 0
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("writing", total=2 * repeats * results.count)
            measure((cached, recomputed), prompt, results, repeats, budget_seconds, lambda: bar.advance(task))
    except KeyboardInterrupt:
        results.stopped, status = INTERRUPTED, EXIT_INTERRUPTED
    except EngineError as error:
        results.stopped, status = FAILED, EXIT_FAILED
        complain(error)
    if results.first_difference() is not None:
        status = EXIT_MISSED
    misses = results.misses()
    for miss in misses:  # said first: a file that can't be written must not hide it
        complain(miss)
    show(results, cached.llm.tokenizer.decode(results.longest().token_ids), options, resolved.threads)
    return status or (EXIT_MISSED if misses else 0)


def empty_results(num_prompt_tokens: int, context: int, options: argparse.Namespace) -> Results:
    """Raises: InputError: the prompt leaves no room, or no token is asked for."""
    if not 1 <= num_prompt_tokens < context:
        raise InputError(
            f"prompt has {num_prompt_tokens} tokens; it must have from 1 to {context - 1}, for a context of {context}"
        )
    count = context - num_prompt_tokens + PAST_CONTEXT if options.tokens is None else options.tokens
    if count < 1:
        raise InputError(f"tokens is {count}; it must be at least 1")
    return Results(context, num_prompt_tokens, count, options.seed, {Cached.name: [], Recomputed.name: []})


def complain(text: object) -> None:
    print(f"small_gpt: {text}", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    options = parse(arguments)
    try:
        return run(options)
    except (InputError, StartupError, InvalidRequestError) as error:
        complain(error)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        complain("interrupted before anything was measured")
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
