"""Compiles requests' grammars beside the engine: in threads of its own, never between two steps.

The compiler, with the tokenizer it needs, is made when the first grammar comes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from pageframe.runtime.errors import InvalidRequestError, TooManyWaitError
from pageframe.runtime.grammar import CompiledGrammar, GrammarSpec

#: Grammars compiled at once.
NUM_THREADS = 2
#: Different grammars that are being compiled or wait for it. One takes the compiler's seconds at most, so a place is
#: free again in a time that a client can wait.
MAX_COMPILING = 64


class Compiler(Protocol):
    """What makes a grammar ready: see grammar_compiler.GrammarCompiler."""

    def knows(self, spec: GrammarSpec) -> bool: ...

    def compile(self, spec: GrammarSpec, *, param: str) -> CompiledGrammar: ...


class _Job:
    """One grammar on its way through the compiler, and how many want it. `spec`: None once nobody does."""

    def __init__(self, spec: GrammarSpec) -> None:
        self.spec: GrammarSpec | None = spec
        self.future: Future[CompiledGrammar]
        self.num_wanted = 0

    def drop(self) -> None:
        """One who wanted it does not any more."""
        self.num_wanted -= 1
        if self.num_wanted == 0 and self.future.cancel():
            self.spec = None  # the thread's queue keeps the job, whose source may be long, until its turn


class Compilation:
    """A grammar that is being compiled, as one of those who wait for it sees it."""

    def __init__(self, job: _Job) -> None:
        job.num_wanted += 1
        self._job = job

    def done(self) -> bool:
        return self._job.future.done()

    def result(self) -> CompiledGrammar:
        """Waits for it.

        Raises:
            InvalidRequestError: the grammar is at fault; the error names the field "grammar".
        """
        return self._job.future.result()

    def cancel(self) -> None:
        """It is not wanted here any more; once at most. What has not begun, and nobody else waits for, never will."""
        self._job.drop()


class GrammarService:
    """Hands grammars to a compiler. One caller at a time.

    Args:
        make_compiler: takes seconds, maybe; called once, in one of the threads.
        max_compiling: different grammars at once, beyond which further ones are turned away.
    """

    def __init__(self, make_compiler: Callable[[], Compiler], max_compiling: int = MAX_COMPILING) -> None:
        self._make_compiler = make_compiler
        self._max_compiling = max_compiling
        self._compiler: Compiler | None = None
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(NUM_THREADS, "grammars")
        #: For grammars that are known already: they need not wait until strangers' have taken all of their seconds.
        self._fast_thread = ThreadPoolExecutor(1, "known-grammars")
        self._jobs: dict[GrammarSpec, _Job] = {}

    def submit(self, spec: GrammarSpec) -> Compilation:
        """Begin to compile, or wait with those who asked for the same.

        Raises:
            TooManyWaitError: as many others are being compiled as may, and it is not known.
        """
        self._jobs = {spec: job for spec, job in self._jobs.items() if not job.future.done()}
        job = self._jobs.get(spec)
        if job is None:
            is_known = self._compiler is not None and self._compiler.knows(spec)
            if len(self._jobs) >= self._max_compiling and not is_known:
                raise TooManyWaitError(f"{len(self._jobs)} other grammars wait to be compiled; no more may")
            job = self._jobs[spec] = _Job(spec)
            job.future = (self._fast_thread if is_known else self._threads).submit(self._compile, job)
        return Compilation(job)

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile, and wait for it.

        Raises:
            InvalidRequestError: the grammar is at fault.
            TooManyWaitError: as `submit`.
        """
        return self.submit(spec).result()

    def _compile(self, job: _Job) -> CompiledGrammar:
        assert job.spec is not None
        with self._lock:
            if self._compiler is None:
                self._compiler = self._make_compiler()
        return self._compiler.compile(job.spec, param="grammar")


def no_compiler() -> Compiler:
    """The compiler of an engine that was built without one.

    Raises:
        InvalidRequestError: always.
    """
    raise InvalidRequestError("grammar is given; this engine has no tokenizer to follow one with", param="grammar")
