"""Records an engine's journal to a file, in a thread of its own: see journal_file.py for the format.

The engine hands over what a step left and goes on. While the disk is behind, events wait in the journal, which forgets
the oldest: a line says which. A disk that fails ends the recording, not the serving.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import secrets
import threading
import time
from collections import deque
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
from pageframe.runtime.journal_digests import DIGEST_BYTES, TokenDigests
from pageframe.runtime.journal_file import KEPT_FILES, VERSION, numbered
from pageframe.runtime.journal_state import JournalState

logger = logging.getLogger(__name__)

#: Bytes, of the file, that may wait for the disk. Once so many wait, no more come before half of them are written.
MAX_WAITING_BYTES = 64 * 2**20
#: Handed over at once, so that those of a long wait do not take one step's time. No step has so many again and again.
MAX_EVENTS_AT_ONCE = 16_384
#: What they take in a file, about, a token with its part of the block ids of events; in memory two or three times it.
BYTES_PER_EVENT, BYTES_PER_TOKEN = 220, 12
#: What comes is written so much later: to wake a thread takes longer than all else that a step hands over.
GATHER_SECONDS = 0.05
#: How long a disk may take for the last of it.
CLOSE_SECONDS = 10.0

_TELL_OF_TOKENS = {ArriveEvent, FinishEvent}
_encode = msgspec.json.Encoder().encode


@dataclass(slots=True, eq=False)
class _Prompt:
    """What a request's choices have in common. In the thread its tokens become the digest that theirs go on from."""

    salt: bytes
    token_ids: npt.NDArray[np.int32] | None
    digest: bytes = b""


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Tokens of a request from its token `start` on: those of its prompt, or what came after it."""

    request_id: str
    start: int
    prompt: _Prompt
    token_ids: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Batch:
    """What is to be written.

    Args:
        first: number of the first event.
        size: estimated bytes.
        state: how things stand behind it, where that is to be told.
        begins_file: the next file begins with that state.
        dropped: the first and last of the events lost before it.
    """

    first: int
    events: list[Event]
    tokens: list[_Tokens]
    size: int
    state: dict[str, Any] | None
    begins_file: bool
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
        self._next = engine.journal.written
        #: By id, of live choices whose prompt was handed over.
        self._prompts: dict[str, _Prompt] = {}
        self._batches: deque[_Batch] = deque()
        self._has_work, self._is_closing = threading.Event(), threading.Event()
        #: Bytes, estimated: one is changed by the engine's thread alone, the other by the one that writes.
        self._handed_over = self._written = 0
        self._is_behind = False
        #: Estimated bytes of the present file.
        self._size = 0
        #: Whoever reads does not know how things stand, since events were dropped.
        self._state_is_due = False
        self._failed = False
        self._digests: TokenDigests | None = None if with_token_ids else TokenDigests()
        try:
            self._file = self._open(self._state() if self._next else None)
        except OSError as error:
            raise StartupError(f"journal: {self._path} cannot be written: {error.strerror}") from None
        self._thread = threading.Thread(target=self._write_all, name="journal", daemon=True)
        self._thread.start()

    def record(self) -> None:
        """Hand over what the journal has got since the last call. Never waits for the disk."""
        waiting = self._handed_over - self._written
        self._is_behind = waiting > (MAX_WAITING_BYTES // 2 if self._is_behind else MAX_WAITING_BYTES)
        if not self._is_behind:
            self._hand_over()

    def close(self) -> None:
        """Record what the journal has got, write it and end."""
        while not self._failed and self._next < self._engine.journal.written:
            self._hand_over()
        self._is_closing.set()
        self._has_work.set()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.error("the end of the journal is not recorded: %s takes too long to write", self._path)

    def _hand_over(self) -> None:
        journal = self._engine.journal
        if self._failed or journal.written == self._next:
            return
        first = max(self._next, journal.first)
        dropped = (self._next, first - 1) if first > self._next else None
        events = journal.since(first, MAX_EVENTS_AT_ONCE)
        self._next = first + len(events)
        if dropped is not None:
            self._state_is_due = True
            is_live = self._engine.scheduler.is_live
            self._prompts = {key: prompt for key, prompt in self._prompts.items() if is_live(key)}
        tokens = list(self._tokens(events))
        size = BYTES_PER_EVENT * len(events) + BYTES_PER_TOKEN * sum(len(part.token_ids) for part in tokens)
        self._size += size
        self._handed_over += size
        begins_file = self._size > self._max_bytes
        state = None
        # How things stand now is how they stood behind these events only if there are no more.
        if (begins_file or self._state_is_due) and self._next == journal.written:
            state = self._state()
            self._size, self._state_is_due = 0 if begins_file else self._size, False
        self._batches.append(_Batch(first, events, tokens, size, state, begins_file, dropped))
        if not self._has_work.is_set():
            self._has_work.set()

    def _state(self) -> dict[str, Any]:
        return {"kind": "state", "next": self._next, **state_now(self._engine).snapshot()}

    def _tokens(self, events: Iterable[Event]) -> Iterator[_Tokens]:
        """A prompt's tokens when its request arrives, its output's when it has ended."""
        # Looked for by type alone: this is done for dozens of events a step.
        for event in [event for event in events if type(event) in _TELL_OF_TOKENS]:
            request = self._engine.scheduler.find(event.request_id)
            if request is None:
                continue
            num_prompt = request.num_prompt_tokens
            if isinstance(event, FinishEvent):
                prompt = self._prompts.pop(event.request_id, None)
                prompt = prompt or _Prompt(request.salt, request.token_ids[:num_prompt].copy())
                yield _Tokens(event.request_id, num_prompt, prompt, request.token_ids[num_prompt:].copy())
                continue
            assert isinstance(event, ArriveEvent)
            if not event.leader:
                token_ids = request.token_ids[:num_prompt].copy()
                prompt = self._prompts[event.request_id] = _Prompt(request.salt, token_ids)
                yield _Tokens(event.request_id, 0, prompt, token_ids)
            elif event.leader in self._prompts:
                self._prompts[event.request_id] = self._prompts[event.leader]

    # ---- in the thread --------------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        try:
            is_last = False
            while not is_last:
                self._has_work.wait()
                # What is handed over from here on sets it again.
                self._has_work.clear()
                is_last = self._is_closing.wait(GATHER_SECONDS)
                while self._batches:
                    self._write(self._batches.popleft())
        except OSError as error:
            self._failed = True
            logger.error("the journal is recorded no further: %s: %s", self._path, error.strerror)
        except Exception:
            self._failed = True
            logger.exception("the journal is recorded no further: %s", self._path)
        finally:
            # What it still held may be what could not be written.
            with contextlib.suppress(OSError):
                self._file.close()
            if self._digests is not None:
                self._digests.close()

    def _write(self, batch: _Batch) -> None:
        self._file.write(b"".join(self._lines(batch)))
        self._file.flush()
        if batch.state is not None and batch.begins_file:
            self._file.close()
            self._file = self._open(batch.state)
        self._written += batch.size

    def _open(self, state: dict[str, Any] | None) -> IO[bytes]:
        """The next file, which nobody else may read, those before moved on by one."""
        if self._path.exists() and not self._path.is_file():
            raise StartupError(f"journal: {self._path} cannot be written: it is no regular file")
        # Under its name once it has its first lines: whoever reads meanwhile finds no file without.
        draft = self._path.with_name(f"{self._path.name}.new")
        draft.unlink(missing_ok=True)
        file = open(draft, "xb", opener=lambda path, flags: os.open(path, flags, 0o600))  # noqa: SIM115
        file.write(_line(self._header))
        if state is not None:
            file.write(_line(state))
        file.flush()
        for number in range(KEPT_FILES, 0, -1):
            older = numbered(self._path, number - 1)
            if older.exists():
                older.replace(numbered(self._path, number))
        draft.replace(self._path)
        return file

    def _lines(self, batch: _Batch) -> Iterator[bytes]:
        if batch.dropped is not None:
            yield _line({"kind": "gap", "from": batch.dropped[0], "to": batch.dropped[1]})
        for number, event in enumerate(batch.events, batch.first):
            # As journal_json.event_json has it, without a dict between.
            yield b'{"id":%d,"kind":"%s",%s\n' % (number, event.kind.encode(), _encode(event)[1:])
        for tokens in batch.tokens:
            yield from self._told(tokens)
        if batch.state is not None and not batch.begins_file:
            yield _line(batch.state)

    def _told(self, tokens: _Tokens) -> Iterator[bytes]:
        told = {"kind": "tokens", "request_id": tokens.request_id, "start": tokens.start}
        if self._with_token_ids:
            yield _line(told | {"token_ids": tokens.token_ids.tolist()})
        elif self._digests is not None:
            try:
                digests = self._hash(self._digests, tokens)
            except OSError as error:
                logger.error("the journal is recorded without digests from here on: %s", error)
                self._digests.close()
                self._digests = None
                yield _line({"kind": "notice", "text": "what makes digests of tokens has ended: there are no more"})
            else:
                yield _line(told | {"digests": base64.b64encode(digests).decode("ascii")})
        if not tokens.start:
            tokens.prompt.token_ids = None

    def _hash(self, digests: TokenDigests, tokens: _Tokens) -> bytes:
        """Each token once, whether or not the prompt was told of when its output is."""
        prompt = tokens.prompt
        of_prompt = b""
        if not prompt.digest:
            assert prompt.token_ids is not None
            of_salt = digests.of_salt(prompt.salt)
            of_prompt = digests.of_tokens(of_salt, prompt.token_ids)
            prompt.digest = (of_salt + of_prompt)[-DIGEST_BYTES:]
        return digests.of_tokens(prompt.digest, tokens.token_ids) if tokens.start else of_prompt


def _line(content: dict[str, Any]) -> bytes:
    return _encode(content) + b"\n"


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
