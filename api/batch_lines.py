"""The lines of a batch in OpenAI's format: requests in one file, results in another.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {…}}
    {"id": "batch_req_…", "custom_id": "a", "response": {"status_code": 200, "request_id": …, "body": {…}}, …}

Knows nothing of how a request is answered.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from pageframe.api.encoding import encode_json
from pageframe.runtime.errors import ConfigError

#: The routes whose requests a batch may hold.
URLS = ("/v1/chat/completions", "/v1/completions")
#: Far beyond the largest body a server takes by default; a longer line is not read into memory.
MAX_LINE_BYTES = 64 * 1024**2
MAX_CUSTOM_ID = 512
#: How the id of every result begins.
RESULT_PREFIX = "batch_req_"


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A line that asks for something.

    Args:
        number: the line's, from 1.
        body: the JSON of the request's body.
    """

    number: int
    custom_id: str
    url: str
    body: bytes


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is no request.

    Args:
        custom_id: None where it has none.
        reason: what is wrong.
    """

    number: int
    custom_id: str | None
    reason: str


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _CustomId(msgspec.Struct):
    custom_id: str


class _Stream(msgspec.Struct):
    stream: bool | None = None


_line_decoder = msgspec.json.Decoder(_Line)
_custom_id_decoder = msgspec.json.Decoder(_CustomId)
_stream_decoder = msgspec.json.Decoder(_Stream)


def read_requests(file: BinaryIO) -> Iterator[BatchRequest | BadLine]:
    """The lines of a file of requests; empty ones are passed over."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES):
        number += 1
        if line.isspace():
            continue
        if len(line) < MAX_LINE_BYTES:
            yield _parse(number, line)
            continue
        while not line.endswith(b"\n") and (line := file.readline(MAX_LINE_BYTES)):
            pass
        yield BadLine(number, None, f"it has {MAX_LINE_BYTES} bytes or more")


def _parse(number: int, line: bytes) -> BatchRequest | BadLine:
    try:
        request = _line_decoder.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        return BadLine(number, _custom_id(line), f"it is no request of a batch: {error}")
    body = bytes(request.body)
    wrong = _fault(request, body)
    if wrong is not None:
        return BadLine(number, _fit_id(request.custom_id), wrong)
    return BatchRequest(number, request.custom_id, request.url, body)


def _fault(request: _Line, body: bytes) -> str | None:
    if _fit_id(request.custom_id) is None:
        return f"custom_id has {len(request.custom_id)} characters; it must have 1 to {MAX_CUSTOM_ID}"
    if request.method != "POST":
        return f"method is {request.method[:20]!r}; it must be 'POST'"
    if request.url not in URLS:
        return f"url is {request.url[:100]!r}; it must be one of {', '.join(URLS)}"
    if not body.startswith(b"{"):
        return "body must be a JSON object, in braces"
    try:
        streams = _stream_decoder.decode(body).stream
    except (msgspec.DecodeError, RecursionError):
        return None  # what is wrong with the body, its route says
    return "stream is true; a batch has whole answers alone" if streams else None


def _custom_id(line: bytes) -> str | None:
    try:
        return _fit_id(_custom_id_decoder.decode(line).custom_id)
    except (msgspec.DecodeError, RecursionError):
        return None


def _fit_id(custom_id: str) -> str | None:
    return custom_id if 1 <= len(custom_id) <= MAX_CUSTOM_ID else None


@dataclass(slots=True)
class Scan:
    """What a file of requests holds.

    Args:
        custom_ids: of its lines.
        nameless: the numbers of those without one.
    """

    custom_ids: set[str] = field(default_factory=set)
    nameless: set[int] = field(default_factory=set)

    @property
    def num_lines(self) -> int:
        """Lines that are not empty."""
        return len(self.custom_ids) + len(self.nameless)


def scan_requests(path: Path) -> Scan:
    """The custom_ids of a file of requests.

    Raises:
        ConfigError: it cannot be read or is no file, has no line, or has a custom_id twice.
    """
    if not path.is_file():
        raise ConfigError(f"{path} is no {'regular file' if path.exists() else 'file'}")
    scan, places = Scan(), dict[str, int]()
    with open_file(path, "rb") as file:
        for line in read_requests(file):
            if line.custom_id is None:
                scan.nameless.add(line.number)
                continue
            scan.custom_ids.add(line.custom_id)
            first = places.setdefault(line.custom_id, line.number)
            if first != line.number:
                raise ConfigError(
                    f"{path}: lines {first} and {line.number} both have the custom_id {line.custom_id[:100]!r}; "
                    "each must be another"
                )
    if not scan.num_lines:
        raise ConfigError(f"{path} has no line")
    return scan


def open_file(path: Path, mode: str, buffering: int = -1) -> BinaryIO:
    """Raises: ConfigError: it cannot be opened."""
    try:
        file: Any = path.open(mode, buffering)
    except OSError as error:
        raise ConfigError(f"{path} cannot be opened: {error.strerror or error}") from None
    binary: BinaryIO = file
    return binary


def answer_line(request: BatchRequest, status: int, request_id: str, body: bytes) -> bytes:
    """The result of a request that was answered, with whatever status.

    Args:
        body: JSON.
    """
    response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
    return _result(request.custom_id, response, None)


def error_line(line: BadLine) -> bytes:
    """The result of a line that is no request."""
    message = f"line {line.number}: {line.reason}"
    return _result(line.custom_id, None, {"code": "invalid_line", "message": message, "line": line.number})


def _result(custom_id: str | None, response: dict[str, Any] | None, error: dict[str, Any] | None) -> bytes:
    content = {
        "id": f"{RESULT_PREFIX}{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return encode_json(content) + b"\n"
