"""The JSON scanner against Python's own reader, and calls read in every cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pageframe.api.tool_json import CallReader, JsonScanner

from .tool_cases import cut

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('aé"\\\n', max_size=3), inner, max_size=3),
    max_leaves=8,
)
FRAGMENTS = [
    *'{}[]:,"\\ -+.eE0123456789',
    "true",
    "nul",
    "l",
    "fal",
    "se",
    "\n",
    "\\u00e9",
    "\\ud8",
    "é",
    '"a"',
    '":',
    "1e",
    "{}",
]


def refuse(constant: str) -> Any:
    raise ValueError(constant)


def is_json(text: str) -> bool:
    """Whether Python reads it: its whole, without what JSON does not know, with control characters in strings."""
    try:
        json.loads(text, strict=False, parse_constant=refuse)
    except (ValueError, RecursionError):
        return False
    return True


def scan(pieces: list[str]) -> tuple[bool, bool, str]:
    """(done, all of it read, what came out)."""
    scanner, out = JsonScanner(), []
    for index, piece in enumerate(pieces):
        end = scanner.feed(piece, 0, out)
        if end < len(piece):
            return scanner.done, False, "".join(out)
        if scanner.done:
            return True, not any(pieces[index + 1 :]), "".join(out)
    return scanner.done, True, "".join(out)


@settings(max_examples=200)
@given(
    value=JSON,
    indent=st.none() | st.integers(0, 2),
    ascii_only=st.booleans(),
    cuts=st.lists(st.integers(0, 200), max_size=4),
)
def test_what_python_writes_is_read_in_any_pieces(
    value: Any, indent: int | None, ascii_only: bool, cuts: list[int]
) -> None:
    text = json.dumps([value], indent=indent, ensure_ascii=ascii_only)
    assert scan(cut(text, cuts)) == (True, True, text)


@settings(max_examples=400)
@given(fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=8))
@example(fragments=["0", "1", "]"])
@example(fragments=["-", "]"])
@example(fragments=["1", ".", "]"])
@example(fragments=["1e", "+", "5", "]"])
@example(fragments=['{"a"', ":", "1", ",", "}", "]"])
@example(fragments=['"', "\\u00e9", "\\ud8", '"', "]"])
@example(fragments=["}", "]"])
def test_it_accepts_what_python_accepts(fragments: list[str]) -> None:
    text = "[" + "".join(fragments)
    done, read_all, out = scan([text])
    assert (done and read_all) == is_json(text)
    if done:
        assert is_json(out)
        assert json.loads(out) == json.loads(out, strict=True)
    assert scan(list(text)) == (done, read_all, out), "a character at a time"


def test_control_characters_in_strings_come_out_as_escapes() -> None:
    done, _, out = scan(['{"a": "x\ny\t', '\x00z"', "}"])
    assert done
    assert out == '{"a": "x\\ny\\t\\u0000z"}'
    assert json.loads(out) == {"a": "x\ny\t\x00z"}


def test_a_deep_value_takes_no_stack() -> None:
    text = "[" * 100_000 + "]" * 100_000
    assert scan([text[:70_000], text[70_000:]]) == (True, True, text)


CALLS: list[tuple[str, str | None, str, str]] = [
    # text, name, arguments, how it ends: done, complete, failed or open
    ('{"name": "f", "arguments": {"a": 1}}', "f", '{"a": 1}', "done"),
    ('{ "name" : "f" , "parameters" : { } }', "f", "{ }", "done"),
    ('{"arguments": {"a": [1, {"b": "}"}]}, "name": "g"}', "g", '{"a": [1, {"b": "}"}]}', "done"),
    ('{"id": 7, "type": "function", "name": "f", "arguments": {}}', "f", "{}", "done"),
    ('{"name": "f", "arguments": {}, "id": "x", "why": [1]}', "f", "{}", "done"),
    ('{"name": "f"}', "f", "{}", "done"),
    ('{"name": "\\u0066", "arguments": {}}', "f", "{}", "done"),
    ('{"name": "f", "arguments": {"a": tru', "f", '{"a": tru', "open"),
    ('{"name": "f", "arguments": {"a": True}}', "f", '{"a": ', "failed"),
    ('{"name": "f", "arguments": {} "id"', "f", "{}", "failed"),
    ('{"name": "f", "arguments": {}', "f", "{}", "complete"),
    ('{"name": "h", "arguments": {}}', None, "", "failed"),
    ('{"name": 5}', None, "", "failed"),
    ('{"name": "f", "name": "f"}', "f", "", "failed"),
    ('{"name": "f", "arguments": {}, "parameters": {}}', "f", "{}", "failed"),
    ('{"name": "f", "arguments": [1]}', "f", "", "failed"),
    ('{"name": "f", "arguments": "{}"}', "f", "", "failed"),
    ('{"answer": 1}', None, "", "failed"),
    ("{}", None, "", "failed"),
    ("[1]", None, "", "failed"),
    ('{"name": "f",}', "f", "", "failed"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "name", "arguments", "end"), CALLS)
def test_calls_in_every_cut(text: str, name: str | None, arguments: str, end: str) -> None:
    for position in range(len(text) + 1):
        reader, out = CallReader({"f", "g"}), ""
        for piece in (text[:position], text[position:]):
            start = 0
            while start < len(piece) and not (reader.done or reader.failed):
                start = reader.feed(piece, start)
                if reader.begun:
                    out += reader.take_arguments()
        state = "done" if reader.done else "failed" if reader.failed else "complete" if reader.complete else "open"
        assert (reader.name, out, state) == (name, arguments, end)


def test_arguments_wait_for_the_name_and_then_come_as_they_are_written() -> None:
    reader = CallReader({"f"})
    reader.feed('{"arguments": {"a": 1}, "na', 0)
    assert not reader.begun
    reader = CallReader({"f"})
    reader.feed('{"name": "f", "arguments": ', 0)
    assert not reader.begun
    reader.feed('{"a": "long', 0)
    assert reader.begun
    assert reader.take_arguments() == '{"a": "long'
    reader.feed(" text", 0)
    assert reader.take_arguments() == " text"
    assert reader.take_arguments() == ""


def test_a_named_call_is_its_arguments_alone() -> None:
    reader = CallReader({"f"}, "f")
    assert reader.feed(' {"a": {}} and more', 0) == len(' {"a": {}}')
    assert (reader.done, reader.complete, reader.take_arguments()) == (True, True, '{"a": {}}')
