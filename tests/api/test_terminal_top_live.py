"""`pageframe top` in a real terminal: keys, sizes, a server that comes and goes, and how it leaves the terminal."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator

import pytest

from .scripted_server import ScriptedServer
from .test_terminal_top import FIRST, NOW, answers, make_step

#: Makes its standard input its terminal, and becomes the command.
LAUNCH = """\
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
TOP = ("-m", "pageframe.api.cli", "top", "--every", "0.05")
#: Draws once, and fails in the second drawing.
FAILING = """\
import sys
from pageframe.api import cli, terminal_top
from pageframe.api.terminal_top_drawing import Picture
class Failing(Picture):
    def __rich_console__(self, console, options):
        if self._view.sample is not None:
            raise RuntimeError("drawing failed")
        return super().__rich_console__(console, options)
terminal_top.Picture = Failing
sys.exit(cli.main(["top", *sys.argv[1:]]))
"""
DEADLINE_SECONDS = 30.0
ENTER_SCREEN, LEAVE_SCREEN, SHOW_CURSOR = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h"


class Terminal:
    """A terminal in which a command runs, and what it wrote since the last key."""

    def __init__(self, *argv: str, width: int = 100, height: int = 30) -> None:
        self._terminal, self._inside = pty.openpty()
        self.resize(width, height)
        self.settings = termios.tcgetattr(self._inside)
        self.written = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, *argv],
            stdin=self._inside,
            stdout=self._inside,
            stderr=self._inside,
            env=environment | {"TERM": "xterm-256color"},
        )

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def press(self, keys: bytes) -> None:
        self.written = ""
        os.write(self._terminal, keys)

    def forget(self) -> None:
        """What was written until now."""
        while select.select([self._terminal], [], [], 0)[0]:
            self._decoder.decode(os.read(self._terminal, 65536))
        self.written = ""

    def wait_for(self, text: str) -> str:
        """Until this was written; returns all that was, without colours and the like."""
        self._read_until(lambda: text in self.plain)
        return self.plain

    @property
    def plain(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.written)

    def _read_until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not done():
            left = deadline - time.monotonic()
            assert left > 0, f"it never came; there is:\n{self.plain[-3000:]}"
            if select.select([self._terminal], [], [], left)[0]:
                self.written += self._decoder.decode(os.read(self._terminal, 65536))

    def end(self) -> int:
        """The exit status; the terminal is as it was before."""
        status = self.process.wait(DEADLINE_SECONDS)
        while select.select([self._terminal], [], [], 0)[0]:
            self.written += self._decoder.decode(os.read(self._terminal, 65536))
        assert termios.tcgetattr(self._inside) == self.settings
        assert LEAVE_SCREEN in self.written
        assert SHOW_CURSOR in self.written
        return status

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(DEADLINE_SECONDS)
        os.close(self._terminal)
        os.close(self._inside)


@pytest.fixture
def served() -> Iterator[ScriptedServer]:
    story = {"id": FIRST, "complete": True, "sentences": [{"step": 1, "time": 0, "kind": "x", "text": "It tells."}]}
    found = answers()
    request = found["/inspect/requests"][0]["requests"][0]
    found[f"/inspect/requests/{FIRST}"] = [{"step": 1, **request}]
    found[f"/inspect/requests/{FIRST}/story"] = [story]
    with ScriptedServer(found) as server:
        yield server


@pytest.fixture
def terminal(served: ScriptedServer) -> Iterator[Terminal]:
    terminal = Terminal(*TOP, "--url", served.url)
    terminal.wait_for("tokens/s: prefill 40")
    assert ENTER_SCREEN in terminal.written
    yield terminal
    terminal.close()


def test_keys_are_answered_and_q_quits(terminal: Terminal) -> None:
    terminal.press(b"h")
    terminal.wait_for("back to the list")
    terminal.press(b"\x1b")
    terminal.wait_for("request▾")
    terminal.press(b"ss")
    terminal.wait_for("blocks▾")
    terminal.press(b"r")
    terminal.wait_for("blocks▴")
    terminal.press(b"r\x1b[H\r")
    assert "It tells." in terminal.wait_for("logical → physical") + terminal.wait_for("It tells.")
    terminal.press(b"q")
    assert terminal.end() == 0


def test_a_new_size_is_drawn_at_once(terminal: Terminal) -> None:
    terminal.press(b" ")
    terminal.wait_for("PAUSED")
    terminal.forget()
    terminal.resize(40, 10)
    terminal.wait_for("top  2 running")
    assert "pageframe top" not in terminal.plain
    terminal.press(b"q")
    assert terminal.end() == 0


def test_a_picture_that_is_paused_stands_still(terminal: Terminal, served: ScriptedServer) -> None:
    terminal.press(b" ")
    terminal.wait_for("PAUSED")
    served.answers["/inspect/kv"] = [served.answers["/inspect/kv"][0] | {"step": 4321, "preemptions": 77}]
    served.answers["/inspect/steps?since=1235"] = [{"steps": [make_step(4321, NOW)]}]
    terminal.press(b"h")
    assert "4,321" not in terminal.wait_for("back to the list")
    terminal.press(b" ")
    terminal.wait_for("step 4,321")
    terminal.press(b"q")
    assert terminal.end() == 0


def test_a_server_that_goes_away_and_comes_back(terminal: Terminal, served: ScriptedServer) -> None:
    before = served.answers["/inspect/kv"]
    served.answers["/inspect/kv"] = [(503, {"error": {"message": "the server is shutting down", "code": None}})]
    terminal.wait_for("the server is shutting down; the picture is")
    terminal.forget()
    assert "chatcmpl-0a1b2c3d…" in terminal.wait_for("trying again") + terminal.wait_for("request▾")
    served.answers["/inspect/kv"] = [before[-1] | {"preemptions": 99}]
    terminal.wait_for("preemptions 99")
    terminal.forget()
    terminal.wait_for("preemptions 99")
    assert "trying again" not in terminal.plain
    terminal.press(b"q")
    assert terminal.end() == 0


def test_a_server_that_is_not_there_yet(served: ScriptedServer) -> None:
    before = served.answers.pop("/inspect/kv")
    terminal = Terminal(*TOP, "--url", served.url)
    try:
        terminal.wait_for("there is no /inspect/kv; trying again")
        served.answers["/inspect/kv"] = before
        terminal.wait_for("tokens/s: prefill 40")
        terminal.press(b"q")
        assert terminal.end() == 0
    finally:
        terminal.close()


@pytest.mark.parametrize(("how", "status"), [("Ctrl-C", 0), ("SIGTERM", 128 + signal.SIGTERM)])
def test_the_terminal_is_restored_by_whatever_ends_it(terminal: Terminal, how: str, status: int) -> None:
    if how == "Ctrl-C":
        terminal.press(b"\x03")
    else:
        terminal.process.terminate()
    assert terminal.end() == status


def test_the_terminal_is_restored_after_a_failure(served: ScriptedServer) -> None:
    terminal = Terminal("-c", FAILING, "--url", served.url)
    try:
        terminal.wait_for("drawing failed")
        assert terminal.end() == 1
        assert terminal.written.index(LEAVE_SCREEN) < terminal.written.index("drawing failed")
    finally:
        terminal.close()
