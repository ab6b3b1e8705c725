"""`pageframe bench kv-cache`: the same tokens in four ways, memory by formula and by tensor, and what it says."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pageframe.api.cli import main
from pageframe.benchmarks.experiments import cache_report
from pageframe.benchmarks.experiments.cache_memory import Held, Kind, KvShape
from pageframe.benchmarks.experiments.cache_race import Course, run_race
from pageframe.benchmarks.experiments.cache_results import Lap, Race, Results
from pageframe.benchmarks.experiments.cache_ways import (
    ContiguousWay,
    GrownCache,
    LogitGap,
    NothingKept,
    PagedWay,
    ReservedCache,
    Tokens,
)
from pageframe.benchmarks.experiments.growth import fit_growth, log_slope, running_totals
from pageframe.runtime.config import ModelConfig
from pageframe.runtime.models.decoder import Decoder

from .tiny_models import save_tiny_model

CPU = torch.device("cpu")
SIZES = ("--requests", "1", "3", "--new-tokens", "3", "30", "--prompt-len", "7", "--dtype", "float32")


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(autouse=True)
def one_thread_and_a_wide_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A tiny model's operations are too small to share out among threads, above all on a busy machine."""
    threads = torch.get_num_threads()
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    monkeypatch.setenv("COLUMNS", "160")
    yield
    torch.set_num_threads(threads)


def bench(model: str, *flags: str) -> int:
    return main(["bench", "kv-cache", "--model", model, *(() if "--plot" in flags else ("--no-plot",)), *flags])


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("all_tokens", [(), ("--all-tokens",)])
def test_all_ways_make_the_same_tokens_and_take_the_memory_of_the_formula(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], all_tokens: tuple[str, ...]
) -> None:
    files = ("--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.png"))
    assert bench(tiny_model, *SIZES, *all_tokens, "--max-len", "64", *files) == 0
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((tmp_path / "r.json").read_text())
    assert not results["partial"]
    for race in results["races"]:
        for kind, way in race["ways"].items():
            assert way["tokens"]["different"] == way["tokens"]["one_step"] == 0
            assert way["bytes_of_tensors"] == way["bytes"], kind
            assert way["bytes"]["30"]["used"] == (0 if kind == "no cache" else race["requests"] * 36 * 768)
            times = way["seconds_of_token"]
            assert {len(times[token]) for token in ("1", "2", "3")} == {3}, "three runs to the shortest"
            every = kind != "no cache" or all_tokens
            assert len(times) == 30 if every else 8 < len(times) < 20
            if kind != "paged":
                # Two repeats of 3 tokens, and the long run; at a tie, which is rare, the rest is not compared.
                assert way["tokens"]["ties"] or way["tokens"]["compared"] == race["requests"] * (len(times) + 2 * 3)
        assert race["ways"]["paged"]["tokens"]["compared"] == 0
    out = capsys.readouterr().out
    assert "Does the advantage of a paged cache grow with length? With 1 request" in out
    assert "times as fast as no cache at 3 new tokens and" in out
    assert "not measured" not in out


def test_a_prompt_of_whole_blocks_has_room_for_its_first_token(tiny_model: str, tmp_path: Path) -> None:
    sizes = ("--requests", "2", "--new-tokens", "1", "17", "--prompt-len", "16", "--dtype", "float32")
    assert bench(tiny_model, *sizes, "--json", str(tmp_path / "r.json")) == 0
    (race,) = json.loads((tmp_path / "r.json").read_text())["races"]
    paged = race["ways"]["paged"]
    assert paged["bytes_of_tensors"] == paged["bytes"]
    assert paged["bytes"]["1"] == {"reserved": 2 * 32 * 768, "used": 2 * 16 * 768}
    assert paged["bytes"]["17"] == {"reserved": 2 * 32 * 768, "used": 2 * 32 * 768}


def test_different_tokens_are_a_failure(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = ContiguousWay.step

    def worst_at_the_end(self: ContiguousWay, tokens: Tokens) -> Tokens:
        made = step(self, tokens)
        if self.keeps and tokens.shape == (1, 20):
            made[0] = int(self._logits[0].argmin())
        return made

    def gap(self: ContiguousWay, request: int, token: int) -> LogitGap:
        return LogitGap(9.0, 0.125)

    monkeypatch.setattr(ContiguousWay, "step", worst_at_the_end)
    monkeypatch.setattr(ContiguousWay, "logit_gap", gap)
    assert bench(tiny_model, *SIZES, "--json", str(tmp_path / "r.json")) == 1
    out = capsys.readouterr().out
    assert "The ways do NOT make the same tokens: 2 differ where the logits are no tie (concatenated, reserved" in out
    races = json.loads((tmp_path / "r.json").read_text())["races"]
    assert races[0]["ways"]["concatenated"]["tokens"]["different"] == 1


def test_what_does_not_fit_the_time_is_not_measured(tiny_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(tiny_model, *SIZES, "--budget", "0.000001") == 0
    out = capsys.readouterr().out
    assert "grow with length? It was not measured." in out
    assert out.count("not measured") > 16


def test_an_interrupt_keeps_what_was_measured(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = PagedWay.step

    def step_until_interrupted(self: PagedWay, tokens: Tokens) -> Tokens:
        if tokens.shape == (3, 20):
            raise KeyboardInterrupt
        return step(self, tokens)

    monkeypatch.setattr(PagedWay, "step", step_until_interrupted)
    assert bench(tiny_model, *SIZES, "--json", str(tmp_path / "r.json")) == 130
    results = json.loads((tmp_path / "r.json").read_text())
    assert results["partial"]
    one, three = (race["ways"]["paged"]["total_seconds"] for race in results["races"])
    assert one["30"] > one["3"] > 0
    assert three["3"] > 0
    assert three["30"] is None
    out = capsys.readouterr().out
    assert "partial" in out
    assert "not measured" in out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--new-tokens", "16", "250"), "new-tokens is 250; behind a prompt of 37 tokens this model has room for 218"),
        (("--new-tokens", "16", "--max-len", "47"), "max-len is 47; it must be from 53, the longest request, to 256"),
        (("--new-tokens", "16", "--max-len", "257"), "max-len is 257; it must be from 53, the longest request, to 256"),
        (("--new-tokens", "16", "--memory", "much"), "memory is 'much' is not a size"),
        (("--new-tokens", "16", "--requests", "99999999"), "requests is 99999999; so many requests of 53 tokens take"),
        (("--new-tokens", "16", "--plot", "nowhere/r.png"), "plot is nowhere/r.png; there is no folder nowhere"),
        (("--new-tokens", "16", "--plot", "r.txt"), "plot is r.txt; its name must end in one of .png, .svg, .pdf"),
        (("--new-tokens", "16", "--json", "."), "json is .; that is a folder, not a file"),
    ],
)
def test_bad_input_is_one_line(
    tiny_model: str, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], said: str
) -> None:
    assert bench(tiny_model, *flags) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("flags", [("--new-tokens", "0"), ("--requests", "x"), ("--budget", "nan"), ("--budget", "-1")])
def test_a_flag_that_is_no_size_is_refused(flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench("default", *flags)
    assert f"{flags[1]!r} is not a" in capsys.readouterr().err


def test_help_names_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["bench", "kv-cache", "--help"])
    out = capsys.readouterr().out
    assert all(
        flag in out for flag in ("--new-tokens", "--requests", "--prompt-len", "--memory", "--budget", "--quick")
    )


# ---- the ways -------------------------------------------------------------------------------------------------------


def test_contiguous_ways_agree_where_layers_have_windows() -> None:
    config = ModelConfig(
        family="mistral",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position=64,
        norm_eps=1e-5,
        rope_theta=1e4,
        windows=(5, None),
    )
    decoder = Decoder.random(config, storage_dtype=torch.float32, compute_dtype=torch.float32, device=CPU, seed=0)
    prompts = np.random.default_rng(0).integers(0, 64, (3, 9))
    ways = [
        ContiguousWay(decoder, kind, dtype=torch.float32, device=CPU, max_len=30)
        for kind in (NothingKept, GrownCache, ReservedCache)
    ]
    for way in ways:
        way.start(prompts, 20)
    tokens = prompts
    for _ in range(20):
        made = [way.step(tokens) for way in ways]
        for way, own in zip(ways, made, strict=True):
            for request in range(3):
                assert way.logit_gap(request, int(made[0][request])).gap < 1e-3, f"{own} and {made[0]}"
        tokens = np.concatenate((tokens, made[0][:, None]), axis=1)
    assert len(np.unique(tokens[:, 9:])) > 3, "the model was to say different things"


def test_a_step_of_bf16_is_the_distance_of_its_numbers() -> None:
    config = ModelConfig("llama", 8, 16, 16, 1, 2, 1, 8, 16, 1e-5, 1e4)
    decoder = Decoder.random(config, storage_dtype=torch.bfloat16, compute_dtype=torch.bfloat16, device=CPU, seed=0)
    way = ContiguousWay(decoder, NothingKept, dtype=torch.bfloat16, device=CPU, max_len=8)
    way.start(np.array([[1, 2, 3]]), 1)
    best = int(way.step(np.array([[1, 2, 3]]))[0])
    gaps = [way.logit_gap(0, token) for token in range(8)]
    assert gaps[best].gap == 0
    assert math.log2(gaps[0].step) == int(math.log2(gaps[0].step))
    assert all(gap.gap == 0 or gap.gap >= gaps[0].step / 2 for gap in gaps), "the next binade's numbers are closer"


# ---- the race -------------------------------------------------------------------------------------------------------


class Counter:
    """Says the length of each sequence, but what `lies` has for a (request, length)."""

    def __init__(
        self, lies: dict[tuple[int, int], int] | None = None, gap: float = 9.0, keeps: bool = True, stop_at: int = 99
    ) -> None:
        self.keeps = keeps
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
    run_race(ways, course, laps, dict.fromkeys(ways, seconds), lambda: None)
    assert not any(way.open for way in ways.values())
    return laps


@pytest.mark.parametrize(("gap", "field"), [(0.01, "ties"), (0.1, "one_step"), (0.2, "different")])
def test_another_token_is_counted_and_what_follows_is_not_compared(gap: float, field: str) -> None:
    ways = {Kind.PAGED: Counter(), Kind.GROWN: Counter({(1, 4): 50}, gap)}
    lap = raced(ways, 10, sampled=False, tolerance=0.05)[Kind.GROWN]
    assert {name: getattr(lap, name) for name in ("ties", "one_step", "different")} == {
        "ties": 0,
        "one_step": 0,
        "different": 0,
        field: 1,
    }
    assert lap.compared == 10 + 4, "the second request's first three tokens and the other one"
    assert lap.held == {3: Held(7, 5)}


def test_a_way_that_keeps_nothing_follows_the_others_at_some_lengths() -> None:
    ways = {Kind.NOTHING: Counter(keeps=False), Kind.PAGED: Counter({(0, 5): 50})}
    lap = raced(ways, 30, sampled=True, tolerance=0.05, checkpoints=(21,))[Kind.NOTHING]
    assert ways[Kind.NOTHING].asked == [*range(1, 9), 10, 11, 13, 16, 19, 21, 23, 27, 30]
    assert (lap.compared, lap.different) == (2 * 17, 1), "the others' tokens before are its own"
    assert len(lap.totals()) == 30
    assert lap.is_whole(8)
    assert not lap.is_whole(10)


def test_a_way_without_time_left_stops_alone() -> None:
    ways = {Kind.PAGED: Counter(), Kind.GROWN: Counter()}
    laps = {kind: Lap() for kind in ways}
    course = Course(np.zeros((1, 1), np.int64), 5, (), False, 0.0)
    laps[Kind.GROWN].spent = 7.0
    run_race(ways, course, laps, {Kind.PAGED: 99.0, Kind.GROWN: 7.0}, lambda: None)
    assert (laps[Kind.PAGED].last, laps[Kind.GROWN].last) == (5, 0)
    assert laps[Kind.GROWN].total(1) is None


def test_an_interrupted_race_leaves_what_was_measured() -> None:
    ways = {Kind.PAGED: Counter(stop_at=4), Kind.GROWN: Counter()}
    laps = {kind: Lap() for kind in ways}
    with pytest.raises(KeyboardInterrupt):
        run_race(
            ways, Course(np.zeros((1, 1), np.int64), 9, (), False, 0.0), laps, dict.fromkeys(ways, 9.0), lambda: None
        )
    assert laps[Kind.PAGED].last == 3
    assert not any(way.open for way in ways.values())


# ---- formulas -------------------------------------------------------------------------------------------------------


def test_memory_by_hand() -> None:
    shape = KvShape(token_bytes=10, num_layers=2, block_size=4, max_len=20)
    held = {kind: shape.held(kind, num_requests=3, prompt_len=5, num_new=4) for kind in Kind}
    # Each of 3 requests has K and V of 8 tokens; the last of the 4 new ones has none yet.
    assert held[Kind.NOTHING] == Held(0, 0)
    assert held[Kind.GROWN] == Held(240 + 3 * 7 * 5, 240)
    assert held[Kind.RESERVED] == Held(600, 240)
    assert held[Kind.PAGED] == Held(240, 240)
    assert shape.held(Kind.PAGED, 3, 5, 5) == Held(360, 270)
    assert shape.held(Kind.PAGED, 3, 8, 1) == Held(360, 240), "a block more for the first token"
    assert shape.held(Kind.GROWN, 1, 5, 1) == Held(50, 50)
    assert (held[Kind.RESERVED].wasted, held[Kind.RESERVED].waste_share) == (360, 0.6)
    fits = {kind: shape.requests_that_fit(kind, 1000, 5, 5) for kind in Kind}
    assert fits == {Kind.NOTHING: None, Kind.GROWN: 1000 // 130, Kind.RESERVED: 5, Kind.PAGED: 8}


def test_tensors_that_differ_from_the_formula_are_an_error() -> None:
    results = Results(5, (4,), 1000, KvShape(10, 2, 4, 20), [Race(3)])
    results.races[0].laps[Kind.PAGED].held[4] = Held(240, 230)
    with pytest.raises(AssertionError, match="paged, 4 tokens"):
        results.held(Kind.PAGED, results.races[0], 4)


@pytest.mark.parametrize("terms", [(3e-2, 2e-5, 4e-8), (1e-2, 0.0, 0.0), (0.0, 5e-4, 0.0), (1e-2, 0.0, 1e-7)])
def test_a_polynomial_is_found_again(terms: tuple[float, float, float]) -> None:
    total = [sum(term * n**power for power, term in enumerate(terms, 1)) for n in range(301)]
    seconds = {n: total[n] - total[n - 1] for n in range(1, 301)} | {1: 9.0}
    growth = fit_growth(seconds, 3)
    assert (growth.linear, growth.quadratic, growth.cubic) == pytest.approx(terms, rel=1e-6, abs=1e-12)
    assert growth.seconds(200) == pytest.approx(total[200])


def test_no_term_is_below_zero() -> None:
    growth = fit_growth({n: 1.0 - n * 1e-3 for n in range(1, 100)}, 3)
    assert growth.linear > 0
    assert (growth.quadratic, growth.cubic) == (0, 0)
    with pytest.raises(ValueError, match="1 times are too few to fit 2 terms"):
        fit_growth({1: 1.0, 2: 1.0}, 2)


def test_slope_and_totals() -> None:
    assert log_slope((256, 1.0), (1024, 16.0)) == pytest.approx(2)
    assert running_totals({1: 5.0, 2: 1.0, 5: 4.0}, 5) == [5, 6, 8, 11, 15]


# ---- words ----------------------------------------------------------------------------------------------------------


def test_words_are_computed_and_say_what_is_missing() -> None:
    results = Results(32, (16, 64, 256), 2**30, KvShape(23_040, 30, 16, 288), [Race(1), Race(8), Race(32)])
    for race, seconds, last in ((results.races[0], 0.1, 256), (results.races[1], 0.02, 64)):
        race.laps[Kind.NOTHING].seconds = {token: [seconds * token] for token in range(1, last + 1)}
        race.laps[Kind.PAGED].seconds = {token: [0.1] for token in range(1, 257)}
    growing, powers, memory = cache_report.sentences(results)
    # Sums of 0.1 k against 0.1 n: (n + 1) / 2.
    assert "With 1 request yes: it is 8.5 times as fast as no cache at 16 new tokens and 128.5 times at 256." in growing
    assert (
        "With 8 requests yes: it is 1.7 times as fast as no cache at 16 new tokens and 6.5 times at 64 (256 was not m"
        in growing
    )
    assert "32 requests" not in growing
    assert "the power 1.99 without a cache and 1.00 with a paged one" in powers
    # 288 tokens of 23,040 bytes are reserved for 47 tokens; 47 tokens are in 3 blocks of 16.
    assert "reserved for 288 tokens wastes 83.7% of what it reserves, and 161 requests fit in 1.00 GiB" in memory
    assert "a paged one wastes 2.1% of what it reserves, and 970 requests fit" in memory
