"""`pageframe bench kv-cache`: what a KV cache saves, and what four ways to keep K and V take in time and memory.

The same decoder answers the same prompts greedily in four ways: without a cache (the whole sequence is computed for
every token), with one that grows by concatenation, with one reserved whole, and with the paged one of the engine. In
all of them the same kernels read K and V in blocks of the same size; the ways differ only in who owns the blocks. They
take turns token by token in random order, so one run gives the time of each token, and with it every shorter length
too. Every cell is run once, then again while there is time; medians count, and each says of how many runs it is one.
All must make the same tokens, in compiled kernels from the same bits. In torch's operations two may differ where the
best logits are a tie or one step of the arithmetic apart, which is counted, and what follows such a place is not
compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress

from pageframe.benchmarks.experiments import cache_report, grids
from pageframe.benchmarks.experiments.cache_memory import Kind, KvShape
from pageframe.benchmarks.experiments.cache_results import Grid, Race, Results
from pageframe.benchmarks.experiments.grids import count
from pageframe.benchmarks.experiments.report import (
    EXIT_INTERRUPTED,
    InputError,
    add_output_flags,
    check_outputs,
    engine_line,
    run_experiment,
    write_json,
)
from pageframe.benchmarks.experiments.ties import Parting, tie_tolerance
from pageframe.runtime.config import LIMITS, EngineConfig, ModelConfig
from pageframe.runtime.errors import ConfigError
from pageframe.runtime.memory_plan import format_bytes, free_memory, kv_bytes_per_token, parse_bytes
from pageframe.runtime.models.config import load_model_config
from pageframe.runtime.models.source import resolve_source

if TYPE_CHECKING:
    from pageframe.benchmarks.experiments.cache_ways import Way
    from pageframe.runtime.engine import Engine

DEFAULTS = EngineConfig()
NEW_TOKENS, QUICK_NEW_TOKENS = (16, 64, 256, 1024), (16, 64)
REQUESTS, QUICK_REQUESTS = (1, 8, 32), (1, 8)
BUDGET_SECONDS, QUICK_BUDGET_SECONDS = 130.0, 11.0
REPEATS = 3
#: With the numbers of new tokens it fills no block whole, which would be the paged way's best case.
PROMPT_LEN = 37
EXIT_DIFFERENT_TOKENS = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    grids.add_model_flags(parser)
    grids.add_grid_flag(parser, "--new-tokens", "tokens to make for each request", NEW_TOKENS, QUICK_NEW_TOKENS)
    grids.add_grid_flag(parser, "--requests", "requests at once", REQUESTS, QUICK_REQUESTS)
    parser.add_argument(
        "--prompt-len",
        type=count,
        metavar="N",
        help=f"tokens of a prompt ({PROMPT_LEN}, or half of what a smaller model has room for)",
    )
    parser.add_argument(
        "--max-len",
        type=count,
        metavar="N",
        help="tokens per request that the cache reserved whole has room for, rounded up to whole blocks (default: the "
        "longest request here)",
    )
    parser.add_argument(
        "--memory", default="1GiB", metavar="SIZE", help="K/V memory: how many requests does it hold? (%(default)s)"
    )
    grids.add_budget_flag(parser, "each way", BUDGET_SECONDS, QUICK_BUDGET_SECONDS)
    parser.add_argument(
        "--all-tokens",
        action="store_true",
        help="without a cache make and time every token; by default, past the first 8, only four to a doubling of the "
        "length, behind the others' tokens, and those between get a time on the line between their neighbours",
    )
    parser.add_argument(
        "--repeats",
        type=count,
        default=REPEATS,
        metavar="N",
        help="runs of each cell while there is time; medians count (%(default)s)",
    )
    add_output_flags(parser, "kv-cache.png")


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit status, which is 1 where the ways' tokens differ."""
    return run_experiment(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    check_outputs(args.plot, args.json)
    model = load_model_config(resolve_source(args.model))
    grid = _grid(args, model)
    memory = _memory(args.memory)
    shape = KvShape(kv_bytes_per_token(model, args.dtype), model.num_layers, DEFAULTS.block_size, grid.max_len)
    _check_memory(grid, shape)
    results = Results(
        grid.prompt_len,
        grid.new_tokens,
        memory,
        shape,
        [Race(number) for number in grid.requests],
        notes=grid.notes,
    )
    interrupted = False
    try:
        _measure(args, grid, model, results)
    except KeyboardInterrupt:
        interrupted = True
    console = Console()
    cache_report.print_report(console, results, interrupted)
    if args.json is not None:
        write_json(args.json, {"partial": interrupted, **results.as_json()})
    if args.plot is not None and results.measured:
        cache_report.plot(results, args.plot)
        console.print(f"The plot is {args.plot}.")
    if interrupted:
        return EXIT_INTERRUPTED
    return EXIT_DIFFERENT_TOKENS if results.num_parted(Parting.DIFFERENT) else 0


def _grid(args: argparse.Namespace, model: ModelConfig) -> Grid:
    requests = tuple(sorted(set(args.requests or (QUICK_REQUESTS if args.quick else REQUESTS))))
    budget = args.budget or (QUICK_BUDGET_SECONDS if args.quick else BUDGET_SECONDS)
    grids.check_range("requests", requests[-1], 1, grids.MAX_REQUESTS)
    grids.check_range("repeats", args.repeats, 1, grids.MAX_REPEATS)
    grids.check_range("budget", budget, 0, grids.MAX_BUDGET_SECONDS)
    prompt_len = args.prompt_len or min(PROMPT_LEN, model.max_position // 2)
    # The paged way asks for one token more, so that its last one can be looked at before its request ends.
    grids.check_range("prompt-len", prompt_len, 1, model.max_position - 2)
    new_tokens, notes = grids.lengths_that_fit(
        "new-tokens",
        args.new_tokens,
        QUICK_NEW_TOKENS if args.quick else NEW_TOKENS,
        model.max_position - prompt_len - 1,
        f"behind a prompt of {prompt_len} tokens",
    )
    longest = prompt_len + new_tokens[-1]
    max_len = longest if args.max_len is None else args.max_len
    if not longest <= max_len <= model.max_position:
        raise InputError(
            f"max-len is {max_len}; it must be from {longest}, the longest request, to {model.max_position}, where "
            "this model's positions end"
        )
    return Grid(new_tokens, requests, prompt_len, max_len, budget, args.all_tokens, args.repeats, notes)


def _memory(text: str) -> int:
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise InputError(f"memory is {error}") from error


def _check_memory(grid: Grid, shape: KvShape) -> None:
    """The three ways with a cache hold their K and V at the same time."""
    most = (grid.requests[-1], grid.prompt_len, grid.new_tokens[-1])
    needed = sum(shape.held(kind, *most).reserved for kind in Kind)
    free = free_memory()
    if needed > free:
        raise InputError(
            f"requests is {most[0]}; so many requests of {most[1] + most[2]} tokens take {format_bytes(needed)} in all "
            f"ways together, and {format_bytes(free)} are free"
        )


def _measure(args: argparse.Namespace, grid: Grid, model: ModelConfig, results: Results) -> None:
    """Fill `results`."""
    # These load torch, which --help and a wrong flag need not wait for.
    import numpy as np

    from pageframe.benchmarks.experiments.cache_rounds import Rounds

    console = Console(stderr=True)
    console.print("loading the model", style="dim")
    engine = _build_engine(args, grid)
    results.machine = engine_line(engine.resolved)
    results.same_bits = engine.resolved.batch_invariant
    results.tolerance = tie_tolerance(engine.resolved)
    prompts = np.random.default_rng(0).integers(0, model.vocab_size, (grid.requests[-1], grid.prompt_len))
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("races", total=grid.repeats * len(results.races))
        ways = _ways(engine, grid.max_len)
        Rounds(ways, prompts, grid, results.tolerance, lambda: bar.advance(task)).run(results.races)


def _build_engine(args: argparse.Namespace, grid: Grid) -> Engine:
    """One whose pool holds all requests at their end, its pages touched, which takes time."""
    from pageframe.runtime.engine_builder import build_engine
    from pageframe.runtime.model_runner import ModelRunner

    longest = grid.prompt_len + grid.new_tokens[-1] + 1
    num_requests = grid.requests[-1]
    # Every prompt is computed whole in the first step, as in the other ways, though none may have more than half of the
    # tokens while others wait.
    token_budget = min(
        LIMITS["max_num_batched_tokens"][1],
        max(DEFAULTS.token_budget("cpu"), 4 * num_requests * grid.prompt_len),
    )
    engine = build_engine(
        EngineConfig(
            model=args.model,
            dtype=args.dtype,
            num_blocks=num_requests * -(-longest // DEFAULTS.block_size),
            max_model_len=longest,
            max_num_requests=num_requests,
            max_num_batched_tokens=token_budget,
            mixed_token_budget=token_budget,
            prefix_cache=False,
        )
    )
    assert isinstance(engine.runner, ModelRunner)
    engine.runner.fill_blocks(range(engine.resolved.num_blocks), 0.0)
    return engine


def _ways(engine: Engine, max_len: int) -> Mapping[Kind, Way]:
    """All ways over the engine's own decoder."""
    import torch

    from pageframe.benchmarks.experiments import cache_ways
    from pageframe.kernels.attention import select_backend
    from pageframe.runtime.arithmetic import TORCH_DTYPES
    from pageframe.runtime.model_runner import ModelRunner

    assert isinstance(engine.runner, ModelRunner)
    resolved, decoder = engine.resolved, engine.runner.decoder
    device = torch.device(resolved.device)
    backend = select_backend(resolved.backend, device)
    blocks = cache_ways.Blocks(resolved.model, resolved.block_size, TORCH_DTYPES[resolved.kv_dtype], device)

    def contiguous(kind: type[cache_ways.Memory]) -> Way:
        return cache_ways.ContiguousWay(decoder, backend, blocks, kind, max_len)

    return {
        Kind.NOTHING: contiguous(cache_ways.NothingKept),
        Kind.GROWN: contiguous(cache_ways.GrownCache),
        Kind.RESERVED: contiguous(cache_ways.ReservedCache),
        Kind.PAGED: cache_ways.PagedWay(engine),
    }
