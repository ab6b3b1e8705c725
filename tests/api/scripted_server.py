"""An HTTP server in a thread that answers each path from a script, for the terminal commands' tests."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

WAIT_SECONDS = 10.0

Json = dict[str, Any]
#: Sends the answer to a POST itself.
Streamer = Callable[[BaseHTTPRequestHandler], None]


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves is part of many tests; what else fails is printed, as ever."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class ScriptedServer:
    """Each GET takes its path's next answer, a JSON value or (status, JSON value); the last one stays.

    Each POST takes the next of `posts` and is recorded, parsed, in `bodies`.
    """

    def __init__(self, answers: dict[str, list[Any]] | None = None, posts: Iterable[Streamer] = ()) -> None:
        self.answers = answers or {}
        self.posts = list(posts)
        self.bodies: list[Json] = []
        self.asked: list[str] = []
        self._lock = threading.Lock()
        script = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer = script._next_answer(self.path)
                status, value = answer if isinstance(answer, tuple) else (200, answer)
                send(self, status, json.dumps(value).encode())

            def do_POST(self) -> None:
                script.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                script.posts.pop(0)(self)

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing."""

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def _next_answer(self, path: str) -> Any:
        with self._lock:
            self.asked.append(path)
            left = self.answers.get(path, [(404, {"error": {"message": f"there is no {path}", "code": None}})])
            return left.pop(0) if len(left) > 1 else left[0]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.shutdown()
        self._thread.join(WAIT_SECONDS)
        self._server.server_close()


def send(handler: BaseHTTPRequestHandler, status: int, body: bytes) -> None:
    """A whole answer; the connection ends with it."""
    handler.send_response(status)
    handler.send_header("content-type", "application/json")
    handler.send_header("content-length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)
