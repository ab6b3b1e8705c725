"""What llguidance takes without a word and does not do as asked: integers that it rounds, settings that it passes over.

Looked for in a grammar's source before it is compiled. Knows nothing of tools or of compilation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

#: llguidance keeps a schema's numbers as float64: from here on integers are rounded.
MAX_EXACT_INT = 2**53
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_VALUES = frozenset({"const", "enum"})
#: Keywords whose value has schemas by names of the schema's own.
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
#: Keywords whose value binds nothing.
_NOTES = frozenset({"default", "examples", "example"})
#: What a Lark grammar's `%llguidance {…}` may set.
LARK_SETTINGS = ("allow_initial_skip", "allow_invalid_utf8", "no_forcing")
#: A comment, a text, a regular expression, or what JSON follows. None fails once begun, so a source is read once.
_LARK_PIECE = re.compile(r'(?://|#)[^\n]*|"(?:\\.|[^"\\\n])*"?|/(?:\\.|[^/\\\n])+/?|%(json|llguidance)\b\s*')
_decoder = json.JSONDecoder()


def schema_complaint(source: str) -> str:
    """What is wrong with a JSON schema, "" for nothing that is known here. What is no JSON is left to llguidance."""
    try:
        return inexact_number(json.loads(source))
    except (ValueError, RecursionError):
        return ""


def lark_complaint(source: str) -> str:
    """What is wrong with a Lark grammar's settings or with a schema in it; otherwise as `schema_complaint`."""
    for directive, value in _lark_values(source):
        if directive == "json":
            complaint = inexact_number(value)
            if complaint:
                return complaint
        elif isinstance(value, dict):
            unknown = next((name for name in value if name not in LARK_SETTINGS), None)
            if unknown is not None:
                return f"%llguidance has the setting {unknown[:60]!r}; it may have {', '.join(LARK_SETTINGS)}"
    return ""


def inexact_number(schema: object) -> str:
    """Which number of a schema would be rounded, in words; "" for none.

    Args:
        schema: as parsed from JSON.
    """
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        if not isinstance(value, dict):
            continue
        for keyword, content in value.items():
            number = _rounded_bound(content) if keyword in _BOUNDS else _rounded_value(keyword, content)
            if number is not None:
                return (
                    f"its {keyword} has {_shown(number)}; numbers beyond {MAX_EXACT_INT} (2**53) cannot be kept exactly"
                )
            if keyword in _NAMED_SCHEMAS and isinstance(content, dict):
                waiting += content.values()
            elif keyword not in _VALUES | _NOTES:
                waiting.append(content)
    return ""


def _rounded_bound(value: object) -> int | float | None:
    """Bounds are made into digits, so the float64s beyond are no good either."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) > MAX_EXACT_INT:
        return value
    return None


def _rounded_value(keyword: str, content: object) -> int | None:
    waiting = [content] if keyword in _VALUES else []
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, int) and abs(value) > MAX_EXACT_INT:
            return value
    return None


def _shown(number: float) -> str:
    text = str(number)
    return text if len(text) <= 40 else f"{text[:20]}… ({len(text)} digits)"


def _lark_values(source: str) -> Iterator[tuple[str, Any]]:
    """The JSON behind each %json and %llguidance; what is no JSON is left to llguidance."""
    position = 0
    while piece := _LARK_PIECE.search(source, position):
        position = piece.end()
        if piece[1] is None:
            continue
        try:
            value, position = _decoder.raw_decode(source, position)
        except (ValueError, RecursionError):
            continue
        yield piece[1], value
