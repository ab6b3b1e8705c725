"""What /openapi.json says of a model's own limits."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from .conftest import RunningServer, Start
from .fakes import MAX_MODEL_LEN, VOCAB_SIZE, FakeEngine


def body_schema(server: RunningServer, path: str) -> dict[str, Any]:
    paths = server.client.get("/openapi.json").json()["paths"]
    schema: dict[str, Any] = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return schema


def test_the_models_own_limits_are_in_the_schemas_once_it_is_ready(start: Start) -> None:
    engine = FakeEngine()
    server = start(engine, hold=True, wait=False)
    fields = body_schema(server, "/v1/chat/completions")["properties"]
    assert fields["model"] == {"type": ["string", "null"], "format": "model-name"}
    assert "maximum" not in fields["max_tokens"]["anyOf"][0]
    server.may_load.set()
    server.wait_ready()
    fields = body_schema(server, "/v1/chat/completions")["properties"]
    assert fields["model"] == {"enum": [None, "tiny"]}
    assert fields["max_tokens"]["anyOf"][0]["maximum"] == MAX_MODEL_LEN - 1
    assert body_schema(server, "/detokenize")["properties"]["tokens"]["items"]["maximum"] == VOCAB_SIZE - 1
    pattern = re.compile(fields["logit_bias"]["anyOf"][0]["propertyNames"]["pattern"])
    texts = [str(number) for number in range(3000)] + ["00", "01", "-1", "", "x"]
    assert [text for text in texts if pattern.search(text)] == [str(number) for number in range(VOCAB_SIZE)]
    engine.resolved = replace(engine.resolved, slide_by=8)
    fields = body_schema(server, "/v1/completions")["properties"]
    assert "maximum" not in fields["max_tokens"]["anyOf"][0]
