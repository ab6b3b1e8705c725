"""What the terminal commands need of HTTP: a server's address, a key, GET of a JSON object, errors as one line.

Knows nothing of what is asked or drawn.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import urllib.parse
from typing import Any

from rich.console import Console

from pageframe.runtime.errors import PageframeError

Json = dict[str, Any]

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_SECONDS = 30.0
#: Holds the key that is sent to a server.
KEY_VARIABLE = "PAGEFRAME_API_KEY"
#: What a person at a terminal can do about an error, by its code.
_KEY_HINTS = {
    "missing_api_key": f"; {KEY_VARIABLE} is where this command takes it from",
    "invalid_api_key": f"; it came from {KEY_VARIABLE}",
    "admin_key_needed": f"; {KEY_VARIABLE} is where this command takes it from",
}


class ServerError(PageframeError):
    """A server cannot be reached, or refuses.

    Args:
        status: its HTTP status, 0 where there was no answer.
        code: the error's `code` in OpenAI's shape, if it has one.
        content: the JSON object it answered with, {} for none.
    """

    def __init__(self, message: str, *, status: int = 0, code: str | None = None, content: Json | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.content = content or {}


def server_url(text: str) -> str:
    """A server's address as argparse reads it, without a trailing slash or /v1."""
    parts = urllib.parse.urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise argparse.ArgumentTypeError(f"{text!r} is no server's address; it must be like {DEFAULT_URL}")
    try:
        _ = parts.port
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


def open_connection(url: str, timeout: float = TIMEOUT_SECONDS) -> http.client.HTTPConnection:
    """A connection to a server; it is made when the first request is sent. Close it."""
    parts = urllib.parse.urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(str(parts.hostname), parts.port, timeout=timeout)


def full_path(url: str, path: str) -> str:
    """`path` below the path that the server's address has."""
    return urllib.parse.urlsplit(url).path + path


def key_header() -> dict[str, str]:
    """What tells a server with keys who asks, from the environment; nothing where that holds no key.

    Raises:
        ServerError: no HTTP header may carry it.
    """
    key = os.environ.get(KEY_VARIABLE, "")
    if not (key.isascii() and key.isprintable()):
        raise ServerError(f"{KEY_VARIABLE} holds a character that no HTTP header may carry")
    return {"authorization": f"Bearer {key}"} if key else {}


def fetch_json(url: str, path: str, timeout: float = TIMEOUT_SECONDS) -> Json:
    """GET a JSON object.

    Raises:
        ServerError: no answer, another status than 200, or something else than a JSON object.
    """
    value = _json_object(fetch_body(url, path, timeout))
    if value is None:
        raise ServerError(f"{url}{path} answers with something that is no JSON object")
    return value


def fetch_body(url: str, path: str, timeout: float = TIMEOUT_SECONDS) -> bytes:
    """GET whatever is there.

    Raises:
        ServerError: no answer, or another status than 200.
    """
    # /health needs no key, and is asked of whoever may listen there.
    headers = {} if path == "/health" else key_header()
    connection = open_connection(url, timeout)
    try:
        connection.request("GET", full_path(url, path), headers=headers)
        response = connection.getresponse()
        body = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise unreachable(url, error) from error
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise refusal(response.status, body)
    return body


def unreachable(url: str, error: Exception) -> ServerError:
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return ServerError(f"no answer from {url}: {reason}")


def refusal(status: int, body: bytes) -> ServerError:
    """The error a server gave, in its own words where it has OpenAI's shape."""
    content = _json_object(body)
    error = (content or {}).get("error")
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        message = error["message"] + _KEY_HINTS.get(str(error.get("code")), "")
        return ServerError(message, status=status, code=error.get("code"), content=content)
    reason = f"{status} {http.client.responses.get(status, '')}".rstrip()
    return ServerError(f"the server answers {reason}", status=status, content=content)


def print_error(message: str) -> None:
    """One line on stderr."""
    Console(stderr=True).print(f"pageframe: {message}", style="red", markup=False, highlight=False, soft_wrap=True)


def _json_object(body: bytes) -> Json | None:
    try:
        value = json.loads(body)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
