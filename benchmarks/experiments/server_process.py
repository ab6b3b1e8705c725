"""A `pageframe serve` of one's own, for experiments and end-to-end tests: started, awaited, ended."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

START_SECONDS = 240.0
STOP_SECONDS = 60.0


class ServerError(RuntimeError):
    """A server ended, or did not become healthy in time."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that answers.

    Args:
        url: without a path, such as http://127.0.0.1:23456.
        process: the HTTP process.
    """

    url: str
    process: subprocess.Popen[bytes]

    @property
    def engine_pid(self) -> int:
        """The engine's process id (Linux)."""
        pid = self.process.pid
        (engine,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(engine)


@contextlib.contextmanager
def running_server(*flags: str, poll_seconds: float = 0.1) -> Iterator[RunningServer]:
    """Serve on a free port of 127.0.0.1 until the block ends.

    Args:
        flags: of `pageframe serve`, without --port.
        poll_seconds: how long to wait before /health is asked again.

    Raises:
        ServerError: it ended, or did not become healthy in time.
    """
    port = free_port()
    command = [sys.executable, "-m", "pageframe.api.cli", "serve", "--port", str(port), *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_healthy(url, process, poll_seconds)
        yield RunningServer(url, process)
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], poll_seconds: float) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerError(f"the server ended with status {process.returncode} before it was healthy")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(poll_seconds)
    raise ServerError(f"the server was not healthy after {START_SECONDS:g} s")
