"""One request on its way through the engine: submitted, read piece by piece, let go of on every way out.

Its choices come in one stream of pieces, each with its choice's index. Tokens become text here, and stop strings end
it. Knows nothing of JSON or of HTTP connections.
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
from pageframe.runtime.request import RequestOutput, SamplingParams, TokenLogprobs, choice_ids
from pageframe.runtime.text import TextStream

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """A checked request, ready for the engine.

    Args:
        cache_salt: whose computed prefixes it shares.
        user: a label for the log.
        request_id: the client's own, echoed in `x-request-id`.
        include_usage: a last chunk with the usage, before [DONE].
        continuous_usage: the usage so far on every chunk.
        field_names: the engine's name of a field to the client's, where they differ.
    """

    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    user: str | None = None
    request_id: str | None = None
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    field_names: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Piece:
    """What one output of the engine adds to a choice of an answer.

    Args:
        index: of the choice.
        text: new text that is decided; may be empty while a stop string or a character is open.
        token_ids: new tokens that count, with or without text.
        logprobs: one per token, or none.
        finish_reason: "stop" or "length" on the choice's last piece.
        stop_reason: the stop string or stop id that ended it.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: str | None = None
    stop_reason: str | int | None = None


def join_pieces(pieces: Iterable[Piece], num_choices: int) -> list[Piece]:
    """All pieces of an answer as one for each choice."""
    texts: list[list[str]] = [[] for _ in range(num_choices)]
    whole = [Piece(index, "", [], []) for index in range(num_choices)]
    for piece in pieces:
        choice = whole[piece.index]
        texts[piece.index].append(piece.text)
        choice.token_ids += piece.token_ids
        choice.logprobs += piece.logprobs
        choice.finish_reason, choice.stop_reason = piece.finish_reason, piece.stop_reason
    for choice, parts in zip(whole, texts, strict=True):
        choice.text = "".join(parts)
    return whole


@dataclass(slots=True)
class _Choice:
    """One choice on its way.

    Args:
        choice_id: its name in the engine.
        first, last: when its first and its latest tokens came; None before.
        end: how it ended.
    """

    index: int
    choice_id: str
    text: TextStream
    num_tokens: int = 0
    first: float | None = None
    last: float | None = None
    end: str | None = None


class Generation:
    """A context: entering submits the request, leaving aborts those of its choices that have not ended.

    Args:
        tenant: whose request it is.

    Raises (when made or entered):
        InvalidRequestError: the engine can never serve it.
        ApiError: 503, the server drains or the engine is dead; 429, too many requests wait.
    """

    def __init__(self, state: ServerState, job: Job, response_id: str, *, tenant: str) -> None:
        self._service = state.accepting()
        self._state = state
        self._job = job
        self._tenant = tenant
        self._choices = {
            choice_id: _Choice(index, choice_id, TextStream(self._service.tokenizer, job.params))
            for index, choice_id in enumerate(choice_ids(response_id, job.params.n))
        }
        self._num_open = len(self._choices)
        self._started = time.monotonic()
        self._has_begun = False
        self._num_cached_tokens = 0
        self.response_id = response_id
        #: Output tokens of all choices.
        self.num_tokens = 0
        #: Set before the reading task is cancelled, it is raised in the cancellation's place.
        self.failure: ApiError | None = None

    @property
    def finished(self) -> bool:
        """All choices have come to an end, their own or a failure; there is no next piece."""
        return self._num_open == 0

    @property
    def num_choices(self) -> int:
        return len(self._choices)

    def __enter__(self) -> Self:
        job, client = self._job, self._service.client
        try:
            client.check(job.prompt_token_ids, job.params)
        except InvalidRequestError as error:
            raise _rename(error, job.field_names) from None
        self._state.check_queue(job.params.n)
        self._queue = client.add(
            self.response_id,
            job.prompt_token_ids,
            job.params,
            tenant=self._tenant,
            cache_salt=job.cache_salt,
            priority=job.priority,
        )
        self._state.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._cut_short("abort")
        self._state.leave()
        logger.info(
            "%s %s: %d prompt tokens, %d output tokens, %.3f s%s%s",
            self.response_id,
            ", ".join(sorted({choice.end or "" for choice in self._choices.values()})),
            len(self._job.prompt_token_ids),
            self.num_tokens,
            time.monotonic() - self._started,
            f", tenant {self._tenant}" if self._tenant else "",
            "" if self._job.user is None else f", user {self._job.user[:100]!r}",
        )

    async def next(self) -> Piece:
        """The next piece. Not to be called after the last.

        Raises:
            EngineError: the engine died, or failed on this request.
            ApiError: the server cuts its requests off.
        """
        choice = None
        while choice is None or choice.end is not None:  # what came behind a stop string counts for nothing
            try:
                output = await self._queue.get()
            except asyncio.CancelledError:
                if self.failure is None:
                    raise
                raise self.failure from None
            except EngineDeadError:
                self._fail("the engine process has ended")
                raise
            choice = self._choices[output.request_id]
        if output.finish_reason in ("error", "abort"):
            self._fail(output.error or output.finish_reason)
            raise EngineError(output.error)
        piece = self._take(choice, output)
        self._observe(choice, output, len(piece.token_ids))
        return piece

    def usage(self) -> dict[str, Any]:
        """The `usage` object, of what has come so far: the prompt once, and the tokens of all choices."""
        num_prompt_tokens = len(self._job.prompt_token_ids)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": self.num_tokens,
            "total_tokens": num_prompt_tokens + self.num_tokens,
            "prompt_tokens_details": {"cached_tokens": self._num_cached_tokens},
        }

    def _fail(self, reason: str) -> None:
        self._cut_short("error")
        logger.error("%s failed: %s", self.response_id, reason)

    def _cut_short(self, reason: str) -> None:
        """End what is open. The last choice first: were it the first that computes the prompt, the next one would begin
        to."""
        for choice in reversed(self._choices.values()):
            if choice.end is None:
                self._end(choice, reason)
                self._service.client.abort(choice.choice_id)
                self._service.metrics.cut_short(reason)

    def _end(self, choice: _Choice, reason: str) -> None:
        choice.end = reason
        self._num_open -= 1

    def _count(self, choice: _Choice, num_tokens: int) -> None:
        choice.num_tokens += num_tokens
        self.num_tokens += num_tokens

    def _take(self, choice: _Choice, output: RequestOutput) -> Piece:
        """An end token counts but has no text; after a stop string nothing counts, whatever the engine says."""
        self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)
        ended_by_id = output.finish_reason == "stop"
        text_ids = output.token_ids[:-1] if ended_by_id else output.token_ids
        delta = choice.text.push(text_ids, final=bool(output.finish_reason))
        if delta.stop is not None:
            num_kept = delta.num_tokens - choice.num_tokens
            # Said even where the engine has just ended it by length: the text ended it earlier, and that is on record.
            self._service.client.finish(choice.choice_id, delta.num_tokens)
            self._count(choice, num_kept)
            self._end(choice, "stop")
            kept_ids, kept_logprobs = output.token_ids[:num_kept], output.logprobs[:num_kept]
            return Piece(choice.index, delta.text, kept_ids, kept_logprobs, "stop", delta.stop)
        self._count(choice, len(output.token_ids))
        if output.finish_reason:
            self._end(choice, output.finish_reason)
        stop_id = output.stop_token_id if ended_by_id and output.stop_token_id >= 0 else None
        return Piece(choice.index, delta.text, output.token_ids, output.logprobs, choice.end, stop_id)

    def _observe(self, choice: _Choice, output: RequestOutput, num_tokens: int) -> None:
        """A request has one first token, whichever choice's it is; what comes after is counted by choice."""
        metrics, now = self._service.metrics, time.monotonic()
        if not self._has_begun:
            self._has_begun = True
            metrics.first_token(
                now - self._started,
                len(self._job.prompt_token_ids),
                queued_seconds=output.queued_seconds,
                prefill_seconds=output.prefill_seconds,
            )
        metrics.tokens(num_tokens, None if choice.last is None else now - choice.last)
        choice.last = now
        if choice.first is None:
            choice.first = now
        if choice.end is not None:
            metrics.completed(
                choice.end,
                request_seconds=now - self._started,
                decode_seconds=now - choice.first,
                num_tokens=choice.num_tokens,
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
