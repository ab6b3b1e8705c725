"""A request's body: read within limits, taken as a JSON object, and worked on where that holds nobody else up.

Knows nothing of fields.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from pageframe.api.errors import QUEUE_RETRY_AFTER_SECONDS, ApiError
from pageframe.runtime.errors import InvalidRequestError

JSON_TYPE = "application/json"
#: Larger bodies are parsed, templated and tokenised in a thread, so that other streams go on meanwhile.
LARGE_BODY_BYTES = 16 * 1024
#: Still larger ones, which take seconds, come one at a time: together they would take every core, and gigabytes.
HUGE_BODY_BYTES = 256 * 1024
#: Bodies of the greatest length that may be held at once, read or being worked on.
MAX_FULL_BODIES = 8
#: A body that is still coming is let go of so long after its request, and as long more as what has come of it takes at
#: the slowest pace allowed: its bytes count among those held.
READ_SECONDS = 20.0
MIN_BYTES_PER_SECOND = 512 * 1024
#: Small bodies with a chat template to run, at once. A template may take seconds, and while several run the event loop
#: has its turn less often.
NUM_TEMPLATE_THREADS = 2
#: Numbers, texts, lists and objects in a body, beside lists of token ids.
MAX_VALUES = 2**18
_BACKSLASH = ord("\\")

T = TypeVar("T")


class BodyReader:
    """Takes request bodies in, one reader for a whole server.

    Args:
        max_bytes: of one body.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        #: Of all bodies that are being read or worked on.
        self._num_bytes = 0
        self._huge = ThreadPoolExecutor(1, thread_name_prefix="huge-body")
        self._templates = ThreadPoolExecutor(NUM_TEMPLATE_THREADS, thread_name_prefix="template")

    async def take(
        self,
        request: Request,
        work: Callable[[dict[str, Any]], T],
        *,
        max_ids: int = 0,
        has_template: bool = False,
        admit: Callable[[], None] = lambda: None,
    ) -> T:
        """`work(the body's object)`, in a thread where the body is large or `work` renders a template.

        The content type is checked because a browser sends any other one across origins without asking first.

        Args:
            max_ids: token ids that it may hold.
            has_template: a chat template is part of the work, which may take long whatever the body's length.
            admit: called before a large body is read, or read on; raises where it would be refused later.

        Raises:
            InvalidRequestError: the content type is not application/json, or as `parse_object`.
            ApiError: 408, the body comes too slowly; 413, it is larger than `max_bytes`; 415, it is compressed; 429, it
                is large and too much is held already.
        """
        encoding = request.headers.get("content-encoding", "identity")
        if encoding.strip().lower() not in ("", "identity"):
            raise ApiError(
                415,
                f"the content-encoding header is {encoding[:100]!r}; bodies are taken as they are (identity)",
                param="content-encoding",
                code="unsupported_encoding",
            )
        content_type = request.headers.get("content-type", "")
        if content_type.partition(";")[0].strip().lower() != JSON_TYPE:
            shown = repr(content_type[:100]) if content_type else "missing"
            raise InvalidRequestError(
                f"the content-type header is {shown}; it must be {JSON_TYPE}", param="content-type"
            )
        body = bytearray()
        try:
            await self._read(request, body, admit)
            return await self._work(len(body), has_template, lambda: work(parse_object(body, MAX_VALUES + max_ids)))
        finally:
            self._num_bytes -= len(body)

    async def _read(self, request: Request, body: bytearray, admit: Callable[[], None]) -> None:
        """Fills `body`, of which every byte counts as held from here on."""
        declared = request.headers.get("content-length", "")
        size = int(declared) if declared.isascii() and declared.isdigit() else 0
        if size > self._max_bytes:
            raise _too_large(declared, self._max_bytes)
        is_large = size > LARGE_BODY_BYTES
        if is_large:
            admit()
            self._check_room(size)
        begun = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(_deadline(begun, 0)) as deadline:
                async for chunk in request.stream():
                    body += chunk
                    self._num_bytes += len(chunk)
                    deadline.reschedule(_deadline(begun, len(body)))
                    if len(body) > self._max_bytes:
                        raise _too_large(f"more than {self._max_bytes}", self._max_bytes)
                    if len(body) > LARGE_BODY_BYTES:
                        if not is_large:
                            is_large = True
                            admit()
                        self._check_room(0)
        except TimeoutError:
            raise _too_slow(len(body), asyncio.get_running_loop().time() - begun) from None

    def _check_room(self, num_coming: int) -> None:
        limit, num_bytes = MAX_FULL_BODIES * self._max_bytes, self._num_bytes + num_coming
        if num_bytes > limit:
            raise ApiError(
                429,
                f"the bodies of all requests have {num_bytes} bytes; together at most {limit} are held",
                kind="rate_limit_error",
                code="too_many_bytes",
                headers={"retry-after": str(QUEUE_RETRY_AFTER_SECONDS)},
            )

    async def _work(self, num_bytes: int, has_template: bool, work: Callable[[], T]) -> T:
        if num_bytes > HUGE_BODY_BYTES:
            pool: ThreadPoolExecutor | None = self._huge
        elif num_bytes > LARGE_BODY_BYTES:
            pool = None
        elif has_template:
            pool = self._templates
        else:
            return work()
        return await asyncio.get_running_loop().run_in_executor(pool, work)


def parse_object(body: bytes | bytearray, max_values: int) -> dict[str, Any]:
    """The body as a JSON object.

    Raises:
        InvalidRequestError: it is no JSON (NaN, Infinity and lone surrogates are none), nested too deep, a number is
            out of range, there are too many values, or it is no object.
    """
    _check_num_values(body, max_values)
    try:
        content = msgspec.json.decode(body)
    except RecursionError:
        raise InvalidRequestError("the body's JSON is nested too deep", code="invalid_json") from None
    except msgspec.DecodeError as error:
        raise InvalidRequestError(f"the body is no valid JSON: {error}", code="invalid_json") from None
    if not isinstance(content, dict):
        raise InvalidRequestError("the body must be a JSON object, in braces", code="invalid_json")
    return content


def _check_num_values(body: bytes | bytearray, limit: int) -> None:
    """Raises: InvalidRequestError: the body has more than `limit` values.

    Made into objects, millions of them hold up everything else in the process for seconds. So they are counted first,
    by the commas and brackets outside of strings, in steps that hold up nothing.
    """
    if len(body) <= limit:
        return
    num_values, num_strings, position = 1, 0, 0
    while position >= 0:
        quote = body.find(b'"', position)
        end = quote if quote >= 0 else len(body)
        num_values += (
            body.count(b",", position, end) + body.count(b"[", position, end) + body.count(b"{", position, end)
        )
        num_strings += 1
        # A value has a name at most, so it comes with two strings at most.
        if num_values > limit or num_strings > 2 * limit:
            raise InvalidRequestError(
                f"the body has more than {limit} values (numbers, texts, lists, objects)", code="too_many_values"
            )
        position = _string_end(body, quote) if quote >= 0 else -1


def _string_end(body: bytes | bytearray, quote: int) -> int:
    """Where that begins which follows the string that begins at `quote`; -1 where the string does not end."""
    while True:
        quote = body.find(b'"', quote + 1)
        if quote < 0:
            return -1
        before = quote - 1
        while body[before] == _BACKSLASH:
            before -= 1
        if (quote - before) % 2:
            return quote + 1


def _deadline(begun: float, num_bytes: int) -> float:
    """By the event loop's clock."""
    return begun + READ_SECONDS + num_bytes / MIN_BYTES_PER_SECOND


def _too_slow(num_bytes: int, seconds: float) -> ApiError:
    """408. What may still come of the body is not read, so the connection ends; sent again, it would be as slow."""
    return ApiError(
        408,
        f"{num_bytes} bytes of the body have come in {seconds:.0f} s; it must come within {READ_SECONDS:g} s and "
        f"1 s more for each {MIN_BYTES_PER_SECOND} bytes",
        kind="timeout_error",
        code="body_too_slow",
        headers={"x-should-retry": "false", "connection": "close"},
    )


def _too_large(size: str, max_bytes: int) -> ApiError:
    return ApiError(413, f"the body has {size} bytes; at most {max_bytes} are allowed", code="body_too_large")
