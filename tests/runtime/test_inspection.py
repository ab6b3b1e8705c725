"""What the glass box answers, compared with the state it claims to show, and with values worked out by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fakes.engines import tiny_config
from fakes.simulation import Simulation

from pageframe.runtime.errors import InvalidRequestError, RequestNotFoundError
from pageframe.runtime.inspection import engine_stats, inspect
from pageframe.runtime.request import SamplingParams


def add(simulation: Simulation, num_tokens: int, max_tokens: int, **changes: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    simulation.add(range(10, 10 + num_tokens), params, **changes)


def two_requests() -> Simulation:
    """r0: 10 prompt tokens, all computed, 1 token drawn; r1: 6 prompt tokens, 3 of them computed."""
    simulation = Simulation(tiny_config(num_blocks=8, block_size=4, max_num_batched_tokens=4))
    add(simulation, 10, 3)
    for _ in range(3):
        simulation.step()
    add(simulation, 6, 3)
    simulation.step()
    return simulation


def test_kv_by_hand() -> None:
    simulation = two_requests()
    assert inspect(simulation.engine, "kv") == {
        "step": 4,
        "block_size": 4,
        "num_blocks": 8,
        "blocks": {"free": 3, "cached": 0, "used": 5, "pinned": 0},
        # r0 has 12 tokens, of which 11 are written; r1 has 6, of which 3; five blocks have 20 slots.
        "slots": {"written": 14, "wasted": 2},
        "blocks_saved_by_sharing": 0,
        "bytes": {"pool": 2048, "per_block": 256, "per_token": 64},
        "requests": {"running": 2, "waiting": 0},
        "preemptions": 0,
    }


def test_blocks_by_hand() -> None:
    answer = inspect(two_requests().engine, "blocks")
    assert answer["step"] == 4
    assert [block["id"] for block in answer["blocks"]] == list(range(8))
    seen = [(block["state"], block["ref_count"], block["owners"], block["filled"]) for block in answer["blocks"]]
    assert seen == [
        ("used", 1, ["r0"], 4),
        ("used", 1, ["r0"], 4),
        ("used", 1, ["r0"], 3),
        ("used", 1, ["r1"], 3),
        ("used", 1, ["r1"], 0),
        *[("free", 0, [], 0)] * 3,
    ]


def test_requests_by_hand() -> None:
    simulation = two_requests()
    answer = inspect(simulation.engine, "requests")
    assert answer["step"] == 4
    first, second = answer["requests"]
    assert (first["id"], first["status"], first["num_tokens"], first["num_computed_tokens"]) == (
        "r0",
        "running",
        12,
        11,
    )
    assert (first["num_prompt_tokens"], first["num_output_tokens"], first["block_table"]) == (10, 2, [0, 1, 2])
    assert (second["num_tokens"], second["num_computed_tokens"], second["block_table"]) == (6, 3, [3, 4])
    assert first["timings"] == {
        "arrived": 1000.0,
        "first_scheduled": pytest.approx(1000.01),
        "first_token": pytest.approx(1000.03),
        "finished": None,
    }
    assert inspect(simulation.engine, "request", "r1") == {"step": 4, "now": answer["now"], **second}
    assert answer["now"] == pytest.approx(1000.04)


def test_a_request_that_has_ended_can_still_be_asked_about() -> None:
    simulation = two_requests()
    simulation.drain()
    answer = inspect(simulation.engine, "request", "r0")
    assert (answer["status"], answer["finish_reason"], answer["num_output_tokens"]) == ("finished", "length", 3)
    assert (answer["row"], answer["block_table"]) == (None, [])
    assert answer["timings"]["finished"] is not None
    assert inspect(simulation.engine, "requests")["requests"] == []
    with pytest.raises(RequestNotFoundError, match="'r'"):
        inspect(simulation.engine, "request", "r")


def test_waits_name_what_was_needed_and_what_was_free() -> None:
    simulation = Simulation(tiny_config(num_blocks=8, block_size=4, max_num_batched_tokens=32))
    add(simulation, 17, 4)
    simulation.step()
    add(simulation, 16, 2)
    add(simulation, 1, 1)
    simulation.step()
    blocked, behind = (inspect(simulation.engine, "request", name)["waits"] for name in ("r1", "r2"))
    assert [(wait["reason"], wait["needed"], wait["free"]) for wait in blocked] == [("queue", 0, 0), ("blocks", 5, 3)]
    assert [wait["reason"] for wait in behind] == ["queue"]
    assert (blocked[0]["until"], blocked[1]["until"]) == (pytest.approx(1000.02), None)
    simulation.drain()
    assert all(wait["until"] is not None for wait in inspect(simulation.engine, "request", "r1")["waits"])


def test_steps_from_a_step_on() -> None:
    simulation = two_requests()
    simulation.drain()
    steps = inspect(simulation.engine, "steps")["steps"]
    assert [step["step"] for step in steps] == list(range(1, simulation.engine.scheduler.step + 1))
    assert {key: steps[3][key] for key in ("num_requests", "prefill_tokens", "decode_tokens", "token_budget")} == {
        "num_requests": 2,
        "prefill_tokens": 3,
        "decode_tokens": 1,
        "token_budget": 4,
    }
    assert [step["finished"] for step in steps if step["finished"]] == [("r0",), ("r1",)]
    assert inspect(simulation.engine, "steps", "3")["steps"] == steps[2:]
    assert inspect(simulation.engine, "steps", "99") == {"steps": []}


@pytest.mark.parametrize("since", ["-1", "x", "1.5", " "])
def test_a_wrong_step_number_is_refused(since: str) -> None:
    with pytest.raises(InvalidRequestError, match="since is") as caught:
        inspect(Simulation().engine, "steps", since)
    assert caught.value.param == "since"


def test_there_is_nothing_else_to_inspect() -> None:
    with pytest.raises(InvalidRequestError, match="'secrets'"):
        inspect(Simulation().engine, "secrets")


def test_every_answer_agrees_with_the_state_at_every_step() -> None:
    simulation = Simulation(tiny_config(num_blocks=8, block_size=4, max_num_requests=4))
    for number in range(40):
        if number % 2 == 0:
            add(simulation, 1 + number * 7 % 20, 1 + number % 11, priority=number % 3)
        if number % 9 == 8:
            simulation.abort(sorted(simulation.live)[0])
        simulation.step()
        check_answers(simulation)
    assert simulation.counts["preemptions"] > 0
    assert simulation.counts["mixed_steps"] > 0
    simulation.drain()
    assert inspect(simulation.engine, "kv")["blocks"] == {"free": 8, "cached": 0, "used": 0, "pinned": 0}
    assert inspect(simulation.engine, "kv")["slots"] == {"written": 0, "wasted": 0}


def check_answers(simulation: Simulation) -> None:
    """Owners and blocks from the journal's replay, fills from what the requests say, totals from the parts."""
    engine, replay = simulation.engine, simulation.replay
    kv, blocks, requests = (inspect(engine, what) for what in ("kv", "blocks", "requests"))
    json.dumps([kv, blocks, requests, inspect(engine, "steps")])
    assert sum(kv["blocks"].values()) == kv["num_blocks"] == len(blocks["blocks"]) == 8
    for state, count in kv["blocks"].items():
        assert sum(block["state"] == state for block in blocks["blocks"]) == count
    assert kv["slots"]["written"] == sum(block["filled"] for block in blocks["blocks"])
    assert kv["slots"]["written"] + kv["slots"]["wasted"] <= 4 * kv["blocks"]["used"]
    assert kv["requests"] == {"running": len(replay.running), "waiting": len(replay.waiting)}

    owners = {block_id: [name] for name, row in replay.running.items() for block_id in replay.tables[row]}
    assert {block["id"]: block["owners"] for block in blocks["blocks"] if block["owners"]} == owners
    filled = {block["id"]: block["filled"] for block in blocks["blocks"]}
    for request in requests["requests"]:
        row = replay.running.get(request["id"])
        assert request["status"] == ("waiting" if row is None else "running")
        assert request["row"] == row
        assert request["block_table"] == ([] if row is None else replay.tables[row])
        assert request["num_computed_tokens"] == sum(filled[block_id] for block_id in request["block_table"])
        assert request["num_output_tokens"] == len(simulation.live[request["id"]].token_ids)
        assert (request["status"] == "waiting") == any(
            wait["until"] is None and wait["reason"] != "budget" for wait in request["waits"]
        )
    assert engine_stats(engine).num_preemptions == replay.num_preemptions
