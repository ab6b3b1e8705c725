"""The life of the server that `pageframe chat` starts for itself: begun, waited for, and ended whatever happens."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from rich.console import Console

from pageframe.api.terminal_http import ServerError
from pageframe.api.terminal_server import own_server

from .chat_scripts import MODELS, NOWHERE, answer, chat, type_lines
from .scripted_server import ScriptedServer

STUB = """\
import json, os, signal, socket, sys
pid_file, mode = sys.argv[1:3]
open(pid_file, "w").write(json.dumps([os.getpid(), sys.argv[3:]]))
if mode == "fails":
    sys.exit("some noise\\npageframe: model 'x' is not there\\n")
def end(number, frame):
    open(pid_file + ".terminated", "w").close()
    os._exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN if mode == "stubborn" else end)
chunk = {"choices": [{"delta": {"content": "from the stub"}, "finish_reason": None}]}
answers = {
    "/health": json.dumps({"status": "ok"}),
    "/v1/models": json.dumps({"data": [{"id": "stub"}]}),
    "/v1/chat/completions": "data: " + json.dumps(chunk) + "\\n\\ndata: [DONE]\\n\\n",
}
listener = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])))
while True:
    connection, _ = listener.accept()
    request = b""
    while not request.endswith(b"}" if request.startswith(b"POST") else b"\\r\\n\\r\\n"):
        request += connection.recv(65536)
    if mode == "dies" and request.startswith(b"POST"):
        os._exit(9)
    connection.sendall(b"HTTP/1.0 200 OK\\r\\n\\r\\n" + answers[request.split()[1].decode()].encode())
    connection.close()
"""


class Stub:
    """A command that stands in for `pageframe serve`, and what became of it."""

    def __init__(self, folder: Path, mode: str) -> None:
        self._pid_file = folder / "pid"
        (folder / "stub.py").write_text(STUB)
        self.command = [sys.executable, "-I", "-S", str(folder / "stub.py"), str(self._pid_file), mode]

    @property
    def pid(self) -> int:
        pid: int = json.loads(self._pid_file.read_text())[0]
        return pid

    @property
    def arguments(self) -> list[str]:
        arguments: list[str] = json.loads(self._pid_file.read_text())[1]
        return arguments

    def was_terminated(self) -> bool:
        """Whether it ended by SIGTERM, in its own way."""
        return Path(f"{self._pid_file}.terminated").exists()

    def has_ended(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        return False


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary logs go."""
    folder = tmp_path / "logs"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_without_a_server_one_is_started_and_ended(
    tmp_path: Path, logs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stub = Stub(tmp_path, "serves")
    assert chat("hi", default_url=NOWHERE, serve_command=stub.command) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("from the stub\n", "")
    assert stub.arguments[0] == "--port"
    assert stub.arguments[2:] == ["--drain-timeout", "0", "--log-level", "warning"]
    assert stub.has_ended()
    assert stub.was_terminated()
    assert list(logs.iterdir()) == []


def test_a_server_that_runs_is_used_unless_a_model_is_named(
    tmp_path: Path, logs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stub = Stub(tmp_path, "serves")
    with ScriptedServer(MODELS, [answer("from the server")]) as server:
        assert chat("hi", default_url=server.url, serve_command=["/no/such/command"]) == 0
        assert chat("--serve-model", "a.gguf", "hi", default_url=server.url, serve_command=stub.command) == 0
    assert capsys.readouterr().out == "from the server\nfrom the stub\n"
    assert stub.arguments[-2:] == ["--model", "a.gguf"]
    assert stub.has_ended()


def test_a_server_that_cannot_start_says_why(tmp_path: Path, logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stub = Stub(tmp_path, "fails")
    assert chat("hi", default_url=NOWHERE, serve_command=stub.command) == 1
    (log,) = logs.iterdir()
    expected = f"pageframe: the server has ended (1): model 'x' is not there (its log: {log})\n"
    assert capsys.readouterr().err == expected
    assert "some noise" in log.read_text()


def test_a_server_that_dies_ends_the_conversation(
    tmp_path: Path, logs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub = Stub(tmp_path, "dies")
    type_lines(monkeypatch, "one", "two")
    assert chat(default_url=NOWHERE, serve_command=stub.command) == 1
    assert capsys.readouterr().err.startswith("pageframe: the server has ended (9): it printed nothing")
    assert chat("one", default_url=NOWHERE, serve_command=stub.command) == 1
    assert capsys.readouterr().err.startswith("pageframe: the server has ended (9): it printed nothing")


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), ServerError("oops"), SystemExit(3)])
def test_the_server_is_ended_whatever_happens(tmp_path: Path, logs: Path, failure: BaseException) -> None:
    stub = Stub(tmp_path, "serves")

    def fail_while_it_serves() -> None:
        with own_server(Console(file=io.StringIO()), None, stub.command):
            assert not stub.has_ended()
            raise failure

    with pytest.raises(type(failure)):
        fail_while_it_serves()
    assert stub.has_ended()
    assert list(logs.iterdir()) == []


def test_sigterm_ends_the_server_too(tmp_path: Path, logs: Path) -> None:
    stub = Stub(tmp_path, "serves")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught, own_server(Console(file=io.StringIO()), None, stub.command):
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.code == 128 + signal.SIGTERM
    assert stub.has_ended()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path, logs: Path) -> None:
    stub = Stub(tmp_path, "stubborn")
    with own_server(Console(file=io.StringIO()), None, stub.command, grace=0.05):
        pass
    assert stub.has_ended()
