"""An engine over the chain-hash model with a virtual clock, checked after everything that is done to it.

Checked each time: the engine's own invariants; that the journal alone rebuilds queues and tables, in the strict
order; that every output continues its request's solo run. Free blocks are poisoned each time too.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from fakes.chain_hash import ChainHashModel, Solo, expected_logprobs
from fakes.engines import VirtualClock, tiny_config
from fakes.journal_replay import JournalReplay
from pageframe.runtime.config import ResolvedConfig
from pageframe.runtime.engine import Engine
from pageframe.runtime.errors import InvalidRequestError
from pageframe.runtime.journal import Journal
from pageframe.runtime.philox import choice_seed
from pageframe.runtime.request import RequestOutput, SamplingParams

# Forward passes are made to fail by the dozen, and each would log a traceback.
logging.getLogger("pageframe.runtime.engine").addFilter(lambda record: "InjectedFailure" not in str(record.exc_info))


@dataclass
class Expected:
    """A request as the test sees it: what it must give, and what it gave so far."""

    solo: Solo
    params: SamplingParams
    max_total_tokens: int
    order: tuple[int, int]
    token_ids: list[int] = field(default_factory=list)


class Simulation:
    """`live` and `ended` hold every accepted request by id; `counts` says what happened."""

    def __init__(self, resolved: ResolvedConfig | None = None) -> None:
        self.resolved = resolved or tiny_config()
        self.clock = VirtualClock()
        self.model = ChainHashModel(
            num_blocks=self.resolved.num_blocks,
            block_size=self.resolved.block_size,
            max_num_requests=self.resolved.max_num_requests,
            max_blocks=self.resolved.max_blocks,
        )
        self.engine = Engine(self.resolved, self.model, self.model, seed=0, clock=self.clock)
        # A short ring: it is read after every step, and its oldest events are passed over each time.
        self.engine.journal = self.engine.scheduler.journal = Journal(capacity=1024)
        self.replay = JournalReplay(self.resolved.block_size)
        self.live: dict[str, Expected] = {}
        self.ended: dict[str, Expected] = {}
        self.counts: Counter[str] = Counter()
        self._arrivals = 0

    # ---- what a test does -----------------------------------------------------------------------------------------

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> str | None:
        """Queue a request; its id, or None where the engine rightly refuses it."""
        params = params or SamplingParams(temperature=0)
        request_id = request_id or f"r{self._arrivals}"
        room = self.resolved.max_model_len - len(prompt)
        fits = len(prompt) > 0 and room > 0 and (params.max_tokens or 1) <= room and params.min_tokens <= room
        try:
            self.engine.add(request_id, prompt, params, priority=priority)
        except InvalidRequestError:
            assert not fits, f"{len(prompt)} tokens with {params} fit, but were refused"
            self.counts["rejections"] += 1
            return None
        assert fits, f"{len(prompt)} tokens with {params} do not fit, but were let in"
        total = len(prompt) + (room if params.max_tokens is None else params.max_tokens)
        found = self.engine.scheduler.find(request_id)
        assert found is not None
        if params.seed is not None:
            assert found.seed == choice_seed(params.seed, 0)
        solo = self.model.solo(prompt, params, max_total_tokens=total, seed=found.seed)
        self.live[request_id] = Expected(solo, params, total, (priority, self._arrivals))
        self._arrivals += 1
        self.check()
        return request_id

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

    def step(self, fail: str = "") -> list[RequestOutput]:
        """One step; with `fail` ("before" or "after" the cache is written) its forward pass raises."""
        self.model.fail_next = fail
        self.clock.advance(0.01)
        had_work = bool(self.live)
        num_forwards = self.model.num_forwards
        outputs = self.engine.step()
        assert self.model.num_forwards - num_forwards == had_work, "one forward pass a step where there is work"
        self.model.fail_next = ""
        if had_work:
            self._count_step()
            in_step = self.engine.steps[-1].num_requests
            assert len(outputs) <= in_step, "a request got an output without a token in the step"
            assert not fail or len(outputs) == in_step, "a failed step must end all of its requests"
        for output in outputs:
            self._take(output, failed=bool(fail))
        self.check()
        return outputs

    def steps_to_drain(self) -> int:
        """A bound on the steps until all are done, when no more come.

        The first in the order is admitted at once, since all others give way to it, is never preempted, and computes
        at least one of its tokens in each step; then the next is first.
        """
        return sum(expected.max_total_tokens for expected in self.live.values())

    def drain(self) -> None:
        """Step until all have finished; each must within the bound of those before it in the order, and its own."""
        bounds, total = {}, 0
        for request_id, expected in sorted(self.live.items(), key=lambda item: item[1].order):
            total += expected.max_total_tokens
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
        tables = scheduler.tables
        rebuilt = {row: ids for row, ids in self.replay.tables.items() if ids}
        actual = {row: tables.block_ids(row) for row, count in enumerate(tables.num_blocks.tolist()) if count}
        assert rebuilt == actual, "the journal does not rebuild the block tables"
        assert set(self.replay.running) | self.replay.waiting == set(self.live), "the journal lost a request"
        counts = scheduler.allocator.ref_counts()
        self.model.poison([block_id for block_id, count in enumerate(counts) if count == 0])

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
        assert 0 < record.prefill_tokens + record.decode_tokens <= self.resolved.max_num_batched_tokens
        self.counts["steps"] += 1
        self.counts["mixed_steps"] += bool(record.prefill_tokens and record.decode_tokens)
        self.counts["preemptions"] += len(record.preempted)
        self.counts["batched_steps"] += record.num_requests > 1

    def _take(self, output: RequestOutput, *, failed: bool) -> None:
        assert output.request_id in self.live, f"{output.request_id} got an output after its end"
        expected = self.live[output.request_id]
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
        assert bool(output.finish_reason) == (len(got) == len(solo.token_ids)), "ended too early or too late"
        if output.finish_reason:
            assert (output.finish_reason, output.stop_token_id) == (solo.finish_reason, solo.stop_token_id)
            self.counts[f"ended by {output.finish_reason}"] += 1
            self._end(output.request_id)

    def _end(self, request_id: str) -> None:
        self.ended[request_id] = self.live.pop(request_id)
