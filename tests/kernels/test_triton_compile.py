"""The Triton kernels compiled ahead of time, which needs no GPU: what the interpreter cannot see.

A process of its own compiles them: here the interpreter is on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pageframe.benchmarks.experiments.kernel_code import amd_loads, ptx_loads
from pageframe.kernels.triton.tables import lookup

Kernels = list[dict[str, Any]]
#: Programs that a multiprocessor holds side by side hide each other's waiting; Hopper's has 227 KiB for them.
SHARED_FOR_TWO = 227 * 1024 // 2


def compile_kernels(folder: Path, *arguments: str) -> Kernels:
    """What the command says of each kernel; its own verdict, the exit status, must be that nothing is wrong."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    out = folder / "kernels.json"
    command = [sys.executable, "-m", "pageframe.benchmarks.experiments.compiled_kernels", "--json", str(out)]
    result = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    kernels: Kernels = json.loads(out.read_text())["kernels"]
    return kernels


@pytest.fixture(scope="module")
def hopper(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return compile_kernels(tmp_path_factory.mktemp("triton"), "--quick", "--target", "sm_90")


def variants(kernels: Kernels, name: str) -> Kernels:
    found = [kernel for kernel in kernels if kernel["kernel"] == f"{name}_kernel"]
    assert found, f"{name} was not compiled"
    return found


def tile_bytes(name: str, dtype: torch.dtype, head_dim: int) -> int:
    """K and V of one tile in the default's launch."""
    chosen = lookup("sm_90", "hopper", name, head_dim=head_dim, cache_dtype=dtype, group=4)
    return 2 * chosen.tile * head_dim * dtype.itemsize


def test_no_kernel_spills_and_decode_leaves_room_for_a_second_program(hopper: Kernels) -> None:
    assert all(kernel["fault"] == "" and kernel["spilled_bytes"] == 0 for kernel in hopper)
    assert all(0 < kernel["registers"] <= 255 for kernel in hopper)
    assert all(kernel["shared_bytes"] <= SHARED_FOR_TWO for kernel in variants(hopper, "attend_splits"))


def test_attention_multiplies_on_the_matrix_units(hopper: Kernels) -> None:
    assert {kernel["product"] for kernel in variants(hopper, "attend_splits")} == {"mma.sync"}
    assert {kernel["product"] for kernel in variants(hopper, "attend_prefill")} == {"wgmma.mma_async"}


@pytest.mark.parametrize("name", ["attend_splits", "attend_prefill"])
def test_k_and_v_are_loaded_16_bytes_at_a_time(hopper: Kernels, name: str) -> None:
    by_variant = {kernel["variant"].split(", ")[1]: kernel for kernel in variants(hopper, name)}
    assert by_variant.keys() >= {"bf16", "int8"}
    for word, dtype in (("bf16", torch.bfloat16), ("int8", torch.int8)):
        assert by_variant[word]["wide_bytes"] >= tile_bytes(name, dtype, 128)


@pytest.mark.long
@pytest.mark.parametrize("target", ["sm_86", "sm_89", "sm_120"])
def test_every_kernel_compiles_for_gpus_with_less_shared_memory(tmp_path: Path, target: str) -> None:
    kernels = compile_kernels(tmp_path, "--quick", "--target", target)
    assert all(kernel["shared_bytes"] <= 99 * 1024 for kernel in kernels)
    assert {kernel["product"] for kernel in variants(kernels, "attend_prefill")} == {"mma.sync"}


@pytest.mark.long
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_every_variant_compiles_for_every_target(tmp_path: Path, target: str) -> None:
    kernels = compile_kernels(tmp_path, "--target", target)
    products = {"sm_80": "mma.sync", "sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma", "gfx942": "v_mfma"}
    prefill = [kernel for kernel in variants(kernels, "attend_prefill") if "fp32" not in kernel["variant"]]
    assert {kernel["product"] for kernel in prefill} == {products[target]}
    for kernel in variants(kernels, "attend_splits"):
        if "fp32" not in kernel["variant"]:
            assert kernel["product"] == products["gfx942" if target == "gfx942" else "sm_80"]
            assert kernel["wide_loads"] > 0
    drawn = {kernel["variant"].rpartition(", vocabulary ")[2] for kernel in variants(kernels, "draw")}
    assert "262,144" in drawn, "a large vocabulary's rows have more parts"


def test_loads_of_ptx_are_counted_with_their_widths() -> None:
    ptx = """
        @%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
        ld.global.L1::evict_first.v2.b32 { %r1, %r2 }, [ %rd1 + 0 ];
        ld.global.b16 { %rs1 }, [ %rd4 + 0 ];
        ld.param.b64 %rd1, [kernel_param_0];
        ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r9];
        cp.async.cg.shared.global [ %r2 + 0 ], [ %rd5 + 0 ], 0x10, %r8;
        @%p3 cp.async.ca.shared.global [ %r2 + 0 ], [ %rd5 + 0 ], 0x4, 0x4;
        st.global.v4.b32 [ %rd1 + 0 ], { %r1, %r2, %r3, %r4 };
    """
    assert sorted(ptx_loads(ptx)) == [2, 4, 8, 16, 16]


def test_loads_of_amds_assembly_are_counted_with_their_widths() -> None:
    assembly = """
        global_load_dwordx4 v[2:5], v[0:1], off
        buffer_load_dwordx2 v[2:3], v1, s[4:7], 0 offen
        buffer_load_dword v2, v1, s[4:7], 0 offen
        global_load_ushort v2, v[0:1], off
        global_load_ubyte v2, v[0:1], off
        s_load_dwordx4 s[0:3], s[4:5], 0x0
        global_store_dwordx4 v[0:1], v[2:5], off
    """
    assert sorted(amd_loads(assembly)) == [1, 2, 4, 8, 16]
