"""Both backends for every test, on the GPU where there is one, else Triton in its interpreter.

The interpreter must be on before Triton is first imported: kernels, and Triton's own library, become interpreted or
compiled functions at import. No test elsewhere imports Triton while it is collected.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU and os.environ.get("TRITON_INTERPRET") != "1":
    if "triton" in sys.modules:
        raise pytest.UsageError("Triton was imported before the kernel tests could switch its interpreter on")
    os.environ["TRITON_INTERPRET"] = "1"

from fakes.interpreter import patch_once_a_launch  # noqa: E402

import pageframe.kernels.triton.backend  # noqa: E402, F401  (now: a test may switch the interpreter off for itself)
from pageframe.kernels.attention import Backend, select_backend  # noqa: E402
from pageframe.kernels.triton.dtypes import fp8_dtype  # noqa: E402

from .cases import SEED  # noqa: E402

#: Dtypes of quantised K and V that this machine has kernels for.
CODES = [dtype for dtype in (torch.int8, fp8_dtype(torch.device("cuda" if HAS_GPU else "cpu"))) if dtype]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """On tensors as small as these a second thread is only waited for, long when other programs are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _fast_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_once_a_launch(monkeypatch)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(params=["reference", "triton"])
def backend(request: pytest.FixtureRequest, device: torch.device) -> Backend:
    return select_backend(request.param, device)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Numbers of this test's own, the same for both backends and in every run with this seed."""
    sys.stdout.write(f"repeat with PAGEFRAME_TEST_SEED={SEED}\n")
    name = request.node.nodeid.replace("reference", "").replace("triton", "")
    return np.random.default_rng([SEED, zlib.crc32(name.encode())])
