"""Whatever is sent, the server refuses it or answers it: it never fails on it, and it serves the next one."""

from __future__ import annotations

import collections
import random
from collections.abc import Iterator

import httpx
import pytest

from pageframe.benchmarks.experiments.server_process import RunningServer

from ..api.conftest import RunningServer as FakeServer
from ..api.fakes import FakeEngine
from ..api.test_tool_answers import HERMES, MarkTokenizer
from .malformed import GOOD, KINDS, Malformed, malformed

BATCH = 50
SEED = 20
#: A refusal shows a value of the request cut, so that no answer is much longer than this.
MAX_ERROR_BYTES = 1500
ROUTES = list(GOOD)


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeServer]:
    server = FakeServer(FakeEngine(), {"tokenizer": MarkTokenizer(), "template": HERMES}).start()
    yield server
    server.close()


def send(client: httpx.Client, request: Malformed) -> int:
    """The status, of an answer that has a right form."""
    response = client.post(request.path, content=request.body, headers=request.headers)
    shown = (request.kind, request.path, request.headers, request.body[:300], response.status_code, response.text[:300])
    assert response.status_code < 500, shown
    assert not (request.wrong and response.status_code == 200), shown
    if response.status_code != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}, shown
        assert len(response.content) < MAX_ERROR_BYTES, shown
    return response.status_code


def check_good_ones(client: httpx.Client) -> None:
    for path, content in GOOD.items():
        response = client.post(path, json=content)
        assert response.status_code == 200, (path, response.text)


def send_many(client: httpx.Client, num_batches: int) -> dict[str, collections.Counter[int]]:
    """Statuses by kind. After every batch a good request of each route is answered."""
    rng = random.Random(SEED)
    statuses: dict[str, collections.Counter[int]] = collections.defaultdict(collections.Counter)
    for _ in range(num_batches):
        for _ in range(BATCH):
            request = malformed(rng)
            statuses[request.kind][send(client, request)] += 1
        check_good_ones(client)
    return statuses


def check_spread(statuses: dict[str, collections.Counter[int]]) -> None:
    """All kinds came, and those that may be right were at times."""
    assert statuses.keys() == KINDS.keys()
    for kind, counts in statuses.items():
        assert counts[400] > 0, kind
    assert statuses["replaced"][200] + statuses["duplicate names"][200] > 0


def test_500_malformed_requests(fake: FakeServer) -> None:
    check_spread(send_many(fake.client, 500 // BATCH))
    assert fake.engine.is_alive
    fake.wait_idle()
    assert fake.engine.num_outstanding == 0


@pytest.mark.long
def test_10_000_malformed_requests(fake: FakeServer) -> None:
    check_spread(send_many(fake.client, 10_000 // BATCH))
    assert fake.engine.is_alive
    fake.wait_idle()
    assert fake.engine.num_outstanding == 0


@pytest.mark.long
def test_the_default_model_outlives_1_000_of_them(server: RunningServer) -> None:
    engine = server.engine_pid
    with httpx.Client(base_url=server.url, timeout=60) as client:
        check_spread(send_many(client, 1_000 // BATCH))
        assert client.get("/inspect/requests").json()["requests"] == []
        assert client.get("/inspect/kv").json()["blocks"]["used"] == 0
    assert server.engine_pid == engine
