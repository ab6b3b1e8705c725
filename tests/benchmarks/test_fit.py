"""`pageframe bench fit`: what fits, counted by hand, and the traces it reads."""

from __future__ import annotations

import io
import json
import random
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pageframe.api.cli import main
from pageframe.benchmarks.experiments import fit, traces
from pageframe.benchmarks.experiments.fit import Filled, Pool, fill
from pageframe.benchmarks.experiments.report import InputError
from pageframe.benchmarks.experiments.traces import TraceRequest, at_rate, read_trace, scaled, synthetic_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:51.0000000,10,0
"""
MOONCAKE = """{"timestamp": 1500, "input_length": 10, "output_length": 2, "hash_ids": [0]}
{"timestamp": 500, "input_length": 7, "output_length": 1}
"""
SERVEGEN = {
    "chunk-0-trace.csv": "0,0,0,,0,0\n600,0.5,1.0,Gamma,1,1\n21600,1.5,1.0,Gamma,1,1\n",
    "chunk-0-dataset.json": json.dumps(
        {
            "0": {"input_tokens": "{100: 1.0}", "output_tokens": "{10: 0.5, 20: 0.5}"},
            "21600": {"input_tokens": "{300: 0.25, 400: 0.75}", "output_tokens": "{30: 1.0}"},
        }
    ),
    "chunk-1-trace.csv": "0,0,0,,0,0\n",
}


def requests_of(*lengths: tuple[int, int]) -> list[TraceRequest]:
    return [TraceRequest(float(index), prompt, output) for index, (prompt, output) in enumerate(lengths)]


# ---- filling a pool -------------------------------------------------------------------------------------------------


def test_each_way_by_hand() -> None:
    pool = Pool(num_blocks=10, block_size=4, max_len=12, max_tokens=5)
    requests = requests_of((3, 2), (6, 4), (1, 1), (5, 3), (7, 5), (2, 2))  # 5, 10, 2, 8, 12, 4 tokens
    # Blocks: 2, 3, 1, 2; the next one's 3 do not fit into the 2 that are left, and the last one must not overtake.
    assert fill(fit.PAGED, pool, requests) == Filled(4, used=25, wasted=7, left=8, emptied=False)
    assert fill(fit.RESERVED_MAX, pool, requests) == Filled(3, used=17, wasted=19, left=4, emptied=False)
    # 8, 11, 6, 10 slots; the next one's 12 do not fit into 5.
    assert fill(fit.RESERVED_TOKENS, pool, requests) == Filled(4, used=25, wasted=10, left=5, emptied=False)
    assert fill(fit.RESERVED_EXACT, pool, requests) == Filled(5, used=37, wasted=0, left=3, emptied=False)


def test_a_trace_may_end_before_the_pool_is_full() -> None:
    pool = Pool(num_blocks=10, block_size=4, max_len=12, max_tokens=5)
    assert all(fill(way, pool, requests_of((3, 2))).emptied for way in fit.WAYS)


def test_a_pool_past_all_bounds_costs_no_more_than_the_trace() -> None:
    pool = Pool(num_blocks=10**25, block_size=4, max_len=12, max_tokens=5)
    for way in fit.WAYS:
        filled = fill(way, pool, requests_of((3, 2), (6, 4)))
        assert (filled.requests, filled.used, filled.emptied) == (2, 15, True)
        assert filled.used + filled.wasted + filled.left == pool.num_slots


@pytest.mark.parametrize("seed", range(20))
def test_the_real_tables_agree_with_arithmetic(seed: int) -> None:
    chance = random.Random(seed)
    pool = Pool(chance.randint(5, 60), 2 ** chance.randint(0, 5), max_len=64, max_tokens=32)
    requests = requests_of(*((chance.randint(1, 32), chance.randint(1, 32)) for _ in range(40)))
    filled = fill(fit.PAGED, pool, requests)
    blocks = np.cumsum([-(-request.total_tokens // pool.block_size) for request in requests])
    assert filled.requests == int((blocks <= pool.num_blocks).sum())
    assert filled.used + filled.wasted + filled.left == pool.num_slots
    assert filled.used == sum(request.total_tokens for request in requests[: filled.requests])
    assert filled.wasted <= filled.requests * (pool.block_size - 1)


def test_more_fits_paged_than_with_the_longest_reserved() -> None:
    pool = Pool(num_blocks=1000, block_size=16, max_len=2048, max_tokens=1000)
    requests = [request for request in synthetic_trace(500, seed=1) if request.total_tokens <= pool.max_len]
    counts = [fill(way, pool, requests).requests for way in (fit.RESERVED_MAX, fit.RESERVED_TOKENS, fit.PAGED)]
    assert counts[0] < counts[1] < counts[2] <= fill(fit.RESERVED_EXACT, pool, requests).requests


def test_the_sentences_hold_the_medians() -> None:
    pool = Pool(num_blocks=10, block_size=10, max_len=50, max_tokens=5)
    results = {
        fit.PAGED: [Filled(12, 90, 5, 5, False), Filled(10, 94, 1, 5, False), Filled(14, 90, 3, 7, False)],
        fit.RESERVED_MAX: [Filled(2, 20, 80, 0, False)] * 3,
        fit.RESERVED_TOKENS: [Filled(4, 40, 50, 10, False)] * 3,
        fit.RESERVED_EXACT: [],
    }
    first, second = fit.sentences(pool, results)
    assert "holds 12 requests at once, 6.0 times as many as with 50 slots reserved for each (2)" in first
    assert "3.0 times as many as with prompt and max_tokens reserved (4)" in first
    assert "leaves 3.00% of the slots unused" in second
    assert "wastes 80.0%" in second
    assert "max_tokens 50.0%" in second
    assert fit.sentences(pool, results | {fit.PAGED: []}) == []


# ---- traces ---------------------------------------------------------------------------------------------------------


def test_azure_and_mooncake_are_read_in_the_order_of_arrival(tmp_path: Path) -> None:
    (tmp_path / "azure.csv").write_text(AZURE)
    first, second = read_trace(tmp_path / "azure.csv", 0)
    assert first == TraceRequest(0.0, 374, 44)
    assert (second.prompt_tokens, second.output_tokens) == (396, 109)
    assert second.arrival == pytest.approx(4.314579, abs=1e-6)
    (tmp_path / "mooncake.jsonl").write_text(MOONCAKE)
    assert read_trace(tmp_path / "mooncake.jsonl", 0) == [TraceRequest(0.0, 7, 1), TraceRequest(1.0, 10, 2)]


def test_servegen_is_drawn_by_rate_and_lengths(tmp_path: Path) -> None:
    folder = tmp_path / "clients"
    folder.mkdir()
    for name, text in SERVEGEN.items():
        (folder / name).write_text(text)
    requests = read_trace(folder, 7)
    assert len(requests) == traces.DRAWN_REQUESTS
    early = [request for request in requests if request.prompt_tokens == 100]
    late = [request for request in requests if request.prompt_tokens != 100]
    assert len(early) / len(requests) == pytest.approx(0.25, abs=0.02)  # 0.5 a second against 1.5
    assert {request.output_tokens for request in early} == {10, 20}
    assert {request.output_tokens for request in late} == {30}
    long = sum(request.prompt_tokens == 400 for request in late)
    assert long / len(late) == pytest.approx(0.75, abs=0.02)
    archive = tmp_path / "clients.tar.xz"
    with tarfile.open(archive, "w:xz") as writer:
        for name, text in SERVEGEN.items():
            member = tarfile.TarInfo("clients/" + name)
            member.size = len(text)
            writer.addfile(member, io.BytesIO(text.encode()))
    assert read_trace(archive, 7) == requests
    assert read_trace(archive, 8) != requests


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a,b\n1,2\n", "it is neither a CSV file with ContextTokens, GeneratedTokens, TIMESTAMP, nor JSON lines"),
        ("", "it is neither a CSV file"),
        (AZURE + "yesterday,1,1\n", "line 5 is no request"),
        (AZURE + "2023-11-16 18:15:50,many,1\n", "line 5 is no request"),
        (MOONCAKE + "{\n", "line 3 is no request"),
        ('{"timestamp": 0}', "line 1 is no request"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1}', "it holds no request of at least one prompt token"),
    ],
)
def test_a_trace_that_cannot_be_used_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(InputError, match=complaint) as raised:
        read_trace(path, 0)
    assert str(raised.value).startswith(f"trace is {path}; ")


def mooncake_of(timestamp: str, prompt: str = "1", output: str = "1") -> str:
    return MOONCAKE + f'{{"timestamp": {timestamp}, "input_length": {prompt}, "output_length": {output}}}\n'


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (mooncake_of("Infinity"), 3),
        (mooncake_of("NaN"), 3),
        (mooncake_of("1" + "0" * 400), 3),
        (mooncake_of("1", prompt="Infinity"), 3),
        (mooncake_of("1", output="NaN"), 3),
        (mooncake_of("[1]"), 3),
        (mooncake_of("1", prompt="null"), 3),
        (MOONCAKE + "[1, 2]\n", 3),
        (MOONCAKE + "[" * 100_000 + "\n", 3),
        (AZURE + "2023-11-16 18:15:50,1," + "9" * 200_000 + "\n", 5),
        (AZURE + "2023-11-16 18:15:50\n", 5),
        (AZURE + "\n2023-11-16 18:15:50,NaN,1\n", 6),
        ("TIMESTAMP" * 20_000, None),
    ],
)
def test_garbage_is_one_line_that_names_its_place(tmp_path: Path, text: str, line: int | None) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(InputError) as raised:
        read_trace(path, 0)
    place = "it can't be read: " if line is None else f"line {line} is no request: "
    assert str(raised.value).startswith(f"trace is {path}; {place}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("chunk-0-trace.csv", "0,1\n600,NaN\n", "chunk-0-trace.csv, line 2 is no time and rate"),
        ("chunk-0-trace.csv", "0,1\nInfinity,1\n", "chunk-0-trace.csv, line 2 is no time and rate"),
        ("chunk-0-trace.csv", "0," + "1" * 200_000, "chunk-0-trace.csv, line 1 is no time and rate"),
        ("chunk-0-trace.csv", "0,1e308\n600,1e308\n", "the sum of all rates is inf; it must be finite"),
        ("chunk-0-dataset.json", "[]", "chunk-0-dataset.json is not a JSON object"),
        ("chunk-0-dataset.json", '{"0": 3, "21600": [1]}', "it can't be read: "),
        ("chunk-0-dataset.json", '{"0": {"input_tokens": "{1: 1e999}"}}', "input_tokens is inf; it must be finite"),
        ("chunk-0-dataset.json", '{"0": {"input_tokens": "{1: 1.2.3}"}}', "it can't be read: "),
    ],
)
def test_garbage_in_distributions_is_named(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    for file, content in (SERVEGEN | {"chunk-0-trace.csv": "0,1\n600,1\n", name: text}).items():
        (tmp_path / file).write_text(content)
    with pytest.raises(InputError) as raised:
        read_trace(tmp_path, 0)
    assert complaint in str(raised.value)
    assert str(raised.value).startswith(f"trace is {tmp_path}; ")


@pytest.mark.parametrize("kind", ["xz", "gz", "bz2"])
@pytest.mark.parametrize("kept", [0.3, 0.6, 0.95])
def test_a_truncated_archive_is_named(tmp_path: Path, kind: str, kept: float) -> None:
    path = tmp_path / f"clients.tar.{kind}"
    content = random.Random(0).randbytes(40_000)  # it does not shrink, so that the cut is in the middle of it
    with tarfile.open(path, f"w:{kind}") as writer:
        member = tarfile.TarInfo("chunk-0-trace.csv")
        member.size = len(content)
        writer.addfile(member, io.BytesIO(content))
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * kept)])
    with pytest.raises(InputError) as raised:
        read_trace(path, 0)
    assert str(raised.value).startswith(f"trace is {path}; it can't be read: ")


def test_a_folder_without_clients_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"it holds no chunk-N-trace\.csv"):
        read_trace(tmp_path, 0)


def test_the_drawn_trace_is_that_of_its_seed_and_of_its_parameters() -> None:
    trace = synthetic_trace(20_000, seed=3)
    assert trace == synthetic_trace(20_000, seed=3)
    assert trace != synthetic_trace(20_000, seed=4)
    prompts = np.array([request.prompt_tokens for request in trace])
    outputs = np.array([request.output_tokens for request in trace])
    assert np.median(prompts) == pytest.approx(traces.PROMPT_MEDIAN, rel=0.05)
    assert np.median(outputs) == pytest.approx(traces.OUTPUT_MEDIAN, rel=0.05)
    below = np.log(np.percentile(prompts, 15.87) / traces.PROMPT_MEDIAN)
    assert -below == pytest.approx(traces.PROMPT_SIGMA, rel=0.05)
    assert outputs.max() == traces.OUTPUT_MAX
    assert trace[-1].arrival / len(trace) == pytest.approx(1.0, rel=0.05)


def test_a_stretch_is_scaled_by_one_factor_and_cut() -> None:
    trace = requests_of(*[(80, 20)] * 95, *[(900, 100)] * 5)
    requests, factor = scaled(trace, 100, max_len=50, seed=0)
    assert factor == pytest.approx(50 / np.percentile([100] * 95 + [1000] * 5, 95))
    assert all(
        request.total_tokens <= 50 and min(request.prompt_tokens, request.output_tokens) > 0 for request in requests
    )
    assert scaled(trace, 10, max_len=10_000, seed=0)[1] == 1
    with pytest.raises(InputError, match="requests is 101; the trace has 100"):
        scaled(trace, 101, max_len=50, seed=0)


def test_arrivals_are_stretched_to_a_rate() -> None:
    requests = [TraceRequest(time, 1, 1) for time in (0.0, 1.0, 9.0, 10.0, 20.0)]
    assert [request.arrival for request in at_rate(requests, 2.0)] == pytest.approx([0.0, 0.1, 0.9, 1.0, 2.0])
    assert {request.arrival for request in at_rate(requests, 0)} == {0.0}


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A model's shape without weights: 256 bytes of K and V a token, 4096 positions."""
    config: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    }
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_whole_run(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    plot, results = tmp_path / "fit.png", tmp_path / "fit.json"
    flags = ["--model", model, "--kv-memory", "4MiB", "--quick", "--plot", str(plot), "--json", str(results)]
    assert main(["bench", "fit", *flags]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Paged, the pool holds" in text
    assert f"The plot is in {plot}." in text.replace("\n", "")
    header = plot.read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    assert int.from_bytes(header[16:20], "big") >= 1200
    content = json.loads(results.read_text())
    assert content["pool"] == {"num_blocks": 1024, "block_size": 16, "max_len": 4096, "max_tokens": 1000}
    assert [len(content["ways"][way]) for way in fit.WAYS] == [5, 5, 5, 5]
    assert not content["partial"]


def test_more_memory_than_there_is_in_the_world(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mooncake.jsonl"
    path.write_text(MOONCAKE)
    flags = ["--model", model, "--kv-memory", "1000000000GiB", "--trace", str(path), "--quick", "--no-plot"]
    assert main(["bench", "fit", *flags]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Paged, the pool holds 2 requests at once" in text
    assert "prompts 8 tokens (longest 10)" in text  # two values have no 99th percentile


def test_the_seed_gives_the_same_numbers(tmp_path: Path, model: str) -> None:
    written = []
    for seed in ("5", "5", "6"):
        path = tmp_path / "fit.json"
        flags = ["--model", model, "--kv-memory", "4MiB", "--quick", "--seed", seed, "--no-plot", "--json", str(path)]
        assert main(["bench", "fit", *flags]) == 0
        written.append(json.loads(path.read_text())["ways"])
    assert written[0] == written[1]
    assert written[0] != written[2]


def test_ctrl_c_prints_what_was_measured(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def fill_until_interrupted(way: str, pool: Pool, requests: list[TraceRequest]) -> Filled:
        calls.append(way)
        if len(calls) == 11:
            raise KeyboardInterrupt
        return fill(way, pool, requests)

    monkeypatch.setattr(fit, "fill", fill_until_interrupted)
    assert main(["bench", "fit", "--model", model, "--kv-memory", "4MiB", "--quick", "--no-plot"]) == 130
    text = capsys.readouterr().out
    assert "Interrupted: partial results, 2 of 5 orders." in text
    assert "Paged, the pool holds" in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-len", "5000"], "max-len is 5000; it must be from 2 to the model's 4096 positions"),
        (["--kv-memory", "64KiB"], "kv-memory is 64KiB; it holds 256 tokens, fewer than one context of max-len, 4096"),
        (["--kv-memory", "much"], "'much' is not a size"),
        (["--block-size", "12"], "block_size is 12; it must be a power of two from 1 to 256"),
        (["--max-tokens", "3"], "max-tokens is 3; the trace has an answer of"),
        (["--max-len", "2", "--trace", "mooncake.jsonl"], "max-len is 2; every request of the trace is longer"),
        (["--orders", "0"], "orders is 0; it must be from 1 to 10000"),
        (["--seed", "-1"], "seed is -1; it must be at least 0"),
        (["--trace", "no/such/file"], "trace is no/such/file; it can't be read"),
        (["--json", "no/such/folder/x.json"], "json is no/such/folder/x.json; there is no folder no/such/folder"),
        (["--plot", "no/such/folder/x.png"], "plot is no/such/folder/x.png; there is no folder no/such/folder"),
        (["--model", "no/such/model"], "model 'no/such/model' is not 'default'"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path,
    model: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mooncake.jsonl").write_text(MOONCAKE)
    plot = [] if "--plot" in flags else ["--no-plot"]
    assert main(["bench", "fit", "--quick", "--model", model, *plot, *flags]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.strip().count("\n") == 0


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "fit", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for flag in (
        "--trace",
        "--kv-memory",
        "--max-len",
        "--orders",
        "--seed",
        "--quick",
        "--plot",
        "--no-plot",
        "--json",
    ):
        assert flag in text
