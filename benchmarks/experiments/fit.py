"""`pageframe bench fit`: how many requests of a trace a KV pool holds at once, paged and reserved.

Requests enter one pool in the order of their arrival until the next one does not fit, and none overtakes. Each counts
with all the tokens that it will ever have, prompt and answer, so whatever was let in can run to its end. Four ways:

    paged                  blocks as needed, by the runtime's own BlockAllocator and BlockTables
    reserved, maximum      max_len slots in a row for each
    reserved, max_tokens   slots in a row for the prompt and the longest answer that it may ask for
    reserved, exact        slots in a row for just the tokens it will have, which nobody knows beforehand

Reserved pieces are laid one behind the other without gaps, which is kinder to them than memory in use for hours.
Medians over random orders of the trace. No model is run: only the shape of one counts.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pageframe.benchmarks.experiments.grids import add_model_flags, check_range
from pageframe.benchmarks.experiments.report import (
    COLORS,
    EXIT_INTERRUPTED,
    INK,
    NOT_MEASURED,
    InputError,
    TimeBudget,
    add_output_flags,
    check_outputs,
    new_figure,
    processor_name,
    run_experiment,
    save_figure,
    write_json,
)
from pageframe.benchmarks.experiments.traces import TraceRequest, read_trace, synthetic_trace
from pageframe.runtime import memory_plan
from pageframe.runtime.block_allocator import BlockAllocator, OutOfBlocksError
from pageframe.runtime.block_table import BlockTables
from pageframe.runtime.config import EngineConfig, ModelConfig
from pageframe.runtime.models.config import load_model_config
from pageframe.runtime.models.source import resolve_source

PAGED, RESERVED_MAX, RESERVED_TOKENS, RESERVED_EXACT = WAYS = (
    "paged",
    "reserved, maximum",
    "reserved, max_tokens",
    "reserved, exact",
)
SYNTHETIC_REQUESTS = 20_000
#: Seconds that one way may take.
BUDGET, QUICK_BUDGET = 120.0, 10.0
#: Of fewer values the 99th percentile is no more than the longest.
FEWEST_FOR_P99 = 100


@dataclass(frozen=True, slots=True)
class Pool:
    """The pool and what reserving sets aside.

    Args:
        max_len: longest context of a request, prompt and answer.
        max_tokens: longest answer that a request may ask for.
    """

    num_blocks: int
    block_size: int
    max_len: int
    max_tokens: int

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size


@dataclass(frozen=True, slots=True)
class Filled:
    """A pool that the next request did not fit into.

    Args:
        used: slots that hold a token sooner or later.
        wasted: slots taken that never will.
        left: slots that were not taken.
        emptied: the trace ended before the pool was full.
    """

    requests: int
    used: int
    wasted: int
    left: int
    emptied: bool


def fill_paged(pool: Pool, lengths: Sequence[int]) -> Filled:
    """Rows of the real tables, one for each request, until the allocator has too few blocks."""
    # As many rows as blocks could be needed for at least; most traces need far fewer, and the table is large.
    cumulative = np.cumsum([-(-length // pool.block_size) for length in lengths])
    # A pool of any size costs no more than the trace can fill.
    num_blocks = min(pool.num_blocks, int(cumulative[-1]))
    expected = int(np.searchsorted(cumulative, num_blocks, side="right"))
    allocator = BlockAllocator(num_blocks)
    tables = BlockTables(
        allocator,
        max_requests=expected + 1,
        max_blocks=-(-max(lengths) // pool.block_size),
        block_size=pool.block_size,
    )
    used = count = 0
    emptied = True
    for length in lengths:
        try:
            tables.acquire_row([], length)
        except OutOfBlocksError:
            emptied = False
            break
        used += length
        count += 1
    assert count == expected, f"{count} requests entered; the sums of their blocks allow {expected}"
    taken = int(tables.num_blocks.sum()) * pool.block_size
    assert taken == allocator.num_used * pool.block_size
    return Filled(count, used, taken - used, pool.num_slots - taken, emptied)


def fill_reserved(pool: Pool, lengths: Sequence[int], sizes: Sequence[int]) -> Filled:
    """Pieces of `sizes` slots, one behind the other."""
    ends = np.cumsum(sizes)
    count = int(np.searchsorted(ends, min(pool.num_slots, int(ends[-1])), side="right"))
    taken = int(ends[count - 1]) if count else 0
    used = sum(lengths[:count])
    return Filled(count, used, taken - used, pool.num_slots - taken, emptied=count == len(lengths))


def fill(way: str, pool: Pool, requests: Sequence[TraceRequest]) -> Filled:
    """Let requests into an empty pool in one of the WAYS."""
    lengths = [request.total_tokens for request in requests]
    if way == PAGED:
        return fill_paged(pool, lengths)
    if way == RESERVED_MAX:
        return fill_reserved(pool, lengths, [pool.max_len] * len(lengths))
    if way == RESERVED_TOKENS:
        sizes = [min(request.prompt_tokens + pool.max_tokens, pool.max_len) for request in requests]
        return fill_reserved(pool, lengths, sizes)
    return fill_reserved(pool, lengths, lengths)


def fill_in_orders(
    pool: Pool,
    requests: Sequence[TraceRequest],
    orders: int,
    seed: int,
    budget: float,
    results: dict[str, list[Filled]],
) -> None:
    """Fill `results` with each way's pools, one for each random order; the ways take turns over the same orders."""
    generator = np.random.default_rng(seed)
    budgets = {way: TimeBudget(budget) for way in WAYS}
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("filling pools", total=orders * len(WAYS))
        for _ in range(orders):
            order = generator.permutation(len(requests)).tolist()
            shuffled = [requests[index] for index in order]
            for way in WAYS:
                if budgets[way].allows():
                    results[way].append(fill(way, pool, shuffled))
                bar.advance(task)


def median_of(filled: Sequence[Filled], value: Callable[[Filled], float]) -> float:
    return median(value(one) for one in filled)


# ---- the command ----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="a trace of Azure's (CSV), Mooncake's (JSON lines) or ServeGen's (folder or archive); default: lognormal "
        "lengths drawn from --seed",
    )
    add_model_flags(parser)
    parser.add_argument("--kv-memory", metavar="BYTES", default="4GiB", help="the pool, such as 4GiB (%(default)s)")
    parser.add_argument("--block-size", type=int, default=16, help="token slots in a block (default: %(default)s)")
    parser.add_argument(
        "--max-len",
        type=int,
        metavar="TOKENS",
        help="longest context, set aside by 'reserved, maximum'; longer requests are left out (default: the model's)",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="TOKENS",
        help="answer set aside by 'reserved, max_tokens' (default: the trace's longest)",
    )
    parser.add_argument("--orders", type=int, help="random orders of arrival (default: 21, 5 with --quick)")
    parser.add_argument("--seed", type=int, default=0, help="of the orders and of drawn lengths (default: %(default)s)")
    add_output_flags(parser, "fit.png")


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit status."""
    return run_experiment(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    check_outputs(args.plot, args.json)
    console = Console(highlight=False)
    orders = args.orders if args.orders is not None else 5 if args.quick else 21
    check_range("orders", orders, 1, 10_000)
    if args.seed < 0:
        raise InputError(f"seed is {args.seed}; it must be at least 0")
    model = load_model_config(resolve_source(args.model))
    num_synthetic = SYNTHETIC_REQUESTS // 10 if args.quick else SYNTHETIC_REQUESTS
    trace = synthetic_trace(num_synthetic, args.seed) if args.trace is None else read_trace(args.trace, args.seed)
    pool, requests = _pool_and_requests(args, model, trace)
    results: dict[str, list[Filled]] = {way: [] for way in WAYS}
    status = 0
    try:
        fill_in_orders(pool, requests, orders, args.seed, QUICK_BUDGET if args.quick else BUDGET, results)
    except KeyboardInterrupt:
        status = EXIT_INTERRUPTED
    name = "synthetic" if args.trace is None else args.trace.name
    memory = memory_plan.format_bytes(memory_plan.parse_bytes(args.kv_memory))
    done = min(len(filled) for filled in results.values())
    console.print(f"{processor_name()}; {args.dtype}, no model was run", style="dim")
    console.print(
        f"{name}: {len(requests):,} of {len(trace):,} requests, {len(trace) - len(requests):,} longer than "
        f"{pool.max_len:,} tokens left out; {_quantiles(requests)}; answers reserved: {pool.max_tokens:,}"
    )
    console.print(_draw_table(pool, results, f"{memory} pool, {pool.num_slots:,} slots, medians of {done} orders"))
    if status:
        console.print(f"Interrupted: partial results, {done} of {orders} orders.", style="yellow")
    for sentence in sentences(pool, results):
        console.print(sentence)
    _write_files(args, console, pool, requests, results, f"{memory}, {name} trace, {done} orders", status)
    return status


def _pool_and_requests(
    args: argparse.Namespace, model: ModelConfig, trace: Sequence[TraceRequest]
) -> tuple[Pool, list[TraceRequest]]:
    """The pool that was asked for, and the requests that may run in it.

    Raises:
        InputError: the model or the pool has no room for a context of max_len, or no request is short enough.
        ConfigError: a size or the block size is none.
    """
    EngineConfig(block_size=args.block_size)  # checks it
    bytes_per_block = memory_plan.kv_bytes_per_token(model, args.dtype) * args.block_size
    num_blocks = memory_plan.parse_bytes(args.kv_memory) // bytes_per_block
    max_len = model.max_position if args.max_len is None else args.max_len
    if not memory_plan.MIN_MODEL_LEN <= max_len <= model.max_position:
        raise InputError(
            f"max-len is {max_len}; it must be from {memory_plan.MIN_MODEL_LEN} to the model's {model.max_position} "
            "positions"
        )
    if num_blocks * args.block_size < max_len:
        raise InputError(
            f"kv-memory is {args.kv_memory}; it holds {num_blocks * args.block_size} tokens, fewer than one context of "
            f"max-len, {max_len}"
        )
    requests = [request for request in trace if request.total_tokens <= max_len]
    if not requests:
        raise InputError(f"max-len is {max_len}; every request of the trace is longer")
    longest = max(request.output_tokens for request in requests)
    max_tokens = longest if args.max_tokens is None else args.max_tokens
    if max_tokens < longest:
        raise InputError(f"max-tokens is {max_tokens}; the trace has an answer of {longest}")
    return Pool(num_blocks, args.block_size, max_len, max_tokens), requests


def _quantiles(requests: Sequence[TraceRequest]) -> str:
    parts = []
    for name, values in (
        ("prompts", [request.prompt_tokens for request in requests]),
        ("answers", [request.output_tokens for request in requests]),
    ):
        tail, share = ("p99", 99) if len(values) >= FEWEST_FOR_P99 else ("longest", 100)
        middle, high = np.percentile(values, [50, share]).tolist()
        parts.append(f"{name} {middle:,.0f} tokens ({tail} {high:,.0f})")
    return ", ".join(parts)


def _draw_table(pool: Pool, results: dict[str, list[Filled]], title: str) -> Table:
    table = Table(title=title)
    table.add_column("way")
    for column in ("at once", "fewest, most", "used", "wasted", "not taken"):
        table.add_column(column, justify="right")
    for way, filled in results.items():
        if not filled:
            table.add_row(way, *[NOT_MEASURED] * 5)
            continue
        counts = [one.requests for one in filled]
        shares = (
            f"{median_of(filled, lambda one: one.used) / pool.num_slots:.1%}",
            f"{median_of(filled, lambda one: one.wasted) / pool.num_slots:.2%}",
            f"{median_of(filled, lambda one: one.left) / pool.num_slots:.2%}",
        )
        more = "+" if any(one.emptied for one in filled) else ""
        table.add_row(way, f"{median(counts):,.0f}{more}", f"{min(counts):,}, {max(counts):,}", *shares)
    return table


def sentences(pool: Pool, results: dict[str, list[Filled]]) -> list[str]:
    """What was found, in words; every number is of the results."""
    if not all(results[way] for way in (PAGED, RESERVED_MAX, RESERVED_TOKENS)):
        return []
    at_once = {way: median_of(filled, lambda one: one.requests) for way, filled in results.items() if filled}
    wasted = {
        way: median_of(filled, lambda one: one.wasted) / pool.num_slots for way, filled in results.items() if filled
    }
    first = (
        f"Paged, the pool holds {at_once[PAGED]:,.0f} requests at once, "
        f"{at_once[PAGED] / at_once[RESERVED_MAX]:.1f} times as many as with {pool.max_len:,} slots reserved for each "
        f"({at_once[RESERVED_MAX]:,.0f}) and {at_once[PAGED] / at_once[RESERVED_TOKENS]:.1f} times as many as with "
        f"prompt and max_tokens reserved ({at_once[RESERVED_TOKENS]:,.0f})."
    )
    if any(one.emptied for one in results[PAGED]):
        first += " (The trace ended before the paged pool was full, so it would hold more.)"
    second = (
        f"Paging leaves {wasted[PAGED]:.2%} of the slots unused in the tails of blocks of {pool.block_size}; "
        f"reserving the maximum wastes {wasted[RESERVED_MAX]:.1%}, and reserving prompt and max_tokens "
        f"{wasted[RESERVED_TOKENS]:.1%}."
    )
    return [first, second]


def _write_files(
    args: argparse.Namespace,
    console: Console,
    pool: Pool,
    requests: Sequence[TraceRequest],
    results: dict[str, list[Filled]],
    title: str,
    status: int,
) -> None:
    if args.json is not None:
        content: dict[str, Any] = {
            "pool": dataclasses.asdict(pool),
            "num_requests": len(requests),
            "seed": args.seed,
            "partial": bool(status),
            "ways": {way: [dataclasses.asdict(one) for one in filled] for way, filled in results.items()},
        }
        write_json(args.json, content)
    if args.plot is not None and all(results.values()):
        draw_plot(pool, results, title, args.plot)
        console.print(f"The plot is in {args.plot}.", markup=False)


def draw_plot(pool: Pool, results: dict[str, list[Filled]], title: str, path: Path) -> None:
    """Bars: requests at once, and what became of the pool's slots."""
    figure, (left, right) = new_figure(1, 2, height=5.5)
    names = [way.replace(", ", ",\n") for way in results]
    counts = [median_of(filled, lambda one: one.requests) for filled in results.values()]
    bars = left.bar(names, counts, color=COLORS[0])
    left.bar_label(bars, [f"{count:,.0f}" for count in counts], padding=3)
    left.set_ylabel("requests at once")
    left.set_xlabel("how memory is set aside")
    left.margins(y=0.1)
    bottom = np.zeros(len(names))
    parts: tuple[tuple[str, str, str, Callable[[Filled], float]], ...] = (
        ("hold a token", COLORS[0], "", lambda one: one.used),
        ("taken, never used", COLORS[1], "//", lambda one: one.wasted),
        ("not taken", "#FFFFFF", "", lambda one: one.left),
    )
    for label, color, hatch, value in parts:
        shares = np.array([median_of(filled, value) / pool.num_slots * 100 for filled in results.values()])
        right.bar(names, shares, bottom=bottom, label=label, color=color, hatch=hatch, edgecolor=INK, linewidth=0.8)
        bottom += shares
    right.set_ylabel("share of the pool's slots (%)")
    right.set_xlabel("how memory is set aside")
    right.set_ylim(0, 100)
    right.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=10, columnspacing=1.0)
    for axes in (left, right):
        axes.grid(axis="x", visible=False)
        axes.set_axisbelow(True)
        axes.tick_params(axis="x", labelsize=9)
    figure.suptitle(title)
    save_figure(figure, path)
