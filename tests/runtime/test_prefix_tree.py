"""The prefix cache as chains: the same blocks as the index, cut where requests part."""

from __future__ import annotations

import random
from typing import Any

import pytest
from fakes.engines import tiny_config
from fakes.simulation import Simulation
from fakes.workload import Workload, random_config

from pageframe.runtime.inspection import inspect
from pageframe.runtime.request import SamplingParams


def chains(simulation: Simulation, limit: int = 10_000) -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = inspect(simulation.engine, "prefixes", str(limit))["nodes"]
    return nodes


def serve(simulation: Simulation, prompt: list[int], **fields: Any) -> None:
    simulation.add(prompt, SamplingParams(max_tokens=1), **fields)
    simulation.drain()


def test_two_prompts_with_a_common_beginning_are_a_trunk_with_two_branches() -> None:
    simulation = Simulation(tiny_config(num_blocks=16, block_size=4))
    serve(simulation, [1] * 8 + [2] * 8 + [9])
    serve(simulation, [1] * 8 + [3] * 4 + [9])
    serve(simulation, [1] * 8 + [3] * 4 + [9])
    trunk, *branches = sorted(chains(simulation), key=lambda node: node["id"])
    assert (trunk["parent"], trunk["blocks"], trunk["hits"]) == (None, [0, 1], 2)
    assert [(node["parent"], node["num_blocks"], node["hits"]) for node in branches] == [
        (trunk["id"], 2, 0),
        (trunk["id"], 1, 1),
    ]
    assert trunk["requests"] == []
    # The branch used first goes first, and a chain's tail before its head.
    order = simulation.engine.scheduler.allocator.eviction_order()
    assert order.index(branches[0]["blocks"][1]) == branches[0]["evicts_at"] == 0
    assert trunk["evicts_at"] > branches[0]["evicts_at"]


def test_live_requests_hang_on_what_they_share() -> None:
    simulation = Simulation(tiny_config(num_blocks=16, block_size=4, max_num_requests=4))
    serve(simulation, [1] * 8 + [9])
    for last in (4, 5):
        simulation.add([1] * 8 + [last] * 6, SamplingParams(max_tokens=8, ignore_eos=True))
    simulation.step()
    simulation.step()
    trunk, *branches = sorted(chains(simulation), key=lambda node: node["id"])
    assert sorted(trunk["requests"]) == ["r1", "r2"]
    assert sorted(node["requests"] for node in branches) == [["r1"], ["r2"]]
    assert {node["evicts_at"] for node in (trunk, *branches)} == {None}


def test_salts_have_trees_of_their_own() -> None:
    simulation = Simulation(tiny_config(num_blocks=16, block_size=4))
    serve(simulation, [1] * 9)
    serve(simulation, [1] * 9, cache_salt="other")
    nodes = chains(simulation)
    assert [node["parent"] for node in nodes] == [None, None]
    assert len({node["digest"] for node in nodes}) == 2


def test_of_many_chains_those_used_last_are_told_with_what_they_hang_from() -> None:
    simulation = Simulation(tiny_config(num_blocks=32, block_size=4))
    for first in range(1, 7):
        serve(simulation, [first] * 4 + [9])
    for last in (7, 8):
        serve(simulation, [3] * 4 + [last] * 4 + [9])
    answer = inspect(simulation.engine, "prefixes", "1")
    trunk, branch = answer["nodes"]
    assert (trunk["parent"], trunk["hits"]) == (None, 2)
    assert (branch["parent"], branch["num_blocks"]) == (trunk["id"], 1)
    assert answer["left_out"] == 5 + 1


def test_without_a_prefix_cache_there_is_no_tree() -> None:
    simulation = Simulation(tiny_config(prefix_cache=False))
    serve(simulation, [1] * 9)
    assert chains(simulation) == []


@pytest.mark.parametrize("seed", range(4))
def test_the_chains_hold_every_indexed_block_once(seed: int) -> None:
    rng = random.Random(seed)
    simulation = Simulation(random_config(rng))
    most = 0

    def look(num_steps: int) -> None:
        nonlocal most
        if num_steps % 7:
            return
        nodes, scheduler = chains(simulation), simulation.engine.scheduler
        ids = {node["id"] for node in nodes}
        assert all(node["parent"] is None or node["parent"] in ids for node in nodes)
        blocks = [block_id for node in nodes for block_id in node["blocks"] if block_id >= 0]
        indexed = [block_id for block_id in range(scheduler.allocator.num_blocks) if is_indexed(simulation, block_id)]
        assert sorted(blocks) == indexed
        most = max(most, len(nodes))

    Workload(simulation, rng, on_step=look).run(150)
    assert most > 2 or not simulation.resolved.prefix_cache


def is_indexed(simulation: Simulation, block_id: int) -> bool:
    return simulation.engine.scheduler.allocator.is_indexed(block_id)
