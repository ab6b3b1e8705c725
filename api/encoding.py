"""JSON and server-sent events as bytes. Knows nothing of what they say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

_encoder = msgspec.json.Encoder()
encode_json = _encoder.encode

#: Line ends to some readers of a stream, though not to server-sent events: U+2028, U+2029, U+0085.
_LINE_ENDS = (("\u2028".encode(), rb"\u2028"), ("\u2029".encode(), rb"\u2029"), ("\x85".encode(), rb"\u0085"))

DONE_EVENT = b"data: [DONE]\n\n"


def json_response(content: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode_json(content), status_code=status, headers=headers, media_type="application/json")


def sse_event(content: Any) -> bytes:
    """One event of a stream: `data: {json}` and a blank line. JSON escapes line ends, so one line is enough."""
    return b"data: " + on_one_line(encode_json(content)) + b"\n\n"


def on_one_line(json: bytes) -> bytes:
    """The same JSON without anything that any reader takes for a line's end."""
    for character, escape in _LINE_ENDS:
        json = json.replace(character, escape)
    return json
