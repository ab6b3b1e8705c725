"""The file that a batch's results are appended to, and what it holds from an earlier run.

Knows nothing of requests.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from pageframe.api.batch_lines import RESULT_PREFIX, BadLine, BatchRequest, Scan, open_file
from pageframe.runtime.errors import ConfigError, PageframeError

_BEGINNING = f'{{"id":"{RESULT_PREFIX}'.encode()


class ResultFileError(PageframeError):
    """A result cannot be written."""


class _Error(msgspec.Struct):
    line: int


class _Result(msgspec.Struct):
    id: str
    custom_id: str | None
    response: msgspec.Raw
    error: _Error | None


_decoder = msgspec.json.Decoder(_Result)


class ResultFile:
    """Results, a line each, in the order in which they come. What is appended stays, however the process ends.

    Args:
        file: not buffered.
        custom_ids: of the requests that have a result.
        bad_lines: numbers of the lines without a custom_id that have one.
    """

    def __init__(self, path: Path, file: BinaryIO, custom_ids: set[str], bad_lines: set[int]) -> None:
        self._path = path
        self._file = file
        self._custom_ids = custom_ids
        self._bad_lines = bad_lines

    @property
    def num_results(self) -> int:
        return len(self._custom_ids) + len(self._bad_lines)

    def has(self, line: BatchRequest | BadLine) -> bool:
        """Whether it had a result at the start."""
        return line.number in self._bad_lines if line.custom_id is None else line.custom_id in self._custom_ids

    def append(self, result: bytes) -> None:
        """Raises: ResultFileError: it cannot be written; what there is of it is cut off by the next run."""
        rest = memoryview(result)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise ResultFileError(f"{self._path} cannot be written: {error.strerror or error}") from None


@contextmanager
def open_results(path: Path, requests: Scan) -> Iterator[ResultFile]:
    """Opens the file for one run alone, makes it where it is not there, and cuts off a line that was not written whole.

    Raises:
        ConfigError: it is no regular file, cannot be written or is being written by another run, or it holds something
            else than results of these requests.
    """
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is no regular file, so an earlier run's results could not be found in it")
    with open_file(path, "ab", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"{path} is being written by another run") from None
        done, bad_lines, size = _read(path)
        foreign = next(iter(done - requests.custom_ids), None)
        if foreign is not None:
            raise ConfigError(
                f"{path} has a result for {foreign[:100]!r}, which is not among the requests; choose another --output"
            )
        file.truncate(size)
        yield ResultFile(path, file, done, bad_lines & requests.nameless)


def _read(path: Path) -> tuple[set[str], set[int], int]:
    """The custom_ids and the lines without one that have a result, and how many bytes the whole lines take."""
    custom_ids, bad_lines, size = set[str](), set[int](), 0
    with open_file(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n") and line[: len(_BEGINNING)] == _BEGINNING[: len(line)]:
                break  # the last one, which was not written whole
            try:
                result = _decoder.decode(line)
            except (msgspec.DecodeError, RecursionError):
                raise ConfigError(f"{path}, line {number}, is no result of a batch; choose another --output") from None
            size += len(line)
            if result.custom_id is not None:
                custom_ids.add(result.custom_id)
            elif result.error is not None:
                bad_lines.add(result.error.line)
    return custom_ids, bad_lines, size
