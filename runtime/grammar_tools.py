"""The grammar of tool calls: rules of how calls are written, and a schema for each tool's arguments.

A tool's schema is a stranger's, and one that cannot be followed must not hold up the others: which it is, is found
out here, and a schema of a tool that need not be strict gives way to any object. Knows nothing of how a model writes
its calls.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pageframe.runtime.grammar import GrammarSpec
from pageframe.runtime.grammar_checks import inexact_number

#: What is wrong with a grammar, "" for nothing.
Complaint = Callable[[GrammarSpec], str]
#: Where llguidance found a fault: the client has sent no Lark grammar, so there are no lines of one to look at.
_PLACE = re.compile(r"^at \d+\(\d+\): |^ *\d+ \|.*\n?|^ *\^ *\n?", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """The arguments of one tool.

    Args:
        rule: the name of their rule.
        tool: what the tool is called in an error, such as "tools[0].function (now)".
        schema: with llguidance's options in it.
        instead: the schema for where `schema` cannot be followed; None: then there is no grammar.
    """

    rule: str
    tool: str
    schema: dict[str, Any]
    instead: dict[str, Any] | None


def tool_calls_spec(rules: Sequence[str], arguments: Sequence[ToolArguments]) -> GrammarSpec:
    """The grammar of Lark rules that name the rules of `arguments`."""
    content = {"rules": list(rules), "arguments": [_fields(each) for each in arguments]}
    return GrammarSpec("tool_calls", json.dumps(content))


def _fields(each: ToolArguments) -> dict[str, Any]:
    """As dataclasses.asdict, which would walk through the schemas, however deep."""
    return {"rule": each.rule, "tool": each.tool, "schema": each.schema, "instead": each.instead}


def read_tool_calls(source: str) -> tuple[list[str], list[ToolArguments]]:
    """What `tool_calls_spec` made.

    Raises:
        ValueError: something else made it.
    """
    content = json.loads(source)
    try:
        return content["rules"], [ToolArguments(**each) for each in content["arguments"]]
    except (KeyError, TypeError):
        raise ValueError("it has no rules and arguments") from None


def usable_lark(
    rules: list[str], arguments: list[ToolArguments], complaint: Complaint, *, seconds: float
) -> tuple[str, str]:
    """The grammar as Lark, of schemas that can be followed, and what is wrong with it; "" for nothing.

    Args:
        complaint: tries a grammar; it may take seconds.
        seconds: so long schemas are tried alone, to find those that are no good. Of the rest each may be the one.
    """
    used = []
    for each in arguments:
        rounded = inexact_number(each.schema)
        if rounded and each.instead is None:
            return "", _of_tool(each, rounded)
        used.append(_instead(each) if rounded else each)
    grammar = _lark(rules, used)
    if not complaint(GrammarSpec("lark", grammar)):
        return grammar, ""
    deadline = time.monotonic() + seconds
    for index, each in enumerate(used):
        if time.monotonic() >= deadline:
            used[index:] = [rest if rest.instead is None else _instead(rest) for rest in used[index:]]
            break
        alone = complaint(GrammarSpec("json_schema", json.dumps(each.schema)))
        if alone and each.instead is None:
            return "", _of_tool(each, alone)
        if alone:
            used[index] = _instead(each)
    grammar = _lark(rules, used)
    wrong = _PLACE.sub("", complaint(GrammarSpec("lark", grammar))).strip()
    return grammar, wrong and f"the parameters of all functions cannot be used together: {wrong}"


def _instead(arguments: ToolArguments) -> ToolArguments:
    assert arguments.instead is not None
    return replace(arguments, schema=arguments.instead)


def _of_tool(arguments: ToolArguments, wrong: str) -> str:
    return f"{arguments.tool} has parameters that cannot be used: {wrong}"


def _lark(rules: list[str], arguments: list[ToolArguments]) -> str:
    return "\n".join([*rules, *(f"{each.rule}: %json {json.dumps(each.schema)}" for each in arguments)])
