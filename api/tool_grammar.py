"""The grammar of an answer that calls tools, in the form its model was taught: for tool_choice "required" or a name,
and for `strict` tools where the model is free to call or not.

Writes llguidance's variant of Lark (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md). Knows nothing
of how a grammar is compiled or followed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from pageframe.api.tools import SpecialTokens, Tool, ToolStyle, ToolUse
from pageframe.runtime.grammar import GrammarSpec

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
    llguidance can enforce is ignored for a tool that is not strict, and refused at compilation for one that is.
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
    for index, tool in enumerate(tools):
        name = form.name.replace("NAME", tool.name)
        rules.append(f"tool_{index}: {name} arguments_{index} {form.end}")
        rules.append(f"arguments_{index}: %json {_schema(tool, is_enforced=tool.strict or not is_free)}")
    return GrammarSpec("lark", "\n".join(rules))


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


def _schema(tool: Tool, *, is_enforced: bool) -> str:
    schema = {"type": "object", **tool.parameters} if is_enforced else {"type": "object"}
    spacing = _SPACING if is_enforced else {"whitespace_flexible": True}
    return json.dumps({**schema, "x-guidance": {**spacing, "lenient": not tool.strict}})


def _quote(text: str) -> str:
    return json.dumps(text)
