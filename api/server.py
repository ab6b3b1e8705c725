"""The life of a server on its port: listens while the engine starts (503 until it is ready); on SIGTERM or Ctrl-C
lets running requests finish. Knows nothing of routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator

import uvicorn

from pageframe.api.app import create_app
from pageframe.api.auth import Access
from pageframe.api.config import ServerConfig
from pageframe.api.loading_bar import loading_bar
from pageframe.api.metrics import Metrics
from pageframe.api.service import ServerState, Service
from pageframe.runtime.chat_template import ChatTemplate, load_chat_template
from pageframe.runtime.config import EngineConfig, ResolvedConfig
from pageframe.runtime.engine_client import EngineClient
from pageframe.runtime.errors import InvalidRequestError, StartupError
from pageframe.runtime.messages import RecordingConfig
from pageframe.runtime.models.config import sampling_defaults
from pageframe.runtime.models.source import ModelSource, resolve_source
from pageframe.runtime.request import SamplingParams
from pageframe.runtime.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

#: Requests that are cut off get so long to take their error.
CUT_SECONDS = 5.0
#: Idle connections are kept longer than clients keep them, so that none is closed while a request is on its way.
KEEP_ALIVE_SECONDS = 75

Load = Callable[[], Awaitable[Service]]


async def load_service(
    process: asyncio.subprocess.Process, engine_config: EngineConfig, server_config: ServerConfig
) -> Service:
    """Has the engine built, and loads the tokenizer and the template meanwhile.

    Args:
        process: what `launch_engine` gave.

    Raises:
        StartupError: one of them cannot.
    """
    source = await asyncio.to_thread(resolve_source, engine_config.model)
    with loading_bar(source.name) as advance:
        return await _load(process, source, engine_config, server_config, advance)


async def _load(
    process: asyncio.subprocess.Process,
    source: ModelSource,
    engine_config: EngineConfig,
    server_config: ServerConfig,
    advance: Callable[[int, int], None],
) -> Service:
    recording = _recording(server_config)
    starting = asyncio.create_task(EngineClient.start(process, engine_config, recording=recording, progress=advance))
    try:
        tokenizer, template, defaults = await asyncio.to_thread(_load_text_side, source)
    except BaseException:
        starting.cancel()
        for result in await asyncio.gather(starting, return_exceptions=True):
            if isinstance(result, EngineClient):
                await result.shutdown()
        raise
    client = await starting
    name = server_config.served_model_name or client.resolved.model_name
    metrics = Metrics(name, client.resolved, lambda: client.stats)
    client.on_step = metrics.step
    return Service(client, tokenizer, template, name, defaults, metrics)


def _recording(config: ServerConfig) -> RecordingConfig | None:
    if config.journal is None:
        return None
    return RecordingConfig(os.path.abspath(config.journal), config.journal_size, config.journal_token_ids)


async def serve_until_signal(listener: socket.socket, config: ServerConfig, access: Access, load: Load) -> None:
    """`serve` until SIGTERM or Ctrl-C; a second one ends running requests at once. Must run in the main thread.

    Raises:
        StartupError: from `load`.
    """
    state = ServerState(config, access)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, state.stop)
    await serve(listener, state, load)


async def serve(listener: socket.socket, state: ServerState, load: Load) -> None:
    """Serves on `listener` until `state.stop()`; then running requests end, the HTTP side, and the engine last.

    Args:
        load: makes the service; requests get 503 meanwhile.

    Raises:
        StartupError: from `load`.
    """
    server = _HttpServer(_uvicorn_config(state))
    http = asyncio.create_task(server.serve(sockets=[listener]))
    # It ends only when told to; should it fail by itself, nothing else would end the wait below.
    http.add_done_callback(lambda _: state.stop())
    port = listener.getsockname()[1]
    try:
        state.service = await _load_unless_stopped(state, load)
        if state.service is not None:
            _announce(state.service, state, port)
            await state.stopping.wait()
            await _drain(state)
    finally:
        server.should_exit = True
        try:
            await http
            await _drop_connections(server)
        finally:
            if state.service is not None:
                await state.service.client.shutdown()


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handling, which ends the process by the signal and knows no draining."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _uvicorn_config(state: ServerState) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(state),
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(CUT_SECONDS),
    )


async def _load_unless_stopped(state: ServerState, load: Load) -> Service | None:
    loading = asyncio.ensure_future(load())
    stopping = asyncio.create_task(state.stopping.wait())
    try:
        await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
        return loading.result() if loading.done() else None
    finally:
        stopping.cancel()
        loading.cancel()
        await asyncio.wait((loading, stopping))


async def _drop_connections(server: uvicorn.Server) -> None:
    """Closes what a client that does not read still holds open; there is one answer left in it at most."""
    for connection in server.server_state.connections:
        connection.transport.abort()
    # The loop's next round closes them.
    await asyncio.sleep(0)


async def _drain(state: ServerState) -> None:
    """Waits until running requests have ended; cuts them off after drain_timeout or at a second signal."""
    if not state.idle.is_set():
        logger.info("waiting up to %g s for %d running requests", state.config.drain_timeout, state.num_active)
    idle = asyncio.create_task(state.idle.wait())
    await asyncio.wait((idle, state.cut), timeout=state.config.drain_timeout, return_when=asyncio.FIRST_COMPLETED)
    if not idle.done():
        logger.warning("%d running requests are cut off", state.num_active)
        state.cut_off()
        await asyncio.wait((idle,), timeout=CUT_SECONDS)
    idle.cancel()


def _load_text_side(source: ModelSource) -> tuple[Tokenizer, ChatTemplate | None, dict[str, float | int]]:
    tokenizer = load_tokenizer(source)
    defaults = sampling_defaults(source)
    try:
        SamplingParams(**defaults)  # type: ignore[arg-type]
    except InvalidRequestError as error:
        raise StartupError(f"the model's generation_config: {error.message}") from None
    return tokenizer, load_chat_template(source, tokenizer), defaults


def describe_arithmetic(resolved: ResolvedConfig) -> str:
    """What computes and with which values, in one line."""
    kernels = f"kernels compiled for {resolved.instruction_set}" if resolved.instruction_set else "torch's operations"
    threads = f", threads: {resolved.threads}" if resolved.device == "cpu" else ""
    weights = "as in the file" if resolved.weights == "file" else resolved.weights
    bits = "the same bits in any batch" if resolved.batch_invariant else "the same up to its last bits"
    return (
        f"Computes on {resolved.device} with {kernels}{threads}; weights: {weights}, K/V: {resolved.kv_dtype}; "
        f"an answer is {bits}"
    )


def _announce(service: Service, state: ServerState, port: int) -> None:
    host = f"[{state.config.host}]" if ":" in state.config.host else state.config.host
    url = f"http://{host}:{port}"
    route, body = "chat/completions", """{"messages": [{"role": "user", "content": "What is a page frame?"}]}"""
    if service.template is None:
        route, body = "completions", """{"prompt": "Once upon a time"}"""
    key = ' -H "authorization: Bearer $KEY"' if state.access.needs_key else ""
    lines = [
        f"Pageframe serves {service.model_name} on {url}",
        f"Try it: curl {url}/v1/{route} -H 'content-type: application/json'{key} -d '{body}'",
        f"Look inside: {url}/dashboard",
        *([f"Opened by keys: {state.access}"] if state.access.needs_key else []),
        describe_arithmetic(service.client.resolved),
        *(f"Note: {note}" for note in service.client.resolved.notes),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
