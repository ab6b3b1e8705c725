"""The JSON of an answer, whole or as events of a stream: what chat and completions have in common.

Knows nothing of the engine or of connections; every piece comes from outside.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from pageframe.api.encoding import DONE_EVENT, encode_json, sse_event
from pageframe.api.job import Job, Piece
from pageframe.api.logprobs import prompt_logprobs
from pageframe.runtime.tokenizer import Tokenizer


class Answer(ABC):
    """One answer on its way out. Its id, time and model are the same in every chunk."""

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    #: What is said of prompts stands beside each choice; if not, beside `choices`, since there is but one prompt.
    prompt_in_choice: ClassVar[bool]

    def __init__(self, job: Job, response_id: str, model_name: str, tokenizer: Tokenizer) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._identity = {"id": response_id, "created": int(time.time()), "model": model_name}
        #: Choices of which a chunk has gone out.
        self._begun: set[int] = set()
        self.response_id = response_id

    @abstractmethod
    def message(self, piece: Piece) -> dict[str, Any]:
        """The choice's fields that hold the whole answer, of all its pieces joined."""

    @abstractmethod
    def deltas(self, piece: Piece) -> list[dict[str, Any]]:
        """Chunks' fields that hold what the piece adds, one per chunk; none where it decides nothing yet."""

    @abstractmethod
    def opening(self) -> list[dict[str, Any]]:
        """Such fields that come before any other of a choice."""

    @abstractmethod
    def blank(self) -> dict[str, Any]:
        """Such a field that adds nothing, for a chunk that only carries logprobs or token ids."""

    @abstractmethod
    def closing(self) -> dict[str, Any]:
        """Such a field in the chunk that carries the finish reason."""

    @abstractmethod
    def logprobs(self, piece: Piece) -> dict[str, Any]:
        """The logprobs of the piece's tokens, which follow those of its choice's piece before."""

    def finish_reason(self, piece: Piece) -> str | None:
        """To be asked after `message` or `deltas` have seen the choice's last piece."""
        return piece.finish_reason

    def whole(self, pieces: Sequence[Piece], usage: dict[str, Any]) -> bytes:
        """The whole answer, of all pieces joined to one for each choice."""
        choices = [self._whole_choice(piece) for piece in pieces]
        content = {**self._identity, "object": self.whole_object, "choices": choices, "usage": usage}
        if not self.prompt_in_choice:
            content |= self._prompt_fields(pieces[0])
        return encode_json(content)

    def _whole_choice(self, piece: Piece) -> dict[str, Any]:
        choice = {
            "index": piece.index,
            **self.message(piece),
            "logprobs": self._logprobs(piece),
            "finish_reason": self.finish_reason(piece),
            "stop_reason": piece.stop_reason,
        }
        if self._job.return_token_ids:
            choice["token_ids"] = piece.token_ids
        if self.prompt_in_choice:
            choice |= self._prompt_fields(piece)
        return choice

    def _prompt_fields(self, piece: Piece) -> dict[str, Any]:
        """What was asked for of the prompt of the piece's choice."""
        token_ids, num_top = self._job.prompt_of(piece.index), self._job.num_prompt_logprobs
        fields: dict[str, Any] = {}
        if self._job.return_token_ids:
            fields["prompt_token_ids"] = token_ids
        if num_top is not None:
            fields["prompt_logprobs"] = prompt_logprobs(token_ids, piece.prompt_logprobs, num_top, self._tokenizer)
        return fields

    def events(self, piece: Piece, usage: dict[str, Any]) -> bytes:
        """The chunks that a piece makes; none where it decides nothing yet.

        Logprobs and token ids go out with the piece that brings their tokens, before text that is still open.
        """
        chunks: list[bytes] = []
        if piece.index not in self._begun:
            chunks += [self._chunk(usage, piece, field) for field in self.opening()]
        fields = self.deltas(piece)
        brings_more = bool(piece.logprobs or (self._job.return_token_ids and piece.token_ids))
        if brings_more and not fields:
            fields = [self.blank()]
        for number, field in enumerate(fields):
            chunks.append(self._chunk(usage, piece, field, brings_more=number == 0))
        if piece.finish_reason is not None:
            reasons = {"finish_reason": self.finish_reason(piece), "stop_reason": piece.stop_reason}
            chunks.append(self._chunk(usage, piece, self.closing(), reasons=reasons))
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
        piece: Piece,
        field: dict[str, Any],
        *,
        brings_more: bool = False,
        reasons: dict[str, Any] | None = None,
    ) -> bytes:
        """A chunk of the piece's choice. `brings_more`: it carries the piece's logprobs and token ids."""
        choice = {
            "index": piece.index,
            **field,
            "logprobs": self._logprobs(piece) if brings_more else None,
            **(reasons or {"finish_reason": None}),
        }
        content = {**self._identity, "object": self.chunk_object, "choices": [choice]}
        if self._job.continuous_usage:
            content["usage"] = usage
        elif self._job.include_usage:
            content["usage"] = None
        if self._job.return_token_ids:
            choice["token_ids"] = piece.token_ids if brings_more else []
        if self.prompt_in_choice and piece.index not in self._begun:
            choice |= self._prompt_fields(piece)
        elif not self._begun:
            content |= self._prompt_fields(piece)
        self._begun.add(piece.index)
        return sse_event(content)

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        return None if self._job.params.logprobs is None else self.logprobs(piece)
