"""What operators and rude clients do: gone clients, killed engines, ports in use, models that are none."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pageframe.benchmarks.experiments.server_process import RunningServer, running_server

PATIENCE_SECONDS = 30.0


def get(url: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def post(url: str, body: dict[str, Any]) -> tuple[int, Any]:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def eventually(condition: Callable[[], bool], what: str) -> float:
    """Wait until `condition` holds; returns the seconds it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < PATIENCE_SECONDS, f"not within {PATIENCE_SECONDS:g} s: {what}"
        time.sleep(0.01)
    return time.monotonic() - started


def open_completion(url: str, body: dict[str, Any]) -> socket.socket:
    """Send a completion request over a bare socket, to read as little of the answer as one likes."""
    host, port = url.removeprefix("http://").split(":")
    payload = json.dumps(body).encode()
    connection = socket.create_connection((host, int(port)), timeout=60)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\n"
    connection.sendall(f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload)
    return connection


def long_request(stream: bool) -> dict[str, Any]:
    return {"prompt": "Count:", "max_tokens": 2000, "ignore_eos": True, "stream": stream, "temperature": 0}


def requests(url: str) -> dict[str, int]:
    counts = get(f"{url}/inspect/kv")[1]["requests"]
    return {"running": counts["running"], "waiting": counts["waiting"]}


def running(url: str) -> int:
    return sum(requests(url).values())


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "unstreamed"])
def test_a_client_that_goes_away_frees_its_blocks(server: RunningServer, stream: bool, n: int) -> None:
    connection = open_completion(server.url, {**long_request(stream), "n": n})
    eventually(lambda: running(server.url) == n, "the request runs")
    connection.close()
    took = eventually(lambda: running(server.url) == 0, "the request is gone")
    assert took < 1.0
    assert get(f"{server.url}/inspect/kv")[1]["blocks"]["used"] == 0


def test_many_clients_that_go_away_leave_nothing(server: RunningServer) -> None:
    for _ in range(5):
        connections = [open_completion(server.url, long_request(stream=True)) for _ in range(20)]
        eventually(lambda: running(server.url) == 20, "all twenty are there")
        for connection in connections:
            connection.close()
        eventually(lambda: running(server.url) == 0, "all twenty are gone")
    kv = get(f"{server.url}/inspect/kv")[1]
    assert kv["blocks"]["free"] + kv["blocks"]["cached"] == kv["num_blocks"]


def test_a_reset_and_a_salt_keep_prefixes_apart(server: RunningServer) -> None:
    def cached_tokens(**fields: Any) -> int:
        body = {"prompt": "One sheep, two sheep, " * 20, "max_tokens": 1, **fields}
        status, answer = post(f"{server.url}/v1/completions", body)
        assert status == 200
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    post(f"{server.url}/reset_prefix_cache", {})
    assert [cached_tokens(), cached_tokens(cache_salt="mine")] == [0, 0]
    hit = cached_tokens()
    assert hit >= 64
    assert hit % get(f"{server.url}/inspect/kv")[1]["block_size"] == 0
    assert cached_tokens(cache_salt="mine") == hit
    cached = get(f"{server.url}/inspect/kv")[1]["blocks"]["cached"]
    assert post(f"{server.url}/reset_prefix_cache", {}) == (200, {"blocks_forgotten": cached})
    assert cached_tokens() == 0
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as response:
        text = response.read().decode()
    hits, queries = (
        float(text.split(f'pageframe:prefix_cache_{name}_total{{model_name="SmolLM2-135M-Instruct"}} ')[1].split()[0])
        for name in ("hits", "queries")
    )
    assert 2 * hit <= hits < queries


def test_a_full_queue_turns_requests_away_and_serves_those_it_took() -> None:
    with running_server("--kv-memory", "64MiB", "--max-num-requests", "2", "--max-queue", "2") as own:
        connections = [open_completion(own.url, long_request(stream=True)) for _ in range(4)]
        eventually(lambda: requests(own.url) == {"running": 2, "waiting": 2}, "two run and two wait")
        status, answer = post(f"{own.url}/v1/completions", {"prompt": "Hi", "max_tokens": 1})
        assert (status, answer["error"]["code"]) == (429, "queue_full")
        for connection in connections:
            connection.close()
        eventually(lambda: requests(own.url) == {"running": 0, "waiting": 0}, "all are gone")

        with ThreadPoolExecutor(16) as pool:
            body = {"prompt": "Hi", "max_tokens": 16, "ignore_eos": True}
            answers = list(pool.map(lambda _: post(f"{own.url}/v1/completions", body), range(32)))
        assert {status for status, _ in answers} == {200, 429}
        assert all(answer["usage"]["completion_tokens"] == 16 for status, answer in answers if status == 200)
        eventually(lambda: requests(own.url) == {"running": 0, "waiting": 0}, "all are done")


def test_a_killed_engine_is_seen_within_a_second_and_nobody_hangs() -> None:
    with running_server("--kv-memory", "64MiB") as own:
        streaming = open_completion(own.url, long_request(stream=True))
        waiting = open_completion(own.url, long_request(stream=False))
        eventually(lambda: running(own.url) == 2, "both run")
        os.kill(own.engine_pid, signal.SIGKILL)
        took = eventually(lambda: get(f"{own.url}/health")[0] == 503, "health turns red")
        assert took < 1.0
        assert b'"error"' in read_all(streaming), "the stream ended without an error event"
        assert b" 500 " in read_all(waiting).split(b"\r\n")[0]
        status, body = get(f"{own.url}/inspect/kv")
        assert status == 503
        assert body["error"]["message"]


def read_all(connection: socket.socket) -> bytes:
    """Everything up to the end of the answer: a closed connection, or the terminating chunk."""
    received = b""
    while not received.endswith(b"0\r\n\r\n"):
        piece = connection.recv(65536)
        if not piece:
            break
        received += piece
        if b"content-length" in received.lower() and _is_complete(received):
            break
    connection.close()
    return received


def _is_complete(received: bytes) -> bool:
    head, _, body = received.partition(b"\r\n\r\n")
    lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return bool(lengths) and len(body) >= int(lengths[0])


def test_the_engine_ends_when_its_parent_is_killed() -> None:
    with running_server("--kv-memory", "64MiB") as own:
        engine = own.engine_pid
        own.process.kill()
        own.process.wait()
        eventually(lambda: not alive(engine), "the orphaned engine ends")


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_sigterm_lets_a_running_request_finish() -> None:
    with running_server("--kv-memory", "64MiB") as own:
        body = {"prompt": "Count:", "max_tokens": 24, "ignore_eos": True, "stream": True, "temperature": 0}
        connection = open_completion(own.url, body)
        eventually(lambda: running(own.url) == 1, "the request runs")
        own.process.send_signal(signal.SIGTERM)
        assert b"data: [DONE]" in read_all(connection)
        assert own.process.wait(PATIENCE_SECONDS) == 0


def fails_with_one_line(*flags: str) -> str:
    """Run `pageframe serve` with flags that cannot work; returns its one line of complaint."""
    command = [sys.executable, "-m", "pageframe.api.cli", "serve", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_a_port_in_use_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert str(port) in fails_with_one_line("--port", str(port))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--model", "/nowhere/model.gguf"), "/nowhere/model.gguf"),
        (("--kv-memory", "1KiB"), "one block"),
        (("--num-blocks", "100000000"), "memory"),
        (("--max-model-len", "1000000"), "8192"),
        (("--device", "cuda"), "cuda"),
    ],
    ids=["missing-model", "no-block-fits", "too-many-blocks", "too-long", "no-gpu"],
)
def test_what_cannot_start_says_so_in_one_line(flags: tuple[str, ...], said: str) -> None:
    assert said in fails_with_one_line("--port", "0", *flags)


def test_damaged_model_files_are_one_line(tmp_path: Path) -> None:
    garbage = tmp_path / "garbage.gguf"
    garbage.write_bytes(b"not a model at all" * 100)
    assert str(garbage) in fails_with_one_line("--port", "0", "--model", str(garbage))
    truncated = tmp_path / "truncated.gguf"
    truncated.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + (5).to_bytes(8, "little"))
    assert str(truncated) in fails_with_one_line("--port", "0", "--model", str(truncated))
    (tmp_path / "empty").mkdir()
    assert "config.json" in fails_with_one_line("--port", "0", "--model", str(tmp_path / "empty"))


def test_what_lies_in_the_current_folder_is_not_imported(tmp_path: Path) -> None:
    """A model's folder may hold Python files; serving from it must not run them, nor fail over their names."""
    (tmp_path / "json.py").write_text("raise SystemExit(1)")
    (tmp_path / "random.py").write_text("raise SystemExit(1)")
    command = [str(Path(sys.executable).parent / "pageframe"), "serve", "--port", "0", "--model", "/nowhere.gguf"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert "/nowhere.gguf" in done.stderr
