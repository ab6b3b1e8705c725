"""`pageframe bench batching`: what continuous batching is worth, piece by piece, on the engine in this process.

    batching   a trace served by whole requests (a batch of up to --batch runs until its longest member ends, and none
               joins it) and by iteration, as the engine does; all requests at once, and at a rate
    chunks     prompts computed in chunks or whole, while others decode: the gaps between the others' tokens
    prefix     sessions of several turns behind one system prompt, with and without the prefix cache
    blocks     half of the same sessions with every block size

Batching by request is the kinder kind: nothing is padded, a request's tokens are counted when they are made, not when
its batch ends, and its memory is paged. Only who may join when is different. Ways of a part take turns in an order that
is drawn for each round; figures are medians over a way's runs, as many as the part's time budget lets it have, and each
way stops at its share of it. All ways' tokens are compared, up to ties of the two best logits.

A part that fails is named, the others are measured all the same, and the command exits with 1 or 2.

Synthetic sessions: a system prompt of 277 random tokens for all, then turns of 24 to 72 random tokens, with answers of
16 to 48 (--quick: fewer), so that they end anywhere in a block. Long prompts are random tokens too. The trace's lengths
are made smaller by one factor, so that 95% of the requests fit into --max-len tokens; the rest are cut. In a model with
a short context all of this is made smaller, where no flag asks for it as it is.
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

from pageframe.benchmarks.experiments import batching_measures as measures
from pageframe.benchmarks.experiments.batching_parts import FAILED, INTERRUPTED, Bench, Part
from pageframe.benchmarks.experiments.batching_plot import save_plot
from pageframe.benchmarks.experiments.batching_report import describe_agreement, draw_table, sentences
from pageframe.benchmarks.experiments.batching_sizes import (
    BATCHING,
    BLOCKS,
    CHUNKS,
    PARTS,
    PREFIX,
    QUICK,
    SESSION_ROOM,
    Sizes,
    check_ranges,
    fit_context,
    flag_name,
)
from pageframe.benchmarks.experiments.report import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    NOT_MEASURED,
    InputError,
    TimeBudget,
    add_output_flags,
    check_outputs,
    engine_line,
    hardware_line,
    run_experiment,
    write_json,
)
from pageframe.benchmarks.experiments.sessions import Sessions, read_sessions, synthetic_sessions
from pageframe.benchmarks.experiments.traces import TraceRequest, read_trace, scaled, synthetic_trace
from pageframe.runtime.config import DEFAULT_MODEL, DTYPES, EngineConfig
from pageframe.runtime.errors import EngineError, InvalidRequestError, StartupError
from pageframe.runtime.models.config import load_model_config
from pageframe.runtime.models.source import resolve_source

#: Answers differ.
EXIT_DIFFERENT = 1
#: What ends a part, but not the command.
BAD_INPUT = (InputError, StartupError, InvalidRequestError)
FAILURES = (*BAD_INPUT, EngineError, MemoryError)
SYNTHETIC_REQUESTS = 2000
BLOCK_SIZE = 16


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
    for field, text in _SIZE_FLAGS.items():
        usual, quick = getattr(Sizes(), field), getattr(QUICK, field)
        parser.add_argument(
            f"--{flag_name(field)}",
            dest=f"size_{field}",
            type=int,
            metavar="N",
            help=f"{text} (default: {usual}, quick: {quick})",
        )
    parser.add_argument("--rate", type=float, help="requests a second (default: 0.8 of what was served at once)")
    parser.add_argument(
        "--budget",
        dest="size_budget",
        type=float,
        metavar="SECONDS",
        help="for each part; what one leaves over goes to those behind it "
        f"(default: {Sizes().budget:g}, quick: {QUICK.budget:g})",
    )
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: one for each that may be used)")
    add_output_flags(parser, "batching.png")


_SIZE_FLAGS = {
    "requests": "requests of the trace",
    "max_len": "most tokens of one of them, prompt and answer",
    "batch": "most requests at once",
    "long_tokens": "tokens of a long prompt",
    "chunk": "tokens of a step where prompts are computed in chunks",
    "sessions": "conversations",
    "repeats": "runs of each way",
}


@dataclasses.dataclass(slots=True)
class Job:
    """What is to be measured.

    Args:
        parts: filled in while they are measured.
        machine: the line about it; that of the engine once there is one.
        changes: numbers that the model's context made smaller, for people.
        requests, factor: of the trace, and what its lengths were multiplied by; empty where none is served.
        sessions: those of a file; None draws them.
    """

    sizes: Sizes
    changes: list[str]
    config: EngineConfig
    parts: list[Part]
    machine: str
    requests: list[TraceRequest]
    factor: float
    sessions: Sessions | None


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit status."""
    return run_experiment(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    check_outputs(args.plot, args.json)
    job = _prepare(args)
    status = _measure_all(job, args)
    console = Console(highlight=False)
    console.print(job.machine, style="dim")
    for change in job.changes:
        console.print(change, style="dim")
    if job.requests:
        _describe_trace(console, args, job)
    for part in job.parts:
        _print_part(console, part)
    if status == EXIT_INTERRUPTED:
        console.print("Interrupted: partial results.", style="yellow")
    elif any(part.agreement.different for part in job.parts):
        console.print("Some answers differ where no tie explains it.", style="red")
        status = max(status, EXIT_DIFFERENT)
    if args.json is not None:
        write_json(args.json, _as_json(args, job, status))
    if args.plot is not None and any(part.is_measured for part in job.parts):
        save_plot(job.parts, job.machine, args.plot)
        console.print(f"The plot is in {args.plot}.", markup=False)
    return status


def _prepare(args: argparse.Namespace) -> Job:
    """Read and check all that was asked for; only what the chosen parts need.

    Raises:
        InputError, StartupError: it can't be measured.
    """
    names = [name for name in PARTS if name in (args.part or PARTS)]
    sizes, asked = read_sizes(args)
    positions = load_model_config(resolve_source(args.model)).max_position
    sizes, changes = fit_context(sizes, asked, names, positions, drawn_sessions=args.sessions is None)
    if changes:
        changes = [f"The model has {positions} positions: {', '.join(changes)}."]
    requests: list[TraceRequest] = []
    factor = 1.0
    if BATCHING in names:
        trace = (
            synthetic_trace(SYNTHETIC_REQUESTS, args.seed) if args.trace is None else read_trace(args.trace, args.seed)
        )
        requests, factor = scaled(trace, sizes.requests, sizes.max_len, args.seed)
    sessions = None
    if args.sessions is not None and not {PREFIX, BLOCKS}.isdisjoint(names):
        sessions = read_sessions(args.sessions, args.model)
    config = _engine_config(args, sizes, positions)
    machine = hardware_line(args.threads or len(os.sched_getaffinity(0)), args.dtype)
    return Job(sizes, changes, config, [Part(name) for name in names], machine, requests, factor, sessions)


def read_sizes(args: argparse.Namespace) -> tuple[Sizes, set[str]]:
    """How much is run: the flags over the usual sizes or the quick ones; and which fields have a flag.

    Raises:
        InputError: a number is out of its range.
    """
    asked = {field: getattr(args, f"size_{field}") for field in (*_SIZE_FLAGS, "budget")}
    given = {field: value for field, value in asked.items() if value is not None}
    sizes = dataclasses.replace(QUICK if args.quick else Sizes(), **given)
    check_ranges(sizes)
    if args.rate is not None and not 0 < args.rate <= 1e6:
        raise InputError(f"rate is {args.rate:g}; it must be above 0 and at most 1000000 requests a second")
    if not 0 <= args.seed < 2**63:
        raise InputError(f"seed is {args.seed}; it must be at least 0 and below 2**63")
    return sizes, set(given)


def _engine_config(args: argparse.Namespace, sizes: Sizes, positions: int) -> EngineConfig:
    """The engine that is built: a pool with room for all that runs at once, so that none is preempted."""
    longest = min(positions, max(SESSION_ROOM, sizes.max_len, sizes.long_tokens + 1))
    at_once = max(sizes.batch, sizes.chunk_requests, sizes.open_sessions)
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


def _measure_all(job: Job, args: argparse.Namespace) -> int:
    """Measure into the job's parts, one after the other; the exit status. A part that fails takes no other with it.

    Raises:
        InputError, StartupError, EngineError, MemoryError: not even the model can be run.
    """
    status = 0
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("loading", total=_num_runs(job))
        try:
            bench = Bench(job.config, job.sizes, args.seed, lambda: bar.advance(task))
            job.machine = engine_line(bench.engine.resolved)
            whole = TimeBudget(job.sizes.budget * len(job.parts))
            for index, part in enumerate(job.parts):
                bar.update(task, description=part.name)
                try:
                    _measure(part, bench, job, args.rate, whole.left / (len(job.parts) - index))
                except FAILURES as error:
                    part.stopped, part.failure = FAILED, str(error) or "out of memory"
                    status = max(status, EXIT_BAD_INPUT if isinstance(error, BAD_INPUT) else EXIT_FAILED)
                    text = f"pageframe: part {part.name} failed: {part.failure}"
                    bar.console.print(text, style="red", markup=False, highlight=False, soft_wrap=True)
        except KeyboardInterrupt:
            status = EXIT_INTERRUPTED
            for part in job.parts:
                part.stopped = part.stopped or INTERRUPTED
    return status


def _num_runs(job: Job) -> int:
    ways = {BATCHING: 4, CHUNKS: 2, PREFIX: 2, BLOCKS: len(job.sizes.block_sizes)}
    return sum(ways[part.name] for part in job.parts) * job.sizes.repeats


def _measure(part: Part, bench: Bench, job: Job, rate: float | None, seconds: float) -> None:
    sizes = job.sizes
    ignore_eos = job.sessions is None
    make = job.sessions or functools.partial(
        synthetic_sessions,
        turns=sizes.turns,
        system_tokens=sizes.system_tokens,
        user_tokens=sizes.user_tokens,
        vocab_size=bench.vocab_size,
        seed=bench.seed,
    )
    if part.name == BATCHING:
        measures.measure_levels(bench, job.requests, rate, part, seconds)
    elif part.name == CHUNKS:
        measures.measure_chunks(bench, part, seconds)
    elif part.name == PREFIX:
        measures.measure_prefix_cache(bench, make, part, seconds, ignore_eos=ignore_eos)
    else:
        measures.measure_block_sizes(bench, make, part, seconds, ignore_eos=ignore_eos)


def _describe_trace(console: Console, args: argparse.Namespace, job: Job) -> None:
    requests = job.requests
    name = "synthetic trace" if args.trace is None else args.trace.name
    prompts = sum(request.prompt_tokens for request in requests)
    outputs = sum(request.output_tokens for request in requests)
    console.print(
        f"{name}: {len(requests)} requests, lengths times {job.factor:.3g}: {prompts:,} prompt tokens, "
        f"{outputs:,} output tokens",
        style="dim",
    )


def _print_part(console: Console, part: Part) -> None:
    console.print()
    if not part.ways:  # it ended before its first way
        console.print(f"part {part.name}: {NOT_MEASURED}: {part.stopped}")
        return
    console.print(draw_table(part))
    for note in part.notes:
        console.print(note[0].upper() + note[1:] + ".", style="dim")
    for sentence in sentences(part):
        console.print(sentence)
    console.print(describe_agreement(part), style="dim")


def _as_json(args: argparse.Namespace, job: Job, status: int) -> dict[str, Any]:
    return {
        "dtype": args.dtype,
        "seed": args.seed,
        "partial": status == EXIT_INTERRUPTED,
        "sizes": dataclasses.asdict(job.sizes),
        "requests": [dataclasses.asdict(request) for request in job.requests],
        "parts": {
            part.name: {
                "ways": part.ways,
                "not_measured": {way: part.reason(way) for way, runs in part.ways.items() if not runs},
                "notes": part.notes,
                "failure": part.failure,
                "agreement": dataclasses.asdict(part.agreement),
            }
            for part in job.parts
        },
    }
