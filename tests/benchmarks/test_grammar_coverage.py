"""The coverage command: its cases, its judgements, an engine under grammars, and all of it on the default model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pageframe.benchmarks.experiments import grammar_coverage
from pageframe.benchmarks.experiments.grammar_cases import GrammarCase, in_schema_order, read_cases
from pageframe.benchmarks.experiments.report import InputError

STORE_LINE = {
    "name": "switch",
    "draft": "http://json-schema.org/draft-07/schema#",
    "schema": {
        "type": "object",
        "properties": {"on": {"type": "boolean"}, "level": {"type": "integer", "minimum": 1, "maximum": 3}},
        "required": ["on", "level"],
        "additionalProperties": False,
    },
    "valid": [{"on": True, "level": 2}, {"level": 3, "on": False}],
    "invalid": [{"on": 1, "level": 2}, {"level": 4, "on": False}],
}
SUITE_LINE = {
    "description": "integer type",
    "schema": {"type": "integer"},
    "tests": [{"data": 1, "valid": True}, {"data": 1.0, "valid": True}, {"data": "1", "valid": False}],
    "file": "optional/type.json",
}
REFUSED_LINE = {"description": "unique", "schema": {"uniqueItems": True}, "tests": [{"data": [1, 1], "valid": False}]}


@pytest.fixture(autouse=True)
def one_thread_and_a_wide_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    monkeypatch.setenv("COLUMNS", "200")
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files, one of them a level down; U+2028 is a line break for Python and none for JSON."""
    (tmp_path / "suite").mkdir()
    odd = SUITE_LINE | {"description": "integer\u2028type"}
    lines = [json.dumps(line, ensure_ascii=False) for line in (odd, REFUSED_LINE)]
    (tmp_path / "suite" / "draft.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "store.jsonl").write_text(json.dumps(STORE_LINE) + "\n\n")
    return tmp_path


def test_cases_of_both_shapes_are_read(folder: Path) -> None:
    store, integer, unique = read_cases(folder)
    assert (store.group, store.name, store.draft) == ("store", "switch", STORE_LINE["draft"])
    assert (list(store.valid), list(store.invalid)) == (STORE_LINE["valid"], STORE_LINE["invalid"])
    assert (integer.group, integer.name, integer.draft) == ("draft, optional", "integer\u2028type", "")
    assert (integer.valid, integer.invalid) == ((1, 1.0), ("1",))
    assert (unique.group, unique.valid, unique.invalid) == ("draft", (), ([1, 1],))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "holds no \\*.jsonl files"),
        ("{", "line 1 is no schema with documents: JSONDecodeError"),
        ("[]", "line 1 is no schema with documents"),
        ('\n{"name": "a"}', "line 2 is no schema with documents: KeyError\\('schema'\\)"),
    ],
)
def test_other_files_are_refused(text: str | None, words: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(InputError, match=words):
        read_cases(tmp_path)


@pytest.mark.parametrize(
    ("document", "schema", "expected"),
    [
        ('{"c":1,"b":2,"a":3}', {"properties": {"a": {}, "b": {}}}, '{"a":3,"b":2,"c":1}'),
        ('{"z":1,"y":2}', {"required": ["y", "z"]}, '{"y":2,"z":1}'),
        ('{"z":1,"a":2}', {"required": ["z"], "properties": {"a": {}}}, '{"a":2,"z":1}'),
        ('{"b":1,"a":2}', {"allOf": [{"properties": {"a": {}}}], "properties": {"b": {}}}, '{"a":2,"b":1}'),
        (
            '[{"b":1,"a":2},{"a":1,"b":2}]',
            {"prefixItems": [{"properties": {"a": {}}}], "items": {"properties": {"b": {}}}},
            '[{"b":1,"a":2},{"b":2,"a":1}]',
        ),
        ('{"x1":{"b":1,"a":2}}', {"patternProperties": {"^x": {"properties": {"a": {}}}}}, '{"x1":{"a":2,"b":1}}'),
        ('{"k":{"b":1,"a":2}}', {"additionalProperties": {"properties": {"a": {}}}}, '{"k":{"a":2,"b":1}}'),
        (
            '{"b":{"b":null,"a":1},"a":2}',
            {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"properties": {"a": {}, "b": {"$ref": "#"}}}}},
            '{"a":2,"b":{"a":1,"b":null}}',
        ),
    ],
)
def test_documents_in_the_schemas_order(document: str, schema: Any, expected: str) -> None:
    assert json.dumps(in_schema_order(json.loads(document), schema), separators=(",", ":")) == expected


def test_texts_are_validated_by_their_own_draft() -> None:
    case = GrammarCase("g", "n", STORE_LINE["draft"], {"items": [{"type": "integer"}]}, (), ())  # type: ignore[arg-type]
    assert grammar_coverage.validate(case, "[1]") == "valid"
    assert grammar_coverage.validate(case, '["1"]') == "not valid: '1' is not of type 'integer'"
    assert grammar_coverage.validate(case, "[1").startswith("no JSON: ")
    assert grammar_coverage.validate(GrammarCase("g", "n", "", True, (), ()), '"x"') == "valid"


def test_cases_are_picked_evenly() -> None:
    cases = [GrammarCase("g", str(i), "", {"properties": {"a": {}}} if i % 2 else {}, (), ()) for i in range(20)]
    assert [case.name for case in grammar_coverage.pick(cases, 3)] == ["1", "7", "13"]
    assert grammar_coverage.pick(cases, 100) == cases[1::2]
    assert grammar_coverage.pick(cases, 0) == []


# --- the command ---


def test_the_command_on_the_default_model(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results.json"
    flags = ["--generations", "2", "--max-tokens", "24", "--json", str(results)]
    assert grammar_coverage.main([str(folder), *flags]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "store │ 1 │ 1 │ 2 of 2 │ 1 │ 2 of 2" in out
    assert "draft, optional │ 1 │ 1 │ 1 of 2 │ 1 │ 1 of 1" in out
    assert "draft │ 1 │ 0 │ 0 of 0 │ 0 │ 0 of 0" in out
    assert 'refused 1: Unimplemented keys: ["uniqueItems"]' in out
    assert "valid, but rejected: 1.0" in out
    assert "the model's texts under 1 schemas: 1 valid, 0 cut off at their length, 0 wrong (" in out
    (text,) = json.loads(results.read_text())["texts"]
    assert grammar_coverage.validate(read_cases(folder)[0], text["text"]) == "valid"


def test_a_wrong_text_fails_the_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = grammar_coverage.TextResult("store", "switch", "not valid: 4 is too large", '{"level": 4}')
    monkeypatch.setattr(grammar_coverage, "write_texts", lambda *args, **settings: ([wrong], "a machine"))
    assert grammar_coverage.main([str(folder), "--quick"]) == 1
    out = capsys.readouterr().out
    assert "0 valid, 0 cut off at their length, 1 wrong (a machine)" in out
    assert 'store, switch: not valid: 4 is too large: {"level": 4}' in out


def test_a_folder_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert grammar_coverage.main(["/nowhere"]) == 2
    assert "folder is /nowhere; there is no such folder" in capsys.readouterr().err
