"""Which backend is picked, what each refuses, and what importing costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pageframe.kernels.attention import Backend, UnsupportedError, kv_cache_shape, select_backend
from pageframe.kernels.triton.dtypes import fp8_dtype

from .cases import Step
from .conftest import CODES

CPU = torch.device("cpu")
REPOSITORY = Path(__file__).parents[2]


def test_auto_follows_the_device() -> None:
    assert select_backend("auto", CPU).name == "reference"
    assert select_backend("auto", torch.device("cuda")).name == "triton"


def test_unknown_backend_is_named_with_the_choices() -> None:
    with pytest.raises(UnsupportedError, match="'fast'; it must be one of auto, cpu, reference, triton"):
        select_backend("fast", CPU)


def test_triton_without_gpu_or_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UnsupportedError, match="device is 'cpu'; the triton backend needs a GPU"):
        select_backend("triton", CPU)


@pytest.mark.parametrize("block_size", [0, -16, 3, 48, 512])
def test_block_sizes_that_are_refused(backend: Backend, block_size: int) -> None:
    with pytest.raises(UnsupportedError, match=f"block_size is {block_size}; .* power of two from 1 to 256"):
        backend.check_supported(64, block_size, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8])
def test_cache_dtypes_that_the_reference_refuses(dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedError, match=f"K/V dtype is {dtype}"):
        select_backend("reference", CPU).check_supported(64, 16, dtype)


def test_triton_refuses_a_cache_dtype_with_the_list_of_what_it_has(device: torch.device) -> None:
    backend = select_backend("triton", device)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, *CODES):
        backend.check_supported(64, 16, dtype)
    names = ", ".join(str(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32, *CODES))
    with pytest.raises(UnsupportedError, match=f"^the K/V dtype is torch.float64; it must be one of {names}$"):
        backend.check_supported(64, 16, torch.float64)


@pytest.mark.parametrize(
    ("capability", "has_fp8"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)]
)
def test_nvidias_processors_have_fp8_from_8_9_on(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], has_fp8: bool
) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    check = select_backend("triton", torch.device("cuda")).check_supported
    if has_fp8:
        check(128, 16, torch.float8_e4m3fn)
    else:
        with pytest.raises(UnsupportedError, match=r"float8_e4m3fn; it must be one of .*float32, torch\.int8$"):
            check(128, 16, torch.float8_e4m3fn)


@pytest.mark.parametrize(("name", "dtype"), [("gfx942:sramecc+:xnack-", torch.float8_e4m3fnuz), ("gfx90a", None)])
def test_of_amds_processors_gfx942_has_an_fp8_of_its_own(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype | None
) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName=name))
    assert fp8_dtype(torch.device("cuda")) == dtype


def test_the_reference_refuses_scales(device: torch.device) -> None:
    backend = select_backend("reference", device)
    codes = torch.zeros(kv_cache_shape(2, 1, 16, 64), dtype=torch.int8, device=device)
    scales = torch.ones(codes.shape[:4], device=device)
    one = torch.ones(1, 1, 64, device=device)
    step = Step(np.zeros(1, np.int32), np.ones(1, np.int32), np.array([0, 1], np.int32), num_decode=1)
    plan = backend.plan_attention(step, torch.zeros(1, 1, dtype=torch.int32, device=device), 16)
    message = "int8 codes with scales; the reference backend does not have them"
    with pytest.raises(UnsupportedError, match=message):
        backend.write_kv(one, one, codes, torch.zeros(1, dtype=torch.int64, device=device), scales)
    with pytest.raises(UnsupportedError, match=message):
        backend.paged_attention(one, codes, plan, scale=1.0, kv_scales=scales)


@pytest.mark.parametrize("block_size", [1, 16, 32, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_what_both_backends_take(backend: Backend, head_dim: int, block_size: int, dtype: torch.dtype) -> None:
    backend.check_supported(head_dim, block_size, dtype)


@pytest.mark.parametrize("head_dim", [8, 48, 112, 512])
def test_head_dims_that_triton_refuses(device: torch.device, head_dim: int) -> None:
    with pytest.raises(
        UnsupportedError, match=f"^head_dim is {head_dim}; the triton backend has 16, 32, 64, 80, 96, 128, 256$"
    ):
        select_backend("triton", device).check_supported(head_dim, 16, torch.bfloat16)
    select_backend("reference", device).check_supported(head_dim, 16, torch.bfloat16)


def test_the_reference_does_not_load_triton() -> None:
    script = (
        "import sys, torch\n"
        "from pageframe.kernels.attention import select_backend\n"
        "select_backend('auto', torch.device('cpu'))\n"
        "sys.exit('triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_triton_inside_kernels_is_the_compiler() -> None:
    import triton

    from pageframe.kernels.triton import decode

    assert decode.triton is triton
    assert Path(triton.__file__).parent != REPOSITORY / "kernels" / "triton"


def test_nothing_imports_kernels_by_the_bare_name() -> None:
    """`kernels.attention` and `pageframe.kernels.attention` would be two modules, with two of every class."""
    # Other packages may look for a `kernels` of their own and find this folder; nobody may load a module out of it.
    assert [name for name in sys.modules if name.startswith("kernels.")] == []
    folders = ("runtime", "kernels", "api", "benchmarks", "tests")
    files = [path for folder in folders for path in (REPOSITORY / folder).rglob("*.py")]
    assert REPOSITORY / "kernels" / "attention.py" in files
    bare = [
        f"{path}:{node.lineno}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        for name in _imported(node)
        if name.split(".")[0] in ("runtime", "kernels", "api", "benchmarks")
    ]
    assert bare == []


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return [node.module or ""]
    return []
