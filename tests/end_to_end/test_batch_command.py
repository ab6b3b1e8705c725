"""`pageframe generate` with the real model: stopped by Ctrl-C, gone on with, and a server's answers."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from pageframe.benchmarks.experiments.server_process import RunningServer

PATIENCE_SECONDS = 120.0


def request(number: int, max_tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Say {number}."}]
    body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return {"custom_id": f"say-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


class Files:
    """A file of requests, the first two short, and one for their results."""

    def __init__(self, folder: Path) -> None:
        self.input, self.output = folder / "requests.jsonl", folder / "results.jsonl"
        self.write_requests(long=2000)

    def write_requests(self, long: int) -> None:
        requests = [request(number, 4 if number < 2 else long) for number in range(4)]
        self.input.write_text("".join(json.dumps(item) + "\n" for item in requests))

    @property
    def command(self) -> list[str]:
        files = ["--input", str(self.input), "--output", str(self.output)]
        command = [sys.executable, "-m", "pageframe.api.cli", "generate", *files]
        return [*command, "--dtype", "float32", "--kv-memory", "256MiB"]

    def results(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def stop_after_two(self) -> str:
        """Runs the command, sends it Ctrl-C when it has written two results; returns what it said."""
        process = subprocess.Popen(self.command, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.output.exists() or len(self.results()) < 2:
            assert process.poll() is None, "it ended by itself"
            assert time.monotonic() < deadline, "no results came"
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 130
        return said


def check_answer(result: dict[str, Any], url: str) -> None:
    """What a server answers to the same request."""
    data = json.dumps(request(int(result["custom_id"][-1]), 4)["body"]).encode()
    post = urllib.request.Request(f"{url}/v1/chat/completions", data, {"content-type": "application/json"})
    with urllib.request.urlopen(post, timeout=PATIENCE_SECONDS) as response:
        expected = json.load(response)
    ours = result["response"]["body"]
    assert ours["choices"] == expected["choices"]
    assert ours["usage"]["completion_tokens"] == 4


def test_ctrl_c_keeps_what_is_done_which_is_what_a_server_answers(tmp_path: Path, server: RunningServer) -> None:
    files = Files(tmp_path)
    [last] = files.stop_after_two().splitlines()
    assert last.startswith("Stopped: 2 requests answered and 0 failed of 4; 8 output tokens")
    results = files.results()
    assert {result["custom_id"] for result in results} == {"say-0", "say-1"}
    for result in results:
        check_answer(result, server.url)


@pytest.mark.long
def test_gone_on_with_every_request_has_one_result(tmp_path: Path, server: RunningServer) -> None:
    files = Files(tmp_path)
    files.stop_after_two()
    files.write_requests(long=4)
    done = subprocess.run(files.command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True)
    assert "2 requests answered and 0 failed of 4 (2 had their results before)" in done.stderr
    results = files.results()
    assert sorted(result["custom_id"] for result in results) == [f"say-{number}" for number in range(4)]
    for result in results:
        check_answer(result, server.url)
