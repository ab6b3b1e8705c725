"""The engine under random use: whatever comes in whatever order, each request gets what it gets alone.

Two drivers of the same checks (fakes/simulation.py): hypothesis, which shrinks what it finds, and a long plain
simulation, which asserts that it met everything it claims to have tested.
"""

from __future__ import annotations

import os
import random

import pytest
from fakes.chain_hash import COMMON
from fakes.engines import tiny_config
from fakes.simulation import Simulation
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

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

    @initialize(rows=st.integers(3, 5), budget=st.sampled_from([5, 8, 16]), num_blocks=st.sampled_from([6, 8]))
    def start(self, rows: int, budget: int, num_blocks: int) -> None:
        self.simulation = Simulation(
            tiny_config(
                num_blocks=num_blocks, block_size=BLOCK_SIZE, max_num_requests=rows, max_num_batched_tokens=budget
            )
        )

    def _pick(self, number: int) -> str:
        """Any id, those still live first."""
        ids = [*sorted(self.simulation.live), *sorted(self.simulation.ended)]
        return ids[number % len(ids)]

    @rule(prompt=prompts(), params=sampling_params(), priority=st.integers(0, 2), copies=st.integers(1, 3))
    def add(self, prompt: list[int], params: SamplingParams, priority: int, copies: int) -> None:
        for _ in range(copies):
            self.simulation.add(prompt, params, priority=priority)

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


def simulate(simulation: Simulation, rng: random.Random, num_steps: int) -> None:
    """Arrivals a little faster than the pool serves them; a tenth are aborted, a tenth stopped by their text."""
    for _ in range(2 * num_steps):
        if simulation.counts["steps"] == num_steps:
            break
        live = sorted(simulation.live)
        if len(live) < 8 and rng.random() < 0.4:
            length = max(0, BLOCK_SIZE * rng.randint(0, 5) + rng.randint(-1, 1))
            max_tokens = rng.choice([1, 2, 5, 12, 20, None])
            params = SamplingParams(
                max_tokens=max_tokens,
                min_tokens=rng.randint(0, max_tokens or 8),
                temperature=rng.choice([0, 0.7]),
                seed=rng.getrandbits(40),
                stop_token_ids=rng.choice([(), (COMMON,)]),
                logprobs=rng.choice([None, 1]),
            )
            simulation.add([rng.choice([1, 2]) for _ in range(length)], params, priority=rng.choice([0, 1, 1, 1, 1, 2]))
        if live and rng.random() < 0.02:
            simulation.abort(rng.choice(live))
        elif live and rng.random() < 0.02:
            request_id = rng.choice(live)
            simulation.finish(request_id, rng.randint(0, len(simulation.live[request_id].token_ids)))
        simulation.step(fail=rng.choice(["before", "after"]) if rng.random() < 0.003 else "")
    simulation.drain()


def assert_everything_happened(simulation: Simulation, num_steps: int) -> None:
    counts, scheduler = simulation.counts, simulation.engine.scheduler
    assert counts["steps"] >= num_steps
    assert counts["mixed_steps"] > num_steps // 20, "prefill and decode hardly met in a step"
    assert counts["batched_steps"] > num_steps // 4
    assert counts["preemptions"] == scheduler.num_preemptions == simulation.replay.num_preemptions > num_steps // 100
    assert counts["aborts"] == scheduler.num_aborts > num_steps // 200
    assert counts["rejections"] > num_steps // 200
    for what in ("finishes", "errors", "ended by stop", "ended by length"):
        assert counts[what] > num_steps // 400, f"{what}: {counts}"


def test_each_request_gets_its_solo_run_in_a_long_simulation() -> None:
    """Faults 5, 6, 13, 14, 17, 19: no block is stale, foreign or lost, no token dropped or repeated, all progress."""
    simulation = Simulation(tiny_config(num_blocks=8, block_size=BLOCK_SIZE, max_num_requests=4))
    simulate(simulation, random.Random(SEED), 20_000)
    assert_everything_happened(simulation, 20_000)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("num_blocks", [5, 8, 32])
def test_each_request_gets_its_solo_run_for_much_longer(num_blocks: int, seed: int) -> None:
    simulation = Simulation(tiny_config(num_blocks=num_blocks, block_size=BLOCK_SIZE, max_num_requests=5))
    simulate(simulation, random.Random(SEED + seed), 100_000)
    simulation.check_idle()


def test_the_same_inputs_at_the_same_times_leave_the_same_journal() -> None:
    """The scheduler is a function of its inputs, `now` and the results: recordings can be replayed."""
    journals = []
    for _ in range(2):
        simulation = Simulation()
        simulate(simulation, random.Random(SEED), 300)
        journals.append(list(simulation.engine.journal))
    assert len(journals[0]) > 500
    assert journals[0] == journals[1]
