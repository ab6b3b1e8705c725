"""What the glass box answers, compared with the state it claims to show, and with values worked out by hand."""

from __future__ import annotations

import hashlib
import json
import struct
from typing import Any

import pytest
from fakes.engines import tiny_config
from fakes.simulation import Simulation

from pageframe.runtime.errors import InvalidRequestError, RequestNotFoundError
from pageframe.runtime.inspection import engine_stats, inspect
from pageframe.runtime.prefix_cache import make_salt
from pageframe.runtime.request import SamplingParams


def add(simulation: Simulation, num_tokens: int, max_tokens: int, *, first: int = 10, n: int = 1, **more: Any) -> None:
    """A request whose prompt counts up from the token `first`."""
    params = SamplingParams(n=n, temperature=0, max_tokens=max_tokens, ignore_eos=True)
    simulation.add(range(first, first + num_tokens), params, **more)


def run(simulation: Simulation, num_steps: int) -> None:
    for _ in range(num_steps):
        simulation.step()


def two_requests() -> Simulation:
    """r0: 10 prompt tokens, all computed, 1 token drawn; r1: 6 other prompt tokens, 3 of them computed."""
    simulation = Simulation(tiny_config(num_blocks=8, block_size=4, max_num_batched_tokens=4))
    add(simulation, 10, 3)
    run(simulation, 3)
    add(simulation, 6, 3, first=100)
    simulation.step()
    return simulation


def in_state(simulation: Simulation, state: str) -> list[Any]:
    return [block for block in inspect(simulation.engine, "blocks")["blocks"] if block["state"] == state]


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
        # At their longest r0 has 13 tokens and r1 9.
        "contiguous_blocks": 4 + 3,
        "bytes": {"pool": 2048, "per_block": 256, "per_token": 64},
        "requests": {"running": 2, "waiting": 0, "following": 0},
        "preemptions": 0,
        # r0's first two blocks are full.
        "prefix_cache": {"lookup_tokens": 16, "hit_tokens": 0, "blocks": 2},
        "host_cache": {"slots": 0, "used": 0},
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
    # A digest is SHA-256 over the chain: salt, first block's tokens as int32, second block's.
    chain = hashlib.sha256(make_salt("", "")).digest()
    digests: list[str | None] = []
    for tokens in ([10, 11, 12, 13], [14, 15, 16, 17]):
        chain = hashlib.sha256(chain + struct.pack("<4i", *tokens)).digest()
        digests.append(chain.hex()[:16])
    assert [block["digest"] for block in answer["blocks"]] == digests + [None] * 6


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
    assert (first["num_cached_tokens"], first["context_start"], first["leader"]) == (0, 0, None)
    prefix = {"hit_tokens": 0, "reason": "differs", "evicted_step": None}
    assert inspect(simulation.engine, "request", "r1") == {"step": 4, "now": answer["now"], **second, "prefix": prefix}
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
    add(simulation, 16, 2, first=100)
    add(simulation, 1, 1, first=200)
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


# ---- shared prefixes ------------------------------------------------------------------------------------------------


def test_a_shared_prefix_by_hand() -> None:
    simulation = Simulation(tiny_config(num_blocks=8, block_size=4, max_num_batched_tokens=16))
    add(simulation, 9, 6)
    simulation.step()
    add(simulation, 10, 6)
    simulation.step()
    # r0 has 9 prompt tokens and 2 drawn, the last not yet computed; r1 found the first 8 of its 10, and has 1 drawn.
    kv = inspect(simulation.engine, "kv")
    assert kv["blocks"] == {"free": 4, "cached": 0, "used": 4, "pinned": 0}
    assert kv["blocks_saved_by_sharing"] == 2
    # Two shared full blocks; 2 and 2 written in the private ones, where 3 tokens of each are known.
    assert kv["slots"] == {"written": 8 + 2 + 2, "wasted": 1 + 1}
    assert kv["prefix_cache"] == {"lookup_tokens": 19, "hit_tokens": 8, "blocks": 2}
    blocks = inspect(simulation.engine, "blocks")["blocks"]
    assert [(block["ref_count"], block["owners"], block["filled"]) for block in blocks[:4]] == [
        (2, ["r0", "r1"], 4),
        (2, ["r0", "r1"], 4),
        (1, ["r0"], 2),
        (1, ["r1"], 2),
    ]
    found = inspect(simulation.engine, "request", "r1")
    assert (found["num_cached_tokens"], found["block_table"]) == (8, [0, 1, 3])
    assert found["prefix"] == {"hit_tokens": 8, "reason": "partial block", "evicted_step": None}
    assert inspect(simulation.engine, "request", "r0")["prefix"]["hit_tokens"] == 0


def test_what_is_left_behind_is_cached_until_it_is_evicted() -> None:
    simulation = Simulation(tiny_config(num_blocks=4, block_size=4, max_num_batched_tokens=16))
    add(simulation, 9, 1)
    simulation.drain()
    assert inspect(simulation.engine, "kv")["blocks"] == {"free": 2, "cached": 2, "used": 0, "pinned": 0}
    assert inspect(simulation.engine, "kv")["slots"] == {"written": 0, "wasted": 0}
    cached = in_state(simulation, "cached")
    assert [(block["ref_count"], block["owners"], block["filled"]) for block in cached] == [(0, [], 4)] * 2
    assert len({block["digest"] for block in cached} - {None}) == 2
    add(simulation, 13, 1, first=100)  # takes all four blocks
    simulation.drain()
    evicted_in = simulation.engine.scheduler.step
    add(simulation, 9, 1)
    simulation.step()
    assert inspect(simulation.engine, "request", "r2")["prefix"] == {
        "hit_tokens": 0,
        "reason": "evicted",
        "evicted_step": evicted_in,
    }
    assert simulation.engine.reset_prefix_cache() > 0
    assert in_state(simulation, "cached") == []
    assert inspect(simulation.engine, "kv")["prefix_cache"]["blocks"] == 0


@pytest.mark.parametrize(
    ("config", "prompt", "more", "reason"),
    [
        ({}, (9, 10), {"cache_salt": "mine"}, "salt"),
        ({}, (9, 100), {}, "differs"),
        ({"prefix_cache": False}, (9, 10), {}, "off"),
    ],
)
def test_why_nothing_was_found(config: Any, prompt: tuple[int, int], more: Any, reason: str) -> None:
    simulation = Simulation(tiny_config(**config))
    add(simulation, 9, 1)
    simulation.drain()
    add(simulation, prompt[0], 1, first=prompt[1], **more)
    assert inspect(simulation.engine, "request", "r1")["prefix"] is None, "it has not been looked up yet"
    simulation.step()
    answer = inspect(simulation.engine, "request", "r1")
    assert answer["prefix"] == {"hit_tokens": 0, "reason": reason, "evicted_step": None}
    assert answer["num_cached_tokens"] == 0


def test_choices_wait_for_the_first_and_go_on_from_its_blocks() -> None:
    simulation = Simulation(tiny_config(num_blocks=16, block_size=4, max_num_batched_tokens=8))
    add(simulation, 9, 1)
    simulation.drain()
    add(simulation, 18, 5, n=3, request_id="r")
    simulation.step()
    answers = {name: inspect(simulation.engine, "request", name) for name in ("r-0", "r-1", "r-2")}
    assert [answer["leader"] for answer in answers.values()] == [None, "r-0", "r-0"]
    assert [wait["reason"] for wait in answers["r-1"]["waits"]] == ["group"]
    assert inspect(simulation.engine, "kv")["requests"] == {"running": 1, "waiting": 0, "following": 2}
    assert answers["r-1"]["prefix"] is None
    run(simulation, 1)
    answers = {name: inspect(simulation.engine, "request", name) for name in ("r-0", "r-1", "r-2")}
    assert [answer["leader"] for answer in answers.values()] == [None] * 3
    assert [answer["num_cached_tokens"] for answer in answers.values()] == [8] * 3
    assert [answer["prefix"]["hit_tokens"] for answer in answers.values()] == [8] * 3, "a fork has its leader's lookup"
    tables = [answer["block_table"] for answer in answers.values()]
    assert tables[0][:4] == tables[1][:4] == tables[2][:4]
    assert len({table[4] for table in tables}) == 3
    kv = inspect(simulation.engine, "kv")
    assert kv["blocks_saved_by_sharing"] == 2 * 4
    assert kv["slots"]["written"] == 16 + 3 * 2
    assert kv["prefix_cache"]["lookup_tokens"] == 9 + 18, "a prompt is looked up once for all choices"


def test_blocks_behind_a_window_have_left_the_table() -> None:
    simulation = Simulation(tiny_config(num_blocks=16, block_size=4, max_num_batched_tokens=32, window=6))
    add(simulation, 18, 4)
    simulation.step()
    answer = inspect(simulation.engine, "request", "r0")
    # The next query is the 19th token, at position 18; with a window of 6 it sees positions 13 to 18.
    assert answer["block_table"][:3] == [-1, -1, -1]
    assert len([block_id for block_id in answer["block_table"] if block_id >= 0]) == 2
    assert answer["num_computed_tokens"] == 18
    assert [block["filled"] for block in in_state(simulation, "used")] == [4, 2]
    assert inspect(simulation.engine, "kv")["slots"] == {"written": 6, "wasted": 1}


def test_a_context_that_slid_says_where_it_begins() -> None:
    simulation = Simulation(tiny_config(num_blocks=4, block_size=4, max_num_batched_tokens=32, slide_by=8))
    add(simulation, 12, 20)
    run(simulation, 7)
    answer = inspect(simulation.engine, "request", "r0")
    assert answer["context_start"] == 8
    assert answer["num_tokens"] == 12 + answer["num_output_tokens"] == 12 + len(simulation.live["r0"].token_ids)
    assert answer["num_computed_tokens"] < answer["num_tokens"] - answer["context_start"] <= 16


def test_host_memory_is_counted() -> None:
    simulation = Simulation(tiny_config(num_blocks=4, block_size=4, max_num_batched_tokens=16, host_slots=3))
    add(simulation, 9, 1)
    simulation.drain()
    assert inspect(simulation.engine, "kv")["host_cache"] == {"slots": 3, "used": 0}
    add(simulation, 13, 1, first=100)
    simulation.drain()
    assert inspect(simulation.engine, "kv")["host_cache"] == {"slots": 3, "used": 2}
    add(simulation, 9, 1)
    simulation.step()
    assert inspect(simulation.engine, "request", "r2")["prefix"]["hit_tokens"] == 8


# ---- all at once ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config", [{}, {"prefix_cache": False}, {"host_slots": 4}, {"window": 5}, {"slide_by": 12}], ids=str
)
def test_every_answer_agrees_with_the_state_at_every_step(config: dict[str, Any]) -> None:
    simulation = Simulation(tiny_config(num_blocks=8, block_size=4, max_num_requests=4, **config))
    seen: set[str] = set()
    for number in range(60):
        if number % 2 == 0:
            add(
                simulation,
                1 + number * 7 % 20,
                1 + number % 11,
                first=10 + number % 3 // 2,
                n=1 + number % 8 // 3,
                priority=number % 3,
            )
        if number % 9 == 8:
            simulation.abort(sorted(simulation.live)[0])
        simulation.step()
        seen |= check_answers(simulation)
    assert simulation.counts["preemptions"] > 0
    assert simulation.counts["mixed_steps"] > 0
    assert {"used", "waiting", "shared", "follows"} <= seen
    assert ("cached" in seen) == simulation.resolved.prefix_cache
    assert ("released" in seen) == (simulation.resolved.window is not None)
    simulation.drain()
    kv = inspect(simulation.engine, "kv")
    assert kv["blocks"]["free"] + kv["blocks"]["cached"] == 8
    assert (kv["slots"], kv["blocks_saved_by_sharing"]) == ({"written": 0, "wasted": 0}, 0)


def check_answers(simulation: Simulation) -> set[str]:
    """Owners and states from the journal's replay, fills block by block, totals from the parts. Returns what there was
    to see."""
    engine, replay = simulation.engine, simulation.replay
    kv, blocks, requests = (inspect(engine, what) for what in ("kv", "blocks", "requests"))
    json.dumps([kv, blocks, requests, inspect(engine, "steps")])
    states = {block["id"]: block["state"] for block in blocks["blocks"]}
    assert states == {block_id: replay.state(block_id) for block_id in range(8)}
    for state, count in kv["blocks"].items():
        assert sum(other == state for other in states.values()) == count
    queues = {"running": replay.running, "waiting": replay.waiting, "following": replay.following}
    assert kv["requests"] == {name: len(queue) for name, queue in queues.items()}
    assert kv["prefix_cache"]["blocks"] == len(replay.indexed)
    assert {block["id"] for block in blocks["blocks"] if block["digest"]} == replay.indexed

    owners: dict[int, set[str]] = {}
    written: dict[int, set[int]] = {}
    known: dict[int, int] = {}
    references = 0
    for request in requests["requests"]:
        row = replay.running.get(request["id"])
        assert request["status"] == ("waiting" if row is None else "running")
        assert request["row"] == row
        assert request["leader"] == replay.following.get(request["id"])
        assert request["block_table"] == ([] if row is None else replay.tables[row])
        assert request["num_output_tokens"] == len(simulation.live[request["id"]].token_ids)
        assert (request["status"] == "waiting") == any(
            wait["until"] is None and wait["reason"] != "budget" for wait in request["waits"]
        )
        length = request["num_tokens"] - request["context_start"]
        for index, block_id in enumerate(request["block_table"]):
            if block_id >= 0:
                references += 1
                owners.setdefault(block_id, set()).add(request["id"])
                written.setdefault(block_id, set()).add(min(4, max(0, request["num_computed_tokens"] - 4 * index)))
                known[block_id] = max(known.get(block_id, 0), min(4, max(0, length - 4 * index)))
    assert {block["id"]: set(block["owners"]) for block in blocks["blocks"] if block["owners"]} == owners
    assert all(len(values) == 1 for values in written.values()), "those that share a block have filled it differently"
    for block in blocks["blocks"]:
        filled = written.get(block["id"], {4 if block["state"] == "cached" else 0})
        assert {block["filled"]} == filled
        if block["state"] == "used":
            assert block["ref_count"] >= len(block["owners"])
    assert kv["slots"]["written"] == sum(values.pop() for values in written.values())
    assert kv["slots"]["wasted"] == sum(4 - count for count in known.values())
    assert kv["blocks_saved_by_sharing"] == references - len(owners)
    assert engine_stats(engine).num_preemptions == replay.counts["preempt"]
    seen = {*states.values(), *(request["status"] for request in requests["requests"])}
    seen |= {"shared"} if references > len(owners) else set()
    seen |= {"follows"} if replay.following else set()
    return seen | ({"released"} if any(-1 in request["block_table"] for request in requests["requests"]) else set())


def test_waits_that_have_ended_are_summed_by_reason() -> None:
    simulation = Simulation(tiny_config(num_blocks=6, block_size=4, max_num_batched_tokens=32))
    simulation.add([1] * 13, SamplingParams(max_tokens=6, ignore_eos=True))
    simulation.step()
    simulation.add([2] * 16, SamplingParams(max_tokens=2, ignore_eos=True))
    simulation.add([3] * 16, SamplingParams(max_tokens=2, ignore_eos=True))
    simulation.drain()
    for request_id in ("r1", "r2"):
        answer = inspect(simulation.engine, "request", request_id)
        spans: dict[str, float] = {}
        for wait in answer["waits"]:
            spans[wait["reason"]] = spans.get(wait["reason"], 0.0) + wait["until"] - wait["since"]
        assert answer["waited"] == pytest.approx(spans)
        assert answer["waited"]["blocks"] > 0
    assert (answer["wait"], answer["wait_since"]) == (None, None)
