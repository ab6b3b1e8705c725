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

import math
from collections.abc import Sequence

import numpy as np

from pageframe.runtime.block_allocator import OutOfBlocksError
from pageframe.runtime.journal import ArriveEvent, ChunkEvent, GrammarEvent
from pageframe.runtime.request import FinishReason, Request, RequestOutput, RequestStatus
from pageframe.runtime.scheduler_entry import SchedulerEntry
from pageframe.runtime.scheduler_results import SchedulerResults
from pageframe.runtime.scheduler_state import Int32s
from pageframe.runtime.step_plan import StepPlan
from pageframe.runtime.token_budget import chunk_cost, chunk_within, share_token_budget, step_budget


class Scheduler(SchedulerEntry, SchedulerResults):
    """The queues, the token budget, admission, preemption and abort.

    Made with the arguments of SchedulerState.
    """

    # ---- arrivals and endings -------------------------------------------------------------------------------------

    def add(self, choices: Sequence[Request], now: float) -> None:
        """Queue a request's choices, each of which fits alone (checked at the door). The first computes the prompt for
        all of them, which fork from it then."""
        self.journal.at(self.step, now)
        leader, *followers = choices
        self._queues.add(choices)
        self._next_deadline = min(self._next_deadline, leader.deadline)
        for request in choices:
            self.journal.note(
                ArriveEvent,
                request.request_id,
                arrived=request.arrival_time,
                num_prompt_tokens=request.num_prompt_tokens,
                max_total_tokens=request.max_total_tokens,
                tenant=request.tenant,
                priority=request.priority,
                seed=request.request_seed,
                leader="" if request is leader else leader.request_id,
            )
            if request.params.grammar is not None:
                self.journal.note(GrammarEvent, request.request_id, kind_of_grammar=request.params.grammar.kind)
        self._queue(leader, now)
        for follower in followers:
            self._wait(follower, "group", now)

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
        if self._queues.waiting:
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

    def _share_budget(self, now: float) -> tuple[int, Int32s]:
        """The step's budget, and its tokens for each running request: one to each that needs one, then prompts by the
        budget rule."""
        rows = self._running_rows
        left = self.rows.num_tokens[rows] - self.rows.num_computed_tokens[rows]
        new_tokens: Int32s = np.minimum(left, 1)
        prefilling = np.flatnonzero(left > 1)
        num_decoding = len(rows) - len(prefilling)
        budget = step_budget(num_decoding, self.max_num_batched_tokens, self.mixed_token_budget)
        if not len(prefilling):
            return budget, new_tokens
        shares = self._share_among_prompts(prefilling.tolist(), left[prefilling].tolist(), budget - num_decoding)
        new_tokens[prefilling] = shares
        for index, share in zip(prefilling.tolist(), shares, strict=True):
            if share == 0:
                self._wait(self._queues.running[index], "budget", now)
            else:
                self._queues.running[index].end_wait(now)
        return budget, new_tokens

    def _share_among_prompts(self, prefilling: list[int], left: list[int], budget: int) -> list[int]:
        """Tokens for each of these running requests, which have so many left; what is scored takes more of it."""
        if not self.rows.scored:
            return share_token_budget(left, budget)
        unscored = [self._num_unscored(index, count) for index, count in zip(prefilling, left, strict=True)]
        shares = share_token_budget(list(map(chunk_cost, left, unscored)), budget)
        return list(map(chunk_within, shares, unscored))

    def _num_unscored(self, index: int, left: int) -> int:
        """How many of the tokens that a running request has left come before the first whose logprob is wanted."""
        request = self._queues.running[index]
        if request.row not in self.rows.scored:
            return left
        return max(0, len(request.prompt_logprobs) - int(self.rows.num_computed_tokens[request.row]))

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
