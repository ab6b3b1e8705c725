"""Decides, step by step, which request computes which tokens and who holds which blocks.

Deterministic: (settings, ordered inputs, `now`, results) give the decisions. It never reads a clock or a random
source, and knows nothing of tensors, text or HTTP.

There are no prefill and decode phases. Each request has `num_computed_tokens`, which catches up with `num_tokens`;
prompt chunks, decoding and recomputation after preemption are that one thing:

    0          num_computed_tokens      num_tokens       max_total_tokens
    |-- K/V in the cache --|-- to be computed --|-- may still come --|
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pageframe.runtime.block_allocator import BlockAllocator
from pageframe.runtime.block_table import BlockTables
from pageframe.runtime.journal import (
    AdmitEvent,
    AllocateEvent,
    ArriveEvent,
    ChunkEvent,
    Event,
    FinishEvent,
    FreeEvent,
    Journal,
    PreemptEvent,
    WaitEvent,
)
from pageframe.runtime.request import FinishReason, Request, RequestOutput, RequestStatus
from pageframe.runtime.rows import RequestRows
from pageframe.runtime.step_plan import StepPlan, StepResult
from pageframe.runtime.token_budget import share_token_budget

Int32s = npt.NDArray[np.int32]


class Scheduler:
    """The queues, the token budget, admission, preemption and abort. One writer of every request's state.

    Args:
        max_model_len: longest context in tokens; the pool must hold at least that many.
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
        keep_finished: int = 256,
    ) -> None:
        if num_blocks * block_size < max_model_len:
            raise ValueError(f"{num_blocks} blocks of {block_size} do not hold max_model_len ({max_model_len}) tokens")
        if max_num_batched_tokens < max_num_requests:
            raise ValueError("max_num_batched_tokens must be at least max_num_requests")
        self.allocator = BlockAllocator(num_blocks)
        self.tables = BlockTables(
            self.allocator,
            max_requests=max_num_requests,
            max_blocks=-(-max_model_len // block_size),
            block_size=block_size,
        )
        self.rows = RequestRows(max_num_requests, max_model_len)
        self.max_num_requests = max_num_requests
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.journal = journal
        self.step = 0
        self.num_preemptions = 0
        self.num_aborts = 0
        #: Waits begun so far, by reason; see request.Wait.
        self.num_waits = {"queue": 0, "blocks": 0, "rows": 0, "budget": 0}
        self._requests: dict[str, Request] = {}
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._running_rows: Int32s = np.zeros(0, dtype=np.int32)
        self._preempted: list[str] = []
        self._finished: deque[Request] = deque(maxlen=keep_finished)

    # ---- what others may read -------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def rows_in_use(self) -> Int32s:
        """Rows of the running requests, in the order of service."""
        return np.fromiter((request.row for request in self._running), dtype=np.int32, count=len(self._running))

    def live_requests(self) -> list[Request]:
        """Running requests in the order of service, then waiting ones."""
        return [*self._running, *self._waiting]

    def find(self, request_id: str) -> Request | None:
        """A live or recently finished request."""
        live = self._requests.get(request_id)
        if live is not None:
            return live
        return next((request for request in self._finished if request.request_id == request_id), None)

    # ---- arrivals and endings -------------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """Queue a request that fits alone (checked at the door)."""
        assert request.request_id not in self._requests, f"request id {request.request_id} is live already"
        assert request.max_total_tokens <= self.max_model_len, "a request that can never fit was let in"
        self._requests[request.request_id] = request
        self._queue(request, now)
        self._note(
            ArriveEvent,
            request,
            now,
            num_prompt_tokens=request.num_prompt_tokens,
            max_total_tokens=request.max_total_tokens,
            tenant=request.tenant,
            priority=request.priority,
            seed=request.request_seed,
        )

    def _queue(self, request: Request, now: float) -> None:
        """Put a request in its place among those that wait."""
        insort(self._waiting, request, key=_order)
        self._wait(request, "queue", now)
        if self._waiting[0] is request and len(self._waiting) > 1:
            self._wait(self._waiting[1], "queue", now)  # whatever it waited for, it is behind another now

    def abort(self, request_id: str, now: float) -> bool:
        """End a live request because nobody wants it any more; False where it has ended already."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self.num_aborts += 1
        self._end(request, FinishReason.ABORT, now)
        return True

    def finish(self, request_id: str, num_output_tokens: int, now: float) -> bool:
        """End a live request at a stop string, `num_output_tokens` tokens into its output; later ones are dropped.

        The text stopped before any reason of the engine's own, so this also corrects a request that ended by itself
        a moment ago. False where the id is unknown.
        """
        request = self._requests.get(request_id)
        if request is not None:
            keep = request.num_prompt_tokens + num_output_tokens
            if request.status is RequestStatus.RUNNING:
                self.rows.num_tokens[request.row] = min(keep, int(self.rows.num_tokens[request.row]))
            else:
                request.token_ids = request.token_ids[:keep]
            self._end(request, FinishReason.STOP, now)
            return True
        ended = self.find(request_id)
        if ended is None or ended.finish_reason not in (FinishReason.LENGTH, FinishReason.STOP):
            return False
        ended.token_ids = ended.token_ids[: ended.num_prompt_tokens + num_output_tokens]
        ended.finish_reason = FinishReason.STOP
        self._note(FinishEvent, ended, now, reason=FinishReason.STOP.value, num_output_tokens=num_output_tokens)
        return True

    def _end(self, request: Request, reason: FinishReason, now: float) -> None:
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            self._vacate(request, now)
        else:
            self._waiting.remove(request)
        request.end_wait(now)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.finish_time = now
        del self._requests[request.request_id]
        self._finished.append(request)
        self._note(
            FinishEvent,
            request,
            now,
            reason=reason.value,
            num_output_tokens=len(request.token_ids) - request.num_prompt_tokens,
        )

    def _vacate(self, request: Request, now: float) -> None:
        """Take a running request's tokens out of its row and give the row and its blocks back."""
        row = request.row
        self.rows.store(row, request)
        block_ids = self.tables.release(row)
        request.row = -1
        self._note(FreeEvent, request, now, row=row, block_ids=tuple(block_ids))

    # ---- one step -------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan:
        """Decide the next step. The plan is empty when nothing can run."""
        self.step += 1
        self._preempted = []
        self._refresh_running_rows()
        self._grow_decoding(now)
        self._admit_waiting(now)
        self._refresh_running_rows()
        return self._plan(self._share_budget(now), now)

    def _grow_decoding(self, now: float) -> None:
        """A block for each decoding request whose last one is full, preempting from the end of the order."""
        rows = self._running_rows
        num_tokens = self.rows.num_tokens[rows]
        capacity = self.tables.num_blocks[rows] * self.tables.block_size
        for index in np.flatnonzero(num_tokens > capacity).tolist():
            if index >= len(self._running):
                return  # it and all behind it were preempted
            request = self._running[index]
            while self.allocator.num_free == 0 and request.status is RequestStatus.RUNNING:
                self._preempt(self._running[-1], request, now)
            if request.status is RequestStatus.RUNNING:
                self._grow(request, int(num_tokens[index]), now)

    def _grow(self, request: Request, num_tokens: int, now: float) -> None:
        first_index = int(self.tables.num_blocks[request.row])
        block_ids = self.tables.grow(request.row, num_tokens)
        self._note(AllocateEvent, request, now, row=request.row, first_index=first_index, block_ids=tuple(block_ids))

    def _preempt(self, victim: Request, beneficiary: Request, now: float) -> None:
        """Take the blocks of the last running request; it keeps its tokens and waits in its place."""
        assert victim is self._running[-1], "only the last in the order is preempted"
        self._running.pop()
        self._note(
            PreemptEvent,
            victim,
            now,
            row=victim.row,
            for_request=beneficiary.request_id,
            num_computed_tokens=int(self.rows.num_computed_tokens[victim.row]),
        )
        self._vacate(victim, now)
        victim.status = RequestStatus.WAITING
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self._preempted.append(victim.request_id)
        self._queue(victim, now)

    def _admit_waiting(self, now: float) -> None:
        """Let waiting requests in, strictly in order: none overtakes one that waits."""
        while self._waiting:
            request = self._waiting[0]
            needed = self.tables.blocks_for(len(request.token_ids) + 1)
            if not self._make_room(request, needed, now):
                self._record_wait(request, needed, now)
                return
            self._admit(request, now)

    def _make_room(self, request: Request, needed: int, now: float) -> bool:
        """Whether `needed` blocks and a row are free, after preempting those later in the order if that suffices."""
        if self.allocator.num_free < needed or self.tables.num_free_rows == 0:
            later = self._running[bisect_right(self._running, request.order, key=_order) :]
            reachable = self.allocator.num_free + sum(int(self.tables.num_blocks[other.row]) for other in later)
            if reachable < needed or self.tables.num_free_rows + len(later) == 0:
                return False
        while self.allocator.num_free < needed or self.tables.num_free_rows == 0:
            self._preempt(self._running[-1], request, now)
        return True

    def _record_wait(self, request: Request, needed: int, now: float) -> None:
        reason = "rows" if self.tables.num_free_rows == 0 else "blocks"
        self._wait(request, reason, now, needed=needed, free=self.allocator.num_free)

    def _admit(self, request: Request, now: float) -> None:
        """Give the first in the queue a row and blocks for all its tokens and the next one: no half-admitted prompt is
        stuck, and whoever enters behind it is not preempted for its first token."""
        num_tokens = len(request.token_ids)
        request.row = self.tables.acquire_row(num_tokens + 1)
        self._waiting.pop(0)
        request.end_wait(now)
        request.status = RequestStatus.RUNNING
        if request.first_scheduled_time is None:
            request.first_scheduled_time = now
        self.rows.load(request.row, request)
        insort(self._running, request, key=_order)
        block_ids = tuple(self.tables.block_ids(request.row))
        self._note(AdmitEvent, request, now, row=request.row, num_tokens=num_tokens)
        self._note(AllocateEvent, request, now, row=request.row, first_index=0, block_ids=block_ids)

    def _share_budget(self, now: float) -> Int32s:
        """Tokens of this step for each running request: one to each that needs one, then prompts by the budget rule."""
        rows = self._running_rows
        left = self.rows.num_tokens[rows] - self.rows.num_computed_tokens[rows]
        new_tokens: Int32s = np.minimum(left, 1)
        prefilling = np.flatnonzero(left > 1)
        budget = self.max_num_batched_tokens - (len(rows) - len(prefilling))
        shares = share_token_budget(left[prefilling].tolist(), budget)
        new_tokens[prefilling] = shares
        for index, share in zip(prefilling.tolist(), shares, strict=True):
            if share == 0:
                self._wait(self._running[index], "budget", now)
            else:
                self._running[index].end_wait(now)
        return new_tokens

    def _plan(self, new_tokens: Int32s, now: float) -> StepPlan:
        rows = self._running_rows
        left = self.rows.num_tokens[rows] - self.rows.num_computed_tokens[rows]
        order = np.concatenate([np.flatnonzero(new_tokens == 1), np.flatnonzero(new_tokens > 1)])
        rows, left, new_tokens = rows[order], left[order], new_tokens[order]
        starts = self.rows.num_computed_tokens[rows]
        requests = [self._running[index] for index in order.tolist()]
        decode_tokens = int(np.count_nonzero(left == 1))
        for index in np.flatnonzero(left > 1).tolist():
            self._note(
                ChunkEvent,
                requests[index],
                now,
                row=int(rows[index]),
                start=int(starts[index]),
                num_tokens=int(new_tokens[index]),
            )
        return StepPlan(
            step=self.step,
            requests=requests,
            rows=rows,
            starts=starts,
            num_new_tokens=new_tokens,
            num_samples=(new_tokens == left).astype(np.int32),
            num_decode=int(np.count_nonzero(new_tokens == 1)),
            table_updates=self.tables.drain_updates(),
            preempted=tuple(self._preempted),
            prefill_tokens=int(new_tokens.sum()) - decode_tokens,
            decode_tokens=decode_tokens,
        )

    def update(self, plan: StepPlan, result: StepResult, now: float) -> list[RequestOutput]:
        """Append what a step drew, end what has ended and free its blocks."""
        rows = plan.rows
        self.rows.num_computed_tokens[rows] += plan.num_new_tokens
        sampling = np.flatnonzero(plan.num_samples)
        sampled_rows = rows[sampling]
        assert len(result.token_ids) == len(sampling), "one token for each sampling request"
        # The last token of a request that reaches max_model_len is never fed back, so it has no slot; it has a column.
        self.rows.token_ids[sampled_rows, self.rows.num_tokens[sampled_rows]] = result.token_ids
        self.rows.num_tokens[sampled_rows] += 1
        totals = self.rows.num_tokens[sampled_rows].tolist()
        outputs = []
        for index, (position, token, total) in enumerate(
            zip(sampling.tolist(), result.token_ids.tolist(), totals, strict=True)
        ):
            request = plan.requests[position]
            output = RequestOutput(request.request_id, [token])
            if index in result.logprobs:
                output.logprobs = [result.logprobs[index]]
            self._advance(request, token, total, output, now)
            outputs.append(output)
        return outputs

    def _advance(self, request: Request, token: int, total: int, output: RequestOutput, now: float) -> None:
        if request.first_token_time is None:
            request.first_token_time = now
            assert request.first_scheduled_time is not None
            output.queued_seconds = request.first_scheduled_time - request.arrival_time
            output.prefill_seconds = now - request.first_scheduled_time
        if token in request.stop_ids:
            output.finish_reason = FinishReason.STOP.value
            output.stop_token_id = -1 if token in request.eos_ids else token
            self._end(request, FinishReason.STOP, now)
        elif total >= request.max_total_tokens:
            output.finish_reason = FinishReason.LENGTH.value
            self._end(request, FinishReason.LENGTH, now)

    def fail(self, requests: Sequence[Request], message: str, now: float) -> list[RequestOutput]:
        """A forward pass failed: every request of that step ends with an error, its blocks are freed."""
        outputs = []
        for request in requests:
            if request.status is not RequestStatus.FINISHED:
                self._end(request, FinishReason.ERROR, now)
                outputs.append(
                    RequestOutput(request.request_id, [], finish_reason=FinishReason.ERROR.value, error=message)
                )
        self.tables.repeat_updates()
        return outputs

    def _wait(self, request: Request, reason: str, now: float, *, needed: int = 0, free: int = 0) -> None:
        """Record that a request cannot go on. Being behind others in the queue is no event: arrivals tell of it."""
        if request.wait(reason, now, needed=needed, free=free):
            self.num_waits[reason] += 1
            if reason != "queue":
                self._note(WaitEvent, request, now, reason=reason, needed=needed, free=free)

    def _note(self, event_type: type[Event], request: Request, now: float, **numbers: Any) -> None:
        self.journal.write(event_type(step=self.step, time=now, request_id=request.request_id, **numbers))

    def _refresh_running_rows(self) -> None:
        self._running_rows = self.rows_in_use()

    def check_invariants(self) -> None:
        """Queues, rows, tables and allocator agree with one another."""
        self.tables.check_invariants()
        assert [request.order for request in self._waiting] == sorted(request.order for request in self._waiting)
        assert [request.order for request in self._running] == sorted(request.order for request in self._running)
        queued = [request.request_id for request in (*self._waiting, *self._running)]
        assert sorted(queued) == sorted(self._requests), "a live request must be in exactly one queue"
        assert all(request.status is RequestStatus.WAITING and request.row == -1 for request in self._waiting)
        assert all(request.status is RequestStatus.RUNNING for request in self._running)
        rows = [request.row for request in self._running]
        assert len(set(rows)) == len(rows)
        assert len(rows) + self.tables.num_free_rows == self.max_num_requests
        for request in self._running:
            computed = int(self.rows.num_computed_tokens[request.row])
            known = int(self.rows.num_tokens[request.row])
            held = int(self.tables.num_blocks[request.row])
            assert computed < known, f"{request.request_id} has nothing left to compute"
            assert computed <= held * self.tables.block_size, f"{request.request_id} computed past its blocks"
            assert held <= self.tables.blocks_for(known + 1), f"{request.request_id} holds more blocks than it needs"
        if not self._running:
            assert self.allocator.num_used == 0, "idle, but blocks are used"


def _order(request: Request) -> tuple[int, int]:
    return request.order
