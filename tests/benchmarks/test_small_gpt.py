"""The experiment on a small GPT, with tiny models."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pageframe.benchmarks.experiments import small_gpt, small_gpt_report, small_gpt_results, train_char_gpt
from pageframe.benchmarks.experiments.small_gpt_results import Results, Run
from pageframe.benchmarks.experiments.small_gpt_ways import TEMPERATURE, Recomputed
from pageframe.runtime.model_runner import ModelRunner
from pageframe.runtime.models.source import resolve_source
from pageframe.runtime.philox import choice_seed, gumbel, token_words
from pageframe.runtime.tokenizer import load_tokenizer

from .char_gpts import CONTEXT, hf_logits, train


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of some steps."""
    folder = tmp_path_factory.mktemp("small-gpt")
    assert train(folder, "--steps", "30", "--validate-every", "10", "--learning-rate", "0.01") == 0
    return folder / "model"


@pytest.mark.parametrize("module", [train_char_gpt, small_gpt])
def test_help(module: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        module.main(["--help"])
    assert ended.value.code == 0
    assert "--seed" in capsys.readouterr().out


def test_the_experiment_writes_one_text_in_both_ways(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Into the context and past it; each token is the one that transformers' logits and the seed's noise give."""
    monkeypatch.setattr(small_gpt_results, "TARGET_RATIO", 0.0)  # such a model's context is too short to gain from
    plot, raw = tmp_path / "plot.png", tmp_path / "raw.json"
    status = small_gpt.main([str(model), "--quick", "--seed", "5", "--plot", str(plot), "--json", str(raw)])
    printed = capsys.readouterr().out
    assert status == 0
    results = json.loads(raw.read_text())
    cached, recomputed = (results["runs"][way][-1] for way in ("cached", "recomputed"))
    count = CONTEXT - len("ROMEO:") + small_gpt.PAST_CONTEXT
    assert len(cached["token_ids"]) == len(cached["seconds"]) == count
    assert cached["token_ids"] == recomputed["token_ids"]
    tokenizer = load_tokenizer(resolve_source(str(model)))
    assert tokenizer.decode(cached["token_ids"]) == results["text"]
    token_ids = tokenizer.encode("ROMEO:", add_special_tokens=True) + cached["token_ids"]
    for index in (0, 1, CONTEXT - 7, CONTEXT - 6, CONTEXT - 5, count - 1):
        end = len("ROMEO:") + index
        logits = hf_logits(model, token_ids[max(0, end - CONTEXT) : end])[-1].numpy().astype(np.float64)
        words = token_words(np.array([choice_seed(5, 0)]), np.array([index]), [np.arange(len(logits))])
        scores = logits / TEMPERATURE + gumbel(words)
        assert scores.max() - scores[token_ids[end]] < 1e-3
    assert plot.stat().st_size > 10_000
    words_printed = " ".join(printed.split())
    ratio = results["ratios"][f"1-{CONTEXT}"]
    assert f"{ratio:.1f} times as fast as without it, and the text is the same" in words_printed
    assert f"plot: {plot}" in words_printed


def test_different_texts_are_noticed(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def tokens(self: Recomputed, *args: Any) -> Iterator[int]:
        for index, token_id in enumerate(original(self, *args)):
            yield token_id if index < 9 else (token_id + 1) % 10

    original = Recomputed.tokens
    monkeypatch.setattr(Recomputed, "tokens", tokens)
    assert small_gpt.main([str(model), "--quick", "--no-plot", "--tokens", "12"]) == 1
    captured = capsys.readouterr()
    assert "the texts differ from output token 9 on" in captured.err
    assert "the text is the same" not in " ".join(captured.out.split())


def test_a_text_that_differs_past_the_full_context_only_is_noticed(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one that kept what it had computed before the window moved would give."""

    def forgets_to_slide(self: Recomputed, window: list[int], index: int, seed: int) -> int:
        token_id = original(self, window, index, seed)
        return token_id if index <= CONTEXT - len("ROMEO:") else (token_id + 1) % 10

    original = Recomputed._next
    monkeypatch.setattr(Recomputed, "_next", forgets_to_slide)
    assert small_gpt.main([str(model), "--quick", "--no-plot"]) == 1
    assert f"the texts differ from output token {CONTEXT - len('ROMEO:') + 1} on" in capsys.readouterr().err


def test_a_target_that_is_missed_fails(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(small_gpt_results, "TARGET_RATIO", 1e6)
    assert small_gpt.main([str(model), "--quick", "--no-plot"]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"small_gpt: with the cache {CONTEXT} tokens are ")
    assert line.endswith(" times as fast; the target is at least 1000000 times")


def test_few_tokens_leave_checks_out_and_say_so(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(small_gpt_results, "TARGET_RATIO", 1e6)
    assert small_gpt.main([str(model), "--quick", "--no-plot", "--tokens", "4"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert f"The target is for {CONTEXT} output tokens: not checked with 4." in words
    assert "The context is full after 18 output tokens: sliding is not checked." in words


@pytest.mark.parametrize("way", ["cached", "recomputed"])
def test_a_failed_forward_pass_is_one_line_and_keeps_what_was_measured(
    way: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the sixth token of the first turn, behind four of the warm-up."""
    calls = []
    place, name = {"cached": (ModelRunner, "forward"), "recomputed": (Recomputed, "_next")}[way]
    original = getattr(place, name)

    def fail(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == small_gpt.WARM_UP_TOKENS + 6:
            raise RuntimeError("no such operation")
        return original(*args)

    monkeypatch.setattr(place, name, fail)
    raw = tmp_path / "raw.json"
    assert small_gpt.main([str(model), "--quick", "--no-plot", "--json", str(raw)]) == 1
    captured = capsys.readouterr()
    assert "small_gpt: the forward pass failed: no such operation\n" in captured.err
    assert "Stopped early (a step failed): these are partial results." in captured.out
    results = json.loads(raw.read_text())
    assert results["partial"]
    assert len(results["runs"][way][0]["token_ids"]) == 5


def test_ctrl_c_keeps_what_was_measured(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def tokens(self: Recomputed, prompt: Sequence[int], count: int, seed: int) -> Iterator[int]:
        yield from original(self, prompt, min(count, 5), seed)
        if count > 5:
            raise KeyboardInterrupt

    original = Recomputed.tokens
    monkeypatch.setattr(Recomputed, "tokens", tokens)
    monkeypatch.setenv("COLUMNS", "160")
    assert small_gpt.main([str(model), "--quick", "--no-plot"]) == 130
    printed = capsys.readouterr().out
    assert "Stopped early (interrupted): these are partial results." in printed
    assert "not measured: interrupted" in printed


def test_ctrl_c_before_the_first_token(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(small_gpt, "Cached", stop)
    assert small_gpt.main([str(model), "--no-plot"]) == 130
    assert capsys.readouterr().err == "small_gpt: interrupted before anything was measured\n"


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--tokens", "0"), "tokens is 0; it must be at least 1"),
        (("--prompt", "ROMEO:" * 4), f"prompt has 24 tokens; it must have from 1 to 23, for a context of {CONTEXT}"),
        (("--prompt", ""), "prompt has 0 tokens"),
        (("--tokens", str(10**30)), f"max_tokens is {10**30}; "),
        (("--seed", str(2**63)), f"seed is {2**63}"),
        (("--threads", str(10**30)), f"threads is {10**30}; it must be from 1 to 1024"),
        (("--prompt", "ROMEO%"), "the text holds '%' (U+0025), for which this model has no token"),
    ],
)
def test_the_experiments_bad_input_is_one_line(
    flags: tuple[str, ...], complaint: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert small_gpt.main([str(model), "--no-plot", *flags]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert len(error.strip().splitlines()) == 1


def test_a_folder_that_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert small_gpt.main([str(tmp_path), "--no-plot"]) == 2
    assert "holds no config.json" in capsys.readouterr().err


def results_of(**seconds: list[list[float]]) -> Results:
    runs = {way: [Run([1] * len(run), run) for run in taken] for way, taken in seconds.items()}
    return Results(context=4, num_prompt_tokens=1, count=6, seed=0, runs=runs)


def test_medians_and_ratios_by_hand() -> None:
    results = results_of(cached=[[1.0] * 6, [2.0] * 6, [9.0] * 6], recomputed=[[8.0] * 6, [6.0] * 3])
    names = [stretch.name for stretch in results.stretches()]
    assert names == ["1-3, filling up", "1-4", "4-6, sliding"]
    filling, whole, sliding = results.stretches()
    assert results.seconds("cached", filling) == 6.0
    assert results.seconds("recomputed", filling) == 21.0  # the median of 24 and 18
    assert results.ratio(filling) == 3.5
    assert results.ratio(whole) == results.ratio(sliding) == 4.0  # the run that was cut short is not counted
    assert results.first_difference() is None


def test_the_words_say_whether_the_texts_are_the_same() -> None:
    results = results_of(cached=[[1.0] * 6, [1.0] * 6], recomputed=[[4.0] * 6])
    assert "4.0 times as fast as without it, and the text is the same;" in small_gpt_report.in_words(results)[0]
    results.runs["recomputed"][0].token_ids[5] = 2
    results.runs["cached"][1].token_ids[3] = 7
    assert results.first_difference() == 3
    words = small_gpt_report.in_words(results)[0]
    assert "4.0 times as fast as without it, but the texts differ from output token 3 on;" in words
    assert "the same" not in words


def test_what_was_not_reached_is_not_measured() -> None:
    results = results_of(cached=[[1.0] * 6], recomputed=[[1.0] * 3])
    assert [results.ratio(stretch) for stretch in results.stretches()] == [1.0, None, None]
    assert results.misses() == [
        "recomputed got to 3 of 6 tokens only (out of time): no more is compared",
        "the target of 4 times is not checked (out of time)",
    ]
    table = small_gpt_report.draw_table(results, "")
    (ratios,) = (column for column in table.columns if column.header == "ratio")
    (runs,) = (column for column in table.columns if column.header == "runs")
    assert list(ratios.cells) == ["1.0x", "not measured: out of time", "not measured: out of time"]
    assert list(runs.cells) == ["1/1", "1/0", "1/0"]
    assert small_gpt_report.in_words(results) == []


@pytest.mark.parametrize(("ratio", "misses"), [(4.0, 0), (3.9, 1)])
def test_the_target(ratio: float, misses: int) -> None:
    assert len(results_of(cached=[[1.0] * 6], recomputed=[[ratio] * 6]).misses()) == misses


def test_a_way_stops_when_its_time_is_over() -> None:
    class Endless:
        name = "cached"

        def tokens(self, prompt: Sequence[int], count: int, seed: int) -> Iterator[int]:
            yield from range(count)

    results = results_of(cached=[])
    small_gpt.measure([Endless()], [0], results, repeats=3, budget_seconds=0.0, advance=lambda: None)
    assert results.runs == {"cached": []}
    small_gpt.measure([Endless()], [0], results, repeats=3, budget_seconds=60.0, advance=lambda: None)
    assert [run.token_ids for run in results.runs["cached"]] == [list(range(6))] * 3
