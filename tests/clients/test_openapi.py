"""Requests made of the server's own /openapi.json, as its schema says and as it says they must not be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from pageframe.api.app import ADMIN_ROUTES, BODIES, ROUTES

from ..api.conftest import RunningServer
from ..api.fakes import FakeEngine

MODES = ("positive", "negative")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    server = RunningServer(FakeEngine()).start()
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


def run_operation(url: str, cases: Any, max_examples: int) -> set[int]:
    """The statuses of the requests drawn. None may be a failure of the server's own."""
    seen: set[int] = set()

    @settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def check(case: Any) -> None:
        response = case.call(base_url=url)
        assert response.status_code < 500 or response.status_code == 503, repr(case.body)[:500]
        seen.add(response.status_code)

    check()
    return seen


def run_examples(server: RunningServer, mode: str, max_examples: int) -> dict[str, set[int]]:
    """The statuses seen, by operation. "negative": only of routes with a body, which breaks the schema."""
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed (extra: clients)")
    schema = schemathesis.openapi.from_dict(server.client.get("/openapi.json").json())
    operations = [found.ok() for found in schema.get_all_operations()]
    return {
        operation.label: run_operation(
            server.url, operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)), max_examples
        )
        for operation in operations
        if mode == "positive" or operation.body
    }


def check_statuses(statuses: dict[str, set[int]], mode: str) -> None:
    if mode == "negative":
        assert {label for label, seen in statuses.items() if 400 in seen} == {f"POST {path}" for path in BODIES}
        return
    assert all(statuses.values()), "a route was never asked"
    for label in ("POST /detokenize", "GET /health", "GET /v1/models"):
        assert 200 in statuses[label], label


@pytest.mark.parametrize("mode", MODES)
def test_a_few_requests_of_every_route(server: RunningServer, mode: str) -> None:
    check_statuses(run_examples(server, mode, 5), mode)


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_many_requests_of_every_route(server: RunningServer, mode: str) -> None:
    check_statuses(run_examples(server, mode, 300), mode)
