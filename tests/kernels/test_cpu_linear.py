"""The compiled linear against float64, its bits for any rows and threads, and what the cache of compiled code does."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pageframe.kernels import cpu
from pageframe.kernels.cpu import build

try:
    COMPILED, REASON = Path(build.load_library()._name), ""
except build.BuildError as error:
    COMPILED, REASON = Path(), str(error)
needs_kernels = pytest.mark.skipif(bool(REASON), reason=f"no compiled kernels: {REASON}")

ROWS = (0, 1, 2, 3, 5, 6, 7, 31, 64, 257)
# (n, k): whole strips, a lone part of a strip, an odd k, several blocks of k, one output.
SHAPES = ((64, 96), (5, 33), (83, 577), (144, 1536), (1, 1), (200, 2001), (17, 0))


@pytest.fixture
def kernels() -> cpu.CpuKernels:
    loaded = cpu.load()
    assert loaded is not None
    return loaded


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def library(cache: Path) -> Path:
    """The compiled library, in a cache folder that holds nothing else."""
    path = cache / "pageframe" / COMPILED.parent.name / COMPILED.name
    path.parent.mkdir(parents=True)
    shutil.copy(COMPILED, path)
    return path


@pytest.fixture
def fresh_load() -> Iterator[None]:
    """`load` decides anew, and again after the test."""
    cpu.load.cache_clear()
    yield
    cpu.load.cache_clear()


def problem(rows: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows + 1000 * n + k)
    x = torch.randn(rows, k, generator=generator)
    weight = torch.randn(n, k, generator=generator) / max(k, 1) ** 0.5
    return x, weight.bfloat16(), torch.randn(n, generator=generator)


@needs_kernels
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_it_is_a_linear(kernels: cpu.CpuKernels, n: int, k: int, with_bias: bool) -> None:
    for rows in ROWS:
        x, weight, bias = problem(rows, n, k)
        out = torch.full((rows, n), torch.nan)
        result = kernels.linear_bf16(x, cpu.pack_bf16(weight), n, bias if with_bias else None, out)
        expected = x.double() @ weight.double().T + (bias.double() if with_bias else 0)
        assert result is out
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_row_is_the_same_bits_for_any_rows_and_threads(kernels: cpu.CpuKernels, n: int, k: int) -> None:
    x, weight, bias = problem(257, n, k)
    packed = cpu.pack_bf16(weight)
    whole = kernels.linear_bf16(x, packed, n, bias)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for rows in ROWS:
            for start in (0, 257 - rows):
                part = kernels.linear_bf16(x[start : start + rows], packed, n, bias)
                assert torch.equal(part, whole[start : start + rows]), (threads, rows, start)


@needs_kernels
def test_nothing_outside_out_is_written(kernels: cpu.CpuKernels) -> None:
    """n is no multiple of a strip: the last strip must not spill into the next row or past the end."""
    for rows in (1, 3, 8):
        x, weight, _ = problem(rows, 19, 40)
        memory = torch.full((rows * 19 + 64,), 7.0)
        kernels.linear_bf16(x, cpu.pack_bf16(weight), 19, None, memory[32 : 32 + rows * 19].view(rows, 19))
        assert (memory[:32] == 7).all()
        assert (memory[32 + rows * 19 :] == 7).all()


@needs_kernels
def test_other_memory_than_it_reads_is_refused(kernels: cpu.CpuKernels) -> None:
    x, weight, bias = problem(4, 32, 16)
    packed = cpu.pack_bf16(weight)
    wrong = [
        (x.T.contiguous().T, packed, bias, None),
        (x.double(), packed, bias, None),
        (x[:, :15].contiguous(), packed, bias, None),
        (x, packed[:1], bias, None),
        (x, packed.float(), bias, None),
        (x, packed, bias[:31], None),
        (x, packed, bias.bfloat16(), None),
        (x, packed, bias, torch.empty(4, 31)),
        (x, packed, bias, torch.empty(32, 4).T),
    ]
    for x_, packed_, bias_, out in wrong:
        with pytest.raises(ValueError, match="must be contiguous"):
            kernels.linear_bf16(x_, packed_, 32, bias_, out)


def test_packing_refuses_another_dtype() -> None:
    with pytest.raises(ValueError, match="bfloat16"):
        cpu.pack_bf16(torch.zeros(2, 2))


@needs_kernels
def test_one_openmp_runtime_is_loaded(kernels: cpu.CpuKernels) -> None:
    maps = Path("/proc/self/maps").read_text()
    assert len(set(re.findall(r"/\S*/lib(?:gomp|iomp5|omp)[-.]\S*$", maps, re.MULTILINE))) == 1


def compilations(caplog: pytest.LogCaptureFixture) -> int:
    return sum("compiled the CPU kernels" in record.getMessage() for record in caplog.records)


@needs_kernels
def test_the_second_load_compiles_nothing(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    build.load_library()
    assert compilations(caplog) == 1
    (library,) = cache.glob("pageframe/*/*")  # with no temporary file beside it
    assert library.parent.stat().st_mode & 0o077 == 0
    build.load_library()
    assert compilations(caplog) == 1


@needs_kernels
@pytest.mark.parametrize("damage", ["truncated", "changed", "empty"])
def test_a_damaged_file_is_compiled_again(library: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    caplog.set_level(logging.INFO)
    build.load_library()
    assert compilations(caplog) == 0
    content = library.read_bytes()
    damaged = {"truncated": content[: len(content) // 2], "changed": content[:-100] + bytes(100), "empty": b""}[damage]
    library.unlink()  # the loaded one stays whole in memory
    library.write_bytes(damaged)
    build.load_library()
    assert compilations(caplog) == 1
    build.load_library()
    assert compilations(caplog) == 1


@needs_kernels
def test_other_source_is_another_file(
    library: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "linear.cpp"
    other.write_text(build.SOURCE.read_text() + "\n// another\n")
    monkeypatch.setattr(build, "SOURCE", other)
    build.load_library()
    assert len(list(cache.glob("pageframe/*/linear.so"))) == 2


@needs_kernels
def test_a_cache_that_cannot_be_written_is_done_without(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    (cache / "pageframe").write_text("a file where the folder should be")
    build.load_library()
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    shutil.rmtree(re.search(r"compiled code goes to (\S+)/linear\.so ", warning)[1])  # type: ignore[index]


@needs_kernels
def test_two_processes_may_compile_at_once(cache: Path) -> None:
    code = "from pageframe.kernels.cpu import load; assert load() is not None"
    running = [subprocess.Popen([sys.executable, "-c", code], env={**os.environ}) for _ in range(2)]
    assert [process.wait() for process in running] == [0, 0]
    assert len(list(cache.glob("pageframe/*/*"))) == 1


@pytest.mark.usefixtures("fresh_load", "cache")
@pytest.mark.parametrize("obstacle", ["wish", "compiler", "compilation", "processor"])
def test_without_a_library_there_are_no_kernels(
    obstacle: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if obstacle == "wish":
        monkeypatch.setenv("PAGEFRAME_NO_COMPILE", "1")
    elif obstacle == "compiler":
        monkeypatch.setattr(build, "_cpu_flags", lambda: frozenset(build.NEEDED_CPU_FLAGS))
        monkeypatch.setenv("CXX", "no-such-compiler")
    elif obstacle == "compilation":
        monkeypatch.setattr(build, "_cpu_flags", lambda: frozenset(build.NEEDED_CPU_FLAGS))
        monkeypatch.setenv("CXX", "false")
    else:
        monkeypatch.setattr(build, "_cpu_flags", lambda: frozenset({"sse2", "fma"}))
    expected = {
        "wish": "PAGEFRAME_NO_COMPILE is set",
        "compiler": "'no-such-compiler', which is no program",
        "compilation": "failed with status 1",
        "processor": "lacks avx2",
    }[obstacle]
    assert cpu.load() is None
    assert cpu.load() is None
    (message,) = (record.getMessage() for record in caplog.records)
    assert expected in message
