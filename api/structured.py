"""response_format and structured_outputs, checked, as the grammar that an answer's text follows.

Knows nothing of how a grammar is compiled; what only its compiler can tell is told when the request is queued.
"""

from __future__ import annotations

import json
from typing import Any

from pageframe.api.checks import refuse_unknown, wrong
from pageframe.runtime.errors import InvalidRequestError
from pageframe.runtime.grammar import MAX_SOURCE_BYTES, GrammarSpec

_FORMATS = ("text", "json_object", "json_schema")
_SCHEMA_FIELDS = ("name", "description", "schema", "strict")
#: Field of structured_outputs -> kind of grammar.
_KINDS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "lark"}


def check_response_format(value: object) -> GrammarSpec | None:
    """The request's `response_format`; None where any text will do.

    Raises:
        InvalidRequestError: it is none of OpenAI's shapes.
    """
    if value is None:
        return None
    path = "response_format"
    if not isinstance(value, dict):
        raise wrong(path, value, 'must be an object such as {"type": "json_object"}')
    kind = value.get("type")
    if kind not in _FORMATS:
        raise wrong(f"{path}.type", kind, f"must be one of {', '.join(_FORMATS)}")
    refuse_unknown(value, ("type", "json_schema") if kind == "json_schema" else ("type",), path)
    if kind == "text":
        return None
    return GrammarSpec("json_object") if kind == "json_object" else _json_schema(value.get("json_schema"))


def check_structured_outputs(value: object) -> GrammarSpec | None:
    """The request's `structured_outputs`; None where any text will do.

    Raises:
        InvalidRequestError: it is no object with one of json, regex, choice and grammar.
    """
    if value is None:
        return None
    path = "structured_outputs"
    if not isinstance(value, dict):
        raise wrong(path, value, f"must be an object with one of {', '.join(_KINDS)}")
    refuse_unknown(value, tuple(_KINDS), path)
    given = [name for name in value if value[name] is not None]
    if len(given) > 1:
        raise InvalidRequestError(f"{path} has {' and '.join(given)}; only one of them can be followed", param=path)
    if not given:
        return None
    [name] = given
    return GrammarSpec(_KINDS[name], _source(name, value[name], f"{path}.{name}"))


def _json_schema(value: object) -> GrammarSpec:
    path = "response_format.json_schema"
    if not isinstance(value, dict):
        raise wrong(path, value, "must be an object with name and schema")
    refuse_unknown(value, _SCHEMA_FIELDS, path)
    fields = (("name", str, "a string"), ("description", str, "a string"), ("strict", bool, "true or false"))
    for field, kind, rule in fields:
        if not isinstance(value.get(field), (kind, type(None))):
            raise wrong(f"{path}.{field}", value[field], f"must be {rule}")
    schema = value.get("schema")
    if not isinstance(schema, dict):
        raise wrong(f"{path}.schema", schema, "must be a JSON schema, an object")
    if value.get("strict") is not True:
        # Not strict: what cannot be enforced is left to the model, where a strict schema would be refused.
        schema = {**schema, "x-guidance": {"lenient": True, **_own_options(schema)}}
    return GrammarSpec("json_schema", _to_json(schema, f"{path}.schema"))


def _own_options(schema: dict[str, Any]) -> dict[str, Any]:
    options = schema.get("x-guidance")
    return options if isinstance(options, dict) else {}


def _source(name: str, value: object, path: str) -> str:
    if name == "json" and isinstance(value, dict):
        return _to_json(value, path)
    if name == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
            raise wrong(path, value, "must be a list of at least one string, none of them empty")
        return _to_json(value, path)
    if not isinstance(value, str):
        rule = "must be a JSON schema, an object or its text" if name == "json" else "must be a string"
        raise wrong(path, value, rule)
    return _of_bounded_size(value, path)


def _to_json(value: object, path: str) -> str:
    try:
        return _of_bounded_size(json.dumps(value, ensure_ascii=False), path)
    except RecursionError:
        raise InvalidRequestError(f"{path} is nested too deep", param=path) from None


def _of_bounded_size(source: str, path: str) -> str:
    """The source, which goes to the engine once for each prompt."""
    size = len(source.encode("utf-8", "surrogatepass"))
    if size > MAX_SOURCE_BYTES:
        raise InvalidRequestError(f"{path} has {size} bytes; at most {MAX_SOURCE_BYTES} are allowed", param=path)
    return source
