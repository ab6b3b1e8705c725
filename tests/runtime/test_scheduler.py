"""The order of service, chunks, admission and endings, by hand and with known values.

The scheduler runs alone here; each step draws the same token for whoever samples.
"""

from __future__ import annotations

import numpy as np
import pytest
from fakes.scheduling import TOKEN, add_request, events, make_scheduler, run_step, run_until, run_until_done, shares

from pageframe.runtime.journal import AdmitEvent, ChunkEvent, FinishEvent, Journal
from pageframe.runtime.request import FinishReason, RequestStatus
from pageframe.runtime.scheduler import Scheduler

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
    large = add_request(scheduler, "large", 20, max_tokens=2)
    small = add_request(scheduler, "small", 2, max_tokens=2)
    for _ in range(6):
        assert running.status is RequestStatus.RUNNING
        assert scheduler.allocator.num_free >= 1
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
        waiting = add_request(scheduler, "waiting", num_tokens, max_tokens=1)
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
    outputs = scheduler.fail(plan.requests, "why", 1.0)
    assert [(output.request_id, output.finish_reason, output.error) for output in outputs] == [("a", "error", "why")]
    scheduler.check_invariants()
    assert scheduler.num_running == 2
    plan, _ = run_step(scheduler)
    updates = plan.table_updates
    sent = set(zip(updates.rows.tolist(), updates.indices.tolist(), updates.block_ids.tolist(), strict=True))
    for request in scheduler.live_requests():
        assert {(request.row, *entry) for entry in enumerate(scheduler.tables.block_ids(request.row))} <= sent


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
    assert scheduler.num_waits == {"queue": 3, "blocks": 0, "rows": 0, "budget": 0}
    run_step(scheduler)
    assert scheduler.num_waits == {"queue": 3, "blocks": 0, "rows": 1, "budget": 0}
    add_request(scheduler, "d", 9, max_tokens=1, priority=-1)
    run_step(scheduler)
    # "d" queued, "c" was first no more, "b" and "a" gave their blocks to "d"; then "a" was first and found too few.
    assert scheduler.num_waits == {"queue": 7, "blocks": 1, "rows": 1, "budget": 0}


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


def test_a_live_id_is_not_added_again_and_nothing_that_never_fits_is_let_in() -> None:
    """Faults 3 and 16: both are refused before the scheduler is asked."""
    scheduler = make_scheduler(num_blocks=2)
    add_request(scheduler, "a", 2, max_tokens=2)
    with pytest.raises(AssertionError, match="live already"):
        add_request(scheduler, "a", 2, max_tokens=2)
    with pytest.raises(AssertionError, match="never fit"):
        add_request(scheduler, "b", 2, max_tokens=7)
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
