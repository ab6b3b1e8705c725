"""What /inspect answers about small pools, and pictures of it as lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console, RenderableType

from pageframe.api.terminal_drawing import Snapshot

from .scripted_server import Json

BLOCK_SIZE = 16
FIRST = "chatcmpl-0a1b2c3d4e5f60718293a4b5c6d7e8f9"
SECOND = "chatcmpl-99887766554433221100ffeeddccbbaa"
THIRD = "chatcmpl-123456789abcdef0123456789abcdef0"


def make_request(request_id: str, block_table: list[int], computed: int, known: int, **fields: Any) -> Json:
    return {
        "id": request_id,
        "status": "running" if block_table else "waiting",
        "finish_reason": None,
        "tenant": "",
        "priority": 0,
        "seed": 7,
        "row": 0,
        "num_tokens": known,
        "num_prompt_tokens": known - 10,
        "num_output_tokens": 10,
        "max_total_tokens": known + 50,
        "num_computed_tokens": computed,
        "num_cached_tokens": 0,
        "context_start": 0,
        "leader": None,
        "num_preemptions": 0,
        "block_table": block_table,
        "timings": {"arrived": 50.0, "first_scheduled": None, "first_token": None, "finished": None},
        "waits": [],
        "prefix": None,
        **fields,
    }


def make_wait(reason: str, **fields: Any) -> Json:
    return {"reason": reason, "since": 50.0, "needed": 0, "free": 0, "until": None, **fields}


def make_block(block_id: int, state: str = "free", filled: int = 0, owners: tuple[str, ...] = ()) -> Json:
    return {
        "id": block_id,
        "state": state,
        "ref_count": len(owners),
        "owners": list(owners),
        "filled": filled,
        "digest": None,
    }


def make_answers(
    num_blocks: int, requests: list[Json], step: int = 1234, cached: Sequence[int] = (), **totals: Any
) -> dict[str, Json]:
    """What the three routes answer about a pool in which these requests hold their block tables.

    Args:
        cached: ids of blocks that nobody holds but the prefix cache.
        totals: of /inspect/kv, in place of what follows from the requests.
    """
    blocks = [make_block(block_id) for block_id in range(num_blocks)]
    for block_id in cached:
        blocks[block_id] = make_block(block_id, "cached", BLOCK_SIZE)
    for request in requests:
        for index, block_id in enumerate(request["block_table"]):
            if block_id >= 0:
                filled = min(BLOCK_SIZE, max(0, request["num_computed_tokens"] - index * BLOCK_SIZE))
                blocks[block_id] = make_block(block_id, "used", filled, (*blocks[block_id]["owners"], request["id"]))
    used = [block for block in blocks if block["state"] == "used"]
    written = sum(block["filled"] for block in used)
    references = sum(block["ref_count"] for block in used)
    running = sum(request["status"] == "running" for request in requests)
    return {
        "kv": {
            "step": step,
            "block_size": BLOCK_SIZE,
            "num_blocks": num_blocks,
            "blocks": {
                "free": num_blocks - len(used) - len(cached),
                "cached": len(cached),
                "used": len(used),
                "pinned": 0,
            },
            "slots": {"written": written, "wasted": len(used) * BLOCK_SIZE - written},
            "blocks_saved_by_sharing": references - len(used),
            "bytes": {"pool": num_blocks * 368_640, "per_block": 368_640, "per_token": 23_040},
            "requests": {"running": running, "waiting": len(requests) - running},
            "preemptions": 3,
            "prefix_cache": {"lookup_tokens": 0, "hit_tokens": 0, "blocks": 0},
            "host_cache": {"slots": 0, "used": 0},
            **totals,
        },
        "blocks": {"step": step, "blocks": blocks},
        "requests": {"step": step, "requests": requests},
    }


def scene() -> dict[str, Json]:
    """Two running requests and one that waits, in a pool of 100 blocks."""
    return make_answers(
        100,
        [
            make_request(FIRST, [12, 13, 14, 15, 40, 41], 89, 90),
            make_request(SECOND, [0, 1], 20, 32, waits=[make_wait("queue", until=50.2), make_wait("budget")]),
            make_request(THIRD, [], 0, 100, num_preemptions=2, waits=[make_wait("blocks", needed=7, free=3)]),
        ],
    )


def script(*scenes: dict[str, Json]) -> dict[str, list[Any]]:
    return {f"/inspect/{name}": [answers[name] for answers in scenes] for name in ("kv", "blocks", "requests")}


def to_snapshot(answers: dict[str, Json]) -> Snapshot:
    return Snapshot(answers["kv"], answers["blocks"]["blocks"], answers["requests"]["requests"], (1, 1, 1))


def render(picture: RenderableType, width: int, **colour: Any) -> list[str]:
    console = Console(width=width, highlight=False, **({"color_system": None} | colour))
    with console.capture() as capture:
        console.print(picture)
    return [line.rstrip() for line in capture.get().splitlines()]


def one_request() -> Json:
    timings = {"arrived": 50.0, "first_scheduled": 50.012, "first_token": 51.5, "finished": None}
    waits = [make_wait("blocks", needed=7, free=3, until=50.012), make_wait("budget", since=52.0)]
    prefix = {"hit_tokens": 16, "reason": "evicted", "evicted_step": 1200}
    return make_request(
        FIRST,
        [12, 13, 140],
        20,
        40,
        timings=timings,
        waits=waits,
        num_preemptions=1,
        num_cached_tokens=16,
        prefix=prefix,
    )
