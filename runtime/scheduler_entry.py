"""Lets waiting requests in, strictly in order, as long as rows and blocks suffice."""

from __future__ import annotations

from dataclasses import dataclass

from pageframe.runtime.block_allocator import OutOfBlocksError
from pageframe.runtime.prefix_cache import Lookup
from pageframe.runtime.request import Request
from pageframe.runtime.scheduler_state import SchedulerState


@dataclass(frozen=True, slots=True)
class _Blocked:
    """The first in the queue as it was last looked up: it needed `needed` blocks and lacked `missing` of them."""

    request: Request
    needed: int
    missing: int
    available: int
    index_changes: int


class SchedulerEntry(SchedulerState):
    """What lets the requests at the head of the queue in."""

    #: Why the first in the queue was not let in the last time, as far as blocks are the reason.
    _blocked: _Blocked | None = None

    def _admit_waiting(self, now: float) -> None:
        """Let waiting requests in, strictly in order: none overtakes one that waits."""
        while self._queues.waiting:
            request = self._queues.waiting[0]
            if self.tables.num_free_rows == 0 and not self._queues.later_than(request):
                self._wait(request, "rows", now)
                return
            if self._is_still_blocked(request):
                assert self._blocked is not None
                self._wait(request, "blocks", now, needed=self._blocked.needed, free=self.allocator.num_available)
                return
            lookup = self.blocks.lookup(request)
            num_tokens = self._tokens_to_hold(request)
            if not self._make_room(request, lookup, num_tokens, now):
                self._record_wait(request, lookup, num_tokens, now)
                return
            try:
                self._admit(request, lookup, num_tokens, now)
            except OutOfBlocksError:
                self._record_wait(request, lookup, num_tokens, now)
                return

    def _is_still_blocked(self, request: Request) -> bool:
        """Whether a request that did not fit when it was last looked up can't fit now, told without looking it up.

        Each block that came back makes it lack one less, and so does each that was published and may be one of its own.
        """
        last = self._blocked
        if last is None or last.request is not request or self._queues.later_than(request):
            return False
        come_back = self.allocator.num_available - last.available
        return last.missing > come_back + self.blocks.num_index_changes - last.index_changes

    def _tokens_to_hold(self, request: Request) -> int:
        """Tokens that a request has blocks for when it enters: all of its context, so that no half-admitted prompt is
        stuck, and the next one, so that whoever enters behind it is not preempted for its first token."""
        return min(len(request.context) + 1, self.max_model_len)

    def _make_room(self, request: Request, lookup: Lookup, num_tokens: int, now: float) -> bool:
        """Whether there are blocks and a row for a request, after preempting those later in the order if that helps."""
        missing = self.blocks.missing_blocks
        if missing(lookup, num_tokens) > 0 or self.tables.num_free_rows == 0:
            later = self._queues.later_than(request)
            if not later or missing(lookup, num_tokens, [other.row for other in later]) > 0:
                return False
        while missing(lookup, num_tokens) > 0 or self.tables.num_free_rows == 0:
            self._preempt_last(request, now)
        return True

    def _record_wait(self, request: Request, lookup: Lookup, num_tokens: int, now: float) -> None:
        if self.tables.num_free_rows == 0:
            self._wait(request, "rows", now)
            return
        available, missing = self.allocator.num_available, self.blocks.missing_blocks(lookup, num_tokens)
        needed = available + max(0, missing)
        self._blocked = _Blocked(request, needed, missing, available, self.blocks.num_index_changes)
        self._wait(request, "blocks", now, needed=needed, free=available)

    def _admit(self, request: Request, lookup: Lookup, num_tokens: int, now: float) -> None:
        """Give the first in the queue a row and blocks.

        Raises:
            OutOfBlocksError: it still waits; nothing was taken.
        """
        request.row = self.blocks.admit(request, lookup, num_tokens)
        self._queues.leave(request)
        self._blocked = None
        num_cached = len(lookup.entries) * self.tables.block_size
        request.miss_reason, request.evicted_step = lookup.reason, lookup.evicted_step
        if request.first_scheduled_time is None:
            request.first_scheduled_time = now
            request.num_cached_tokens = num_cached
            if self.blocks.prefix_cache is not None:
                self.num_lookup_tokens += len(request.token_ids)
                self.num_hit_tokens += num_cached
        self._run(request, num_cached, now)
