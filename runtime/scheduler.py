"""Decides, step by step, which request computes which tokens and who holds which blocks.

Deterministic: (settings, ordered inputs, `now`, results) give the decisions. It never reads a clock or a random
source, and knows nothing of tensors, text or HTTP.

There are no prefill and decode phases. Each request has `num_computed_tokens`, which catches up with `num_tokens`;
prompt chunks, decoding and recomputation after preemption are that one thing:

    0          num_computed_tokens      num_tokens       max_total_tokens
    |-- K/V in the cache --|-- to be computed --|-- may still come --|

What a prefix lookup finds is a head start in it, and a preempted request continues by the same lookup.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pageframe.runtime.block_allocator import OutOfBlocksError
from pageframe.runtime.block_copy import FREE_COPIES, CopyCosts
from pageframe.runtime.block_manager import BlockManager
from pageframe.runtime.journal import (
    ArriveEvent,
    ChunkEvent,
    FinishEvent,
    ForkEvent,
    GrammarEvent,
    Journal,
    PreemptEvent,
    SlideEvent,
    WaitEvent,
)
from pageframe.runtime.prefix_cache import Lookup
from pageframe.runtime.request import FinishReason, Request, RequestOutput, RequestStatus, TokenLogprobs
from pageframe.runtime.request_queues import RequestQueues
from pageframe.runtime.rows import RequestRows
from pageframe.runtime.step_plan import NO_TOKEN, StepPlan, StepResult
from pageframe.runtime.token_budget import share_token_budget, step_budget

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Blocked:
    """The first in the queue as it was last looked up: it needed `needed` blocks and lacked `missing` of them."""

    request: Request
    needed: int
    missing: int
    available: int
    index_changes: int


class Scheduler:
    """The queues, the token budget, admission, preemption and abort. One writer of every request's state.

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
        self._blocked: _Blocked | None = None
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

    def find(self, request_id: str) -> Request | None:
        """A live or recently finished request."""
        return self._queues.find(request_id)

    # ---- arrivals and endings -------------------------------------------------------------------------------------

    def add(self, choices: Sequence[Request], now: float) -> None:
        """Queue a request's choices, each of which fits alone (checked at the door). The first computes the prompt for
        all of them, which fork from it then."""
        self.journal.at(self.step, now)
        leader, *followers = choices
        self._queues.add(choices)
        self._next_deadline = min(self._next_deadline, leader.deadline)
        self._queue(leader, now)
        for follower in followers:
            self._wait(follower, "group", now)
        for request in choices:
            self.journal.note(
                ArriveEvent,
                request.request_id,
                num_prompt_tokens=request.num_prompt_tokens,
                max_total_tokens=request.max_total_tokens,
                tenant=request.tenant,
                priority=request.priority,
                seed=request.request_seed,
                leader="" if request is leader else leader.request_id,
            )
            if request.params.grammar is not None:
                self.journal.note(GrammarEvent, request.request_id, kind_of_grammar=request.params.grammar.kind)

    def _queue(self, request: Request, now: float) -> None:
        """Put a request in its place among those that wait."""
        self._queues.wait(request)
        self._wait(request, "queue", now)
        waiting = self._queues.waiting
        if waiting[0] is request and len(waiting) > 1:
            self._wait(waiting[1], "queue", now)  # whatever it waited for, it is behind another now

    def abort(self, request_id: str, now: float) -> bool:
        """End a live request because nobody wants it any more; False where it has ended already."""
        self.journal.at(self.step, now)
        request = self._queues.get(request_id)
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
        self.journal.at(self.step, now)
        request = self._queues.get(request_id)
        if request is not None:
            self._end(request, FinishReason.STOP, now, keep=request.num_prompt_tokens + num_output_tokens)
            return True
        ended = self.find(request_id)
        if ended is None or ended.finish_reason not in (FinishReason.LENGTH, FinishReason.STOP):
            return False
        ended.truncate(ended.num_prompt_tokens + num_output_tokens)
        ended.finish_reason = FinishReason.STOP
        self._note_finish(ended)
        return True

    def reset_prefix_cache(self, now: float) -> int:
        """Forget everything that was computed; the number of blocks that could be found until now."""
        self.journal.at(self.step, now)
        return self.blocks.reset_prefix_cache()

    def _end(self, request: Request, reason: FinishReason, now: float, keep: int | None = None) -> None:
        """End a live request, of whose tokens `keep` remain (None: all)."""
        self._queues.leave(request)
        self._vacate(request)
        if request.followers and reason is not FinishReason.ERROR:
            self._queue(self._queues.hand_over(request), now)
        if keep is not None:
            request.truncate(keep)
        request.end_wait(now)
        request.finish_reason = reason
        request.finish_time = now
        self._queues.end(request)
        self._note_finish(request)

    def _note_finish(self, request: Request) -> None:
        assert request.finish_reason is not None
        self.journal.note(
            FinishEvent,
            request.request_id,
            reason=request.finish_reason.value,
            num_output_tokens=len(request.token_ids) - request.num_prompt_tokens,
        )

    def _vacate(self, request: Request) -> None:
        """Take a request's tokens out of its row, if it has one, and give the row and its blocks back."""
        if request.row >= 0:
            self.rows.store(request.row, request)
            self.blocks.release(request)
            request.row = -1

    # ---- one step -------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan:
        """Decide the next step. The plan is empty when nothing can run."""
        self.step += 1
        self.journal.at(self.step, now)
        self._preempted = []
        if now >= self._next_deadline:
            self._end_late(now)
        self._refresh_running_rows()
        self._grow_decoding(now)
        self._admit_waiting(now)
        self._refresh_running_rows()
        token_budget, new_tokens = self._share_budget(now)
        return self._plan(token_budget, new_tokens)

    def _end_late(self, now: float) -> None:
        """End the requests whose deadline has come."""
        late = [request for request in self._queues.live() if request.deadline <= now]
        # Those who follow come last among the live ones; ended first, they need not lead in their leader's place.
        for request in reversed(late):
            self._end(request, FinishReason.TIMEOUT, now)
            self._timed_out.append(RequestOutput(request.request_id, [], finish_reason=FinishReason.TIMEOUT.value))
        self._next_deadline = min((request.deadline for request in self._queues.live()), default=math.inf)

    def take_timed_out(self) -> list[RequestOutput]:
        """The last outputs of those that the latest step ended at their deadline."""
        timed_out, self._timed_out = self._timed_out, []
        return timed_out

    def _grow_decoding(self, now: float) -> None:
        """A block for each decoding request whose last one is full, preempting from the end of the order."""
        rows = self._running_rows
        num_tokens = self.rows.num_tokens[rows]
        capacity = self.tables.num_blocks[rows] * self.tables.block_size
        for index in np.flatnonzero(num_tokens > capacity).tolist():
            if index >= len(self._queues.running):
                return  # it and all behind it were preempted
            request = self._queues.running[index]
            while request.status is RequestStatus.RUNNING:
                try:
                    self.blocks.grow(request, int(num_tokens[index]))
                    break
                except OutOfBlocksError:
                    self._preempt_last(request, now)

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

    def _run(self, request: Request, num_computed_tokens: int, now: float) -> None:
        """It has its row and its blocks: it runs from now on."""
        request.end_wait(now)
        self.rows.load(request.row, request, num_computed_tokens)
        self._queues.run(request)

    def _share_budget(self, now: float) -> tuple[int, Int32s]:
        """The step's budget, and its tokens for each running request: one to each that needs one, then prompts by the
        budget rule."""
        rows = self._running_rows
        left = self.rows.num_tokens[rows] - self.rows.num_computed_tokens[rows]
        new_tokens: Int32s = np.minimum(left, 1)
        prefilling = np.flatnonzero(left > 1)
        num_decoding = len(rows) - len(prefilling)
        budget = step_budget(num_decoding, self.max_num_batched_tokens, self.mixed_token_budget)
        shares = share_token_budget(left[prefilling].tolist(), budget - num_decoding)
        new_tokens[prefilling] = shares
        for index, share in zip(prefilling.tolist(), shares, strict=True):
            if share == 0:
                self._wait(self._queues.running[index], "budget", now)
            else:
                self._queues.running[index].end_wait(now)
        return budget, new_tokens

    def _plan(self, token_budget: int, new_tokens: Int32s) -> StepPlan:
        plan = StepPlan.build(
            self.step,
            self._queues.running,
            self._running_rows,
            new_tokens,
            self.rows,
            token_budget=token_budget,
            table_updates=self.tables.drain_updates(),
            # Without a forward pass they wait for the next: nothing overwrites what they read before.
            copies=self.blocks.take_copies() if self._queues.running else (),
            preempted=tuple(self._preempted),
        )
        for index in np.flatnonzero(plan.is_prefill).tolist():
            self.journal.note(
                ChunkEvent,
                plan.requests[index].request_id,
                row=int(plan.rows[index]),
                start=int(plan.starts[index]),
                num_tokens=int(plan.num_new_tokens[index]),
            )
        return plan

    # ---- after the forward pass -----------------------------------------------------------------------------------

    def update(self, plan: StepPlan, result: StepResult, now: float) -> list[RequestOutput]:
        """Append what a step drew, fork, publish full blocks, end what has ended and free its blocks."""
        self.journal.at(self.step, now)
        rows = plan.rows
        self.rows.num_computed_tokens[rows] += plan.num_new_tokens
        num_computed = self.rows.num_computed_tokens[rows]
        self.blocks.copies_made()
        self.blocks.publish(plan.requests, rows, num_computed, self.rows.token_ids)
        self.blocks.release_behind_window(plan.requests, rows, num_computed)
        for position, logprobs in result.prompt_logprobs.items():
            self._take_prompt_logprobs(plan.requests[position], logprobs)

        sampling = np.flatnonzero(plan.num_samples)
        sampled_rows, num_samples = rows[sampling], plan.num_samples[sampling]
        assert len(result.token_ids) == num_samples.sum(), "num_samples tokens for each request"
        firsts = np.cumsum(num_samples) - num_samples
        # The last token of a request that reaches max_model_len is never fed back, so it has no slot; it has a column.
        self.rows.token_ids[sampled_rows, self.rows.num_tokens[sampled_rows]] = result.token_ids[firsts]
        self.rows.num_tokens[sampled_rows] += 1
        token_ids = result.token_ids.tolist()
        outputs: list[RequestOutput] = []
        for position, first in zip(sampling.tolist(), firsts.tolist(), strict=True):
            request = plan.requests[position]
            followers = self._queues.release_followers(request) if request.followers else []
            for index, follower in enumerate(followers, first + 1):
                outputs.append(self._fork(follower, request, token_ids[index], result.logprobs.get(index), now))
            outputs.append(self._take(request, token_ids[first], result.logprobs.get(first), now))
        return outputs

    def _take_prompt_logprobs(self, request: Request, logprobs: list[TokenLogprobs]) -> None:
        request.prompt_logprobs += logprobs
        if len(request.prompt_logprobs) == request.num_prompt_tokens - 1:
            request.wants_prompt_logprobs = False  # from now on it may find its prompt computed
            self.rows.scored.discard(request.row)

    def _fork(
        self, follower: Request, leader: Request, token: int, logprobs: TokenLogprobs | None, now: float
    ) -> RequestOutput:
        """The leader has computed the prompt: a follower takes its own first token and goes on by itself."""
        follower.first_scheduled_time = leader.first_scheduled_time
        follower.num_cached_tokens = leader.num_cached_tokens
        follower.miss_reason, follower.evicted_step = leader.miss_reason, leader.evicted_step
        follower.wants_prompt_logprobs = False
        follower.token_ids = np.append(follower.token_ids, np.int32(token))
        output = self._take(follower, token, logprobs, now)
        if follower.status is RequestStatus.FINISHED:
            return output
        num_computed = int(self.rows.num_computed_tokens[leader.row])
        if self.tables.num_free_rows > 0:
            with contextlib.suppress(OutOfBlocksError):  # then it is as if there were no row
                follower.row = self.blocks.fork(follower, leader, num_computed)
        if follower.row >= 0:
            self._run(follower, num_computed, now)
            return output
        # It finds the prompt's blocks again when it enters, and computes the rest.
        self.journal.note(ForkEvent, follower.request_id, row=-1, leader=leader.request_id, num_tokens=num_computed)
        self._queue(follower, now)
        return output

    def _take(self, request: Request, token: int, logprobs: TokenLogprobs | None, now: float) -> RequestOutput:
        """The output that tells of a request's new token, which may end the request or make its context slide."""
        running = request.status is RequestStatus.RUNNING
        length = int(self.rows.num_tokens[request.row]) if running else len(request.context)
        matcher = request.matcher
        if matcher is not None or token == NO_TOKEN:
            complaint = _complaint(request, token)
            if complaint:
                self._end(request, FinishReason.ERROR, now, keep=request.context_start + length - 1)
                return RequestOutput(request.request_id, [], finish_reason=FinishReason.ERROR.value, error=complaint)
        output = RequestOutput(request.request_id, [token])
        if logprobs is not None:
            output.logprobs = [logprobs]
        if request.first_token_time is None:
            request.first_token_time = now
            assert request.first_scheduled_time is not None
            output.num_cached_tokens = request.num_cached_tokens
            output.queued_seconds = request.first_scheduled_time - request.arrival_time
            output.prefill_seconds = now - request.first_scheduled_time
            if request.prompt_logprobs:
                output.prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, []
        if token in request.stop_ids:
            output.finish_reason = FinishReason.STOP.value
            output.stop_token_id = -1 if token in request.eos_ids else token
            self._end(request, FinishReason.STOP, now)
        elif request.context_start + length >= request.max_total_tokens:
            output.finish_reason = FinishReason.LENGTH.value
            self._end(request, FinishReason.LENGTH, now)
        elif length > self.max_model_len:
            self._slide(request, now)
        elif matcher is not None and matcher.must_stop and request.params.logprobs is None:
            output.token_ids.append(self._append_end(request))
            output.finish_reason = FinishReason.STOP.value
            self._end(request, FinishReason.STOP, now)
        return output

    def _append_end(self, request: Request) -> int:
        """Its grammar's text is whole: the end-of-text token that alone can follow needs no forward pass, unless its
        logprob is wanted. Returns it."""
        token = min(request.eos_ids)
        if request.status is RequestStatus.RUNNING:
            self.rows.token_ids[request.row, self.rows.num_tokens[request.row]] = token
            self.rows.num_tokens[request.row] += 1
        else:
            request.token_ids = np.append(request.token_ids, np.int32(token))
        return token

    def _slide(self, request: Request, now: float) -> None:
        """Its context is full: a later part of it becomes a new context, which enters like any other."""
        assert self.slide_by is not None, "a context grew past its end"
        row = request.row
        self._queues.leave(request)
        self._vacate(request)
        self._queue(request, now)
        request.context_start += self.slide_by
        self.journal.note(SlideEvent, request.request_id, row=row, context_start=request.context_start)

    def fail(self, plan: StepPlan, message: str, now: float) -> list[RequestOutput]:
        """A forward pass failed: every request of that step ends with an error, its blocks are freed and forgotten. So
        does every one that holds a block which the step was to copy."""
        self.journal.at(self.step, now)
        holders = self.blocks.holders(plan.copies)
        failed = [*plan.requests, *(other for other in self._queues.running if other.row in holders)]
        self.blocks.distrust(plan.copies, {request.row for request in failed if request.row >= 0})
        self.blocks.copies_made()
        outputs = []
        for request in [choice for leader in failed for choice in (leader, *leader.followers)]:
            if request.status is not RequestStatus.FINISHED:
                self._end(request, FinishReason.ERROR, now)
                outputs.append(
                    RequestOutput(request.request_id, [], finish_reason=FinishReason.ERROR.value, error=message)
                )
        return outputs

    def _wait(self, request: Request, reason: str, now: float, *, needed: int = 0, free: int = 0) -> None:
        """Record that a request cannot go on. Being behind others in the queue is no event: arrivals tell of it."""
        if request.wait(reason, now, needed=needed, free=free):
            self.num_waits[reason] += 1
            if reason not in ("queue", "group"):
                self.journal.note(WaitEvent, request.request_id, reason=reason, needed=needed, free=free)

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


def _complaint(request: Request, token: int) -> str:
    """Why a request cannot go on with the token drawn for it; "" where it can, and its matcher has taken it."""
    matcher = request.matcher
    if token != NO_TOKEN and matcher is not None and matcher.accept(token):
        return ""
    if matcher is not None and matcher.error:
        return f"the text cannot follow its grammar any further: {matcher.error}"
    return (
        "no token may come next: that is what its grammar, allowed_token_ids, bad_words and min_tokens leave together"
    )
