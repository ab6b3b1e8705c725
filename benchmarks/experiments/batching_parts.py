"""What the parts of `pageframe bench batching` have in common: the model, its runs, and ways that take turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pageframe.benchmarks.experiments.batching_sizes import Sizes
from pageframe.benchmarks.experiments.driver import Agreement, Answer, Ask, OutOfTimeError, compare, serve
from pageframe.benchmarks.experiments.report import InputError, TimeBudget
from pageframe.kernels.attention import select_backend
from pageframe.runtime.arithmetic import TORCH_DTYPES
from pageframe.runtime.config import EngineConfig, ResolvedConfig
from pageframe.runtime.engine import Engine
from pageframe.runtime.engine_builder import build_engine
from pageframe.runtime.model_runner import ModelRunner
from pageframe.runtime.models.decoder import Decoder
from pageframe.runtime.sampler import Sampler

WARM_UP_SECONDS = 60.0
#: Why a way has no run.
OUT_OF_TIME, NO_TIME_LEFT, FAILED, INTERRUPTED = "out of time", "no time left", "the part failed", "interrupted"

Metrics = dict[str, float]


@dataclass(slots=True)
class Part:
    """One measurement.

    Args:
        ways: the metrics of each way's runs; no run for one that was not measured.
        why_not: why a way has no run.
        notes: what was run, for people.
        agreement: all ways' answers against the first measured way's.
        reference: those answers.
        stopped: why the part ended early, if it did: FAILED or INTERRUPTED.
        failure: what failed.
    """

    name: str
    ways: dict[str, list[Metrics]] = field(default_factory=dict)
    why_not: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    agreement: Agreement = field(default_factory=Agreement)
    reference: list[Answer] = field(default_factory=list)
    stopped: str = ""
    failure: str = ""

    @property
    def is_measured(self) -> bool:
        return any(self.ways.values())

    def expect(self, ways: Sequence[str]) -> None:
        """These ways are to be measured, and shown in this order."""
        self.ways |= {way: [] for way in ways}

    def keep(self, way: str, metrics: Metrics, answers: list[Answer], engine: Engine) -> None:
        """Add a run; its answers are compared where it is the way's first."""
        runs = self.ways[way]
        runs.append(metrics)
        if not self.reference:
            self.reference = answers
        elif len(runs) == 1:
            self.agreement += compare(answers, self.reference, engine)

    def give_up(self, ways: Iterable[str], reason: str) -> None:
        """Those of these ways that have no run get none, for this reason unless they have another."""
        for way in ways:
            if not self.ways[way]:
                self.why_not.setdefault(way, reason)

    def reason(self, way: str) -> str:
        """Why a way has no run."""
        return self.why_not.get(way, self.stopped)

    def reasons(self) -> list[str]:
        """Why nothing was measured, where nothing was."""
        return sorted({self.reason(way) for way in self.ways}) or [self.stopped]

    def median(self, way: str, metric: str) -> float | None:
        """Over the way's runs; None where it was not measured."""
        values = [run[metric] for run in self.ways.get(way, []) if metric in run]
        return float(np.median(values)) if values else None


class Bench:
    """The model, loaded once, and engines over it.

    Args:
        config: of the engine that is built; `renew` makes others over the same weights and pool.
        advance: called after each run that was measured or given up.

    Raises:
        InputError: the model is too slow for anything here.
        StartupError, EngineError: it can't be loaded, or a forward pass failed.
    """

    def __init__(self, config: EngineConfig, sizes: Sizes, seed: int, advance: Callable[[], object]) -> None:
        self.config = config
        self.sizes = sizes
        self.seed = seed
        self.advance = advance
        self.engine = build_engine(config)
        try:
            _prepare(self.engine, TimeBudget(WARM_UP_SECONDS))
        except OutOfTimeError as error:
            raise InputError(
                f"model is {config.model}; a first short request takes it over {WARM_UP_SECONDS:.0f} seconds here"
            ) from error

    @property
    def vocab_size(self) -> int:
        return self.engine.resolved.model.vocab_size

    def renew(self, **changes: Any) -> Engine:
        """An engine that has seen no request, over the same runner."""
        runner = _runner(self.engine)
        return _engine_over(dataclasses.replace(self.engine.resolved, **changes), runner)

    def with_block_size(self, block_size: int, budget: TimeBudget) -> Engine:
        """An engine whose pool, in blocks of another size, has room for all that runs at once.

        Raises:
            OutOfTimeError: the budget has ended.
        """
        resolved = self.engine.resolved
        if block_size == resolved.block_size:
            return self.renew()
        num_blocks = resolved.max_num_requests * -(-resolved.max_model_len // block_size)
        changed = dataclasses.replace(
            resolved,
            block_size=block_size,
            num_blocks=num_blocks,
            pool_bytes=num_blocks * block_size * resolved.kv_bytes_per_token,
        )
        engine = _engine_over(changed, _new_runner(changed, _runner(self.engine).decoder))
        _prepare(engine, budget)
        return engine


def _engine_over(resolved: ResolvedConfig, runner: ModelRunner) -> Engine:
    return Engine(resolved, runner, Sampler(runner.logits, runner.arg_max), seed=0)


def _new_runner(resolved: ResolvedConfig, decoder: Decoder) -> ModelRunner:
    """A decoder over a pool of its own."""
    device = torch.device(resolved.device)
    return ModelRunner(
        decoder,
        select_backend(resolved.backend, device),
        num_blocks=resolved.num_blocks,
        block_size=resolved.block_size,
        max_num_requests=resolved.max_num_requests,
        max_blocks=resolved.max_blocks,
        kv_dtype=TORCH_DTYPES[resolved.kv_dtype],
        device=device,
        host_slots=resolved.host_slots,
    )


def _runner(engine: Engine) -> ModelRunner:
    """Of an engine that was built here: its runner is always one over a model."""
    assert isinstance(engine.runner, ModelRunner)
    return engine.runner


def _prepare(engine: Engine, budget: TimeBudget) -> None:
    """Touch the pool's memory and run one request: neither is a cost of any way."""
    _runner(engine).fill_blocks(range(engine.resolved.num_blocks), 0.0)
    half = engine.resolved.max_model_len // 2
    serve(engine, [Ask("warm-up", [0] * min(32, half), min(4, half))], budget)
    engine.reset_prefix_cache()


def take_turns(
    part: Part, ways: Sequence[str], bench: Bench, seconds: float, run_once: Callable[[str, TimeBudget], None]
) -> None:
    """Measure the ways in turn, `repeats` rounds, within these seconds. Each round's order is drawn: what a way leaves
    behind, such as a warm processor, shall not always fall on the same one.

    A way's first run may take half as much again as an equal share of what is left; a later one starts only where the
    way's longest so far would still fit.
    """
    whole = TimeBudget(seconds)
    generator = np.random.default_rng(bench.seed)
    longest = dict.fromkeys(ways, 0.0)
    part.expect(ways)
    for repeat in range(bench.sizes.repeats):
        for index, chosen in enumerate(generator.permutation(len(ways)).tolist()):
            way = ways[chosen]
            share = whole.left if repeat else min(whole.left, 1.5 * whole.left / (len(ways) - index))
            if longest[way] < share:
                budget = TimeBudget(share)
                try:
                    run_once(way, budget)
                except OutOfTimeError:
                    longest[way] = float("inf")
                    part.why_not[way] = OUT_OF_TIME
                else:
                    longest[way] = max(longest[way], share - budget.left)
            bench.advance()
    part.give_up(ways, NO_TIME_LEFT)
