"""`pageframe bench kv-cache`: the same tokens in four ways, memory by formula and by tensor, and what it says."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from pageframe.api.cli import main
from pageframe.benchmarks.experiments import cache_report, kv_cache
from pageframe.benchmarks.experiments.cache_memory import Held, Kind, KvShape
from pageframe.benchmarks.experiments.cache_results import Race, Results
from pageframe.benchmarks.experiments.cache_ways import (
    ContiguousWay,
    PagedWay,
    Tokens,
)
from pageframe.benchmarks.experiments.growth import Growth, fit_growth, log_slope, running_totals
from pageframe.benchmarks.experiments.ties import LogitGap, Parting
from pageframe.runtime.model_runner import ModelRunner

from .tiny_models import save_tiny_model

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
            assert {len(times[token]) for token in ("1", "2", "3")} == {6}, "three runs to each length, all quick"
            assert way["runs"] == {"3": 6, "30": 3}
            every = kind != "no cache" or all_tokens
            assert len(times) == 30 if every else 8 < len(times) < 20
            if kind != "paged":
                # Three runs to 3 and to 30 tokens; at a tie, which is rare, the rest is not compared.
                assert way["tokens"]["ties"] or way["tokens"]["compared"] == race["requests"] * 3 * (len(times) + 3)
        assert race["ways"]["paged"]["tokens"]["compared"] == 0
    out = capsys.readouterr().out
    assert "Does the advantage of a paged cache grow with length? With 1 request" in out
    assert "times as fast as no cache at 3 new tokens and" in out
    assert "not measured" not in out


@pytest.mark.parametrize(
    ("kind", "dtype", "shape"),
    [
        ("GPT2", "float32", {"bos_token_id": 0, "eos_token_id": 0, "num_key_value_heads": 4}),
        ("GPT2", "bf16", {"bos_token_id": 0, "eos_token_id": 0, "num_attention_heads": 2}),
        ("Llama", "bf16", {"head_dim": 32}),
    ],
)
def test_the_ways_agree_in_other_families_and_types(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, dtype: str, shape: dict[str, int]
) -> None:
    model = str(save_tiny_model(tmp_path / "model", kind, **shape))
    sizes = ("--requests", "3", "--new-tokens", "2", "30", "--prompt-len", "7", "--dtype", dtype)
    assert bench(model, *sizes, "--json", str(tmp_path / "r.json")) == 0
    results = json.loads((tmp_path / "r.json").read_text())
    ways = results["races"][0]["ways"]
    assert ways["reserved whole"]["tokens"]["compared"] > 90
    assert all(way["bytes_of_tensors"] == way["bytes"] for way in ways.values())
    if results["same_bits"]:
        assert all(way["tokens"]["ties"] == way["tokens"]["one_step"] == 0 for way in ways.values())
        assert "the compiled kernels give the same bits in all four ways" in capsys.readouterr().out


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

    def another_one_in_the_middle(self: ContiguousWay, tokens: Tokens) -> Tokens:
        made = step(self, tokens)
        if self.keeps and tokens.shape == (1, 20):
            made[0] = (made[0] + 1) % 64
        return made

    def gap(self: ContiguousWay, request: int, token: int) -> LogitGap:
        return LogitGap(9.0, 0.125)

    monkeypatch.setattr(ContiguousWay, "step", another_one_in_the_middle)
    monkeypatch.setattr(ContiguousWay, "logit_gap", gap)
    assert bench(tiny_model, *SIZES, "--json", str(tmp_path / "r.json")) == 1
    out = capsys.readouterr().out
    assert "The ways do NOT make the same tokens: 6 differ where the logits are no tie (concatenated, reserved" in out
    races = json.loads((tmp_path / "r.json").read_text())["races"]
    assert races[0]["ways"]["concatenated"]["tokens"]["different"] == 3, "in each of three runs"


def test_what_does_not_fit_the_time_is_not_measured(tiny_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(tiny_model, *SIZES, "--budget", "0.000001") == 0
    out = capsys.readouterr().out
    assert "grow with length? It was not measured." in out
    assert "not measured: the way's time (--budget) was up." in out
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
    one, three = (race["ways"]["paged"] for race in results["races"])
    assert one["total_seconds"]["30"] > one["total_seconds"]["3"] > 0
    assert three["total_seconds"]["3"] > 0
    assert three["total_seconds"]["30"] is None
    assert (one["runs"]["30"], three["runs"]) == (3, {"3": 4, "30": 0})
    out = capsys.readouterr().out
    assert "partial" in out
    assert "not measured" in out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--new-tokens", "16", "250"), "new-tokens is 250; this model has room for 218 behind a prompt of 37 tokens"),
        (("--new-tokens", "16", "--max-len", "47"), "max-len is 47; it must be from 53, the longest request, to 256"),
        (("--new-tokens", "16", "--max-len", "257"), "max-len is 257; it must be from 53, the longest request, to 256"),
        (("--new-tokens", "16", "--memory", "much"), "memory is 'much' is not a size"),
        (("--prompt-len", "255"), "prompt-len is 255; it must be from 1 to 254"),
        (("--requests", "1025"), "requests is 1025; it must be from 1 to 1024"),
        (("--repeats", "1000000000"), "repeats is 1000000000; it must be from 1 to 1000"),
        (("--budget", "1e300"), "budget is 1e+300; it must be from 0 to 86400"),
        (("--model", "no/such/model"), "model 'no/such/model' is not 'default'"),
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


def test_more_requests_than_memory_holds_are_refused(
    tiny_model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "free_memory", lambda: 1024)
    assert bench(tiny_model, "--requests", "8") == 2
    assert "requests is 8; so many requests of 101 tokens take" in capsys.readouterr().err


def test_defaults_that_a_small_model_has_no_room_for_are_left_out_and_said(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(tiny_model, "--requests", "1", "--repeats", "1", "--json", str(tmp_path / "r.json")) == 0
    assert json.loads((tmp_path / "r.json").read_text())["new_tokens"] == [16, 64]
    said = "new-tokens: 256, 1,024 left out; this model has room for 218 behind a prompt of 37 tokens."
    assert said in capsys.readouterr().out


def test_a_model_with_room_for_no_default_gets_the_longest_that_fits(tmp_path: Path) -> None:
    model = str(save_tiny_model(tmp_path / "model", max_position_embeddings=24))
    assert bench(model, "--requests", "1", "--repeats", "1", "--json", str(tmp_path / "r.json")) == 0
    results = json.loads((tmp_path / "r.json").read_text())
    assert (results["prompt_len"], results["new_tokens"]) == (12, [11])


def test_a_failed_forward_pass_is_one_line_and_no_traceback(
    tiny_model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: ModelRunner, batch: object) -> torch.Tensor:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(ModelRunner, "forward", fail)
    assert bench(tiny_model, *SIZES) == 1
    assert "the device is gone" in capsys.readouterr().err.splitlines()[-1]


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


# ---- formulas -------------------------------------------------------------------------------------------------------


def test_memory_by_hand() -> None:
    shape = KvShape(token_bytes=10, num_layers=2, block_size=4, max_len=20)
    held = {kind: shape.held(kind, num_requests=3, prompt_len=5, num_new=4) for kind in Kind}
    # Each of 3 requests has K and V of 8 tokens; the last of the 4 new ones has none yet.
    assert held[Kind.NOTHING] == Held(0, 0)
    assert held[Kind.GROWN] == Held(240 + 3 * 8 * 5, 240), "7 tokens, which are being copied, take two blocks as well"
    assert held[Kind.RESERVED] == Held(600, 240)
    assert held[Kind.PAGED] == Held(240, 240)
    assert shape.held(Kind.PAGED, 3, 5, 5) == Held(360, 270)
    assert shape.held(Kind.PAGED, 3, 8, 1) == Held(360, 240), "a block more for the first token"
    assert shape.held(Kind.GROWN, 1, 5, 1) == Held(80, 50)
    assert shape.held(Kind.GROWN, 1, 5, 5) == Held(120 + 40, 90)
    assert replace(shape, max_len=21).held(Kind.RESERVED, 1, 5, 1) == Held(240, 50)
    assert (held[Kind.RESERVED].wasted, held[Kind.RESERVED].waste_share) == (360, 0.6)
    fits = {kind: shape.requests_that_fit(kind, 1000, 5, 5) for kind in Kind}
    assert fits == {Kind.NOTHING: None, Kind.GROWN: 1000 // 160, Kind.RESERVED: 5, Kind.PAGED: 8}


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


def test_faster_than_the_square_from_where_the_cube_outweighs_the_linear_part() -> None:
    growth = Growth(linear=0.01, quadratic=2e-5, cubic=1e-8)
    assert growth.square_passed_at == pytest.approx(1000)
    slopes = [log_slope((n, growth.seconds(n)), (n + 1, growth.seconds(n + 1))) for n in (990, 1010)]
    assert slopes[0] < 2 < slopes[1]
    assert Growth(linear=0.01, quadratic=2e-5, cubic=0.0).square_passed_at is None


@pytest.mark.parametrize(("last", "beyond"), [(300, ", beyond the 300 measured"), (2000, "")])
def test_the_cubic_part_is_told_in_words(last: int, beyond: str) -> None:
    results = Results(32, (16, last), 2**30, KvShape(23_040, 30, 16, last), [Race(1)])
    total = [0.01 * n + 1e-8 * n**3 for n in range(last + 1)]
    results.races[0].laps[Kind.NOTHING].seconds = {n: [total[n] - total[n - 1]] for n in range(1, last + 1)}
    (cubic,) = (words for words in cache_report.sentences(results) if "cube" in words)
    assert f"{1e-8 * last**3 / total[last]:.0%} at {last:,} as fitted: from 1,000 tokens on{beyond} it grows" in cubic


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


def test_ties_and_steps_are_said_apart_with_their_counts() -> None:
    results = Results(32, (16,), 2**30, KvShape(23_040, 30, 16, 48), [Race(1)], tolerance=0.05)
    lap = results.races[0].laps[Kind.GROWN]
    lap.compared, lap.parted = 900, Counter({Parting.TIE: 3, Parting.ONE_STEP: 2})
    ties, steps, *_ = cache_report.sentences(results)
    assert ties.startswith("At ties: 3 of 900 tokens compared are another one whose logit is within 0.05 of the best")
    assert steps.startswith(
        "A step below: 2 of 900 tokens compared are another one whose logit is more than a tie's 0.05"
    )
    console = Console(width=200)
    with console.capture() as capture:
        cache_report.print_report(console, results, partial=False)
    assert "895 same, 3 at ties, 2 a step below" in capture.get()
    assert results.as_json()["races"][0]["ways"]["concatenated"]["tokens"] == {
        "compared": 900,
        "ties": 3,
        "one_step": 2,
        "different": 0,
    }


def test_equal_tokens_of_compiled_kernels_are_equal_bits() -> None:
    results = Results(32, (16,), 2**30, KvShape(23_040, 30, 16, 48), [Race(1)], same_bits=True)
    results.races[0].laps[Kind.GROWN].compared = 900
    assert "All 900 tokens compared are the same" in next(cache_report.sentences(results))
    results.races[0].laps[Kind.GROWN].parted[Parting.DIFFERENT] = 1
    assert not any("same bits" in sentence for sentence in cache_report.sentences(results))


def test_each_time_says_of_how_many_runs_it_is_the_median() -> None:
    results = Results(32, (1, 2), 2**30, KvShape(23_040, 30, 16, 48), [Race(1)])
    results.races[0].laps[Kind.PAGED].seconds = {1: [0.5, 0.25, 9.0], 2: [0.25, 0.75]}
    console = Console(width=200)
    with console.capture() as capture:
        cache_report.print_report(console, results, partial=False)
    assert "0.50 s (500.0), n=3" in capture.get()
    assert "1.00 s (500.0), n=2" in capture.get()


def test_words_are_computed_and_say_what_is_missing() -> None:
    results = Results(32, (16, 64, 256), 2**30, KvShape(23_040, 30, 16, 288), [Race(1), Race(8), Race(32)])
    for race, seconds, last in ((results.races[0], 0.1, 256), (results.races[1], 0.02, 64)):
        race.laps[Kind.NOTHING].seconds = {token: [seconds * token] for token in range(1, last + 1)}
        race.laps[Kind.PAGED].seconds = {token: [0.1] for token in range(1, 257)}
    growing, powers, memory = cache_report.sentences(results)  # no part of it grows with the cube
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
