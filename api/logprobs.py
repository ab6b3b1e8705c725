"""Logprobs in OpenAI's two shapes, of chat and of completions. Knows nothing of how they come about."""

from __future__ import annotations

from typing import Any

from pageframe.api.generation import Piece
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


class CompletionLogprobs:
    """The legacy shape, which also says where in the text each token begins. One per choice: offsets go on.

    Args:
        skips_special: special tokens have no text.
    """

    def __init__(self, tokenizer: Tokenizer, *, skips_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skips_special
        self._offset = 0

    def of(self, piece: Piece) -> dict[str, Any]:
        """`{"tokens", "token_logprobs", "top_logprobs", "text_offset"}`, parallel lists, one entry per token.

        `top_logprobs` has the chosen token too, so one entry more where it is not among the likeliest.
        """
        offsets = []
        for token_id in piece.token_ids:
            offsets.append(self._offset)
            self._offset += self._num_characters(token_id)
        return {
            "tokens": [self._name(token_id) for token_id in piece.token_ids],
            "token_logprobs": [max(position.logprob, LOWEST) for position in piece.logprobs],
            "top_logprobs": [
                self._top(token_id, position)
                for token_id, position in zip(piece.token_ids, piece.logprobs, strict=True)
            ],
            "text_offset": offsets,
        }

    def _top(self, token_id: int, position: TokenLogprobs) -> dict[str, float]:
        top: dict[str, float] = {}
        for top_id, logprob in zip(position.top_ids, position.top_logprobs, strict=True):
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

    def _num_characters(self, token_id: int) -> int:
        """Characters that begin in this token: every byte but UTF-8's continuation bytes begins one."""
        if self._skips_special and self._tokenizer.is_special(token_id):
            return 0
        return sum(byte & 0xC0 != 0x80 for byte in self._tokenizer.token_bytes(token_id))
