"""The engine's own process: its main loop. The other side is EngineClient, in engine_client.py.

The loop is: drain the inbox, make one step, send what it gave. Inspections are answered between steps. The process
ends when it is told to, or at once when its parent is gone: it holds the read end of a pipe (standard input) whose
other end only the parent has, and through which it is told where to connect.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import signal
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq

from pageframe.runtime import messages
from pageframe.runtime.config import EngineConfig
from pageframe.runtime.engine import Engine
from pageframe.runtime.engine_launch import without_collections
from pageframe.runtime.errors import (
    EngineDeadError,
    InvalidRequestError,
    RequestNotFoundError,
    StartupError,
    TooManyWaitError,
)
from pageframe.runtime.grammar import CompiledGrammar
from pageframe.runtime.grammar_service import Compilation
from pageframe.runtime.inspection import engine_stats, inspect
from pageframe.runtime.journal_recorder import JournalRecorder
from pageframe.runtime.live_frames import LiveFrames
from pageframe.runtime.request import FinishReason, RequestOutput, SamplingParams, choice_ids

logger = logging.getLogger(__name__)

#: A step comes after at most so many messages, so many answers, and answers for so long.
MAX_MESSAGES_PER_STEP = 1024
MAX_ANSWERS_PER_STEP = 8
MAX_ANSWER_SECONDS = 0.02
#: How often an engine with nothing else to do looks whether a grammar is ready.
GRAMMAR_POLL_MS = 2
#: How often such an engine says that it is well.
NEWS_SECONDS = 1.0


@dataclass(slots=True, eq=False)
class _Compiling:
    """A request whose grammar is being compiled; it queues when that is ready. `aborted`: ids of its choices."""

    message: messages.Add
    params: SamplingParams
    arrival_time: float
    grammar: Compilation
    aborted: set[str] = field(default_factory=set)

    @property
    def deadline(self) -> float:
        seconds = self.params.timeout_seconds
        return math.inf if seconds is None else self.arrival_time + seconds

    @property
    def choices(self) -> list[str]:
        return choice_ids(self.message.request_id, self.params.n)


class EngineLoop:
    """An engine behind a socket.

    Args:
        socket: a connected PAIR socket; every message in and out goes through it.
        recorder: gets the journal after every step.
    """

    def __init__(self, engine: Engine, socket: zmq.Socket[bytes], recorder: JournalRecorder | None = None) -> None:
        self._engine = engine
        self._socket = socket
        self._running = True
        self._frames = LiveFrames(engine)
        self._recorder = recorder
        #: Last outputs of requests that never came to the engine.
        self._refused: list[RequestOutput] = []
        self._questions: deque[messages.Question] = deque()
        self._compiling: list[_Compiling] = []
        #: Those of the latest request; see messages.Add.
        self._params = SamplingParams()
        self._next_news = math.inf

    def run(self) -> None:
        """Serve until told to shut down."""
        while self._running:
            changed = self._drain_inbox()
            if self._compiling:
                changed |= self._add_compiled()
            self._answer_some()
            outputs, self._refused = self._refused, []
            has_work = self._engine.has_work
            if has_work:
                outputs += self._engine.step()
            elif not changed and not (self._compiling and time.monotonic() >= self._next_news):
                continue
            waits_for_grammars = bool(self._compiling) and not has_work
            self._send(b"step", messages.Step(outputs, engine_stats(self._engine), waits_for_grammars))
            self._next_news = time.monotonic() + NEWS_SECONDS
            if self._recorder is not None:
                self._recorder.record()

    def _drain_inbox(self) -> bool:
        """Handle the messages at hand, waiting for one where there is nothing else to do; whether state changed.

        Bounded, so that whoever keeps the inbox full cannot keep the engine from its next step.
        """
        changed = False
        waiting = 0 if self._engine.has_work or self._questions else GRAMMAR_POLL_MS if self._compiling else -1
        for _ in range(MAX_MESSAGES_PER_STEP):
            if not self._running or not self._socket.poll(waiting, zmq.POLLIN):
                break
            waiting = 0
            changed |= self._handle(*messages.decode(self._socket.recv_multipart()))
        return changed

    def _answer_some(self) -> None:
        """Answer questions between two steps: a few, so that those asked together are answered of one step, but not for
        long while requests wait for the next, or to be heard."""
        give_up_at = time.monotonic() + MAX_ANSWER_SECONDS
        for _ in range(min(MAX_ANSWERS_PER_STEP, len(self._questions))):
            self._send(b"answer", self._answer(self._questions.popleft()))
            if time.monotonic() > give_up_at:
                break

    def _handle(self, kind: bytes, body: Any) -> bool:
        if kind == b"add":
            self._add(body)
        elif kind == b"abort":
            return self._abort_compiling(body) or self._engine.abort(body)
        elif kind == b"finish":
            return self._engine.finish(body.request_id, body.num_output_tokens)
        elif kind == b"question":
            self._questions.append(body)
            return False
        elif kind == b"reset":
            num_blocks = self._engine.reset_prefix_cache()
            self._send(b"answer", messages.Answer(body.call, body=msgspec.json.encode(num_blocks)))
        elif kind == b"shutdown":
            self._running = False
        return True

    def _add(self, message: messages.Add) -> None:
        if message.params is not None:
            self._params = message.params
        now, params = self._engine.now(), self._params
        try:
            if params.grammar is None:
                self._add_to_engine(message, params, now)
            else:
                grammar = self._engine.grammars.submit(params.grammar)
                self._compiling.append(_Compiling(message, params, now, grammar))
        except InvalidRequestError as error:
            self._refuse(choice_ids(message.request_id, params.n), FinishReason.ERROR, error.message)
        except TooManyWaitError as error:
            self._refuse(choice_ids(message.request_id, params.n), FinishReason.BUSY, str(error))

    def _add_to_engine(
        self,
        message: messages.Add,
        params: SamplingParams,
        arrival_time: float,
        grammar: CompiledGrammar | None = None,
    ) -> None:
        self._engine.add(
            message.request_id,
            message.prompt_token_ids,
            params,
            tenant=message.tenant,
            cache_salt=message.cache_salt,
            priority=message.priority,
            grammar=grammar,
            arrival_time=arrival_time,
        )

    def _add_compiled(self) -> bool:
        """Queue the requests whose grammars are ready, end those whose deadline has come; whether there were any."""
        now = self._engine.now()
        leaving = [request for request in self._compiling if request.grammar.done() or request.deadline <= now]
        for request in leaving:
            self._compiling.remove(request)
            if request.deadline <= now:
                request.grammar.cancel()
                late = [choice_id for choice_id in request.choices if choice_id not in request.aborted]
                self._refuse(late, FinishReason.TIMEOUT)
            else:
                self._queue_compiled(request)
        return bool(leaving)

    def _queue_compiled(self, request: _Compiling) -> None:
        try:
            self._add_to_engine(request.message, request.params, request.arrival_time, request.grammar.result())
        except InvalidRequestError as error:
            self._refuse(request.choices, FinishReason.REFUSED, error.message, param="grammar")
        except Exception as error:
            logger.exception("the grammar of %s cannot be compiled", request.message.request_id)
            self._refuse(request.choices, FinishReason.ERROR, f"its grammar cannot be compiled: {error}")
        for choice_id in request.aborted:
            self._engine.abort(choice_id)

    def _abort_compiling(self, choice_id: str) -> bool:
        """Whether it is a choice of a request whose grammar is being compiled; with the last of them that is gone."""
        for request in self._compiling:
            if choice_id in request.choices:
                request.aborted.add(choice_id)
                if len(request.aborted) == request.params.n:
                    self._compiling.remove(request)
                    request.grammar.cancel()
                return True
        return False

    def _refuse(self, choices: list[str], reason: FinishReason, why: str = "", *, param: str = "") -> None:
        self._refused += [
            RequestOutput(choice_id, [], finish_reason=reason.value, error=why, param=param) for choice_id in choices
        ]

    def _answer(self, question: messages.Question) -> messages.Answer:
        try:
            if question.what == "frame":
                body: Any = self._frames_for(question.argument)
            else:
                body = inspect(self._engine, question.what, question.argument)
        except RequestNotFoundError as error:
            return messages.Answer(question.call, error=error.request_id, not_found=True)
        except InvalidRequestError as error:
            return messages.Answer(question.call, error=error.message)
        except Exception:
            # A fault of an inspection must not end the requests that are being served.
            logger.exception("the question about %s failed", question.what)
            return messages.Answer(question.call, failed=True)
        return messages.Answer(question.call, body=msgspec.json.encode(body))

    def _frames_for(self, who: str) -> list[dict[str, Any] | None]:
        """[the next frame, a whole one], None for what nobody needs. `who`: "start" where nobody has watched until now,
        "join" where somebody new does too."""
        if who == "start":
            return [None, self._frames.start()]
        return [self._frames.next(), self._frames.whole() if who == "join" else None]

    def _send(self, kind: bytes, body: Any) -> None:
        self._socket.send_multipart(messages.encode(kind, body))


def _follow_parent() -> queue.SimpleQueue[str]:
    """Where the address to connect to comes as soon as the parent says it.

    Ends this process, in the middle of whatever it does, once the parent's end of standard input is closed.
    """
    addresses: queue.SimpleQueue[str] = queue.SimpleQueue()

    def watch() -> None:
        # A pipe hands over a text as short as an address in one piece.
        while text := os.read(sys.stdin.fileno(), 4096):
            addresses.put(text.decode())
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
    return addresses


def _start(config: EngineConfig, socket: zmq.Socket[bytes]) -> Engine:
    from pageframe.runtime.engine_builder import build_engine

    def progress(done: int, total: int) -> None:
        socket.send_multipart(messages.encode(b"loading", messages.Loading(done, total)))

    return build_engine(config, progress)


def main(log_level: str) -> int:
    """Connect to the client, build the engine it asks for, serve it."""
    # The terminal's Ctrl-C and a group's SIGTERM reach this process too; the parent decides when the engine ends, so
    # that running requests can be drained.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=log_level, format="%(levelname)s engine: %(message)s")
    addresses = _follow_parent()
    with without_collections():
        # torch takes a second to import, in which the parent makes ready to say what is to be built.
        import pageframe.runtime.engine_builder  # noqa: F401

        socket = _connect(addresses.get())
        _, start = messages.decode(socket.recv_multipart())
        try:
            engine = _start(start.config, socket)
            recorder = _start_recorder(engine, start.recording)
        except StartupError as error:
            socket.send_multipart(messages.encode(b"failed", str(error)))
            socket.close(linger=5000)
            return 1
    socket.send_multipart(messages.encode(b"ready", engine.resolved))
    code = 0
    try:
        EngineLoop(engine, socket, recorder).run()
    except EngineDeadError:
        # Said by the step that failed. Whoever waits learns it from this process' end.
        logger.exception("the engine ends")
        code = 1
    finally:
        # The last step, which may be the one that failed, has not been recorded yet.
        if recorder is not None:
            recorder.close()
    socket.close(linger=1000)
    return code


def _start_recorder(engine: Engine, config: messages.RecordingConfig | None) -> JournalRecorder | None:
    if config is None:
        return None
    return JournalRecorder(engine, Path(config.path), max_bytes=config.max_bytes, with_token_ids=config.with_token_ids)


def _connect(address: str) -> zmq.Socket[bytes]:
    socket = zmq.Context().socket(zmq.PAIR)
    # No high-water mark: a step must never block on a slow reader. What can pile up is bounded by the requests.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.connect(address)
    return socket


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
