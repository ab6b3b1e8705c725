"""The engine: schedule, run, update. Synchronous; no text, no threads, no sockets.

One `Engine.step()` is one iteration of the whole system; everything a server does is calls to it.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pageframe.runtime.admission import Door
from pageframe.runtime.batch import Batch
from pageframe.runtime.config import ResolvedConfig
from pageframe.runtime.errors import EngineDeadError
from pageframe.runtime.grammar import CompiledGrammar
from pageframe.runtime.grammar_service import GrammarService, no_compiler
from pageframe.runtime.journal import FinishEvent, Journal, StepEvent
from pageframe.runtime.philox import choice_seed
from pageframe.runtime.prefix_cache import make_salt
from pageframe.runtime.request import Request, RequestOutput, SamplingParams, TokenLogprobs, choice_ids
from pageframe.runtime.scheduler import Scheduler
from pageframe.runtime.step_plan import SamplingBatch, ScoredTokens, StepPlan, StepResult
from pageframe.runtime.token_masks import TokenMasks

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """The forward pass. What it returns is the sampler's business alone."""

    def forward(self, batch: Batch) -> Any:
        """Write K and V of the batch's tokens; return the hidden states of the wanted ones."""

    def synchronize(self) -> None:
        """Wait until the device has done what it was told. Raises where it no longer works."""


class TokenSampler(Protocol):
    """The choice of tokens."""

    def sample(self, hidden: Any, batch: SamplingBatch) -> StepResult:
        """One token for each wanted hidden state."""

    def score(self, hidden: Any, scored: ScoredTokens) -> dict[int, list[TokenLogprobs]]:
        """Logprobs of the prompt tokens that follow each hidden state, by position in the plan."""


@dataclass(slots=True, frozen=True)
class StepRecord:
    """One step as it was, for inspection.

    Args:
        started: seconds of the engine's clock.
        num_running, num_waiting, blocks, lookup_tokens, hit_tokens: as the step left them, see StepEvent.
        evicted: blocks whose contents were given up since the step before.
    """

    step: int
    started: float
    time_ms: float
    num_requests: int
    prefill_tokens: int
    decode_tokens: int
    token_budget: int
    preempted: tuple[str, ...]
    finished: tuple[str, ...]
    num_running: int
    num_waiting: int
    blocks: dict[str, int]
    evicted: int
    lookup_tokens: int
    hit_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.prefill_tokens + self.decode_tokens


class Engine:
    """A scheduler over a runner.

    Args:
        resolved: the frozen configuration of this run.
        runner, sampler: the forward pass, and the choice of tokens from what it returns.
        grammars: compiles the requests' grammars; without it those that bring one are refused.
        masks: makes the masks of rows that not every token may come in.
        seed: makes the seeds drawn for unseeded requests repeatable.
        clock: seconds; tests pass a virtual one.
        journal: where events go; one of the usual length by default.
    """

    def __init__(
        self,
        resolved: ResolvedConfig,
        runner: Runner,
        sampler: TokenSampler,
        *,
        grammars: GrammarService | None = None,
        masks: TokenMasks | None = None,
        seed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        journal: Journal | None = None,
        keep_steps: int = 4096,
    ) -> None:
        self.resolved = resolved
        self.journal = Journal() if journal is None else journal
        self.scheduler = Scheduler(
            num_blocks=resolved.num_blocks,
            block_size=resolved.block_size,
            max_num_requests=resolved.max_num_requests,
            max_num_batched_tokens=resolved.max_num_batched_tokens,
            mixed_token_budget=resolved.mixed_token_budget,
            max_model_len=resolved.max_model_len,
            journal=self.journal,
            prefix_cache=resolved.prefix_cache,
            host_slots=resolved.host_slots,
            copy_costs=resolved.copy_costs,
            window=resolved.window,
            slide_by=resolved.slide_by,
        )
        self.steps: deque[StepRecord] = deque(maxlen=keep_steps)
        self.runner = runner
        self.grammars = grammars or GrammarService(no_compiler)
        # Half of the threads: the forward pass, which runs meanwhile, has work for all of them.
        self._masks = masks or TokenMasks(
            resolved.max_num_requests, resolved.model.vocab_size, max(1, resolved.threads // 2)
        )
        self._sampler = sampler
        self._clock = clock
        self._arrivals = 0
        self._door = Door(resolved)
        self._evictions_told = 0
        self._finishes_told = 0
        self._seeds = random.Random(seed)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def now(self) -> float:
        """Seconds of the clock that all of a request's times are of."""
        return self._clock()

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        tenant: str = "",
        cache_salt: str = "",
        priority: int = 0,
        grammar: CompiledGrammar | None = None,
        arrival_time: float | None = None,
    ) -> None:
        """Queue a request, which must have no live choice. Its params.n choices are requests of their own from here on,
        under the ids of `choice_ids`.

        Args:
            cache_salt: narrows down, within the tenant, whose computed prefixes it shares.
            priority: lower is served first.
            grammar: params.grammar made ready by `grammars`; compiled here and now without it.
            arrival_time: when it came, if it had to wait before it could be added.

        Raises:
            InvalidRequestError: it can never be served as asked; nothing was queued.
            TooManyWaitError: so many grammars are being compiled that its own cannot be.
        """
        total = self._door.max_total_tokens(prompt_token_ids, params)
        if params.grammar is not None and grammar is None:
            grammar = self.grammars.compile(params.grammar)
        ignores_eos = params.ignore_eos and grammar is None
        eos_ids = frozenset() if ignores_eos else frozenset(self.resolved.model.eos_token_ids)
        request_seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        now = self._clock()
        arrival_time = now if arrival_time is None else arrival_time
        token_ids = np.array(prompt_token_ids, dtype=np.int32)
        choices = [
            Request(
                request_id=choice_id,
                token_ids=token_ids,
                params=params,
                tenant=tenant,
                salt=make_salt(tenant, cache_salt),
                priority=priority,
                arrival=self._arrivals + index,
                arrival_time=arrival_time,
                request_seed=request_seed,
                seed=choice_seed(request_seed, index),
                max_total_tokens=total,
                stop_ids=eos_ids | frozenset(params.stop_token_ids),
                eos_ids=eos_ids,
                wants_prompt_logprobs=params.prompt_logprobs is not None and len(token_ids) > 1,
                matcher=None if grammar is None else grammar.matcher(),
                deadline=math.inf if params.timeout_seconds is None else arrival_time + params.timeout_seconds,
            )
            for index, choice_id in enumerate(choice_ids(request_id, params.n))
        ]
        self._arrivals += params.n
        self.scheduler.add(choices, now)

    def abort(self, request_id: str) -> bool:
        """Nobody wants this choice any more; False where it has ended already."""
        return self.scheduler.abort(request_id, self._clock())

    def finish(self, request_id: str, num_output_tokens: int) -> bool:
        """A stop string ended its text that many tokens into the output; False where it is unknown."""
        return self.scheduler.finish(request_id, num_output_tokens, self._clock())

    def reset_prefix_cache(self) -> int:
        """Forget all computed prefixes; how many blocks could be found until now."""
        return self.scheduler.reset_prefix_cache(self._clock())

    def steps_since(self, step: int) -> list[StepRecord]:
        """The steps from number `step` on that are still known, oldest first. Costs no more than these."""
        newest = itertools.takewhile(lambda record: record.step >= step, reversed(self.steps))
        return list(newest)[::-1]

    def step(self) -> list[RequestOutput]:
        """One iteration. Returns what it gave each request that got something.

        Raises:
            EngineDeadError: the step failed, and the device no longer works, so that every later one would fail too.
        """
        started = self._clock()
        plan = self.scheduler.schedule(started)
        timed_out = self.scheduler.take_timed_out()
        if not plan.requests:
            return timed_out
        batch = Batch.build(plan, self.scheduler.rows, self.scheduler.tables)
        try:
            if batch.sampling.rules:
                self._masks.begin(batch.sampling)
            result = self._draw(self.runner.forward(batch), batch)
        except Exception as error:
            logger.exception("step %d failed; its %d requests end with an error", plan.step, len(plan.requests))
            outputs = self.scheduler.fail(plan, f"the forward pass failed: {error}", self._clock())
            self._check_device()
        else:
            outputs = self.scheduler.update(plan, result, self._clock())
        outputs += timed_out
        self._record(plan, outputs, started)
        return outputs

    def _check_device(self) -> None:
        try:
            self.runner.synchronize()
        except Exception as error:
            raise EngineDeadError(f"the device no longer works: {error}") from error

    def _draw(self, hidden: Any, batch: Batch) -> StepResult:
        """A step's tokens; and its prompt tokens' logprobs where they are wanted."""
        scored, sampling = batch.scored, batch.sampling
        if scored is None:
            return self._sampler.sample(hidden, sampling)
        result = self._sampler.sample(hidden[: len(sampling)], sampling)
        return dataclasses.replace(result, prompt_logprobs=self._sampler.score(hidden[len(sampling) :], scored))

    def _ended_since_last(self) -> tuple[str, ...]:
        """Requests that ended since this was asked last, by whatever."""
        events = self.journal.since(self._finishes_told)
        self._finishes_told = self.journal.written
        return tuple(dict.fromkeys(event.request_id for event in events if isinstance(event, FinishEvent)))

    def _record(self, plan: StepPlan, outputs: list[RequestOutput], started: float) -> None:
        """Keep what the step was, for inspection, and tell the journal."""
        scheduler, seconds = self.scheduler, self._clock() - started
        evictions = scheduler.blocks.num_evictions
        blocks = scheduler.allocator.counts()
        shared: dict[str, int] = {
            "num_requests": len(plan.requests),
            "prefill_tokens": plan.prefill_tokens,
            "decode_tokens": plan.decode_tokens,
            "token_budget": plan.token_budget,
            "num_running": scheduler.num_running,
            "num_waiting": scheduler.num_waiting,
            "evicted": evictions - self._evictions_told,
            "lookup_tokens": scheduler.num_lookup_tokens,
            "hit_tokens": scheduler.num_hit_tokens,
        }
        self._evictions_told = evictions
        self.journal.note(StepEvent, "", started=started, seconds=seconds, **shared, **blocks)
        self.steps.append(
            StepRecord(
                step=plan.step,
                started=started,
                time_ms=seconds * 1e3,
                preempted=plan.preempted,
                finished=self._ended_since_last(),
                blocks=blocks,
                **shared,
            )
        )
