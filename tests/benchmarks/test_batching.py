"""`pageframe bench batching`: the command on the default model and on small ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pageframe.api.cli import main
from pageframe.benchmarks.experiments import batching, batching_measures, batching_parts
from pageframe.benchmarks.experiments.batching_sizes import QUICK
from pageframe.benchmarks.experiments.driver import Agreement
from pageframe.benchmarks.experiments.report import InputError
from pageframe.runtime import engine_builder
from pageframe.runtime.errors import EngineError
from pageframe.runtime.model_runner import ModelRunner

from .tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with 256 positions and no more than 8 tokens."""
    return save_tiny_model(tmp_path_factory.mktemp("small"), vocab_size=8)


@pytest.fixture
def little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no flag makes smaller."""
    less = {"runner_tokens": 8, "turns": 2, "system_tokens": 40, "answer_tokens": 4, "block_sizes": (1, 16)}
    monkeypatch.setattr(batching, "QUICK", replace(QUICK, **less))


#: As little as can be run.
SMALL = ["--quick", "--requests", "3", "--max-len", "12", "--batch", "2", "--long-tokens", "40", "--chunk", "8"]
SMALL += ["--num-sessions", "2", "--repeats", "1", "--budget", "60"]


@pytest.mark.usefixtures("little_work")
def test_all_parts_on_the_default_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot, results = tmp_path / "batching.png", tmp_path / "batching.json"
    assert main(["bench", "batching", *SMALL, "--rate", "50", "--plot", str(plot), "--json", str(results)]) == 0
    parts = json.loads(results.read_text())["parts"]
    assert list(parts) == ["batching", "chunks", "prefix", "blocks"]
    assert all(len(runs) == 1 for part in parts.values() for runs in part["ways"].values())
    assert [len(part["ways"]) for part in parts.values()] == [4, 2, 2, 2]
    for part in parts.values():
        assert part["agreement"]["different"] == 0
        assert part["agreement"]["equal"] > 0
    assert parts["prefix"]["ways"]["cache on"][0]["hit_rate"] > 0.3
    assert parts["prefix"]["ways"]["cache off"][0]["hit_rate"] == 0
    blocks = parts["blocks"]["ways"]
    assert blocks["1"][0]["wasted"] == 0 < blocks["16"][0]["wasted"]
    assert blocks["1"][0]["hit_rate"] > blocks["16"][0]["hit_rate"] > 0
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        "batching by iteration makes",
        "The price: a long prompt's first token",
        "of prompt tokens were found",
    ):
        assert words in text
    header = plot.read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    assert int.from_bytes(header[16:20], "big") >= 1200


@pytest.mark.usefixtures("little_work")
def test_sessions_from_a_file(tmp_path: Path) -> None:
    questions, results = tmp_path / "question.jsonl", tmp_path / "x.json"
    questions.write_text(json.dumps({"turns": ["Why is the sky blue?", "Say it in five words."]}) + "\n")
    flags = ["--part", "prefix", "--sessions", str(questions), "--no-plot", "--json", str(results)]
    assert main(["bench", "batching", *SMALL, *flags]) == 0
    parts = json.loads(results.read_text())["parts"]
    assert list(parts) == ["prefix"]
    (run,) = parts["prefix"]["ways"]["cache on"]
    assert run["hit_rate"] > 0
    assert {"ttft_turn_1_ms", "ttft_turn_2_ms"} <= run.keys()


@pytest.mark.usefixtures("little_work")
def test_ctrl_c_prints_what_was_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    held = batching_measures.hold_sessions
    calls = []

    def hold_until_interrupted(*args: Any, **settings: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return held(*args, **settings)

    monkeypatch.setattr(batching_measures, "hold_sessions", hold_until_interrupted)
    monkeypatch.setenv("COLUMNS", "160")
    flags = ["--part", "prefix", "--part", "blocks", "--no-plot", "--json", str(tmp_path / "x.json")]
    assert main(["bench", "batching", *SMALL, *flags]) == 130
    text = capsys.readouterr().out
    assert "Interrupted: partial results." in text
    assert "not measured: interrupted" in text
    assert "part blocks: not measured: interrupted" in text
    results = json.loads((tmp_path / "x.json").read_text())
    assert results["partial"]
    assert sorted(len(runs) for runs in results["parts"]["prefix"]["ways"].values()) == [0, 1]
    assert list(results["parts"]["prefix"]["not_measured"].values()) == ["interrupted"]


@pytest.mark.usefixtures("little_work")
def test_the_usual_sizes_fit_a_small_model(
    small_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["bench", "batching", "--quick", "--model", str(small_model), "--repeats", "2", "--no-plot"]) == 0
    text = capsys.readouterr().out
    assert "The model has 256 positions: long-tokens is 255, not 384, chunk is 63, not 64." in text
    assert "not measured" not in text


def test_what_one_part_leaves_of_its_time_goes_to_the_next(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []
    monkeypatch.setattr(batching_measures, "measure_chunks", lambda bench, part, seconds: given.append(seconds))
    monkeypatch.setattr(
        batching_measures, "measure_prefix_cache", lambda bench, make, part, seconds, **_: given.append(seconds)
    )
    flags = ["--model", str(small_model), "--no-plot", "--part", "chunks", "--part", "prefix", "--budget", "1000"]
    assert main(["bench", "batching", *flags]) == 0
    assert 900 < given[0] <= 1000 < 1800 < given[1] <= 2000


def test_room_is_needed_only_for_what_runs(small_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--quick", "--model", str(small_model), "--repeats", "1", "--no-plot", "--max-len", "9000"]
    assert main(["bench", "batching", *flags, "--part", "chunks", "--long-tokens", "200"]) == 0
    assert "chunks of 64" in capsys.readouterr().out
    assert main(["bench", "batching", *flags, "--part", "batching"]) == 2
    assert "max-len is 9000; the model has 256 positions" in capsys.readouterr().err


def test_a_failed_forward_pass_is_one_line(
    small_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: ModelRunner, batch: Any) -> Any:
        raise RuntimeError("no such operation")

    monkeypatch.setattr(ModelRunner, "forward", fail)
    monkeypatch.setattr(engine_builder, "measure_mixed_token_budget", lambda runner, resolved: 64)
    assert main(["bench", "batching", "--quick", "--model", str(small_model), "--no-plot"]) == 1
    assert "pageframe: the forward pass failed: no such operation\n" in capsys.readouterr().err


def test_a_model_too_slow_for_one_request_is_refused(
    small_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching_parts, "WARM_UP_SECONDS", 0.0)
    assert main(["bench", "batching", "--quick", "--model", str(small_model), "--no-plot"]) == 2
    assert "a first short request takes it over 0 seconds here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-len", "9000"], "max-len is 9000; the model has 8192 positions, which leave room for 8192"),
        (["--long-tokens", "8192"], "long-tokens is 8192; the model has 8192 positions, which leave room for 8191"),
        (["--max-len", "1"], "max-len is 1; it must be from 2 to 1048576"),
        (["--chunk", "3"], "chunk is 3; it must be from 4 to"),
        (["--requests", "0"], "requests is 0; it must be from 1 to 100000"),
        (["--requests", "3000"], "requests is 3000; the trace has 2000"),
        (["--rate", "0"], "rate is 0; it must be above 0"),
        (["--budget", "nan"], "budget is nan; it must be above 0"),
        (["--seed", "-1"], "seed is -1; it must be at least 0"),
        (["--seed", str(2**63)], f"seed is {2**63}; it must be at least 0 and below 2**63"),
        (["--batch", str(10**30)], f"batch is {10**30}; it must be from 1 to 1024"),
        (["--budget", "1e30"], "budget is 1e+30; it must be above 0 and at most 86400 seconds"),
        (["--model", "no/such/model"], "no/such/model"),
        (["--trace", "no/such/file"], "trace is no/such/file; it can't be read"),
        (["--sessions", "no/such/file"], "sessions is no/such/file; it holds neither questions nor recorded sessions"),
        (["--threads", "0"], "threads is 0; it must be from 1 to 1024"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    assert main(["bench", "batching", "--quick", "--no-plot", *flags]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.strip().count("\n") == 0


def test_a_part_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "batching", "--part", "everything"])
    assert ended.value.code == 2
    assert "invalid choice: 'everything'" in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "batching", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for flag in (
        "--part",
        "--trace",
        "--sessions",
        "--requests",
        "--max-len",
        "--rate",
        "--budget",
        "--quick",
        "--json",
    ):
        assert flag in text


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (InputError("sessions hold no prompt"), 2, "sessions hold no prompt"),
        (EngineError("a forward pass failed"), 1, "a forward pass failed"),
        (MemoryError(), 1, "out of memory"),
    ],
)
@pytest.mark.usefixtures("little_work")
def test_a_part_that_fails_takes_no_other_with_it(
    small_model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    error: Exception,
    status: int,
    words: str,
) -> None:
    def fail(*args: Any, **settings: Any) -> None:
        raise error

    monkeypatch.setattr(batching_measures, "measure_prefix_cache", fail)
    flags = ["--model", str(small_model), "--part", "chunks", "--part", "prefix", "--part", "blocks"]
    flags += ["--json", str(tmp_path / "x.json")]
    assert main(["bench", "batching", *SMALL, *flags, "--plot", str(tmp_path / "x.png")]) == status
    captured = capsys.readouterr()
    assert f"pageframe: part prefix failed: {words}" in captured.err
    assert "Traceback" not in captured.err
    for title in ("gaps between tokens while long prompts arrive", "block size, on half"):
        assert title in " ".join(captured.out.split())
    parts = json.loads((tmp_path / "x.json").read_text())["parts"]
    assert {name: part["failure"] for name, part in parts.items()} == {"chunks": "", "prefix": words, "blocks": ""}
    assert parts["blocks"]["ways"]["16"]


@pytest.mark.usefixtures("little_work")
def test_results_that_differ_without_a_tie_fail(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching_parts, "compare", lambda ours, theirs, engine: Agreement(different=1))
    assert main(["bench", "batching", *SMALL, "--part", "chunks", "--no-plot"]) == batching.EXIT_DIFFERENT
    assert "Some answers differ where no tie explains it." in capsys.readouterr().out
