"""`run_server`: a server's first steps, in the order that makes it ready soonest.

Reads the keys and binds first, so that a wrong file of keys or a port in use is told before anything is loaded; then
spawns the engine process, which takes longest; then imports all that speaks HTTP.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import sys

from pageframe.api.auth import Access, load_access
from pageframe.api.config import ServerConfig
from pageframe.runtime.config import EngineConfig
from pageframe.runtime.engine_launch import end_engine, launch_engine, without_collections
from pageframe.runtime.errors import StartupError


def run_server(engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Serves until SIGTERM or Ctrl-C. Must run in the main thread. Returns the exit status.

    A second signal ends running requests at once.
    """
    level = server_config.log_level.upper()
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn").setLevel("WARNING")
    try:
        access = load_access(server_config, os.environ)
        with bind(server_config) as listener:
            asyncio.run(_serve(listener, engine_config, server_config, access))
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


async def _serve(
    listener: socket.socket, engine_config: EngineConfig, server_config: ServerConfig, access: Access
) -> None:
    process = await launch_engine(server_config.log_level)
    try:
        with without_collections():
            from pageframe.api.server import load_service, serve_until_signal

        await serve_until_signal(
            listener, server_config, access, lambda: load_service(process, engine_config, server_config)
        )
    finally:
        await end_engine(process)
