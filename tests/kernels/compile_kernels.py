"""Compile every Triton kernel for a GPU that need not be there, and print what came out as JSON.

Run as a program, with TRITON_INTERPRET unset: under the interpreter there is nothing to compile.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pageframe.kernels.triton.decode import attend_splits_kernel, kernel_constants, merge_splits_kernel
from pageframe.kernels.triton.write import write_kv_kernel

TARGET = GPUTarget("cuda", 90, 32)
BLOCK_SIZE = 16
NUM_KV_HEADS = 8
GROUP = 4
TYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def sources(head_dim: int, dtype: torch.dtype) -> dict[str, tuple[Any, dict[str, str], dict[str, Any]]]:
    """Of each kernel: the function, the types of its run-time arguments, and its constants."""
    data = "*" + TYPE_NAMES[dtype]
    flags = {"HAS_WINDOW": True, "HAS_SOFTCAP": True}
    decode = kernel_constants(GROUP, head_dim, BLOCK_SIZE, dtype, dtype)
    strides = dict.fromkeys(("k_token_stride", "k_head_stride", "v_token_stride", "v_head_stride"), "i64")
    write_constants = {
        "NUM_KV_HEADS": NUM_KV_HEADS,
        "PADDED_KV_HEADS": NUM_KV_HEADS,
        "BLOCK_SIZE": BLOCK_SIZE,
        "HEAD_DIM": head_dim,
    }
    pointers = {"partial_ptr": "*fp32", "log_sums_ptr": "*fp32", "context_lens_ptr": "*i32"}
    return {
        "write_kv": (
            write_kv_kernel,
            {"k_ptr": data, "v_ptr": data, "kv_cache_ptr": data, "slots_ptr": "*i64", **strides},
            write_constants,
        ),
        "attend_splits": (
            attend_splits_kernel,
            {"q_ptr": data, "kv_cache_ptr": data, "tables_ptr": "*i32", "rows_ptr": "*i32", **pointers}
            | {"scale": "fp32", "softcap": "fp32"}
            | dict.fromkeys(
                ("window", "q_token_stride", "q_head_stride", "table_stride", "num_kv_heads", "num_splits"), "i32"
            ),
            decode | flags,
        ),
        "merge_splits": (
            merge_splits_kernel,
            {**pointers, "out_ptr": data}
            | dict.fromkeys(("window", "out_token_stride", "out_head_stride", "num_splits"), "i32"),
            {"HEAD_DIM": head_dim, "SPLIT_SIZE": decode["SPLIT_SIZE"], "HAS_WINDOW": True},
        ),
    }


def compile_one(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> dict[str, Any]:
    signature = types | dict.fromkeys(constants, "constexpr")
    ordered = {name: signature[name] for name in kernel.arg_names}
    # What a launch finds out by itself: tensors start at multiples of 16 bytes, strides are multiples of 16.
    aligned = [at for at, (name, kind) in enumerate(ordered.items()) if kind.startswith("*") or name.endswith("stride")]
    attrs = {(at,): [["tt.divisibility", 16]] for at in aligned}
    compiled = triton.compile(ASTSource(kernel, ordered, constexprs=constants, attrs=attrs), target=TARGET)
    return {
        "ptx_bytes": len(compiled.asm["ptx"]),
        "has_matrix_product": "mma" in compiled.asm["ptx"],
        "shared_bytes": compiled.metadata.shared,
        **resources(compiled.asm["cubin"]),
    }


def resources(cubin: bytes) -> dict[str, int]:
    """Registers and bytes of local memory (which is where spilled registers go) of a kernel, read from its cubin."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run([tool, "-res-usage", str(path)], capture_output=True, text=True, check=True).stdout
    fields = dict(word.split(":", 1) for word in text.split() if word.count(":") == 1)
    return {"registers": int(fields["REG"]), "stack_bytes": int(fields["STACK"]), "local_bytes": int(fields["LOCAL"])}


if __name__ == "__main__":
    results = {
        f"{name} bf16 {head_dim}": compile_one(*source)
        for head_dim in (64, 128)
        for name, source in sources(head_dim, torch.bfloat16).items()
    }
    results["attend_splits fp32 128"] = compile_one(*sources(128, torch.float32)["attend_splits"])
    json.dump(results, sys.stdout)
