"""The instruction sets the CPU kernels exist for, and which of them this processor has. Knows nothing of compiling."""

from __future__ import annotations

import ctypes
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path

#: The environment variable that names an instruction set.
WISH = "PAGEFRAME_CPU_ISA"
NONE = "none"


class BuildError(RuntimeError):
    """There is no compiled library on this machine; the message says why, in one line."""


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """What one build of the kernels uses.

    Args:
        needs: flags of /proc/cpuinfo.
        compiler_flags: what switches its instructions, and the code written for them, on.
        probe: instructions that a compiler, or the assembler behind it, does not know if it is too old.
    """

    name: str
    needs: tuple[str, ...]
    compiler_flags: tuple[str, ...]
    probe: str


_AVX512_NEEDS = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "f16c")
_AVX512_FLAGS = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mf16c", "-DPAGEFRAME_ISA_AVX512=1")
_BF16_NEEDS = (*_AVX512_NEEDS, "avx512_bf16")
_BF16_FLAGS = (*_AVX512_FLAGS, "-mavx512bf16", "-DPAGEFRAME_ISA_BF16=1")

#: Fastest first.
INSTRUCTION_SETS = (
    InstructionSet(
        "amx",
        (*_BF16_NEEDS, "amx_tile", "amx_bf16"),
        (*_BF16_FLAGS, "-mamx-tile", "-mamx-bf16", "-DPAGEFRAME_ISA_AMX=1"),
        "tdpbf16ps %tmm0, %tmm1, %tmm2",
    ),
    InstructionSet("avx512", _BF16_NEEDS, _BF16_FLAGS, "vdpbf16ps %zmm0, %zmm1, %zmm2"),
    InstructionSet(
        "avx512_vnni",
        (*_AVX512_NEEDS, "avx512_vnni"),
        (*_AVX512_FLAGS, "-mavx512vnni", "-DPAGEFRAME_ISA_VNNI=1"),
        "vpdpwssd %zmm0, %zmm1, %zmm2",
    ),
    InstructionSet(
        "avx2",
        ("avx2", "fma", "f16c"),
        ("-mavx2", "-mfma", "-mf16c", "-DPAGEFRAME_ISA_AVX2=1"),
        "vfmadd231ps %ymm0, %ymm1, %ymm2",
    ),
)

# From Linux's asm/prctl.h and asm/unistd_64.h.
_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILE_DATA = 18


def processor_flags() -> frozenset[str]:
    """What a program may use of this processor, in the words of /proc/cpuinfo.

    Raises:
        BuildError: this is not Linux on x86-64.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise BuildError(f"they are for Linux on x86-64, and this is {sys.platform} on {platform.machine()}")
    found = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    flags = frozenset(found[1].split()) if found else frozenset()
    return flags if _system_permits_tiles() else flags - {"amx_tile"}


def _system_permits_tiles() -> bool:
    """Whether this process may use AMX's tiles, which it has to ask for: older kernels show the flags of a processor
    whose tiles they do not save, and refuse."""
    return bool(ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILE_DATA) == 0)


def choose(processor: frozenset[str], wish: str) -> tuple[InstructionSet, ...]:
    """The sets to compile for: the best that this processor has, then those to fall back to.

    Args:
        processor: what `processor_flags` gave.
        wish: what PAGEFRAME_CPU_ISA says: the set to begin with, "none", or "" for the best.

    Raises:
        BuildError: the processor has none of them, or not the one that is wished for, or none is wished for.
    """
    if wish == NONE:
        raise BuildError(f"{WISH} is {NONE}")
    usable = [isa for isa in INSTRUCTION_SETS if processor.issuperset(isa.needs)]
    names = [isa.name for isa in usable]
    if wish and wish not in names:
        choices = " or ".join([", ".join(names), NONE] if names else [NONE])
        wished = next((isa for isa in INSTRUCTION_SETS if isa.name == wish), None)
        fault = (
            "no instruction set" if wished is None else f"not this processor's, which lacks {_lacks(processor, wished)}"
        )
        raise BuildError(f"{WISH} is {wish!r}, {fault}; it may be {choices} here")
    if not usable:
        raise BuildError(f"this processor lacks {_lacks(processor, INSTRUCTION_SETS[-1])}")
    return tuple(usable[names.index(wish) if wish else 0 :])


def _lacks(processor: frozenset[str], isa: InstructionSet) -> str:
    return " and ".join(flag for flag in isa.needs if flag not in processor)
