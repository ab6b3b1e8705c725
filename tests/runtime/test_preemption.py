"""Who loses its blocks, for whom, and that it goes on later as if nothing had happened.

The scheduler runs alone here; each step draws the same token for whoever samples.
"""

from __future__ import annotations

from fakes.scheduling import TOKEN, add_request, events, make_scheduler, run_step, run_until_done, shares

from pageframe.runtime.journal import AllocateEvent, PreemptEvent
from pageframe.runtime.request import RequestStatus


def test_the_victim_is_the_last_in_the_order_and_keeps_its_tokens() -> None:
    """Fault 14. Three requests of two blocks fill the pool; the first to need a third block takes the last's."""
    scheduler = make_scheduler(num_blocks=6, max_num_requests=3, max_num_batched_tokens=64)
    for name in ("a", "b", "c"):
        add_request(scheduler, name, 6, max_tokens=9)
    for _ in range(3):
        plan, _ = run_step(scheduler)
        assert plan.preempted == ()
    plan, _ = run_step(scheduler)
    assert plan.preempted == ("c",)
    (event,) = events(scheduler, PreemptEvent)
    assert (event.request_id, event.for_request, event.num_computed_tokens) == ("c", "a", 8)
    victim = scheduler.find("c")
    assert victim is not None
    assert (victim.status, victim.row, victim.num_preemptions) == (RequestStatus.WAITING, -1, 1)
    assert victim.token_ids.tolist() == [1] * 6 + [TOKEN] * 3
    assert run_until_done(scheduler, victim, limit=20) > 0
    assert victim.token_ids.tolist() == [1] * 6 + [TOKEN] * 9


def test_the_last_in_the_order_preempts_itself_and_finishes_later() -> None:
    """Fault 15: who needs a block while it is the last gives its own back, and nothing trips."""
    scheduler = make_scheduler(num_blocks=6, max_num_requests=2, max_num_batched_tokens=64, max_model_len=24)
    first = add_request(scheduler, "first", 13, max_tokens=7)
    last = add_request(scheduler, "last", 6, max_tokens=8)
    for _ in range(4):
        run_step(scheduler)
    (event,) = events(scheduler, PreemptEvent)
    assert (event.request_id, event.for_request) == ("last", "last")
    assert first.status is RequestStatus.RUNNING
    run_until_done(scheduler, last, limit=30)
    assert first.num_preemptions == 0
    assert last.token_ids.tolist() == [1] * 6 + [TOKEN] * 8


def test_a_request_that_fills_the_pool_to_the_last_slot_finishes() -> None:
    """Fault 15: alone, it never lacks a block."""
    scheduler = make_scheduler(num_blocks=4, max_num_batched_tokens=16)
    request = add_request(scheduler, "a", 3, max_tokens=13)
    assert run_until_done(scheduler, request, limit=13) == 13
    assert request.num_preemptions == 0
    assert scheduler.allocator.num_used == 0


def test_two_requests_of_60_percent_of_the_pool_finish_one_after_the_other() -> None:
    """Fault 19: neither takes the other's blocks back; each step computes something, the first's token always."""
    scheduler = make_scheduler(num_blocks=10, max_num_requests=2, max_num_batched_tokens=64)
    first = add_request(scheduler, "first", 4, max_tokens=20)
    second = add_request(scheduler, "second", 4, max_tokens=20)
    for _ in range(20):
        _, outputs = run_step(scheduler)
        assert "first" in [output.request_id for output in outputs]
    assert first.status is RequestStatus.FINISHED
    assert second.num_preemptions == 1
    assert run_until_done(scheduler, second, limit=20) <= 10
    assert (first.num_preemptions, scheduler.num_preemptions) == (0, 1)


def test_two_long_prompts_never_hold_half_of_what_the_other_needs() -> None:
    """Fault 17: a prompt enters with blocks for all of it, or not at all."""
    scheduler = make_scheduler(num_blocks=8, max_num_batched_tokens=4)
    first = add_request(scheduler, "first", 24, max_tokens=2)
    second = add_request(scheduler, "second", 24, max_tokens=2)
    run_step(scheduler)
    assert scheduler.allocator.num_used == 7
    assert second.status is RequestStatus.WAITING
    assert run_until_done(scheduler, second, limit=2 * (24 // 4 + 2)) > 0
    assert (first.num_preemptions, second.num_preemptions) == (0, 0)


def test_a_request_of_higher_priority_gets_the_blocks_of_the_last_in_the_order() -> None:
    """Only of as many as it needs, from the end; they resume with all their tokens."""
    scheduler = make_scheduler(num_blocks=8, max_num_requests=4, max_num_batched_tokens=64)
    for letter, name in enumerate(("a", "b", "c"), 1):
        add_request(scheduler, name, [letter] * 5, max_tokens=6, priority=1)
    run_step(scheduler)
    urgent = add_request(scheduler, "urgent", [9] * 8, max_tokens=2, priority=0)
    plan, outputs = run_step(scheduler)
    assert plan.preempted == ("c",)
    assert "urgent" in [output.request_id for output in outputs]
    (event,) = events(scheduler, PreemptEvent)
    assert (event.request_id, event.for_request) == ("c", "urgent")
    run_until_done(scheduler, urgent, limit=1)
    victim = scheduler.find("c")
    assert victim is not None
    run_until_done(scheduler, victim, limit=12)
    assert victim.token_ids.tolist() == [3] * 5 + [TOKEN] * 6
    assert victim.num_preemptions == 1


def test_a_request_of_higher_priority_gets_a_row() -> None:
    scheduler = make_scheduler(max_num_requests=2)
    for name in ("a", "b"):
        add_request(scheduler, name, 2, max_tokens=6, priority=1)
    run_step(scheduler)
    add_request(scheduler, "urgent", 2, max_tokens=2, priority=0)
    plan, _ = run_step(scheduler)
    assert plan.preempted == ("b",)
    assert shares(plan) == {"urgent": 2, "a": 1}


def test_none_is_preempted_in_vain_or_for_a_later_request() -> None:
    scheduler = make_scheduler(num_blocks=8)
    add_request(scheduler, "first", [1] * 17, max_tokens=3, priority=0)
    add_request(scheduler, "last", [2] * 5, max_tokens=3, priority=2)
    run_step(scheduler)
    # 1 free block and the last one's 2 are not enough for this one, though it stands before the last.
    large = add_request(scheduler, "large", [3] * 16, max_tokens=1, priority=1)
    plan, _ = run_step(scheduler)
    assert (plan.preempted, large.status) == ((), RequestStatus.WAITING)
    # And a later one takes nothing from those before it.
    later = add_request(scheduler, "later", [4] * 6, max_tokens=1, priority=3)
    plan, _ = run_step(scheduler)
    assert (plan.preempted, later.status) == ((), RequestStatus.WAITING)


def test_an_entry_of_the_block_table_has_one_update_where_its_row_changes_hands_within_a_step() -> None:
    """The victim's newest block and the next owner's block of the same index are both written in this step."""
    scheduler = make_scheduler(num_blocks=4, max_num_requests=2)
    add_request(scheduler, "victim", 3, max_tokens=9, priority=1)
    run_step(scheduler)
    run_step(scheduler)
    add_request(scheduler, "urgent", 10, max_tokens=2)
    plan, _ = run_step(scheduler)
    assert plan.preempted == ("victim",)
    assert [event.first_index for event in events(scheduler, AllocateEvent)] == [0, 1, 0]
    updates = plan.table_updates
    entries = dict(
        zip(zip(updates.rows.tolist(), updates.indices.tolist(), strict=True), updates.block_ids.tolist(), strict=True)
    )
    assert len(entries) == len(updates)
    row = int(plan.rows[0])
    assert [entries[row, index] for index in range(3)] == scheduler.tables.block_ids(row)
