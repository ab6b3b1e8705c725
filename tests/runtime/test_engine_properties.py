"""The engine under random use: whatever comes in whatever order, each request gets what it gets alone.

Two drivers of the same checks (fakes/simulation.py): hypothesis, which shrinks what it finds, and a long plain
simulation (fakes/workload.py), which asserts that it met everything it claims to have tested.
"""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest
from fakes.chain_hash import COMMON
from fakes.engines import tiny_config
from fakes.simulation import Simulation
from fakes.workload import DEAR_COPIES, Workload, simulate
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from mutants import MUTANTS, Mutant, hunt

from pageframe.runtime.block_copy import FREE_COPIES, CopyCosts
from pageframe.runtime.inspection import engine_stats
from pageframe.runtime.request import SamplingParams

SEED = int(os.environ.get("PAGEFRAME_TEST_SEED", "20240607"))
BLOCK_SIZE = 4


def prompts() -> st.SearchStrategy[list[int]]:
    """Two letters, lengths at and beside multiples of the block size, so that prompts share whole blocks or nearly."""
    blocks = st.sampled_from([1, 2, 3, 1, 2, 3, 0, 5])
    lengths = st.builds(lambda blocks, more: max(0, BLOCK_SIZE * blocks + more), blocks, st.integers(-1, 1))
    return st.builds(lambda length, odd: [1 + (place == odd) for place in range(length)], lengths, st.integers(0, 3))


def sampling_params() -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        lambda max_tokens, early, **others: SamplingParams(
            max_tokens=max_tokens, min_tokens=min(early, max_tokens or early), **others
        ),
        max_tokens=st.sampled_from([12, 20, 5, 1, None]),
        early=st.sampled_from([8, 0, 3]),
        n=st.sampled_from([1, 1, 2, 4]),
        temperature=st.sampled_from([0.0, 0.7]),
        top_p=st.sampled_from([0.5, 1.0]),
        top_k=st.sampled_from([-1, 0, 5]),
        seed=st.integers(-(2**63), 2**63 - 1),
        stop_token_ids=st.sampled_from([(), (COMMON,)]),
        ignore_eos=st.booleans(),
        logprobs=st.sampled_from([None, 0, 2]),
    )


class EngineMachine(RuleBasedStateMachine):
    """Requests come, go and are cut short at any moment, in a pool that holds about two of them."""

    @initialize(
        rows=st.integers(3, 5),
        budget=st.sampled_from([5, 8, 16]),
        num_blocks=st.sampled_from([6, 8]),
        host=st.sampled_from([(0, FREE_COPIES), (3, FREE_COPIES), (16, DEAR_COPIES)]),
        window=st.sampled_from([None, 5]),
        slide_by=st.sampled_from([None, 1, 8]),
    )
    def start(
        self,
        rows: int,
        budget: int,
        num_blocks: int,
        host: tuple[int, CopyCosts],
        window: int | None,
        slide_by: int | None,
    ) -> None:
        self.simulation = Simulation(
            tiny_config(
                num_blocks=num_blocks,
                block_size=BLOCK_SIZE,
                max_num_requests=rows,
                max_num_batched_tokens=budget,
                host_slots=host[0],
                copy_costs=host[1],
                window=window,
                slide_by=slide_by,
            )
        )

    def _pick(self, number: int) -> str:
        """Any id, those still live first."""
        ids = [*sorted(self.simulation.live), *sorted(self.simulation.ended)]
        return ids[number % len(ids)]

    @rule(
        prompt=prompts(),
        params=sampling_params(),
        priority=st.integers(0, 2),
        copies=st.integers(1, 3),
        salt=st.sampled_from(["", "", "salt"]),
    )
    def add(self, prompt: list[int], params: SamplingParams, priority: int, copies: int, salt: str) -> None:
        for _ in range(copies):
            self.simulation.add(prompt, params, priority=priority, cache_salt=salt)

    @precondition(lambda self: self.simulation.ended)
    @rule(number=st.integers(0, 5), params=sampling_params())
    def next_turn(self, number: int, params: SamplingParams) -> None:
        ids = sorted(self.simulation.ended)
        ended = self.simulation.ended[ids[number % len(ids)]]
        self.simulation.add([*ended.prompt, *ended.token_ids, 1], params)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.simulation.reset_prefix_cache()

    @precondition(lambda self: self.simulation.live)
    @rule(number=st.integers(0, 5))
    def abort(self, number: int) -> None:
        self.simulation.abort(self._pick(number))

    @precondition(lambda self: self.simulation.live)
    @rule(number=st.integers(0, 5), keep=st.integers(0, 20))
    def finish(self, number: int, keep: int) -> None:
        request_id = self._pick(number)
        expected = self.simulation.live.get(request_id) or self.simulation.ended[request_id]
        self.simulation.finish(request_id, min(keep, len(expected.token_ids)))

    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.simulation.step()

    @precondition(lambda self: len(self.simulation.live) > 1)
    @rule(when=st.sampled_from(["before", "after"]))
    def failing_step(self, when: str) -> None:
        self.simulation.step(fail=when)

    @invariant()
    def blocks_add_up(self) -> None:
        stats = engine_stats(self.simulation.engine)
        blocks = (stats.blocks_free, stats.blocks_cached, stats.blocks_used, stats.blocks_pinned)
        assert min(blocks) >= 0
        assert sum(blocks) == stats.num_blocks

    def teardown(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.drain()


EngineMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
test_engine_state_machine = EngineMachine.TestCase


def assert_everything_happened(counts: Counter[str], num_steps: int) -> None:
    assert counts["steps"] >= num_steps
    assert counts["mixed_steps"] > num_steps // 20, "prefill and decode hardly met in a step"
    assert counts["batched_steps"] > num_steps // 4
    assert counts["preemptions"] == counts["journal: preempt"] > num_steps // 100
    often = (
        "aborts",
        "rejections",
        "journal: hit",
        "journal: fork",
        "never read",
        "miss: differs",
        "miss: partial block",
    )
    for what in often:
        assert counts[what] + counts[f"journal: {what}"] > num_steps // 300, f"{what}: {counts}"
    rarely = (
        *("finishes", "errors", "ended by stop", "ended by length", "resets", "journal: slide", "journal: release"),
        *("journal: pin", "journal: evict", "miss: evicted", "miss: salt", "miss: recompute"),
        *("copies: fork", "copies: to_host", "copies: to_device"),
    )
    for what in rarely:
        assert counts[what] + counts[f"journal: {what}"] > num_steps // 2000, f"{what}: {counts}"


def test_each_request_gets_its_solo_run_in_a_long_simulation() -> None:
    """Faults 5, 6, 7, 9, 10, 13, 14, 17, 19: no block is stale, foreign or lost, no token dropped or repeated, and all
    progress; with hits, forks, host copies, slides and windows, in a hundred random configurations."""
    assert_everything_happened(simulate(SEED, 100_000), 100_000)


@pytest.mark.parametrize("feature", ["plain", "host", "slide", "window"])
def test_any_one_allocation_may_fail(feature: str) -> None:
    """Out of blocks where nobody expects it: whoever asked waits or gives way, and all get what they get alone."""
    features: dict[str, dict[str, int]] = {"host": {"host_slots": 4}, "slide": {"slide_by": 8}, "window": {"window": 5}}
    for number in range(1000):
        simulation = Simulation(tiny_config(**features.get(feature, {})), fail_allocation=number)
        Workload(simulation, random.Random(SEED)).run(40)
        if simulation.counts["allocations"] <= number:
            break
    assert number > 30, "hardly an allocation was made"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_known_bug_put_back_is_noticed(mutant: Mutant) -> None:
    assert hunt(mutant) is not None, f"10,000 steps with a bug, and nothing was noticed: {mutant.name}"


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
def test_each_request_gets_its_solo_run_for_much_longer(seed: int) -> None:
    simulate(SEED + 1 + seed, 100_000)


def test_the_same_inputs_at_the_same_times_leave_the_same_journal() -> None:
    """The scheduler is a function of its inputs, `now` and the results: recordings can be replayed."""
    journals = []
    for _ in range(2):
        simulation = Simulation(tiny_config(host_slots=4))
        Workload(simulation, random.Random(SEED)).run(300)
        journals.append(list(simulation.engine.journal))
    assert len(journals[0]) > 500
    assert journals[0] == journals[1]
