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
from typing import Any

import msgspec
import zmq

from pageframe.runtime import messages
from pageframe.runtime.config import EngineConfig
from pageframe.runtime.engine import Engine
from pageframe.runtime.engine_launch import without_collections
from pageframe.runtime.errors import InvalidRequestError, RequestNotFoundError, StartupError
from pageframe.runtime.inspection import engine_stats, inspect
from pageframe.runtime.request import FinishReason, RequestOutput, choice_ids

logger = logging.getLogger(__name__)

#: A step comes after at most so many messages, so many answers, and answers for so long.
MAX_MESSAGES_PER_STEP = 1024
MAX_ANSWERS_PER_STEP = 8
MAX_ANSWER_SECONDS = 0.02


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

    def run(self) -> None:
        """Serve until told to shut down."""
        while self._running:
            changed = self._drain_inbox()
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
        waiting = 0 if self._engine.has_work or self._questions else -1
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
            return self._engine.abort(body)
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
        try:
            self._engine.add(
                message.request_id,
                message.prompt_token_ids,
                message.params,
                tenant=message.tenant,
                cache_salt=message.cache_salt,
                priority=message.priority,
            )
        except InvalidRequestError as error:
            self._refused += [
                RequestOutput(choice_id, [], finish_reason=FinishReason.ERROR.value, error=error.message)
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
