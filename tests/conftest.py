"""Settings of property tests, and which tests need the machine to themselves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The same examples every time where CI is set, fresh ones elsewhere. A failing example is printed as a blob that
# @reproduce_failure takes. No deadline: machines are shared.
settings.register_profile("local", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

#: Folders and files whose tests start servers, browsers and compilers, and wait for what these do.
ALONE = (
    "end_to_end",
    "dashboard",
    "api/test_lifecycle.py",
    "api/test_slow_requests.py",
    "api/test_terminal_top_live.py",
    "benchmarks/test_gpu_script.py",
    "benchmarks/test_peers.py",
    "benchmarks/test_thread_policies.py",
    "kernels/test_cpu_build.py",
    "runtime/test_grammar.py",
)
_PLACES = tuple(Path(__file__).parent / place for place in ALONE)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(item.path.is_relative_to(place) for place in _PLACES):
            item.add_marker("alone")
