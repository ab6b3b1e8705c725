"""An engine over the chain-hash model with a virtual clock, checked after everything that is done to it.

Checked each time: the engine's own invariants; that the journal alone rebuilds queues, tables and the state of every
block, in the strict order; that every output continues its request's solo run. Free blocks and free host slots are
poisoned each time too.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from fakes.chain_hash import ChainHashModel, Solo, expected_logprobs
from fakes.engines import VirtualClock, tiny_config
from fakes.journal_replay import JournalReplay
from pageframe.runtime.block_allocator import OutOfBlocksError
from pageframe.runtime.config import ResolvedConfig
from pageframe.runtime.engine import Engine
from pageframe.runtime.errors import InvalidRequestError
from pageframe.runtime.journal import Event, Journal
from pageframe.runtime.philox import choice_seed
from pageframe.runtime.request import MAX_TOTAL_TOKENS, RequestOutput, SamplingParams, choice_ids

# Forward passes are made to fail by the dozen, and each would log a traceback.
logging.getLogger("pageframe.runtime.engine").addFilter(lambda record: "InjectedFailure" not in str(record.exc_info))


#: A step of a tiny configuration makes some tens of decisions.
MAX_EVENTS_IN_A_STEP = 10_000


class BoundedJournal(Journal):
    """Notices a step that goes on deciding for ever."""

    _events_in_step = 0

    def at(self, step: int, time: float) -> None:
        if step != self.step:
            self._events_in_step = 0
        super().at(step, time)

    def write(self, event: Event) -> None:
        self._events_in_step += 1
        assert self._events_in_step <= MAX_EVENTS_IN_A_STEP, "a step makes no end of decisions"
        super().write(event)


@dataclass
class Expected:
    """A choice as the test sees it: what it must give, and what it gave so far."""

    prompt: Sequence[int]
    solo: Solo
    params: SamplingParams
    max_steps: int
    order: tuple[int, int]
    reads: bool
    token_ids: list[int] = field(default_factory=list)
    unread: list[RequestOutput] = field(default_factory=list)


class Simulation:
    """`live` and `ended` hold every accepted choice by id; `counts` says what happened.

    Args:
        fail_allocation: the number of the allocation, from 0, that fails though there are blocks; None for none.
    """

    def __init__(self, resolved: ResolvedConfig | None = None, *, fail_allocation: int | None = None) -> None:
        self.resolved = resolved or tiny_config()
        self.clock = VirtualClock()
        self.model = ChainHashModel(
            num_blocks=self.resolved.num_blocks,
            block_size=self.resolved.block_size,
            max_num_requests=self.resolved.max_num_requests,
            max_blocks=self.resolved.max_blocks,
            host_slots=self.resolved.host_slots,
            window=self.resolved.window,
        )
        # A short ring: it is read after every step, and its oldest events are passed over each time.
        self.engine = Engine(
            self.resolved, self.model, self.model, seed=0, clock=self.clock, journal=BoundedJournal(capacity=1024)
        )
        self.replay = JournalReplay(
            self.resolved.block_size, lenient=self.resolved.prefix_cache or fail_allocation is not None
        )
        self.live: dict[str, Expected] = {}
        self.ended: dict[str, Expected] = {}
        self.counts: Counter[str] = Counter()
        self._arrivals = 0
        if fail_allocation is not None:
            self._fail_allocation(fail_allocation)

    def _fail_allocation(self, number: int) -> None:
        allocator = self.engine.scheduler.allocator
        allocate = allocator.allocate

        def failing(count: int) -> list[int]:
            self.counts["allocations"] += 1
            if self.counts["allocations"] == number + 1:
                raise OutOfBlocksError(count, 0)
            return allocate(count)

        allocator.allocate = failing  # type: ignore[method-assign]

    # ---- what a test does -----------------------------------------------------------------------------------------

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        tenant: str = "",
        cache_salt: str = "",
        priority: int = 0,
        reads: bool = True,
    ) -> str | None:
        """Queue a request; its id, or None where the engine rightly refuses it. A client that does not read gets its
        outputs all at the end: the engine must not care."""
        params = params or SamplingParams(temperature=0)
        request_id = request_id or f"r{self._arrivals}"
        fits = self._fits(len(prompt), params)
        try:
            self.engine.add(request_id, prompt, params, tenant=tenant, cache_salt=cache_salt, priority=priority)
        except InvalidRequestError:
            assert not fits, f"{len(prompt)} tokens with {params} fit, but were refused"
            self.counts["rejections"] += 1
            return None
        assert fits, f"{len(prompt)} tokens with {params} do not fit, but were let in"
        room = self.resolved.max_model_len - len(prompt)
        total = len(prompt) + (room if params.max_tokens is None else params.max_tokens)
        for index, choice_id in enumerate(choice_ids(request_id, params.n)):
            found = self.engine.scheduler.find(choice_id)
            assert found is not None
            if params.seed is not None:
                assert found.seed == choice_seed(params.seed, index)
            solo = self.model.solo(
                prompt,
                params,
                max_total_tokens=total,
                seed=found.seed,
                max_model_len=self.resolved.max_model_len,
                slide_by=self.resolved.slide_by,
            )
            self.replay.salts[choice_id] = (tenant, cache_salt)
            order = (priority, self._arrivals)
            self.live[choice_id] = Expected(prompt, solo, params, self._max_steps(total), order, reads)
            self._arrivals += 1
        self.counts["forkable"] += params.n > 1
        self.check()
        return request_id

    def _fits(self, num_prompt_tokens: int, params: SamplingParams) -> bool:
        room = self.resolved.max_model_len - num_prompt_tokens
        most = room if self.resolved.slide_by is None else MAX_TOTAL_TOKENS - num_prompt_tokens
        if num_prompt_tokens == 0 or room <= 0 or params.n > self.resolved.max_num_requests:
            return False
        return params.min_tokens <= room if params.max_tokens is None else params.max_tokens <= most

    def _max_steps(self, max_total_tokens: int) -> int:
        """Steps in which a request that is never held up is done: each computes one of its tokens at least, and after a
        slide its context is computed again."""
        beyond = max(0, max_total_tokens - self.resolved.max_model_len)
        num_slides = -(-beyond // self.resolved.slide_by) if self.resolved.slide_by else 0
        return max_total_tokens + num_slides * self.resolved.max_model_len

    def abort(self, request_id: str) -> None:
        assert self.engine.abort(request_id) == (request_id in self.live), f"abort of {request_id}"
        if request_id in self.live:
            self.counts["aborts"] += 1
            self._end(request_id)
        self.check()

    def finish(self, request_id: str, num_output_tokens: int) -> None:
        """A stop string was seen that many tokens into the output."""
        live = request_id in self.live
        known = self.engine.finish(request_id, num_output_tokens)
        if live:
            assert known, f"{request_id} is live, but finish did not know it"
            self.counts["finishes"] += 1
            self._end(request_id)
        if known:
            request = self.engine.scheduler.find(request_id)
            assert request is not None
            assert request.finish_reason == "stop"
            kept = self.ended[request_id].token_ids
            del kept[num_output_tokens:]
            output = request.token_ids[request.num_prompt_tokens :].tolist()
            assert output == kept, f"the record of {request_id}, which has ended, is wrong"
        self.check()

    def reset_prefix_cache(self) -> None:
        cached = self.engine.scheduler.allocator.num_cached
        assert self.engine.reset_prefix_cache() >= cached
        assert self.engine.scheduler.allocator.num_cached == 0
        self.counts["resets"] += 1
        self.check()

    def step(self, fail: str = "") -> list[RequestOutput]:
        """One step; with `fail` its forward pass raises, see ChainHashModel."""
        self.model.fail_next = fail
        self.clock.advance(0.01)
        had_work = bool(self.live)
        num_forwards, num_failures = self.model.num_forwards, self.model.num_failures
        outputs = self.engine.step()
        failed = self.model.num_failures > num_failures
        num_forwards = self.model.num_forwards - num_forwards
        idle_for_a_fault = not num_forwards and self.counts["allocations"] > 0
        assert num_forwards == had_work or idle_for_a_fault, "one forward pass a step where there is work"
        self.model.fail_next = ""
        if num_forwards:
            self._count_step()
            ends_all = len(outputs) >= self.engine.steps[-1].num_requests
            assert not failed or ends_all, "a failed step must end its requests"
        for output in outputs:
            self._take(output, failed=failed)
        self.check()
        return outputs

    def steps_to_drain(self) -> int:
        """A bound on the steps until all are done, when no more come.

        The first in the order is admitted at once, since all others give way to it, is never preempted, and computes
        at least one of its tokens in each step; then the next is first.
        """
        return sum(expected.max_steps for expected in self.live.values()) + bool(self.counts["allocations"])

    def drain(self) -> None:
        """Step until all have finished; each must within the bound of those before it in the order, and its own."""
        bounds, total = {}, int(bool(self.counts["allocations"]))
        for request_id, expected in sorted(self.live.items(), key=lambda item: item[1].order):
            total += expected.max_steps
            bounds[request_id] = total
        for num_steps in range(1, self.steps_to_drain() + 1):
            if not self.live:
                break
            self.step()
            late = [request_id for request_id in self.live if num_steps >= bounds[request_id]]
            assert not late, f"{late} did not finish within their bounds of {bounds}"
        self.check_idle()

    # ---- what is checked ------------------------------------------------------------------------------------------

    def check(self) -> None:
        scheduler = self.engine.scheduler
        scheduler.check_invariants()
        self.replay.catch_up(self.engine.journal)
        tables, allocator = scheduler.tables, scheduler.allocator
        actual = {request.row: tables.entries(request.row) for request in scheduler.live_requests() if request.row >= 0}
        assert self.replay.tables == actual, "the journal does not rebuild the block tables"
        known = {*self.replay.running, *self.replay.waiting, *self.replay.following}
        assert known == set(self.live), "the journal lost a request"
        states = [allocator.state(block_id) for block_id in range(allocator.num_blocks)]
        rebuilt = [self.replay.state(block_id) for block_id in range(allocator.num_blocks)]
        assert rebuilt == states, "the journal does not rebuild the blocks' states"
        to_be_read = {copy.src for copy in scheduler.blocks.pending_copies}
        free = {block_id for block_id, state in enumerate(states) if state == "free"}
        self.model.poison(sorted(free - to_be_read))
        prefix_cache, host_tier = scheduler.blocks.prefix_cache, scheduler.blocks.host_tier
        if prefix_cache is not None:
            # A window's blocks are lost head first, so whole chains may be remembered for what hangs from them.
            longest = self.resolved.max_blocks * (allocator.num_blocks + self.resolved.host_slots)
            assert prefix_cache.num_evicted <= allocator.num_blocks + longest, "evicted entries pile up"
        if host_tier is not None:
            owned = {slot for slot, _ in host_tier.items()}
            self.model.poison_host([slot for slot in range(host_tier.num_slots) if slot not in owned])

    def check_idle(self) -> None:
        assert not self.live, f"{sorted(self.live)} are still live"
        assert not self.engine.has_work
        scheduler = self.engine.scheduler
        assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
        assert scheduler.allocator.num_used == 0
        assert not self.replay.tables

    def _count_step(self) -> None:
        record = self.engine.steps[-1]
        assert record.step == self.engine.scheduler.step, "a step with work left no record"
        assert 0 < record.prefill_tokens + record.decode_tokens <= record.token_budget
        assert record.token_budget <= self.resolved.max_num_batched_tokens
        self.counts["steps"] += 1
        self.counts["mixed_steps"] += bool(record.prefill_tokens and record.decode_tokens)
        self.counts["preemptions"] += len(record.preempted)
        self.counts["batched_steps"] += record.num_requests > 1

    def _take(self, output: RequestOutput, *, failed: bool) -> None:
        assert output.request_id in self.live, f"{output.request_id} got an output after its end"
        expected = self.live[output.request_id]
        if not expected.reads:
            expected.unread.append(output)
            if not output.finish_reason:
                return
            expected.reads = True
            self.counts["never read"] += 1
            for unread in expected.unread:
                self._take(unread, failed=failed)
            return
        if output.finish_reason == "error":
            assert failed, f"a forward pass failed by itself: {output.error}"
            assert output.token_ids == []
            self.counts["errors"] += 1
            self._end(output.request_id)
            return
        expected.token_ids += output.token_ids
        got, solo = expected.token_ids, expected.solo
        assert got == solo.token_ids[: len(got)], f"{output.request_id} differs from its solo run"
        if expected.params.logprobs is not None:
            assert output.logprobs == [
                expected_logprobs(token, expected.params.logprobs) for token in output.token_ids
            ], f"{output.request_id} got another's logprobs"
        self._check_prompt_logprobs(expected, output)
        assert bool(output.finish_reason) == (len(got) == len(solo.token_ids)), "ended too early or too late"
        if output.finish_reason:
            assert (output.finish_reason, output.stop_token_id) == (solo.finish_reason, solo.stop_token_id)
            self.counts[f"ended by {output.finish_reason}"] += 1
            self._end(output.request_id)

    def _check_prompt_logprobs(self, expected: Expected, output: RequestOutput) -> None:
        """On the first output of the choice that computed the prompt, and never else."""
        if output.prompt_logprobs:
            count = expected.params.prompt_logprobs
            assert count is not None, f"{output.request_id} did not ask for its prompt's logprobs"
            assert len(expected.token_ids) == len(output.token_ids), "they come with the first token"
            assert output.prompt_logprobs == self.model.solo_scores(expected.prompt, count)
            self.counts["scored prompts"] += 1

    def _end(self, request_id: str) -> None:
        self.ended[request_id] = self.live.pop(request_id)
