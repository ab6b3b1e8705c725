"""What a request says of tools, checked; and what it makes of it with one template or another."""

from __future__ import annotations

from typing import Any

import pytest

from pageframe.api.tool_parsers import HermesParser, Llama3Parser, MistralParser
from pageframe.api.tools import ToolChoice, check_tool_choice, check_tools, find_style, plan_tools
from pageframe.runtime.chat_template import ChatTemplate
from pageframe.runtime.errors import InvalidRequestError

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
HERMES = ChatTemplate(
    '{{ tools | tojson }}<tool_call>\n{\\"name\\": <function-name>, \\"arguments\\": {}}\n</tool_call>'
)
LLAMA3 = ChatTemplate('{{ tools }} Respond in the format {"name": function name, "parameters": dictionary of them}.')
LLAMA3_SINGLE = ChatTemplate(
    '{{ tools }} {"name": function name, "parameters": x}'
    '{{ raise_exception("This model only supports single tool-calls at once!") if false }}'
)
MISTRAL = ChatTemplate("[AVAILABLE_TOOLS]{{ tools }}[/AVAILABLE_TOOLS]{{ '[TOOL_CALLS] [' }}")
MISTRAL_ARGS = ChatTemplate("{{ tools }}{{ '[TOOL_CALLS]' }}{{ '[CALL_ID]' }}{{ '[ARGS]' }}")
QWEN_CODER = ChatTemplate("{{ tools }}<tool_call>\n<function=example>\n</function>\n</tool_call>")


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "weather", **function}}


def test_a_definition_reaches_the_template_as_it_was_given() -> None:
    given = tool(parameters=PARAMETERS, description="Weather", strict=True)
    [checked] = check_tools([given])
    assert (checked.name, checked.parameters, checked.strict) == ("weather", PARAMETERS, True)
    # strict speaks to the server; no model was trained on it.
    expected = {"name": "weather", "parameters": PARAMETERS, "description": "Weather"}
    assert checked.definition == {"type": "function", "function": expected}
    assert list(checked.definition["function"]) == list(expected)


def test_what_is_left_out_or_null_is_nothing() -> None:
    [bare] = check_tools([tool(description=None, strict=None)])
    assert not bare.strict
    assert bare.parameters == {"type": "object", "properties": {}, "additionalProperties": False}
    assert bare.definition["function"] == {"name": "weather", "parameters": bare.parameters}
    assert check_tools(None) == check_tools([]) == ()
    assert check_tool_choice(None) is None


@pytest.mark.parametrize(
    ("value", "message", "param"),
    [
        ({}, "tools is an object; it must be a list", "tools"),
        ([tool()] * 129, "tools has 129 tools; at most 128", "tools"),
        ([1], "tools[0] is 1; it must be an object", "tools[0]"),
        ([{"type": "custom"}], 'tools[0].type is "custom"; it must be "function"', "tools[0].type"),
        ([{"function": {"name": "f"}}], "tools[0].type is null", "tools[0].type"),
        ([{"type": "function"}], "tools[0].function is null; it must be an object", "tools[0].function"),
        ([{**tool(), "cache": 1}], "tools[0].cache is not a known field", "tools[0].cache"),
        ([tool(returns={})], "tools[0].function.returns is not a known field", "tools[0].function.returns"),
        ([tool(name=None)], "tools[0].function.name is null", "tools[0].function.name"),
        ([tool(name="a b")], 'name is "a b"; it must be a string of 1 to 64 letters', "tools[0].function.name"),
        ([tool(name="x" * 65)], "(65 characters)", "tools[0].function.name"),
        ([tool(name="a\n")], "must be a string of 1 to 64 letters", "tools[0].function.name"),
        ([tool(), tool(name="b"), tool()], "must differ from the names before it", "tools[2].function.name"),
        ([tool(description=5)], "description is 5; it must be a string", "tools[0].function.description"),
        ([tool(strict=1)], "strict is 1; it must be true or false", "tools[0].function.strict"),
        ([tool(parameters=[])], "parameters is a list of 0; it must be a JSON schema", "tools[0].function.parameters"),
        ([tool(parameters={"type": "string"})], 'must be "object"', "tools[0].function.parameters.type"),
        ([tool(parameters={"properties": []})], "must be an object", "tools[0].function.parameters.properties"),
    ],
)  # fmt: skip
def test_wrong_definitions(value: object, message: str, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_tools(value)
    assert message in caught.value.message
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("none", ToolChoice("none")),
        ("auto", ToolChoice("auto")),
        ("required", ToolChoice("required")),
        ({"type": "function", "function": {"name": "f"}}, ToolChoice("required", "f")),
    ],
)
def test_choices(value: object, expected: ToolChoice) -> None:
    assert check_tool_choice(value) == expected


@pytest.mark.parametrize(
    ("value", "message", "param"),
    [
        ("any", 'tool_choice is "any"; it must be "none", "auto", "required" or', "tool_choice"),
        (True, "tool_choice is true", "tool_choice"),
        ({"type": "allowed_tools"}, 'tool_choice.type is "allowed_tools"', "tool_choice.type"),
        ({"type": "function", "name": "f"}, "tool_choice.name is not a known field", "tool_choice.name"),
        ({"type": "function"}, "tool_choice.function is null", "tool_choice.function"),
        ({"type": "function", "function": {}}, "tool_choice.function.name is null", "tool_choice.function.name"),
        ({"type": "function", "function": {"name": "f", "x": 1}}, "function.x is not", "tool_choice.function.x"),
    ],
)  # fmt: skip
def test_wrong_choices(value: object, message: str, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_tool_choice(value)
    assert message in caught.value.message
    assert caught.value.param == param


TOOLS = check_tools([tool(parameters=PARAMETERS), tool(name="time")])


def test_what_a_request_does_with_tools() -> None:
    use = plan_tools(TOOLS, None, None, HERMES)
    assert use is not None
    assert use.choice == ToolChoice("auto")
    assert use.parallel
    assert [definition["function"]["name"] for definition in use.definitions] == ["weather", "time"]
    delta = use.parser().push('<tool_call>{"name": "time"}', final=True)
    assert delta.tool_calls[0]["function"]["name"] == "time"


def test_a_named_tool_is_the_only_one_that_is_called_but_all_are_shown() -> None:
    use = plan_tools(TOOLS, ToolChoice("required", "weather"), False, HERMES)
    assert use is not None
    assert not use.parallel
    assert len(use.definitions) == 2
    assert [one.name for one in use.callable_tools] == ["weather"]
    assert use.parser().push('<tool_call>{"name": "time"}', final=True).tool_calls == []


def test_no_tools_or_none_to_be_called() -> None:
    assert plan_tools((), None, None, QWEN_CODER) is None
    assert plan_tools((), ToolChoice("auto"), True, QWEN_CODER) is None
    assert plan_tools((), ToolChoice("none"), True, QWEN_CODER) is None
    assert plan_tools(TOOLS, ToolChoice("none"), None, QWEN_CODER) is None


def test_a_template_that_takes_one_call_gets_no_second() -> None:
    several, single = (plan_tools(TOOLS, None, True, template) for template in (LLAMA3, LLAMA3_SINGLE))
    assert several is not None
    assert single is not None
    assert (several.parallel, single.parallel) == (True, False)


@pytest.mark.parametrize(
    ("tools", "choice", "template", "message", "param"),
    [
        ((), ToolChoice("required"), HERMES, "tool_choice asks for a call, but tools has no tool", "tool_choice"),
        ((), ToolChoice("required", "f"), HERMES, "tools has no tool", "tool_choice"),
        (TOOLS, ToolChoice("required", "f"), HERMES, 'tool_choice names "f", which is not in tools', "tool_choice"),
        (TOOLS, None, ChatTemplate("{{ messages }}"), "shows the model no tools", "tools"),
        (TOOLS, None, ChatTemplate("{% set tools = [] %}{{ tools }}"), "shows the model no tools", "tools"),
        (TOOLS, None, QWEN_CODER, "a form that is not supported", "tools"),
    ],
)
def test_what_cannot_be_done_is_refused(
    tools: Any, choice: ToolChoice | None, template: ChatTemplate, message: str, param: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        plan_tools(tools, choice, None, template)
    assert message in caught.value.message
    assert caught.value.param == param


def test_the_tool_template_is_the_one_that_shows_the_form() -> None:
    template = ChatTemplate("{{ messages }}", tool_source_text=HERMES.tool_source_text)
    use = plan_tools(TOOLS, None, None, template)
    assert use is not None
    assert use.style.parser is HermesParser


@pytest.mark.parametrize(
    ("template", "name", "parser"),
    [
        (HERMES, "hermes", HermesParser),
        (LLAMA3, "llama3", Llama3Parser),
        (MISTRAL, "mistral", MistralParser),
        (MISTRAL_ARGS, "mistral_args", MistralParser),
    ],
)
def test_forms_by_the_templates_text(template: ChatTemplate, name: str, parser: type) -> None:
    style = find_style(template.tool_source_text)
    assert style is not None
    assert (style.name, style.parser, style.has_call_id) == (name, parser, name == "mistral_args")


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n<function=name>\n<parameter=a>",  # Qwen3-Coder
        "<tool_call>{function-name}\n<arg_key>",  # GLM
        'within <tool_call></tool_call> XML tags\n<tool_calls>[{"name": <function-name-1>',  # Apriel
        '<|tool_calls_section_begin|>{"name": "parameters"}',
        "",
    ],
)
def test_other_forms_are_not_taken_for_one_of_these(text: str) -> None:
    assert find_style(text) is None


class SomeTokens:
    """[TOOL_CALLS] is special, [ARGS] is an ordinary token, [CALL_ID] is none."""

    def token_to_id(self, token: str) -> int | None:
        return {"[TOOL_CALLS]": 5, "[ARGS]": 32}.get(token)

    def is_special(self, token_id: int) -> bool:
        return token_id == 5


def test_special_tokens_that_mark_calls_are_shown() -> None:
    use = plan_tools(TOOLS, None, None, MISTRAL_ARGS)
    assert use is not None
    assert use.shown_ids(SomeTokens()) == {5}
