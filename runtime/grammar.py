"""Structured output: which tokens may come next so that a text follows a grammar.

The engine asks a Matcher for a mask before it draws a token and tells it the token afterwards. The grammars are
llguidance's (https://github.com/guidance-ai/llguidance), compiled by grammar_compiler.py. Knows no requests, no
scheduler and no logits. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from llguidance._lib import JsonCompileOptions

#: uint32: bit i % 32 of word i // 32 says whether token i may come next.
MaskWords = npt.NDArray[np.uint32]

MAX_COMPLAINT_CHARS = 500
#: Of a grammar's source, as UTF-8.
MAX_SOURCE_BYTES = 256 * 1024
#: kind -> what its source is.
GRAMMAR_KINDS = {
    "json_schema": "JSON schema",
    "json_object": "JSON object",
    "regex": "regular expression",
    "choice": "list of choices",
    "lark": "Lark grammar",
    "tool_calls": "grammar of tool calls",
}

#: llguidance's options for JSON, where a schema does not set its own under "x-guidance"; a schema inside a Lark grammar
#: has to carry them there. White space is what json.dumps and people write, one space or a line break and an
#: indentation: without a bound a small model may never end it.
JSON_OPTIONS: JsonCompileOptions = {"whitespace_pattern": r"[ ]|\r?\n[ \t]{0,64}"}


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A grammar as a request brings it, not looked at yet.

    Args:
        kind: one of GRAMMAR_KINDS.
        source: "json_schema": the schema as JSON; "regex": an expression in the syntax of Rust's regex crate, which
            the whole text must match; "choice": a JSON list of texts; "lark": a grammar in llguidance's variant of
            Lark; "json_object": empty; "tool_calls": see grammar_tools.py.
    """

    kind: str
    source: str = ""


class Matcher:
    """How far one text has come in its grammar. It is a choice's own, whatever row or blocks the choice has.

    One thread at a time.

    Args:
        inner: llguidance's, of a tokenizer with the model's vocabulary size.
        eos_token_ids: tokens that end a text.
        num_words: of a mask.
    """

    def __init__(self, inner: LLMatcher, eos_token_ids: frozenset[int], num_words: int) -> None:
        self._inner = inner
        self._eos_token_ids = eos_token_ids
        self._num_words = num_words

    def accept(self, token_id: int) -> bool:
        """Take the next token; False, and nothing has changed, where the grammar does not allow it.

        An end-of-text token is accepted where the text may end, and ends it. Where the vocabulary cannot spell what the
        grammar forces, the mask leaves an end-of-text token that is not accepted.
        """
        if self._inner.is_stopped():
            return token_id in self._eos_token_ids and not self._inner.is_error()
        return self._inner.try_consume_tokens([token_id]) == 1

    def write_mask(self, row: MaskWords) -> None:
        """Set the bits of the tokens that may come next and clear all others.

        Where the text has ended, or cannot be gone on with (see `error`), end-of-text tokens alone are allowed.

        Args:
            row: uint32 [ceil(vocab_size / 32)], contiguous.
        """
        _check_mask(row, (self._num_words,))
        self._inner.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)

    @property
    def is_accepting(self) -> bool:
        """Whether the text so far is a whole one."""
        return self._inner.is_accepting()

    @property
    def must_stop(self) -> bool:
        """Whether the text is whole and nothing but an end-of-text token can follow, or one has."""
        return self._inner.is_stopped() and not self._inner.is_error()

    @property
    def error(self) -> str:
        """Why the text cannot be gone on with, such as a limit that its last mask ran into; "" where it can.

        It follows the grammar as far as it goes but may not be whole, and it will not heal.
        """
        return one_line(self._inner.get_error()) if self._inner.is_error() else ""

    def copy(self) -> Matcher:
        """A matcher at the same place, for a fork; neither changes the other."""
        return Matcher(self._inner.deep_copy(), self._eos_token_ids, self._num_words)


class CompiledGrammar:
    """A grammar made ready for one model's vocabulary. Safe to use from several threads.

    Args: those of Matcher, at the start of a text.
    """

    def __init__(self, start: LLMatcher, eos_token_ids: frozenset[int], num_words: int) -> None:
        # Only copied: its matchers share the states that their lexer has made so far, but not their place in the text.
        self._start = Matcher(start, eos_token_ids, num_words)

    def matcher(self) -> Matcher:
        """A matcher at the start of a text."""
        return self._start.copy()

    def is_worn_out(self) -> bool:
        """Whether its texts have made so many states of its lexer that no more are allowed; then it is of no use."""
        matcher = self.matcher()
        matcher._inner.compute_bitmask()
        return matcher.error != ""


class MaskFiller:
    """Writes many matchers' masks, in threads of its own. One caller at a time.

    Args:
        num_threads: how many masks are computed at once.
    """

    def __init__(self, num_threads: int) -> None:
        from llguidance import LLExecutor

        self._executor = LLExecutor(num_threads=num_threads)

    def fill(self, matchers: Sequence[tuple[int, Matcher]], masks: MaskWords) -> None:
        """Do what `write_mask` does, for each (row, matcher); other rows stay as they are.

        Args:
            matchers: all of one model, each once.
            masks: uint32 [n, ceil(vocab_size / 32)], contiguous.
        """
        if matchers:
            _check_mask(masks, (len(masks), matchers[0][1]._num_words))
            pairs = [(matcher._inner, row) for row, matcher in matchers]
            self._executor.unsafe_compute_mask_ptr(pairs, masks.ctypes.data, masks.strides[0], len(masks))


def _check_mask(mask: MaskWords, shape: tuple[int, ...]) -> None:
    """llguidance writes to the address alone."""
    assert mask.dtype == np.uint32
    assert mask.shape == shape, f"{mask.shape} is not {shape}"
    assert mask.flags.c_contiguous
    assert mask.flags.writeable


def one_line(words: str) -> str:
    """llguidance's words as one line of bounded length, without its notes on its own inside."""
    line = " ".join(words.partition("<backtrace>")[0].replace("<non-verbose/>", "").split())
    line = line.replace("NoExtensionBias", "no text can come next")
    return line if len(line) <= MAX_COMPLAINT_CHARS else line[: MAX_COMPLAINT_CHARS - 1] + "…"
