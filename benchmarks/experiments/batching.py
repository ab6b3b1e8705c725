"""`pageframe bench batching`: what continuous batching is worth, piece by piece, on the engine in this process.

    batching   a trace served by whole requests (a batch of up to --batch runs until its longest member ends, and none
               joins it) and by iteration, as the engine does; all requests at once, and at a rate
    chunks     prompts computed in chunks or whole, while others decode: the gaps between the others' tokens
    prefix     sessions of several turns behind one system prompt, with and without the prefix cache
    blocks     half of the same sessions with every block size

Batching by request is the kinder kind: nothing is padded, a request's tokens are counted when they are made, not when
its batch ends, and its memory is paged. Only who may join when is different. Ways of a part take turns; each has its
share of the part's time budget. All ways' tokens are compared, up to ties of the two best logits.

A part that fails is named, the others are measured all the same, and the command exits with 1 or 2.

Synthetic sessions: a system prompt of 277 random tokens for all, then turns of 24 to 72 random tokens, with answers of
16 to 48 (--quick: fewer), so that they end anywhere in a block. Long prompts are random tokens too. The trace's lengths
are made smaller by one factor, so that 95% of the requests fit into --max-len tokens; the rest are cut.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from pageframe.benchmarks.experiments import batching_parts as parts
from pageframe.benchmarks.experiments.batching_parts import QUICK, Bench, Part, Sizes
from pageframe.benchmarks.experiments.batching_report import (
    BATCHING,
    BLOCKS,
    CHUNKS,
    PARTS,
    PREFIX,
    describe_agreement,
    draw_table,
    save_plot,
    sentences,
)
from pageframe.benchmarks.experiments.report import (
    EXIT_BAD_INPUT,
    EXIT_INTERRUPTED,
    InputError,
    add_output_flags,
    check_outputs,
    hardware_line,
    write_json,
)
from pageframe.benchmarks.experiments.sessions import Sessions, longest_drawn, read_sessions, synthetic_sessions
from pageframe.benchmarks.experiments.traces import TraceRequest, read_trace, scaled, synthetic_trace
from pageframe.runtime.config import DEFAULT_MODEL, DTYPES, EngineConfig
from pageframe.runtime.errors import EngineError, StartupError
from pageframe.runtime.models.config import load_model_config
from pageframe.runtime.models.source import resolve_source

#: Answers differ, or a part failed through no fault of what was asked for.
EXIT_DIFFERENT = EXIT_FAILED = 1
#: What ends a part, but not the command.
FAILURES = (InputError, StartupError, EngineError, MemoryError)
SYNTHETIC_REQUESTS = 2000
BLOCK_SIZE = 16
#: Contexts are at least so long where the model has them, for sessions that grow.
ROOM = 2048


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", action="append", choices=PARTS, help="run this part only; may be given again")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the model (default: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="arithmetic and K/V (default: %(default)s)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="as in 'bench fit'; default: a drawn one")
    parser.add_argument(
        "--sessions",
        type=Path,
        metavar="FILE",
        help="conversations for 'prefix' and 'blocks': JSON lines with turns, or with session_id, timestamp and input; "
        "default: drawn ones",
    )
    for name, field, text in _SIZE_FLAGS:
        usual, quick = getattr(Sizes(), field), getattr(QUICK, field)
        parser.add_argument(
            name, dest=f"size_{field}", type=int, metavar="N", help=f"{text} (default: {usual}, quick: {quick})"
        )
    parser.add_argument("--rate", type=float, help="requests a second (default: 0.8 of what was served at once)")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="for each part (default: 125, with --quick 13)")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: one for each that may be used)")
    add_output_flags(parser, "batching.png")


_SIZE_FLAGS = (
    ("--requests", "requests", "requests of the trace"),
    ("--max-len", "max_len", "most tokens of one of them, prompt and answer"),
    ("--batch", "batch", "most requests at once"),
    ("--long-tokens", "long_tokens", "tokens of a long prompt"),
    ("--chunk", "chunk", "tokens of a step where prompts are computed in chunks"),
    ("--num-sessions", "sessions", "conversations"),
    ("--repeats", "repeats", "runs of each way"),
)


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit status."""
    try:
        return _run(args)
    except FAILURES as error:
        _complain(Console(stderr=True), _describe(error))
        return _exit_status(error)


def _complain(console: Console, text: str) -> None:
    console.print(f"pageframe: {text}", style="red", markup=False, highlight=False, soft_wrap=True)


def _describe(error: Exception) -> str:
    return str(error) or "out of memory"  # only MemoryError comes without a word


def _exit_status(error: Exception) -> int:
    return EXIT_BAD_INPUT if isinstance(error, InputError | StartupError) else EXIT_FAILED


def _run(args: argparse.Namespace) -> int:
    check_outputs(args.plot, args.json)
    console = Console(highlight=False)
    sizes = read_sizes(args)
    names = [name for name in PARTS if name in (args.part or PARTS)]
    config = _engine_config(args, sizes)
    seed = args.seed
    trace = synthetic_trace(SYNTHETIC_REQUESTS, seed) if args.trace is None else read_trace(args.trace, seed)
    requests, factor = scaled(trace, sizes.requests, sizes.max_len, seed)
    sessions = None if args.sessions is None else read_sessions(args.sessions, args.model)
    measured: list[Part] = []
    status = 0
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("loading", total=_num_runs(names, sizes))
        try:
            bench = Bench(config, sizes, seed, lambda: bar.advance(task))
            for name in names:
                bar.update(task, description=name)
                part = Part(name)
                measured.append(part)
                try:
                    _measure(part, bench, requests, args.rate, sessions)
                except FAILURES as error:
                    part.failure = _describe(error)
                    status = max(status, _exit_status(error))
                    _complain(bar.console, f"part {name} failed: {part.failure}")
        except KeyboardInterrupt:
            status = EXIT_INTERRUPTED
    threads = args.threads or len(os.sched_getaffinity(0))
    line = hardware_line(threads, args.dtype)
    console.print(line, style="dim")
    _describe_trace(console, args, requests, factor)
    for part in measured:
        _print_part(console, part)
    if status == EXIT_INTERRUPTED:
        console.print("Interrupted: partial results.", style="yellow")
    elif any(part.agreement.different for part in measured):
        console.print("Some answers differ where no tie explains it.", style="red")
        status = max(status, EXIT_DIFFERENT)
    if args.json is not None:
        write_json(args.json, _as_json(args, sizes, requests, measured, status))
    if args.plot is not None and any(any(part.ways.values()) for part in measured):
        save_plot(measured, line, args.plot)
        console.print(f"The plot is in {args.plot}.", markup=False)
    return status


def read_sizes(args: argparse.Namespace) -> Sizes:
    """How much is run: the flags over the usual sizes or the quick ones.

    Raises:
        InputError: a number is out of its range.
    """
    usual = QUICK if args.quick else Sizes()
    asked = {field: getattr(args, f"size_{field}") for _, field, _ in _SIZE_FLAGS}
    given = {field: value for field, value in asked.items() if value is not None}
    if args.budget is not None:
        given["budget"] = args.budget
    sizes = dataclasses.replace(usual, **given)
    at_once = sizes.runners + sizes.long_prompts
    limits: dict[str, tuple[int, int]] = {
        "requests": (1, 100_000),
        "max_len": (2, 2**20),
        "batch": (1, 1024),
        "long_tokens": (2, 2**20),
        # A step has a token for each request that decodes.
        "chunk": (at_once, 2**20),
        "sessions": (1, 10_000),
        "repeats": (1, 1000),
    }
    flags = {field: name.removeprefix("--") for name, field, _ in _SIZE_FLAGS}
    for field, (low, high) in limits.items():
        value = getattr(sizes, field)
        if not low <= value <= high:
            raise InputError(f"{flags[field]} is {value}; it must be from {low} to {high}")
    if not 0 < sizes.budget <= 86_400:
        raise InputError(f"budget is {sizes.budget:g}; it must be above 0 and at most 86400 seconds")
    if args.rate is not None and not 0 < args.rate <= 1e6:
        raise InputError(f"rate is {args.rate:g}; it must be above 0 and at most 1000000 requests a second")
    if args.seed < 0:
        raise InputError(f"seed is {args.seed}; it must be at least 0")
    return sizes


def _engine_config(args: argparse.Namespace, sizes: Sizes) -> EngineConfig:
    """The engine that is built: a pool with room for all that runs at once, so that none is preempted.

    Raises:
        InputError: the model has no room for what was asked for.
    """
    positions = load_model_config(resolve_source(args.model)).max_position
    turn = longest_drawn(sizes.user_tokens) + longest_drawn(sizes.answer_tokens)
    session = sizes.system_tokens + sizes.turns * turn
    for name, tokens in (("max-len", sizes.max_len), ("long-tokens", sizes.long_tokens + 1), ("a session", session)):
        if tokens > positions:
            raise InputError(f"{name} needs {tokens} tokens; the model has {positions} positions")
    longest = min(positions, max(ROOM, sizes.max_len, sizes.long_tokens + 1, session))
    at_once = max(sizes.batch, sizes.runners + sizes.long_prompts)
    return EngineConfig(
        model=args.model,
        dtype=args.dtype,
        threads=args.threads,
        block_size=BLOCK_SIZE,
        num_blocks=at_once * -(-longest // BLOCK_SIZE),
        max_model_len=longest,
        max_num_requests=at_once,
        max_num_batched_tokens=max(512, at_once),
        seed=args.seed,
    )


def _num_runs(names: list[str], sizes: Sizes) -> int:
    ways = {BATCHING: 4, CHUNKS: 2, PREFIX: 2, BLOCKS: len(sizes.block_sizes)}
    return sum(ways[name] for name in names) * sizes.repeats


def _measure(
    part: Part, bench: Bench, requests: list[TraceRequest], rate: float | None, sessions: Sessions | None
) -> None:
    sizes = bench.sizes
    ignore_eos = sessions is None
    make = sessions or functools.partial(
        synthetic_sessions,
        turns=sizes.turns,
        system_tokens=sizes.system_tokens,
        user_tokens=sizes.user_tokens,
        vocab_size=bench.vocab_size,
        seed=bench.seed,
    )
    if part.name == BATCHING:
        parts.measure_levels(bench, requests, rate, part)
    elif part.name == CHUNKS:
        parts.measure_chunks(bench, part)
    elif part.name == PREFIX:
        parts.measure_prefix_cache(bench, make, part, ignore_eos=ignore_eos)
    else:
        parts.measure_block_sizes(bench, make, part, ignore_eos=ignore_eos)


def _describe_trace(console: Console, args: argparse.Namespace, requests: list[TraceRequest], factor: float) -> None:
    name = "synthetic trace" if args.trace is None else args.trace.name
    prompts = sum(request.prompt_tokens for request in requests)
    outputs = sum(request.output_tokens for request in requests)
    console.print(
        f"{name}: {len(requests)} requests, lengths times {factor:.3g}: {prompts:,} prompt tokens, {outputs:,} output "
        "tokens",
        style="dim",
    )


def _print_part(console: Console, part: Part) -> None:
    if not part.ways:  # it ended before its first way
        return
    console.print()
    console.print(draw_table(part))
    for note in part.notes:
        console.print(note[0].upper() + note[1:] + ".", style="dim")
    for sentence in sentences(part):
        console.print(sentence)
    console.print(describe_agreement(part), style="dim")


def _as_json(
    args: argparse.Namespace, sizes: Sizes, requests: list[TraceRequest], measured: list[Part], status: int
) -> dict[str, Any]:
    return {
        "dtype": args.dtype,
        "seed": args.seed,
        "partial": status == EXIT_INTERRUPTED,
        "sizes": dataclasses.asdict(sizes),
        "requests": [dataclasses.asdict(request) for request in requests],
        "parts": {
            part.name: {
                "ways": part.ways,
                "notes": part.notes,
                "failure": part.failure,
                "agreement": dataclasses.asdict(part.agreement),
            }
            for part in measured
        },
    }
