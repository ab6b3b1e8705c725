"""What a page that watches the engine is told: the whole state once, then what changed since.

Made between steps, so every frame is of one step. Its work is a few array operations over the pool and a few lookups
for each live request, so that it can be asked for ten times a second.
"""

from __future__ import annotations

import base64
import secrets
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pageframe.runtime.inspection import inspect, request_numbers, request_origin
from pageframe.runtime.journal import Event, FinishEvent
from pageframe.runtime.journal_json import event_json
from pageframe.runtime.request import Request

if TYPE_CHECKING:
    from pageframe.runtime.engine import Engine

Json = dict[str, Any]
Int32s = npt.NDArray[np.int32]

MAX_EVENTS = 500
MAX_STEPS = 600
FREE, CACHED, USED, PINNED = range(4)
#: One cell of the map, 8 bytes. `owner`: 1 + the row of the first running request that holds the block, 0 for nobody.
CELL = np.dtype([("state", "u1"), ("unused", "u1"), ("filled", "<u2"), ("ref_count", "<u2"), ("owner", "<u2")])

#: Row, changes and length of the table of a request without a row.
_NO_TABLE = (-1, 0, 0)


class LiveFrames:
    """Frames for all who watch: `next` for those who have seen the last one, `whole` for who has seen none.

    Args:
        engine: read, never changed.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        #: Tells this engine's frames from those of one started later on the same port.
        self._run = secrets.token_hex(8)
        self._number = -1
        self._forget()

    def _forget(self) -> None:
        num_blocks = self._engine.resolved.num_blocks
        # Who begins to look does not know since when a block is as it is.
        self._cells = pool_cells(self._engine)
        self._since: Int32s = np.zeros(num_blocks, dtype=np.int32)
        #: By request id: what was last told of it; and which row its table was, how often that had changed, its length.
        self._told: dict[str, Json] = {}
        self._tables: dict[str, tuple[int, int, int]] = {}
        self._next_event = self._engine.journal.written
        self._next_step = self._engine.scheduler.step + 1

    def start(self) -> Json:
        """A whole frame, where nobody has watched until now."""
        self._forget()
        self._number += 1
        for request in self._engine.scheduler.live_requests():
            self._changes(request)
        return self.whole()

    def next(self) -> Json | None:
        """What has changed since the last frame; None where nothing has."""
        engine = self._engine
        if engine.journal.written == self._next_event and engine.scheduler.step < self._next_step:
            return None
        events, left_out = self._new_events()
        ended = self._ended(events)
        steps = engine.steps_since(self._next_step)[-MAX_STEPS:]
        self._number += 1
        self._next_event = engine.journal.written
        self._next_step = engine.scheduler.step + 1
        return {
            **self._moment(full=False),
            **self._changed_cells(),
            "ended": ended,
            "requests": [self._changes(request) for request in engine.scheduler.live_requests()],
            "steps": [asdict(record) for record in steps],
            "events": [event_json(number, event) for number, event in events],
            "events_left_out": left_out,
        }

    def whole(self) -> Json:
        """All of what `next` or `start`, called just before, has told of."""
        engine = self._engine
        return {
            **self._moment(full=True),
            "cells": {
                "num_blocks": len(self._cells),
                "block_size": engine.resolved.block_size,
                "data": _base64(self._cells),
            },
            "since": _base64(self._since),
            "ended": [],
            "requests": [self._all_of(request) for request in engine.scheduler.live_requests()],
            "steps": [asdict(record) for record in engine.steps_since(0)[-MAX_STEPS:]],
            "events": [],
            "events_left_out": 0,
        }

    def _moment(self, *, full: bool) -> Json:
        engine = self._engine
        return {
            "run": self._run,
            "frame": self._number,
            "full": full,
            "step": engine.scheduler.step,
            "now": engine.now(),
            "unix_time": time.time(),
            "kv": inspect(engine, "kv"),
        }

    def _new_events(self) -> tuple[list[tuple[int, Event]], int]:
        """The newest events not yet told of with their numbers, and how many older ones were left out."""
        journal = self._engine.journal
        first = max(self._next_event, journal.written - MAX_EVENTS, journal.first)
        return list(enumerate(journal.since(first), first)), first - self._next_event

    # ---- blocks ---------------------------------------------------------------------------------------------------

    def _changed_cells(self) -> Json:
        cells = pool_cells(self._engine)
        ids = np.flatnonzero(cells.view(np.uint64) != self._cells.view(np.uint64))
        now, before = cells[ids], self._cells[ids]
        moved = (now["state"] != before["state"]) | (now["owner"] != before["owner"])
        self._since[ids[moved]] = self._engine.scheduler.step
        self._cells = cells
        return {
            "cells": {"ids": _base64(ids.astype(np.uint32)), "data": _base64(now)},
            "since": _base64(self._since[ids]),
        }

    # ---- requests -------------------------------------------------------------------------------------------------

    def _all_of(self, request: Request) -> Json:
        tables, row = self._engine.scheduler.tables, request.row
        numbers = request_numbers(self._engine, request)
        table = {"first": 0, "ids": tables.entries(row) if row >= 0 else []}
        return {"id": request.request_id, **request_origin(request), **numbers, "table": table}

    def _changes(self, request: Request) -> Json:
        """Its id and what changed since it was last told of."""
        request_id = request.request_id
        numbers = request_numbers(self._engine, request)
        before = self._told.get(request_id)
        self._told[request_id] = numbers
        if before is None:
            changed = request_origin(request) | numbers
        else:
            changed = {key: value for key, value in numbers.items() if before[key] != value}
        changed["id"] = request_id
        table = self._changed_table(request)
        if table is not None:
            changed["table"] = table
        return changed

    def _changed_table(self, request: Request) -> Json | None:
        """What a watcher must change in its copy of the request's block table; None for nothing."""
        tables, row = self._engine.scheduler.tables, request.row
        before = self._tables.get(request.request_id, _NO_TABLE)
        now = _NO_TABLE if row < 0 else (row, int(tables.changes[row]), int(tables.num_blocks[row]))
        if now == before:
            return None
        self._tables[request.request_id] = now
        # Tables grow at their end: as long as nothing else happened, only what came is news.
        first = before[2] if now[:2] == before[:2] else 0
        return {"first": first, "ids": tables.table[row, first : now[2]].tolist() if row >= 0 else []}

    def _ended(self, events: list[tuple[int, Event]]) -> list[Json]:
        """The requests that ended since the last frame, and the rest of those who are there no more."""
        scheduler = self._engine.scheduler
        ended = {event.request_id for _, event in events if isinstance(event, FinishEvent)}
        ended |= {request_id for request_id in self._told if not scheduler.is_live(request_id)}
        found = []
        for request_id in sorted(ended):
            self._told.pop(request_id, None)
            self._tables.pop(request_id, None)
            request = scheduler.find(request_id)
            if request is not None:
                found.append({"id": request_id, **request_origin(request), **request_numbers(self._engine, request)})
        return found


def pool_cells(engine: Engine) -> npt.NDArray[np.void]:
    """The whole pool now, a CELL for each block."""
    scheduler = engine.scheduler
    allocator, tables = scheduler.allocator, scheduler.tables
    references = np.frombuffer(allocator.reference_view, dtype=np.int32)
    indexed = np.frombuffer(allocator.indexed_view, dtype=np.uint8)
    cells = np.zeros(allocator.num_blocks, dtype=CELL)
    cells["state"] = np.where(references > 0, USED, np.where(indexed > 0, CACHED, FREE))
    cells["ref_count"] = np.minimum(references, 2**16 - 1)
    cells["filled"] = np.where(cells["state"] == CACHED, tables.block_size, 0)
    for block_id in allocator.pins():
        if allocator.state(block_id) == "pinned":
            cells["state"][block_id] = PINNED
    rows = scheduler.rows_in_use()
    if len(rows):
        # Rows in falling order: of several that hold a block the first one's values are written last.
        rows = np.sort(rows)[::-1]
        width = int(tables.num_blocks[rows].max())
        places, indices = np.nonzero(tables.table[rows, :width] >= 0)
        holders = rows[places]
        block_ids = tables.table[holders, indices]
        filled = scheduler.rows.num_computed_tokens[holders] - indices * tables.block_size
        cells["filled"][block_ids] = filled.clip(0, tables.block_size)
        cells["owner"][block_ids] = holders + 1
    return cells


def _base64(values: npt.NDArray[Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode("ascii")
