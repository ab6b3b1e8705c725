"""The order of service, chunks, admission, hits, choices, slides and endings, by hand and with known values.

The scheduler runs alone here; each step draws the same token for whoever samples.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations, permutations
from typing import Any

import numpy as np
import pytest
from fakes.scheduling import (
    TOKEN,
    add_request,
    events,
    make_request,
    make_scheduler,
    run_step,
    run_until,
    run_until_done,
    shares,
)

from pageframe.runtime.block_copy import CopyKind
from pageframe.runtime.journal import (
    AdmitEvent,
    AllocateEvent,
    ArriveEvent,
    ChunkEvent,
    FinishEvent,
    ForkEvent,
    Journal,
    MissEvent,
    PublishEvent,
    SlideEvent,
)
from pageframe.runtime.request import FinishReason, Request, RequestStatus, SamplingParams, choice_ids
from pageframe.runtime.scheduler import Scheduler
from pageframe.runtime.step_plan import StepResult

# ---- chunks and mixed steps ---------------------------------------------------------------------------------------


def test_a_prompt_is_computed_in_chunks_and_samples_after_the_last() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    request = add_request(scheduler, "a", 20, max_tokens=2)
    seen = []
    for _ in range(4):
        plan, outputs = run_step(scheduler)
        seen.append((plan.starts.tolist(), plan.num_new_tokens.tolist(), plan.num_samples.tolist(), len(outputs)))
    assert seen == [([0], [8], [0], 0), ([8], [8], [0], 0), ([16], [4], [1], 1), ([20], [1], [1], 1)]
    assert request.token_ids.tolist() == [1] * 20 + [TOKEN] * 2
    assert request.finish_reason is FinishReason.LENGTH
    assert [(event.start, event.num_tokens) for event in events(scheduler, ChunkEvent)] == [(0, 8), (8, 8), (16, 4)]


def test_decoding_rows_and_chunks_of_others_share_a_step_decode_first() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    long = add_request(scheduler, "long", 20, max_tokens=2)
    add_request(scheduler, "short", 2, max_tokens=5, priority=1)
    plan, _ = run_step(scheduler)
    assert shares(plan) == {"long": 6, "short": 2}
    plan, _ = run_step(scheduler)
    assert [request.request_id for request in plan.requests] == ["short", "long"]
    assert shares(plan) == {"short": 1, "long": 7}
    assert (plan.num_decode, plan.decode_tokens, plan.prefill_tokens, plan.num_tokens) == (1, 1, 7, 8)
    assert plan.num_samples.tolist() == [1, 0]
    assert long.status is RequestStatus.RUNNING


def test_each_decoding_request_gets_its_token_before_any_prompt_does() -> None:
    scheduler = make_scheduler(num_blocks=32, max_num_requests=4, max_num_batched_tokens=4)
    for name in ("a", "b", "c"):
        add_request(scheduler, name, 1, max_tokens=9, priority=1)
    run_step(scheduler)
    add_request(scheduler, "first in the order", 30, max_tokens=1)
    for _ in range(4):
        plan, _ = run_step(scheduler)
        assert shares(plan) == {"a": 1, "b": 1, "c": 1, "first in the order": 1}
        # A chunk of one token is computed like a decoding row, but counts as prompt.
        assert (plan.num_decode, plan.decode_tokens, plan.prefill_tokens) == (4, 3, 1)


@pytest.mark.parametrize("num_long", [1, 2, 5, 60])
@pytest.mark.parametrize("num_short_tokens", [1, 16, 17, 48])
def test_a_short_prompt_behind_any_number_of_long_ones_has_its_first_token_within_3_steps(
    num_long: int, num_short_tokens: int
) -> None:
    """Fault 18, for prompts of up to three quarters of the token budget."""
    scheduler = make_scheduler(
        num_blocks=4096, block_size=16, max_num_requests=64, max_num_batched_tokens=64, max_model_len=1024
    )
    for index in range(num_long):
        add_request(scheduler, f"long{index}", 1000, max_tokens=8)
    for _ in range(3):
        run_step(scheduler)
    short = add_request(scheduler, "short", num_short_tokens, max_tokens=8)
    outputs = [output for _ in range(3) for output in run_step(scheduler)[1]]
    assert "short" in [output.request_id for output in outputs]
    assert short.first_token_time is not None


def test_a_prompt_beside_decoding_requests_gets_what_the_mixed_budget_leaves() -> None:
    scheduler = make_scheduler(num_blocks=64, max_num_requests=4, max_num_batched_tokens=16, mixed_token_budget=5)
    add_request(scheduler, "a", 12, max_tokens=20)
    assert shares(run_step(scheduler)[0]) == {"a": 12}
    add_request(scheduler, "b", 40, max_tokens=20)
    plan, _ = run_step(scheduler)
    assert shares(plan) == {"a": 1, "b": 4}
    assert plan.token_budget == 5
    scheduler.abort("a", 0.0)
    plan, _ = run_step(scheduler)
    assert shares(plan) == {"b": 16}
    assert plan.token_budget == 16


def test_no_request_but_the_shortest_takes_more_than_half_of_a_step_while_another_waits() -> None:
    scheduler = make_scheduler(num_blocks=256, max_num_requests=4, max_num_batched_tokens=16, max_model_len=256)
    for name, num_tokens in (("a", 200), ("b", 200), ("c", 200), ("shortest", 25)):
        add_request(scheduler, name, num_tokens, max_tokens=1)
    plans = [shares(run_step(scheduler)[0]) for _ in range(6)]
    assert plans == [{"a": 8, "b": 4, "shortest": 4}] * 6
    # Its last prompt token: the step's other 15 are shared among the rest, of whom "a" has the fewest left now.
    assert shares(run_step(scheduler)[0]) == {"shortest": 1, "a": 15}


def test_endless_short_requests_do_not_starve_a_long_prefill() -> None:
    """Fault 18, the other way round: the first in the order has nearly half of what decoding leaves."""
    scheduler = make_scheduler(num_blocks=256, max_num_requests=8, max_num_batched_tokens=16, max_model_len=256)
    long = add_request(scheduler, "long", 200, max_tokens=1)
    for index in range(100):
        for number in range(3):
            add_request(scheduler, f"short{index}.{number}", 4, max_tokens=2)
        plan, _ = run_step(scheduler)
        if long.status is RequestStatus.FINISHED:
            break
        decoding = plan.decode_tokens
        assert shares(plan)["long"] >= min(4, (16 - decoding) // 2)
    assert long.status is RequestStatus.FINISHED
    assert scheduler.step <= 200 / 4 + 1


# ---- the order of admission ---------------------------------------------------------------------------------------


def test_requests_enter_by_priority_then_arrival() -> None:
    scheduler = make_scheduler(num_blocks=32, max_num_requests=4)
    for name, priority in (("late", 5), ("second", 0), ("third", 0), ("first", -1)):
        add_request(scheduler, name, 2, max_tokens=2, priority=priority)
    run_step(scheduler)
    assert [event.request_id for event in events(scheduler, AdmitEvent)] == ["first", "second", "third", "late"]
    assert [request.request_id for request in scheduler.live_requests()] == ["first", "second", "third", "late"]


def test_none_overtakes_a_request_that_waits_for_blocks() -> None:
    """A small request would fit beside the running one; the large one before it would then wait for ever."""
    scheduler = make_scheduler(num_blocks=8)
    running = add_request(scheduler, "running", 14, max_tokens=6)
    run_step(scheduler)
    large = add_request(scheduler, "large", [2] * 20, max_tokens=2)
    small = add_request(scheduler, "small", [3] * 2, max_tokens=2)
    for _ in range(6):
        assert running.status is RequestStatus.RUNNING
        assert scheduler.allocator.num_available >= 1
        assert (large.status, small.status) == (RequestStatus.WAITING, RequestStatus.WAITING)
        run_step(scheduler)
    run_step(scheduler)
    assert (large.status, small.status) == (RequestStatus.RUNNING, RequestStatus.RUNNING)


def test_a_request_enters_when_its_tokens_and_the_next_one_fit() -> None:
    """Fault 8: one token less than full blocks, exactly full, one more; 4 of 8 blocks are free."""
    for num_tokens, enters in ((14, True), (15, True), (16, False), (17, False)):
        scheduler = make_scheduler(num_blocks=8)
        add_request(scheduler, "running", 15, max_tokens=1 + 4)
        run_step(scheduler)
        waiting = add_request(scheduler, "waiting", [2] * num_tokens, max_tokens=1)
        run_step(scheduler)
        assert (waiting.status is RequestStatus.RUNNING) == enters, num_tokens
        if not enters:
            assert [(wait.reason, wait.needed, wait.free) for wait in waiting.waits] == [
                ("queue", 0, 0),
                ("blocks", 5, 4),
            ]


def test_whoever_enters_second_does_not_take_the_block_of_the_firsts_next_token() -> None:
    """Else it would be preempted at the first's first token, and its prefill was for nothing."""
    scheduler = make_scheduler(num_blocks=4, max_num_batched_tokens=16)
    first = add_request(scheduler, "first", 8, max_tokens=4)
    second = add_request(scheduler, "second", 5, max_tokens=3)
    for _ in range(4):
        run_step(scheduler)
    assert first.status is RequestStatus.FINISHED
    assert second.num_preemptions == 0


def test_requests_wait_for_rows() -> None:
    scheduler = make_scheduler(num_blocks=8, max_num_requests=2)
    for name in ("a", "b", "c"):
        add_request(scheduler, name, 2, max_tokens=3)
    run_step(scheduler)
    waiting = scheduler.find("c")
    assert waiting is not None
    assert [wait.reason for wait in waiting.waits] == ["queue", "rows"]
    run_step(scheduler)
    run_step(scheduler)
    run_step(scheduler)
    assert waiting.status is RequestStatus.RUNNING
    assert [(wait.reason, wait.since, wait.until) for wait in waiting.waits] == [("queue", 0, 1), ("rows", 1, 4)]


# ---- endings ------------------------------------------------------------------------------------------------------


def test_blocks_are_free_as_soon_as_their_request_has_ended() -> None:
    """Fault 2: by length, aborted, at a stop string: never later than the next schedule()."""
    scheduler = make_scheduler()
    add_request(scheduler, "length", 6, max_tokens=1)
    run_step(scheduler)
    assert scheduler.allocator.num_used == 0
    for end in (scheduler.abort, lambda request_id, now: scheduler.finish(request_id, 0, now)):
        add_request(scheduler, "cut short", 6, max_tokens=4)
        run_step(scheduler)
        assert scheduler.allocator.num_used == 2
        assert end("cut short", 9.0)
        assert scheduler.allocator.num_used == 0
        scheduler.check_invariants()
    assert scheduler.num_aborts == 1


def test_a_step_in_which_everything_has_gone_is_empty() -> None:
    """Fault 20."""
    scheduler = make_scheduler()
    for name in ("a", "b"):
        add_request(scheduler, name, 4, max_tokens=4)
    run_step(scheduler)
    for name in ("a", "b"):
        scheduler.abort(name, 2.0)
    plan = scheduler.schedule(3.0)
    assert (plan.requests, plan.num_tokens, len(plan.rows)) == ([], 0, 0)
    assert not scheduler.has_work


def test_what_has_ended_or_never_was_is_not_aborted() -> None:
    scheduler = make_scheduler()
    add_request(scheduler, "a", 4, max_tokens=1)
    run_step(scheduler)
    assert not scheduler.abort("a", 2.0)
    assert not scheduler.abort("unknown", 2.0)
    assert not scheduler.finish("unknown", 1, 2.0)
    assert scheduler.num_aborts == 0
    assert scheduler.find("unknown") is None


def test_a_stop_string_truncates_the_output_in_any_state() -> None:
    scheduler = make_scheduler(num_blocks=4, max_num_requests=2, max_num_batched_tokens=32)
    running = add_request(scheduler, "running", 3, max_tokens=13)
    preempted = add_request(scheduler, "preempted", 3, max_tokens=13)
    run_until(scheduler, lambda: preempted.num_preemptions, limit=10)
    for request in (preempted, running):
        assert scheduler.finish(request.request_id, 2, 9.0)
        assert request.token_ids.tolist() == [1] * 3 + [TOKEN] * 2
        assert request.finish_reason is FinishReason.STOP
        scheduler.check_invariants()
    assert [event.num_output_tokens for event in events(scheduler, FinishEvent)] == [2, 2]


def test_the_text_wins_over_the_length_but_not_over_an_abort() -> None:
    """The stop string may be found a moment after the engine itself ended the request."""
    scheduler = make_scheduler()
    ended = add_request(scheduler, "ended", 3, max_tokens=2)
    run_step(scheduler)
    run_step(scheduler)
    assert events(scheduler, FinishEvent)[0].reason == FinishReason.LENGTH
    assert scheduler.finish("ended", 1, 3.0)
    assert ended.finish_reason is FinishReason.STOP
    assert ended.token_ids.tolist() == [1, 1, 1, TOKEN]
    aborted = add_request(scheduler, "aborted", 3, max_tokens=2)
    scheduler.abort("aborted", 3.0)
    assert not scheduler.finish("aborted", 0, 3.0)
    assert aborted.finish_reason is FinishReason.ABORT


def test_only_the_requests_of_a_failed_step_end_with_an_error() -> None:
    """Fault 40. The third is running but had no token in that step; its blocks are told to the device again."""
    scheduler = make_scheduler(num_blocks=16, max_num_requests=3, max_num_batched_tokens=3)
    for name in ("a", "b", "c"):
        add_request(scheduler, name, 10, max_tokens=2)
    plan = scheduler.schedule(1.0)
    assert shares(plan) == {"a": 3}
    outputs = scheduler.fail(plan, "why", 1.0)
    assert [(output.request_id, output.finish_reason, output.error) for output in outputs] == [("a", "error", "why")]
    scheduler.check_invariants()
    assert scheduler.num_running == 2
    plan, _ = run_step(scheduler)
    updates = plan.table_updates
    sent = set(zip(updates.rows.tolist(), updates.indices.tolist(), updates.block_ids.tolist(), strict=True))
    for request in scheduler.live_requests():
        assert {(request.row, *entry) for entry in enumerate(scheduler.tables.block_ids(request.row))} <= sent


# ---- prefix hits --------------------------------------------------------------------------------------------------


def make_with(**settings: Any) -> Scheduler:
    """A scheduler with settings beyond make_scheduler's."""
    defaults = {"num_blocks": 16, "block_size": 4, "max_num_requests": 4, "max_num_batched_tokens": 16}
    settings = defaults | settings
    settings.setdefault("max_model_len", settings["num_blocks"] * settings["block_size"])
    return Scheduler(**settings, journal=Journal())


def add_choices(
    scheduler: Scheduler,
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    n: int,
    priority: int = 0,
    stop_ids: Sequence[int] = (),
) -> list[Request]:
    """Queue a request's n choices, as an engine would."""
    arrival = len(events(scheduler, ArriveEvent))
    params = SamplingParams(n=n, max_tokens=max_tokens)
    choices = [
        make_request(name, prompt, params, arrival=arrival + index, priority=priority, stop_ids=stop_ids)
        for index, name in enumerate(choice_ids(request_id, n))
    ]
    scheduler.add(choices, now=float(scheduler.step))
    scheduler.check_invariants()
    return choices


def run_to_the_end(scheduler: Scheduler, limit: int = 300) -> None:
    """Step until nothing is left; each step computes something, and at the end nothing is held."""
    for _ in range(limit):
        if not scheduler.has_work:
            break
        plan, _ = run_step(scheduler)
        assert plan.requests, "there is work, but nothing runs"
    assert not scheduler.has_work
    assert_nothing_is_held(scheduler)


def assert_nothing_is_held(scheduler: Scheduler) -> None:
    allocator = scheduler.allocator
    assert (allocator.num_used, allocator.num_pinned) == (0, 0)
    assert allocator.num_available == allocator.num_blocks
    assert scheduler.tables.num_free_rows == scheduler.max_num_requests


def numbers(count: int, first: int = 100) -> list[int]:
    """A prompt of tokens that no other prompt has."""
    return list(range(first, first + count))


@pytest.mark.parametrize(("num_tokens", "start"), [(3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (12, 8), (13, 12)])
def test_a_request_starts_behind_its_cached_tokens_and_computes_at_least_one(num_tokens: int, start: int) -> None:
    """Fault 8: the same prompt a second time, of kB - 1, kB and kB + 1 tokens."""
    scheduler = make_with()
    for number in range(2):
        request = add_request(scheduler, f"r{number}", numbers(num_tokens), max_tokens=3)
        plan, outputs = run_step(scheduler)
        expected = start if number else 0
        assert plan.starts.tolist() == [expected]
        assert plan.num_new_tokens.tolist() == [num_tokens - expected]
        assert [output.num_cached_tokens for output in outputs] == [expected]
        assert request.num_cached_tokens == expected
        run_to_the_end(scheduler)
        assert request.token_ids.tolist() == [*numbers(num_tokens), TOKEN, TOKEN, TOKEN]
    assert (scheduler.num_lookup_tokens, scheduler.num_hit_tokens) == (2 * num_tokens, start)


def test_only_the_first_output_tells_of_cached_tokens() -> None:
    scheduler = make_with()
    for name in ("first", "second"):
        add_request(scheduler, name, numbers(9), max_tokens=3)
        outputs = [output for _ in range(3) for output in run_step(scheduler)[1]]
    assert [output.num_cached_tokens for output in outputs] == [8, 0, 0]


def test_a_prompt_is_found_chunk_by_chunk_while_another_still_computes_it() -> None:
    """Fault 7: what is computed counts, not what has blocks."""
    scheduler = make_with(num_blocks=32, max_num_batched_tokens=8)
    add_request(scheduler, "first", numbers(40), max_tokens=2)
    run_step(scheduler)
    second = add_request(scheduler, "second", numbers(20), max_tokens=2)
    plan, _ = run_step(scheduler)
    assert second.num_cached_tokens == 8
    assert dict(zip([request.request_id for request in plan.requests], plan.starts.tolist(), strict=True)) == {
        "first": 8,
        "second": 8,
    }
    run_to_the_end(scheduler)


def test_what_was_allocated_but_not_computed_is_not_found() -> None:
    """Fault 7: cancelled between the schedule and the forward pass, then sent again."""
    scheduler = make_with()
    add_request(scheduler, "cancelled", numbers(9), max_tokens=2)
    scheduler.schedule(1.0)
    scheduler.abort("cancelled", 1.0)
    again = add_request(scheduler, "again", numbers(9), max_tokens=2)
    plan, _ = run_step(scheduler)
    assert (plan.starts.tolist(), again.num_cached_tokens) == ([0], 0)
    run_to_the_end(scheduler)


def test_two_equal_prompts_computed_together_keep_private_duplicates() -> None:
    """Fault 6: one copy's blocks are given back while a third allocates, and the other goes on in its own."""
    scheduler = make_with(num_blocks=8)
    first = add_request(scheduler, "first", numbers(8), max_tokens=1)
    second = add_request(scheduler, "second", numbers(8), max_tokens=9)
    plan, _ = run_step(scheduler)
    assert plan.starts.tolist() == [0, 0]
    assert first.status is RequestStatus.FINISHED
    published = [event.block_ids for event in events(scheduler, PublishEvent)]
    assert len(published) == 2
    assert min(published[0]) >= 0
    assert published[1] == (-1, -1)
    mine = scheduler.tables.block_ids(second.row)
    third = add_request(scheduler, "third", numbers(16, first=500), max_tokens=1)
    run_step(scheduler)
    taken = [block for event in events(scheduler, AllocateEvent)[-1:] for block in event.block_ids]
    assert third.first_scheduled_time is not None
    assert set(taken).isdisjoint(mine[:2])
    assert scheduler.tables.block_ids(second.row)[:2] == mine[:2]
    run_to_the_end(scheduler)
    assert second.token_ids.tolist() == numbers(8) + [TOKEN] * 9


@pytest.mark.parametrize("num_tokens", range(5, 13))
def test_a_preempted_request_goes_on_from_its_own_cached_blocks(num_tokens: int) -> None:
    """Fault 9: at any length, also where its context ends with a full block. The pool holds both as they enter."""
    scheduler = make_with(num_blocks=2 * (num_tokens // 4 + 1), max_num_requests=2, max_num_batched_tokens=64)
    first = add_request(scheduler, "first", numbers(num_tokens), max_tokens=6)
    last = add_request(scheduler, "last", numbers(num_tokens, first=500), max_tokens=6)
    run_until(scheduler, lambda: last.num_preemptions, limit=6)
    plan, _ = run_step(scheduler)
    while last not in plan.requests:
        plan, _ = run_step(scheduler)
    assert first.num_preemptions == 0
    found = [event.num_blocks for event in events(scheduler, MissEvent) if event.request_id == "last"]
    assert (found[0], len(found)) == (0, 2)
    assert found[1] > 0, "its own blocks were there to be found"
    assert plan.starts[plan.requests.index(last)] == 4 * found[1]
    run_to_the_end(scheduler)
    assert last.token_ids.tolist() == numbers(num_tokens, first=500) + [TOKEN] * 6
    assert last.num_cached_tokens == 0, "at its first admission there were none"
    assert (scheduler.num_lookup_tokens, scheduler.num_hit_tokens) == (2 * num_tokens, 0)


def test_without_a_prefix_cache_each_prompt_is_computed_anew() -> None:
    scheduler = make_with(prefix_cache=False)
    for name in ("first", "second"):
        add_request(scheduler, name, numbers(9), max_tokens=2)
        plan, _ = run_step(scheduler)
        assert plan.starts.tolist() == [0]
        run_to_the_end(scheduler)
    assert scheduler.allocator.num_cached == 0
    assert scheduler.num_hit_tokens == 0


def test_a_reset_while_a_request_runs_spares_it_and_forgets_what_it_computes() -> None:
    scheduler = make_with(max_num_batched_tokens=8)
    add_request(scheduler, "done", numbers(8, first=500), max_tokens=1)
    run_to_the_end(scheduler)
    running = add_request(scheduler, "running", numbers(20), max_tokens=6)
    run_step(scheduler)
    assert scheduler.reset_prefix_cache(2.0) == 2 + 2
    scheduler.check_invariants()
    assert scheduler.reset_prefix_cache(2.0) == 0
    run_to_the_end(scheduler)
    assert running.token_ids.tolist() == numbers(20) + [TOKEN] * 6
    assert scheduler.allocator.num_cached == 0
    for prompt in (numbers(20), numbers(9, first=500)):
        again = add_request(scheduler, f"again{len(prompt)}", prompt, max_tokens=1)
        run_to_the_end(scheduler)
        assert again.num_cached_tokens == 0
    # Whatever came after the reset is found as ever.
    found = add_request(scheduler, "found", numbers(20), max_tokens=1)
    run_to_the_end(scheduler)
    assert found.num_cached_tokens == 16


def test_a_blocked_request_that_finds_its_prompt_needs_only_the_rest() -> None:
    scheduler = make_with(num_blocks=6)
    add_request(scheduler, "done", numbers(12), max_tokens=1)
    run_to_the_end(scheduler)
    sharing = [add_request(scheduler, f"s{number}", numbers(13), max_tokens=2) for number in range(3)]
    run_step(scheduler)
    assert [request.status for request in sharing] == [RequestStatus.RUNNING] * 3
    assert scheduler.allocator.num_used == 3 + 3
    # Fault 10: three rows share three blocks; what is available is never more than the pool.
    assert scheduler.allocator.num_available == 0
    run_to_the_end(scheduler)


# ---- a request's choices ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [3, 4, 5, 7, 8, 9])
def test_choices_share_the_prompts_full_blocks_and_copy_its_partial_one(num_tokens: int) -> None:
    """Fault 8."""
    scheduler = make_with(num_blocks=32)
    choices = add_choices(scheduler, "r", numbers(num_tokens), 6, n=3)
    assert (scheduler.num_waiting, scheduler.num_following, scheduler.num_running) == (1, 2, 0)
    assert [choice.waits[-1].reason for choice in choices] == ["queue", "group", "group"]
    plan, outputs = run_step(scheduler)
    assert (plan.num_samples.tolist(), plan.num_new_tokens.tolist()) == ([3], [num_tokens])
    assert [output.request_id for output in outputs if output.token_ids == [TOKEN]] == ["r-1", "r-2", "r-0"]
    assert [choice.status for choice in choices] == [RequestStatus.RUNNING] * 3
    assert scheduler.num_waits["group"] == 2
    assert all(choice.waits[-1].until is not None for choice in choices)
    num_full = num_tokens // 4
    rows = [scheduler.tables.block_ids(choice.row) for choice in choices]
    assert rows[0][:num_full] == rows[1][:num_full] == rows[2][:num_full]
    partial = [row[num_full] for row in rows] if num_tokens % 4 else []
    assert len(set(partial)) == len(partial)
    plan, outputs = run_step(scheduler)
    assert [(copy.kind, copy.src, copy.dst) for copy in plan.copies] == [
        (CopyKind.FORK, partial[0], block_id) for block_id in partial[1:]
    ]
    assert plan.starts.tolist() == [num_tokens] * 3
    assert plan.num_samples.tolist() == [1, 1, 1]
    plan, _ = run_step(scheduler)
    assert plan.copies == ()
    run_to_the_end(scheduler)
    assert [choice.token_ids.tolist() for choice in choices] == [numbers(num_tokens) + [TOKEN] * 6] * 3


def test_each_choice_goes_on_with_its_own_token_and_ends_by_its_own_reason() -> None:
    scheduler = make_with()
    first, second, third = add_choices(scheduler, "r", numbers(6), 3, n=3, stop_ids=[9])
    plan = scheduler.schedule(1.0)
    outputs = scheduler.update(plan, StepResult(np.array([5, 9, 6], dtype=np.int32), {}), 1.0)
    scheduler.check_invariants()
    told = {output.request_id: (output.token_ids, output.finish_reason) for output in outputs}
    assert told == {"r-0": ([5], ""), "r-1": ([9], "stop"), "r-2": ([6], "")}
    assert second.token_ids.tolist() == [*numbers(6), 9]
    run_to_the_end(scheduler)
    assert first.token_ids.tolist() == [*numbers(6), 5, TOKEN, TOKEN]
    assert third.token_ids.tolist() == [*numbers(6), 6, TOKEN, TOKEN]
    assert [choice.finish_reason for choice in (first, second, third)] == [
        FinishReason.LENGTH,
        FinishReason.STOP,
        FinishReason.LENGTH,
    ]


def test_choices_that_end_with_their_first_token_never_take_a_row() -> None:
    scheduler = make_with(max_num_requests=2)
    choices = add_choices(scheduler, "r", numbers(6), 1, n=2)
    _, outputs = run_step(scheduler)
    assert sorted((output.request_id, output.finish_reason) for output in outputs) == [
        ("r-0", "length"),
        ("r-1", "length"),
    ]
    assert [choice.token_ids.tolist() for choice in choices] == [[*numbers(6), TOKEN]] * 2
    assert events(scheduler, ForkEvent) == []
    assert_nothing_is_held(scheduler)


def test_choices_tell_their_cached_tokens_and_times_each_with_its_first_output() -> None:
    scheduler = make_with(max_num_batched_tokens=8)
    add_request(scheduler, "done", numbers(8), max_tokens=1)
    run_to_the_end(scheduler)
    add_choices(scheduler, "r", numbers(20), 2, n=2)
    outputs = [output for _ in range(3) for output in run_step(scheduler)[1]]
    told = [(output.request_id, output.num_cached_tokens, output.prefill_seconds) for output in outputs]
    assert told[:2] == [("r-1", 8, 1.0), ("r-0", 8, 1.0)]
    assert scheduler.num_lookup_tokens == 8 + 20, "the prompt is looked up once for all choices"


def test_choices_without_a_row_queue_and_finish() -> None:
    """Four rows, two of them taken: the leader and one more go on at once, the others find the prompt's blocks."""
    scheduler = make_with(num_blocks=32)
    others = [add_request(scheduler, f"other{number}", numbers(4, first=500 + 10 * number), 12) for number in range(2)]
    run_step(scheduler)
    choices = add_choices(scheduler, "r", numbers(9), 4, n=4)
    run_step(scheduler)
    assert [choice.status.value for choice in choices] == ["running", "running", "waiting", "waiting"]
    assert [choice.waits[-1].reason for choice in choices[2:]] == ["queue", "queue"]
    run_step(scheduler)
    assert [choice.waits[-1].reason for choice in choices[2:]] == ["rows", "queue"]
    run_to_the_end(scheduler)
    assert [choice.token_ids.tolist() for choice in choices] == [numbers(9) + [TOKEN] * 4] * 4
    assert all(other.num_preemptions == 0 for other in others)
    admitted = [event for event in events(scheduler, MissEvent) if event.request_id in ("r-2", "r-3")]
    assert [event.num_blocks for event in admitted] == [2, 2]


def test_choices_without_blocks_queue_and_finish() -> None:
    """The pool holds one choice and a little: forks that find no block for their partial one wait for it."""
    scheduler = make_with(num_blocks=4)
    choices = add_choices(scheduler, "r", numbers(10), 5, n=4)
    run_step(scheduler)
    assert sum(choice.status is RequestStatus.RUNNING for choice in choices) == 2
    run_to_the_end(scheduler)
    assert [choice.token_ids.tolist() for choice in choices] == [numbers(10) + [TOKEN] * 5] * 4


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("at_once", [True, False])
def test_choices_end_in_every_order_and_leave_nothing_behind(window: int | None, num_steps: int, at_once: bool) -> None:
    """Fault 4. Before the prompt is computed, in its middle, at the fork with its copies pending, later, and past the
    window; aborted or finished at a stop string."""
    for order in permutations(range(4)):
        scheduler = make_with(num_blocks=24, max_num_batched_tokens=8, window=window)
        names = choice_ids("r", 4)
        choices = add_choices(scheduler, "r", numbers(10), 12, n=4)
        for _ in range(num_steps):
            run_step(scheduler)
        for turn, index in enumerate(order):
            if turn % 2 and choices[index].first_token_time is not None:
                assert scheduler.finish(names[index], 1, float(scheduler.step))
            else:
                assert scheduler.abort(names[index], float(scheduler.step))
            scheduler.check_invariants()
            if not at_once and turn < 3:
                run_step(scheduler)
        assert not scheduler.has_work
        assert_nothing_is_held(scheduler)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_some_choices_aborted_leave_the_others_as_they_were(count: int) -> None:
    """Fault 11, in the middle of the prompt."""
    for gone in combinations(range(4), count):
        scheduler = make_with(max_num_batched_tokens=8)
        choices = add_choices(scheduler, "r", numbers(20), 3, n=4)
        run_step(scheduler)
        for index in gone:
            scheduler.abort(choices[index].request_id, 1.0)
            scheduler.check_invariants()
        run_to_the_end(scheduler)
        for index, choice in enumerate(choices):
            expected = numbers(20) + [TOKEN] * (0 if index in gone else 3)
            assert choice.token_ids.tolist() == expected


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_an_aborted_leaders_next_choice_computes_the_prompt(num_steps: int) -> None:
    """While it waits, and in the middle of its prompt: what it had computed is found."""
    scheduler = make_with(max_num_batched_tokens=8)
    leader, *followers = add_choices(scheduler, "r", numbers(20), 2, n=3)
    for _ in range(num_steps):
        run_step(scheduler)
    assert leader.followers == followers
    scheduler.abort(leader.request_id, 1.0)
    scheduler.check_invariants()
    assert leader.finish_reason is FinishReason.ABORT
    assert (followers[0].leader, followers[0].followers) == (None, followers[1:])
    assert followers[1].leader is followers[0]
    assert followers[0].waits[-1].reason == "queue"
    plan, _ = run_step(scheduler)
    assert [request.request_id for request in plan.requests] == ["r-1"]
    assert plan.starts.tolist() == [8 * num_steps]
    run_to_the_end(scheduler)
    assert [choice.token_ids.tolist() for choice in followers] == [numbers(20) + [TOKEN] * 2] * 2


def test_a_failed_forward_pass_ends_the_leader_and_those_who_wait_for_it() -> None:
    """Fault 40, with choices; a request that had no part in the step goes on."""
    scheduler = make_with(max_num_batched_tokens=8)
    choices = add_choices(scheduler, "r", numbers(20), 2, n=3)
    plan = scheduler.schedule(1.0)
    other = add_request(scheduler, "other", numbers(4, first=500), max_tokens=2)
    outputs = scheduler.fail(plan, "why", 1.0)
    scheduler.check_invariants()
    told = [(output.request_id, output.token_ids, output.finish_reason, output.error) for output in outputs]
    assert told == [(f"r-{index}", [], "error", "why") for index in range(3)]
    assert {choice.finish_reason for choice in choices} == {FinishReason.ERROR}
    run_to_the_end(scheduler)
    assert other.finish_reason is FinishReason.LENGTH


def test_nothing_of_a_failed_step_is_found_again_not_even_what_it_was_to_copy() -> None:
    scheduler = make_with()
    choices = add_choices(scheduler, "r", numbers(6), 4, n=3)
    run_step(scheduler)
    plan = scheduler.schedule(2.0)
    assert len(plan.copies) == 2
    outputs = scheduler.fail(plan, "why", 2.0)
    scheduler.check_invariants()
    assert sorted(output.request_id for output in outputs) == [choice.request_id for choice in choices]
    assert_nothing_is_held(scheduler)
    again = add_request(scheduler, "again", numbers(6), max_tokens=2)
    run_to_the_end(scheduler)
    assert again.num_cached_tokens == 0


def test_a_failed_forward_pass_ends_those_whose_blocks_it_was_to_copy() -> None:
    """The step's tokens all went to another, but the copy back from host memory was this step's."""
    scheduler = make_with(num_blocks=8, max_num_batched_tokens=4, host_slots=8)
    add_request(scheduler, "done", numbers(4), max_tokens=1)
    run_to_the_end(scheduler)
    add_request(scheduler, "evicts", numbers(31, first=500), max_tokens=1)
    run_to_the_end(scheduler)
    add_request(scheduler, "first", numbers(6, first=800), max_tokens=2)
    copying = add_request(scheduler, "copying", numbers(14), max_tokens=2)
    untouched = add_request(scheduler, "untouched", numbers(7, first=900), max_tokens=2)
    plan = scheduler.schedule(50.0)
    assert shares(plan) == {"first": 4}
    assert CopyKind.TO_DEVICE in [copy.kind for copy in plan.copies]
    assert copying.status is untouched.status is RequestStatus.RUNNING
    outputs = scheduler.fail(plan, "why", 50.0)
    scheduler.check_invariants()
    assert [output.request_id for output in outputs] == ["first", "copying"]
    run_to_the_end(scheduler)
    assert untouched.token_ids.tolist() == numbers(7, first=900) + [TOKEN] * 2
    again = add_request(scheduler, "again", numbers(14), max_tokens=1)
    run_to_the_end(scheduler)
    assert again.num_cached_tokens == 0


def test_forks_that_are_gone_before_their_copy_do_not_keep_blocks_from_others() -> None:
    """A request that needs the whole pool comes next: only a forward pass ends a pin, and only it could bring one."""
    scheduler = make_with(num_blocks=4)
    choices = add_choices(scheduler, "r", numbers(3), 4, n=2)
    run_step(scheduler)
    for choice in choices:
        scheduler.abort(choice.request_id, 1.0)
    assert_nothing_is_held(scheduler)
    whole = add_request(scheduler, "whole", numbers(14, first=500), max_tokens=2)
    plan = scheduler.schedule(2.0)
    assert [request.request_id for request in plan.requests] == ["whole"]
    assert plan.copies == ()
    assert whole.status is RequestStatus.RUNNING


def test_forks_preempted_before_their_copy_give_their_blocks_to_the_first_in_the_order() -> None:
    """Else it would give way itself to pins that nobody is there to end, and nothing would ever run again."""
    scheduler = make_with(num_blocks=4)
    first = add_request(scheduler, "first", numbers(7, first=500), max_tokens=9)
    run_step(scheduler)
    choices = add_choices(scheduler, "r", numbers(3), 4, n=2)
    run_step(scheduler)
    assert len(events(scheduler, ForkEvent)) == 1
    plan = scheduler.schedule(3.0)
    assert "first" in shares(plan)
    assert plan.preempted == ("r-1",)
    scheduler.update(plan, StepResult(np.full(len(plan.requests), TOKEN, dtype=np.int32), {}), 3.0)
    run_to_the_end(scheduler)
    assert first.num_preemptions == 0
    assert [choice.token_ids.tolist() for choice in choices] == [numbers(3) + [TOKEN] * 4] * 2


def test_choices_of_a_later_priority_give_way_and_all_finish() -> None:
    for num_steps in range(6):
        scheduler = make_with(num_blocks=8, max_num_batched_tokens=8)
        choices = add_choices(scheduler, "r", numbers(9), 6, n=3, priority=1)
        for _ in range(num_steps):
            run_step(scheduler)
        urgent = add_request(scheduler, "urgent", numbers(27, first=500), max_tokens=3)
        # One step more where the copies of forks are still to be made.
        run_until(scheduler, lambda: urgent.status is RequestStatus.RUNNING, limit=2)  # noqa: B023
        assert all(choice.status is not RequestStatus.RUNNING for choice in choices)
        run_to_the_end(scheduler)
        assert urgent.num_preemptions == 0
        assert [choice.token_ids.tolist() for choice in choices] == [numbers(9) + [TOKEN] * 6] * 3


# ---- windows ------------------------------------------------------------------------------------------------------


def test_a_request_holds_no_more_than_its_window() -> None:
    """Two contexts of 47 tokens in a pool of 12 blocks, each of which would take all of it without a window."""
    scheduler = make_with(num_blocks=12, max_num_batched_tokens=8, max_model_len=48, window=6)
    requests = [add_request(scheduler, name, numbers(9, first=first), 38) for name, first in (("a", 100), ("b", 500))]
    while scheduler.has_work:
        run_step(scheduler)
        for request in requests:
            if request.status is RequestStatus.RUNNING and request.first_token_time is not None:
                computed = int(scheduler.rows.num_computed_tokens[request.row])
                first = max(0, computed - 6 + 1) // 4
                assert scheduler.tables.first_block[request.row] == first
                assert len(scheduler.tables.block_ids(request.row)) <= 3
    assert scheduler.num_preemptions == 0
    assert [len(request.token_ids) for request in requests] == [47, 47]
    assert_nothing_is_held(scheduler)


# ---- contexts that slide ------------------------------------------------------------------------------------------


def test_a_full_context_goes_on_with_its_later_part_from_position_0() -> None:
    """16 tokens of context, 8 leave when the 17th is there; max_tokens is far beyond the room."""
    scheduler = make_with(max_model_len=16, slide_by=8)
    request = add_request(scheduler, "a", numbers(6), max_tokens=30)
    slides = []
    while scheduler.has_work:
        before = request.context_start
        plan, outputs = run_step(scheduler)
        assert (plan.starts + plan.num_new_tokens).max() <= 16
        assert [output.token_ids for output in outputs] == [[TOKEN]]
        if request.context_start != before:
            slides.append((len(request.token_ids), request.context_start, request.row))
            assert request.status is RequestStatus.WAITING
            assert request.context.tolist() == request.token_ids.tolist()[request.context_start :]
            assert_nothing_is_held(scheduler)
    assert slides == [(17, 8, -1), (25, 16, -1), (33, 24, -1)]
    told = [(event.context_start, event.request_id) for event in events(scheduler, SlideEvent)]
    assert told == [(8, "a"), (16, "a"), (24, "a")]
    assert request.token_ids.tolist() == numbers(6) + [TOKEN] * 30
    assert request.finish_reason is FinishReason.LENGTH
    # The chain starts at the root again: after the first slide nothing is found, later the same tokens are.
    chunks = [(event.start, event.num_tokens) for event in events(scheduler, ChunkEvent)]
    assert chunks[:2] == [(0, 6), (0, 9)]
    admitted = [(event.num_tokens, event.row) for event in events(scheduler, AdmitEvent)]
    assert admitted == [(6, 0), (9, 0), (9, 0), (9, 0)]
    assert [event.num_blocks for event in events(scheduler, MissEvent)] == [0, 0, 2, 2]


@pytest.mark.parametrize("slide_by", [1, 3, 8, 15, 16])
@pytest.mark.parametrize("window", [None, 5])
def test_a_sliding_request_gets_all_its_tokens(slide_by: int, window: int | None) -> None:
    scheduler = make_with(num_blocks=8, max_model_len=16, slide_by=slide_by, window=window, max_num_batched_tokens=4)
    one = add_request(scheduler, "one", numbers(15), max_tokens=50)
    two, three = add_choices(scheduler, "more", numbers(6), 40, n=2)
    run_to_the_end(scheduler, limit=2000)
    assert one.token_ids.tolist() == numbers(15) + [TOKEN] * 50
    assert two.token_ids.tolist() == three.token_ids.tolist() == numbers(6) + [TOKEN] * 40
    assert {event.request_id for event in events(scheduler, SlideEvent)} == {"one", "more-0", "more-1"}


def test_an_output_ends_exactly_at_the_room_or_slides_one_token_later() -> None:
    """Fault 28."""
    for max_tokens, num_slides in ((10, 0), (11, 1), (12, 1)):
        scheduler = make_with(max_model_len=16, slide_by=8)
        request = add_request(scheduler, "a", numbers(6), max_tokens=max_tokens)
        run_to_the_end(scheduler)
        assert len(request.token_ids) == 6 + max_tokens
        # The token that ends a request needs no new context.
        assert len(events(scheduler, SlideEvent)) == max(0, num_slides - (max_tokens == 11))


def test_a_slid_request_ends_at_a_stop_string_that_has_slid_out_of_its_context() -> None:
    scheduler = make_with(max_model_len=16, slide_by=8)
    stopping = add_request(scheduler, "stopping", numbers(6), max_tokens=100)
    run_until(scheduler, lambda: stopping.context_start == 16, limit=40)
    assert scheduler.finish("stopping", 3, 50.0)
    assert stopping.token_ids.tolist() == numbers(6) + [TOKEN] * 3
    assert stopping.context_start == 9, "no context begins behind its tokens"
    assert_nothing_is_held(scheduler)


@pytest.mark.parametrize("slide_by", [0, 17])
def test_a_slide_leaves_something_and_moves(slide_by: int) -> None:
    with pytest.raises(ValueError, match=rf"slide_by is {slide_by}; it must be from 1 to max_model_len \(16\)"):
        make_with(max_model_len=16, slide_by=slide_by)


# ---- nobody starves -----------------------------------------------------------------------------------------------


def test_a_short_request_behind_three_prefills_of_100_chunks_has_its_first_token_within_3_steps() -> None:
    """Fault 18."""
    scheduler = make_with(num_blocks=2048, max_num_batched_tokens=16, max_model_len=1700)
    long = [add_request(scheduler, f"long{index}", [index] * 1600, max_tokens=8) for index in range(3)]
    for _ in range(5):
        run_step(scheduler)
    short = add_request(scheduler, "short", numbers(8), max_tokens=4)
    assert run_until(scheduler, lambda: short.first_token_time is not None, limit=3) <= 3
    assert all(request.first_token_time is None for request in long)


def needs_its_next_token(scheduler: Scheduler, request: Request) -> bool:
    left = scheduler.rows.num_tokens[request.row] - scheduler.rows.num_computed_tokens[request.row]
    return request.status is RequestStatus.RUNNING and int(left) == 1


def test_whoever_needs_just_its_next_token_gets_it_in_every_step_whatever_arrives() -> None:
    """Fault 18: prompts of any length, choices and endings come and go. Only who is preempted gets none."""
    rng = random.Random(5)
    scheduler = make_with(num_blocks=512, max_num_requests=8, max_num_batched_tokens=16, max_model_len=400)
    running = add_request(scheduler, "running", numbers(8), max_tokens=300)
    run_step(scheduler)
    for number in range(250):
        if rng.random() < 0.5 and scheduler.num_waiting < 8:
            prompt = [rng.randrange(3) for _ in range(rng.choice([1, 5, 40, 200]))]
            add_choices(scheduler, f"r{number}", prompt, rng.randint(1, 20), n=rng.randint(1, 4))
        others = [request for request in scheduler.live_requests() if request is not running]
        if others and rng.random() < 0.1:
            scheduler.abort(rng.choice(others).request_id, float(scheduler.step))
        ready = {
            request.request_id for request in scheduler.live_requests() if needs_its_next_token(scheduler, request)
        }
        assert "running" in ready
        plan, outputs = run_step(scheduler)
        assert ready - set(plan.preempted) <= {output.request_id for output in outputs}
    assert running.num_preemptions == 0
    assert len(events(scheduler, ForkEvent)) > 50
    assert scheduler.num_hit_tokens > 0


# ---- waits, and our own mistakes ----------------------------------------------------------------------------------


def test_each_wait_names_its_reason_and_how_long_it_lasted() -> None:
    scheduler = make_scheduler(num_blocks=4, max_num_batched_tokens=4)
    running = add_request(scheduler, "running", 12, max_tokens=2)
    run_step(scheduler)
    blocked = add_request(scheduler, "blocked", 4, max_tokens=2, priority=1)
    behind = add_request(scheduler, "behind", 2, max_tokens=2, priority=1)
    run_step(scheduler)
    assert [(wait.reason, wait.needed, wait.free) for wait in blocked.waits] == [("queue", 0, 0), ("blocks", 2, 0)]
    assert [wait.reason for wait in behind.waits] == ["queue"]
    add_request(scheduler, "before", 9, max_tokens=2)
    assert [(wait.reason, wait.until) for wait in blocked.waits] == [("queue", 2), ("blocks", 2), ("queue", None)]
    run_until_done(scheduler, running, limit=5)
    run_until(scheduler, lambda: not scheduler.has_work, limit=20)
    assert all(wait.until is not None and wait.until >= wait.since for wait in blocked.waits + behind.waits)


def test_waits_are_counted_by_their_reason() -> None:
    scheduler = make_scheduler(num_blocks=4, max_num_requests=2, max_num_batched_tokens=2)
    add_request(scheduler, "a", 5, max_tokens=4)
    add_request(scheduler, "b", 3, max_tokens=1)
    add_request(scheduler, "c", 3, max_tokens=1)
    assert scheduler.num_waits == {"queue": 3, "blocks": 0, "rows": 0, "budget": 0, "group": 0}
    run_step(scheduler)
    assert scheduler.num_waits == {"queue": 3, "blocks": 0, "rows": 1, "budget": 0, "group": 0}
    add_request(scheduler, "d", 9, max_tokens=1, priority=-1)
    run_step(scheduler)
    # "d" queued, "c" was first no more, "b" and "a" gave their blocks to "d"; then "a" was first and found too few.
    assert scheduler.num_waits == {"queue": 7, "blocks": 1, "rows": 1, "budget": 0, "group": 0}


def test_the_first_output_tells_how_long_its_request_was_queued_and_computed() -> None:
    scheduler = make_scheduler(num_blocks=8, max_num_requests=1, max_num_batched_tokens=8)
    add_request(scheduler, "a", 2, max_tokens=2)
    add_request(scheduler, "b", 20, max_tokens=2)
    outputs = [output for _ in range(6) for output in run_step(scheduler)[1]]
    times = [(output.request_id, output.queued_seconds, output.prefill_seconds) for output in outputs]
    assert times == [("a", 1, 0), ("a", -1, -1), ("b", 2, 2), ("b", -1, -1)]


def test_a_prompt_without_a_share_of_the_step_waits_for_the_budget() -> None:
    scheduler = make_scheduler(num_blocks=16, max_num_requests=3, max_num_batched_tokens=3)
    requests = [add_request(scheduler, name, 9, max_tokens=2) for name in ("a", "b", "c")]
    run_step(scheduler)
    waits = [[wait.reason for wait in request.waits if wait.until is None] for request in requests]
    assert waits == [[], ["budget"], ["budget"]]
    for _ in range(30):
        run_step(scheduler)
    assert not scheduler.has_work
    assert all(wait.until is not None for request in requests for wait in request.waits)


def test_a_live_id_is_not_added_again() -> None:
    """Fault 3: refused before the scheduler is asked."""
    scheduler = make_scheduler(num_blocks=2)
    add_request(scheduler, "a", 2, max_tokens=2)
    with pytest.raises(AssertionError, match="live already"):
        add_request(scheduler, "a", 2, max_tokens=2)
    run_step(scheduler)
    assert [request.request_id for request in scheduler.live_requests()] == ["a"]


def test_settings_that_contradict_one_another_are_refused() -> None:
    settings = {"num_blocks": 4, "block_size": 4, "max_num_requests": 4, "max_num_batched_tokens": 8}
    with pytest.raises(ValueError, match=r"4 blocks of 4 do not hold max_model_len \(17\)"):
        Scheduler(**settings, max_model_len=17, journal=Journal())
    with pytest.raises(ValueError, match="max_num_batched_tokens must be at least"):
        Scheduler(**{**settings, "max_num_batched_tokens": 3}, max_model_len=16, journal=Journal())


def test_a_plan_is_of_int32_and_does_not_change_with_the_scheduler() -> None:
    scheduler = make_scheduler()
    add_request(scheduler, "a", 4, max_tokens=4)
    plan, _ = run_step(scheduler)
    before = [values.tolist() for values in (plan.rows, plan.starts, plan.num_new_tokens, plan.num_samples)]
    assert {values.dtype for values in (plan.rows, plan.starts, plan.num_new_tokens, plan.num_samples)} == {
        np.dtype(np.int32)
    }
    run_step(scheduler)
    assert [values.tolist() for values in (plan.rows, plan.starts, plan.num_new_tokens, plan.num_samples)] == before
