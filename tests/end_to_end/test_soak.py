"""The soak, shorter than by hand: see benchmarks/experiments/soak.py."""

from __future__ import annotations

import asyncio

import pytest

from pageframe.benchmarks.experiments import soak
from pageframe.benchmarks.experiments.server_process import running_server


@pytest.mark.long
def test_mixed_requests_a_fifth_of_them_cancelled_leave_nothing_behind() -> None:
    with running_server("--kv-memory", soak.SOAK_POOL) as server:
        samples, endings, used = asyncio.run(soak.drive(server, requests=300, concurrency=16))
    assert endings == {"finished": 240, "cancelled": 60}
    assert soak.report(samples, endings, used)
