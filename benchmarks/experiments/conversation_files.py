"""Reads files of conversations: two-turn questions, and recorded sessions. JSON lines, one file or a folder of them."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any


class PromptFileError(Exception):
    """A file given on the command line cannot be used; one line that says why."""


def read_mt_bench(path: Path) -> list[list[str]]:
    """The turns of each question."""
    return [_texts(record.get("turns"), "turns", where) for where, record in _records(path)]


def read_taubench(path: Path) -> list[list[str]]:
    """The inputs of each session in the order of their time, the sessions in the order in which they began."""
    sessions: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for where, record in _records(path):
        (text,) = _texts([record.get("input")], "input", where)
        if not isinstance(record.get("timestamp"), int):
            raise PromptFileError(f"{where}: timestamp is not a whole number")
        sessions[str(record.get("session_id"))].append((record["timestamp"], text))
    in_time = sorted(sorted(calls) for calls in sessions.values())
    return [[text for _, text in calls] for calls in in_time]


def _texts(values: object, name: str, where: str) -> list[str]:
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        raise PromptFileError(f"{where}: {name} holds no text")
    return values


def _records(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The JSON objects of a file, or of a folder's *.jsonl, each with where it stands."""
    paths = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    records = []
    for file in paths:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise PromptFileError(f"{file} cannot be read: {error}") from None
        for number, line in enumerate(lines, 1):
            where = f"{file} line {number}"
            try:
                record = json.loads(line)
            except ValueError as error:
                raise PromptFileError(f"{where} is not JSON: {error}") from None
            if not isinstance(record, dict):
                raise PromptFileError(f"{where} is not a JSON object")
            records.append((where, record))
    if not records:
        raise PromptFileError(f"{path} holds no JSON lines")
    return records
