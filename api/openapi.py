"""What /openapi.json says of request bodies, from the models that check them, and of the limits of the model served.

Knows no routes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI

from pageframe.api.body import JSON_TYPE
from pageframe.api.body_schemas import MODEL_NAME, TOKEN_COUNT, TOKEN_ID, refine
from pageframe.api.schemas import Body
from pageframe.api.service import Service


def request_body(path: str, kind: type[Body]) -> dict[str, Any]:
    """An operation's `requestBody`.

    Args:
        path: of the route, with which references inside of the schema begin.
    """
    place = ("paths", path, "post", "requestBody", "content", JSON_TYPE, "schema", "$defs", "{model}")
    pointer = "/".join(part.replace("/", "~1") for part in place)
    schema = refine(kind, kind.model_json_schema(ref_template=f"#/{pointer}"))
    schema["properties"] |= {name: {} for name in sorted(kind.ignored)}
    schema["properties"] |= {name: {"enum": [None, *values]} for name, values in kind.not_built.items()}
    return {"required": True, "content": {JSON_TYPE: {"schema": schema}}}


def description(app: FastAPI, service: Service | None) -> dict[str, Any]:
    """What /openapi.json says; with the limits of the model once it is ready."""
    whole = FastAPI.openapi(app)
    if service is None:
        return whole
    slides = service.client.resolved.slide_by is not None
    limits = _Limits(service.model_name, service.vocab_size, None if slides else service.max_model_len - 1)
    return {name: limits.put_into(part) for name, part in whole.items()}


@dataclass(frozen=True, slots=True)
class _Limits:
    """What is known of a schema's formats once the model is.

    Args:
        max_tokens: most that a text may have; None: the context slides, so its output may have any number.
    """

    model_name: str
    vocab_size: int
    max_tokens: int | None

    def put_into(self, value: Any) -> Any:
        """A schema, or a part of one, with the limits in it."""
        if isinstance(value, list):
            return [self.put_into(item) for item in value]
        if not isinstance(value, dict):
            return value
        known = {name: self.put_into(item) for name, item in value.items()}
        if known.get("format") == MODEL_NAME:
            return {"enum": [None, self.model_name]}
        if known.get("format") == TOKEN_ID:
            last = self.vocab_size - 1
            known |= {"pattern": f"^({_numbers_to(last)})$"} if known["type"] == "string" else {"maximum": last}
        elif known.get("format") == TOKEN_COUNT and self.max_tokens is not None:
            known["maximum"] = self.max_tokens
        return known


def _numbers_to(last: int) -> str:
    """A regular expression of the integers from 0 to `last`."""
    digits = str(last)
    patterns = ["0", *(f"[1-9][0-9]{{{length}}}" for length in range(len(digits) - 1))]
    for place, digit in enumerate(digits):  # as `last` up to here, and less from here on
        low, high = 0 if place else 1, int(digit) - 1
        if low <= high:
            patterns.append(f"{digits[:place]}[{low}-{high}][0-9]{{{len(digits) - place - 1}}}")
    return "|".join([*patterns, digits])
