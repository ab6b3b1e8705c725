"""Logprobs in OpenAI's two shapes, of chat and of completions, and in vLLM's of a prompt. Knows nothing of how they
come about.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pageframe.api.job import Piece
from pageframe.runtime.request import TokenLogprobs
from pageframe.runtime.tokenizer import Tokenizer

#: JSON has no infinity; OpenAI writes this for "never".
LOWEST = -9999.0


def chat_logprobs(piece: Piece, tokenizer: Tokenizer) -> dict[str, Any]:
    """`{"content": [{"token", "logprob", "bytes", "top_logprobs"}]}`, one entry per token."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": tokenizer.token_text(token_id),
            "logprob": max(logprob, LOWEST),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    content = []
    for token_id, position in zip(piece.token_ids, piece.logprobs, strict=True):
        top = [entry(*pair) for pair in zip(position.top_ids, position.top_logprobs, strict=True)]
        content.append({**entry(token_id, position.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def prompt_logprobs(
    token_ids: Sequence[int], positions: Sequence[TokenLogprobs], num_top: int, tokenizer: Tokenizer
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each of the prompt's tokens, token id -> `{"logprob", "rank", "decoded_token"}`.

    Null for the first token, which nothing comes before. The prompt's own token comes first, then the likeliest. Its
    rank, 1 for the likeliest, is null where it is not among these.

    Args:
        positions: of all tokens but the first, each with at least `num_top` of the likeliest.
    """
    entries: list[dict[str, Any] | None] = [None]
    for token_id, position in zip(token_ids[1:], positions, strict=True):
        top_ids = position.top_ids[:num_top]
        rank = top_ids.index(token_id) + 1 if token_id in top_ids else None
        shown = [(token_id, position.logprob, rank)]
        shown += zip(top_ids, position.top_logprobs, range(1, num_top + 1), strict=False)
        entries.append(
            {
                str(shown_id): {
                    "logprob": max(logprob, LOWEST),
                    "rank": shown_rank,
                    "decoded_token": tokenizer.token_text(shown_id),
                }
                for shown_id, logprob, shown_rank in shown
            }
        )
    return entries


class CompletionLogprobs:
    """The legacy shape, which also says where in the text each token begins. One per choice: offsets go on.

    Args:
        skips_special: special tokens have no text.
    """

    def __init__(self, tokenizer: Tokenizer, *, skips_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skips_special
        self._offset = 0

    def of_prompt(
        self, token_ids: Sequence[int], positions: Sequence[TokenLogprobs], text: str, num_top: int
    ) -> dict[str, Any]:
        """As `of`, for a prompt that is echoed in front of the choice's text; its first token has no logprob.

        Args:
            positions: of all tokens but the first, each with at least `num_top` of the likeliest.
            text: what is echoed. Tokens may have more characters, of a start mark or a first space; those come first.
        """
        lengths = [_num_characters(self._tokenizer.token_bytes(token_id)) for token_id in token_ids]
        offset = len(text) - sum(lengths)
        offsets = []
        for length in lengths:
            offsets.append(max(0, offset))
            offset += length
        self._offset = len(text)
        own = list(zip(token_ids[1:], positions, strict=True))
        return {
            "tokens": [self._name(token_id) for token_id in token_ids],
            "token_logprobs": [None, *(max(position.logprob, LOWEST) for position in positions)],
            "top_logprobs": [None, *(self._top(token_id, position, num_top) for token_id, position in own)],
            "text_offset": offsets,
        }

    def of(self, piece: Piece) -> dict[str, Any]:
        """`{"tokens", "token_logprobs", "top_logprobs", "text_offset"}`, parallel lists, one entry per token.

        `top_logprobs` has the chosen token too, so one entry more where it is not among the likeliest.
        """
        offsets = []
        for token_id in piece.token_ids:
            offsets.append(self._offset)
            if not (self._skips_special and self._tokenizer.is_special(token_id)):
                self._offset += _num_characters(self._tokenizer.token_bytes(token_id))
        return {
            "tokens": [self._name(token_id) for token_id in piece.token_ids],
            "token_logprobs": [max(position.logprob, LOWEST) for position in piece.logprobs],
            "top_logprobs": [
                self._top(token_id, position, len(position.top_ids))
                for token_id, position in zip(piece.token_ids, piece.logprobs, strict=True)
            ],
            "text_offset": offsets,
        }

    def _top(self, token_id: int, position: TokenLogprobs, num_top: int) -> dict[str, float]:
        top: dict[str, float] = {}
        for top_id, logprob in zip(position.top_ids[:num_top], position.top_logprobs[:num_top], strict=True):
            top.setdefault(self._name(top_id), max(logprob, LOWEST))
        top.setdefault(self._name(token_id), max(position.logprob, LOWEST))
        return top

    def _name(self, token_id: int) -> str:
        """The token's text; `bytes:\\xe2\\x82`, as OpenAI writes it, for one that is part of a character."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _num_characters(data: bytes) -> int:
    """Characters that begin in these bytes: every byte but UTF-8's continuation bytes begins one."""
    return sum(byte & 0xC0 != 0x80 for byte in data)
