"""Prompts from a file: plain lines or JSON lines. It knows nothing of tokens or of the server."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pageframe.benchmarks.client.errors import InputError


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one request asks: a text, or a conversation. `num_tokens` is its length where a tokenizer counted it."""

    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    num_tokens: int | None = None


def read_prompts(path: Path, *, chat: bool) -> list[Prompt]:
    """The prompts of a file, in order; blank lines are skipped.

    A file whose first line is a JSON object is read as JSON lines. Of each object the first of these is used:
    "messages", "prompt", the first of "turns" (MT-bench), "question" (GSM8K). Any other file has one prompt a line.

    Args:
        chat: whether requests go to the chat endpoint; only there can "messages" be sent.

    Raises:
        InputError: the file cannot be read, or a line of it cannot be used; it names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise InputError(f"--prompts {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"--prompts {path} is not UTF-8 text (byte {error.start})") from None
    numbered = [(number, line.strip()) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise InputError(f"--prompts {path} holds no prompt")
    if not _is_object(numbered[0][1]):
        return [Prompt(text=line) for _, line in numbered]
    return [_from_json(line, chat=chat, where=f"--prompts {path} line {number}") for number, line in numbered]


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _from_json(line: str, *, chat: bool, where: str) -> Prompt:
    try:
        item = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not JSON: {error}") from None
    if not isinstance(item, dict):
        raise InputError(f"{where} is not a JSON object")
    if "messages" in item:
        messages = item["messages"]
        if not chat:
            raise InputError(f'{where} has "messages", which only --endpoint chat can send')
        if not (isinstance(messages, list) and messages and all(isinstance(each, dict) for each in messages)):
            raise InputError(f'{where}: "messages" must be a list of objects, not empty')
        return Prompt(messages=messages)
    turns = item.get("turns")
    for text in (item.get("prompt"), turns[0] if isinstance(turns, list) and turns else None, item.get("question")):
        if isinstance(text, str) and text:
            return Prompt(text=text)
    raise InputError(f'{where} has no text in "prompt", "turns" or "question", and no "messages"')
