"""Compiled code is made once, kept where only its user can write, and never loaded unless it is what was asked for.

The source is a small one that tells which build of it runs.
"""

from __future__ import annotations

import logging
import os
import re
import select
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import pytest
import torch

from pageframe.kernels.cpu import build
from pageframe.kernels.cpu.build import Builder, BuildError, Library
from pageframe.kernels.cpu.isa import choose, processor_flags

from .test_cpu_isa import AMX, AVX2, AVX512, on_linux_x86

COMPILER = shutil.which("g++") or ""
pytestmark = [on_linux_x86, pytest.mark.skipif(not COMPILER, reason="no g++")]

EXPORTED = 'extern "C" __attribute__((visibility("default")))'

SOURCE = """
#define EXPORTED extern "C" __attribute__((visibility("default")))
#include "answer.h"
EXPORTED int answer() { return ANSWER; }
EXPORTED int isa() {
#if defined(PAGEFRAME_ISA_AMX) && defined(PAGEFRAME_ISA_AVX512) && defined(__AMX_BF16__) && defined(__AVX512BF16__)
    return 4;
#elif defined(PAGEFRAME_ISA_AVX512) && defined(PAGEFRAME_ISA_BF16) && defined(__AVX512BF16__) && defined(__AVX512DQ__)
    return 3;
#elif defined(PAGEFRAME_ISA_AVX512) && defined(PAGEFRAME_ISA_VNNI) && defined(__AVX512VNNI__)
    return 2;
#elif defined(PAGEFRAME_ISA_AVX2) && defined(__AVX2__) && defined(__F16C__)
    return 1;
#endif
}
"""
ISA_NUMBERS = {"amx": 4, "avx512": 3, "avx512_vnni": 2, "avx2": 1}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder, not made yet, and an environment that asks for nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("CXX", "PAGEFRAME_NO_COMPILE", "PAGEFRAME_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache" / "pageframe"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "engine.cpp").write_text(SOURCE)
    (folder / "answer.h").write_text("#define ANSWER 42\n")
    return folder / "engine.cpp"


@dataclass(frozen=True)
class Compiler:
    """A g++ that writes down what it is asked to compile."""

    record: Path

    def compilations(self) -> int:
        """How many times it has been given a source of ours."""
        commands = self.record.read_text().splitlines() if self.record.exists() else []
        return sum("engine.cpp" in command for command in commands)


MakeCompiler = Callable[[str], Compiler]


@pytest.fixture
def make_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeCompiler:
    """Puts a compiler into CXX; its argument is what a shell does before g++ runs, with the arguments in $*."""

    def make(first: str) -> Compiler:
        script, record = tmp_path / "compiler", tmp_path / "record"
        script.write_text(f'#!/bin/sh\necho "$*" >> {record}\n{first}\nexec {COMPILER} "$@"\n')
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        return Compiler(record)

    return make


@pytest.fixture
def compiler(make_compiler: MakeCompiler) -> Compiler:
    return make_compiler("")


def answers(library: Library) -> tuple[int, int]:
    return library.functions.answer(), library.functions.isa()


def kept(cache: Path) -> list[Path]:
    return [path for path in cache.glob("*/*") if path.name != "lock"]


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


# ---- what is built --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("processor", "isa"), [(AMX, "amx"), (AVX512, "avx512"), (AVX2, "avx2")])
def test_the_library_is_for_the_best_set_of_the_processor(source: Path, processor: frozenset[str], isa: str) -> None:
    library = Builder(source, processor).load()
    assert library.isa == isa
    assert answers(library) == (42, ISA_NUMBERS[isa])


def test_the_variable_names_a_lesser_set(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEFRAME_CPU_ISA", "avx2")
    library = Builder(source, AVX512).load()
    assert library.isa == "avx2"
    assert answers(library) == (42, ISA_NUMBERS["avx2"])


def test_two_lines_tell_of_a_compilation_and_none_of_a_load(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    Builder(source, AVX2).load()
    before, after = messages(caplog)
    assert before == "compiling the CPU kernels for avx2, once; about 10 s"
    assert re.fullmatch(r"compiled the CPU kernels for avx2 in \d+\.\d s", after)
    caplog.clear()
    Builder(source, AVX2).load()
    assert messages(caplog) == []


@pytest.mark.parametrize("handlers", ["none", "root"])
def test_the_lines_reach_standard_error_without_any_logging_set_up(handlers: str, source: Path) -> None:
    code = f"""
import logging, pathlib
from pageframe.kernels.cpu.build import Builder
if {handlers == "root"}:
    logging.basicConfig(level="INFO", format="LOG %(message)s")
Builder(pathlib.Path({str(source)!r}), frozenset({sorted(AVX2)!r})).load()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    start = {"none": "pageframe: ", "root": "LOG "}[handlers]
    assert [line.startswith(f"{start}compil") for line in done.stderr.splitlines()] == [True, True]


# ---- what is kept ---------------------------------------------------------------------------------------------------


def test_the_second_load_compiles_nothing(source: Path, cache: Path, compiler: Compiler) -> None:
    Builder(source, AVX2).load()
    assert answers(Builder(source, AVX2).load()) == (42, 1)
    assert compiler.compilations() == 1
    (library,) = kept(cache)  # with no temporary file beside it
    for path in (cache, library.parent, library):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0


@pytest.mark.parametrize("changed", ["engine.cpp", "answer.h", "a new header"])
def test_other_text_is_another_library(source: Path, cache: Path, compiler: Compiler, changed: str) -> None:
    Builder(source, AVX2).load()
    path = source.parent / ("new.h" if changed == "a new header" else changed)
    text = path.read_text() if path.exists() else ""
    path.write_text(text.replace("ANSWER 42", "ANSWER 43").replace("return ANSWER", "return ANSWER + 1") + "\n")
    assert Builder(source, AVX2).load().functions.answer() == (42 if changed == "a new header" else 43)
    assert compiler.compilations() == 2
    assert len(kept(cache)) == 2


def test_a_new_library_ends_those_that_nobody_used_for_a_month(source: Path, cache: Path) -> None:
    used, unused, others = 29 * 86400.0, 31 * 86400.0, cache / "somebody's own"
    for isa, age in ((AVX512, unused), (AVX2, used)):
        before = set(kept(cache))
        Builder(source, isa).load()
        (library,) = set(kept(cache)) - before
        os.utime(library.parent, (0, time.time() - age))
    others.mkdir()
    os.utime(others, (0, 0))
    (source.parent / "answer.h").write_text("#define ANSWER 43\n")
    Builder(source, AVX2).load()
    assert len(kept(cache)) == 2
    assert library in kept(cache)
    assert others.is_dir()


def test_a_library_counts_as_used_when_it_is_loaded(source: Path, cache: Path) -> None:
    Builder(source, AVX2).load()
    (library,) = kept(cache)
    os.utime(library.parent, (0, 0))
    Builder(source, AVX2).load()
    assert time.time() - library.parent.stat().st_mtime < 86400


@pytest.mark.parametrize("changed", ["compiler's version", "compiler's path", "torch", "OpenMP", "instruction set"])
def test_what_else_it_depends_on_makes_another_library(
    changed: str, source: Path, cache: Path, make_compiler: MakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_compiler("")
    Builder(source, AVX512).load()
    if changed == "compiler's version":
        make_compiler('if [ "$*" = --version ]; then echo another; exit; fi')
    elif changed == "compiler's path":
        monkeypatch.setenv("CXX", COMPILER)
    elif changed == "torch":
        monkeypatch.setattr("torch.__version__", "another")
    elif changed == "OpenMP":
        monkeypatch.setattr(build, "_loaded_openmp", lambda: None)
    else:
        monkeypatch.setenv("PAGEFRAME_CPU_ISA", "avx2")
    Builder(source, AVX512).load()
    assert len(kept(cache)) == 2


def move_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one library of `cache` copied into another cache folder, from where this process has loaded nothing."""
    (library,) = kept(cache)
    base = cache.parent.with_name("moved")
    moved = base / "pageframe" / library.parent.name / library.name
    for folder in (base, base / "pageframe", moved.parent):
        folder.mkdir(mode=0o700)
    shutil.copy(library, moved)
    monkeypatch.setenv("XDG_CACHE_HOME", str(base))
    return moved


def test_a_whole_library_is_loaded_wherever_the_folder_is(
    source: Path, cache: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    Builder(source, AVX2).load()
    move_cache(cache, monkeypatch)
    assert answers(Builder(source, AVX2).load()) == (42, 1)
    assert compiler.compilations() == 1


@pytest.mark.parametrize("damage", ["truncated", "changed", "empty", "no library", "without a digest", "another's"])
def test_what_is_not_the_library_as_it_was_compiled_is_compiled_again(
    damage: str, source: Path, cache: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The foreign ones answer 666."""
    other = source.parent / "other"
    other.mkdir()
    (other / "engine.cpp").write_text(
        f"{EXPORTED} int answer() {{ return 666; }} {EXPORTED} int isa() {{ return 666; }}"
    )
    Builder(other / "engine.cpp", AVX2).load()
    (another,) = kept(cache)
    foreign = another.read_bytes()
    another.unlink()
    Builder(source, AVX2).load()
    path = move_cache(cache, monkeypatch)
    content = path.read_bytes()
    path.write_bytes(
        {
            "truncated": content[: len(content) // 2],
            "changed": content[:-100] + bytes(100),
            "empty": b"",
            "no library": bytes(len(content)),
            "without a digest": foreign[:-32],
            "another's": foreign,
        }[damage]
    )
    assert answers(Builder(source, AVX2).load()) == (42, 1)
    assert compiler.compilations() == 3
    assert path.read_bytes() == content
    Builder(source, AVX2).load()
    assert compiler.compilations() == 3


@pytest.mark.parametrize(
    "fault", ["written to by others", "written to by its group", "another user's", "replaceable", "not a folder"]
)
def test_a_folder_that_cannot_be_trusted_is_not_used(
    fault: str,
    source: Path,
    cache: Path,
    compiler: Compiler,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Not even the good library that is in it; with one warning, and no file left anywhere."""
    Builder(source, AVX2).load()
    if fault.startswith("written to"):
        cache.chmod(0o702 if fault.endswith("others") else 0o720)
    elif fault == "another user's":
        user = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: user)
    elif fault == "replaceable":
        cache.parent.chmod(0o777)
    else:
        shutil.rmtree(cache)
        cache.write_text("")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    assert answers(Builder(source, AVX2).load()) == (42, 1)
    assert compiler.compilations() == 2
    (warning,) = messages(caplog)
    assert re.search("are not kept, and the next start compiles again: .*" + re.escape(str(cache.parent)), warning)
    assert list(scratch.iterdir()) == []


def test_a_folder_in_a_sticky_one_is_trusted(source: Path, cache: Path, compiler: Compiler) -> None:
    cache.parent.mkdir()
    cache.parent.chmod(0o1777)  # as /tmp
    Builder(source, AVX2).load()
    Builder(source, AVX2).load()
    assert compiler.compilations() == 1


def test_a_full_disk_costs_only_the_keeping(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def replace(source: str, target: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", replace)
    assert answers(Builder(source, AVX2).load()) == (42, 1)
    assert kept(cache) == []
    (warning,) = messages(caplog)
    assert "no space left" in warning


# ---- several processes, and one that is killed -----------------------------------------------------------------------


StartLoad = Callable[[Path], subprocess.Popen[str]]


@pytest.fixture
def start_load() -> Iterator[StartLoad]:
    """Starts another process that loads the library of a source and prints what it answers."""
    started = []

    def start(source: Path) -> subprocess.Popen[str]:
        code = f"""
import pathlib, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background job's children do not have
from pageframe.kernels.cpu.build import Builder
print(Builder(pathlib.Path({str(source)!r}), frozenset({sorted(AVX2)!r})).load().functions.answer())
"""
        command = [sys.executable, "-c", code]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1)
        started.append(process)
        return process

    yield start
    for process in started:
        with process:
            process.kill()


@pytest.fixture
def halting(tmp_path: Path, make_compiler: MakeCompiler) -> tuple[Compiler, Path, Path]:
    """A compiler that, given a source, opens one pipe and waits until something is written to the other; once."""
    started, go_on = tmp_path / "started", tmp_path / "go-on"
    os.mkfifo(started)
    os.mkfifo(go_on)
    halt = f"exec 3> {started}; echo started >&3; rm {started}; read -r line < {go_on}"
    return make_compiler(f'case "$*" in *engine.cpp*) if [ -e {started} ]; then {halt}; fi;; esac'), started, go_on


def has_ended(pipe: TextIO) -> bool:
    """Whether the compiler that holds the pipe's other end ends; it has a minute, since one that does not waits on."""
    ready, _, _ = select.select([pipe], [], [], 60)
    return bool(ready) and pipe.read() == ""


def test_the_second_process_waits_for_the_first(
    source: Path, start_load: StartLoad, halting: tuple[Compiler, Path, Path]
) -> None:
    compiler, started, go_on = halting
    first = start_load(source)
    with started.open() as pipe:
        pipe.readline()
        second = start_load(source)
        assert second.stderr is not None
        assert second.stderr.readline() == "pageframe: another process is compiling the CPU kernels; waiting for it\n"
        go_on.write_text("\n")
    assert [process.communicate()[0] for process in (first, second)] == ["42\n", "42\n"]
    assert compiler.compilations() == 1


def test_a_killed_compilation_leaves_no_compiler_and_no_library(
    source: Path,
    cache: Path,
    start_load: StartLoad,
    halting: tuple[Compiler, Path, Path],
    make_compiler: MakeCompiler,
) -> None:
    _, started, _ = halting
    process = start_load(source)
    with started.open() as pipe:
        pipe.readline()
        process.kill()
        process.communicate()
        assert has_ended(pipe)
    assert kept(cache) == []
    make_compiler("")
    assert answers(Builder(source, AVX2).load()) == (42, 1)


def test_an_interrupted_compilation_ends_its_compiler(
    source: Path, cache: Path, start_load: StartLoad, halting: tuple[Compiler, Path, Path]
) -> None:
    _, started, _ = halting
    process = start_load(source)
    with started.open() as pipe:
        pipe.readline()
        process.send_signal(signal.SIGINT)
        assert has_ended(pipe)
    assert "KeyboardInterrupt" in process.communicate()[1]
    assert kept(cache) == []


# ---- what the compiler cannot do ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("refused", "got"),
    [
        ("*-mamx-tile*", "avx512"),
        ("*-mamx-bf16*", "avx512"),
        ("*-mavx512bf16*", "avx512_vnni"),
        ("*-mavx512f*", "avx2"),
    ],
)
def test_an_old_compiler_gets_the_next_set(
    refused: str, got: str, source: Path, make_compiler: MakeCompiler, caplog: pytest.LogCaptureFixture
) -> None:
    message = "error: unrecognized command-line option"
    compiler = make_compiler(f'case "$*" in {refused}) echo "{message}" >&2; exit 1;; esac')
    for _ in range(2):
        caplog.clear()
        library = Builder(source, AMX).load()
        assert library.isa == got
        assert answers(library) == (42, ISA_NUMBERS[got])
        tried = list(ISA_NUMBERS)[: 4 - ISA_NUMBERS[got]]
        assert [line.split(":")[0] for line in messages(caplog)] == [
            f"the CPU kernels cannot be compiled for {isa}" for isa in tried
        ]
        assert all(message in line for line in messages(caplog))
    assert compiler.compilations() == 1


def refuse(text: str) -> str:
    return f'case "$*" in *--version*) ;; {text} echo "x.cpp:1: error: it is no good" >&2; exit 3;; esac'


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (refuse("*engine.cpp*)"), "compiler failed with status 3: x.cpp:1: error: it is no good"),
        (refuse("*)"), "compiler compiles for none of avx512, avx2"),
        ("exit 1", "compiler failed with status 1: no message"),
        ("kill -s KILL $$", "compiler failed with status -9: no message"),
    ],
)
def test_a_compiler_that_fails_is_a_build_error(
    first: str, message: str, source: Path, cache: Path, make_compiler: MakeCompiler
) -> None:
    make_compiler(first)
    with pytest.raises(BuildError) as caught:
        Builder(source, AVX512).load()
    assert str(caught.value).endswith(message)
    assert not list(cache.glob("*/*.so*"))


def test_a_compiler_that_hangs_is_given_up(
    source: Path, tmp_path: Path, make_compiler: MakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "never-written")
    make_compiler(f"read -r line < {tmp_path / 'never-written'}")
    monkeypatch.setattr(build, "_COMPILER_TIMEOUT", 0.1)
    with pytest.raises(BuildError, match="had not ended after 0 s"):
        Builder(source, AVX2).load()


def test_an_error_of_the_source_is_told_by_its_line(source: Path) -> None:
    (source.parent / "answer.h").write_text("#define ANSWER unknown\n")
    with pytest.raises(BuildError) as caught:
        Builder(source, AVX2).load()
    assert re.search(r"failed with status 1: .*answer\.h:1:16: error: .*unknown", str(caught.value))
    assert "\n" not in str(caught.value)


def test_a_library_that_does_not_load_is_a_build_error(source: Path) -> None:
    source.write_text(f"{EXPORTED} int nowhere(); {EXPORTED} int answer() {{ return nowhere(); }}")
    with pytest.raises(BuildError, match=r"cannot be made or loaded: .*nowhere"):
        Builder(source, AVX2).load()


def test_without_a_compiler_it_says_so(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="CXX is 'no-such-compiler', which is no program"):
        Builder(source, AVX2).load()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BuildError, match=r"no g\+\+ or c\+\+"):
        Builder(source, AVX2).load()


# ---- what the caller is given ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("PAGEFRAME_NO_COMPILE", "1", "PAGEFRAME_NO_COMPILE is set"),
        ("PAGEFRAME_CPU_ISA", "none", "PAGEFRAME_CPU_ISA is none"),
        ("PAGEFRAME_CPU_ISA", "sse9", "PAGEFRAME_CPU_ISA is 'sse9', no instruction set"),
        ("CXX", "no-such-compiler", "'no-such-compiler', which is no program"),
    ],
)
def test_without_a_library_both_say_why(
    variable: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    build._library.cache_clear()
    monkeypatch.setenv(variable, value)
    for function in (build.load_library, build.chosen_isa):
        with pytest.raises(BuildError, match=re.escape(message)):
            function()


@pytest.fixture
def packaged(source: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The small source in place of the package's own, for this processor."""
    try:
        choose(processor_flags(), "")
    except BuildError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(build, "__file__", str(source.parent / "build.py"))
    build._library.cache_clear()
    yield
    build._library.cache_clear()


@pytest.mark.usefixtures("packaged")
def test_the_chosen_set_is_that_of_the_library(compiler: Compiler) -> None:
    best = choose(processor_flags(), "")[0].name
    assert build.chosen_isa() == best
    assert build.load_library().answer() == 42
    assert build.load_library().isa() == ISA_NUMBERS[best]
    assert compiler.compilations() == 1


@pytest.mark.usefixtures("packaged")
def test_the_library_shares_torchs_openmp(source: Path) -> None:
    """Two runtimes would each start a thread per core."""
    source.write_text(f"#include <omp.h>\n{SOURCE} EXPORTED int threads() {{ return omp_get_max_threads(); }}")
    library = build.load_library()
    for threads in (3, 2):
        torch.set_num_threads(threads)
        assert library.threads() == threads
