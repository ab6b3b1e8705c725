"""TextStream: a request's tokens become text as they come, and a stop string ends it.

Pure Python, once per choice, outside the engine. It knows nothing of logits, of the scheduler or of end tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from pageframe.runtime.request import SamplingParams


class TokenBytes(Protocol):
    """What TextStream needs of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one push decided.

    Args:
        text: new text, final: it never changes and never turns out to belong to a stop string.
        stop: the stop string that ended the text, or None.
        num_tokens: output tokens that count so far, up to and including the one that completed the stop string.
    """

    text: str
    stop: str | None
    num_tokens: int


class TextStream:
    """The text of one choice, in pieces.

    The pieces, joined, are the UTF-8 decoding of all the tokens' bytes with U+FFFD for what is no UTF-8, up to the
    stop string. An output continues a prompt, so a tokenizer that drops the first space of a whole text drops none
    here. Neither text nor stop depends on how
    the tokens are spread over pushes.

    A character belongs to the token whose bytes completed it. The stop string that ends first wins; of those that
    end at the same character, the longest. One completed within the first `min_tokens` tokens stays in the text
    and does not end it. A character that is not complete yet and a suffix that a stop string may start with are
    held back until they are decided.

    Args:
        tokenizer: gives each token's bytes.
        params: uses stop, min_tokens, include_stop_str_in_output, skip_special_tokens.
        shown_ids: special tokens that are text all the same, such as marks of tool calls.
    """

    def __init__(self, tokenizer: TokenBytes, params: SamplingParams, shown_ids: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._shown_ids = shown_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._matcher = _StopMatcher(params.stop) if params.stop else None
        self._held = ""
        self._num_tokens = 0
        self._ended = False

    def push(self, token_ids: Sequence[int], *, final: bool = False) -> TextDelta:
        """Adds output tokens; not the end token that ended the request, whose text is no text.

        Args:
            token_ids: new output tokens, oldest first. Those after a stop string are dropped.
            final: there are no more; what is held back comes out, an incomplete character as U+FFFD.
        """
        assert not self._ended, "push after the text has ended"
        decided: list[str] = []
        for token_id in token_ids:
            self._num_tokens += 1
            stop = self._feed(self._decoder.decode(self._bytes(token_id)), decided)
            if stop is not None:
                return self._end(decided, stop)
        if final:
            stop = self._feed(self._decoder.decode(b"", final=True), decided)
            if stop is None:
                decided.append(self._held)
            return self._end(decided, stop)
        return TextDelta("".join(decided), None, self._num_tokens)

    def _bytes(self, token_id: int) -> bytes:
        is_skipped = self._params.skip_special_tokens and self._tokenizer.is_special(token_id)
        return b"" if is_skipped and token_id not in self._shown_ids else self._tokenizer.token_bytes(token_id)

    def _feed(self, new: str, decided: list[str]) -> str | None:
        """Appends to `decided` what `new` decides; the stop string that `new` completes, or None."""
        if self._matcher is None:
            decided.append(new)
            return None
        may_stop = self._num_tokens > self._params.min_tokens
        text = self._held + new
        for end in range(len(self._held) + 1, len(text) + 1):
            stop = self._matcher.advance(text[end - 1])
            if stop is not None and may_stop:
                kept = end if self._params.include_stop_str_in_output else end - len(stop)
                decided.append(text[:kept])
                return stop
        num_decided = len(text) - self._matcher.num_open
        decided.append(text[:num_decided])
        self._held = text[num_decided:]
        return None

    def _end(self, decided: list[str], stop: str | None) -> TextDelta:
        self._ended = True
        self._held = ""
        return TextDelta("".join(decided), stop, self._num_tokens)


class _StopMatcher:
    """Looks for several strings at once, a character at a time, each character once.

    The automaton of Aho and Corasick, "Efficient string matching: an aid to bibliographic search", CACM 18(6),
    1975. A node is a prefix of a stop string, node 0 the empty one; the current node is the longest prefix that
    is a suffix of the text. Time per character is constant on average, whatever the stop strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: dict[tuple[int, str], int] = {}
        self._node = 0
        # Per node: the node of its longest proper suffix, the longest stop string it ends with, and the length
        # of its longest suffix that may still grow into a stop string.
        self._suffix = [0]
        self._stop: list[str | None] = [None]
        self._num_open = [0]
        self._link(self._add(stops))

    @property
    def num_open(self) -> int:
        """How many of the text's last characters may still become a stop string."""
        return self._num_open[self._node]

    def advance(self, character: str) -> str | None:
        """Goes on by one character; the longest stop string that ends with it, or None."""
        self._node = self._step(self._node, character)
        return self._stop[self._node]

    def _step(self, node: int, character: str) -> int:
        while (child := self._next.get((node, character))) is None:
            if node == 0:
                return 0
            node = self._suffix[node]
        return child

    def _add(self, stops: Sequence[str]) -> list[list[tuple[int, int, str]]]:
        """Makes the nodes. Returns (node, parent, character) of each, by depth, the root left out."""
        levels: list[list[tuple[int, int, str]]] = [[] for _ in range(max(map(len, stops)))]
        for stop in stops:
            node = 0
            for depth, character in enumerate(stop):
                parent, node = node, self._next.get((node, character), len(self._suffix))
                if node == len(self._suffix):
                    self._next[parent, character] = node
                    self._suffix.append(0)
                    self._stop.append(None)
                    self._num_open.append(0)
                    levels[depth].append((node, parent, character))
                if depth < len(stop) - 1:
                    self._num_open[node] = depth + 1
            self._stop[node] = stop
        return levels

    def _link(self, levels: list[list[tuple[int, int, str]]]) -> None:
        """Fills in the suffixes, shorter prefixes first: a suffix is always shorter than its node."""
        for level in levels[1:]:
            for node, parent, character in level:
                suffix = self._step(self._suffix[parent], character)
                self._suffix[node] = suffix
                self._stop[node] = self._stop[node] or self._stop[suffix]
                self._num_open[node] = self._num_open[node] or self._num_open[suffix]
