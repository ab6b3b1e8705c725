"""The GPU script as far as it goes without one: a rehearsal, its accounting, and parts that fail or hang."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pageframe.benchmarks import gpu
from pageframe.benchmarks.gpu_parts.results import FAILED, OK, SHORT, Results, Row, format_table, read_rows

SCRIPT = Path(gpu.__file__)


def rehearse(folder: Path, *arguments: str) -> tuple[list[dict[str, Any]], str]:
    """The rows and the printed table of a rehearsal that must succeed, called as on a GPU machine: by its path alone,
    from a folder that is none of ours."""
    command = [sys.executable, str(SCRIPT), "--rehearse", "--json", "gpu.json", "--plot", "gpu.png", *arguments]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    content = json.loads((folder / "gpu.json").read_text())
    assert content["rehearsal"] is True
    rows: list[dict[str, Any]] = content["rows"]
    assert all(row["case"] in result.stdout for row in rows)
    return rows, result.stdout


def test_the_engine_part_runs_with_graphs_and_without(tmp_path: Path) -> None:
    rows, _ = rehearse(tmp_path, "--part", "Qwen3-0.6B")
    assert [row["case"] for row in rows] == ["Qwen3-0.6B, graphs", "Qwen3-0.6B, no graphs"]
    for row in rows:
        assert "3 of 3 requests" in row["note"]
        assert row["numbers"]["step_seconds"] > row["numbers"]["floor_seconds"] > 0
        assert row["numbers"]["mixed_step_seconds"] > 0
        assert "steps with prompts" in row["note"]


def test_the_draws_of_a_step_are_timed(tmp_path: Path) -> None:
    (row,), _ = rehearse(tmp_path, "--part", "sampling")
    assert row["numbers"]["seconds"] > row["numbers"]["floor_seconds"] > 0
    assert row["note"].startswith("3 rows of 3,000; ")
    assert (tmp_path / "gpu.png").stat().st_size > 1000


@pytest.mark.long
def test_a_whole_rehearsal_finds_every_kernel_right(tmp_path: Path) -> None:
    rows, _ = rehearse(tmp_path)
    parts = {row["part"] for row in rows}
    assert parts == {"machine", "check", "attention", "others", "sampling", "engine"}
    checks = [row for row in rows if row["part"] == "check"]
    assert len(checks) > 10
    assert {row["verdict"] for row in checks} == {OK}
    others = [row for row in rows if row["part"] == "others"]
    assert any("SDPA" in row["numbers"] for row in others), "nothing was timed beside ours"
    assert not any("DIFFERS" in row["note"] for row in others)


@pytest.mark.long
def test_a_rehearsal_of_tuning_names_a_setting_for_each_kernel(tmp_path: Path) -> None:
    rows, _ = rehearse(tmp_path, "--part", "tune")
    assert [row["part"] for row in rows] == ["tune", "tune"]
    assert all("2 of 2 settings ran" in row["note"] for row in rows)


def test_a_part_that_fails_leaves_a_row_that_says_why(tmp_path: Path) -> None:
    (row,) = gpu.run_part("nonsense", 60, gpu.make_links(tmp_path), tmp_path, rehearse=True)
    assert row.verdict == FAILED
    assert "KeyError: 'nonsense'" in row.note


def test_a_part_that_is_not_done_in_time_is_ended_and_keeps_its_rows(tmp_path: Path) -> None:
    Results(tmp_path / "checks.json").add(Row("check", "first", verdict=OK))
    first, rest = gpu.run_part("checks", 0.05, gpu.make_links(tmp_path), tmp_path, rehearse=True)
    assert first.case == "first"
    assert rest.verdict == FAILED
    assert "not done" in rest.note


def test_an_interrupt_prints_what_was_measured_until_then_and_leaves_no_process(tmp_path: Path) -> None:
    """Ctrl-C while the first part has just begun: the files are written, the table is printed, no other part begins."""
    command = [sys.executable, str(SCRIPT), "--rehearse", "--part", "checks", "--part", "others"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "checks …\n"
    process.send_signal(signal.SIGINT)
    table, _ = process.communicate()
    assert process.returncode == 1
    assert "stopped by Ctrl-C" in table
    assert "others" not in table
    assert json.loads((tmp_path / "gpu.json").read_text())["rows"][-1]["part"] == "checks"


def test_an_interrupted_part_keeps_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str, limit: float, links: Path, folder: Path, *, rehearse: bool) -> list[Row]:
        Results(folder / f"{name}.json").add(Row(name, "first", "1 us"))
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "run_part", interrupted)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    paths = ["--json", str(tmp_path / "gpu.json"), "--plot", str(tmp_path / "gpu.png")]
    assert gpu.main(["--part", "machine", *paths]) == 1
    table = capsys.readouterr().out
    assert "first" in table
    assert "stopped by Ctrl-C" in table


def test_an_interrupt_ends_the_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[str]] = []

    class Interrupted(subprocess.Popen[str]):
        def communicate(self, *args: Any, **kwargs: Any) -> Any:
            if not started:
                started.append(self)
                raise KeyboardInterrupt
            return super().communicate(*args, **kwargs)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        gpu.run_part("checks", 60, gpu.make_links(tmp_path), tmp_path, rehearse=True)
    assert started[0].returncode == -signal.SIGKILL


def test_rows_survive_their_file(tmp_path: Path) -> None:
    rows = [Row("a", "b", "1 us", "10%", OK, "note", {"seconds": 1e-6}), Row("a", "c")]
    results = Results(tmp_path / "rows.json")
    for row in rows:
        results.add(row)
    assert read_rows(tmp_path / "rows.json") == rows
    assert read_rows(tmp_path / "none.json") == []


def test_the_tables_columns_stand_below_their_heads() -> None:
    head, _, *lines = format_table([Row("machine", "copy", "4 TB/s"), Row("x", "a longer case", "1", "50%")]).split(
        "\n"
    )
    assert {line[head.index("value") :].split()[0] for line in lines} == {"4", "1"}
    assert lines[1][head.index("share") :].split()[0] == "50%"


def test_without_matplotlib_the_table_says_so_and_the_figures_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    paths = ["--json", str(tmp_path / "gpu.json"), "--plot", str(tmp_path / "gpu.png")]
    figures, plot = gpu.save([Row("machine", "copy", "4 TB/s")], gpu.read_arguments(paths))
    assert figures.verdict == ""
    assert "matplotlib is not installed" in plot.note
    assert json.loads((tmp_path / "gpu.json").read_text())["rows"][0]["value"] == "4 TB/s"


def test_a_file_that_cannot_be_written_is_said_and_loses_no_table(tmp_path: Path) -> None:
    paths = ["--json", str(tmp_path / "none" / "gpu.json"), "--plot", str(tmp_path / "none" / "gpu.png")]
    rows = gpu.save([Row("machine", "copy")], gpu.read_arguments(paths))
    assert [row.verdict for row in rows] == [FAILED, FAILED]
    assert all("none" in row.note for row in rows)


def test_all_parts_fit_the_time() -> None:
    """Under eight minutes, whatever each of them takes of its own."""
    assert sum(part.seconds for part in gpu.PARTS if part.unasked) < 8 * 60


class TestAccounting:
    """Known values of what the parts count. They import Triton, so not while tests are collected."""

    def test_flops_of_causal_attention(self) -> None:
        from pageframe.benchmarks.gpu_parts.attention import attention_flops
        from pageframe.benchmarks.gpu_parts.sizes import REAL, TOY, Case

        # 3 queries on 5 keys see 3, 4 and 5 of them.
        assert attention_flops(Case("", (5,), new_tokens=3), TOY) == 4 * 4 * 16 * (3 + 4 + 5)
        whole = attention_flops(Case("", (8192,), new_tokens=8192), REAL)
        assert whole == 4 * 32 * 128 * 8192 * 8193 // 2

    def test_bytes_of_k_and_v(self) -> None:
        import torch

        from pageframe.benchmarks.gpu_parts.layer import kv_bytes

        assert kv_bytes((4096,) * 64, 8, 128, torch.bfloat16) == 2**30
        assert kv_bytes((1,), 1, 128, torch.int8) == 2 * (128 + 4)

    @pytest.mark.parametrize(
        ("unit", "value", "verdict"),
        [("us", 19.0, OK), ("us", 21.0, SHORT), ("%", 21.0, OK), ("%", 19.0, SHORT), ("TFLOP/s", 20.0, OK)],
    )
    def test_microseconds_are_the_less_the_better(self, unit: str, value: float, verdict: str) -> None:
        from pageframe.benchmarks.gpu_parts.attention import verdict_of
        from pageframe.benchmarks.gpu_parts.sizes import Target

        assert verdict_of(Target(unit, 20, 30), {unit: value}) == verdict

    def test_busy_time_is_counted_once_where_kernels_overlap(self) -> None:
        from pageframe.benchmarks.gpu_parts.serving import union_length

        assert union_length([]) == 0
        assert union_length([(5, 7), (0, 2), (1, 3), (1, 2), (6, 9)]) == 3 + 4

    def test_models_have_the_published_sizes(self) -> None:
        """Parameters of the matrices, in billions, as the models' cards give them."""
        from pageframe.benchmarks.gpu_parts.sizes import MODELS

        sizes = {}
        for name, model in MODELS.items():
            heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
            layer = model.hidden_size * (heads + 3 * model.intermediate_size)
            tables = (1 if model.tie_word_embeddings else 2) * model.vocab_size * model.hidden_size
            sizes[name] = (model.num_layers * layer + tables) / 1e9
        assert sizes == pytest.approx({"Qwen3-0.6B": 0.596, "Llama-3.1-8B": 8.03, "Qwen3-14B": 14.77}, rel=0.01)

    def test_a_tuned_shape_replaces_its_older_entry(self, tmp_path: Path) -> None:
        import torch

        from pageframe.benchmarks.tune_triton import Shape, write_entry
        from pageframe.kernels.triton.tables import Settings

        path = tmp_path / "table.json"
        one, other = Shape("attend_splits", 128, 4), Shape("attend_splits", 128, 8)
        for shape, tile in ((one, 32), (other, 64), (one, 128)):
            write_entry(path, "Test GPU", shape, torch.bfloat16, Settings(tile, 4, 3))
        table = json.loads(path.read_text())
        assert table["device"] == "Test GPU"
        assert [(entry["group"], entry["tile"]) for entry in table["entries"]] == [(8, 64), (4, 128)]
        assert table["entries"][0] == {
            "kernel": "attend_splits",
            "head_dims": [128],
            "cache_dtypes": ["bfloat16"],
            "group": 8,
            "tile": 64,
            "num_warps": 4,
            "num_stages": 3,
        }
