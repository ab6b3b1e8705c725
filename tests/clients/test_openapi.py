"""Requests made of the server's own /openapi.json, as its schema says and as it says they must not be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pageframe.api.app import ADMIN_ROUTES, BODIES, ROUTES
from pageframe.api.schemas import MAX_PROMPTS

from ..api.conftest import RunningServer
from ..api.fakes import WAIT_SECONDS, FakeEngine
from ..api.test_prompt_lists import told
from ..api.test_tool_answers import HERMES, MarkTokenizer

MODES = ("positive", "negative")
#: Of the requests that follow the schema. The others break what no schema says, such as that two tools have two names.
SHARE_ANSWERED = 0.6
#: Streams that have no end of their own.
ENDLESS = ("GET /inspect/events", "GET /inspect/live")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """With room for whatever a schema may ask for, and a template that shows tools."""
    engine = FakeEngine(told)
    engine.resolved = replace(engine.resolved, max_model_len=100_000, max_num_requests=MAX_PROMPTS)
    engine.stats.num_waiting = 0
    server = RunningServer(engine, {"tokenizer": MarkTokenizer(), "template": HERMES}).start()
    yield server
    server.close()


def test_every_route_is_described_and_every_body(server: RunningServer) -> None:
    paths = server.client.get("/openapi.json").json()["paths"]
    described = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    shown = {(method, path.replace(":path}", "}")) for method, path, _ in (*ROUTES, *ADMIN_ROUTES)}
    assert described == shown
    for path, kind in BODIES.items():
        schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema["additionalProperties"] is False
        assert set(schema["properties"]) == kind.model_fields.keys() | kind.ignored | kind.not_built.keys()
    assert {path for path, methods in paths.items() for name in methods.values() if "requestBody" in name} == set(
        BODIES
    )


def without_whole_floats(value: Any) -> Any:
    """JSON schema takes 1.0 for an integer, which no client sends for one and this server does not take."""
    if isinstance(value, list):
        return [without_whole_floats(item) for item in value]
    if isinstance(value, dict):
        return {name: without_whole_floats(item) for name, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def run_operation(url: str, cases: Any, mode: str, max_examples: int) -> Counter[int]:
    """The statuses of the requests drawn. None may be a failure of the server's own."""
    seen: Counter[int] = Counter()

    @settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],  # a request that is not answered is not to be sent again and again, made smaller
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def check(case: Any) -> None:
        if mode == "positive":
            case.body = without_whole_floats(case.body)
        response = case.call(base_url=url, timeout=WAIT_SECONDS)
        assert response.status_code < 500 or response.status_code == 503, repr(case.body)[:500]
        seen[response.status_code] += 1

    check()
    return seen


def run_examples(server: RunningServer, mode: str, max_examples: int) -> dict[str, Counter[int]]:
    """The statuses seen, by operation. "negative": only of routes with a body, which breaks the schema."""
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed (extra: clients)")
    schemathesis.openapi.format("json-object", st.sampled_from(["{}", '{"x": [1]}']))
    schema = schemathesis.openapi.from_dict(server.client.get("/openapi.json").json())
    operations = [found.ok() for found in schema.get_all_operations()]
    return {
        operation.label: run_operation(
            server.url, operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)), mode, max_examples
        )
        for operation in operations
        if operation.label not in ENDLESS and (mode == "positive" or operation.body)
    }


def check_statuses(statuses: dict[str, Counter[int]], mode: str) -> None:
    if mode == "negative":
        assert {label for label, seen in statuses.items() if 400 in seen} == {f"POST {path}" for path in BODIES}
        return
    assert all(statuses.values()), "a route was never asked"
    for label in ("GET /health", "GET /v1/models"):
        assert 200 in statuses[label], label
    for path in BODIES:
        seen = statuses[f"POST {path}"]
        assert seen[200] >= SHARE_ANSWERED * seen.total(), (path, seen)


@pytest.mark.parametrize("mode", MODES)
def test_a_few_requests_of_every_route(server: RunningServer, mode: str) -> None:
    check_statuses(run_examples(server, mode, 12), mode)


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_many_requests_of_every_route(server: RunningServer, mode: str) -> None:
    check_statuses(run_examples(server, mode, 300), mode)
