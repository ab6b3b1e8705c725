"""Grammars are tried in a process of their own before the engine compiles them.

A grammar is a stranger's program: how long it compiles, how much memory and how deep a stack that takes shows only
when it is done, and a thread that does it cannot be stopped. So a child process does it first, under limits of the
operating system; what ends that process is refused, and what passes takes the engine about as much.

`python -m pageframe.runtime.grammar_trial` is the child: it reads lines of JSON, first the set-up, then one grammar a
line, and answers each with a line: llguidance's complaint as JSON, "" for none. It ends with its input.
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from pageframe.runtime.errors import EngineError
from pageframe.runtime.grammar_vocabulary import TokenTable

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

#: The child's stack, smaller than any of the engine's that compiles.
STACK_BYTES = 2 * 1024**2
#: A child on a busy machine gets so many times its processor seconds before it is given up.
PATIENCE = 8
_SECONDS_TO_END = 1.0
_OUT_OF_MEMORY = 3


@dataclass(frozen=True, slots=True)
class TrialLimits:
    """What a grammar may take to compile.

    Args:
        seconds: of processor time.
        memory_bytes: beside what the vocabulary takes.
        lexer_states: most states of its lexer, compiled or made later; 1 to 2 kB each.
    """

    seconds: float = 5.0
    memory_bytes: int = 1024**3
    lexer_states: int = 50_000


class GrammarTrial:
    """A child process that tries grammars, started when first needed and again after one that ended it.

    One thread at a time. It ends with this object, or by `close`.
    """

    def __init__(self, table: TokenTable, limits: TrialLimits) -> None:
        self._table = table
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None

    def complaint(self, grammar: str) -> str:
        """What is wrong with a grammar, in llguidance's words or ours; "" where it compiles within the limits.

        Raises:
            EngineError: the child does not work at all.
        """
        if self._process is not None and self._process.poll() is not None:
            self.close()  # somebody has ended it
        answer = b""
        with suppress(BrokenPipeError):
            process = self._process or self._start()
            _write_line(process.stdin, grammar)
            answer = _read_line(process.stdout, time.monotonic() + PATIENCE * self._limits.seconds)
        if answer.endswith(b"\n"):
            words: str = json.loads(answer)
            return words
        status = self.close()
        if status in (-signal.SIGPROF, -signal.SIGKILL):
            return f"it takes more than {self._limits.seconds:g} seconds to compile"
        if status < 0 or status == _OUT_OF_MEMORY:
            return f"it is nested too deeply, or takes more than {self._limits.memory_bytes // 1024**2} MiB, to compile"
        raise EngineError(f"grammars cannot be tried: `python -m {__spec__.name}` ends with status {status}")

    def close(self) -> int:
        """End the child, if there is one; what it, or whoever ended it before, gave as its status."""
        process, self._process = self._process, None
        if process is None:
            return 0
        with process:  # closes its input, at which it ends by itself, unless it is at work
            assert process.stdin is not None
            process.stdin.close()
            try:
                return process.wait(timeout=_SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                process.kill()
                return process.wait()

    def __del__(self) -> None:
        self.close()

    def _start(self) -> subprocess.Popen[bytes]:
        # What can be imported here can be imported there.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the parent, with which it ends
        )
        table = self._table
        set_up = {
            "tokens": [data.decode("latin-1") for data in table.tokens],
            "special_token_ids": table.special_token_ids,
            "eos_token_ids": table.eos_token_ids,
            "limits": asdict(self._limits),
        }
        _write_line(process.stdin, set_up)
        return process


def _write_line(pipe: Any, value: Any) -> None:
    data = memoryview(json.dumps(value).encode() + b"\n")
    while data:
        data = data[pipe.write(data) :]


def _read_line(pipe: Any, deadline: float) -> bytes:
    """A line; less where the other side ended or the time ran out."""
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while not line.endswith(b"\n") and selector.select(max(0.0, deadline - time.monotonic())):
            part = pipe.read(65_536)
            if not part:
                break
            line += part
    return line


def compile_grammar(tokenizer: LLTokenizer, grammar: str, limits: TrialLimits) -> tuple[LLMatcher, str]:
    """llguidance's matcher of a grammar at its start, its first mask computed once, and what is wrong with it.

    Args:
        grammar: what one of LLMatcher's grammar_from_… functions returns.
    """
    from llguidance import LLMatcher, LLParserLimits

    parser_limits = LLParserLimits(max_lexer_states=limits.lexer_states, verbose_errors=False)
    start = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits)
    if start.is_error():
        return start, start.get_error()
    first = start.deep_copy()
    first.compute_bitmask()
    return start, first.get_error()


def _serve(source: BinaryIO, target: BinaryIO) -> None:
    set_up = json.loads(source.readline())
    limits = TrialLimits(**set_up["limits"])
    tokens = [text.encode("latin-1") for text in set_up["tokens"]]
    tokenizer = TokenTable(tokens, set_up["special_token_ids"], set_up["eos_token_ids"]).load()
    if sys.platform == "linux":  # elsewhere the system does not say how much address space is taken
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + limits.memory_bytes)
    for line in source:
        signal.setitimer(signal.ITIMER_PROF, limits.seconds)  # its signal ends the process
        _, complaint = compile_grammar(tokenizer, json.loads(line), limits)
        signal.setitimer(signal.ITIMER_PROF, 0)
        target.write(json.dumps(complaint).encode() + b"\n")
        target.flush()


def _limit(what: int, soft: int) -> None:
    resource.setrlimit(what, (soft, resource.getrlimit(what)[1]))


def _run() -> None:
    status = 1
    try:
        _serve(sys.stdin.buffer, sys.stdout.buffer)
        status = 0
    except MemoryError:
        status = _OUT_OF_MEMORY
    finally:
        os._exit(status)


def main() -> None:
    _limit(resource.RLIMIT_CORE, 0)
    threading.stack_size(STACK_BYTES)
    threading.Thread(target=_run).start()


if __name__ == "__main__":
    main()
