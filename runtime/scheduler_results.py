"""Takes what a forward pass gave: tokens are appended, choices fork, full blocks are published, the ended leave."""

from __future__ import annotations

import contextlib

import numpy as np

from pageframe.runtime.block_allocator import OutOfBlocksError
from pageframe.runtime.journal import FirstTokenEvent, ForkEvent, SlideEvent
from pageframe.runtime.request import FinishReason, Request, RequestOutput, RequestStatus, TokenLogprobs
from pageframe.runtime.scheduler_state import SchedulerState
from pageframe.runtime.step_plan import NO_TOKEN, StepPlan, StepResult
from pageframe.runtime.token_rules import none_left


class SchedulerResults(SchedulerState):
    """What a step's result, or its failure, does to the requests."""

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

        if plan.is_decode:
            sampling = firsts = np.arange(len(rows))
            sampled_rows, num_drawn = rows, len(rows)
        else:
            sampling = np.flatnonzero(plan.num_samples)
            sampled_rows, ends = rows[sampling], np.cumsum(plan.num_samples[sampling])
            firsts, num_drawn = ends - plan.num_samples[sampling], int(plan.num_samples.sum())
        assert len(result.token_ids) == num_drawn, "num_samples tokens for each request"
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
            complaint, param = _complaint(request, token)
            if complaint:
                self._end(request, FinishReason.REFUSED, now, keep=request.context_start + length - 1)
                return RequestOutput(
                    request.request_id,
                    [],
                    finish_reason=FinishReason.REFUSED.value,
                    error=complaint,
                    param=param,
                )
        output = RequestOutput(request.request_id, [token])
        if logprobs is not None:
            output.logprobs = [logprobs]
        if request.first_token_time is None:
            request.first_token_time = now
            self.journal.note(FirstTokenEvent, request.request_id)
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
        request.context_start += self.slide_by
        self.journal.note(SlideEvent, request.request_id, row=row, context_start=request.context_start)
        self._queue(request, now)

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


def _complaint(request: Request, token: int) -> tuple[str, str]:
    """Why a request cannot go on with the token drawn for it, and the one field at fault or ""; twice "" where it can,
    and its matcher has taken the token."""
    matcher = request.matcher
    if token != NO_TOKEN and matcher is not None and matcher.accept(token):
        return "", ""
    if matcher is not None and matcher.error:
        return f"the text cannot follow its grammar any further: {matcher.error}", "grammar"
    return none_left(request)
