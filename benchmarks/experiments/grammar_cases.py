"""Schemas with documents that fit them and documents that do not, from a folder of JSON lines."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from pageframe.benchmarks.experiments.report import InputError

JsonValue = Any


@dataclass(frozen=True, slots=True)
class GrammarCase:
    """One schema.

    Args:
        group: the file it is from, without its suffix, and whether it is of the optional part of a suite.
        name: what the file calls it.
        draft: the "$schema" that it is written for, "" where nothing says.
        valid, invalid: documents.
    """

    group: str
    name: str
    draft: str
    schema: JsonValue
    valid: tuple[JsonValue, ...]
    invalid: tuple[JsonValue, ...]


def read_cases(folder: Path) -> list[GrammarCase]:
    """The cases of all *.jsonl files below a folder, file by file.

    A line is an object with "schema", and either "valid" and "invalid", which are lists of documents, or "tests", a
    list of {"data", "valid"} as in the JSON Schema Test Suite.

    Raises:
        InputError: there are no such files, or a line is none of that.
    """
    if not folder.is_dir():
        raise InputError(f"folder is {folder}; there is no such folder")
    cases = [case for path in sorted(folder.rglob("*.jsonl")) for case in _read_file(path)]
    if not cases:
        raise InputError(f"folder is {folder}; it holds no *.jsonl files with schemas")
    return cases


def _read_file(path: Path) -> Iterator[GrammarCase]:
    # str.splitlines would cut at characters that JSON allows within a line.
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield _case(path.stem, json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path}: line {number} is no schema with documents: {error!r}") from error


def _case(group: str, entry: dict[str, Any]) -> GrammarCase:
    tests = entry.get("tests", [])
    schema = entry["schema"]
    draft = schema.get("$schema", "") if isinstance(schema, dict) else ""
    optional = str(entry.get("file", "")).startswith("optional/")
    return GrammarCase(
        group=f"{group}, optional" if optional else group,
        name=str(entry.get("name") or entry.get("description") or ""),
        draft=entry.get("draft") or draft,
        schema=schema,
        valid=tuple(entry.get("valid", [])) + tuple(test["data"] for test in tests if test["valid"]),
        invalid=tuple(entry.get("invalid", [])) + tuple(test["data"] for test in tests if not test["valid"]),
    )


def in_schema_order(document: JsonValue, schema: JsonValue) -> JsonValue:
    """The document with each object's properties in the order in which the schema names them.

    A grammar fixes that order where JSON leaves it open; properties that the schema does not name come last.
    """
    return _ordered(document, [schema], schema)


@dataclass(slots=True)
class _Applying:
    """The schemas that may apply to one value, and the properties that they name, in the order of their keywords."""

    root: JsonValue
    schemas: list[dict[str, Any]] = field(default_factory=list)
    properties: list[str] = field(default_factory=list)
    required: list[str] = field(default_factory=list)

    def add(self, schema: JsonValue) -> None:
        """Take in a schema, and those that apply where it does."""
        if not isinstance(schema, dict) or any(schema is other for other in self.schemas):
            return
        self.schemas.append(schema)
        for keyword, value in schema.items():
            if keyword == "properties" and isinstance(value, dict):
                self.properties += value
            elif keyword == "required" and isinstance(value, list):
                self.required += value
            elif keyword == "$ref":
                self.add(_resolve(value, self.root))
            elif keyword in ("if", "then", "else"):
                self.add(value)
            elif keyword in ("allOf", "anyOf", "oneOf") and isinstance(value, list):
                for item in value:
                    self.add(item)


def _ordered(value: JsonValue, schemas: Sequence[JsonValue], root: JsonValue) -> JsonValue:
    """`in_schema_order` of a value to which `schemas` may apply; their references are relative to `root`."""
    applying = _Applying(root)
    for schema in schemas:
        applying.add(schema)
    if isinstance(value, list):
        return [_ordered(item, _item_schemas(applying.schemas, index), root) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    named = applying.properties + applying.required
    places = {name: index for index, name in reversed(list(enumerate(named)))}
    keys = sorted(value, key=lambda key: places.get(key, len(named)))
    return {key: _ordered(value[key], _property_schemas(applying.schemas, key), root) for key in keys}


def _resolve(reference: JsonValue, root: JsonValue) -> JsonValue:
    """What a JSON pointer within the schema points to; None for any other reference."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    value = root
    for part in reference[1:].split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(value, list):
            value = value[int(key)] if key.isdigit() and int(key) < len(value) else None
        else:
            value = value.get(key) if isinstance(value, dict) else None
    return value


def _item_schemas(schemas: Sequence[dict[str, Any]], index: int) -> list[JsonValue]:
    """Those for an array's item."""
    found = []
    for schema in schemas:
        for keyword in ("items", "prefixItems"):
            items = schema.get(keyword)
            if isinstance(items, list):
                found += items[index : index + 1]
            else:
                found.append(items)
    return found


def _property_schemas(schemas: Sequence[dict[str, Any]], key: str) -> list[JsonValue]:
    """Those for an object's property."""
    found = []
    for schema in schemas:
        properties, patterns = schema.get("properties"), schema.get("patternProperties")
        if isinstance(properties, dict):
            found.append(properties.get(key))
        if isinstance(patterns, dict):
            found += [value for pattern, value in patterns.items() if _matches(pattern, key)]
        found.append(schema.get("additionalProperties"))
    return found


def _matches(pattern: str, key: str) -> bool:
    try:
        return re.search(pattern, key) is not None
    except re.error:
        return False
