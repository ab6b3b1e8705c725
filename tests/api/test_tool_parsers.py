"""Tool calls in the text of three families of models: what is a call, what is content, in every cut of the text."""

from __future__ import annotations

import itertools
import json
import sys

import pytest

from pageframe.api.tool_parsers import HermesParser, Llama3Parser, MistralParser, ToolParser, join_tool_calls

from .tool_cases import PARSERS, Message, cut, ids, parse

F, G = ("f", '{"a": 1}'), ("g", "{}")
CALL_F, CALL_G = '{"name": "f", "arguments": {"a": 1}}', '{"name": "g", "arguments": {}}'

HERMES: list[tuple[str, str, Message]] = [
    ("one call", f"<tool_call>\n{CALL_F}\n</tool_call>", ("", [F], "tool_calls")),
    ("text in front", f"Sure.\n\n<tool_call>\n{CALL_F}\n</tool_call>", ("Sure.", [F], "tool_calls")),
    ("parallel", f"<tool_call>\n{CALL_F}\n</tool_call>\n<tool_call>\n{CALL_G}\n</tool_call>",
     ("", [F, G], "tool_calls")),
    ("side by side", f"<tool_call>{CALL_F}</tool_call><tool_call>{CALL_G}</tool_call>\n", ("", [F, G], "tool_calls")),
    ("text behind", f"<tool_call>{CALL_F}</tool_call>\nThere.\n", ("There.\n", [F], "tool_calls")),
    ("text around", f"A.\n<tool_call>{CALL_F}</tool_call>\nB.", ("A.\nB.", [F], "tool_calls")),
    ("white space only", "\n \n", ("\n \n", [], "stop")),
    ("no call", " a <tool> <tool_cal l> < ", (" a <tool> <tool_cal l> < ", [], "stop")),
    ("ends in a mark's beginning", "a \n<tool_c", ("a \n<tool_c", [], "stop")),
    ("closing mark missing", f"<tool_call>{CALL_F}", ("", [F], "tool_calls")),
    ("closing mark missing, another call", f"<tool_call>{CALL_F}\n<tool_call>{CALL_G}", ("", [F, G], "tool_calls")),
    ("closing mark cut", f"<tool_call>{CALL_F}\n</tool_", ("", [F], "tool_calls")),
    ("brace missing", f"<tool_call>{CALL_F[:-1]}\n</tool_call>", ("", [F], "tool_calls")),
    ("brace too many", f"<tool_call>{CALL_F}}}\n</tool_call>", ("", [F], "tool_calls")),
    ("more keys", f'<tool_call>{CALL_F[:-1]}, "id": [7]}}</tool_call>', ("", [F], "tool_calls")),
    ("arguments first", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', ("", [F], "tool_calls")),
    ("no arguments", '<tool_call>{"name": "g"}</tool_call>', ("", [G], "tool_calls")),
    ("line end in a string", '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>',
     ("", [("f", '{"a": "x\\ny"}')], "tool_calls")),
    ("marks in a string", '<tool_call>{"name": "f", "arguments": {"a": "</tool_call> {"}}</tool_call>',
     ("", [("f", '{"a": "</tool_call> {"}')], "tool_calls")),
    ("another tool's name", 'Hm. <tool_call>\n{"name": "h", "arguments": {}}\n</tool_call> ',
     ('Hm. <tool_call>\n{"name": "h", "arguments": {}}\n</tool_call> ', [], "stop")),
    ("no object", "<tool_call>\nf(1)\n</tool_call>", ("<tool_call>\nf(1)\n</tool_call>", [], "stop")),
    ("a mark twice", f"<tool_call>\n<tool_call>{CALL_F}</tool_call>", ("<tool_call>", [F], "tool_calls")),
    ("cut in the name", 'a\n<tool_call>{"name": "f', ('a\n<tool_call>{"name": "f', [], "stop")),
    ("cut in front of the arguments", '<tool_call>{"name": "f", "arguments":',
     ('<tool_call>{"name": "f", "arguments":', [], "stop")),
    ("cut in the arguments", '<tool_call>{"name": "f", "arguments": {"a": 1', ("", [("f", '{"a": 1')], "stop")),
    ("cut in the second call", f'<tool_call>{CALL_G}</tool_call><tool_call>{{"name": "f", "arguments": {{"a',
     ("", [G, ("f", '{"a')], "stop")),
    ("broken arguments", '<tool_call>{"name": "f", "arguments": {"a": None}}</tool_call>',
     ("None}}</tool_call>", [("f", '{"a": ')], "stop")),
    ("broken arguments, then a call",
     f'<tool_call>{{"name": "f", "arguments": {{"a" 1}}}}</tool_call>\n<tool_call>{CALL_G}</tool_call>',
     ("1}}</tool_call>", [("f", '{"a" '), G], "stop")),
    ("words behind the object", f"<tool_call>{CALL_F} ok</tool_call>", ("ok</tool_call>", [F], "tool_calls")),
    ("junk behind the arguments", '<tool_call>{"name": "g", "arguments": {}, oops}</tool_call>',
     (", oops}</tool_call>", [G], "tool_calls")),
    ("junk in front of the closing mark", '<tool_call>{"name": "g", "arguments": {}, "x"</tool_call>',
     (', "x"</tool_call>', [G], "tool_calls")),
    ("cut in a key behind the arguments", '<tool_call>{"name": "g", "arguments": {}, "x', (', "x', [G], "tool_calls")),
]  # fmt: skip

LLAMA_F, LLAMA_G = CALL_F.replace("arguments", "parameters"), CALL_G.replace("arguments", "parameters")
LLAMA3: list[tuple[str, str, Message]] = [
    ("one call", LLAMA_F, ("", [F], "tool_calls")),
    ("python tag", f"<|python_tag|>{LLAMA_F}", ("", [F], "tool_calls")),
    ("space around", f"\n\n{LLAMA_F}\n", ("", [F], "tool_calls")),
    ("several", f"{LLAMA_F}; {LLAMA_G}", ("", [F, G], "tool_calls")),
    ("several lines", f"{LLAMA_F}\n{LLAMA_G},\n<|python_tag|>{LLAMA_F}", ("", [F, G, F], "tool_calls")),
    ("brace missing", LLAMA_F[:-1], ("", [F], "tool_calls")),
    ("semicolon at the end", f"{LLAMA_F};", ("", [F], "tool_calls")),
    ("text behind", f"{LLAMA_F}; done {LLAMA_G}", (f"; done {LLAMA_G}", [F], "tool_calls")),
    ("text in front", f"I would call {LLAMA_F}.", (f"I would call {LLAMA_F}.", [], "stop")),
    ("semicolon in front", f"; {LLAMA_F}", (f"; {LLAMA_F}", [], "stop")),
    ("an answer in JSON", '{"answer": {"name": "f"}}\n', ('{"answer": {"name": "f"}}\n', [], "stop")),
    ("another name", '{"name": "Ann", "age": 3}', ('{"name": "Ann", "age": 3}', [], "stop")),
    ("a call behind another name", f'{{"name": "h"}} {LLAMA_F}', (f'{{"name": "h"}} {LLAMA_F}', [], "stop")),
    ("code behind the tag", "<|python_tag|>print(1)", ("<|python_tag|>print(1)", [], "stop")),
    ("half a tag", " <|pyth", (" <|pyth", [], "stop")),
    ("cut", '{"name": "f", "parameters": {"a', ("", [("f", '{"a')], "stop")),
    ("broken", f'{{"name": "f", "parameters": {{a}}}}; {LLAMA_G}', (f"a}}}}; {LLAMA_G}", [("f", "{")], "stop")),
    ("nothing", "", ("", [], "stop")),
]  # fmt: skip

MISTRAL: list[tuple[str, str, Message]] = [
    ("a list", f"[TOOL_CALLS] [{CALL_F}]", ("", [F], "tool_calls")),
    ("a longer list", f"[TOOL_CALLS][{CALL_F}, {CALL_G}]", ("", [F, G], "tool_calls")),
    ("with ids", f'[TOOL_CALLS][{CALL_F[:-1]}, "id": "abc123def"}}]', ("", [F], "tool_calls")),
    ("text around", f"Sure. [TOOL_CALLS] [{CALL_F}] Done.", ("Sure. Done.", [F], "tool_calls")),
    ("two lists", f"[TOOL_CALLS] [{CALL_F}] [TOOL_CALLS] [{CALL_G}]", ("", [F, G], "tool_calls")),
    ("list not closed", f"[TOOL_CALLS] [{CALL_F}", ("", [F], "tool_calls")),
    ("brace missing", f"[TOOL_CALLS] [{CALL_F[:-1]}]", ("", [F], "tool_calls")),
    ("empty list", "[TOOL_CALLS] []", ("[TOOL_CALLS] []", [], "stop")),
    ("empty list behind a call", f"[TOOL_CALLS][{CALL_F}][TOOL_CALLS] []", ("[TOOL_CALLS] []", [F], "tool_calls")),
    ("words in a list", f"[TOOL_CALLS][{CALL_F}, see]", (", see]", [F], "tool_calls")),
    ("another name in a list", '[TOOL_CALLS] [{"name": "h"}]', ('[TOOL_CALLS] [{"name": "h"}]', [], "stop")),
    ("name and arguments", '[TOOL_CALLS]f[ARGS]{"a": 1}', ("", [F], "tool_calls")),
    ("name, id and arguments", '[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{"a": 1}', ("", [F], "tool_calls")),
    ("bare name", '[TOOL_CALLS]f{"a": 1}', ("", [F], "tool_calls")),
    ("several names", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', ("", [F, G], "tool_calls")),
    ("text behind a name's call", '[TOOL_CALLS]f[ARGS]{"a": 1} x', ("x", [F], "tool_calls")),
    ("another name", '[TOOL_CALLS]h[ARGS]{"a": 1}', ('[TOOL_CALLS]h[ARGS]{"a": 1}', [], "stop")),
    ("no name", "[TOOL_CALLS]", ("[TOOL_CALLS]", [], "stop")),
    ("words for a name", "[TOOL_CALLS]oh no {}", ("[TOOL_CALLS]oh no {}", [], "stop")),
    ("a long name", "[TOOL_CALLS]" + "f" * 300 + "{}", ("[TOOL_CALLS]" + "f" * 300 + "{}", [], "stop")),
    ("words, then a call", "[TOOL_CALLS]oh [TOOL_CALLS]g[ARGS]{}", ("[TOOL_CALLS]oh", [G], "tool_calls")),
    ("cut in the name", "a [TOOL_CALLS]f[AR", ("a [TOOL_CALLS]f[AR", [], "stop")),
    ("cut in the arguments", '[TOOL_CALLS]f[ARGS]{"a', ("", [("f", '{"a')], "stop")),
    ("half a mark", "a [TOOL", ("a [TOOL", [], "stop")),
]  # fmt: skip

CASES = [
    pytest.param(kind, text, expected, id=f"{kind}: {name}")
    for kind, cases in (("hermes", HERMES), ("llama3", LLAMA3), ("mistral", MISTRAL))
    for name, text, expected in cases
]


@pytest.mark.parametrize(("kind", "text", "expected"), CASES)
def test_a_message_in_every_cut(kind: str, text: str, expected: Message) -> None:
    assert parse(kind, [text]) == expected
    assert parse(kind, [text, ""]) == expected
    assert parse(kind, [*text, ""]) == expected, "a character at a time"
    for position in range(len(text)):
        assert parse(kind, cut(text, [position])) == expected, position


@pytest.mark.parametrize(("kind", "text", "expected"), CASES)
def test_a_complete_calls_arguments_are_json(kind: str, text: str, expected: Message) -> None:
    if expected[2] == "tool_calls":
        for _, arguments in parse(kind, [text])[1]:
            assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("hermes", f"<tool_call>{CALL_F}</tool_call>\n", ("", [F], "tool_calls")),
        ("hermes", f"<tool_call>{CALL_F}</tool_call>\n<tool_call>{CALL_G}</tool_call>",
         (f"<tool_call>{CALL_G}</tool_call>", [F], "tool_calls")),
        ("llama3", f"{LLAMA_F}; {LLAMA_G}", (f"; {LLAMA_G}", [F], "tool_calls")),
        ("mistral", f"[TOOL_CALLS] [{CALL_F}, {CALL_G}]", (f", {CALL_G}]", [F], "tool_calls")),
        ("mistral", "[TOOL_CALLS]g{} [TOOL_CALLS]g{}", ("[TOOL_CALLS]g{}", [G], "tool_calls")),
    ],
)  # fmt: skip
def test_where_one_call_is_allowed_the_rest_is_content(kind: str, text: str, expected: Message) -> None:
    for position in range(len(text) + 1):
        assert parse(kind, cut(text, [position]), parallel=False) == expected


@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize("is_complete", [True, False])
def test_the_length_is_the_reason_wherever_it_ran_out(reason: str, is_complete: bool) -> None:
    parser = HermesParser(["f"])
    text = f"<tool_call>{CALL_F}</tool_call>"
    parser.push(text if is_complete else text[:-16], final=True)
    expected = "tool_calls" if reason == "stop" and is_complete else reason
    assert parser.finish_reason(reason) == expected


def test_arguments_and_content_go_out_as_they_come() -> None:
    parser = HermesParser(["f"], make_id=ids().__next__)
    assert parser.push("So: <").content == "So:"
    assert parser.push("b> ").content == " <b>"
    assert parser.push("x\n<tool_call>").content == " x"
    assert parser.push('{"name": "f", "arg').tool_calls == []
    function = {"name": "f", "arguments": '{"a'}
    first = {"index": 0, "id": "call-0", "type": "function", "function": function}
    assert parser.push('uments": {"a').tool_calls == [first]
    assert parser.push('": "long').tool_calls == [{"index": 0, "function": {"arguments": '": "long'}}]
    assert parser.push(' text"}').tool_calls == [{"index": 0, "function": {"arguments": ' text"}'}}]
    last = parser.push("}\n</tool_call>\n", final=True)
    assert (last.content, last.tool_calls) == ("", [])


def test_an_answer_in_json_is_not_held_back_until_its_end() -> None:
    parser = Llama3Parser(["f"])
    assert parser.push('\n{"answer"').content == '\n{"answer"'
    assert parser.push(': {"a').content == ': {"a'


def test_what_is_no_name_is_not_held_back_for_long() -> None:
    parser = MistralParser(["f"])
    content = "".join(parser.push(piece).content for piece in ["[TOOL_CALLS]", *("word " * 100)])
    assert ("[TOOL_CALLS]" + "word " * 100).startswith(content)
    assert len(content) > 200


def test_ids_are_what_templates_take() -> None:
    for parser, length in ((HermesParser, 29), (Llama3Parser, 29), (MistralParser, 9)):
        made = [join_tool_calls(parser(["f"]).push(TEXTS[parser], final=True).tool_calls)[0]["id"] for _ in range(2)]
        assert [len(call_id) for call_id in made] == [length, length]
        assert made[0] != made[1]
        assert made[0].replace("_", "").isalnum()


TEXTS: dict[type[ToolParser], str] = {
    HermesParser: f"<tool_call>{CALL_F}</tool_call>",
    Llama3Parser: LLAMA_F,
    MistralParser: f"[TOOL_CALLS] [{CALL_F}]",
}


@pytest.mark.parametrize(
    ("kind", "start", "middle"),
    [
        ("hermes", "", " "),
        ("hermes", "", "<tool_call>\n"),
        ("hermes", "", "<tool_call"),
        ("hermes", '<tool_call>{"name": "', "x"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', "x\n"),
        ("hermes", f"<tool_call>{CALL_F}", "}\n"),
        ("llama3", "{", ' "name": 1'),
        ("llama3", "", "\n"),
        ("mistral", "[TOOL_CALLS][", " "),
        ("mistral", "[TOOL_CALLS]", "f"),
        ("mistral", "", "[TOOL_CALLS][["),
    ],
)
def test_the_time_is_linear_in_the_text(kind: str, start: str, middle: str) -> None:
    """Counted in calls: twice the text takes twice the calls, whatever is held back."""

    def num_calls(length: int) -> int:
        parser, count = PARSERS[kind](["f", "g"]), 0

        def note(_frame: object, _event: str, _argument: object) -> None:
            nonlocal count
            count += 1

        previous = sys.getprofile()
        sys.setprofile(note)
        try:
            parser.push(start)
            for piece in itertools.repeat(middle, length):
                parser.push(piece)
        finally:
            sys.setprofile(previous)
        return count

    assert num_calls(2000) < 2.2 * num_calls(1000)
