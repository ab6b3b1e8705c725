"""One step's arrays: a mixed step worked out by hand, and any step against plain loops."""

from __future__ import annotations

import random

import numpy as np
from fakes.chain_hash import check_batch
from fakes.scheduling import TOKEN, add_request, make_request, make_scheduler

from pageframe.runtime.batch import Batch
from pageframe.runtime.block_copy import CopyKind
from pageframe.runtime.journal import Journal
from pageframe.runtime.request import SamplingParams, choice_ids
from pageframe.runtime.scheduler import Scheduler
from pageframe.runtime.step_plan import StepPlan, StepResult


def build(scheduler: Scheduler) -> tuple[Batch, StepPlan]:
    plan = scheduler.schedule(float(scheduler.step + 1))
    return Batch.build(plan, scheduler.rows, scheduler.tables), plan


def complete(scheduler: Scheduler, plan: StepPlan) -> None:
    tokens = np.full(int(plan.num_samples.sum()), TOKEN, dtype=np.int32)
    scheduler.update(plan, StepResult(tokens, {}), float(scheduler.step))


def test_a_mixed_step_by_hand() -> None:
    """A decoding request in row 0, a prompt of 11 in the middle in row 1, a whole prompt of 3 in row 2."""
    scheduler = make_scheduler(num_blocks=16, max_num_requests=4, max_num_batched_tokens=8)
    add_request(scheduler, "decoding", 4, max_tokens=5, priority=1)
    _, plan = build(scheduler)
    complete(scheduler, plan)
    add_request(scheduler, "middle", list(range(100, 111)), max_tokens=2)
    batch, plan = build(scheduler)
    assert batch.token_ids.tolist() == [TOKEN, *range(100, 107)]
    complete(scheduler, plan)
    add_request(scheduler, "whole", [50, 51, 52], max_tokens=2)
    batch, plan = build(scheduler)

    assert [request.request_id for request in plan.requests] == ["decoding", "middle", "whole"]
    assert scheduler.tables.table[:3, :3].tolist() == [[0, 1, -1], [2, 3, 4], [5, -1, -1]]
    assert batch.token_ids.tolist() == [TOKEN, 107, 108, 109, 110, 50, 51, 52]
    assert batch.positions.tolist() == [5, 7, 8, 9, 10, 0, 1, 2]
    assert batch.slots.tolist() == [1 * 4 + 1, 3 * 4 + 3, 4 * 4, 4 * 4 + 1, 4 * 4 + 2, 5 * 4, 5 * 4 + 1, 5 * 4 + 2]
    assert batch.query_start.tolist() == [0, 1, 5, 8]
    assert batch.context_lens.tolist() == [6, 11, 3]
    assert batch.rows.tolist() == [0, 1, 2]
    assert batch.num_decode == 1
    assert batch.wanted.tolist() == [0, 4, 7]
    assert batch.sampling.output_index.tolist() == [2, 0, 0]
    assert [len(batch.table_updates), batch.table_updates.block_ids.tolist()] == [1, [5]]


def test_the_arrays_have_the_types_that_runners_expect() -> None:
    scheduler = make_scheduler()
    add_request(scheduler, "a", 3, max_tokens=2)
    batch, _ = build(scheduler)
    assert {values.dtype.name for values in (batch.token_ids, batch.positions, batch.slots, batch.wanted)} == {"int64"}
    assert {values.dtype.name for values in (batch.query_start, batch.context_lens, batch.rows)} == {"int32"}
    sampling = batch.sampling
    assert [values.dtype.name for values in (sampling.temperature, sampling.top_p, sampling.min_p)] == ["float32"] * 3
    assert [values.dtype.name for values in (sampling.top_k, sampling.num_logprobs)] == ["int32"] * 2
    assert [values.dtype.name for values in (sampling.seed, sampling.output_index)] == ["int64"] * 2


def test_each_wanted_token_comes_with_its_own_requests_parameters() -> None:
    """The unfinished prompt wants nothing, so parameters and requests do not stand at the same indices."""
    scheduler = make_scheduler(num_blocks=32, max_num_requests=4, max_num_batched_tokens=8)
    wanted = {
        "a": SamplingParams(
            max_tokens=9, min_tokens=1, temperature=0.5, top_k=-1, top_p=0.25, min_p=0.125, logprobs=None
        ),
        "c": SamplingParams(max_tokens=9, temperature=2, top_k=2**40, top_p=1, min_p=0, logprobs=3),
    }
    scheduler.add([make_request("a", [1], wanted["a"], arrival=0, seed=-5, stop_ids={2, 4})], 0.0)
    scheduler.add([make_request("b", [1] * 20, SamplingParams(max_tokens=1), arrival=1)], 0.0)
    scheduler.add([make_request("c", [1, 1], wanted["c"], arrival=2, seed=2**63 - 1)], 0.0)
    batch, plan = build(scheduler)
    assert [request.request_id for request in plan.requests] == ["a", "b", "c"]
    sampling = batch.sampling
    assert len(sampling) == len(batch.wanted) == 2
    assert batch.wanted.tolist() == [0, 7]
    assert sampling.temperature.tolist() == [0.5, 2]
    assert sampling.top_k.tolist() == [0, 2**31 - 1]
    assert sampling.top_p.tolist() == [0.25, 1]
    assert sampling.min_p.tolist() == [0.125, 0]
    assert sampling.num_logprobs.tolist() == [-1, 3]
    assert sampling.seed.tolist() == [-5, 2**63 - 1]
    assert [(index, set(ids)) for index, ids in sampling.banned] == [(0, {2, 4})]


def test_a_step_that_only_decodes_wants_all_its_tokens_and_plain_rows_are_told_from_others() -> None:
    """A request that wants something special takes the shortcut from all in its step, and gives it back as it ends."""
    greedy = SamplingParams(temperature=0, max_tokens=9)
    for special in (
        SamplingParams(temperature=0.5, max_tokens=2),
        SamplingParams(temperature=0, logprobs=0, max_tokens=2),
        SamplingParams(temperature=0, min_tokens=2, max_tokens=2),
        SamplingParams(temperature=0, frequency_penalty=1, max_tokens=2),
    ):
        scheduler = make_scheduler(num_blocks=32, max_num_requests=4, max_num_batched_tokens=8)
        scheduler.add([make_request("plain", [1] * 3, greedy, arrival=0, stop_ids={9})], 0.0)
        scheduler.add([make_request("special", [1] * 3, special, arrival=1, stop_ids={9})], 0.0)
        seen = []
        for _ in range(3):
            batch, plan = build(scheduler)
            check_batch(batch)
            seen.append((len(batch.sampling), batch.wants_all, batch.sampling.all_plain))
            complete(scheduler, plan)
        assert seen == [(2, False, False), (2, True, False), (1, True, True)], special


def test_stop_ids_may_be_drawn_from_min_tokens_on() -> None:
    scheduler = make_scheduler()
    params = SamplingParams(max_tokens=5, min_tokens=2)
    scheduler.add([make_request("a", [1, 1], params, arrival=0, stop_ids={9})], 0.0)
    banned = []
    for _ in range(4):
        batch, plan = build(scheduler)
        banned.append(batch.sampling.banned)
        complete(scheduler, plan)
    assert banned == [((0, (9,)),), ((0, (9,)),), (), ()]


def test_choices_draw_from_one_hidden_state_each_with_its_own_seed() -> None:
    """Between two others that draw one token each; all but the seed is the request's."""
    scheduler = make_scheduler(num_blocks=32, max_num_requests=8, max_num_batched_tokens=16)
    params = SamplingParams(n=3, max_tokens=9, temperature=0.5, min_tokens=1)
    choices = [
        make_request(name, [1, 2], params, arrival=1 + index, seed=20 + index, stop_ids={4})
        for index, name in enumerate(choice_ids("r", 3))
    ]
    scheduler.add([make_request("before", [5], SamplingParams(max_tokens=9), arrival=0, seed=10)], 0.0)
    scheduler.add(choices, 0.0)
    scheduler.add([make_request("behind", [6] * 3, SamplingParams(max_tokens=9), arrival=4, seed=30)], 0.0)
    batch, plan = build(scheduler)
    assert [request.request_id for request in plan.requests] == ["before", "r-0", "behind"]
    assert batch.wanted.tolist() == [0, 2, 2, 2, 5]
    sampling = batch.sampling
    assert sampling.seed.tolist() == [10, 20, 21, 22, 30]
    assert sampling.temperature.tolist() == [1, 0.5, 0.5, 0.5, 1]
    assert sampling.output_index.tolist() == [0] * 5
    assert sampling.banned == ((1, (4,)), (2, (4,)), (3, (4,)))
    assert scheduler.rows.seed[plan.rows].tolist() == [10, 20, 30], "the rows keep theirs"
    complete(scheduler, plan)
    batch, plan = build(scheduler)
    assert batch.sampling.seed.tolist() == [10, 20, 21, 22, 30]
    assert batch.sampling.output_index.tolist() == [1] * 5
    assert batch.copies == plan.copies
    assert [copy.kind for copy in batch.copies] == [CopyKind.FORK] * 2


def test_a_hit_computes_only_the_rest_at_its_own_positions() -> None:
    scheduler = make_scheduler(num_blocks=8, max_num_batched_tokens=16)
    add_request(scheduler, "first", list(range(100, 110)), max_tokens=1)
    complete(scheduler, build(scheduler)[1])
    add_request(scheduler, "second", [*range(100, 108), 50, 51], max_tokens=2)
    batch, plan = build(scheduler)
    assert batch.token_ids.tolist() == [50, 51]
    assert batch.positions.tolist() == [8, 9]
    assert batch.context_lens.tolist() == [10]
    block_ids = scheduler.tables.block_ids(plan.requests[0].row)
    assert batch.slots.tolist() == [block_ids[2] * 4, block_ids[2] * 4 + 1]
    updates = batch.table_updates
    assert updates.block_ids.tolist() == block_ids, "the shared blocks are told to the device too"


def test_a_slid_context_draws_on_with_the_whole_requests_output() -> None:
    """The noise's index and min_tokens count all output tokens; positions are those of the new context."""
    scheduler = Scheduler(
        num_blocks=4,
        block_size=4,
        max_num_requests=1,
        max_num_batched_tokens=16,
        max_model_len=8,
        slide_by=6,
        journal=Journal(),
    )
    params = SamplingParams(max_tokens=12, min_tokens=7)
    scheduler.add([make_request("a", [1] * 4, params, arrival=0, stop_ids={9})], 0.0)
    drawn = []
    while scheduler.has_work:
        batch, plan = build(scheduler)
        drawn.append((batch.positions.tolist()[-1], batch.sampling.output_index.tolist(), bool(batch.sampling.banned)))
        complete(scheduler, plan)
    # The 9th token of the context makes it slide: 3 are left, computed anew.
    positions = [3, 4, 5, 6, 7, 2, 3, 4, 5, 6, 7, 2]
    assert drawn == [(position, [index], index < 7) for index, position in enumerate(positions)]


def test_any_step_is_what_loops_over_requests_and_tokens_give() -> None:
    rng = random.Random(3)
    scheduler = make_scheduler(num_blocks=12, max_num_requests=5, max_num_batched_tokens=11)
    num_tokens = 0
    for number in range(120):
        if scheduler.num_waiting < 2:
            prompt = [rng.randrange(1000) for _ in range(rng.randint(1, 30))]
            add_request(scheduler, f"r{number}", prompt, max_tokens=rng.randint(1, 48 - len(prompt)))
        batch, plan = build(scheduler)
        check_batch(batch)
        expected: list[tuple[int, int, int]] = []
        for request, start, count in zip(
            plan.requests, plan.starts.tolist(), plan.num_new_tokens.tolist(), strict=True
        ):
            block_ids = scheduler.tables.block_ids(request.row)
            for position in range(start, start + count):
                token = int(scheduler.rows.token_ids[request.row, position])
                expected.append((token, position, block_ids[position // 4] * 4 + position % 4))
        columns = (batch.token_ids.tolist(), batch.positions.tolist(), batch.slots.tolist())
        assert list(zip(*columns, strict=True)) == expected
        num_tokens += len(expected)
        complete(scheduler, plan)
    assert num_tokens > 300
    assert scheduler.num_preemptions > 0
