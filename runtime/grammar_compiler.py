"""Makes grammars ready: the one place where a request's schema, regular expression or grammar is compiled.

Compiling blocks, so the caller gives it a thread that nothing else waits for. Every grammar is tried in a process of
its own first (grammar_trial.py). Knows no requests and no scheduler.
"""

from __future__ import annotations

import importlib.util
import json
import queue
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pageframe.runtime.errors import InvalidRequestError
from pageframe.runtime.grammar import (
    GRAMMAR_KINDS,
    JSON_OPTIONS,
    MAX_SOURCE_BYTES,
    CompiledGrammar,
    GrammarSpec,
    one_line,
)
from pageframe.runtime.grammar_checks import lark_complaint, schema_complaint
from pageframe.runtime.grammar_tools import read_tool_calls, usable_lark
from pageframe.runtime.grammar_trial import GrammarTrial, TrialLimits, compile_grammar
from pageframe.runtime.grammar_vocabulary import ModelTokens
from pageframe.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

#: An attribute of a Lark rule that llguidance takes and leaves to whoever draws.
_TEMPERATURE = re.compile(r"^[!?]?[a-z_][^:\n]*\[[^\]:]*\btemperature\s*=", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What grammars may take.

    Args:
        source_bytes: of one grammar's source, as UTF-8.
        cached_grammars, cached_bytes: grammars that are remembered, compiled or refused, and their sources' characters
            in all.
        num_trials: grammars tried at once.
    """

    source_bytes: int = MAX_SOURCE_BYTES
    cached_grammars: int = 64
    cached_bytes: int = 4 * 1024**2
    num_trials: int = 2
    trial: TrialLimits = field(default_factory=TrialLimits)


class _RefusedError(Exception):
    """A grammar that cannot be used, and why."""


class GrammarCompiler:
    """Compiles grammars for one model. Safe to use from several threads.

    Args:
        vocab_size: the model's, which may be larger than the tokenizer's.
        eos_token_ids: tokens that end a text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        limits: GrammarLimits | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._limits = limits or GrammarLimits()
        self._vocabulary_lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._trials: queue.LifoQueue[GrammarTrial] = queue.LifoQueue()
        self._lock = threading.Lock()
        #: Refusals too: to find out that a grammar takes too long takes as long again.
        self._known: OrderedDict[GrammarSpec, CompiledGrammar | _RefusedError] = OrderedDict()
        self._cached_bytes = 0
        self._compiling: dict[GrammarSpec, Future[CompiledGrammar]] = {}

    def compile(self, spec: GrammarSpec, *, param: str = "response_format") -> CompiledGrammar:
        """The grammar, compiled now or before. Blocks until it is there; the limits say how long that may take.

        Args:
            param: the request's field that it comes from, for the error.

        Raises:
            InvalidRequestError: it is no valid grammar, needs what llguidance does not have, or exceeds a limit.
        """
        try:
            self._check_size(spec)
            return self._cached(spec) or self._compile_once(spec)
        except _RefusedError as error:
            raise InvalidRequestError(f"{param} {error}", param=param) from None

    def _check_size(self, spec: GrammarSpec) -> None:
        size = len(spec.source.encode("utf-8", "surrogatepass"))
        if size > self._limits.source_bytes:
            raise _RefusedError(f"has {_name(spec)} of {size} bytes; at most {self._limits.source_bytes} are allowed")

    def _compile_once(self, spec: GrammarSpec) -> CompiledGrammar:
        with self._lock:
            # Requests that bring the same grammar at the same time wait for the first of them.
            future = self._compiling.get(spec)
            is_first = future is None
            if future is None:
                future = self._compiling[spec] = Future()
        if is_first:
            self._fulfil(future, spec)
        return future.result()

    def knows(self, spec: GrammarSpec) -> bool:
        """Whether it was compiled or refused before and is remembered, so that `compile` takes no time, most likely."""
        with self._lock:
            return spec in self._known

    def prepare(self) -> None:
        """Do now what the first grammar would wait for, a second or two for a large vocabulary.

        Raises:
            InvalidRequestError: this model, or what is installed, does not allow any grammar.
        """
        self.compile(GrammarSpec("json_object"))

    def close(self) -> None:
        """End the child processes, which otherwise end with this object; none may be at work.

        A grammar that comes later starts them again.
        """
        trials = [self._trials.get_nowait() for _ in range(self._trials.qsize())]
        for trial in trials:
            trial.close()
            self._trials.put(trial)

    def _cached(self, spec: GrammarSpec) -> CompiledGrammar | None:
        with self._lock:
            known = self._known.get(spec)
            if known is not None:
                self._known.move_to_end(spec)
        if isinstance(known, _RefusedError):
            raise _RefusedError(*known.args)
        if known is None or not known.is_worn_out():
            return known
        with self._lock:
            if self._known.get(spec) is known:
                self._drop(spec)
        return None

    def _fulfil(self, future: Future[CompiledGrammar], spec: GrammarSpec) -> None:
        outcome: CompiledGrammar | BaseException
        try:
            outcome = self._compile(spec)
        except BaseException as error:
            outcome = error
        with self._lock:
            del self._compiling[spec]
            if isinstance(outcome, CompiledGrammar):
                self._keep(spec, outcome)
            elif isinstance(outcome, _RefusedError):
                self._keep(spec, _RefusedError(*outcome.args))  # one that is never raised, so that it keeps no frames
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def _keep(self, spec: GrammarSpec, outcome: CompiledGrammar | _RefusedError) -> None:
        """Remember it; what was asked for longest ago makes room."""
        self._known[spec] = outcome
        self._cached_bytes += len(spec.source)
        while len(self._known) > self._limits.cached_grammars or self._cached_bytes > self._limits.cached_bytes:
            self._drop(next(iter(self._known)))

    def _drop(self, spec: GrammarSpec) -> None:
        del self._known[spec]
        self._cached_bytes -= len(spec.source)

    def _compile(self, spec: GrammarSpec) -> CompiledGrammar:
        vocabulary = self._load_vocabulary()
        grammar = self._tried_calls(spec) if spec.kind == "tool_calls" else self._tried(spec)
        start, complaint = compile_grammar(vocabulary, grammar, self._limits.trial)
        if complaint:
            raise _unusable(spec, complaint)
        return CompiledGrammar(start, frozenset(self._eos_token_ids), -(-self._vocab_size // 32))

    def _tried(self, spec: GrammarSpec) -> str:
        """The grammar as llguidance takes it, which a child process has compiled."""
        complaint = _known_complaint(spec)
        if complaint:
            raise _unusable(spec, complaint)
        try:
            grammar = to_llguidance(spec)
        except (ValueError, RecursionError) as error:
            raise _RefusedError(f"has {_name(spec)} that is not valid: {one_line(str(error))}") from None
        complaint = self._complaint(grammar)
        if complaint:
            raise _unusable(spec, complaint)
        return grammar

    def _tried_calls(self, spec: GrammarSpec) -> str:
        """As `_tried`, without those schemas that can neither be followed nor must be."""
        try:
            rules, arguments = read_tool_calls(spec.source)
            source, complaint = usable_lark(rules, arguments, self._any_complaint, seconds=self._limits.trial.seconds)
        except (ValueError, RecursionError) as error:
            raise _RefusedError(f"has {_name(spec)} that is not valid: {one_line(str(error))}") from None
        if complaint:
            raise _RefusedError(f"cannot be followed: {one_line(complaint)}")
        return _lark(source)

    def _any_complaint(self, spec: GrammarSpec) -> str:
        """What is wrong with a grammar, whoever says so; "" for nothing."""
        try:
            return self._complaint(to_llguidance(spec))
        except (ValueError, RecursionError) as error:
            return str(error)

    def _complaint(self, grammar: str) -> str:
        """What is wrong with a grammar, as a child process finds; "" for nothing."""
        trial = self._trials.get()
        try:
            return trial.complaint(grammar)
        finally:
            self._trials.put(trial)

    def _load_vocabulary(self) -> LLTokenizer:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                if not self._eos_token_ids:
                    raise _RefusedError("asks for a grammar; this model has no end-of-text token to end its text with")
                if importlib.util.find_spec("llguidance") is None:
                    raise _RefusedError("asks for a grammar; that needs llguidance, which is not installed here")
                tokens = ModelTokens(self._tokenizer, self._vocab_size, self._eos_token_ids)
                self._vocabulary = tokens.load()
                for _ in range(self._limits.num_trials):
                    self._trials.put(GrammarTrial(tokens, self._limits.trial))
            return self._vocabulary


def to_llguidance(spec: GrammarSpec) -> str:
    """The grammar as llguidance takes it, not compiled.

    Raises:
        ValueError: the source is not of its kind, or there is no such kind.
    """
    from llguidance import LLMatcher

    if spec.kind == "json_schema":
        # True and false are schemas too; {} is true in the form that can carry options.
        schema = "{}" if spec.source.strip() == "true" else spec.source
        return LLMatcher.grammar_from_json_schema(schema, defaults=JSON_OPTIONS)
    if spec.kind == "json_object":
        return LLMatcher.grammar_from_json_schema('{"type": "object"}', defaults=JSON_OPTIONS)
    if spec.kind == "regex":
        return LLMatcher.grammar_from_regex(spec.source)
    if spec.kind == "choice":
        return _lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, _choices(spec.source))))
    if spec.kind == "lark":
        if _TEMPERATURE.search(spec.source):
            raise ValueError("a rule sets a temperature, which is not supported; the request's own applies")
        return _lark(spec.source)
    raise ValueError(f"its kind is {spec.kind!r}; it must be one of {', '.join(GRAMMAR_KINDS)}")


def _lark(source: str) -> str:
    # llguidance would take a text that starts with "{" for a list of grammars with settings of its own.
    return json.dumps({"grammars": [{"lark_grammar": source}]})


def _choices(source: str) -> list[str]:
    choices = json.loads(source)
    if not isinstance(choices, list) or not choices:
        raise ValueError("it must be a list of at least one text")
    for choice in choices:
        if not isinstance(choice, str) or not choice:
            raise ValueError(f"it has {choice!r}; each choice must be a text of at least one character")
    return choices


def _known_complaint(spec: GrammarSpec) -> str:
    """What llguidance would not say of a source; "" for nothing."""
    if spec.kind == "json_schema":
        return schema_complaint(spec.source)
    return lark_complaint(spec.source) if spec.kind == "lark" else ""


def _unusable(spec: GrammarSpec, complaint: str) -> _RefusedError:
    return _RefusedError(f"has {_name(spec)} that cannot be used: {one_line(complaint)}")


def _name(spec: GrammarSpec) -> str:
    return f"a {GRAMMAR_KINDS.get(spec.kind, 'grammar')}"
