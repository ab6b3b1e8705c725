"""Where a text can be cut so that what follows has the same tokens as it has in the whole text.

A tokenizer first cuts a text at its added tokens and into pieces, by a regular expression that it matches from left to
right, and each piece then has tokens of its own. Two neighbouring characters can show that a piece ends between them
whatever stands before: no alternative of the expressions known here reaches over them. Behind such a place everything
goes as it would at the beginning of a text. Knows nothing of models or requests. No torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import tokenizers

LLAMA_3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_2_SPLIT = LLAMA_3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
#: The expressions of which the two rules below hold; beside them GPT-2's own, which the library has built in.
_KNOWN_SPLITS = (LLAMA_3_SPLIT, QWEN_2_SPLIT)

#: Letters by every version of Unicode that a tokenizer may have; there are more.
_LETTERS = (
    r"A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u0391-\u03a1\u03a3-\u03c9\u0410-\u044f\u05d0-\u05ea\u0621-\u063a"
    r"\u0641-\u064a\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
)
#: No alternative goes on behind a letter with anything but letters.
_BEHIND_LETTERS = rf"[{_LETTERS}](?=[ \t\r\n!\"'(),.:;?\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f])"
#: No alternative has a space behind anything but white space.
_BEFORE_SPACES = rf"[!-~{_LETTERS}\u3001\u3002\uff01-\uff5e](?= )"
_BEHIND_DIGITS = "[0-9]"
_SEARCHED_AT_ONCE = 2048


class Cuts:
    """The places of a tokenizer's texts where a cut is sure to change no token behind it."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._pattern = _find_pattern(inner)

    def last(self, text: str, highest: int, lowest: int) -> int | None:
        """The last such place from `lowest` to `highest`, as an index into `text`; None where none is known."""
        if self._pattern is None:
            return None
        end, lowest = highest, max(lowest, 0)
        while end > lowest:
            begin = max(lowest, end - _SEARCHED_AT_ONCE)
            # One character more, for what must follow.
            places = [begin + match.end() for match in self._pattern.finditer(text[begin : end + 1])]
            places = [place for place in places if place <= end]
            if places:
                return places[-1]
            end = begin
        return None


def _find_pattern(inner: tokenizers.Tokenizer) -> re.Pattern[str] | None:
    """What stands before a place to cut at; None where nothing is known of how the tokenizer cuts into pieces."""
    # NFC joins characters with marks behind them, and no mark is among the characters above.
    if _state(inner.normalizer).get("type") not in (None, "NFC"):
        return None
    state = _state(inner.pre_tokenizer)
    steps = state["pretokenizers"] if state.get("type") == "Sequence" else [state]
    if not all(map(_is_known, steps)) or not any(map(_splits_words, steps)):
        return None
    added = inner.get_added_tokens_decoder().values()
    if any(token.rstrip or token.single_word for token in added):
        return None
    single_digits = any(step["type"] == "Digits" and step["individual_digits"] for step in steps)
    wide = [_BEFORE_SPACES, _BEHIND_LETTERS, *([_BEHIND_DIGITS] if single_digits else [])]
    contents = [token.content for token in added]
    return _outside(contents, "|".join(wide)) or _outside(contents, _BEFORE_SPACES)


def _outside(contents: Iterable[str], rule: str) -> re.Pattern[str] | None:
    """The rule's pattern; None where it may find a place within an added token."""
    pattern = re.compile(rule)
    within = any(match.end() < len(content) for content in contents for match in pattern.finditer(content))
    return None if within else pattern


def _is_known(step: dict[str, Any]) -> bool:
    kind = step.get("type")
    if kind == "Split":
        is_known = step["pattern"].get("Regex") in _KNOWN_SPLITS
        return is_known and step["behavior"] == "Isolated" and not step["invert"]
    return kind == "Digits" or (kind == "ByteLevel" and not step["add_prefix_space"])


def _splits_words(step: dict[str, Any]) -> bool:
    return step["type"] == "Split" or (step["type"] == "ByteLevel" and bool(step.get("use_regex", True)))


def _state(part: Any) -> dict[str, Any]:
    """A part of the library's tokenizer as its file has it; {} for none."""
    state: dict[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return state
