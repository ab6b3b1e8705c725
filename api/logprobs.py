"""Logprobs in OpenAI's two shapes, of chat and of completions, and in vLLM's of a prompt. Knows nothing of how they
come about.
"""

from __future__ import annotations

import codecs
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
        self._characters = _Characters()

    def of_prompt(
        self, token_ids: Sequence[int], positions: Sequence[TokenLogprobs], text: str, num_top: int
    ) -> dict[str, Any]:
        """As `of`, for a prompt that is echoed in front of the choice's text; its first token has no logprob.

        Args:
            positions: of all tokens but the first, each with at least `num_top` of the likeliest.
            text: what is echoed. Tokens may have more characters, of a start mark or a first space; those come first.
        """
        characters = _Characters()
        begins = [characters.take(self._tokenizer.token_bytes(token_id)) for token_id in token_ids]
        num_more = characters.end() - len(text)
        self._characters = _Characters(len(text))
        own = list(zip(token_ids[1:], positions, strict=True))
        return {
            "tokens": [self._name(token_id) for token_id in token_ids],
            "token_logprobs": [None, *(max(position.logprob, LOWEST) for position in positions)],
            "top_logprobs": [None, *(self._top(token_id, position, num_top) for token_id, position in own)],
            "text_offset": [max(0, begin - num_more) for begin in begins],
        }

    def of(self, piece: Piece) -> dict[str, Any]:
        """`{"tokens", "token_logprobs", "top_logprobs", "text_offset"}`, parallel lists, one entry per token.

        `top_logprobs` has the chosen token too, so one entry more where it is not among the likeliest.
        """
        return {
            "tokens": [self._name(token_id) for token_id in piece.token_ids],
            "token_logprobs": [max(position.logprob, LOWEST) for position in piece.logprobs],
            "top_logprobs": [
                self._top(token_id, position, len(position.top_ids))
                for token_id, position in zip(piece.token_ids, piece.logprobs, strict=True)
            ],
            "text_offset": [self._characters.take(self._text_bytes(token_id)) for token_id in piece.token_ids],
        }

    def _text_bytes(self, token_id: int) -> bytes:
        is_skipped = self._skips_special and self._tokenizer.is_special(token_id)
        return b"" if is_skipped else self._tokenizer.token_bytes(token_id)

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


class _Characters:
    """Where in a text its tokens begin, as they come; the text is their bytes with U+FFFD for what is no UTF-8.

    Args:
        num_before: characters in front of the first token.
    """

    def __init__(self, num_before: int = 0) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_characters = num_before

    def take(self, data: bytes) -> int:
        """Where the next token begins: its first own character, or the one that it goes on with."""
        begun = self._decoder.getstate()[0]
        # What was begun and is not gone on with is a character of its own, U+FFFD.
        is_broken = bool(begun and data) and not _goes_on(begun + data[:1])
        begin = self._num_characters + is_broken
        self._num_characters += len(self._decoder.decode(data))
        return begin

    def end(self) -> int:
        """The characters in all, when there are no more tokens."""
        return self._num_characters + len(self._decoder.decode(b"", final=True))


def _goes_on(data: bytes) -> bool:
    """Whether these bytes are one character or the beginning of one."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return True
