"""`pageframe bench phases`: floors by hand, what is measured of a tiny model, and what it says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch

from pageframe.api.cli import main
from pageframe.benchmarks.experiments import floor, phases_measure, phases_report
from pageframe.benchmarks.experiments.floor import Floor, Floors, Machine, StoredBytes, measure_floors, measure_machine
from pageframe.benchmarks.experiments.offline_throughput import Work, floor_seconds
from pageframe.benchmarks.experiments.phases_report import Cell, Results
from pageframe.benchmarks.experiments.report import TimeBudget
from pageframe.kernels.cpu import CpuKernels
from pageframe.runtime.config import EngineConfig, ModelConfig
from pageframe.runtime.engine import Engine
from pageframe.runtime.engine_builder import build_engine
from pageframe.runtime.model_runner import ModelRunner
from pageframe.runtime.request import RequestOutput

from .tiny_models import save_tiny_model

SIZES = ("--prompt-lens", "8", "40", "--contexts", "8", "40", "--requests", "1", "3", "--dtype", "float32", "--quick")
CONFIG = ModelConfig(
    family="llama",
    vocab_size=100,
    hidden_size=8,
    intermediate_size=20,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    max_position=64,
    norm_eps=1e-5,
    rope_theta=1e4,
)
#: Of both layers: q and o of 8 x 8, k and v of 8 x 4, and three MLP matrices of 8 x 20.
LAYER_WEIGHTS = 2 * (8 * 24 + 3 * 8 * 20)
OUTPUT_WEIGHTS = 100 * 8
#: As bf16: 2 bytes each, and K and V of 2 layers and 2 heads of 2 elements.
STORED = StoredBytes(2 * LAYER_WEIGHTS, 2 * OUTPUT_WEIGHTS, 32)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=512))


@pytest.fixture(autouse=True)
def one_thread_and_a_wide_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A tiny model's operations are too small to share out among threads, above all on a busy machine; to measure the
    machine takes longer than all of them."""
    monkeypatch.setattr(floor, "measure_machine", lambda *_: Machine(bandwidth=1e13, flops=1e15))
    threads = torch.get_num_threads()
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    monkeypatch.setenv("COLUMNS", "160")
    yield
    torch.set_num_threads(threads)


def bench(model: str, *flags: str) -> int:
    return main(["bench", "phases", "--model", model, *(() if "--plot" in flags else ("--no-plot",)), *flags])


def test_floors_by_hand() -> None:
    slow_memory, slow_products = Machine(bandwidth=1.0, flops=1e30), Machine(bandwidth=1e30, flops=1.0)
    weight_bytes = 2 * (LAYER_WEIGHTS + OUTPUT_WEIGHTS)
    assert Floors(CONFIG, STORED, slow_memory).decode([10, 20]) == Floor(weight_bytes + 30 * 32, "reading")
    four_bits = StoredBytes(LAYER_WEIGHTS // 2, OUTPUT_WEIGHTS, 64)
    stored = LAYER_WEIGHTS // 2 + OUTPUT_WEIGHTS
    assert Floors(CONFIG, four_bits, slow_memory).decode([10]) == Floor(stored + 10 * 64, "reading")
    # Chunks of 4, 4 and 2 tokens, behind 0, 4 and 8 others; behind 5 cached ones, behind 5, 9 and 13.
    chunks = 2 * (3 * LAYER_WEIGHTS + OUTPUT_WEIGHTS)
    assert Floors(CONFIG, STORED, slow_memory).prefill(10, 4) == Floor(chunks + (4 + 8) * 32, "reading")
    cached = Floors(CONFIG, STORED, slow_memory).prefill(10, 4, start=5)
    assert cached == Floor(chunks + (5 + 9 + 13) * 32, "reading")
    # Attention: 4 flops for each key seen, element, head and layer.
    decode = 2 * 2 * (LAYER_WEIGHTS + OUTPUT_WEIGHTS) + 30 * 4 * 2 * 4 * 2
    assert Floors(CONFIG, STORED, slow_products).decode([10, 20]) == Floor(decode, "arithmetic")
    prefill = 2 * (3 * LAYER_WEIGHTS + OUTPUT_WEIGHTS) + (1 + 2 + 3) * 4 * 2 * 4 * 2
    assert Floors(CONFIG, STORED, slow_products).prefill(3, 8) == Floor(prefill, "arithmetic")
    behind = prefill + 3 * 5 * 4 * 2 * 4 * 2
    assert Floors(CONFIG, STORED, slow_products).prefill(3, 8, start=5) == Floor(behind, "arithmetic")


def test_a_machine_s_speeds_are_those_of_its_fastest_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of three passes each, begun and ended at these times: the fastest read takes 2 s, the fastest product 4 s.
    times = iter([0, 3, 3, 5, 5, 9, 0, 4, 4, 9, 9, 14])
    monkeypatch.setattr(floor.time, "perf_counter", lambda: float(next(times)))
    monkeypatch.setattr(floor, "PASSES", 3)
    monkeypatch.setattr(floor, "READ_BYTES", 4000)
    monkeypatch.setattr(floor, "MATRIX_SIZE", 8)
    assert measure_machine(torch.device("cpu"), torch.float32) == Machine(bandwidth=2000, flops=2 * 8**3 / 4)


def test_the_kernels_products_count_where_they_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernels:
        def linear(self, rows: torch.Tensor, weight: object) -> torch.Tensor:
            return rows

    times = iter([0, 2, 0, 4, 0, 3, 0, 1])  # reading, the product of matrices, the kernels' linears of either kind
    monkeypatch.setattr(floor.time, "perf_counter", lambda: float(next(times)))
    for name, value in (("PASSES", 1), ("READ_BYTES", 4000), ("MATRIX_SIZE", 8), ("LINEAR_SIZE", 32)):
        monkeypatch.setattr(floor, name, value)
    machine = measure_machine(torch.device("cpu"), torch.bfloat16, cast(CpuKernels, Kernels()))
    assert machine == Machine(bandwidth=2000, flops=2 * floor.LINEAR_ROWS * 32**2)


@pytest.mark.parametrize(("weights", "layers"), [("bf16", 2.0), ("file", 0.625)])
@pytest.mark.usefixtures("compiled_kernels")
def test_an_engine_s_floor_counts_the_bytes_that_it_holds(weights: str, layers: float) -> None:
    engine = build_engine(EngineConfig(dtype="bf16", weights=weights, num_blocks=4, max_model_len=64))
    floors = measure_floors(engine)
    # The default model: 30 layers of 3.54 million weights in Q4_1, an output matrix of 49,152 x 576 in Q8_0.
    layer_weights = 30 * 576 * ((2 * 9 + 2 * 3) * 64 + 3 * 1536)
    output = 49152 * 576 * (2.0 if weights == "bf16" else 1.0625)
    kv = 2 * 30 * 3 * 64 * 2
    assert floors.machine.bandwidth == 1e13
    assert floors.decode([100]).seconds * 1e13 == pytest.approx(layer_weights * layers + output + 100 * kv)


def test_offline_throughput_s_floor_is_that_of_its_decode_steps() -> None:
    floors = Floors(CONFIG, STORED, Machine(bandwidth=1.0, flops=1e30))
    # The first of 4 tokens is made by the prompt's own steps, the others with 11, 12 and 13 tokens of each request.
    assert floor_seconds(floors, Work(requests=3, prompt=10, output=4)) == (
        3 * 2 * (LAYER_WEIGHTS + OUTPUT_WEIGHTS) + 3 * (11 + 12 + 13) * 32
    )


def test_a_window_bounds_what_is_read() -> None:
    machine = Machine(bandwidth=1.0, flops=1e30)
    windowed = CONFIG.replace(windows=(4, None))
    assert (
        Floors(CONFIG, STORED, machine).decode([10]).seconds - Floors(windowed, STORED, machine).decode([10]).seconds
        == 6 * 16
    )


def test_a_prompt_behind_a_window_reads_what_its_first_query_sees() -> None:
    windowed = Floors(CONFIG.replace(windows=(4, None)), STORED, Machine(bandwidth=1.0, flops=1e30))
    # Of 10 tokens before it, the first query sees 3 besides itself in one layer, all in the other.
    assert windowed.prefill(5, 8, start=10).seconds - windowed.prefill(5, 8).seconds == (3 + 10) * 16


def test_every_phase_is_measured_beside_its_floor(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(tiny_model, *SIZES, "--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.svg")) == 0
    assert "<svg" in (tmp_path / "r.svg").read_text()
    results = json.loads((tmp_path / "r.json").read_text())
    assert list(results["first_tokens"]) == ["8", "40"]
    assert [(cell["context"], cell["requests"]) for cell in results["decode"]] == [(8, 1), (8, 3), (40, 1), (40, 3)]
    for cell in (*results["first_tokens"].values(), *results["decode"]):
        assert 0 < cell["floor"] < cell["seconds"]
    long_answer, long_prompt, chat = results["chats"]
    assert (long_answer["prompt_tokens"], long_answer["decoded_tokens"]) == (16, 63)
    assert (long_prompt["prompt_tokens"], long_prompt["decoded_tokens"]) == (256, 7)
    # Prompts of 32, 72, 112 and 152 tokens; of the histories before them, of which the last token was never computed,
    # whole blocks of 16 are found.
    assert (chat["prompt_tokens"], chat["decoded_tokens"]) == (32 + 72 + 112 + 152, 4 * 7)
    assert chat["cached_tokens"] == 32 + 64 + 112
    out = capsys.readouterr().out
    assert "Prefill: a prompt of 40 tokens has its first token after" in out
    assert "Decode: at a context of 40 tokens 1 request gets" in out
    assert "not measured" not in out


def test_what_does_not_fit_the_time_is_not_measured(tiny_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(tiny_model, *SIZES, "--budget", "1e-9") == 0
    out = capsys.readouterr().out
    assert out.count("not measured: no time left of ") == 3 + 2 + 4
    assert "Prefill and decode were not measured." in out


def test_a_cell_that_the_pool_has_no_room_for_says_so(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(phases_measure, "free_memory", lambda: 0)
    flags = ("--prompt-lens", "8", "--contexts", "8", "--requests", "1", "30", "--dtype", "float32", "--quick")
    assert bench(tiny_model, *flags, "--json", str(tmp_path / "r.json")) == 0
    # The longest request, of 264 tokens, takes 17 blocks of 16, and 30 requests of 8 + 9 tokens take 60.
    why = "not measured: 60 blocks needed, 17 in the pool"
    assert why in capsys.readouterr().out
    results = json.loads((tmp_path / "r.json").read_text())
    assert results["not_measured"] == {
        "chats": {},
        "first_tokens": {},
        "decode": [{"context": 8, "requests": 30, "why": why}],
    }


def test_more_requests_than_an_engine_usually_runs_decode_at_once(tiny_model: str, tmp_path: Path) -> None:
    flags = ("--prompt-lens", "8", "--contexts", "33", "--requests", "300", "--dtype", "float32", "--quick")
    assert bench(tiny_model, *flags, "--json", str(tmp_path / "r.json")) == 0
    (cell,) = json.loads((tmp_path / "r.json").read_text())["decode"]
    assert (cell["context"], cell["requests"]) == (33, 300)


def test_defaults_that_a_small_model_has_no_room_for_are_left_out_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(save_tiny_model(tmp_path / "model", max_position_embeddings=128))
    assert bench(model, "--quick", "--json", str(tmp_path / "r.json")) == 0
    out = capsys.readouterr().out
    assert "prompt-lens: 128, 256 left out; this model has room for 127 before one new token." in out
    assert "contexts: 256 left out; this model has room for 119 before 9 new tokens." in out
    assert "long prompt, short answer: left out; it has 264 tokens, and this model has room for 128." in out
    results = json.loads((tmp_path / "r.json").read_text())
    assert list(results["first_tokens"]) == ["64"]
    assert {cell["context"] for cell in results["decode"]} == {64}
    assert len(results["notes"]) == 4
    assert "not measured" not in out


def test_a_model_of_few_positions_is_measured(tmp_path: Path) -> None:
    model = str(save_tiny_model(tmp_path / "model", max_position_embeddings=16))
    assert bench(model, "--quick", "--json", str(tmp_path / "r.json")) == 0
    results = json.loads((tmp_path / "r.json").read_text())
    assert list(results["first_tokens"]) == ["15"]
    assert {cell["context"] for cell in results["decode"]} == {7}


def test_a_failed_forward_pass_is_one_line_and_no_traceback(
    tiny_model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: ModelRunner, batch: object) -> torch.Tensor:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(ModelRunner, "forward", fail)
    assert bench(tiny_model, *SIZES) == 1
    assert "the device is gone" in capsys.readouterr().err.splitlines()[-1]


def test_a_chat_whose_time_ends_within_an_answer_is_not_measured(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ThirtySteps(TimeBudget):
        asked = 0

        def allows(self, expected_seconds: float = 0.0) -> bool:
            self.asked += 1
            return self.asked <= 30

    monkeypatch.setattr(phases_measure, "TimeBudget", ThirtySteps)
    assert bench(tiny_model, *SIZES, "--json", str(tmp_path / "r.json")) == 0
    results = json.loads((tmp_path / "r.json").read_text())
    assert results["chats"] == [], "the first answer has 64 tokens"
    assert list(results["first_tokens"]) == ["8", "40"], "the next measurement has a time of its own"


def test_more_numbers_of_requests_than_colors_are_drawn(tmp_path: Path) -> None:
    requests = (1, 2, 3, 4, 5, 6, 7)
    results = Results((64,), (64, 256), requests, ())
    results.decode = {(context, number): Cell(0.02, 0.01, "reading") for context in (64, 256) for number in requests}
    phases_report.plot(results, tmp_path / "r.svg")
    assert "<svg" in (tmp_path / "r.svg").read_text()


def test_an_interrupt_keeps_what_was_measured(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Engine.step

    def step_until_interrupted(self: Engine) -> list[RequestOutput]:
        if self.scheduler.num_waiting == 3:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Engine, "step", step_until_interrupted)
    assert bench(tiny_model, *SIZES, "--json", str(tmp_path / "r.json")) == 130
    results = json.loads((tmp_path / "r.json").read_text())
    assert results["partial"]
    assert list(results["first_tokens"]) == ["8", "40"]
    assert [(cell["context"], cell["requests"]) for cell in results["decode"]] == [(8, 1)]
    out = capsys.readouterr().out
    assert "partial" in out
    assert out.count("not measured: interrupted") == 3


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--prompt-lens", "64", "512"), "prompt-lens is 512; this model has room for 511"),
        (("--contexts", "500"), "contexts is 500; this model has room for 487"),
        (("--requests", "1000000"), "requests is 1000000; it must be from 1 to 1024"),
        (("--requests", "1" + "0" * 400), "0000; it must be from 1 to 1024"),
        (("--budget", "1e300"), "budget is 1e+300; it must be from 0 to 86400"),
        (("--model", "no/such/model"), "model 'no/such/model' is not 'default'"),
        (("--json", "nowhere/r.json"), "json is nowhere/r.json; there is no folder nowhere"),
    ],
)
def test_bad_input_is_one_line(
    tiny_model: str, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], said: str
) -> None:
    assert bench(tiny_model, *flags) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_help_names_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["bench", "phases", "--help"])
    out = capsys.readouterr().out
    assert all(flag in out for flag in ("--prompt-lens", "--contexts", "--requests", "--budget", "--quick"))


def test_words_are_computed() -> None:
    results = Results((64, 128), (64, 256), (1, 8), ())
    results.first_tokens = {64: Cell(0.5, 0.1, "arithmetic"), 128: Cell(0.8, 0.2, "arithmetic")}
    results.decode = {(64, 1): Cell(0.02, 0.01, "reading"), (64, 8): Cell(0.04, 0.01, "reading")}
    prefill, decode = phases_report.sentences(results)
    assert (
        "128 tokens has its first token after 0.80 s, 160 tokens/s; arithmetic alone would take 0.20 s, 25%" in prefill
    )
    assert "1 request gets 50.0 tokens/s, 50% of what reading allows; 8 requests get 200.0 tokens/s, 25%" in decode
