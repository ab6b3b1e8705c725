"""JSON and server-sent events as bytes. Knows nothing of what they say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

_encoder = msgspec.json.Encoder()
encode_json = _encoder.encode

DONE_EVENT = b"data: [DONE]\n\n"


def json_response(content: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode_json(content), status_code=status, headers=headers, media_type="application/json")


def sse_event(content: Any) -> bytes:
    """One event of a stream: `data: {json}` and a blank line. JSON escapes line ends, so one line is enough."""
    return b"data: " + encode_json(content) + b"\n\n"
