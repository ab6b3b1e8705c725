"""Settings of property tests, and which tests need the machine to themselves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from pageframe.kernels.cpu import CpuKernels

# The same examples every time where CI is set, fresh ones elsewhere. A failing example is printed as a blob that
# @reproduce_failure takes. No deadline: machines are shared.
settings.register_profile("local", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

#: Folders and files whose tests start servers, browsers and compilers and wait for what these do, or press Ctrl-C,
#: which a test process of several ignores.
ALONE = (
    "end_to_end",
    "dashboard",
    "api/test_lifecycle.py",
    "api/test_terminal_chat.py",
    "api/test_slow_requests.py",
    "api/test_terminal_top_live.py",
    "benchmarks/test_end_to_end.py",
    "benchmarks/test_gpu_script.py",
    "benchmarks/test_peers.py",
    "benchmarks/test_start_up.py",
    "benchmarks/test_thread_policies.py",
    "kernels/test_cpu_build.py",
    "runtime/test_grammar.py",
)
_PLACES = tuple(Path(__file__).parent / place for place in ALONE)


@pytest.fixture(scope="session")
def compiled_kernels() -> CpuKernels:
    """What is compiled for this CPU; where nothing can be, the test is skipped and says why. A compiler that finds a
    fault in the sources fails it."""
    from pageframe.kernels.cpu import BuildError, load  # no test is slower for what it does not use
    from pageframe.kernels.cpu.build import CompilerError

    try:
        return load()
    except CompilerError:
        raise
    except BuildError as error:
        pytest.skip(f"no compiled kernels: {error}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(item.path.is_relative_to(place) for place in _PLACES):
            item.add_marker("alone")
