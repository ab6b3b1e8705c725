"""The dashboard: a web page of static files, all from this server.

They are read once; only a file that was found then can be asked for, so no path leads anywhere else.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
from dataclasses import dataclass
from importlib.resources.abc import Traversable

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from pageframe.api.service import ServerState

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".json": "application/json",
}
#: Nothing comes from or goes to anywhere else, and no other page may frame it.
_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; base-uri 'none'; "
        "form-action 'self'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    media_type: str
    etag: str


async def dashboard(state: ServerState, request: Request) -> Response:
    """The web page that draws what the engine does."""
    return _answer(request, "index.html")


async def dashboard_file(state: ServerState, request: Request) -> Response:
    """A file of the dashboard."""
    return _answer(request, request.path_params["name"] or "index.html")


async def home(state: ServerState, request: Request) -> Response:
    """Whoever opens the server in a browser is shown the dashboard."""
    return RedirectResponse("/dashboard")


def _answer(request: Request, name: str) -> Response:
    file = _files().get(name)
    if file is None:
        raise HTTPException(404)
    headers = {**_HEADERS, "etag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.body, media_type=file.media_type, headers=headers)


@functools.cache
def _files() -> dict[str, _File]:
    """By path below the folder."""
    found: dict[str, _File] = {}
    _collect(importlib.resources.files("pageframe.api.dashboard"), "", found)
    return found


def _collect(folder: Traversable, prefix: str, found: dict[str, _File]) -> None:
    for entry in folder.iterdir():
        name = prefix + entry.name
        media_type = _TYPES.get("." + entry.name.rpartition(".")[2])
        if entry.is_dir():
            _collect(entry, name + "/", found)
        elif media_type is not None:
            body = entry.read_bytes()
            found[name] = _File(body, media_type, f'"{hashlib.sha256(body).hexdigest()[:32]}"')
