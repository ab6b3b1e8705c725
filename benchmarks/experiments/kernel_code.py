"""What a compiled kernel takes and does, read from its machine code: registers, spills, loads, matrix instructions."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

#: Bytes of the widest load that all targets have.
WIDE = 16
#: What an instruction set calls its products of whole tiles, the most capable first.
_PRODUCTS = {"cuda": ("tcgen05.mma", "wgmma.mma_async", "mma.sync"), "hip": ("v_mfma_",)}
_PTX_LOAD = re.compile(r"\bld\.global(?:\.[\w:]+?)*?(?:\.v(\d))?\.[bfus](\d+)\b")
_PTX_ASYNC_LOAD = re.compile(r"\bcp\.async\.c[ag]\.shared\.global[^;]*?\],\s*\[[^\]]*\],\s*(0x[0-9a-fA-F]+|\d+)")
_AMD_LOAD = re.compile(r"\b(?:global|buffer)_load_(?:lds_)?(dwordx4|dwordx3|dwordx2|dword|[us]?short|[us]?byte)\w*")
_AMD_BYTES = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4}


@dataclass(frozen=True, slots=True)
class Code:
    """One kernel's machine code.

    Args:
        registers: of a thread; on AMD vector registers.
        spilled_bytes: of a thread's local memory, which is where registers go that it lacks.
        shared_bytes: of a program's shared memory.
        product: its instruction for products of tiles, "" for none.
        wide_loads, narrow_loads: instructions that load 16 bytes a thread from global memory, and fewer.
        threads: of a program.
    """

    registers: int
    spilled_bytes: int
    shared_bytes: int
    product: str
    wide_loads: int
    narrow_loads: int
    threads: int

    @property
    def wide_bytes(self) -> int:
        """Bytes that all threads together load by the wide loads, each executed once."""
        return self.wide_loads * self.threads * WIDE


def read_code(compiled: Any) -> Code:
    """Of a Triton CompiledKernel."""
    target = compiled.metadata.target
    if target.backend == "cuda":
        text = compiled.asm["ptx"]
        loads = ptx_loads(text)
        registers, spilled = _cubin_resources(compiled.asm["cubin"])
    else:
        text = compiled.asm["amdgcn"]
        loads = amd_loads(text)
        registers, spilled = _field(text, "vgpr_count"), _field(text, "private_segment_fixed_size")
    return Code(
        registers=registers,
        spilled_bytes=spilled,
        shared_bytes=compiled.metadata.shared,
        product=next((name.rstrip("_") for name in _PRODUCTS[target.backend] if name in text), ""),
        wide_loads=sum(size >= WIDE for size in loads),
        narrow_loads=sum(size < WIDE for size in loads),
        threads=compiled.metadata.num_warps * target.warp_size,
    )


def ptx_loads(ptx: str) -> list[int]:
    """Bytes of each load from global memory, to registers or to shared memory, one for each instruction."""
    direct = [int(count or 1) * int(bits) // 8 for count, bits in _PTX_LOAD.findall(ptx)]
    return direct + [int(size, 0) for size in _PTX_ASYNC_LOAD.findall(ptx)]


def amd_loads(assembly: str) -> list[int]:
    """Bytes of each vector load from global memory, one for each instruction."""
    return [_AMD_BYTES.get(kind, 2 if "short" in kind else 1) for kind in _AMD_LOAD.findall(assembly)]


def _cubin_resources(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of local memory: the stack of a thread, and what the compiler declared."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run([tool, "-res-usage", str(path)], capture_output=True, text=True, check=True).stdout
    fields = dict(word.split(":", 1) for word in text.split() if word.count(":") == 1)
    return int(fields["REG"]), int(fields["STACK"]) + int(fields["LOCAL"])


def _field(assembly: str, name: str) -> int:
    """A number of the metadata behind AMD's machine code."""
    found = re.search(rf"\.{name}:\s+(\d+)", assembly)
    assert found is not None, f"the assembly has no .{name}"
    return int(found[1])
