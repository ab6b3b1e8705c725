"""`pageframe chat` against scripted streams, and the life of the server that it starts."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler

import pytest
from rich.console import Console

from pageframe.api.terminal_chat import Answer, Conversation, Terminal

from .chat_scripts import (
    MODELS,
    NOWHERE,
    answer,
    break_off,
    chat,
    contents,
    open_stream,
    piece,
    refuse,
    send_event,
    type_lines,
)
from .scripted_server import WAIT_SECONDS, ScriptedServer, Streamer, send

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


def test_the_terminal_commands_import_neither_torch_nor_benchmarks() -> None:
    code = (
        "import sys, pageframe.api.terminal_chat, pageframe.api.terminal_inspect, pageframe.api.plan_command\n"
        "sys.exit(str([name for name in sys.modules if name == 'torch' or 'benchmarks' in name] or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""
