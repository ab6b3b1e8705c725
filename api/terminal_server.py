"""A server for a terminal command: one that runs already, or one of its own, ended with it.

Knows how a server is started, waited for and ended; not what it is asked.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from rich.console import Console

from pageframe.api.auth import ADMIN_KEY_VARIABLE, API_KEYS_VARIABLE
from pageframe.api.terminal_http import ServerError, fetch_json

SERVE_COMMAND = (sys.executable, "-m", "pageframe.api.cli", "serve")
PROBE_SECONDS = 2.0
POLL_SECONDS = 0.05
#: From the request to end until the child is killed; serving ends well within it.
GRACE_SECONDS = 10.0
_LOG_TAIL_BYTES = 4096


class OwnServer:
    """A server that runs as a child of this process, with its output in a temporary log."""

    def __init__(self, child: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.url = url
        self._child = child
        self._log = log

    @property
    def has_ended(self) -> bool:
        return self._child.poll() is not None

    def death_note(self) -> str:
        """Why it ended: the last line of its log, and where the log is."""
        lines = self._log.read_bytes()[-_LOG_TAIL_BYTES:].decode("utf-8", "replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
        reason = last.removeprefix("pageframe: ").removeprefix("error: ")
        return f"the server has ended ({self._child.returncode}): {reason} (its log: {self._log})"

    def ends_within(self, seconds: float) -> bool:
        """Whether it has ended, or does so in the next seconds: its connections close a little before."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # it has not
            self._child.wait(seconds)
        return self.has_ended

    def wait_until_ready(self) -> None:
        """Return once it serves.

        Raises:
            ServerError: it has ended.
        """
        while not is_serving(self.url):
            if self.ends_within(POLL_SECONDS):
                raise ServerError(self.death_note())

    def end(self, grace: float) -> None:
        """Terminate, wait, kill. The log is kept where it may say why the server ended by itself."""
        if self.has_ended:
            return
        self._child.terminate()
        try:
            self.ends_within(grace)
        finally:
            if not self.has_ended:
                os.killpg(self._child.pid, signal.SIGKILL)
                self._child.wait()
            self._log.unlink()


@contextlib.contextmanager
def own_server(
    status: Console,
    model: str | None,
    command: Sequence[str] = SERVE_COMMAND,
    grace: float = GRACE_SECONDS,
) -> Iterator[OwnServer]:
    """Start a server on a free port of 127.0.0.1, wait until it serves, and end it at the end, however that comes.

    Args:
        status: shows that the model is loading.
        model: the server's --model; None leaves it out.
        grace: seconds from SIGTERM to SIGKILL.

    Raises:
        ServerError: it ended before it served.
    """
    port = _free_port()
    arguments = [*command, "--port", str(port), "--drain-timeout", "0", "--log-level", "warning"]
    if model is not None:
        arguments += ["--model", model]
    # Whoever talks to it has started it, and needs no key.
    environ = {name: value for name, value in os.environ.items() if name not in (API_KEYS_VARIABLE, ADMIN_KEY_VARIABLE)}
    with tempfile.NamedTemporaryFile(prefix="pageframe-serve-", suffix=".log", delete=False) as log:
        # Its own session: Ctrl-C in the terminal stops an answer, not the server.
        child = subprocess.Popen(
            arguments,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = OwnServer(child, f"http://127.0.0.1:{port}", Path(log.name))
    try:
        with _exit_on_signals():
            with status.status("loading the model"):
                server.wait_until_ready()
            yield server
    finally:
        server.end(grace)


def is_serving(url: str) -> bool:
    """Whether a server answers there that is ready to serve, by its /health."""
    return _health(url) == "ok"


def is_there(url: str) -> bool:
    """Whether a server answers there that is ready to serve or will be."""
    return _health(url) in ("ok", "starting")


def wait_while_starting(url: str, status: Console) -> None:
    """Return as soon as the server is not loading its model (any more), whatever else it is."""
    if _health(url) == "starting":
        with status.status("loading the model"):
            while _health(url) == "starting":
                time.sleep(POLL_SECONDS)


def _health(url: str) -> str:
    """/health's `status`, or "none" where nothing answers so."""
    try:
        answer = fetch_json(url, "/health", PROBE_SECONDS)
    except ServerError as error:
        answer = error.content
    return str(answer.get("status", "none"))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, so that what must be ended with this process is."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, _exit) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
