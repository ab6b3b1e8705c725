"""One server of the default model in float32, shared by the end-to-end tests that do not break it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pageframe.benchmarks.experiments.server_process import RunningServer, running_server


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    with running_server("--dtype", "float32", "--kv-memory", "512MiB") as running:
        yield running
