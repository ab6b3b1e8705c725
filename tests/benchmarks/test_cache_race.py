"""The ways that `pageframe bench kv-cache` compares, how they take turns, and how often each cell is run."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, permutations
from typing import Any, cast

import numpy as np
import pytest
import torch
from fakes.engines import tiny_config

from pageframe.benchmarks.experiments import cache_race
from pageframe.benchmarks.experiments.cache_memory import Held, Kind
from pageframe.benchmarks.experiments.cache_race import Course, run_race
from pageframe.benchmarks.experiments.cache_results import Grid, Lap, Race
from pageframe.benchmarks.experiments.cache_rounds import Rounds
from pageframe.benchmarks.experiments.cache_ways import (
    Blocks,
    ContiguousWay,
    GrownCache,
    Memory,
    NothingKept,
    PagedWay,
    ReservedCache,
    Tokens,
)
from pageframe.benchmarks.experiments.ties import LogitGap, Parting
from pageframe.kernels.attention import select_backend
from pageframe.kernels.cpu import CpuKernels
from pageframe.runtime.config import ModelConfig
from pageframe.runtime.engine import Engine
from pageframe.runtime.errors import EngineError
from pageframe.runtime.model_runner import ModelRunner
from pageframe.runtime.models.decoder import Decoder
from pageframe.runtime.sampler import Sampler

CPU = torch.device("cpu")


# ---- the ways -------------------------------------------------------------------------------------------------------


LAYERS_WITH_WINDOWS = ModelConfig(
    family="mistral",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    max_position=64,
    norm_eps=1e-5,
    rope_theta=1e4,
    windows=(5, None),
)


def contiguous(decoder: Decoder, kind: type[Memory], dtype: torch.dtype, backend: str = "reference") -> ContiguousWay:
    return ContiguousWay(
        decoder, select_backend(backend, CPU), Blocks(decoder.config, 16, dtype, CPU), kind, max_len=30
    )


def random_prompts(num_requests: int, length: int) -> Tokens:
    return np.random.default_rng(0).integers(0, 64, (num_requests, length))


def test_contiguous_ways_agree_where_layers_have_windows() -> None:
    decoder = Decoder.random(
        LAYERS_WITH_WINDOWS, storage_dtype=torch.float32, compute_dtype=torch.float32, device=CPU, seed=0
    )
    tokens = random_prompts(3, 9)
    ways = [contiguous(decoder, kind, torch.float32) for kind in (NothingKept, GrownCache, ReservedCache)]
    for way in ways:
        way.start(tokens, 20)
    for _ in range(20):
        made = [way.step(tokens) for way in ways]
        for way, own in zip(ways, made, strict=True):
            for request in range(3):
                assert way.logit_gap(request, int(made[0][request])).gap < 1e-3, f"{own} and {made[0]}"
        tokens = np.concatenate((tokens, made[0][:, None]), axis=1)
    assert len(np.unique(tokens[:, 9:])) > 3, "the model was to say different things"


class RecordingDecoder:
    """A decoder that keeps the bytes of the hidden states that it is asked to find tokens for."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.asked: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def arg_max(self, hidden: torch.Tensor) -> Any:
        self.asked.append(hidden.numpy().tobytes())
        return self._decoder.arg_max(hidden)


def test_in_compiled_kernels_all_four_ways_compute_the_same_bits(compiled_kernels: CpuKernels) -> None:
    decoder = Decoder.random(
        LAYERS_WITH_WINDOWS,
        storage_dtype=torch.bfloat16,
        compute_dtype=torch.float32,
        device=CPU,
        seed=0,
        kernels=compiled_kernels,
    )
    prompts = random_prompts(3, 9)
    seen = []
    for kind in (NothingKept, GrownCache, ReservedCache, None):
        recording = cast(Decoder, RecordingDecoder(decoder))
        way: Any = paged(recording) if kind is None else contiguous(recording, kind, torch.bfloat16, "cpu")
        tokens = prompts
        way.start(prompts, 20)
        for _ in range(20):
            tokens = np.concatenate((tokens, way.step(tokens)[:, None]), axis=1)
        way.end()
        seen.append((recording.asked, tokens.tolist()))
    assert len(seen[0][0]) == 20
    assert len(set(seen[0][0])) == 20
    for asked, tokens in seen[1:]:
        assert tokens == seen[0][1]
        assert asked == seen[0][0]


def paged(decoder: Decoder) -> PagedWay:
    resolved = tiny_config(
        num_blocks=30, max_num_requests=3, max_num_batched_tokens=128, max_model_len=40, prefix_cache=False
    )
    resolved = replace(resolved, model=decoder.config)
    runner = ModelRunner(
        decoder,
        select_backend("cpu", CPU),
        num_blocks=resolved.num_blocks,
        block_size=resolved.block_size,
        max_num_requests=resolved.max_num_requests,
        max_blocks=resolved.max_blocks,
        kv_dtype=torch.bfloat16,
        device=CPU,
    )
    return PagedWay(Engine(resolved, runner, Sampler(runner.logits, runner.arg_max)))


def test_a_failed_forward_pass_is_an_engine_error(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder.random(
        LAYERS_WITH_WINDOWS, storage_dtype=torch.float32, compute_dtype=torch.float32, device=CPU, seed=0
    )
    way = contiguous(decoder, ReservedCache, torch.float32)
    way.start(random_prompts(1, 4), 1)

    def fail(*_: object) -> torch.Tensor:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(decoder, "forward", fail)
    with pytest.raises(EngineError, match="the device is gone"):
        way.step(random_prompts(1, 4))


def test_a_step_of_bf16_is_the_distance_of_its_numbers() -> None:
    config = ModelConfig("llama", 8, 16, 16, 1, 2, 1, 8, 16, 1e-5, 1e4)
    decoder = Decoder.random(config, storage_dtype=torch.bfloat16, compute_dtype=torch.bfloat16, device=CPU, seed=0)
    way = contiguous(decoder, NothingKept, torch.bfloat16)
    way.start(np.array([[1, 2, 3]]), 1)
    best = int(way.step(np.array([[1, 2, 3]]))[0])
    gaps = [way.logit_gap(0, token) for token in range(8)]
    assert gaps[best].gap == 0
    assert math.log2(gaps[0].step) == int(math.log2(gaps[0].step))
    assert all(gap.gap == 0 or gap.gap >= gaps[0].step / 2 for gap in gaps), "the next binade's numbers are closer"


# ---- the race -------------------------------------------------------------------------------------------------------


class LengthTeller:
    """Says the length of each sequence, but what `lies` has for a (request, length)."""

    def __init__(
        self,
        lies: dict[tuple[int, int], int] | None = None,
        gap: float = 9.0,
        keeps: bool = True,
        stop_at: int = 999,
        log: Callable[[], object] = lambda: None,
    ) -> None:
        self.keeps = keeps
        self._log = log
        self.asked: list[int] = []
        self.open = False
        self._lies = lies or {}
        self._gap = gap
        self._stop_at = stop_at

    def start(self, prompts: Tokens, num_new_tokens: int) -> None:
        self.open = True

    def step(self, tokens: Tokens) -> Tokens:
        length = tokens.shape[1]
        if length == self._stop_at:
            raise KeyboardInterrupt
        self.asked.append(length)
        self._log()
        return np.array([self._lies.get((request, length), length) for request in range(len(tokens))])

    def logit_gap(self, request: int, token: int) -> LogitGap:
        return LogitGap(self._gap, 0.125)

    def held(self) -> Held:
        return Held(7, 5)

    def end(self) -> None:
        self.open = False


def raced(ways: dict[Kind, Any], num_new: int, seconds: float = 99.0, **changes: Any) -> dict[Kind, Lap]:
    laps = {kind: Lap() for kind in ways}
    course = Course(**{"prompts": np.zeros((2, 1), np.int64), "num_new": num_new, "checkpoints": (3,), **changes})
    run_race(ways, course, laps, dict.fromkeys(ways, seconds), random.Random(0), lambda: None)
    assert not any(way.open for way in ways.values())
    return laps


@pytest.mark.parametrize(
    ("gap", "parting"), [(0.01, Parting.TIE), (0.1, Parting.ONE_STEP), (0.125, Parting.ONE_STEP), (0.2, "different")]
)
def test_another_token_is_counted_and_what_follows_is_not_compared(gap: float, parting: Parting) -> None:
    ways = {Kind.PAGED: LengthTeller(), Kind.GROWN: LengthTeller({(1, 4): 50}, gap)}
    lap = raced(ways, 10, sampled=False, tolerance=0.05)[Kind.GROWN]
    assert lap.parted == {parting: 1}
    assert lap.compared == 10 + 4, "the second request's first three tokens and the other one"
    assert lap.held == {3: Held(7, 5)}


def test_a_way_that_keeps_nothing_follows_the_others_at_some_lengths() -> None:
    ways = {Kind.NOTHING: LengthTeller(keeps=False), Kind.PAGED: LengthTeller({(0, 5): 50})}
    lap = raced(ways, 30, sampled=True, tolerance=0.05, checkpoints=(21,))[Kind.NOTHING]
    assert ways[Kind.NOTHING].asked == [*range(1, 9), 10, 11, 13, 16, 19, 21, 23, 27, 30]
    assert (lap.compared, lap.parted) == (2 * 17, {Parting.DIFFERENT: 1}), "the others' tokens before are its own"
    assert len(lap.totals()) == 30
    assert lap.is_whole(8)
    assert not lap.is_whole(10)


def test_a_way_without_time_left_stops_alone() -> None:
    ways = {Kind.PAGED: LengthTeller(), Kind.GROWN: LengthTeller()}
    laps = {kind: Lap() for kind in ways}
    course = Course(np.zeros((1, 1), np.int64), 5, (), False, 0.0)
    laps[Kind.GROWN].spent = 7.0
    run_race(ways, course, laps, {Kind.PAGED: 99.0, Kind.GROWN: 7.0}, random.Random(0), lambda: None)
    assert (laps[Kind.PAGED].last, laps[Kind.GROWN].last) == (5, 0)
    assert laps[Kind.GROWN].total(1) is None


def test_an_interrupted_race_leaves_what_was_measured() -> None:
    ways = {Kind.PAGED: LengthTeller(stop_at=4), Kind.GROWN: LengthTeller()}
    laps = {kind: Lap() for kind in ways}
    course = Course(np.zeros((1, 1), np.int64), 9, (), False, 0.0)
    with pytest.raises(KeyboardInterrupt):
        run_race(ways, course, laps, dict.fromkeys(ways, 9.0), random.Random(0), lambda: None)
    assert laps[Kind.PAGED].last == 3
    assert not any(way.open for way in ways.values())


def test_every_order_of_the_ways_comes_equally_often_and_again_with_the_same_seed() -> None:
    def orders(seed: int) -> list[tuple[Kind, ...]]:
        calls: list[Kind] = []
        kinds = (Kind.GROWN, Kind.RESERVED, Kind.PAGED)
        ways = {kind: LengthTeller(log=lambda kind=kind: calls.append(kind)) for kind in kinds}
        course = Course(np.zeros((1, 1), np.int64), 600, (), False, 0.0)
        laps = {kind: Lap() for kind in ways}
        run_race(ways, course, laps, dict.fromkeys(ways, 99.0), random.Random(seed), lambda: None)
        return list(zip(calls[::3], calls[1::3], calls[2::3], strict=True))

    drawn = orders(0)
    counts = Counter(drawn)
    assert counts.keys() == set(permutations((Kind.GROWN, Kind.RESERVED, Kind.PAGED)))
    assert all(60 < count < 140 for count in counts.values()), "about 100 each"
    assert len({(before, after) for before, after in pairwise(drawn)}) == 36, "no order follows from the one before"
    assert orders(0) == drawn
    assert orders(1) != drawn


# ---- rounds ---------------------------------------------------------------------------------------------------------


class Slow:
    """A way whose every token takes `seconds` by a clock that only the ways move."""

    keeps = True

    def __init__(self, clock: list[float], seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds

    def start(self, prompts: Tokens, num_new_tokens: int) -> None: ...

    def step(self, tokens: Tokens) -> Tokens:
        self._clock[0] += self._seconds
        return np.zeros(len(tokens), np.int64)

    def held(self) -> Held:
        return Held(7, 5)

    def end(self) -> None: ...


def runs_of(
    monkeypatch: pytest.MonkeyPatch, seconds: float, *, new_tokens: tuple[int, ...], budget: float, repeats: int = 3
) -> list[list[int]]:
    """By race, the runs of each number of new tokens, where a token takes so many seconds."""
    clock = [0.0]
    monkeypatch.setattr(cache_race.time, "perf_counter", lambda: clock[0])
    grid = Grid(new_tokens, (1, 2), 1, 99, budget, all_tokens=False, repeats=repeats)
    races = [Race(1), Race(2)]
    ways = {Kind.PAGED: Slow(clock, seconds)}
    Rounds(ways, np.zeros((2, 1), np.int64), grid, 0.0, lambda: None).run(races)
    return [[race.laps[Kind.PAGED].runs(length) for length in new_tokens] for race in races]


def test_quick_cells_are_run_three_times_first_and_the_long_ones_while_there_is_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # 0.125 s a token: 8 take 1 s, which is quick, 128 take 16 s. Two races take 2 (3 + 16) s until all is run once.
    assert runs_of(monkeypatch, 0.125, new_tokens=(8, 128), budget=80.0) == [[6, 2], [6, 2]]
    assert runs_of(monkeypatch, 0.125, new_tokens=(8, 128), budget=999.0) == [[6, 3], [6, 3]]
    assert runs_of(monkeypatch, 0.125, new_tokens=(8, 128), budget=999.0, repeats=1) == [[2, 1], [2, 1]]
    # What is left after that, 5 s for each race, is not enough for another long run, but for a short one.
    assert runs_of(monkeypatch, 0.125, new_tokens=(8, 128), budget=48.0) == [[5, 1], [5, 1]]


def test_quick_cells_are_not_repeated_where_the_longest_would_then_not_be_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert runs_of(monkeypatch, 0.125, new_tokens=(8, 32), budget=10.0) == [[2, 1], [2, 1]]


def test_every_cell_is_run_once_before_one_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # 1 s a token: no cell is quick after the first is known; both races' 16 tokens take 32 s and a first run of 4.
    first, second = runs_of(monkeypatch, 1.0, new_tokens=(4, 16), budget=50.0)
    assert (first[1], second[1]) == (1, 1)
