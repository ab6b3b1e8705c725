"""Compiles the C++ of this folder on its first use and loads it.

The library is kept in the user's cache folder under a name made of everything it depends on, so another source,
compiler or torch never finds it; its last bytes are a digest of the rest, so half a file is never loaded. Knows
nothing of what the functions do.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).parent / "linear.cpp"
COMPILE_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fopenmp")
NEEDED_CPU_FLAGS = ("avx2", "fma")
_DIGEST_BYTES = hashlib.sha256().digest_size
_COMPILER_TIMEOUT = 120.0
_OPENMP_RUNTIME = re.compile(r"(/\S*/lib(?:gomp|iomp5|omp)[-.]\S*)$", re.MULTILINE)


class BuildError(RuntimeError):
    """There is no compiled library on this machine; the message says why, in one line."""


def load_library() -> ctypes.CDLL:
    """The compiled library: from the cache folder, else compiled now.

    Raises:
        BuildError: the processor, the system, the user's wish or the compiler forbids it.
    """
    if os.environ.get("PAGEFRAME_NO_COMPILE", "") not in ("", "0"):
        raise BuildError("PAGEFRAME_NO_COMPILE is set")
    flags = _cpu_flags()
    missing = [flag for flag in NEEDED_CPU_FLAGS if flag not in flags]
    if missing:
        raise BuildError(f"this processor lacks {' and '.join(missing)}, or this system is not Linux on x86-64")
    compiler = _find_compiler()
    openmp = _loaded_openmp()
    path = cache_folder() / _key(compiler, openmp, flags) / "linear.so"
    if not _is_intact(path):
        path = _compile(compiler, openmp, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"the compiled {path} does not load: {error}") from error


def cache_folder() -> Path:
    """Where compiled libraries are kept: pageframe/ in $XDG_CACHE_HOME (if absolute) or in ~/.cache."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(chosen) if os.path.isabs(chosen) else Path(os.path.expanduser("~")) / ".cache"
    return base / "pageframe"


def _cpu_flags() -> frozenset[str]:
    """What the processor can do, in Linux's names; empty for another kind of processor or system."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return frozenset()
    found = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def _find_compiler() -> str:
    named = os.environ.get("CXX", "")
    for name in (named,) if named else ("g++", "c++"):
        found = shutil.which(name)
        if found is not None:
            return found
    raise BuildError(f"no C++ compiler: {f'CXX is {named!r}, which is no program' if named else 'no g++ or c++'}")


def _loaded_openmp() -> str | None:
    """The OpenMP runtime torch has loaded. Ours must be the same one: two would each start a thread per core."""
    found = _OPENMP_RUNTIME.search(Path("/proc/self/maps").read_text())
    return found[1] if found else None


def _key(compiler: str, openmp: str | None, cpu_flags: Iterable[str]) -> str:
    parts = [
        SOURCE.read_text(),
        compiler,
        _run([compiler, "--version"]),
        " ".join(COMPILE_FLAGS),
        str(openmp),
        torch.__version__,
        " ".join(sorted(cpu_flags)),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _is_intact(path: Path) -> bool:
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def _compile(compiler: str, openmp: str | None, path: Path) -> Path:
    """Compile to `path`, or to a new temporary folder where that cannot be written; returns where it is."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pageframe-") as scratch:
        compiled, library = f"{scratch}/linear.o", f"{scratch}/linear.so"
        _run([compiler, *COMPILE_FLAGS, "-c", str(SOURCE), "-o", compiled])
        # Linked by its path, torch's runtime is needed by the name it is already loaded under.
        _run([compiler, "-shared", compiled, openmp or "-fopenmp", "-o", library])
        content = Path(library).read_bytes()
    content += hashlib.sha256(content).digest()  # past the end of what the loader reads
    try:
        _write(path, content)
    except OSError as error:
        path = Path(tempfile.mkdtemp(prefix="pageframe-")) / path.name
        logger.warning("compiled code goes to %s and will be compiled again next time: %s", path, error)
        _write(path, content)
    logger.info("compiled the CPU kernels in %.1f s: %s", time.monotonic() - start, path)
    return path


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all, whoever else writes the same."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except OSError:
        os.unlink(name)
        raise


def _run(command: list[str]) -> str:
    """The command's output.

    Raises:
        BuildError: it failed.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILER_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} does not run: {error}") from error
    if done.returncode != 0:
        first = next((line for line in done.stderr.splitlines() if "error" in line), "no message")
        raise BuildError(f"{command[0]} failed with status {done.returncode}: {first}")
    return done.stdout
