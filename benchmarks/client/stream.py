"""What the events of one streamed answer say, written into its record. It reads no socket and no clock."""

from __future__ import annotations

import json
from typing import Any

from pageframe.benchmarks.client.record import Chunk, Failure, RequestRecord
from pageframe.benchmarks.client.server import error_message
from pageframe.benchmarks.client.sse import SseEvent

# reasoning models stream their thoughts under the second and third name; those are tokens as well
CHAT_TEXT_FIELDS = ("content", "reasoning_content", "reasoning")


class AnswerStream:
    """Takes the events of one answer in order.

    `done`: the server said [DONE]. `failure`: it said that it failed, or something that is no answer; nothing after
    that counts.
    """

    def __init__(self, record: RequestRecord) -> None:
        self.done = False
        self.failure: Failure | None = None
        self._record = record
        self._logprobs_pending = 0  # tokens whose text the server still holds back
        self._tokens_seen = 0

    @property
    def tokens_seen(self) -> int:
        """Output tokens so far, as well as can be told before the end."""
        return self._tokens_seen

    @property
    def complete(self) -> bool:
        """Whether the answer came to its end: [DONE], or a finish reason from a server that leaves [DONE] out."""
        return self.failure is None and (self.done or self._record.finish_reason is not None)

    def take(self, event: SseEvent, now_s: float) -> None:
        """One event, read at `now_s`."""
        if self.done or self.failure is not None:
            return
        if event.data.strip() == "[DONE]":
            self.done = True
            return
        try:
            body = json.loads(event.data)
        except (ValueError, RecursionError):
            body = None
        if event.name == "error" or (isinstance(body, dict) and body.get("error")):
            self.failure = Failure("error event", error_message(body) or event.data)
        elif not isinstance(body, dict):
            self.failure = Failure("bad event", f"an event that is no JSON object: {event.data}")
        else:
            self._take_body(body, now_s)

    def _take_body(self, body: dict[str, Any], now_s: float) -> None:
        running_total = self._take_usage(body.get("usage"))
        choices = body.get("choices")
        if not (isinstance(choices, list) and choices and isinstance(choices[0], dict)):
            return
        choice = choices[0]
        if choice.get("finish_reason"):
            self._record.finish_reason = str(choice["finish_reason"])
        logprob_tokens = _logprob_tokens(choice.get("logprobs"))
        if logprob_tokens is not None:
            self._logprobs_pending += logprob_tokens
        if not _has_text(choice):
            return
        if logprob_tokens is not None:
            logprob_tokens, self._logprobs_pending = self._logprobs_pending, 0
        self._record.chunks.append(Chunk(now_s, running_total, logprob_tokens))
        if running_total is not None:
            self._tokens_seen = running_total
        else:
            self._tokens_seen += 1 if logprob_tokens is None else logprob_tokens

    def _take_usage(self, usage: Any) -> int | None:
        """Keep the latest usage, which is the final one at the end; its output tokens, if it has them."""
        if not isinstance(usage, dict):
            return None
        record = self._record
        record.prompt_tokens = _count(usage.get("prompt_tokens"), record.prompt_tokens)
        record.output_tokens = _count(usage.get("completion_tokens"), record.output_tokens)
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            record.cached_tokens = _count(details.get("cached_tokens"), record.cached_tokens)
        return _count(usage.get("completion_tokens"), None)


def _count(value: Any, otherwise: int | None) -> int | None:
    return value if isinstance(value, int) and value >= 0 else otherwise


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if isinstance(delta, dict):
        return any(delta.get(name) for name in CHAT_TEXT_FIELDS)
    return bool(choice.get("text"))


def _logprob_tokens(logprobs: Any) -> int | None:
    """How many tokens a chunk's logprobs list: `content` for chat, `tokens` for completions."""
    if not isinstance(logprobs, dict):
        return None
    listed = logprobs.get("content", logprobs.get("tokens"))
    return len(listed) if isinstance(listed, list) else None
