"""Another engine's process: started in a group of its own, stopped between its turns, ended with all its children."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

START_SECONDS = 600.0
END_SECONDS = 20.0
LOG_LINES = 8
#: What this project sets for its own threads, which must not reach another engine's.
OWN_VARIABLES = ("GOMP_SPINCOUNT", "PYTHONPATH")


class PeerError(Exception):
    """An engine did not do what was asked of it; what it said last, if anything."""


def foreign_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """For an engine that is not ours: this process's environment without what is meant for our own, and `variables`."""
    return {key: value for key, value in os.environ.items() if key not in OWN_VARIABLES} | dict(variables)


class PeerProcess:
    """A process and its children, which take no processor time outside `turn()`.

    Raises:
        PeerError: it could not be started.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self._folder = tempfile.TemporaryDirectory()
        self._log = Path(self._folder.name) / "log"
        try:
            with self._log.open("wb") as log:
                self.popen = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=environment,
                    text=True,
                    start_new_session=True,  # Ctrl-C is for this process alone, and the group can be stopped whole
                )
        except OSError as error:
            self._folder.cleanup()
            raise PeerError(f"{name}: {command[0]} does not start: {error.strerror}") from error

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Let it run until the block ends."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """End it and its children."""
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(END_SECONDS)
        self._signal(signal.SIGKILL)
        self.popen.wait()
        for pipe in (self.popen.stdin, self.popen.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._folder.cleanup()

    def failure(self, what: str) -> PeerError:
        """`what` went wrong, with the last lines that the process wrote."""
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return PeerError("\n".join([f"{self.name}: {what}", *lines]))

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, number)


class JsonLines(PeerProcess):
    """A worker that writes one JSON line when it is ready, and then one for each that it reads."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        super().__init__(name, command, environment)
        try:
            with self.turn():
                self.ready = self._read()
        except BaseException:
            self.close()
            raise

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one line.

        Raises:
            PeerError: the worker ended, or did not answer with a JSON object.
        """
        assert self.popen.stdin is not None
        with self.turn():
            try:
                self.popen.stdin.write(json.dumps(question) + "\n")
                self.popen.stdin.flush()
            except BrokenPipeError:
                raise self.failure("the worker has ended") from None
            return self._read()

    def _read(self) -> dict[str, Any]:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise self.failure(f"the worker answered {line.strip()!r}" if line else "the worker has ended")
        return answer


class PeerServer(PeerProcess):
    """An HTTP server with /health. Its output goes nowhere.

    Args:
        url: where it will listen, without a path.

    Raises:
        PeerError: it did not become healthy.
    """

    def __init__(self, name: str, url: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        # A pipe that nobody reads would fill up and hold the server.
        super().__init__(name, ["sh", "-c", 'exec "$@" >&2', "sh", *command], environment)
        self.url = url
        try:
            with self.turn():
                self._wait_until_healthy()
        except BaseException:
            self.close()
            raise

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.popen.poll() is not None:
                raise self.failure(f"the server ended with status {self.popen.returncode}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise self.failure(f"the server was not healthy after {START_SECONDS:g} s")
