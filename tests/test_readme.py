"""The README's table of flags says what the flags are."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pageframe.api.config import ServerConfig
from pageframe.runtime.config import EngineConfig

README = Path(__file__).parent.parent / "README.md"


def flag_row(field: dataclasses.Field[object]) -> str:
    choices, name = field.metadata["choices"], field.name.replace("_", "-")
    default = "" if field.default is None else f"`{field.default}`"
    help_text = str(field.metadata["help"]) + (f": {', '.join(choices)}" if choices else "")
    if isinstance(field.default, bool):
        name, default = f"[no-]{name}", "on" if field.default else "off"
    return f"| `--{name}` | {default} | {help_text} |"


def test_every_flag_of_serve_is_in_the_table() -> None:
    lines = README.read_text().splitlines()
    rows = [flag_row(field) for config in (EngineConfig, ServerConfig) for field in dataclasses.fields(config)]
    start = lines.index(rows[0])
    assert lines[start : start + len(rows)] == rows
