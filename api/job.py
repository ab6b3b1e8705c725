"""What goes into a generation and what comes out of it, as plain data: a checked request, and pieces of its answer.

Knows nothing of how one becomes the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pageframe.runtime.request import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Job:
    """A checked request, ready for the engine.

    Args:
        prompts: each one's token ids; params.n choices are drawn for each.
        cache_salt: whose computed prefixes it shares.
        shown_ids: special tokens that are text all the same.
        user: a label for the log.
        request_id: the client's own, echoed in `x-request-id`.
        include_usage: a last chunk with the usage, before [DONE].
        continuous_usage: the usage so far on every chunk.
        num_prompt_logprobs: how many of the likeliest tokens to show at each of a prompt's tokens; None: nothing.
        field_names: the engine's name of a field to the client's, where they differ.
    """

    prompts: list[list[int]]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    shown_ids: frozenset[int] = frozenset()
    user: str | None = None
    request_id: str | None = None
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    num_prompt_logprobs: int | None = None
    field_names: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n

    def prompt_of(self, index: int) -> list[int]:
        """The prompt of a choice: the first prompt's choices come first."""
        return self.prompts[index // self.params.n]


@dataclass(slots=True)
class Piece:
    """What one output of the engine adds to a choice of an answer.

    Args:
        index: of the choice, in the whole request.
        text: new text that is decided; may be empty while a stop string or a character is open.
        token_ids: new tokens that count, with or without text.
        logprobs: one per token, or none.
        prompt_logprobs: of its prompt's tokens but the first, where asked for; the same in all its pieces.
        finish_reason: "stop", "length" or "cancelled" on the choice's last piece.
        stop_reason: the stop string or stop id that ended it.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
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
        choice.prompt_logprobs = piece.prompt_logprobs
        choice.finish_reason, choice.stop_reason = piece.finish_reason, piece.stop_reason
    for choice, parts in zip(whole, texts, strict=True):
        choice.text = "".join(parts)
    return whole
