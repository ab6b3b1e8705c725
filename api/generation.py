"""One request on its way through the engine: submitted, read piece by piece, let go of on every way out.

The choices of all its prompts come in one stream of pieces, each with its choice's index. Tokens become text here, and
stop strings end it. Knows nothing of JSON or of HTTP connections.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from pageframe.api.errors import ApiError, queue_full
from pageframe.api.job import Job, Piece
from pageframe.api.service import ServerState
from pageframe.runtime.engine_client import OutputQueue
from pageframe.runtime.errors import EngineDeadError, EngineError, InvalidRequestError
from pageframe.runtime.request import RequestOutput, SamplingParams, TokenLogprobs, choice_ids
from pageframe.runtime.text import TextStream

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Prompt:
    """What a prompt's choices have in common; the engine knows it as a request.

    Args:
        has_begun: a token of some choice has come.
        logprobs: of its tokens but the first, where asked for; they come with one of its choices' first tokens.
        held: the other choices' outputs from before that.
    """

    request_id: str
    token_ids: list[int]
    has_begun: bool = False
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    held: list[RequestOutput] = field(default_factory=list)


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
    prompt: _Prompt
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
        self._prompts = [
            _Prompt(response_id if len(job.prompts) == 1 else f"{response_id}-{number}", token_ids)
            for number, token_ids in enumerate(job.prompts)
        ]
        self._choices: dict[str, _Choice] = {}
        for prompt in self._prompts:
            for choice_id in choice_ids(prompt.request_id, job.params.n):
                text = TextStream(self._service.tokenizer, job.params, job.shown_ids)
                self._choices[choice_id] = _Choice(len(self._choices), choice_id, prompt, text)
        self._num_open = len(self._choices)
        self._started = time.monotonic()
        self._passing_on: list[asyncio.Task[None]] = []
        #: Outputs that were held, and come before those of the queue.
        self._released: deque[RequestOutput] = deque()
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
        self._check()
        self._state.check_queue(self.num_choices)
        queues = [self._add(prompt) for prompt in self._prompts]
        if len(queues) == 1:
            [self._queue] = queues
        else:
            self._queue = OutputQueue()
            self._passing_on = [asyncio.ensure_future(_pass_on(queue, self._queue)) for queue in queues]
        self._state.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._cut_short("abort")
        for task in self._passing_on:
            task.cancel()
        self._state.leave()
        logger.info(
            "%s %s: %d prompt tokens, %d output tokens, %.3f s%s%s",
            self.response_id,
            ", ".join(sorted({choice.end or "" for choice in self._choices.values()})),
            self._num_prompt_tokens,
            self.num_tokens,
            time.monotonic() - self._started,
            f", tenant {self._tenant}" if self._tenant else "",
            "" if self._job.user is None else f", user {self._job.user[:100]!r}",
        )

    async def next(self) -> Piece:
        """The next piece. Not to be called after the last.

        Raises:
            EngineError: the engine died, or failed on this request.
            InvalidRequestError: the engine found out only now that it cannot serve this request.
            ApiError: 408, it took longer than it may; or the server cuts its requests off.
        """
        while True:
            output = await self._next_output()
            choice = self._choices[output.request_id]
            if choice.end is not None:
                continue  # what came behind a stop string counts for nothing
            self._check_failure(output)
            if self._take_prompt(choice.prompt, output):
                piece = self._take(choice, output)
                self._observe(choice, output, len(piece.token_ids))
                return piece

    def usage(self) -> dict[str, Any]:
        """The `usage` object, of what has come so far: each prompt once, and the tokens of all choices."""
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self.num_tokens,
            "total_tokens": self._num_prompt_tokens + self.num_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(prompt.num_cached_tokens for prompt in self._prompts)},
        }

    @property
    def _num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self._prompts)

    def _check(self) -> None:
        """All prompts before any of them is submitted."""
        for number, prompt in enumerate(self._prompts):
            try:
                self._service.client.check(prompt.token_ids, self._job.params)
            except InvalidRequestError as error:
                named = _rename(error, self._job.field_names)
                if len(self._prompts) > 1 and named.param == "prompt":
                    raise InvalidRequestError(
                        f"prompt[{number}]: {named.message}", param=f"prompt[{number}]", code=named.code
                    ) from None
                raise named from None

    def _add(self, prompt: _Prompt) -> OutputQueue:
        job = self._job
        return self._service.client.add(
            prompt.request_id,
            prompt.token_ids,
            job.params,
            tenant=self._tenant,
            cache_salt=job.cache_salt,
            priority=job.priority,
        )

    async def _next_output(self) -> RequestOutput:
        if self._released:
            return self._released.popleft()
        try:
            return await self._queue.get()
        except asyncio.CancelledError:
            if self.failure is None:
                raise
            raise self.failure from None
        except EngineDeadError:
            self._fail("the engine process has ended")
            raise

    def _check_failure(self, output: RequestOutput) -> None:
        """Raises what an output says instead of tokens; all choices end with it."""
        if output.finish_reason == "timeout":
            raise _too_late(self._job.params)
        if output.finish_reason == "refused":
            raise _rename(InvalidRequestError(output.error, param=output.param or None), self._job.field_names)
        if output.finish_reason == "busy":
            self._service.metrics.refused()
            raise queue_full(output.error)
        if output.finish_reason in ("error", "abort"):
            self._fail(output.error or output.finish_reason)
            raise EngineError(output.error)

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

    def _take_prompt(self, prompt: _Prompt, output: RequestOutput) -> bool:
        """What an output says of its prompt; False where it has to wait for what another one says."""
        prompt.num_cached_tokens = max(prompt.num_cached_tokens, output.num_cached_tokens)
        if output.prompt_logprobs:
            prompt.logprobs = output.prompt_logprobs
            self._released += prompt.held
        elif self._job.params.prompt_logprobs is not None and len(prompt.token_ids) > 1 and not prompt.logprobs:
            if output.finish_reason == "cancelled":
                raise ApiError(409, "it was cancelled before its prompt was computed", code="cancelled")
            prompt.held.append(output)
            return False
        return True

    def _take(self, choice: _Choice, output: RequestOutput) -> Piece:
        """An end token counts but has no text; after a stop string nothing counts, whatever the engine says."""
        ended_by_id = output.finish_reason == "stop"
        text_ids = output.token_ids[:-1] if ended_by_id else output.token_ids
        delta = choice.text.push(text_ids, final=bool(output.finish_reason))
        told = choice.prompt.logprobs
        if delta.stop is not None:
            num_kept = delta.num_tokens - choice.num_tokens
            # Said even where the engine has just ended it by length: the text ended it earlier, and that is on record.
            self._service.client.finish(choice.choice_id, delta.num_tokens)
            self._count(choice, num_kept)
            self._end(choice, "stop")
            kept_ids, kept_logprobs = output.token_ids[:num_kept], output.logprobs[:num_kept]
            return Piece(choice.index, delta.text, kept_ids, kept_logprobs, told, "stop", delta.stop)
        self._count(choice, len(output.token_ids))
        if output.finish_reason:
            self._end(choice, output.finish_reason)
        stop_id = output.stop_token_id if ended_by_id and output.stop_token_id >= 0 else None
        return Piece(choice.index, delta.text, output.token_ids, output.logprobs, told, choice.end, stop_id)

    def _observe(self, choice: _Choice, output: RequestOutput, num_tokens: int) -> None:
        """A prompt has one first token, whichever choice's it is; what comes after is counted by choice."""
        metrics, now = self._service.metrics, time.monotonic()
        if choice.end == "cancelled":
            metrics.cut_short("abort")
            return
        if not choice.prompt.has_begun:
            choice.prompt.has_begun = True
            metrics.first_token(
                now - self._started,
                len(choice.prompt.token_ids),
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


async def _pass_on(source: OutputQueue, target: OutputQueue) -> None:
    """Moves outputs for as long as they come."""
    try:
        while True:
            target.put(await source.get())
    except EngineDeadError as error:
        target.put(error)


def _rename(error: InvalidRequestError, names: Mapping[str, str]) -> InvalidRequestError:
    """The same error in the client's words."""
    first, space, rest = error.message.partition(" ")
    param = None if error.param is None else names.get(error.param, error.param)
    return InvalidRequestError(names.get(first, first) + space + rest, param=param, code=error.code)


def _too_late(params: SamplingParams) -> ApiError:
    """408. A client that tried again would wait as long once more, so it is told not to."""
    return ApiError(
        408,
        f"the answer was not done within timeout_seconds, which is {params.timeout_seconds:g}",
        kind="timeout_error",
        param="timeout_seconds",
        code="timeout",
        headers={"x-should-retry": "false"},
    )
