"""What llguidance takes without a word: numbers that it rounds and settings that it passes over, and the schemas of
several tools, of which one may be no good.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from pageframe.runtime.grammar import GrammarSpec
from pageframe.runtime.grammar_checks import inexact_number, lark_complaint, schema_complaint
from pageframe.runtime.grammar_tools import ToolArguments, read_tool_calls, tool_calls_spec, usable_lark

EXACT = 2**53
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


@pytest.mark.parametrize("keyword", BOUNDS)
@pytest.mark.parametrize("number", [EXACT + 1, -EXACT - 1, 2**63 - 1, -(2**63), 10**20, 10**400, 1e19])
def test_a_bound_that_would_be_rounded(keyword: str, number: float) -> None:
    words = inexact_number({"properties": {"a": {"type": "integer", keyword: number}}})
    assert words.startswith(f"its {keyword} has {str(number)[:20]}")
    assert "9007199254740992 (2**53) cannot be kept exactly" in words
    assert len(words) < 200


@pytest.mark.parametrize("number", [EXACT + 1, -EXACT - 1, 2**64])
@pytest.mark.parametrize("where", ["{}", "[{}]", '[1, {{"a": [[{}]]}}]'])
def test_a_value_that_would_be_rounded(number: int, where: str) -> None:
    for keyword in ("const", "enum"):
        source = json.dumps({"anyOf": [{"items": {keyword: json.loads(where.format(number))}}]})
        assert schema_complaint(source).startswith(f"its {keyword} has {number};"), source


@pytest.mark.parametrize(
    "schema",
    [
        {"minimum": -EXACT, "maximum": EXACT, "enum": [EXACT, -EXACT, 0.1, 1e300, True, "9007199254740993"]},
        # Draft 4's, and names of properties and notes that bind nothing.
        {"exclusiveMinimum": True, "default": EXACT + 1, "examples": [{"const": EXACT + 1}]},
        {"properties": {"const": {"default": EXACT + 1}, "minimum": {"type": "integer"}, "default": {"type": "null"}}},
        {"$defs": {"enum": {"type": "string"}}},
        [{"x": {}}],
        True,
    ],
)
def test_what_is_kept_exactly_is_no_fault(schema: Any) -> None:
    assert inexact_number(schema) == ""


def test_a_property_named_as_a_note_is_looked_at() -> None:
    assert inexact_number({"properties": {"default": {"const": EXACT + 1}}})
    assert inexact_number({"properties": {"const": {"minimum": EXACT + 1}}})


@pytest.mark.parametrize("source", ["", "{", '{"a": 1e400}', '{"a": ' * 100_000, '{"const": ' + "9" * 5000 + "}"])
def test_what_is_no_json_is_left_to_the_compiler(source: str) -> None:
    assert schema_complaint(source) == ""


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('%llguidance {"bogus": true}\nstart: "a"', "%llguidance has the setting 'bogus'; it may have allow_initial_"),
        ('start: "a"\n%llguidance\n{"no_forcing": true, "x": {}}', "the setting 'x'"),
        ('start: "\\"" /\\/"/ // "\n%llguidance {"x": 1}', "the setting 'x'"),
        ('start: %json {"const": 9007199254740993}', "its const has 9007199254740993"),
        ('start: "a" %json{"minimum": 1e19}', "its minimum has 1e+19"),
        ('%llguidance {"no_forcing": true}\nstart: %json {"const": 3}', ""),
        ('// %llguidance {"x": 1}\n# %llguidance {"x": 1}\nstart: "%llguidance {" /%json {"const"/', ""),
        ('start: %json {"const": "%llguidance {\\"x\\": 1}"}', ""),
        ('%llguidance [1]\nstart: "a"', ""),
        ('%llguidance {"x": \nstart: "a"', ""),
        ('%llguidances {"x": 1}\nstart: %jsons {"const": 9007199254740993}', ""),
    ],
)
def test_a_lark_grammars_settings_and_schemas(source: str, words: str) -> None:
    complaint = lark_complaint(source)
    assert words in complaint
    assert bool(words) == bool(complaint)


@pytest.mark.parametrize("part", ['\\"', "\\/", '"', "/", "%json [", "%llguidance {", '%json "', "%json {}", "//"])
def test_a_long_lark_grammar_is_read_once(part: str) -> None:
    """A source may have 256 KiB; read again from each of its places, as for each quote without an end, it would hold
    this test up for many minutes."""
    assert lark_complaint("start: " + part * (262_144 // len(part))) == ""


# ---- tools ----------------------------------------------------------------------------------------------------------

ANY: dict[str, Any] = {"type": "object"}
RULES = ["start: a0 | a1 | a2"]


def arguments(*schemas: dict[str, Any], strict: int = -1) -> list[ToolArguments]:
    return [
        ToolArguments(f"a{index}", f"tools[{index}].function (f{index})", schema, None if index == strict else ANY)
        for index, schema in enumerate(schemas)
    ]


class Judge:
    """Complains of schemas that say so, as llguidance does, and counts what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, spec: GrammarSpec) -> str:
        self.asked.append(spec.source)
        place = (
            ("at 2(4): ", "\n   1 | start: a0\n   2 | a0: %json {}\n          ^\n") if spec.kind == "lark" else ("", "")
        )
        return "bad pattern".join(place) if "BAD" in spec.source else ""


def schemas_of(source: str) -> list[Any]:
    return [json.loads(line.partition("%json ")[2]) for line in source.split("\n")[1:]]


def test_a_tools_spec_is_read_as_it_was_written() -> None:
    given = arguments({"x": 1}, {"y": "é"}, strict=1)
    spec = tool_calls_spec(RULES, given)
    assert spec.kind == "tool_calls"
    assert read_tool_calls(spec.source) == (RULES, given)
    for source in ("{", "[]", "{}", '{"rules": [], "arguments": [{"x": 1}]}'):
        with pytest.raises(ValueError, match=r"it has no rules and arguments|Expecting property name"):
            read_tool_calls(source)


def test_good_schemas_are_tried_once_together() -> None:
    judge = Judge()
    source, complaint = usable_lark(RULES, arguments({"a": 1}, {"b": 2}, strict=0), judge, seconds=60)
    assert (complaint, judge.asked) == ("", [source])
    assert schemas_of(source) == [{"a": 1}, {"b": 2}]


@pytest.mark.parametrize("bad", [{"pattern": "BAD"}, {"const": EXACT + 1}])
def test_a_schema_that_is_no_good_gives_way_alone(bad: dict[str, Any]) -> None:
    source, complaint = usable_lark(RULES, arguments({"a": 1}, bad, {"c": 3}, strict=0), Judge(), seconds=60)
    assert complaint == ""
    assert schemas_of(source) == [{"a": 1}, ANY, {"c": 3}]


@pytest.mark.parametrize(
    ("bad", "words"),
    [({"pattern": "BAD"}, "bad pattern"), ({"const": EXACT + 1}, f"its const has {EXACT + 1}")],
)
def test_a_strict_schema_that_is_no_good_is_named(bad: dict[str, Any], words: str) -> None:
    _, complaint = usable_lark(RULES, arguments({"pattern": "BAD"}, {}, bad, strict=2), Judge(), seconds=60)
    assert complaint.startswith(f"tools[2].function (f2) has parameters that cannot be used: {words}")


def test_where_there_is_no_time_to_find_it_all_that_may_give_way() -> None:
    judge = Judge()
    source, complaint = usable_lark(RULES, arguments({"a": 1}, {"p": "BAD"}, {"c": 3}, strict=0), judge, seconds=0)
    assert (complaint, len(judge.asked)) == ("", 2)
    assert schemas_of(source) == [{"a": 1}, ANY, ANY]
    _, complaint = usable_lark(RULES, arguments({"a": "BAD"}, {}, strict=0), judge, seconds=0)
    assert complaint == "the parameters of all functions cannot be used together: bad pattern"
