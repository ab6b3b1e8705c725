"""The engine's own process: its main loop. The other side is EngineClient, in engine_client.py.

The loop is: drain the inbox, make one step, send what it gave. Inspections are answered between steps. The process
ends when it is told to, or at once when its parent is gone: it holds the read end of a pipe (standard input) whose
other end only the parent has, and through which it is told where to connect.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from pageframe.runtime import messages
from pageframe.runtime.config import EngineConfig
from pageframe.runtime.engine import Engine
from pageframe.runtime.engine_launch import without_collections
from pageframe.runtime.errors import InvalidRequestError, RequestNotFoundError, StartupError
from pageframe.runtime.grammar import CompiledGrammar
from pageframe.runtime.inspection import engine_stats, inspect
from pageframe.runtime.request import FinishReason, RequestOutput, choice_ids

logger = logging.getLogger(__name__)

#: A step comes after at most so many messages, so many answers, and answers for so long.
MAX_MESSAGES_PER_STEP = 1024
MAX_ANSWERS_PER_STEP = 8
MAX_ANSWER_SECONDS = 0.02
#: How often an engine with nothing else to do looks whether a grammar is ready.
GRAMMAR_POLL_MS = 2


@dataclass(slots=True, eq=False)
class _Compiling:
    """A request whose grammar is being compiled; it queues when that is ready. `aborted`: ids of its choices."""

    message: messages.Add
    arrival_time: float
    grammar: Future[CompiledGrammar]
    aborted: set[str] = field(default_factory=set)


class EngineLoop:
    """An engine behind a socket.

    Args:
        socket: a connected PAIR socket; every message in and out goes through it.
    """

    def __init__(self, engine: Engine, socket: zmq.Socket[bytes]) -> None:
        self._engine = engine
        self._socket = socket
        self._running = True
        self._refused: list[RequestOutput] = []
        self._questions: deque[messages.Question] = deque()
        self._compiling: list[_Compiling] = []

    def run(self) -> None:
        """Serve until told to shut down."""
        while self._running:
            changed = self._drain_inbox()
            if self._compiling:
                changed |= self._add_compiled()
            self._answer_some()
            outputs, self._refused = self._refused, []
            if self._engine.has_work:
                outputs += self._engine.step()
            elif not changed:
                continue
            self._send(b"step", messages.Step(outputs, engine_stats(self._engine)))

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
        long while requests wait for the next."""
        give_up_at = time.monotonic() + MAX_ANSWER_SECONDS
        for _ in range(MAX_ANSWERS_PER_STEP if self._engine.has_work else len(self._questions)):
            if not self._questions:
                break
            self._send(b"answer", self._answer(self._questions.popleft()))
            if self._engine.has_work and time.monotonic() > give_up_at:
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
        now, grammar = self._engine.now(), message.params.grammar
        if grammar is not None:
            self._compiling.append(_Compiling(message, now, self._engine.grammars.submit(grammar)))
            return
        try:
            self._add_to_engine(message, now)
        except InvalidRequestError as error:
            self._refuse(message, FinishReason.ERROR, error.message)

    def _add_to_engine(
        self, message: messages.Add, arrival_time: float, grammar: CompiledGrammar | None = None
    ) -> None:
        self._engine.add(
            message.request_id,
            message.prompt_token_ids,
            message.params,
            tenant=message.tenant,
            cache_salt=message.cache_salt,
            priority=message.priority,
            grammar=grammar,
            arrival_time=arrival_time,
        )

    def _add_compiled(self) -> bool:
        """Queue the requests whose grammars are ready, answer those whose are refused; whether there were any."""
        ready = [request for request in self._compiling if request.grammar.done()]
        self._compiling = [request for request in self._compiling if request not in ready]
        for request in ready:
            message = request.message
            try:
                self._add_to_engine(message, request.arrival_time, request.grammar.result())
            except InvalidRequestError as error:
                self._refuse(message, FinishReason.REFUSED, error.message)
            except Exception as error:
                logger.exception("the grammar of %s cannot be compiled", message.request_id)
                self._refuse(message, FinishReason.ERROR, f"its grammar cannot be compiled: {error}")
            for choice_id in request.aborted:
                self._engine.abort(choice_id)
        return bool(ready)

    def _abort_compiling(self, choice_id: str) -> bool:
        """Whether it is a choice of a request whose grammar is being compiled; with the last of them that is gone."""
        for request in self._compiling:
            choices = choice_ids(request.message.request_id, request.message.params.n)
            if choice_id in choices:
                request.aborted.add(choice_id)
                if len(request.aborted) == len(choices):
                    self._compiling.remove(request)
                    request.grammar.cancel()  # if it has not begun, others' need not wait for it
                return True
        return False

    def _refuse(self, message: messages.Add, reason: FinishReason, why: str) -> None:
        self._refused += [
            RequestOutput(choice_id, [], finish_reason=reason.value, error=why)
            for choice_id in choice_ids(message.request_id, message.params.n)
        ]

    def _answer(self, question: messages.Question) -> messages.Answer:
        try:
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
        _, config = messages.decode(socket.recv_multipart())
        try:
            engine = _start(config, socket)
        except StartupError as error:
            socket.send_multipart(messages.encode(b"failed", str(error)))
            socket.close(linger=5000)
            return 1
    socket.send_multipart(messages.encode(b"ready", engine.resolved))
    EngineLoop(engine, socket).run()
    socket.close(linger=1000)
    return 0


def _connect(address: str) -> zmq.Socket[bytes]:
    socket = zmq.Context().socket(zmq.PAIR)
    # No high-water mark: a step must never block on a slow reader. What can pile up is bounded by the requests.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.connect(address)
    return socket


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
