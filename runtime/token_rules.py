"""What a request asks for that changes logits before a token is drawn: bias, penalties, and which tokens may come.

Sparse: a choice without any of it has no TokenRules, and a rule touches the tokens that it names. Knows numpy arrays
alone: the sampler applies the rules on the host, or takes them to where the logits are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence

import numpy as np
import numpy.typing as npt

from pageframe.runtime.grammar import MaskWords, Matcher
from pageframe.runtime.request import Request, SamplingParams

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

_LARGEST = float(np.finfo(np.float32).max)
_BITS = np.uint32(1) << np.arange(32, dtype=np.uint32)


class TokenCounts:
    """The tokens that penalties are for, each once, and how often the output has it."""

    def __init__(self, token_ids: Int32s, output: Int32s) -> None:
        """`token_ids`: those that count as seen, 0 times in the output or more; `output`: all of its tokens."""
        ids = np.unique(np.concatenate((token_ids, output)))
        self._size = len(ids)
        self._ids = np.zeros(max(64, 2 * self._size), np.int32)
        self._counts = np.zeros_like(self._ids)
        self._ids[: self._size] = ids
        found, counts = np.unique(output, return_counts=True)
        self._counts[np.searchsorted(ids, found)] = counts
        self._places = {token_id: place for place, token_id in enumerate(ids.tolist())}

    def add(self, token_id: int) -> None:
        """One more token of the output."""
        place = self._places.setdefault(token_id, self._size)
        if place == self._size:
            if self._size == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[place] = token_id
            self._size += 1
        self._counts[place] += 1

    @property
    def token_ids(self) -> Int32s:
        return self._ids[: self._size]

    @property
    def output_counts(self) -> Int32s:
        return self._counts[: self._size]


class BadWords:
    """Sequences of tokens that the output must not contain: what would complete one may not come.

    Args:
        sequences: none empty.
    """

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        #: Tokens that are a bad word alone.
        self.always = sorted({sequence[0] for sequence in sequences if len(sequence) == 1})
        self._longest = max(map(len, sequences), default=1)
        #: By the last token but one, so that a step looks at few.
        self._by_last: dict[int, list[tuple[list[int], int]]] = defaultdict(list)
        for *before, last in sequences:
            if before:
                self._by_last[before[-1]].append((before, last))

    def tail(self, output: Int32s) -> list[int]:
        """As much of an output's end as is needed to say what may not come next."""
        return output[max(0, len(output) - self._longest + 1) :].tolist() if self._longest > 1 else []

    def due(self, tail: list[int]) -> list[int]:
        """Tokens that would complete a sequence of several after this end of the output."""
        if not tail or tail[-1] not in self._by_last:
            return []
        return [last for before, last in self._by_last[tail[-1]] if tail[-len(before) :] == before]


class TokenRules:
    """The rules of one running choice, as of the tokens it has. Made anew whenever it enters a row.

    Args:
        request: with all of its tokens; those that slid out of the context count too.
    """

    def __init__(self, request: Request) -> None:
        params = request.params
        self.matcher: Matcher | None = request.matcher
        self.bias_ids: Int64s = np.array(list(params.logit_bias), np.int64)
        self.bias: Float32s = np.array(list(params.logit_bias.values()), np.float32)
        self.repetition = np.float32(params.repetition_penalty)
        self.presence = np.float32(params.presence_penalty)
        self.frequency = np.float32(params.frequency_penalty)
        self._allowed_ids = params.allowed_token_ids
        self._bad_words = BadWords(params.bad_words_ids)
        #: Whether some tokens may not be drawn, whatever their logits.
        self.has_mask = self.matcher is not None or bool(params.allowed_token_ids) or bool(params.bad_words_ids)
        prompt, output = np.split(request.token_ids, [request.num_prompt_tokens])
        #: None without penalties. The prompt's tokens are counted only where they are penalised.
        self.counts: TokenCounts | None = None
        if has_penalties(params):
            self.counts = TokenCounts(prompt if params.repetition_penalty != 1 else prompt[:0], output)
        self._tail = self._bad_words.tail(output)
        #: Tokens of the context that are counted.
        self._num_counted = len(request.context)
        self._base: MaskWords | None = None
        self._mask: MaskWords | None = None
        self._wait: Callable[[], object] | None = None

    def catch_up(self, context: Int32s) -> None:
        """Count the tokens of its context that came since the last time; all of them are output."""
        new = context[self._num_counted :]
        self._num_counted = len(context)
        if self.counts is not None:
            for token_id in new.tolist():
                self.counts.add(token_id)
        if len(new):
            self._tail = self._bad_words.tail(np.concatenate((np.array(self._tail, np.int32), new)))

    def begin_mask(self, mask: MaskWords, wait: Callable[[], object] | None) -> None:
        """`mask` uint32 [ceil(vocab_size / 32)] is the mask of the next token once `wait` has returned, if given."""
        self._mask, self._wait = mask, wait

    @property
    def mask(self) -> MaskWords | None:
        """Which tokens may be drawn next, as bits like a Matcher's; None where all may. Waits until it is there."""
        if self._wait is not None:
            self._wait()
            self._wait = None
        return self._mask

    def write_mask(self, mask: MaskWords, banned: Collection[int]) -> None:
        """Complete `mask`, into which the matcher, where there is one, has written its own; without one, write it.

        Where the grammar's text is whole, its end may come whatever else is asked for.

        Args:
            banned: further tokens that may not be drawn.
        """
        if self.matcher is not None and self.matcher.must_stop:
            return
        if self._base is None:
            self._base = self._make_base(len(mask))
        if self.matcher is None:
            mask[:] = self._base
        else:
            mask &= self._base
        clear_bits(mask, [*self._bad_words.due(self._tail), *banned])

    def _make_base(self, num_words: int) -> MaskWords:
        base = np.full(num_words, 0 if self._allowed_ids else 0xFFFF_FFFF, np.uint32)
        ids = np.array(self._allowed_ids, np.int64)
        np.bitwise_or.at(base, ids // 32, _BITS[ids % 32])
        clear_bits(base, self._bad_words.always)
        return base

    def apply(self, logits: Float32s) -> None:
        """Change a row of logits, bias first, then penalties; its mask is left to the caller.

        Rounded to float32 after each; a penalty itself is float64, as in kernels/triton/sampling_penalties.py. What
        becomes too large counts as the largest float32.
        """
        logits[self.bias_ids] += self.bias
        if self.counts is not None:
            ids, counts = self.counts.token_ids, self.counts.output_counts
            values = logits[ids].astype(np.float64)
            repetition, presence, frequency = map(float, (self.repetition, self.presence, self.frequency))
            with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
                values = np.where(values > 0, values / repetition, values * repetition)
                values -= np.where(counts > 0, presence + frequency * counts, 0.0)
                logits[ids] = np.minimum(values, _LARGEST)


def none_left(request: Request) -> tuple[str, str]:
    """Why no token may come next: which of its rules leave none. And the field at fault, "" where there are several."""
    params = request.params
    given = {}
    if request.matcher is not None:
        given["grammar"] = "grammar"
    if params.allowed_token_ids:
        given["allowed_token_ids"] = f"allowed_token_ids ({len(params.allowed_token_ids)} ids)"
    if params.bad_words_ids:
        given["bad_words"] = "bad_words"
    if params.min_tokens:
        given["min_tokens"] = f"min_tokens ({params.min_tokens}, before which no end may come)"
    if len(given) == 1:
        [(field, words)] = given.items()
        return f"{words} leaves no token that may come next", field
    return f"{' and '.join(given.values())} together leave no token that may come next", ""


def has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def has_rules(request: Request) -> bool:
    """Whether anything of a request changes its logits."""
    params = request.params
    return (
        request.matcher is not None
        or has_penalties(params)
        or bool(params.logit_bias)
        or bool(params.bad_words_ids)
        or bool(params.allowed_token_ids)
    )


def clear_bits(mask: MaskWords, token_ids: Collection[int]) -> None:
    """These tokens may not be drawn. Ids beyond the mask have no effect."""
    if token_ids:
        ids = np.array(list(token_ids), np.int64)
        ids = ids[(ids >= 0) & (ids < 32 * len(mask))]
        np.bitwise_and.at(mask, ids // 32, ~_BITS[ids % 32])


def unpack(mask: MaskWords, vocab_size: int) -> Bools:
    """A mask's bits, bool [vocab_size]."""
    return np.unpackbits(mask.astype("<u4", copy=False).view(np.uint8), count=vocab_size, bitorder="little").view(bool)
