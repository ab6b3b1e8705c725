"""`run_server`: the life of a server, from the port to the last answer.

Binds first, so that a port in use is told before a model is loaded; listens while the engine starts (503 until it
is ready); on SIGTERM or Ctrl-C lets running requests finish. Knows nothing of routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator

import uvicorn

from pageframe.api.app import create_app
from pageframe.api.config import ServerConfig
from pageframe.api.loading_bar import loading_bar
from pageframe.api.metrics import Metrics
from pageframe.api.service import ServerState, Service
from pageframe.runtime.chat_template import ChatTemplate, load_chat_template
from pageframe.runtime.config import EngineConfig
from pageframe.runtime.engine_client import EngineClient
from pageframe.runtime.errors import InvalidRequestError, StartupError
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


def run_server(engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Serves until SIGTERM or Ctrl-C. Must run in the main thread. Returns the exit status.

    A second signal ends running requests at once.
    """
    level = server_config.log_level.upper()
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn").setLevel("WARNING")
    try:
        with bind(server_config) as listener:
            asyncio.run(_serve_until_signal(listener, engine_config, server_config))
        return 0
    except StartupError as error:
        sys.stderr.write(f"pageframe: {error}\n")
        return 1


def bind(config: ServerConfig) -> socket.socket:
    """A listening socket.

    Raises:
        StartupError: the port is in use, or the address is not this machine's.
    """
    host, port = config.host, config.port
    listener: socket.socket | None = None
    try:
        # asyncio turns Nagle's algorithm off only where the socket says TCP by number; with it, the second write of
        # every response would wait 40 ms for the client's delayed acknowledgement.
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        if listener is not None:
            listener.close()
        if error.errno == errno.EADDRINUSE:
            raise StartupError(f"port {port} of {host} is in use; choose another with --port") from None
        raise StartupError(f"cannot listen on {host}, port {port}: {error.strerror or error}") from None
    return listener


async def load_service(engine_config: EngineConfig, server_config: ServerConfig) -> Service:
    """Starts the engine, and loads the tokenizer and the template meanwhile.

    Raises:
        StartupError: one of them cannot.
    """
    source = await asyncio.to_thread(resolve_source, engine_config.model)
    with loading_bar(source.name) as advance:
        return await _load(source, engine_config, server_config, advance)


async def _load(
    source: ModelSource,
    engine_config: EngineConfig,
    server_config: ServerConfig,
    advance: Callable[[int, int], None],
) -> Service:
    starting = asyncio.create_task(
        EngineClient.start(engine_config, log_level=server_config.log_level, progress=advance)
    )
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
            _announce(state.service, state.config, port)
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


async def _serve_until_signal(
    listener: socket.socket, engine_config: EngineConfig, server_config: ServerConfig
) -> None:
    state = ServerState(server_config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, state.stop)
    await serve(listener, state, lambda: load_service(engine_config, server_config))


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


def _announce(service: Service, config: ServerConfig, port: int) -> None:
    host = f"[{config.host}]" if ":" in config.host else config.host
    url = f"http://{host}:{port}"
    route, body = "chat/completions", """{"messages": [{"role": "user", "content": "What is a page frame?"}]}"""
    if service.template is None:
        route, body = "completions", """{"prompt": "Once upon a time"}"""
    lines = [
        f"Pageframe serves {service.model_name} on {url}",
        f"Try it: curl {url}/v1/{route} -H 'content-type: application/json' -d '{body}'",
        *(f"Note: {note}" for note in service.client.resolved.notes),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
