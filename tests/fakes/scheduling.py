"""A scheduler alone, driven by hand: each step draws one and the same token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np

from pageframe.runtime.journal import Event, Journal
from pageframe.runtime.request import Request, RequestOutput, RequestStatus, SamplingParams
from pageframe.runtime.scheduler import Scheduler
from pageframe.runtime.step_plan import StepPlan, StepResult

TOKEN = 7

EventT = TypeVar("EventT", bound=Event)


def make_scheduler(
    *,
    num_blocks: int = 8,
    block_size: int = 4,
    max_num_requests: int = 4,
    max_num_batched_tokens: int = 8,
    max_model_len: int | None = None,
    mixed_token_budget: int | None = None,
) -> Scheduler:
    return Scheduler(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_requests=max_num_requests,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=num_blocks * block_size if max_model_len is None else max_model_len,
        journal=Journal(),
        mixed_token_budget=mixed_token_budget,
    )


def make_request(
    request_id: str,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    arrival: int,
    priority: int = 0,
    seed: int = 0,
    stop_ids: Iterable[int] = (),
) -> Request:
    """A request whose `max_tokens` is given; `arrival` must be a new number, larger than those before."""
    assert params.max_tokens is not None
    return Request(
        request_id=request_id,
        token_ids=np.array(prompt, dtype=np.int32),
        params=params,
        tenant="",
        priority=priority,
        arrival=arrival,
        arrival_time=float(arrival),
        request_seed=seed,
        seed=seed,
        max_total_tokens=len(prompt) + params.max_tokens,
        stop_ids=frozenset(stop_ids),
        eos_ids=frozenset(),
    )


def add_request(
    scheduler: Scheduler, request_id: str, prompt: int | Sequence[int], max_tokens: int, *, priority: int = 0
) -> Request:
    """Queue a request, its prompt given or that many tokens 1; arrivals are in the order of the calls."""
    arrival = sum(event.kind == "arrive" for event in scheduler.journal)
    request = make_request(
        request_id,
        [1] * prompt if isinstance(prompt, int) else prompt,
        SamplingParams(max_tokens=max_tokens),
        arrival=arrival,
        priority=priority,
    )
    scheduler.add([request], now=float(scheduler.step))
    scheduler.check_invariants()
    return request


def run_step(scheduler: Scheduler) -> tuple[StepPlan, list[RequestOutput]]:
    """Schedule, draw TOKEN for all that sample, update; invariants checked at each point."""
    plan = scheduler.schedule(now=float(scheduler.step + 1))
    scheduler.check_invariants()
    tokens = np.full(int(plan.num_samples.sum()), TOKEN, dtype=np.int32)
    outputs = scheduler.update(plan, StepResult(tokens, {}), now=float(scheduler.step)) if plan.requests else []
    scheduler.check_invariants()
    return plan, outputs


def run_until(scheduler: Scheduler, condition: Callable[[], object], limit: int) -> int:
    """Step until something has happened, within `limit` steps; how many it took."""
    for num_steps in range(1, limit + 1):
        run_step(scheduler)
        if condition():
            return num_steps
    raise AssertionError(f"it did not happen within {limit} steps")


def run_until_done(scheduler: Scheduler, request: Request, limit: int) -> int:
    """Step until `request` has finished, within `limit` steps; how many it took."""
    return run_until(scheduler, lambda: request.status is RequestStatus.FINISHED, limit)


def shares(plan: StepPlan) -> dict[str, int]:
    """Tokens of the step by request id."""
    return {
        request.request_id: count for request, count in zip(plan.requests, plan.num_new_tokens.tolist(), strict=True)
    }


def events(scheduler: Scheduler, kind: type[EventT]) -> list[EventT]:
    """The journal's events of one kind."""
    return [event for event in scheduler.journal if isinstance(event, kind)]
