"""The environment that models' chat templates run in: Hugging Face's settings and names, and bounds on time and size.

A template is code from a model's file. It runs in Jinja's sandbox; each round of a loop and each call of a macro looks
at the time the rendering has taken, and no operator makes more than a bounded text, list or number. What one filter or
one method makes of its arguments is not looked at. Knows no messages and no models.
"""

from __future__ import annotations

import datetime
import json
import time
from contextvars import ContextVar
from typing import Any, NoReturn, TypeVar

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_OUTPUT_CHARS = 4 * 2**20
#: Of the rendering thread's own processor time, so a busy machine fails no template.
MAX_SECONDS = 5.0
MAX_INT_BITS = 4096
_ROUNDS_BETWEEN_LOOKS = 64
_SPEND, _CONCAT = "look at the budget", "join within bounds"

NodeT = TypeVar("NodeT", nodes.For, nodes.Macro)


class TemplateLimitError(Exception):
    """A rendering went past a bound; the text is for the one who sent the request."""


class Budget:
    """The processor time that one rendering may take, from now on."""

    def __init__(self) -> None:
        self._end = time.thread_time() + MAX_SECONDS
        self._num_rounds = 0

    def spend(self) -> None:
        """One round of a loop or call of a macro.

        Raises:
            TemplateLimitError: the time is over.
        """
        self._num_rounds += 1
        if self._num_rounds % _ROUNDS_BETWEEN_LOOKS == 0 and time.thread_time() > self._end:
            raise TemplateLimitError(f"took more than {MAX_SECONDS:g} seconds")


#: Set around each rendering.
budget: ContextVar[Budget] = ContextVar("budget")


def compile_template(source_text: str) -> tuple[jinja2.Template, bool]:
    """The template, and whether it reads `tools`. Raises whatever Jinja and Python find wrong with it."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _GenerationBlock]
    )
    environment.filters |= {"tojson": _to_json, _SPEND: _spend, _CONCAT: _concat}
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    reads_tools = "tools" in meta.find_undeclared_variables(environment.parse(source_text))
    tree = environment.parse(source_text)
    _Bounding().visit(tree)
    tree.set_environment(environment)
    return environment.from_string(tree), reads_tools


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _check_product(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_size(left.bit_length() * abs(right), MAX_INT_BITS, "a number of {} bits")
        result = super().call_binop(context, operator, left, right)
        if operator == "+" and isinstance(result, (str, list, tuple)):
            _check_size(len(result), MAX_OUTPUT_CHARS, "a text or list of {} items")
        return result


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_size(left.bit_length() + right.bit_length(), MAX_INT_BITS, "a number of {} bits")
    for items, count in ((left, right), (right, left)):
        if isinstance(items, (str, list, tuple)) and isinstance(count, int):
            _check_size(len(items) * count, MAX_OUTPUT_CHARS, "a text or list of {} items")


def _check_size(size: int, limit: int, what: str) -> None:
    if size > limit:
        raise TemplateLimitError(f"would make {what.format(size)}; at most {limit} are allowed")


class _Bounding(NodeTransformer):
    """Puts a look at the budget into each loop and macro, and a bound on what `~` makes.

    Both are calls of filters whose names no template can write and no request can hide.
    """

    def visit_For(self, node: nodes.For) -> nodes.For:
        return self._with_look(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        return self._with_look(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        first, *others = node.nodes
        return nodes.Filter(first, _CONCAT, others, [], None, None, lineno=node.lineno)

    def _with_look(self, node: NodeT) -> NodeT:
        self.generic_visit(node)
        look = nodes.Filter(nodes.Const(None), _SPEND, [], [], None, None, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(look, lineno=node.lineno))
        return node


@jinja2.pass_context  # else Jinja would call it once, when it compiles
def _spend(_context: Context, _value: None) -> None:
    budget.get().spend()


def _concat(*parts: Any) -> str:
    texts = [str(part) for part in parts]
    _check_size(sum(map(len, texts)), MAX_OUTPUT_CHARS, "a text or list of {} items")
    return "".join(texts)


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; here it is just its body.

    As in Hugging Face's own, what the body sets is not set after it.
    """

    tags = {"generation"}  # noqa: RUF012 - jinja2's own interface

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        return nodes.Scope(list(parser.parse_statements(("name:endgeneration",), drop_needle=True)), lineno=lineno)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """json.dumps; Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)
