"""What the scheduler knows, and the moves of one request from place to place: queues, rows, blocks, waits, ending.

The parts of a step are built on it: scheduler_entry.py lets waiting requests in, scheduler_results.py takes what a
forward pass gave, scheduler.py puts them together.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from pageframe.runtime.block_copy import FREE_COPIES, CopyCosts
from pageframe.runtime.block_manager import BlockManager
from pageframe.runtime.journal import FinishEvent, Journal, PreemptEvent, WaitEvent
from pageframe.runtime.request import FinishReason, Request, RequestOutput
from pageframe.runtime.request_queues import RequestQueues
from pageframe.runtime.rows import RequestRows

Int32s = npt.NDArray[np.int32]


class SchedulerState:
    """The queues, the rows, the blocks and the counters. One writer of every request's state.

    Args:
        max_model_len: longest context in tokens; the pool must hold at least that many.
        mixed_token_budget: see `step_budget`.
        prefix_cache, host_slots, copy_costs, window: see BlockManager.
        slide_by: tokens that leave a full context for the request to go on; None ends the request there.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_requests: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        journal: Journal,
        mixed_token_budget: int | None = None,
        prefix_cache: bool = True,
        host_slots: int = 0,
        copy_costs: CopyCosts = FREE_COPIES,
        window: int | None = None,
        slide_by: int | None = None,
        keep_finished: int = 256,
    ) -> None:
        if num_blocks * block_size < max_model_len:
            raise ValueError(f"{num_blocks} blocks of {block_size} do not hold max_model_len ({max_model_len}) tokens")
        if max_num_batched_tokens < max_num_requests:
            raise ValueError("max_num_batched_tokens must be at least max_num_requests")
        if slide_by is not None and not 1 <= slide_by <= max_model_len:
            raise ValueError(f"slide_by is {slide_by}; it must be from 1 to max_model_len ({max_model_len})")
        self.blocks = BlockManager(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_requests=max_num_requests,
            max_blocks=-(-max_model_len // block_size),
            journal=journal,
            prefix_cache=prefix_cache,
            host_slots=host_slots,
            copy_costs=copy_costs,
            window=window,
        )
        self.allocator, self.tables = self.blocks.allocator, self.blocks.tables
        self.rows = RequestRows(max_num_requests, max_model_len)
        self.max_num_requests = max_num_requests
        self.max_num_batched_tokens = max_num_batched_tokens
        self.mixed_token_budget = mixed_token_budget
        self.max_model_len = max_model_len
        self.slide_by = slide_by
        self.journal = journal
        self.step = 0
        self.num_preemptions = 0
        self.num_aborts = 0
        #: Waits begun so far, by reason; see request.Wait.
        self.num_waits = {"queue": 0, "blocks": 0, "rows": 0, "budget": 0, "group": 0}
        #: Tokens that requests had when they first entered, and how many of them were found computed.
        self.num_lookup_tokens = 0
        self.num_hit_tokens = 0
        self._queues = RequestQueues(keep_finished)
        self._running_rows: Int32s = np.zeros(0, dtype=np.int32)
        self._preempted: list[str] = []
        #: No live request's deadline is earlier.
        self._next_deadline = math.inf
        self._timed_out: list[RequestOutput] = []

    # ---- what others may read -------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queues.waiting)

    @property
    def num_following(self) -> int:
        """Choices whose leader still computes the prompt for them; they stand in no queue."""
        return len(self._queues) - len(self._queues.running) - len(self._queues.waiting)

    @property
    def num_running(self) -> int:
        return len(self._queues.running)

    @property
    def has_work(self) -> bool:
        return len(self._queues) > 0

    def rows_in_use(self) -> Int32s:
        """Rows of the running requests, in the order of service."""
        return self._queues.rows()

    def live_requests(self) -> list[Request]:
        """Running requests in the order of service, then waiting ones, then those whose leader has not forked."""
        return self._queues.live()

    def is_live(self, request_id: str) -> bool:
        """It has not ended."""
        return self._queues.get(request_id) is not None

    def find(self, request_id: str) -> Request | None:
        """A live or recently finished request."""
        return self._queues.find(request_id)

    # ---- moves ----------------------------------------------------------------------------------------------------

    def _queue(self, request: Request, now: float) -> None:
        """Put a request in its place among those that wait."""
        self._queues.wait(request)
        self._wait(request, "queue", now)
        waiting = self._queues.waiting
        if waiting[0] is request and len(waiting) > 1:
            self._wait(waiting[1], "queue", now)  # whatever it waited for, it is behind another now

    def _wait(self, request: Request, reason: str, now: float, *, needed: int = 0, free: int = 0) -> None:
        """Record that a request cannot go on."""
        if request.wait(reason, now, needed=needed, free=free):
            self.num_waits[reason] += 1
            behind = request.waits[-1].behind = self._queues.ahead_of(request)
            self.journal.note(WaitEvent, request.request_id, reason=reason, needed=needed, free=free, behind=behind)

    def _run(self, request: Request, num_computed_tokens: int, now: float) -> None:
        """It has its row and its blocks: it runs from now on."""
        request.end_wait(now)
        self.rows.load(request.row, request, num_computed_tokens)
        self._queues.run(request)

    def _preempt_last(self, beneficiary: Request, now: float) -> None:
        """Take the blocks of the last running request; it keeps its tokens and waits in its place."""
        victim = self._queues.running[-1]
        self._queues.leave(victim)
        self.journal.note(
            PreemptEvent,
            victim.request_id,
            row=victim.row,
            for_request=beneficiary.request_id,
            num_computed_tokens=int(self.rows.num_computed_tokens[victim.row]),
        )
        self._vacate(victim)
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self._preempted.append(victim.request_id)
        self._queue(victim, now)

    def _vacate(self, request: Request) -> None:
        """Take a request's tokens out of its row, if it has one, and give the row and its blocks back."""
        if request.row >= 0:
            self.rows.store(request.row, request)
            self.blocks.release(request)
            request.row = -1

    def _end(self, request: Request, reason: FinishReason, now: float, keep: int | None = None) -> None:
        """End a live request, of whose tokens `keep` remain (None: all)."""
        self._queues.leave(request)
        self._vacate(request)
        heir = self._queues.hand_over(request) if request.followers and reason is not FinishReason.ERROR else None
        if keep is not None:
            request.truncate(keep)
        request.end_wait(now)
        request.finish_reason = reason
        request.finish_time = now
        self._queues.end(request)
        request.let_go()
        self._note_finish(request)
        if heir is not None:
            self._queue(heir, now)

    def _note_finish(self, request: Request) -> None:
        assert request.finish_reason is not None
        self.journal.note(
            FinishEvent,
            request.request_id,
            reason=request.finish_reason.value,
            num_output_tokens=len(request.token_ids) - request.num_prompt_tokens,
        )

    def _refresh_running_rows(self) -> None:
        self._running_rows = self.rows_in_use()

    def check_invariants(self) -> None:
        """Queues, rows, tables and allocator agree with one another."""
        self.blocks.check_invariants()
        self._queues.check_invariants()
        running = self._queues.running
        rows = [request.row for request in running]
        assert len(set(rows)) == len(rows)
        assert len(rows) + self.tables.num_free_rows == self.max_num_requests
        for request in running:
            computed = int(self.rows.num_computed_tokens[request.row])
            known = int(self.rows.num_tokens[request.row])
            end = int(self.tables.num_blocks[request.row])
            assert computed < known, f"{request.request_id} has nothing left to compute"
            assert computed <= end * self.tables.block_size, f"{request.request_id} computed past its blocks"
            assert end <= self.tables.blocks_for(known + 1), f"{request.request_id} holds more blocks than it needs"
        if not running:
            assert self.allocator.num_used == 0, "idle, but blocks are used"
