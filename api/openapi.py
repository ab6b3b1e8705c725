"""What /openapi.json says of request bodies, from the models that check them. Knows no routes."""

from __future__ import annotations

from typing import Any

from pageframe.api.body import JSON_TYPE
from pageframe.api.schemas import Body


def request_body(path: str, kind: type[Body]) -> dict[str, Any]:
    """An operation's `requestBody`.

    Args:
        path: of the route, with which references inside of the schema begin.
    """
    place = ("paths", path, "post", "requestBody", "content", JSON_TYPE, "schema", "$defs", "{model}")
    pointer = "/".join(part.replace("/", "~1") for part in place)
    schema = kind.model_json_schema(ref_template=f"#/{pointer}")
    schema["properties"] |= {name: {} for name in sorted(kind.ignored)}
    schema["properties"] |= {name: {"enum": [None, *values]} for name, values in kind.not_built.items()}
    return {"required": True, "content": {JSON_TYPE: {"schema": schema}}}
