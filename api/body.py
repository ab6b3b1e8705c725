"""A request's body: read within its limit, and taken as a JSON object. Knows nothing of fields."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from pageframe.api.errors import ApiError
from pageframe.runtime.errors import InvalidRequestError

JSON_TYPE = "application/json"
#: Larger bodies are parsed, templated and tokenised in a thread, so that other streams go on meanwhile.
LARGE_BODY_BYTES = 16 * 1024

T = TypeVar("T")


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body.

    The content type is checked because a browser sends any other one across origins without asking first.

    Raises:
        InvalidRequestError: the content type is not application/json.
        ApiError: 413, the body is larger than `max_bytes`.
    """
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != JSON_TYPE:
        shown = repr(content_type[:100]) if content_type else "missing"
        raise InvalidRequestError(f"the content-type header is {shown}; it must be {JSON_TYPE}", param="content-type")
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(declared, max_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(f"more than {max_bytes}", max_bytes)
    return bytes(body)


def parse_object(body: bytes) -> dict[str, Any]:
    """The body as a JSON object.

    Raises:
        InvalidRequestError: it is no JSON (NaN, Infinity and lone surrogates are none), nested too deep, a number is
            out of range, or it is no object.
    """
    try:
        content = msgspec.json.decode(body)
    except RecursionError:
        raise InvalidRequestError("the body's JSON is nested too deep", code="invalid_json") from None
    except msgspec.DecodeError as error:
        raise InvalidRequestError(f"the body is no valid JSON: {error}", code="invalid_json") from None
    if not isinstance(content, dict):
        raise InvalidRequestError("the body must be a JSON object, in braces", code="invalid_json")
    return content


async def prepare(body: bytes, work: Callable[[dict[str, Any]], T]) -> T:
    """`work(the body's object)`, in a thread where the body is large."""
    if len(body) > LARGE_BODY_BYTES:
        return await asyncio.to_thread(lambda: work(parse_object(body)))
    return work(parse_object(body))


def _too_large(size: str, max_bytes: int) -> ApiError:
    return ApiError(413, f"the body has {size} bytes; at most {max_bytes} are allowed", code="body_too_large")
