"""Records an engine's journal to a file, in a thread of its own: see journal_file.py for the format.

The engine hands over what a step left and goes on. A disk that is too slow costs events, and a line says which; a disk
that fails ends the recording, not the serving.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import queue
import secrets
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import numpy.typing as npt

from pageframe.runtime.engine import Engine
from pageframe.runtime.errors import StartupError
from pageframe.runtime.journal import ArriveEvent, Event, FinishEvent
from pageframe.runtime.journal_file import DIGEST_BYTES, KEPT_FILES, VERSION, numbered
from pageframe.runtime.journal_state import JournalState

logger = logging.getLogger(__name__)

#: Events that may wait for the disk.
MAX_WAITING = 200_000
#: What they take in a file, about.
BYTES_PER_EVENT, BYTES_PER_TOKEN = 220, 11

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Tokens of a request from its token `start` on, to be told of by their digests."""

    request_id: str
    salt: bytes
    start: int
    token_ids: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Batch:
    """What one step leaves to be written; `state`, where the next file begins with it."""

    first: int
    events: list[Event]
    tokens: list[_Tokens]
    state: dict[str, Any] | None
    dropped: tuple[int, int] | None


class JournalRecorder:
    """Writes an engine's journal to a file, in a thread of its own.

    Args:
        path: the file; one that is there becomes FILE.1.
        max_bytes: a file that has grown about so large is followed by the next.
        with_token_ids: write token ids instead of digests.

    Raises:
        StartupError: the file cannot be written.
    """

    def __init__(self, engine: Engine, path: Path, *, max_bytes: int, with_token_ids: bool = False) -> None:
        self._engine = engine
        self._path = path
        self._max_bytes = max_bytes
        self._with_token_ids = with_token_ids
        self._header = _header(engine, with_token_ids)
        self._key = secrets.token_bytes(32)
        self._next = engine.journal.written
        self._chains: dict[str, bytes] = {}
        self._batches: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._waiting = 0
        #: Estimated bytes of the present file.
        self._size = 0
        #: Whoever reads does not know how things stand, since events were dropped.
        self._state_is_due = False
        self._failed = False
        self._file = self._open(None)
        self._thread = threading.Thread(target=self._write_all, name="journal", daemon=True)
        self._thread.start()

    def record(self) -> None:
        """Hand over what the journal has got since the last call. Never waits for the disk."""
        journal = self._engine.journal
        if self._failed or journal.written == self._next:
            return
        first = max(self._next, journal.first)
        events = journal.since(first)
        dropped = (self._next, first - 1) if first > self._next else None
        self._next = journal.written
        if self._waiting + len(events) > MAX_WAITING:
            self._state_is_due = True
            self._batches.put(_Batch(first, [], [], None, (first, self._next - 1)))
            return
        self._waiting += len(events)
        tokens = list(self._tokens(events))
        self._size += BYTES_PER_EVENT * len(events) + BYTES_PER_TOKEN * sum(len(part.token_ids) for part in tokens)
        state = None
        if self._size > self._max_bytes or self._state_is_due or dropped is not None:
            # These events have led to it, so the next file begins behind them.
            state = state_now(self._engine).snapshot()
            self._size, self._state_is_due = 0, False
        self._batches.put(_Batch(first, events, tokens, state, dropped))

    def close(self) -> None:
        """Write what was handed over, and end."""
        self._batches.put(None)
        self._thread.join()

    def _tokens(self, events: Iterable[Event]) -> Iterator[_Tokens]:
        """A prompt's tokens when its request arrives, its output's when it has ended."""
        for event in events:
            if isinstance(event, ArriveEvent) and not event.leader:
                request = self._engine.scheduler.find(event.request_id)
                if request is not None:
                    prompt = request.token_ids[: request.num_prompt_tokens]
                    yield _Tokens(event.request_id, request.salt, 0, prompt.copy())
            elif isinstance(event, FinishEvent):
                request = self._engine.scheduler.find(event.request_id)
                if request is not None:
                    yield _Tokens(event.request_id, request.salt, request.num_prompt_tokens, request.token_ids.copy())

    # ---- in the thread --------------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        try:
            while (batch := self._batches.get()) is not None:
                self._file.write(b"".join(self._lines(batch)))
                self._file.flush()
                self._waiting -= len(batch.events)
                if batch.state is not None:
                    self._file.close()
                    self._file = self._open(batch.state)
        except OSError as error:
            self._failed = True
            logger.error("the journal is recorded no further: %s: %s", self._path, error.strerror)
        finally:
            self._file.close()

    def _open(self, state: dict[str, Any] | None) -> IO[bytes]:
        """The next file, those before moved on by one."""
        if self._path.exists() and not self._path.is_file():
            raise StartupError(f"journal: {self._path} cannot be written: it is no regular file")
        try:
            for number in range(KEPT_FILES, 0, -1):
                older = numbered(self._path, number - 1)
                if older.exists():
                    older.replace(numbered(self._path, number))
            file = self._path.open("wb")
        except OSError as error:
            if state is None:
                raise StartupError(f"journal: {self._path} cannot be written: {error.strerror}") from None
            raise
        file.write(_encode(self._header) + b"\n")
        if state is not None:
            file.write(_encode({"kind": "state", **state}) + b"\n")
        file.flush()
        return file

    def _lines(self, batch: _Batch) -> Iterator[bytes]:
        if batch.dropped is not None:
            yield _encode({"kind": "gap", "from": batch.dropped[0], "to": batch.dropped[1]}) + b"\n"
        for number, event in enumerate(batch.events, batch.first):
            # As journal_json.event_json has it, without a dict between.
            yield b'{"id":%d,"kind":"%s",%s\n' % (number, event.kind.encode(), _encode(event)[1:])
        for tokens in batch.tokens:
            yield _encode(self._told(tokens)) + b"\n"

    def _told(self, tokens: _Tokens) -> dict[str, Any]:
        told: dict[str, Any] = {"kind": "tokens", "request_id": tokens.request_id, "start": tokens.start}
        if self._with_token_ids:
            return told | {"token_ids": tokens.token_ids[tokens.start :].tolist()}
        digests = chained_digests(self._key, tokens.salt, tokens.token_ids)
        return told | {"digests": base64.b64encode(digests[tokens.start * DIGEST_BYTES :]).decode("ascii")}


def chained_digests(key: bytes, salt: bytes, token_ids: npt.NDArray[np.int32]) -> bytes:
    """DIGEST_BYTES for each token, which name all tokens up to it: BLAKE2b (RFC 7693) of (digest before, token),
    where the first stands behind that of the salt."""
    digest = hashlib.blake2b(salt, key=key, digest_size=DIGEST_BYTES).digest()
    data = token_ids.astype("<i4").tobytes()
    digests = []
    for start in range(0, len(data), 4):
        digest = hashlib.blake2b(digest + data[start : start + 4], key=key, digest_size=DIGEST_BYTES).digest()
        digests.append(digest)
    return b"".join(digests)


def _header(engine: Engine, with_token_ids: bool) -> dict[str, Any]:
    resolved = engine.resolved
    names = ("model_name", "block_size", "num_blocks", "max_model_len", "max_num_requests", "max_num_batched_tokens")
    more = ("mixed_token_budget", "prefix_cache", "host_slots", "slide_by", "window")
    return {
        "kind": "journal",
        "version": VERSION,
        "run": secrets.token_hex(8),
        "unix_time": time.time(),
        "clock": engine.now(),
        "tokens": "ids" if with_token_ids else "digests",
        **{name: getattr(resolved, name) for name in (*names, *more)},
    }


def state_now(engine: Engine) -> JournalState:
    """How things stand between two steps, as the journal's events have told."""
    scheduler = engine.scheduler
    state = JournalState()
    state.step, state.time = engine.journal.step, engine.journal.time
    for request in scheduler.live_requests():
        if request.leader is not None:
            state.following[request.request_id] = request.leader.request_id
        elif request.row < 0:
            state.waiting.add(request.request_id)
        else:
            state.running[request.request_id] = request.row
            state.tables[request.row] = scheduler.tables.entries(request.row)
    prefix_cache = scheduler.blocks.prefix_cache
    for entry in [] if prefix_cache is None else prefix_cache.entries():
        if entry.block_id >= 0:
            state.indexed.add(entry.block_id)
            state.published_by[entry.block_id] = entry.published_by
        if entry.host_slot >= 0:
            state.host[entry.host_slot] = entry.published_by
    return JournalState.load({**state.snapshot(), "pins": list(scheduler.allocator.pins().items())})
