"""The grammar of an answer that calls tools, in the form its model was taught: for tool_choice "required" or a name,
and for `strict` tools where the model is free to call or not.

Writes llguidance's variant of Lark (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md). Knows nothing
of how a grammar is compiled or followed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pageframe.api.tools import SpecialTokens, Tool, ToolStyle, ToolUse
from pageframe.runtime.errors import InvalidRequestError
from pageframe.runtime.grammar import GrammarSpec
from pageframe.runtime.grammar_tools import ToolArguments, tool_calls_spec

#: As Python's json.dumps writes, which is how templates show earlier calls.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class _Form:
    """A style's calls as Lark expressions; "" for nothing.

    Args:
        mark: begins them; a special token as Lark names it, or a text in quotes.
        opening, between, closing: in front of the first call behind the mark, between calls, behind the last.
        name: a call's name as far as its arguments, NAME in the place of the name itself.
        end: what follows its arguments.
    """

    mark: str
    opening: str
    between: str
    closing: str
    name: str
    end: str


def tool_grammar(use: ToolUse, tokenizer: SpecialTokens) -> GrammarSpec | None:
    """The grammar that the request's answers follow; None where any text will do.

    A call's name is one of the tools', and its arguments follow that tool's schema. What a schema says beyond what
    llguidance can enforce is ignored for a tool that is not strict, all of the schema where it cannot be compiled
    otherwise; for one that is strict it is refused at compilation.

    Raises:
        InvalidRequestError: a schema is nested too deep.
    """
    is_free = use.choice.mode == "auto"
    if is_free and not any(tool.strict for tool in use.tools):
        return None
    form = _form(use.style, tokenizer)
    calls = f"{form.opening} tool"
    if use.parallel:
        calls += f" ({form.between} tool)*"
    calls += f" {form.closing}"
    tools = use.callable_tools
    rules = _free_start(form, calls) if is_free else [f"start: {form.mark} {calls}"]
    rules.append("tool: " + " | ".join(f"tool_{index}" for index in range(len(tools))))
    arguments = []
    for index, tool in enumerate(tools):
        name = form.name.replace("NAME", tool.name)
        rules.append(f"tool_{index}: {name} arguments_{index} {form.end}")
        path = f"tools[{use.tools.index(tool)}].function ({tool.name})"
        arguments.append(_arguments(f"arguments_{index}", path, tool, is_enforced=tool.strict or not is_free))
    try:
        return tool_calls_spec(rules, arguments)
    except RecursionError:
        raise InvalidRequestError("tools has parameters that are nested too deep", param="tools") from None


def _free_start(form: _Form, calls: str) -> list[str]:
    """Any text, which calls may end. What follows a mark must be calls."""
    text = "TEXT: /(?s:.*)/"
    if not form.mark:
        return [f"start: {calls} | OTHER", r"OTHER: /[ \t\n\r]*[^ \t\n\r{](?s:.*)/"]
    if form.mark.startswith("<"):
        return [f"start: TEXT | TEXT {form.mark} {calls}", text]
    return [f"start: TEXT | head {calls}", f"head[lazy]: TEXT {form.mark}", text]


def _form(style: ToolStyle, tokenizer: SpecialTokens) -> _Form:
    marks = [_mark(marker, tokenizer) for marker in style.parser.markers]
    object_start = f'{{"name": "NAME", "{"parameters" if style.name == "llama3" else "arguments"}": '
    if style.name == "hermes":
        opening, closing = marks
        end = rf'"\n" {closing}'
        return _Form(opening, r'"\n"', rf'{end} "\n" {opening} "\n"', end, _quote(object_start), '"}"')
    if style.name == "llama3":
        return _Form("", "", '"; "', "", _quote(object_start), '"}"')
    opening, call_id, arguments = marks
    if style.name == "mistral":
        # SentencePiece puts a space in front of a text, and templates may have written one of their own.
        return _Form(opening, '(" " " "?)? "["', '", "', '"]"', _quote(object_start), '"}"')
    written_id = f"{call_id} /[a-zA-Z0-9]{{9}}/ " if style.has_call_id else ""
    return _Form(opening, "", opening, "", f'"NAME" {written_id}{arguments}', "")


def _mark(marker: str, tokenizer: SpecialTokens) -> str:
    """A special token has no text that a grammar could match; it is named by its id."""
    token_id = tokenizer.token_to_id(marker)
    return _quote(marker) if token_id is None or not tokenizer.is_special(token_id) else f"<[{token_id}]>"


def _arguments(rule: str, path: str, tool: Tool, *, is_enforced: bool) -> ToolArguments:
    any_object = {"type": "object", "x-guidance": {"whitespace_flexible": True, "lenient": True}}
    if not is_enforced:
        return ToolArguments(rule, path, any_object, any_object)
    options: dict[str, Any] = {**_SPACING, "lenient": not tool.strict}
    schema = {"type": "object", **tool.parameters, "x-guidance": options}
    return ToolArguments(rule, path, schema, None if tool.strict else any_object)


def _quote(text: str) -> str:
    return json.dumps(text)
