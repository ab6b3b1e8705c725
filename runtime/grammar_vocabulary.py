"""A model's tokens as llguidance sees them: their bytes, which of them are no text, and how forced text is spelt.

Where a grammar leaves no choice, llguidance forces the tokens in which the model would have written that text, so it
needs the model's own spelling of it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, cast

from pageframe.runtime.errors import InvalidRequestError
from pageframe.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer, TokenizerWrapper

#: Longer tokens do not fit llguidance's table; no text needs them.
MAX_TOKEN_BYTES = 1000
#: So much of a forced text is spelt at once, since llguidance asks for all that is left of it before every token.
MAX_SPELT_CHARS = 512
#: Stands before a text whose spelling must not be that of a text's start; no vocabulary joins it to what follows.
_LEAD = "\x02"


class TokenTable:
    """The tokens by id, in the shape that llguidance's LLTokenizer takes. Spells with the longest tokens.

    Args:
        tokens: bytes of each id below the model's vocabulary size; empty for an id that no text uses.
        special_token_ids: tokens that are structure; a grammar's text never matches them, only their names do.
        eos_token_ids: not empty; a grammar's text ends with one of them.
    """

    is_tokenizer_wrapper = True
    bos_token_id: int | None = None

    def __init__(
        self, tokens: Sequence[bytes], special_token_ids: Collection[int], eos_token_ids: Sequence[int]
    ) -> None:
        self.tokens = list(tokens)
        self.special_token_ids = sorted(special_token_ids)
        self.eos_token_ids = list(eos_token_ids)
        self.eos_token_id = eos_token_ids[0]
        special = set(special_token_ids)
        self._ids = {data: token_id for token_id, data in enumerate(tokens) if data and token_id not in special}
        self._longest = max(map(len, self._ids), default=0)

    def load(self) -> LLTokenizer:
        """llguidance's own form of it; takes a part of a second."""
        from llguidance import LLMatcher, LLTokenizer

        tokenizer = LLTokenizer(cast("TokenizerWrapper", self), eos_token=self.eos_token_ids)
        # The first mask of a vocabulary makes tables of it.
        LLMatcher(tokenizer, "start: /a*/", log_level=0).compute_bitmask()
        return tokenizer

    def __call__(self, text: str) -> list[int]:
        return self.spell_greedily(text.encode())

    def spell_greedily(self, data: bytes) -> list[int]:
        """Tokens whose bytes are `data`, the longest first; where no token goes on, an end-of-text token ends it.

        The grammar then refuses that end: a vocabulary without the bytes that a grammar forces cannot follow it.
        """
        ids: list[int] = []
        start = 0
        while start < len(data):
            ends = range(min(len(data), start + self._longest), start, -1)
            end = next((end for end in ends if data[start:end] in self._ids), None)
            if end is None:
                return [*ids, self.eos_token_id]
            ids.append(self._ids[data[start:end]])
            start = end
        return ids


class ModelTokens(TokenTable):
    """The tokens of a tokenizer, which also spells.

    Args:
        vocab_size: the model's; where it is the larger one, the ids beyond the tokenizer's are no text.
        eos_token_ids: not empty; all of them are structure, whatever the tokenizer says.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        special = {token_id for token_id in range(vocab_size) if tokenizer.is_special(token_id)} | set(eos_token_ids)
        tokens = map(tokenizer.token_bytes, range(vocab_size))
        super().__init__([data if len(data) <= MAX_TOKEN_BYTES else b"" for data in tokens], special, eos_token_ids)
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        """The ids of a text's start, as the model spells it amid other text."""
        # llguidance takes the process down with whatever is raised here, and trusts that the ids spell the text.
        text = text[:MAX_SPELT_CHARS]
        data = text.encode()
        return self._encode(text, data) or self._encode(_LEAD + text, data) or self.spell_greedily(data)

    def _encode(self, text: str, data: bytes) -> list[int]:
        """The last tokens of `text` whose bytes are `data`; none where its tokens have no border there."""
        try:
            ids = self._tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        except InvalidRequestError:  # a character that the vocabulary does not have
            return []
        left = len(data)
        start = len(ids)
        while left > 0 and start > 0:
            start -= 1
            left -= len(self.tokens[ids[start]]) if ids[start] < len(self.tokens) else left + 1
        spelt = ids[start:]
        return spelt if b"".join(self.tokens[token_id] for token_id in spelt) == data else []
