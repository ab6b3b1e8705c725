"""`pageframe bench phases`: prefill and decode apart, through the engine in this process.

Three measurements: whole requests (a short prompt with a long answer, a long prompt with a short answer, a long chat
whose turns find their history in the prefix cache), time to first token against the length of the prompt, and decoded
tokens per second against context and number of requests. Beside each stands its floor: what reading the weights and
the live K/V once a step takes at the read bandwidth measured here, or what the products take at the speed of a matrix
product measured here, whichever is more.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from rich.console import Console
from rich.progress import Progress

from pageframe.benchmarks.experiments import grids, phases_report
from pageframe.benchmarks.experiments.phases_report import Chat, Results
from pageframe.benchmarks.experiments.report import (
    EXIT_INTERRUPTED,
    add_output_flags,
    check_outputs,
    run_experiment,
    write_json,
)
from pageframe.runtime.config import ModelConfig
from pageframe.runtime.models.config import load_model_config
from pageframe.runtime.models.source import resolve_source

PROMPT_LENS, QUICK_PROMPT_LENS = (64, 128, 256, 512, 1024, 2048, 4096), (64, 128, 256)
CONTEXTS, QUICK_CONTEXTS = (64, 256, 1024, 4096), (64, 256)
REQUESTS, QUICK_REQUESTS = (1, 8, 32), (1, 8)
CHATS = (
    Chat("short prompt, long answer", turns=1, prompt=32, answer=512),
    Chat("long prompt, short answer", turns=1, prompt=2048, answer=16),
    Chat("long chat", turns=12, prompt=64, answer=64),
)
QUICK_CHATS = (
    Chat("short prompt, long answer", turns=1, prompt=16, answer=64),
    Chat("long prompt, short answer", turns=1, prompt=256, answer=8),
    Chat("long chat", turns=4, prompt=32, answer=8),
)
BUDGET_SECONDS, QUICK_BUDGET_SECONDS = 540.0, 45.0
REPEATS, QUICK_REPEATS = 3, 1
STEPS, QUICK_STEPS = 24, 8


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked for, checked.

    Args:
        prompt_lens, contexts, requests: ascending.
        chats: those that the model has room for.
        steps: decode steps that are timed in each cell.
        budget: seconds of each of the three measurements, in their order.
        notes: sentences on what the model has no room for.
    """

    prompt_lens: tuple[int, ...]
    contexts: tuple[int, ...]
    requests: tuple[int, ...]
    chats: tuple[Chat, ...]
    repeats: int
    steps: int
    budget: tuple[float, float, float]
    notes: tuple[str, ...]

    @property
    def longest(self) -> int:
        """Tokens of the longest request, its answer included."""
        return max(self.prompt_lens[-1] + 1, self.contexts[-1] + self.steps + 1, *(chat.length for chat in self.chats))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    grids.add_model_flags(parser)
    for flag, what, usual, quick in (
        ("--prompt-lens", "prompt tokens of which the first token is timed", PROMPT_LENS, QUICK_PROMPT_LENS),
        ("--contexts", "tokens in the cache while decoding", CONTEXTS, QUICK_CONTEXTS),
        ("--requests", "requests that decode at once", REQUESTS, QUICK_REQUESTS),
    ):
        grids.add_grid_flag(parser, flag, what, usual, quick)
    grids.add_budget_flag(parser, "all three measurements", BUDGET_SECONDS, QUICK_BUDGET_SECONDS)
    add_output_flags(parser, "phases.png")


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit status."""
    return run_experiment(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    check_outputs(args.plot, args.json)
    model = load_model_config(resolve_source(args.model))
    plan = _plan(args, model)
    results = Results(plan.prompt_lens, plan.contexts, plan.requests, plan.chats, plan.notes)
    interrupted = False
    try:
        _measure(args, plan, results)
    except KeyboardInterrupt:
        interrupted = True
    console = Console()
    phases_report.print_report(console, results, interrupted)
    if args.json is not None:
        write_json(args.json, {"partial": interrupted, **results.as_json()})
    if args.plot is not None and results.measured:
        phases_report.plot(results, args.plot)
        console.print(f"The plot is {args.plot}.")
    return EXIT_INTERRUPTED if interrupted else 0


def _plan(args: argparse.Namespace, model: ModelConfig) -> Plan:
    steps = QUICK_STEPS if args.quick else STEPS
    budget = args.budget or (QUICK_BUDGET_SECONDS if args.quick else BUDGET_SECONDS)
    requests = tuple(sorted(set(args.requests or (QUICK_REQUESTS if args.quick else REQUESTS))))
    grids.check_range("requests", requests[-1], 1, grids.MAX_REQUESTS)
    grids.check_range("budget", budget, 0, grids.MAX_BUDGET_SECONDS)
    prompt_lens, prompt_notes = grids.lengths_that_fit(
        "prompt-lens",
        args.prompt_lens,
        QUICK_PROMPT_LENS if args.quick else PROMPT_LENS,
        model.max_position - 1,
        "before one new token",
    )
    contexts, context_notes = grids.lengths_that_fit(
        "contexts",
        args.contexts,
        QUICK_CONTEXTS if args.quick else CONTEXTS,
        model.max_position - steps - 1,
        f"before {steps + 1} new tokens",
    )
    chats = QUICK_CHATS if args.quick else CHATS
    chat_notes = tuple(
        f"{chat.name}: left out; it has {chat.length:,} tokens, and this model has room for {model.max_position:,}."
        for chat in chats
        if chat.length > model.max_position
    )
    return Plan(
        prompt_lens=prompt_lens,
        contexts=contexts,
        requests=requests,
        chats=tuple(chat for chat in chats if chat.length <= model.max_position),
        repeats=QUICK_REPEATS if args.quick else REPEATS,
        steps=steps,
        budget=(budget * 0.2, budget * 0.3, budget * 0.5),
        notes=chat_notes + prompt_notes + context_notes,
    )


def _measure(args: argparse.Namespace, plan: Plan, results: Results) -> None:
    """Fill `results`."""
    # It loads torch, which --help and a wrong flag need not wait for.
    from pageframe.benchmarks.experiments.phases_measure import Phases

    console = Console(stderr=True)
    console.print("loading the model", style="dim")
    phases = Phases(
        args.model,
        args.dtype,
        longest=plan.longest,
        num_requests=plan.requests[-1],
        pool_tokens=plan.requests[-1] * (plan.contexts[-1] + plan.steps),
    )
    results.machine = phases.machine_line
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("whole requests", total=len(plan.chats))
        phases.hold_chats(plan.chats, plan.budget[0], results, lambda: bar.advance(task))
        task = bar.add_task("first tokens", total=plan.repeats * len(plan.prompt_lens))
        phases.first_tokens(plan.prompt_lens, plan.repeats, plan.budget[1], results, lambda: bar.advance(task))
        task = bar.add_task("decoding", total=len(plan.contexts) * len(plan.requests))
        phases.decode(plan.contexts, plan.requests, plan.steps, plan.budget[2], results, lambda: bar.advance(task))
