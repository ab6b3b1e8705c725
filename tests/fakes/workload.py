"""Whole workloads from one seed: a random configuration, arrivals, aborts, stop strings, resets and faults.

Everything comes from the seed, so that a violation is met again by running the seed again.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from fakes.chain_hash import COMMON
from fakes.engines import tiny_config
from fakes.simulation import Simulation
from pageframe.runtime.block_copy import FREE_COPIES, CopyCosts
from pageframe.runtime.config import ResolvedConfig
from pageframe.runtime.request import SamplingParams

#: A block of 4 tokens is copied, if all that lies behind it is, or computed.
DEAR_COPIES = CopyCosts(per_block=10.0, per_token=2.0)


def random_config(rng: random.Random) -> ResolvedConfig:
    """Pools that hold about two requests at once, and every feature on and off."""
    block_size = rng.choice([1, 2, 4, 4, 4, 8])
    num_blocks = rng.choice([32, 40, 64]) // block_size
    rows = rng.randint(3, 6)
    prefix_cache = rng.random() < 0.9
    slides = rng.random() < 0.3
    max_model_len = num_blocks * block_size - rng.choice([0, 0, 3])
    return tiny_config(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_requests=rows,
        max_num_batched_tokens=rng.choice([rows, 8, 16]),
        max_model_len=max_model_len,
        prefix_cache=prefix_cache,
        host_slots=rng.choice([0, 2, 5, 16]) if prefix_cache else 0,
        copy_costs=rng.choice([FREE_COPIES, DEAR_COPIES]),
        window=rng.choice([None, None, 5, 9]),
        slide_by=rng.choice([1, 4, max_model_len // 2]) if slides else None,
        mixed_token_budget=rng.choice([None, 1, 5]),
    )


@dataclass
class Workload:
    """Drives a simulation with random clients, a little faster than the pool serves them."""

    simulation: Simulation
    rng: random.Random
    on_step: Callable[[int], None] = lambda num_steps: None
    prompts: list[list[int]] = field(default_factory=list)

    def run(self, num_steps: int) -> None:
        """That many steps with work, then all that is left is served."""
        simulation, rng = self.simulation, self.rng
        goal = simulation.counts["steps"] + num_steps
        for _ in range(3 * num_steps):
            if simulation.counts["steps"] >= goal:
                break
            self.on_step(simulation.counts["steps"])
            self._arrive()
            self._interfere()
            chance = rng.random()
            simulation.step(
                fail=rng.choice(["before", "after"]) if chance < 0.004 else "copies" if chance < 0.1 else ""
            )
        simulation.drain()

    def _arrive(self) -> None:
        simulation, rng = self.simulation, self.rng
        if len(simulation.live) >= 10 or rng.random() > 0.4:
            return
        max_tokens = rng.choice([1, 2, 5, 12, 20, None])
        if max_tokens and simulation.resolved.slide_by and rng.random() < 0.2:
            max_tokens += simulation.resolved.max_model_len
        params = SamplingParams(
            n=rng.choice([1, 1, 1, 1, 2, 3, 7]),
            max_tokens=max_tokens,
            min_tokens=rng.randint(0, min(max_tokens or 8, 8)),
            temperature=rng.choice([0, 0.7]),
            seed=rng.getrandbits(40),
            stop_token_ids=rng.choice([(), (COMMON,)]),
            logprobs=rng.choice([None, 1]),
        )
        simulation.add(
            self._prompt(),
            params,
            tenant=rng.choice(["", "", "", "another"]),
            cache_salt=rng.choice(["", "", "", "salt"]),
            priority=rng.choice([0, 1, 1, 1, 1, 2]),
            reads=rng.random() < 0.9,
        )

    def _prompt(self) -> list[int]:
        """Two letters; often one seen before, or a finished chat's next turn."""
        rng, block_size = self.rng, self.simulation.resolved.block_size
        kind = rng.random()
        if kind < 0.3 and self.prompts:
            return rng.choice(self.prompts)
        if kind < 0.45 and self.simulation.ended:
            ended = rng.choice(list(self.simulation.ended.values()))
            return [*ended.prompt, *ended.token_ids, rng.choice([1, 2])]
        length = max(0, block_size * rng.randint(0, 20 // block_size) + rng.randint(-1, 1))
        prompt = [rng.choice([1, 1, 1, 2]) for _ in range(length)]
        self.prompts = [*self.prompts[-4:], prompt]
        return prompt

    def _interfere(self) -> None:
        simulation, rng = self.simulation, self.rng
        live = sorted(simulation.live)
        if not live:
            return
        chance = rng.random()
        if chance < 0.025:
            simulation.abort(rng.choice(live))
        elif chance < 0.045:
            request_id = rng.choice(live)
            simulation.finish(request_id, rng.randint(0, len(simulation.live[request_id].token_ids)))
        elif chance < 0.048:
            simulation.reset_prefix_cache()


def simulate(seed: int, num_steps: int, on_step: Callable[[int], None] = lambda num_steps: None) -> Counter[str]:
    """Run random configurations one after the other until `num_steps` are made; what happened. Before each step
    `on_step` hears how many were made.

    Raises:
        AssertionError: a violation.
    """
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    while counts["steps"] < num_steps:
        simulation, before = Simulation(random_config(rng)), counts["steps"]
        workload = Workload(simulation, rng, on_step=lambda done, before=before: on_step(before + done))
        workload.run(min(1000, num_steps - before))
        counts += simulation.counts
        counts += Counter({f"journal: {kind}": count for kind, count in simulation.replay.counts.items()})
        counts += Counter({f"copies: {kind.value}": count for kind, count in simulation.model.num_copies.items()})
    return counts
