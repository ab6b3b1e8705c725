"""The checks that benchmarks/gpu.py makes on a GPU, made here: that they pass, and that they notice what is wrong."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.tape import Tape
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from pageframe.benchmarks import tune_triton
from pageframe.benchmarks.gpu_parts import checks_model, serving
from pageframe.benchmarks.gpu_parts.checks import relative_error
from pageframe.benchmarks.gpu_parts.layer import Layer
from pageframe.benchmarks.gpu_parts.results import FAILED, Results, measuring, read_rows
from pageframe.benchmarks.gpu_parts.sizes import TOY
from pageframe.benchmarks.gpu_parts.timing import Work
from pageframe.kernels.triton import backend as triton_backend
from pageframe.kernels.triton.backend import TritonBackend
from pageframe.kernels.triton.tables import KERNELS, Settings, settings
from pageframe.runtime import model_runner


@pytest.mark.parametrize(
    ("name", "limit", "check"),
    [pytest.param(*check, id=check[0]) for check in checks_model.MODEL_CHECKS],
)
def test_what_is_around_attention_passes(
    name: str,
    limit: float,
    check: Callable[[torch.device], float],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tape = Tape()
    if device.type == "cpu":
        monkeypatch.setattr(model_runner, "recorder", lambda device: tape)
    torch.manual_seed(0)
    assert check(device) <= limit
    assert bool(tape.replays) == ("replay" in name and device.type == "cpu")


def test_a_replay_with_the_plan_of_another_step_is_noticed(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides of the check then differ: the replay attends to nothing."""
    monkeypatch.setattr(triton_backend, "update_plan", lambda plan, batch: None)
    (check,) = (check for name, _, check in checks_model.MODEL_CHECKS if name == "graph replay, bucket full")
    assert check(device) > 1e-2


def test_a_number_that_is_none_is_within_no_limit() -> None:
    ours, expected = torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0])
    assert not relative_error(ours, expected) <= 1e9


@pytest.mark.parametrize("block_size", [4, 16])
def test_sets_of_a_layer_hold_the_contexts_that_are_gathered(device: torch.device, block_size: int) -> None:
    """What others' attention is given is what ours reads: torch's over the gathered K and V equals the reference."""
    contexts = [5, 16, 33]
    layer = Layer(
        TritonBackend(device),
        contexts,
        num_sets=2,
        new_tokens=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        block_size=block_size,
        dtype=torch.float32,
        cache_dtype=torch.float32,
        device=device,
        poison=True,
    )
    for index in range(2):
        expected, begin = layer.expected(index), 0
        keys, values = layer.gathered(index)
        for request, context in enumerate(contexts):
            part = slice(begin, begin + context)
            attended = torch.nn.functional.scaled_dot_product_attention(
                layer.queries[index][request][:, None],
                keys[part].transpose(0, 1),
                values[part].transpose(0, 1),
                enable_gqa=True,
            )
            torch.testing.assert_close(attended[:, 0], expected[request], rtol=1e-4, atol=1e-5)
            begin += context
    assert not torch.equal(layer.gathered(0)[0], layer.gathered(1)[0]), "sets must not share their blocks"


def test_a_case_that_fails_says_why_and_the_next_one_runs(tmp_path: Path) -> None:
    results = Results(tmp_path / "rows.json")
    for case, error in (("first", RuntimeError("no such\nkernel")), ("second", CompilationError(None, None, "bad"))):  # type: ignore[arg-type]
        with measuring(results, "check", case):
            raise error
    first, second = read_rows(tmp_path / "rows.json")
    assert (first.verdict, second.verdict) == (FAILED, FAILED)
    assert first.note == "RuntimeError: no such kernel"
    assert second.note.startswith("CompilationError: ")


def test_an_engine_that_fails_with_graphs_is_run_without(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(case: str, *args: Any, graphs: bool, **options: Any) -> Any:
        if graphs:
            raise RuntimeError("not recorded")
        return serving.Row(serving.PART, case, "1 tok/s")

    monkeypatch.setattr(serving, "_measure", measure)
    serving.run("Qwen3-0.6B", Results(tmp_path / "rows.json"), TOY, device)
    graphs, eager = read_rows(tmp_path / "rows.json")
    assert (graphs.verdict, graphs.note) == (FAILED, "RuntimeError: not recorded")
    assert eager.value == "1 tok/s"


class FakeTimer:
    """Takes as long as the settings in use say, and raises where they are said to fail."""

    def __init__(self, chosen: dict[Settings, Exception | float]) -> None:
        self.chosen = chosen
        self.num_works: list[int] = []

    def seconds(self, works: Sequence[Work]) -> float:
        self.num_works.append(len(works))
        of_kernels = [
            settings(kernel, head_dim=16, cache_dtype=torch.bfloat16, group=2, device=torch.device("cpu"))
            for kernel in KERNELS
        ]
        found = next((self.chosen[tried] for tried in of_kernels if tried in self.chosen), 1.0)
        if isinstance(found, Exception):
            raise found
        return found


def tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *found: Exception | float) -> tuple[FakeTimer, list[Any]]:
    """Tune with settings of which each takes so long or fails so: the timer, and the rows."""
    grid = tuple(Settings(16 * 2**index, 4, 2) for index in range(len(found)))
    timer = FakeTimer(dict(zip(grid, found, strict=True)))
    monkeypatch.setattr(tune_triton, "timer_for", lambda device: timer)
    monkeypatch.setattr(tune_triton, "num_sets", lambda num_bytes, device: 3)
    monkeypatch.setattr(tune_triton, "TOY_GRID", dataclasses.replace(tune_triton.TOY_GRID, settings=grid))
    tune_triton.run(Results(tmp_path / "rows.json"), torch.device("cpu"), tmp_path / "table.json")
    return timer, read_rows(tmp_path / "rows.json")


def test_the_fastest_setting_that_runs_is_taken_over_sets_beyond_the_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = OutOfResources(300_000, 232_448, "shared memory")
    timer, rows = tune(tmp_path, monkeypatch, 0.5, refused, RuntimeError("no image"), 0.25)
    assert set(timer.num_works) == {3}, "the same set again would be read from a cache"
    assert [row.value for row in rows] == ["tile 128, 4 warps, 2 stages"] * 2
    assert all("2 of 4 settings ran" in row.note and row.share == "25%" for row in rows)
    assert [entry["tile"] for entry in json.loads((tmp_path / "table.json").read_text())["entries"]] == [128, 128]


@pytest.mark.parametrize("only_masked", [True, False])
def test_a_setting_that_another_model_could_not_have_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only_masked: bool
) -> None:
    """The fastest does not compile with a window, or with 16 query heads to a KV head."""
    attend = Layer.attend

    def refusing(layer: Layer, index: int, **options: Any) -> torch.Tensor:
        chosen = settings("attend_splits", head_dim=16, cache_dtype=torch.bfloat16, group=2, device=layer.device)
        group = layer.queries[0].shape[1] // layer.kv_cache.shape[2]
        if chosen.tile == 16 and chosen.num_warps == 4 and ("window" in options if only_masked else group == 16):
            raise OutOfResources(300_000, 232_448, "shared memory")
        return attend(layer, index, **options)

    monkeypatch.setattr(Layer, "attend", refusing)
    _, rows = tune(tmp_path, monkeypatch, 0.25, 0.5)
    assert rows[0].value == "tile 32, 4 warps, 2 stages"
    entries = json.loads((tmp_path / "table.json").read_text())["entries"]
    assert entries[0]["tile"] == 32
    assert entries[1]["tile"] == 16, "the other kernel has all it needs"


def test_a_shape_for_which_nothing_runs_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, rows = tune(tmp_path, monkeypatch, RuntimeError("no image"))
    assert [row.verdict for row in rows] == [FAILED, FAILED]
    assert all("none of 1 settings ran" in row.note for row in rows)
    assert not (tmp_path / "table.json").exists()
