"""Compiles requests' grammars beside the engine: in threads of its own, never between two steps.

The compiler, with the tokenizer it needs, is made when the first grammar comes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from pageframe.runtime.errors import InvalidRequestError
from pageframe.runtime.grammar import CompiledGrammar, GrammarSpec

#: Grammars compiled at once.
NUM_THREADS = 2


class Compiler(Protocol):
    """What makes a grammar ready: see grammar_compiler.GrammarCompiler."""

    def compile(self, spec: GrammarSpec, *, param: str) -> CompiledGrammar: ...


class GrammarService:
    """Hands grammars to a compiler.

    Args:
        make_compiler: takes seconds, maybe; called once, in one of the threads.
    """

    def __init__(self, make_compiler: Callable[[], Compiler]) -> None:
        self._make_compiler = make_compiler
        self._compiler: Compiler | None = None
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None

    def submit(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        """Begin to compile. An error names the field "grammar": InvalidRequestError, the grammar is at fault."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(NUM_THREADS, "grammars")
        return self._threads.submit(self._compile, spec)

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile, and wait for it.

        Raises:
            InvalidRequestError: the grammar is at fault.
        """
        return self.submit(spec).result()

    def _compile(self, spec: GrammarSpec) -> CompiledGrammar:
        with self._lock:
            if self._compiler is None:
                self._compiler = self._make_compiler()
        return self._compiler.compile(spec, param="grammar")


def no_compiler() -> Compiler:
    """The compiler of an engine that was built without one.

    Raises:
        InvalidRequestError: always.
    """
    raise InvalidRequestError("grammar is given; this engine has no tokenizer to follow one with", param="grammar")
