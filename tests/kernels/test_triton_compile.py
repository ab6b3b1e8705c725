"""The Triton kernels compiled ahead of time for sm_90, which needs no GPU: what the interpreter cannot see."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAD_DIMS = (64, 128)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int | bool]]:
    """By kernel, dtype and head_dim: what `compile_kernels` read from the compiled code."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    program = Path(__file__).with_name("compile_kernels.py")
    result = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    kernels: dict[str, dict[str, int | bool]] = json.loads(result.stdout)
    return kernels


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", ["write_kv", "attend_splits", "merge_splits"])
def test_kernel_compiles_and_keeps_its_numbers_in_registers(
    compiled: dict[str, dict[str, int | bool]], name: str, head_dim: int
) -> None:
    kernel = compiled[f"{name} bf16 {head_dim}"]
    assert kernel["ptx_bytes"] > 0
    assert 0 < kernel["registers"] <= 255
    assert kernel["stack_bytes"] == kernel["local_bytes"] == 0, "registers are spilled"
    assert kernel["shared_bytes"] <= 48 * 1024, "more shared memory than every GPU grants without asking"


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_decode_uses_the_tensor_cores(compiled: dict[str, dict[str, int | bool]], head_dim: int) -> None:
    assert compiled[f"attend_splits bf16 {head_dim}"]["has_matrix_product"]


def test_decode_in_float32_keeps_its_numbers_in_registers(compiled: dict[str, dict[str, int | bool]]) -> None:
    assert compiled["attend_splits fp32 128"]["stack_bytes"] == 0
