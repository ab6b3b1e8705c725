"""The JSON of an answer, whole or as events of a stream: what chat and completions have in common.

Knows nothing of the engine or of connections; every piece comes from outside.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from pageframe.api.encoding import DONE_EVENT, encode_json, sse_event
from pageframe.api.generation import Job, Piece


class Answer(ABC):
    """One answer on its way out. Its id, time and model are the same in every chunk."""

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, job: Job, response_id: str, model_name: str) -> None:
        self._job = job
        self._identity = {"id": response_id, "created": int(time.time()), "model": model_name}
        #: Choices of which a chunk has gone out.
        self._begun: set[int] = set()
        self.response_id = response_id

    @abstractmethod
    def message(self, text: str) -> dict[str, Any]:
        """The choice's field that holds the whole text."""

    @abstractmethod
    def delta(self, text: str) -> dict[str, Any]:
        """A chunk's field that holds new text."""

    @abstractmethod
    def opening(self) -> list[dict[str, Any]]:
        """Such fields that come before any text of a choice, one per chunk."""

    @abstractmethod
    def closing(self) -> dict[str, Any]:
        """Such a field in the chunk that carries the finish reason."""

    @abstractmethod
    def logprobs(self, piece: Piece) -> dict[str, Any]:
        """The logprobs of the piece's tokens, which follow those of its choice's piece before."""

    def whole(self, pieces: Sequence[Piece], usage: dict[str, Any]) -> bytes:
        """The whole answer, of all pieces joined to one for each choice."""
        choices = [self._whole_choice(piece) for piece in pieces]
        content = {**self._identity, "object": self.whole_object, "choices": choices, "usage": usage}
        if self._job.return_token_ids:
            content["prompt_token_ids"] = self._job.prompt_token_ids
        return encode_json(content)

    def _whole_choice(self, piece: Piece) -> dict[str, Any]:
        choice = {
            "index": piece.index,
            **self.message(piece.text),
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if self._job.return_token_ids:
            choice["token_ids"] = piece.token_ids
        return choice

    def events(self, piece: Piece, usage: dict[str, Any]) -> bytes:
        """The chunks that a piece makes; none where it decides nothing yet.

        Logprobs and token ids go out with the piece that brings their tokens, before text that is still open.
        """
        chunks: list[bytes] = []
        index = piece.index
        if index not in self._begun:
            chunks += [self._chunk(usage, index, field, None) for field in self.opening()]
        if piece.text or piece.logprobs or (self._job.return_token_ids and piece.token_ids):
            chunks.append(self._chunk(usage, index, self.delta(piece.text), piece))
        if piece.finish_reason is not None:
            reasons = {"finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}
            chunks.append(self._chunk(usage, index, self.closing(), None, reasons))
        return b"".join(chunks)

    def last_events(self, usage: dict[str, Any]) -> bytes:
        """The end of a stream that went well."""
        if not self._job.include_usage:
            return DONE_EVENT
        content = {**self._identity, "object": self.chunk_object, "choices": [], "usage": usage}
        return sse_event(content) + DONE_EVENT

    def _chunk(
        self,
        usage: dict[str, Any],
        index: int,
        field: dict[str, Any],
        piece: Piece | None,
        reasons: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {
            "index": index,
            **field,
            "logprobs": None if piece is None else self._logprobs(piece),
            **(reasons or {"finish_reason": None}),
        }
        content = {**self._identity, "object": self.chunk_object, "choices": [choice]}
        if self._job.continuous_usage:
            content["usage"] = usage
        elif self._job.include_usage:
            content["usage"] = None
        if self._job.return_token_ids:
            choice["token_ids"] = [] if piece is None else piece.token_ids
            if not self._begun:
                content["prompt_token_ids"] = self._job.prompt_token_ids
        self._begun.add(index)
        return sse_event(content)

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        return None if self._job.params.logprobs is None else self.logprobs(piece)
