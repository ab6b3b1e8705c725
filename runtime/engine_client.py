"""The API process's handle on the engine process: has it build an engine, talks to it, notices at once when it dies.

asyncio, one event loop. It imports neither torch nor anything that does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from pageframe.runtime import messages
from pageframe.runtime.admission import Door
from pageframe.runtime.config import EngineConfig, ResolvedConfig
from pageframe.runtime.engine_launch import end_engine
from pageframe.runtime.errors import (
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    RequestNotFoundError,
    StartupError,
    TooManyWaitError,
)
from pageframe.runtime.inspection import EngineStats
from pageframe.runtime.request import RequestOutput, SamplingParams, choice_ids

logger = logging.getLogger(__name__)

#: A Unix socket's path may have at most 107 bytes.
MAX_SOCKET_PATH = 100
SHUTDOWN_SECONDS = 5.0
#: Questions that may wait for an answer at once.
MAX_CALLS = 256
LAST_WORDS_SECONDS = 3.0


class OutputQueue:
    """The outputs of a request's choices, each choice's in order; its last has its finish_reason set."""

    __slots__ = ("_queue",)

    def __init__(self) -> None:
        self._queue: asyncio.Queue[RequestOutput | EngineDeadError] = asyncio.Queue()

    async def get(self) -> RequestOutput:
        """The next output.

        Raises:
            EngineDeadError: the engine died; there will be no more.
        """
        item = await self._queue.get()
        if isinstance(item, EngineDeadError):
            raise item
        return item

    def put(self, item: RequestOutput | EngineDeadError) -> None:
        self._queue.put_nowait(item)


class EngineClient:
    """Made by `start`. Methods are called from the event loop it was started in."""

    def __init__(
        self, process: asyncio.subprocess.Process, socket: zmq.asyncio.Socket, folder: str, resolved: ResolvedConfig
    ) -> None:
        self.resolved = resolved
        self.stats = EngineStats(num_blocks=resolved.num_blocks, blocks_free=resolved.num_blocks)
        self.death_note = ""
        #: Called with the number of tokens of each step that computed some.
        self.on_step: Callable[[int], None] = lambda num_tokens: None
        self._process = process
        self._socket = socket
        self._folder = folder
        #: By choice; the choices of one request share theirs.
        self._queues: dict[str, OutputQueue] = {}
        self._calls: dict[int, asyncio.Future[bytes]] = {}
        self._num_calls = 0
        self._last_progress = time.monotonic()
        self._door = Door(resolved)
        #: Those of the request that was added last; the prompts of one HTTP request share theirs.
        self._told_params: SamplingParams | None = None
        self._closing = False
        reading = asyncio.create_task(self._read())
        reading.add_done_callback(self._reading_ended)
        self._tasks = [reading, asyncio.create_task(self._watch())]

    # ---- life and death -------------------------------------------------------------------------------------------

    @classmethod
    async def start(
        cls,
        process: asyncio.subprocess.Process,
        config: EngineConfig,
        *,
        recording: messages.RecordingConfig | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> EngineClient:
        """Say what the engine is to be, and wait until it is ready.

        Args:
            process: what `launch_engine` gave. It is the client's from now on.
            recording: where the engine records its journal; None for nowhere.
            progress: called with (tensors loaded, tensors in all).

        Raises:
            StartupError: it cannot start; the message is one clear line.
        """
        folder = tempfile.mkdtemp(prefix="pageframe-")
        if len(os.fsencode(folder)) > MAX_SOCKET_PATH - len("/engine"):
            shutil.rmtree(folder)
            folder = tempfile.mkdtemp(prefix="pageframe-", dir="/tmp")
        address = f"ipc://{folder}/engine"
        socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.bind(address)
        assert process.stdin is not None
        process.stdin.write(address.encode())
        # Not awaited: it waits for a peer, and a process that ends before it connects never is one.
        sending = asyncio.ensure_future(
            socket.send_multipart(messages.encode(b"start", messages.Start(config, recording)))
        )
        try:
            resolved = await _wait_until_ready(process, socket, progress)
        except BaseException:
            sending.cancel()
            await end_engine(process)
            socket.close(linger=0)
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return cls(process, socket, folder, resolved)

    @property
    def is_alive(self) -> bool:
        return not self.death_note

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.pid

    @property
    def num_outstanding(self) -> int:
        """Choices that have not had their last output."""
        return len(self._queues)

    def seconds_since_progress(self) -> float:
        """Seconds since the engine last went on, or had only grammars to wait for, while requests wait for it; 0.0 when
        none do."""
        return time.monotonic() - self._last_progress if self._queues else 0.0

    async def shutdown(self) -> None:
        """End the engine process and everything that belongs to it. Requests still open get EngineDeadError."""
        if self._closing:
            return
        self._closing = True
        if self.is_alive:
            await self._socket.send_multipart(messages.encode(b"shutdown", None))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), SHUTDOWN_SECONDS)
        await end_engine(self._process)
        self._die("the engine was shut down")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _watch(self) -> None:
        code = await self._process.wait()
        self._die(f"the engine process ended with code {code}")

    def _reading_ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("reading from the engine failed", exc_info=error)
            self._die(f"reading from the engine failed: {error}")

    def _die(self, note: str) -> None:
        """Whoever waits for the engine gets an error now; nothing is retried."""
        if self.death_note:
            return
        self.death_note = note
        self.stats = self.stats.at_the_end()
        for queue in set(self._queues.values()):
            queue.put(EngineDeadError(note))
        self._queues.clear()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError(note))
        self._calls.clear()

    # ---- requests -------------------------------------------------------------------------------------------------

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """The door.

        Raises:
            InvalidRequestError: it can never be served as asked.
            EngineDeadError: there is no engine any more.
        """
        self._check_alive()
        self._door.max_total_tokens(prompt_token_ids, params)

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        tenant: str = "",
        cache_salt: str = "",
        priority: int = 0,
    ) -> OutputQueue:
        """Hand a request to the engine; the outputs of all its choices come in the one queue, under the choices' ids.

        Args:
            request_id: the caller's own, and new; the choices' ids are those of `choice_ids`.
            prompt_token_ids, params: have passed `check`; what has not ends with an error output.

        Raises:
            EngineDeadError: there is no engine any more.
        """
        self._check_alive()
        choices = choice_ids(request_id, params.n)
        assert self._queues.keys().isdisjoint(choices), f"request id {request_id} is live already"
        if not self._queues:
            self._last_progress = time.monotonic()
        queue = OutputQueue()
        self._queues.update(dict.fromkeys(choices, queue))
        told, self._told_params = None if params is self._told_params else params, params
        self._send(b"add", messages.Add(request_id, list(prompt_token_ids), told, tenant, cache_salt, priority))
        return queue

    def abort(self, choice_id: str) -> None:
        """Its client is gone. Free its blocks; no more outputs come. Does nothing where it has ended."""
        if self._queues.pop(choice_id, None) is not None and self.is_alive:
            self._send(b"abort", choice_id)

    def choices_of(self, request_id: str) -> list[str]:
        """The ids of what is under way of a request: its own, or those of its choices."""
        if request_id in self._queues:
            return [request_id]
        prefix = f"{request_id}-"
        return [other for other in self._queues if other.startswith(prefix) and other[len(prefix) :].isdigit()]

    def cancel(self, choice_id: str) -> bool:
        """End a choice for somebody who is not its client; that one gets a last output, its finish_reason "cancelled".

        False where it is unknown or has ended."""
        queue = self._queues.get(choice_id)
        if queue is None:
            return False
        self.abort(choice_id)
        queue.put(RequestOutput(request_id=choice_id, token_ids=[], finish_reason="cancelled"))
        return True

    def finish(self, choice_id: str, num_output_tokens: int) -> None:
        """A stop string ended its text after that many output tokens. No more outputs come."""
        self._queues.pop(choice_id, None)
        if self.is_alive:
            self._send(b"finish", messages.Finish(choice_id, num_output_tokens))

    async def inspect(self, what: str, argument: str = "") -> bytes:
        """Ask about the engine's inside; see inspection.inspect. The answer is of one step, as JSON text.

        Raises:
            RequestNotFoundError, InvalidRequestError: as inspection.inspect.
            EngineError: answering failed.
            EngineDeadError: there is no engine any more.
        """
        return await self._call(b"question", lambda call: messages.Question(call, what, argument))

    async def reset_prefix_cache(self) -> int:
        """Make the engine forget all computed prefixes; how many blocks could be found until then.

        Raises:
            EngineDeadError: there is no engine any more.
        """
        return msgspec.json.decode(await self._call(b"reset", messages.ResetPrefixCache), type=int)

    async def _call(self, kind: bytes, make: Callable[[int], Any]) -> bytes:
        """Send a message that has an answer; `make` gets the number under which that will come."""
        self._check_alive()
        if len(self._calls) >= MAX_CALLS:
            raise TooManyWaitError(f"{MAX_CALLS} questions about the engine wait for an answer already")
        call = self._num_calls = self._num_calls + 1
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._calls[call] = future
        self._send(kind, make(call))
        try:
            return await future
        finally:
            self._calls.pop(call, None)

    def _check_alive(self) -> None:
        if not self.is_alive:
            raise EngineDeadError(self.death_note)

    # ---- messages -------------------------------------------------------------------------------------------------

    def _send(self, kind: bytes, body: Any) -> None:
        # With no high-water mark this never blocks, and the returned future is done at once.
        self._socket.send_multipart(messages.encode(kind, body))

    async def _read(self) -> None:
        while True:
            kind, body = messages.decode(await self._socket.recv_multipart())
            if kind == b"step":
                self._deliver(body)
            elif kind == b"answer":
                self._resolve(body)

    def _deliver(self, step: messages.Step) -> None:
        is_new = step.stats.step != self.stats.step
        self.stats = step.stats
        # A step that computes nothing and gives nothing is no progress: a scheduler that admits nobody is stuck.
        if step.outputs or step.stats.step_tokens or step.waits_for_grammars:
            self._last_progress = time.monotonic()
        if is_new and step.stats.step_tokens:
            self.on_step(step.stats.step_tokens)
        for output in step.outputs:
            queue = self._queues.get(output.request_id)
            if queue is None:
                continue  # aborted or finished while the step ran
            queue.put(output)
            if output.finish_reason:
                del self._queues[output.request_id]

    def _resolve(self, answer: messages.Answer) -> None:
        future = self._calls.get(answer.call)
        if future is None or future.done():
            return
        if answer.not_found:
            future.set_exception(RequestNotFoundError(answer.error))
        elif answer.failed:
            future.set_exception(EngineError("the inspection failed; the engine's log says how"))
        elif answer.error:
            future.set_exception(InvalidRequestError(answer.error))
        else:
            future.set_result(answer.body)


async def _wait_until_ready(
    process: asyncio.subprocess.Process,
    socket: zmq.asyncio.Socket,
    progress: Callable[[int, int], None] | None,
) -> ResolvedConfig:
    ended = asyncio.ensure_future(process.wait())
    try:
        while True:
            receiving = asyncio.ensure_future(socket.recv_multipart())
            await asyncio.wait([receiving, ended], return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done():
                # Its last words may still be on the way: why it could not start.
                await asyncio.wait([receiving], timeout=LAST_WORDS_SECONDS)
            if not receiving.done():
                receiving.cancel()
                raise StartupError(f"the engine process ended with code {process.returncode} before it was ready")
            kind, body = messages.decode(receiving.result())
            if kind == b"ready":
                assert isinstance(body, ResolvedConfig)
                return body
            if kind == b"failed":
                raise StartupError(body)
            if progress is not None:
                progress(body.done, body.total)
    finally:
        ended.cancel()
