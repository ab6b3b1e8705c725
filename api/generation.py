"""One request on its way through the engine: submitted, read piece by piece, let go of on every way out.

Tokens become text here, and stop strings end it. Knows nothing of JSON or of HTTP connections.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from pageframe.api.errors import ApiError
from pageframe.api.service import ServerState
from pageframe.runtime.errors import EngineDeadError, EngineError, InvalidRequestError
from pageframe.runtime.request import RequestOutput, SamplingParams, TokenLogprobs
from pageframe.runtime.text import TextStream

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """A checked request, ready for the engine.

    Args:
        user: a label for the log.
        request_id: the client's own, echoed in `x-request-id`.
        include_usage: a last chunk with the usage, before [DONE].
        continuous_usage: the usage so far on every chunk.
        field_names: the engine's name of a field to the client's, where they differ.
    """

    prompt_token_ids: list[int]
    params: SamplingParams
    user: str | None = None
    request_id: str | None = None
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    field_names: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Piece:
    """What one output of the engine adds to an answer.

    Args:
        text: new text that is decided; may be empty while a stop string or a character is open.
        token_ids: new tokens that count, with or without text.
        logprobs: one per token, or none.
        finish_reason: "stop" or "length" on the last piece.
        stop_reason: the stop string or stop id that ended it.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: str | None = None
    stop_reason: str | int | None = None


def join_pieces(pieces: Iterable[Piece]) -> Piece:
    """All pieces of an answer as one."""
    texts: list[str] = []
    whole = Piece("", [], [])
    for piece in pieces:
        texts.append(piece.text)
        whole.token_ids += piece.token_ids
        whole.logprobs += piece.logprobs
        whole.finish_reason, whole.stop_reason = piece.finish_reason, piece.stop_reason
    whole.text = "".join(texts)
    return whole


class Generation:
    """A context: entering submits the request, leaving before its end aborts it.

    Raises (when made or entered):
        InvalidRequestError: the engine can never serve it.
        ApiError: 503, the server drains or the engine is dead.
    """

    def __init__(self, state: ServerState, job: Job, response_id: str) -> None:
        self._service = state.accepting()
        self._state = state
        self._job = job
        self._text = TextStream(self._service.tokenizer, job.params)
        self._started = self._last = time.monotonic()
        self._first: float | None = None
        self._num_cached_tokens = 0
        self._end: str | None = None
        self.response_id = response_id
        self.num_tokens = 0
        #: Set before the reading task is cancelled, it is raised in the cancellation's place.
        self.failure: ApiError | None = None

    @property
    def finished(self) -> bool:
        """It has come to an end, its own or a failure; there is no next piece."""
        return self._end is not None

    def __enter__(self) -> Self:
        try:
            self._queue = self._service.client.add(self.response_id, self._job.prompt_token_ids, self._job.params)
        except InvalidRequestError as error:
            raise _rename(error, self._job.field_names) from None
        self._state.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._end is None:
            self._end = "abort"
            self._service.client.abort(self.response_id)
            self._service.metrics.cut_short("abort")
        self._state.leave()
        logger.info(
            "%s %s: %d prompt tokens, %d output tokens, %.3f s%s",
            self.response_id,
            self._end,
            len(self._job.prompt_token_ids),
            self.num_tokens,
            time.monotonic() - self._started,
            "" if self._job.user is None else f", user {self._job.user[:100]!r}",
        )

    async def next(self) -> Piece:
        """The next piece. Not to be called after the last.

        Raises:
            EngineError: the engine died, or failed on this request.
            ApiError: the server cuts its requests off.
        """
        try:
            output = await self._queue.get()
        except asyncio.CancelledError:
            if self.failure is None:
                raise
            raise self.failure from None
        except EngineDeadError:
            self._fail("the engine process has ended")
            raise
        if output.finish_reason in ("error", "abort"):
            self._fail(output.error or output.finish_reason)
            raise EngineError(output.error)
        piece = self._take(output)
        self._observe(output, len(piece.token_ids))
        return piece

    def usage(self) -> dict[str, Any]:
        """The `usage` object, of what has come so far."""
        num_prompt_tokens = len(self._job.prompt_token_ids)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": self.num_tokens,
            "total_tokens": num_prompt_tokens + self.num_tokens,
            "prompt_tokens_details": {"cached_tokens": self._num_cached_tokens},
        }

    def _fail(self, reason: str) -> None:
        self._end = "error"
        self._service.metrics.cut_short("error")
        logger.error("%s failed: %s", self.response_id, reason)

    def _take(self, output: RequestOutput) -> Piece:
        """An end token counts but has no text; after a stop string nothing counts, whatever the engine says."""
        self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)
        ended_by_id = output.finish_reason == "stop"
        text_ids = output.token_ids[:-1] if ended_by_id else output.token_ids
        delta = self._text.push(text_ids, final=bool(output.finish_reason))
        if delta.stop is not None:
            num_kept = delta.num_tokens - self.num_tokens
            # Said even where the engine has just ended it by length: the text ended it earlier, and that is on record.
            self._service.client.finish(self.response_id, delta.num_tokens)
            self.num_tokens = delta.num_tokens
            self._end = "stop"
            return Piece(delta.text, output.token_ids[:num_kept], output.logprobs[:num_kept], "stop", delta.stop)
        self.num_tokens += len(output.token_ids)
        self._end = output.finish_reason or None
        stop_id = output.stop_token_id if ended_by_id and output.stop_token_id >= 0 else None
        return Piece(delta.text, output.token_ids, output.logprobs, self._end, stop_id)

    def _observe(self, output: RequestOutput, num_tokens: int) -> None:
        metrics, now = self._service.metrics, time.monotonic()
        num_prompt_tokens = len(self._job.prompt_token_ids)
        if self._first is None:
            self._first = now
            metrics.first_token(
                now - self._started,
                num_prompt_tokens,
                queued_seconds=output.queued_seconds,
                prefill_seconds=output.prefill_seconds,
            )
            metrics.tokens(num_tokens, None)
        else:
            metrics.tokens(num_tokens, now - self._last)
        self._last = now
        if self._end is not None:
            metrics.completed(
                self._end,
                request_seconds=now - self._started,
                decode_seconds=now - self._first,
                num_prompt_tokens=num_prompt_tokens,
                num_tokens=self.num_tokens,
            )


def _rename(error: InvalidRequestError, names: Mapping[str, str]) -> InvalidRequestError:
    """The same error in the client's words."""
    name = error.param
    if name is None or name not in names:
        return error
    message = error.message
    if message.startswith(f"{name} "):
        message = names[name] + message[len(name) :]
    return InvalidRequestError(message, param=names[name], code=error.code)
