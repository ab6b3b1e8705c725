"""An engine whose memory is NaN wherever nobody wrote: what reads a slot that is not its own shows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import torch

from pageframe.runtime.batch import Batch
from pageframe.runtime.block_copy import CopyKind
from pageframe.runtime.engine import Engine
from pageframe.runtime.journal import AllocateEvent, Event
from pageframe.runtime.model_runner import ModelRunner

NAN = float("nan")


class PoisonedRunner:
    """An engine's runner with NaN in all memory that nobody wrote: whoever reads a slot that is not his, or not yet
    written, gets NaN and shows.

    NaN are the whole pool and host memory at first, every free block after a step, and every block that was handed out
    since the last forward pass, once the copies of this one are made: a cached block goes from one request to the next
    without being free in between.
    """

    def __init__(self, engine: Engine) -> None:
        assert isinstance(engine.runner, ModelRunner)
        self._runner = engine.runner
        self._engine = engine
        self._num_events = engine.journal.written
        #: Handed out since they were last NaN.
        self._written: set[int] = set()
        self._runner.fill_blocks(range(engine.resolved.num_blocks), NAN)
        if engine.resolved.host_slots:
            self._runner.fill_host_slots(range(engine.resolved.host_slots), NAN)
        engine.runner = self

    def forward(self, batch: Batch) -> torch.Tensor:
        self._runner.copy_blocks(batch.copies)
        copied = {copy.dst for copy in batch.copies if copy.kind is not CopyKind.TO_HOST}
        handed_out = {
            block_id for event in self._new_events() if isinstance(event, AllocateEvent) for block_id in event.block_ids
        }
        self._written |= handed_out
        self._runner.fill_blocks(sorted(handed_out - copied), NAN)
        return self._runner.forward(replace(batch, copies=()))

    def synchronize(self) -> None:
        self._runner.synchronize()

    def poison_free_blocks(self) -> None:
        allocator = self._engine.scheduler.allocator
        free = {block_id for block_id in self._written if allocator.state(block_id) == "free"}
        self._written -= free
        self._runner.fill_blocks(sorted(free), NAN)

    def _new_events(self) -> Iterator[Event]:
        journal = self._engine.journal
        num_new, self._num_events = journal.written - self._num_events, journal.written
        assert num_new <= len(journal), "the journal dropped events before they were seen"
        return islice(journal, len(journal) - num_new, None)
