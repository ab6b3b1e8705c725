"""Errors as HTTP shows them: OpenAI's shape, and the one mapping from exceptions to status codes.

Knows nothing of routes, nor of what went wrong inside: a 500 never carries the inside out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from pageframe.api.encoding import json_response
from pageframe.runtime.errors import (
    EngineDeadError,
    InvalidRequestError,
    PageframeError,
    RequestNotFoundError,
    TooManyWaitError,
)

RETRY_AFTER_SECONDS = 5
#: A place in the queue becomes free sooner than a model loads or a server restarts.
QUEUE_RETRY_AFTER_SECONDS = 1
MAX_SHOWN = 60
INTERNAL_MESSAGE = "the server failed on this request; its log says how"
_BITS_PER_DIGIT = 3.3219


class ApiError(PageframeError):
    """An answer other than success, as status code and OpenAI's four fields.

    Args:
        kind: the `type` field, such as "invalid_request_error".
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def content(self) -> dict[str, Any]:
        """The JSON object of the answer, or of an error event in a stream."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return json_response(self.content(), status=self.status, headers=self.headers)


def internal_error(message: str = INTERNAL_MESSAGE) -> ApiError:
    return ApiError(500, message, kind="server_error")


def unavailable(message: str, *, code: str, retry: bool) -> ApiError:
    """503. `retry`: it will pass, so say when to ask again."""
    headers = {"retry-after": str(RETRY_AFTER_SECONDS)} if retry else {}
    return ApiError(503, message, kind="service_unavailable_error", code=code, headers=headers)


def engine_dead() -> ApiError:
    """The answer to a request that comes after the engine process has ended."""
    return unavailable("the engine has ended and serves no more requests", code="engine_dead", retry=False)


def queue_full(message: str) -> ApiError:
    """429: more requests wait than may."""
    headers = {"retry-after": str(QUEUE_RETRY_AFTER_SECONDS)}
    return ApiError(429, message, kind="rate_limit_error", code="queue_full", headers=headers)


def shutting_down() -> ApiError:
    return unavailable("the server is shutting down", code="shutting_down", retry=True)


def to_api_error(error: PageframeError) -> ApiError:
    """What a client is told of an exception raised on purpose."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequestError):
        return ApiError(400, error.message, param=error.param, code=error.code)
    if isinstance(error, RequestNotFoundError):
        return ApiError(404, str(error), code="request_not_found")
    if isinstance(error, TooManyWaitError):
        return queue_full(str(error))
    if isinstance(error, EngineDeadError):
        return internal_error("the engine ended while it served this request")
    return internal_error()


def shorten(value: object) -> str:
    """A value from a request as a message shows it: as JSON, long ones cut."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, int) and value.bit_length() > MAX_SHOWN * _BITS_PER_DIGIT:
        return f"an integer of about {round(value.bit_length() / _BITS_PER_DIGIT)} digits"
    if isinstance(value, str) and len(value) > MAX_SHOWN:
        return f"{json.dumps(value[:MAX_SHOWN], ensure_ascii=False)}… ({len(value)} characters)"
    return json.dumps(value, ensure_ascii=False)
