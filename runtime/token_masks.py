"""Makes the masks of a step's rows while its forward pass runs. No torch; llguidance only once a grammar comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np

from pageframe.runtime.grammar import MaskFiller, MaskWords, Matcher
from pageframe.runtime.step_plan import SamplingBatch
from pageframe.runtime.token_rules import TokenRules


class Filler(Protocol):
    """Writes many matchers' masks: see grammar.MaskFiller."""

    def fill(self, matchers: Sequence[tuple[int, Matcher]], masks: MaskWords) -> None: ...


class TokenMasks:
    """The masks of one step: a table that is written anew for each.

    Args:
        num_rows: most choices with a mask in one step.
        num_threads: that compute grammars' masks, beside the forward pass.
        make_filler: called when the first grammar comes.
    """

    def __init__(
        self, num_rows: int, vocab_size: int, num_threads: int, make_filler: Callable[[int], Filler] = MaskFiller
    ) -> None:
        self._shape = (num_rows, -(-vocab_size // 32))
        self._num_threads = num_threads
        self._make_filler = make_filler
        self._table: MaskWords | None = None
        self._filler: Filler | None = None
        self._thread: ThreadPoolExecutor | None = None
        #: What the thread does. Nobody has waited for it where a forward pass failed.
        self._filling: Future[None] | None = None

    def begin(self, batch: SamplingBatch) -> None:
        """Begin to make the masks that a batch's rules need; a rule waits for its own where it is asked for it."""
        banned = dict(batch.banned)
        # The choices of one request draw their first token by the same rules.
        wanted = {id(rules): (rules, banned.get(index, ())) for index, rules in batch.rules if rules.has_mask}
        work = list(wanted.values())
        if not work:
            return
        if self._table is None:
            self._table = np.empty(self._shape, np.uint32)
        if self._filling is not None:
            futures.wait([self._filling])
            self._filling = None
        wait = None
        if any(rules.matcher is not None for rules, _ in work):
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "token-masks")
            self._filling = self._thread.submit(self._fill, self._table, work)
            wait = self._filling.result
        else:
            self._fill(self._table, work)
        for (rules, _), mask in zip(work, self._table, strict=False):
            rules.begin_mask(mask, wait)

    def _fill(self, table: MaskWords, work: list[tuple[TokenRules, tuple[int, ...]]]) -> None:
        matched = [(row, rules.matcher) for row, (rules, _) in enumerate(work) if rules.matcher is not None]
        if matched:
            if self._filler is None:
                self._filler = self._make_filler(self._num_threads)
            self._filler.fill(matched, table)
        for mask, (rules, banned) in zip(table, work, strict=False):
            rules.write_mask(mask, banned)
