"""Compiles the C++ of this folder on its first use and loads it.

The library is kept in the user's cache folder under a name made of everything it depends on, so another source,
compiler or torch never finds it. Its last bytes are a digest of the rest and of that name, so neither half a file nor
another's is ever loaded. Knows nothing of what the functions do.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from pageframe.kernels.cpu.isa import WISH, BuildError, InstructionSet, choose, processor_flags

__all__ = ["BuildError", "Builder", "CompilerError", "Library", "cache_folder", "chosen_isa", "load_library"]

logger = logging.getLogger(__name__)


class CompilerError(BuildError):
    """The compiler found a fault, in what it was given or in itself."""


# Hidden: two libraries in one process, for two instruction sets, must not take each other's functions.
COMPILE_FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-fopenmp",
    "-fno-math-errno",
    "-ffp-contract=off",
)
#: Changes with what this module makes of the same sources, or with how it stores that.
_FORMAT = "2"
_LIBRARY_NAME = "kernels.so"
_DIGEST_BYTES = hashlib.sha256().digest_size
#: What compiling takes on a laptop, for whoever waits.
_USUAL_SECONDS = 10
#: A compilation of so many seconds, this process's or one that it waits for, has hung.
_COMPILER_TIMEOUT = 300.0
_LOCK_POLL_SECONDS = 0.05
#: Another version's library that nobody has used for so long goes when a new one comes.
_KEPT_SECONDS = 30 * 24 * 3600.0
_KEY = re.compile(r"[0-9a-f]{64}")
_OPENMP_RUNTIME = re.compile(r"(/.*/lib(?:gomp|iomp5|omp)[-.][^/\n]*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Library:
    """A loaded library and the name of the instruction set it is compiled for."""

    functions: ctypes.CDLL
    isa: str


def load_library() -> ctypes.CDLL:
    """The compiled library: from the cache folder, else compiled now, once in this process.

    Raises:
        BuildError: the processor, the system, the user's wish or the compiler forbids it.
    """
    return _library().functions


def chosen_isa() -> str:
    """The instruction set of what `load_library` gives: "amx", "avx512", "avx512_vnni" or "avx2".

    Raises:
        BuildError: as `load_library`.
    """
    return _library().isa


@cache
def _library() -> Library:
    return Builder(Path(__file__).parent / "engine.cpp").load()


def cache_folder() -> Path:
    """Where compiled libraries are kept: pageframe/ in $XDG_CACHE_HOME (if absolute) or in ~/.cache."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(chosen) if os.path.isabs(chosen) else Path(os.path.expanduser("~")) / ".cache"
    return base / "pageframe"


@dataclass(frozen=True, slots=True)
class Builder:
    """Makes a library of one translation unit and the headers beside it.

    Args:
        source: the translation unit; it includes nothing of ours but "NAME.h" from its own folder.
        processor: flags as of `isa.processor_flags`; None stands for this processor's.
    """

    source: Path
    processor: frozenset[str] | None = None

    def load(self) -> Library:
        """The library for the best instruction set that the processor and the compiler have.

        Raises:
            BuildError: there is none; the message is one line.
        """
        if os.environ.get("PAGEFRAME_NO_COMPILE", "") not in ("", "0"):
            raise BuildError("PAGEFRAME_NO_COMPILE is set")
        processor = processor_flags() if self.processor is None else self.processor
        choices = choose(processor, os.environ.get(WISH, ""))
        compiler = _find_compiler()
        version = _run([compiler, "--version"])
        try:
            for isa in choices:
                library = _cached_or_compiled(_Recipe(self.source, compiler, version, isa, _loaded_openmp()))
                if library is not None:
                    return Library(library, isa.name)
        except OSError as error:
            raise BuildError(f"the compiled library cannot be made or loaded: {error}") from error
        raise BuildError(f"{compiler} compiles for none of {', '.join(isa.name for isa in choices)}")


@dataclass(frozen=True, slots=True)
class _Recipe:
    """Everything that a library depends on."""

    source: Path
    compiler: str
    compiler_version: str
    isa: InstructionSet
    openmp: str | None

    def key(self) -> str:
        """The same for the same library; hexadecimal digits."""
        texts = [self.source, *sorted(self.source.parent.glob("*.h"))]
        parts = [
            _FORMAT,
            self.compiler,
            self.compiler_version,
            *COMPILE_FLAGS,
            *self.isa.compiler_flags,
            str(self.openmp),
            torch.__version__,
            *(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in texts),
        ]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def is_known_to_compiler(self) -> bool:
        """Whether compiler and assembler know the instruction set; where not, a line of the log says why."""
        program = f'int main() {{ asm volatile("{self.isa.probe}"); }}'
        with tempfile.TemporaryDirectory(prefix="pageframe-") as scratch:
            source = Path(scratch) / "probe.cpp"
            source.write_text(program)
            try:
                _run([self.compiler, *self.isa.compiler_flags, "-c", str(source), "-o", f"{scratch}/probe.o"])
            except BuildError as error:
                logger.warning("the CPU kernels cannot be compiled for %s: %s", self.isa.name, error)
                return False
        return True

    def compile(self, scratch: Path) -> Path:
        """Compile in a folder of its own; returns the library, which ends with its digest.

        Raises:
            BuildError: the compiler fails.
        """
        compiled, library = scratch / "kernels.o", scratch / _LIBRARY_NAME
        flags = (*COMPILE_FLAGS, *self.isa.compiler_flags)
        _run([self.compiler, *flags, "-c", str(self.source), "-o", str(compiled)], scratch)
        # Linked by its path, torch's runtime is needed by the name it is already loaded under.
        _run([self.compiler, "-shared", str(compiled), self.openmp or "-fopenmp", "-o", str(library)], scratch)
        with library.open("ab") as file:  # past the end of what the loader reads
            file.write(_digest(library.read_bytes(), self.key()))
        return library


def _cached_or_compiled(recipe: _Recipe) -> ctypes.CDLL | None:
    """The library, or None where the compiler does not know the instruction set.

    Raises:
        BuildError: the compiler fails.
        OSError: there is no room for the library, or it does not load.
    """
    key = recipe.key()
    try:
        folder = _own_folder(key)
    except OSError as error:
        return _compile_and_open(recipe, error) if recipe.is_known_to_compiler() else None
    path = folder / _LIBRARY_NAME
    library = _open_cached(path, key)
    if library is not None or not recipe.is_known_to_compiler():
        return library
    with _turn(folder / "lock"):
        return _open_cached(path, key) or _compile_and_open(recipe, path)


def _compile_and_open(recipe: _Recipe, place: Path | OSError) -> ctypes.CDLL:
    """Compile and load.

    Args:
        place: where to keep the library, or why it cannot be kept.
    """
    start = time.monotonic()
    _tell(f"compiling the CPU kernels for {recipe.isa.name}, once; about {_USUAL_SECONDS} s")
    with tempfile.TemporaryDirectory(prefix="pageframe-", ignore_cleanup_errors=True) as scratch:
        library = recipe.compile(Path(scratch))
        _tell(f"compiled the CPU kernels for {recipe.isa.name} in {time.monotonic() - start:.1f} s")
        try:
            if isinstance(place, OSError):
                raise place
            _keep(library, place)
            _remove_unused(place.parent.parent)
        except OSError as error:
            logger.warning("the compiled CPU kernels are not kept, and the next start compiles again: %s", error)
            return ctypes.CDLL(str(library))  # stays whole in memory when its file is gone
    return ctypes.CDLL(str(place))


def _keep(library: Path, place: Path) -> None:
    """Copy the library to its place: whole or not at all, whoever else writes the same."""
    descriptor, name = tempfile.mkstemp(dir=place.parent, prefix=f"{place.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(library.read_bytes())
        os.replace(name, place)
    except OSError:
        os.unlink(name)
        raise


def _remove_unused(root: Path) -> None:
    """Remove the folders of libraries that were not opened for long. Who has one of them loaded keeps it in memory."""
    oldest = time.time() - _KEPT_SECONDS
    with contextlib.suppress(OSError):
        for folder in root.iterdir():
            if _KEY.fullmatch(folder.name) and folder.stat().st_mtime < oldest:
                shutil.rmtree(folder, ignore_errors=True)


def _open_cached(path: Path, key: str) -> ctypes.CDLL | None:
    """The library that was compiled for `key`; None where there is none, or another, or a part, or it does not load."""
    try:
        content = path.read_bytes()
        intact = _digest(content[:-_DIGEST_BYTES], key) == content[-_DIGEST_BYTES:]
        if not intact:
            return None
        with contextlib.suppress(OSError):  # the folder may be read-only
            os.utime(path.parent)  # it is in use: see _remove_unused
        return ctypes.CDLL(str(path))
    except OSError:
        return None


def _own_folder(key: str) -> Path:
    """The folder of one library, made if need be. What lies in it will be run: nobody else may write to it.

    Raises:
        OSError: it cannot be made, or others can write to it.
    """
    root = cache_folder()
    root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for made in (root, root / key):
        made.mkdir(mode=0o700, exist_ok=True)
    folder = (root / key).resolve()
    user = os.geteuid()
    for place in (folder, folder.parent):
        status = place.stat()
        if status.st_uid != user:
            raise PermissionError(f"{place} belongs to another user")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"others can write to {place}; chmod go-w {place} would make it safe")
    # Whoever can write to the folder above could put another in place of ours, unless it is sticky, as /tmp is.
    above = folder.parent.parent
    status = above.stat()
    if status.st_uid not in (user, 0) or (status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX):
        raise PermissionError(f"others can replace what is in {above}")
    return folder


@contextlib.contextmanager
def _turn(lock: Path) -> Iterator[None]:
    """Wait for whoever compiles the same. Where there can be no lock, both compile, and the rename keeps both whole."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
            stack.callback(os.close, descriptor)  # which gives the lock back, as the end of this process does
            _wait_for(descriptor)
        yield


def _wait_for(descriptor: int) -> None:
    """Lock the file, or give up on a holder that has hung.

    Raises:
        OSError: the file system has no locks.
    """
    import fcntl  # not everywhere where this module must be importable

    give_up_at = time.monotonic() + _COMPILER_TIMEOUT
    told = False
    while time.monotonic() < give_up_at:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not told:
                _tell("another process is compiling the CPU kernels; waiting for it")
                told = True
            time.sleep(_LOCK_POLL_SECONDS)


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


def _run(command: list[str], scratch: Path | None = None) -> str:
    """The command's output. It ends with this process, whatever ends that.

    Args:
        scratch: for the command's temporary files.

    Raises:
        BuildError: it failed.
    """
    environment = os.environ | {"LC_ALL": "C"} | ({"TMPDIR": str(scratch)} if scratch else {})
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment,
            process_group=0,  # a compiler has children, which are ended with it
        )
    except OSError as error:
        raise BuildError(f"{command[0]} does not run: {error}") from error
    try:
        with _guard(process.pid, scratch):
            output, errors = process.communicate(timeout=_COMPILER_TIMEOUT)
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise BuildError(f"{command[0]} had not ended after {_COMPILER_TIMEOUT:.0f} s") from None
        raise
    if process.returncode != 0:
        first = next((line for line in errors.splitlines() if "error:" in line), "no message")
        raise CompilerError(f"{command[0]} failed with status {process.returncode}: {first}")
    return output


@contextlib.contextmanager
def _guard(group: int, scratch: Path | None) -> Iterator[None]:
    """Should this process end meanwhile, even killed, a shell ends the process group and removes the scratch folder.

    Otherwise a first start that is broken off would leave a compiler at work.
    """
    script = 'read -r _; kill -s KILL -- "-$1"; test -z "$2" || rm -rf -- "$2"'
    command = ["/bin/sh", "-c", script, "sh", str(group), str(scratch or "")]
    silent = subprocess.DEVNULL
    # `read` ends when the other end of its input is closed, which only this process holds.
    shell = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=silent, stderr=silent, start_new_session=True)
    try:
        yield
    finally:
        shell.kill()
        shell.communicate()


def _tell(line: str) -> None:
    """Say what takes so long, also where a program has not set logging up."""
    if logger.hasHandlers():
        logger.info(line)
    else:
        sys.stderr.write(f"pageframe: {line}\n")


def _digest(content: bytes, key: str) -> bytes:
    return hashlib.sha256(key.encode() + content).digest()
