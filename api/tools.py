"""Tool definitions and tool_choice, checked, and what a request makes of them: names for the template, a parser, a
grammar.

Which marks a model's calls have is read from its template's text. Knows nothing of engines or of streams.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from pageframe.api.checks import refuse_unknown, wrong
from pageframe.api.errors import shorten
from pageframe.api.tool_parsers import HermesParser, Llama3Parser, MistralParser, ToolParser
from pageframe.runtime.chat_template import ChatTemplate
from pageframe.runtime.errors import InvalidRequestError

MAX_TOOLS = 128
TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_TOOL_FIELDS = ("type", "function")
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_MODES = ("none", "auto", "required")
_NAMED_RULE = 'must be "none", "auto", "required" or {"type": "function", "function": {"name": "…"}}'


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Args:
        parameters: the JSON schema of its arguments.
        strict: its arguments must follow the schema also where nothing else asks for a grammar.
        definition: OpenAI's object as a template reads it, the keys in the client's order.
    """

    name: str
    parameters: dict[str, Any]
    strict: bool
    definition: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`mode` is "none", "auto" or "required"; with a `name`, which makes it "required", that tool is the one."""

    mode: str
    name: str | None = None


@dataclass(frozen=True, slots=True)
class ToolStyle:
    """How a family of models writes its calls.

    Args:
        name: "hermes", "llama3", "mistral", or "mistral_args" where a name stands in front of the arguments.
        parallel: whether the template takes several calls in one message.
        has_call_id: the model writes an id between name and arguments.
    """

    name: str
    parser: type[ToolParser]
    parallel: bool = True
    has_call_id: bool = False


class SpecialTokens(Protocol):
    """What is needed of a tokenizer."""

    def token_to_id(self, token: str) -> int | None: ...

    def is_special(self, token_id: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What one request does with tools.

    Args:
        tools: those that the model is shown.
        choice: "auto" or "required", of all or of one.
        parallel: whether an answer may have several calls.
    """

    tools: tuple[Tool, ...]
    choice: ToolChoice
    parallel: bool
    style: ToolStyle

    @property
    def definitions(self) -> list[dict[str, Any]]:
        """For the template, under the name `tools`."""
        return [tool.definition for tool in self.tools]

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that an answer may call."""
        return tuple(tool for tool in self.tools if self.choice.name in (None, tool.name))

    def parser(self, make_id: Callable[[], str] | None = None) -> ToolParser:
        """A parser for one choice."""
        names = [tool.name for tool in self.callable_tools]
        return self.style.parser(names, parallel=self.parallel, make_id=make_id)

    def shown_ids(self, tokenizer: SpecialTokens) -> frozenset[int]:
        """Special tokens that mark calls: the text must have them, though it has no other special tokens."""
        ids = map(tokenizer.token_to_id, self.style.parser.markers)
        return frozenset(token_id for token_id in ids if token_id is not None and tokenizer.is_special(token_id))


def find_style(template_text: str) -> ToolStyle | None:
    """How the model with this template writes its calls; None: in no way that is known here."""
    if "[TOOL_CALLS]" in template_text:
        name = "mistral_args" if "[ARGS]" in template_text else "mistral"
        return ToolStyle(name, MistralParser, has_call_id="[CALL_ID]" in template_text)
    if re.search(r'<tool_call>[^<]{0,80}\{\\*"name', template_text):
        return ToolStyle("hermes", HermesParser)
    if '{"name": function name, "parameters": ' in template_text:
        return ToolStyle("llama3", Llama3Parser, parallel="single tool-calls at once" not in template_text)
    return None


def plan_tools(
    tools: tuple[Tool, ...], choice: ToolChoice | None, parallel: bool | None, template: ChatTemplate
) -> ToolUse | None:
    """What the request does with tools; None where there are none or none may be called.

    With tool_choice "none" the model is shown no tools, so that it calls none.

    Raises:
        InvalidRequestError: tool_choice asks for a tool that there is not, or the model's template shows no tools or
            asks for calls of a form that is not known here.
    """
    if choice is None:
        choice = ToolChoice("auto")
    if not tools:
        if choice.mode == "required":
            raise InvalidRequestError("tool_choice asks for a call, but tools has no tool", param="tool_choice")
        return None
    names = [tool.name for tool in tools]
    if choice.name is not None and choice.name not in names:
        raise InvalidRequestError(
            f"tool_choice names {shorten(choice.name)}, which is not in tools", param="tool_choice"
        )
    if choice.mode == "none":
        return None
    if not template.reads_tools:
        raise InvalidRequestError(
            "tools are given, but this model's chat template shows the model no tools", param="tools"
        )
    style = find_style(template.tool_source_text)
    if style is None:
        raise InvalidRequestError(
            "tools are given, but this model writes its calls in a form that is not supported; supported are those of "
            "Hermes and Qwen, Llama 3 (JSON) and Mistral",
            param="tools",
        )
    return ToolUse(tools, choice, parallel is not False and style.parallel, style)


def check_tools(value: object) -> tuple[Tool, ...]:
    """The request's `tools`; null and an empty list are no tools.

    Raises:
        InvalidRequestError: it is not a list of at most 128 definitions of functions with different names.
    """
    if value is None:
        return ()
    if not isinstance(value, list):
        raise wrong("tools", value, "must be a list of tools")
    if len(value) > MAX_TOOLS:
        raise InvalidRequestError(f"tools has {len(value)} tools; at most {MAX_TOOLS} are allowed", param="tools")
    tools = tuple(_check_tool(tool, f"tools[{index}]") for index, tool in enumerate(value))
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in seen:
            path = f"tools[{index}].function.name"
            raise wrong(path, tool.name, "must differ from the names before it")
        seen.add(tool.name)
    return tools


def check_tool_choice(value: object) -> ToolChoice | None:
    """The request's `tool_choice`; None where it is null.

    Raises:
        InvalidRequestError: it is none of its values.
    """
    if value is None:
        return None
    if isinstance(value, str) and value in _MODES:
        return ToolChoice(value)
    if not isinstance(value, dict):
        raise wrong("tool_choice", value, _NAMED_RULE)
    if value.get("type") != "function":
        raise wrong("tool_choice.type", value.get("type"), 'must be "function"')
    refuse_unknown(value, _TOOL_FIELDS, "tool_choice")
    function = value.get("function")
    if not isinstance(function, dict):
        raise wrong("tool_choice.function", function, "must be an object with name")
    refuse_unknown(function, ("name",), "tool_choice.function")
    name = function.get("name")
    if not isinstance(name, str):
        raise wrong("tool_choice.function.name", name, "must be a string")
    return ToolChoice("required", name)


def _check_tool(tool: object, path: str) -> Tool:
    if not isinstance(tool, dict):
        raise wrong(path, tool, 'must be an object such as {"type": "function", "function": {"name": "…"}}')
    if tool.get("type") != "function":
        raise wrong(f"{path}.type", tool.get("type"), 'must be "function"; tools of other types are not supported')
    refuse_unknown(tool, _TOOL_FIELDS, path)
    path = f"{path}.function"
    function = tool.get("function")
    if not isinstance(function, dict):
        raise wrong(path, function, "must be an object with name, description and parameters")
    refuse_unknown(function, _FUNCTION_FIELDS, path)
    name = function.get("name")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise wrong(f"{path}.name", name, "must be a string of 1 to 64 letters, digits, underscores and dashes")
    for field, kind, rule in (("description", str, "a string"), ("strict", bool, "true or false")):
        if not isinstance(function.get(field), (kind, type(None))):
            raise wrong(f"{path}.{field}", function[field], f"must be {rule}")
    shown = {field: value for field, value in function.items() if field != "strict" and value is not None}
    # A function without parameters takes none; templates read the object.
    shown.setdefault("parameters", _NO_PARAMETERS)
    _check_parameters(shown["parameters"], f"{path}.parameters")
    definition = {"type": "function", "function": shown}
    return Tool(name, shown["parameters"], function.get("strict") is True, definition)


def _check_parameters(schema: object, path: str) -> None:
    if not isinstance(schema, dict):
        raise wrong(path, schema, "must be a JSON schema, an object")
    if schema.get("type", "object") != "object":
        raise wrong(f"{path}.type", schema["type"], 'must be "object", since arguments are one')
    if not isinstance(schema.get("properties", {}), dict):
        raise wrong(f"{path}.properties", schema["properties"], "must be an object")
