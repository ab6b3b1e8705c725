"""`pageframe chat` against scripted streams, and the life of the server that it starts."""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pageframe.api.terminal_chat import Answer, Conversation, Terminal, add_arguments, run
from pageframe.api.terminal_http import ServerError
from pageframe.api.terminal_server import own_server

from .scripted_server import WAIT_SECONDS, Json, ScriptedServer, Streamer, send

MODELS: dict[str, list[Any]] = {
    "/health": [{"status": "ok"}],
    "/v1/models": [{"object": "list", "data": [{"id": "tiny"}]}],
}
NOWHERE = "http://127.0.0.1:1"


def open_stream(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("content-type", "text/event-stream")
    handler.end_headers()


def send_event(handler: BaseHTTPRequestHandler, value: Any) -> None:
    handler.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")


def piece(text: str | None, finish_reason: str | None = None) -> Json:
    delta = {"role": "assistant", "content": ""} if text is None else {"content": text}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}], "usage": None}


def answer(*texts: str, finish_reason: str = "stop", tokens: int = 5) -> Streamer:
    """A whole stream as the server sends it."""
    usage = {"prompt_tokens": 12, "completion_tokens": tokens, "total_tokens": 12 + tokens}

    def stream(handler: BaseHTTPRequestHandler) -> None:
        open_stream(handler)
        for event in [piece(None), *map(piece, texts), piece("", finish_reason), {"choices": [], "usage": usage}]:
            send_event(handler, event)
        handler.wfile.write(b"data: [DONE]\n\n")

    return stream


def refuse(status: int, message: str, code: str | None = None) -> Streamer:
    body = json.dumps({"error": {"message": message, "type": "x", "param": None, "code": code}}).encode()
    return lambda handler: send(handler, status, body)


def break_off(*events: Any) -> Streamer:
    def stream(handler: BaseHTTPRequestHandler) -> None:
        open_stream(handler)
        for event in events:
            send_event(handler, event)

    return stream


def chat(*argv: str, **parameters: Any) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args(argv), **parameters)


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))


def contents(body: Json) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in body["messages"]]


# ---- one answer -----------------------------------------------------------------------------------------------------


def test_a_message_is_answered_on_stdout_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer(MODELS, [answer("Par", "is", ".\n\x1b\t\r ü")]) as server:
        flags = ["--system", "Be brief.", "--temperature", "0", "--max-tokens", "9", "--seed", "-3", "--model", "m"]
        assert chat("--url", server.url, *flags, "Capital of France?") == 0
    assert server.bodies == [
        {
            "model": "m",
            "temperature": 0.0,
            "max_tokens": 9,
            "seed": -3,
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Capital of France?"},
            ],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]
    captured = capsys.readouterr()
    assert captured.out == "Paris.\n\x1b\t\r ü\n"
    assert captured.err == ""


def test_what_is_not_said_is_not_sent(capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer(MODELS, [answer("yes")]) as server:
        assert chat("--url", server.url + "/v1", "really?") == 0
    assert set(server.bodies[0]) == {"model", "messages", "stream", "stream_options"}
    assert server.bodies[0]["model"] == "tiny"


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (refuse(400, "temperature is 99; it must be from 0 to 10"), "temperature is 99; it must be from 0 to 10"),
        (refuse(503, "busy [red]"), "busy [red]"),
        (break_off(piece("Par"), {"error": {"message": "the engine ended"}}), "the engine ended"),
        (break_off(piece("Par")), "the answer broke off before its end"),
        (break_off([1]), "the stream holds something that is no JSON object: b'[1]'"),
        (lambda handler: send(handler, 404, b"<html>"), "the server answers 404 Not Found"),
    ],
)
def test_a_failure_is_one_line_on_stderr(stream: Streamer, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer(MODELS, [stream]) as server:
        assert chat("--url", server.url, "hi") == 1
    assert capsys.readouterr().err == f"pageframe: {message}\n"


def test_an_unreachable_url_is_one_line_and_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer() as server:
        url = server.url
    assert chat("--url", url, "hi", serve_command=["/no/such/command"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"pageframe: no answer from {url}: Connection refused\n"


def test_a_server_without_models_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer({"/v1/models": [{"data": []}]}) as server:
        assert chat("--url", server.url, "hi") == 1
    assert capsys.readouterr().err == f"pageframe: {server.url}/v1/models lists no model\n"


def test_a_server_that_is_loading_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    starting = (503, {"status": "starting", "reason": "the model is still loading"})
    answers = MODELS | {"/health": [starting, starting, starting, {"status": "ok"}]}
    with ScriptedServer(answers, [answer("yes")]) as server:
        assert chat("hi", default_url=server.url) == 0
        assert server.asked == ["/health"] * 4 + ["/v1/models"]
    assert capsys.readouterr().out == "yes\n"


# ---- a conversation -------------------------------------------------------------------------------------------------


def test_a_conversation_keeps_its_history_and_obeys_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_lines(monkeypatch, "one", "", "two", "/clear", "three", "/system Be kind.", "four", "/exit", "five")
    with ScriptedServer(MODELS, [answer("1"), answer("2"), answer("3"), answer("4")]) as server:
        assert chat("--url", server.url, "--system", "Be brief.") == 0
    brief, kind = ("system", "Be brief."), ("system", "Be kind.")
    assert [contents(body) for body in server.bodies] == [
        [brief, ("user", "one")],
        [brief, ("user", "one"), ("assistant", "1"), ("user", "two")],
        [brief, ("user", "three")],
        [kind, ("user", "three"), ("assistant", "3"), ("user", "four")],
    ]
    out = capsys.readouterr().out
    assert out.startswith(f"tiny at {server.url}. /help lists commands.\n1\n5 tokens, ")
    assert "system: Be kind." in out


def test_commands_that_only_tell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    type_lines(monkeypatch, "/help", "/system", "/wat is it")  # and Ctrl-D
    with ScriptedServer(MODELS) as server:
        assert chat("--url", server.url) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in ("/clear", "/system TEXT", "/exit", "Ctrl-C"))
    assert "system: nothing" in out
    assert "there is no /wat; /help lists the commands" in out


def test_a_refused_question_is_forgotten_and_the_conversation_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_lines(monkeypatch, "one", "two", "three")
    full = refuse(400, "the prompt has 9,000 tokens; the limit is 8,192", "context_length_exceeded")
    with ScriptedServer(MODELS, [answer("1"), full, answer("3")]) as server:
        assert chat("--url", server.url) == 0
    assert contents(server.bodies[2]) == [("user", "one"), ("assistant", "1"), ("user", "three")]
    out = " ".join(capsys.readouterr().out.split())
    assert "the prompt has 9,000 tokens; the limit is 8,192" in out
    assert "/clear starts a new one" in out


def test_ctrl_c_at_the_prompt_ends_with_0(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    with ScriptedServer(MODELS) as server:
        assert chat("--url", server.url) == 0


class Interrupted:
    """A stream that sends one piece, presses Ctrl-C when that has been shown, and sees whether the client goes."""

    def __init__(self) -> None:
        self.shown = threading.Event()
        self.client_left = threading.Event()

    def stream(self, handler: BaseHTTPRequestHandler) -> None:
        open_stream(handler)
        send_event(handler, piece("Once upon"))
        assert self.shown.wait(WAIT_SECONDS)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        try:
            while True:  # ends with an error once the client has closed the connection
                handler.wfile.write(b": still here\n\n")
        except OSError:
            self.client_left.set()

    def show(self, text: str) -> None:
        self.shown.set()


def test_ctrl_c_stops_an_answer_by_closing_the_connection_and_keeps_the_conversation() -> None:
    interrupted = Interrupted()
    with ScriptedServer(MODELS, [interrupted.stream, answer("2")]) as server:
        conversation = Conversation(server.url, {})
        stopped = conversation.ask("one", interrupted.show)
        assert interrupted.client_left.wait(WAIT_SECONDS)
        assert (stopped.stopped, stopped.text) == (True, "Once upon")
        assert conversation.ask("two", lambda text: None).text == "2"
    assert contents(server.bodies[1]) == [("user", "one"), ("assistant", "Once upon"), ("user", "two")]


def test_an_answer_stopped_before_its_first_piece_leaves_no_question_behind() -> None:
    def interrupt(handler: BaseHTTPRequestHandler) -> None:
        open_stream(handler)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        send_event(handler, piece(None))

    with ScriptedServer(MODELS, [interrupt]) as server:
        conversation = Conversation(server.url, {})
        assert conversation.ask("one", lambda text: None).stopped
    assert conversation.turns == []


def test_a_terminal_gets_no_control_characters_from_a_model() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    terminal = Terminal(Conversation(NOWHERE, {}), console, "tiny", None)
    terminal.show("a\x1b]0;title\x07b\x9b2J\r\tc\n\N{ZERO WIDTH JOINER}é")
    assert console.file.getvalue() == "a]0;titleb2J\tc\n\N{ZERO WIDTH JOINER}é"  # type: ignore[attr-defined]


def test_a_reader_that_leaves_is_no_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stdout, ScriptedServer(MODELS, [answer("yes")]) as server:
        monkeypatch.setattr("sys.stdout", stdout)
        assert chat("--url", server.url, "hi") == 1
    assert capsys.readouterr().err == ""


def test_counts_and_speed_after_an_answer() -> None:
    times = iter([100.0, 100.1, 100.5, 101.0, 102.5, 103.0, 103.0])
    with ScriptedServer(MODELS, [answer("a", "b", "c", tokens=1001, finish_reason="length")]) as server:
        conversation = Conversation(server.url, {}, clock=lambda: next(times))
        summary = conversation.ask("one", lambda text: None).summary()
    assert summary == (
        "cut off by max_tokens or the end of the context, 1,001 tokens, 500.0 tokens/s, prompt 12 tokens, "
        "first text after 0.50 s"
    )


def test_one_token_has_no_speed() -> None:
    one = Answer()
    one.take(piece("a"), 0.25)
    one.take({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}, 0.5)
    assert one.summary() == "1 tokens, prompt 3 tokens, first text after 0.25 s"


# ---- a server of its own --------------------------------------------------------------------------------------------

#: A server in so few lines, without http.server, since it starts in a few milliseconds.
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


def test_the_terminal_commands_import_neither_torch_nor_benchmarks() -> None:
    code = (
        "import sys, pageframe.api.terminal_chat, pageframe.api.terminal_inspect, pageframe.api.plan_command\n"
        "sys.exit(str([name for name in sys.modules if name == 'torch' or 'benchmarks' in name] or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""
