"""Which instruction set is chosen for which processor and wish, and what the flags of a set do to a compilation."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest

from pageframe.kernels.cpu.isa import INSTRUCTION_SETS, BuildError, choose, processor_flags

AVX2 = frozenset({"sse2", "avx2", "fma", "f16c"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16"}
VNNI = AVX512 - {"avx512_bf16"} | {"avx512_vnni"}
AMX = AVX512 | {"avx512_vnni", "amx_tile", "amx_bf16"}

on_linux_x86 = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="reads Linux's /proc/cpuinfo of an x86-64"
)


def names(processor: frozenset[str], wish: str = "") -> list[str]:
    return [isa.name for isa in choose(processor, wish)]


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        (AMX, ["amx", "avx512", "avx512_vnni", "avx2"]),
        (AMX - {"amx_bf16"}, ["avx512", "avx512_vnni", "avx2"]),
        (AMX - {"avx512_bf16"}, ["avx512_vnni", "avx2"]),
        (VNNI, ["avx512_vnni", "avx2"]),
        (VNNI - {"avx512_vnni"}, ["avx2"]),
        (AVX512, ["avx512", "avx2"]),
        (AVX512 - {"avx512dq"}, ["avx2"]),
        (AVX2, ["avx2"]),
    ],
)
def test_the_best_set_comes_first_and_then_the_lesser_ones(processor: frozenset[str], expected: list[str]) -> None:
    assert names(processor) == expected


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        ("amx", ["amx", "avx512", "avx512_vnni", "avx2"]),
        ("avx512", ["avx512", "avx512_vnni", "avx2"]),
        ("avx512_vnni", ["avx512_vnni", "avx2"]),
        ("avx2", ["avx2"]),
    ],
)
def test_a_wish_is_where_the_choice_begins(wish: str, expected: list[str]) -> None:
    assert names(AMX, wish) == expected


@pytest.mark.parametrize(
    ("processor", "wish", "message"),
    [
        (AVX512, "none", "PAGEFRAME_CPU_ISA is none"),
        (
            AVX512,
            "amx",
            "PAGEFRAME_CPU_ISA is 'amx', not this processor's, which lacks amx_tile and amx_bf16; "
            "it may be avx512, avx2 or none here",
        ),
        (AVX2, "sse9", "PAGEFRAME_CPU_ISA is 'sse9', no instruction set; it may be avx2 or none here"),
        (AVX2, "AVX2", "PAGEFRAME_CPU_ISA is 'AVX2', no instruction set; it may be avx2 or none here"),
        (
            AVX2 - {"fma"},
            "avx2",
            "PAGEFRAME_CPU_ISA is 'avx2', not this processor's, which lacks fma; it may be none here",
        ),
        (AVX2 - {"avx2", "f16c"}, "", "this processor lacks avx2 and f16c"),
        (frozenset(), "", "this processor lacks avx2 and fma and f16c"),
    ],
)
def test_what_cannot_be_had_is_refused_in_one_line(processor: frozenset[str], wish: str, message: str) -> None:
    with pytest.raises(BuildError) as caught:
        choose(processor, wish)
    assert str(caught.value) == message


@pytest.mark.parametrize(("system", "machine"), [("darwin", "x86_64"), ("linux", "aarch64"), ("win32", "AMD64")])
def test_elsewhere_there_are_no_flags(monkeypatch: pytest.MonkeyPatch, system: str, machine: str) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    with pytest.raises(BuildError, match=f"for Linux on x86-64, and this is {system} on {machine}"):
        processor_flags()


@on_linux_x86
def test_flags_are_those_that_linux_tells_of() -> None:
    told = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    assert "sse2" in processor_flags()
    assert set(told.split(":")[1].split()) - processor_flags() <= {"amx_tile"}


def test_each_set_switches_on_what_it_needs() -> None:
    """Linux writes avx512_bf16 and amx_tile where a compiler's flags are -mavx512bf16 and -mamx-tile."""
    for isa in INSTRUCTION_SETS:
        switched_on = {flag[2:].replace("-", "") for flag in isa.compiler_flags if flag.startswith("-m")}
        assert switched_on == {need.replace("_", "") for need in isa.needs}
