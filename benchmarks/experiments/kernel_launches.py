"""Triton kernels compiled for a GPU that need not be there, exactly as a launch would compile them.

The code that launches kernels runs as it is, on small tensors in main memory; in place of the launch the kernel is
compiled for the target, with the constants, the argument types and the alignments that the launch has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of GPU.

    Args:
        device, kind: by which launch settings are looked up, see `tables.describe`; one such GPU stands for all.
        shared_limit: bytes of shared memory that a program may ask for there.
    """

    name: str
    gpu: GPUTarget
    device: str
    kind: str
    shared_limit: int


#: Limits: CUDA C++ Programming Guide, table of technical specifications (the most of a block: 163 KB at 8.0, 99 KB at
#: 8.6, 8.9 and 12.0, 227 KB at 9.0 and 10.0); AMD CDNA 3 ISA guide, 64 KiB of LDS.
TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", GPUTarget("cuda", 80, 32), "NVIDIA A100-SXM4-80GB", "ampere", 163 * 1024),
        Target("sm_86", GPUTarget("cuda", 86, 32), "NVIDIA GeForce RTX 3090", "ampere", 99 * 1024),
        Target("sm_89", GPUTarget("cuda", 89, 32), "NVIDIA GeForce RTX 4090", "ampere", 99 * 1024),
        Target("sm_90", GPUTarget("cuda", 90, 32), "NVIDIA H200", "hopper", 227 * 1024),
        Target("sm_100", GPUTarget("cuda", 100, 32), "NVIDIA B200", "hopper", 227 * 1024),
        Target("sm_120", GPUTarget("cuda", 120, 32), "NVIDIA GeForce RTX 5090", "ampere", 99 * 1024),
        Target("gfx942", GPUTarget("hip", "gfx942", 64), "AMD Instinct MI300X", "amd", 64 * 1024),
    )
}


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel as a launch compiled it.

    Args:
        compiled: Triton's CompiledKernel.
    """

    kernel: str
    compiled: Any


class _AbsentGpu:
    """What Triton asks its driver while it compiles, answered for a GPU that is not there."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target.gpu

    def get_current_device(self) -> str:
        return self._target.name  # Triton keeps compiled kernels by device

    def get_current_stream(self, device: str) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Variant:
    """What a launch would have the compiler make of a kernel.

    Args:
        key: what of the arguments it depends on: constants, types, and numbers that it may count on.
        fuses: it may fuse products and sums.
    """

    kernel: str
    key: str
    fuses: bool


@contextmanager
def variants_met(target: Target) -> Iterator[set[Variant]]:
    """Within this, launches neither compile nor run; the set gets what each would compile, were it not compiled yet.

    Raises:
        RuntimeError: the interpreter is on, which compiles nothing.
    """
    _refuse_interpreter()
    met: set[Variant] = set()

    def note(*, key: Any, fn: Any, compile: dict[str, Any], **_rest: Any) -> bool:
        met.add(Variant(fn.name, str(key), compile["enable_fp_fusion"]))
        return True  # done with it: nothing is compiled

    driver.set_active(_AbsentGpu(target))
    triton.knobs.runtime.jit_cache_hook = note
    try:
        yield met
    finally:
        triton.knobs.runtime.jit_cache_hook = None
        driver._active = None  # reset_active() would look for a GPU


@contextmanager
def compiled_launches(target: Target) -> Iterator[list[Launch]]:
    """Within this, launches compile for `target` and run nothing; the list gets each, repeated ones again.

    Raises:
        RuntimeError: the interpreter is on, which compiles nothing.
    """
    _refuse_interpreter()
    launches: list[Launch] = []
    launch = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = launch(kernel, *args, grid=grid, warmup=True, **options)
        launches.append(Launch(kernel.fn.__name__, compiled))
        return compiled

    JITFunction.run = compile_only
    driver.set_active(_AbsentGpu(target))
    try:
        yield launches
    finally:
        JITFunction.run = launch
        driver._active = None  # reset_active() would look for a GPU


def _refuse_interpreter() -> None:
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set; under the interpreter nothing is compiled")
