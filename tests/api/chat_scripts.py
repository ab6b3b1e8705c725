"""Streams of chat answers for a scripted server, and `pageframe chat` as a function."""

from __future__ import annotations

import argparse
import io
import json
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from pageframe.api.terminal_chat import add_arguments, run

from .scripted_server import Json, Streamer, send

MODELS: dict[str, list[Any]] = {
    "/health": [{"status": "ok"}],
    "/v1/models": [{"object": "list", "data": [{"id": "tiny"}]}],
}
NOWHERE = "http://127.0.0.1:1"


def open_stream(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("content-type", "text/event-stream")
    handler.end_headers()


def send_event(handler: BaseHTTPRequestHandler, value: Any) -> None:
    handler.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")


def piece(text: str | None, finish_reason: str | None = None) -> Json:
    delta = {"role": "assistant", "content": ""} if text is None else {"content": text}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}], "usage": None}


def answer(*texts: str, finish_reason: str = "stop", tokens: int = 5) -> Streamer:
    """A whole stream as the server sends it."""
    usage = {"prompt_tokens": 12, "completion_tokens": tokens, "total_tokens": 12 + tokens}

    def stream(handler: BaseHTTPRequestHandler) -> None:
        open_stream(handler)
        for event in [piece(None), *map(piece, texts), piece("", finish_reason), {"choices": [], "usage": usage}]:
            send_event(handler, event)
        handler.wfile.write(b"data: [DONE]\n\n")

    return stream


def refuse(status: int, message: str, code: str | None = None) -> Streamer:
    body = json.dumps({"error": {"message": message, "type": "x", "param": None, "code": code}}).encode()
    return lambda handler: send(handler, status, body)


def break_off(*events: Any) -> Streamer:
    def stream(handler: BaseHTTPRequestHandler) -> None:
        open_stream(handler)
        for event in events:
            send_event(handler, event)

    return stream


def chat(*argv: str, **parameters: Any) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args(argv), **parameters)


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))


def contents(body: Json) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in body["messages"]]
