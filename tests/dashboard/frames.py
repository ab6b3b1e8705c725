"""Frames of a made-up engine, as GET /inspect/live sends them, for what a real one would take long to come to."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

#: As runtime/live_frames.py lays a cell out.
CELL = np.dtype([("state", "u1"), ("unused", "u1"), ("filled", "<u2"), ("ref_count", "<u2"), ("owner", "<u2")])
STATES = ("free", "cached", "used", "pinned")
_NOTHING_SEEN = {"count": 0, "p50": None, "p95": None, "p99": None}


def cells(states: Sequence[int], owner: int = 0) -> Any:
    """Cells in these states (0 to 3), full and held by the row before `owner` where they are used."""
    made = np.zeros(len(states), dtype=CELL)
    made["state"] = states
    made["filled"] = np.where(made["state"] > 0, 16, 0)
    made["ref_count"] = made["state"] >= 2
    made["owner"] = np.where(made["state"] == 2, owner, 0)
    return made


def request(number: int, blocks: list[int], **fields: Any) -> dict[str, Any]:
    """A running request in row `number`."""
    timings = {"arrived": 1.0, "first_scheduled": 1.0, "first_token": 1.5, "finished": None}
    counts = {"num_tokens": 50, "num_output_tokens": 10, "num_computed_tokens": 49, "num_cached_tokens": 0}
    return {
        "id": f"chatcmpl-{number:032x}",
        "tenant": "",
        "status": "running",
        "finish_reason": None,
        "row": number,
        "num_prompt_tokens": 40,
        "max_total_tokens": 160,
        "num_preemptions": 0,
        "timings": timings,
        "context_start": 0,
        "wait": None,
        "wait_since": None,
        "waited": {},
        "table": {"first": 0, "ids": blocks},
        **counts,
        **fields,
    }


def step_record(step: int, **fields: Any) -> dict[str, Any]:
    """A step that decoded a token of one request."""
    numbers = {"num_requests": 1, "prefill_tokens": 0, "decode_tokens": 1, "token_budget": 256, "num_running": 1}
    lists = {"preempted": [], "finished": []}
    return {"step": step, "started": step / 10, "time_ms": 5.0, "evicted": 0, **numbers, **lists, **fields}


def frame(number: int, step: int, pool: Any, *, changed: Sequence[int] | None = None, **fields: Any) -> dict[str, Any]:
    """Args: pool: all cells. changed: the ids told of; None makes a full frame."""
    counts = {name: int((pool["state"] == state).sum()) for state, name in enumerate(STATES)}
    running = len(fields.get("requests", []))
    kv = {
        "step": step,
        "block_size": 16,
        "num_blocks": len(pool),
        "blocks": counts,
        "slots": {"written": 0, "wasted": 0},
        "blocks_saved_by_sharing": 0,
        "contiguous_blocks": 0,
        "bytes": {"pool": 0, "per_block": 0, "per_token": 0},
        "requests": {"running": running, "waiting": 0, "following": 0},
        "preemptions": 0,
        "prefix_cache": {"lookup_tokens": 0, "hit_tokens": 0, "blocks": 0},
        "host_cache": {"slots": 0, "used": 0},
    }
    told = pool if changed is None else pool[list(changed)]
    table = {"data": base64.b64encode(told.tobytes()).decode()}
    if changed is None:
        table |= {"num_blocks": len(pool), "block_size": 16}
    else:
        table["ids"] = base64.b64encode(np.array(changed, dtype="<u4").tobytes()).decode()
    return {
        "run": "first",
        "frame": number,
        "full": changed is None,
        "step": step,
        "now": step / 10,
        "unix_time": 0.0,
        "kv": kv,
        "cells": table,
        "since": base64.b64encode(np.full(len(told), step, dtype="<i4").tobytes()).decode(),
        "requests": [],
        "ended": [],
        "steps": [],
        "events": [],
        "events_left_out": 0,
        "latency": {"ttft": _NOTHING_SEEN, "itl": _NOTHING_SEEN, "e2e": _NOTHING_SEEN},
        **fields,
    }


def body(*frames: dict[str, Any]) -> str:
    """The body of an answer with these frames."""
    return "".join(f"event: frame\ndata: {json.dumps(frame)}\n\n" for frame in frames)
