"""Grammars of tool calls, followed by llguidance token by token: what they let through is what the parsers read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Inner

from pageframe.api.tool_grammar import tool_grammar
from pageframe.api.tool_parsers import join_tool_calls
from pageframe.api.tools import ToolChoice, ToolUse, check_tools, find_style
from pageframe.runtime.errors import InvalidRequestError
from pageframe.runtime.grammar_compiler import GrammarCompiler
from pageframe.runtime.models.source import ModelSource
from pageframe.runtime.tokenizer import Tokenizer, load_tokenizer

STYLES = {
    "hermes": '<tool_call>\n{"name": x, "arguments": y}',
    "llama3": '{"name": function name, "parameters": y}',
    "mistral": "[TOOL_CALLS] [",
    "mistral_id": "[TOOL_CALLS][CALL_ID][ARGS]",
    "mistral_args": "[TOOL_CALLS][ARGS]",
}
WEATHER = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"City": {"enum": ["Oslo", "São Paulo"]}},
}
CALL = ("weather", '{"city": "Oslo", "days": 3}')
OTHER_CALL = ("now", "{}")
EOS = "</s>"


def written(style: str, *calls: tuple[str, str]) -> str:
    """The calls as the style's template writes them."""
    if style in ("mistral_id", "mistral_args"):
        call_id = "[CALL_ID]abcDEF123" if style == "mistral_id" else ""
        return "".join(f"[TOOL_CALLS]{name}{call_id}[ARGS]{arguments}" for name, arguments in calls)
    key = "parameters" if style == "llama3" else "arguments"
    objects = [f'{{"name": "{name}", "{key}": {arguments}}}' for name, arguments in calls]
    if style == "hermes":
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects)
    return "; ".join(objects) if style == "llama3" else f"[TOOL_CALLS][{', '.join(objects)}]"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level, with long tokens across the seams of calls; Mistral's marks are special, Hermes' are not."""
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    marks = ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"]
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[EOS, *marks],
        show_progress=False,
    )
    corpus = [written(style, CALL, OTHER_CALL) for style in STYLES]
    inner.train_from_iterator([text.replace("[TOOL_CALLS]", "") for text in corpus], trainer)
    inner.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<tool_call>", "</tool_call>")])
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
    return load_tokenizer(ModelSource("folder", folder, "tiny"))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [0])
    yield compiler
    compiler.close()


def tools(*, strict: bool = False, parameters: dict[str, Any] = WEATHER) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": "weather", "parameters": parameters, "strict": strict}},
        {"type": "function", "function": {"name": "now"}},
    ]


def use_of(
    style: str, choice: ToolChoice, *, parallel: bool = True, strict: bool = False, parameters: Any = WEATHER
) -> ToolUse:
    found = find_style(STYLES[style])
    assert found is not None
    return ToolUse(check_tools(tools(strict=strict, parameters=parameters)), choice, parallel, found)


REQUIRED = ToolChoice("required")


class Grammar:
    """A use's grammar, asked whether it accepts texts, however they are cut into tokens."""

    def __init__(self, compiler: GrammarCompiler, tokenizer: Tokenizer, use: ToolUse) -> None:
        spec = tool_grammar(use, tokenizer)
        assert spec is not None
        self._tokenizer = tokenizer
        self._single = {tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.vocab_size)}
        self.compiled = compiler.compile(spec, param="tools")

    def accepts(self, text: str) -> bool:
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        by_bytes: list[int] = []
        for token_id in ids:
            data = self._tokenizer.token_bytes(token_id)
            parts = [data] if self._tokenizer.is_special(token_id) else [bytes([byte]) for byte in data]
            by_bytes += map(self._single.__getitem__, parts)
        verdicts = {self._takes(ids), self._takes(by_bytes)}
        assert len(verdicts) == 1, "the verdict depends on the tokens"
        return verdicts.pop()

    def _takes(self, ids: list[int]) -> bool:
        matcher = self.compiled.matcher()
        return all(matcher.accept(token_id) for token_id in [*ids, 0])


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("parallel", [True, False])
def test_required_calls(style: str, parallel: bool, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = Grammar(compiler, tokenizer, use_of(style, REQUIRED, parallel=parallel))
    assert grammar.accepts(written(style, CALL))
    assert grammar.accepts(written(style, OTHER_CALL))
    assert grammar.accepts(written(style, ("weather", '{"city": "São Paulo"}')))
    assert grammar.accepts(written(style, CALL, OTHER_CALL, CALL)) == parallel
    for refused in (
        "",
        "Hello",
        "Well. " + written(style, CALL),
        written(style, CALL) + " There.",
        written(style, CALL)[:-1],
        written(style, ("weather", '{"city": "Rome"}')),
        written(style, ("weather", '{"city": "Oslo", "days": 0}')),
        written(style, ("weather", "{}")),
        written(style, ("now", '{"a": 1}')),
        written(style, ("weathers", '{"city": "Oslo"}')),
    ):
        assert not grammar.accepts(refused), refused


def test_mistrals_list_may_begin_with_spaces(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = Grammar(compiler, tokenizer, use_of("mistral", REQUIRED))
    text = written("mistral", CALL)
    assert [grammar.accepts(text.replace("][", f"]{' ' * count}[")) for count in range(4)] == [True, True, True, False]


@pytest.mark.parametrize("style", STYLES)
def test_a_named_tool(style: str, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = Grammar(compiler, tokenizer, use_of(style, ToolChoice("required", "now"), parallel=False))
    assert grammar.accepts(written(style, OTHER_CALL))
    assert not grammar.accepts(written(style, CALL))


@pytest.mark.parametrize("style", STYLES)
def test_strict_tools_leave_text_free_and_bind_calls(
    style: str, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    grammar = Grammar(compiler, tokenizer, use_of(style, ToolChoice("auto"), strict=True))
    for text in ("Hello.\n{ [ <tool", written(style, CALL), written(style, CALL, OTHER_CALL)):
        assert grammar.accepts(text), text
    assert grammar.accepts("Well.\n" + written(style, CALL))
    assert not grammar.accepts(written(style, ("weather", '{"city": "Rome"}')))
    # Behind other text a call of Llama 3's is text, whatever it says.
    assert grammar.accepts("Well.\n" + written(style, ("other", "{}"))) == (style == "llama3")
    # The tool that is not strict may have arguments that its schema does not know.
    assert grammar.accepts(written(style, ("now", '{"zone": [1,  2]}')))


def test_no_grammar_where_nothing_asks_for_one(tokenizer: Tokenizer) -> None:
    assert tool_grammar(use_of("hermes", ToolChoice("auto")), tokenizer) is None


def test_only_a_strict_schema_is_refused_for_what_cannot_be_enforced(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "made-up"}}, "required": ["a"]}
    grammar = Grammar(compiler, tokenizer, use_of("hermes", REQUIRED, parameters=schema))
    assert grammar.accepts(written("hermes", ("weather", '{"a": "x"}')))
    with pytest.raises(InvalidRequestError, match="made-up") as caught:
        Grammar(compiler, tokenizer, use_of("hermes", REQUIRED, parameters=schema, strict=True))
    assert caught.value.param == "tools"


LOOKAHEAD = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?=b)"}}, "required": ["a"]}
DEEP: dict[str, Any] = {"type": "object"}
for _ in range(150):
    DEEP = {"type": "object", "properties": {"a": DEEP}}
ROUNDED = {"type": "object", "properties": {"a": {"const": 2**53 + 1}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        (LOOKAHEAD, "regex parse error: ^(?=b) ^^^ error: look-around"),
        (ROUNDED, "its const has 9007199254740993"),
        (DEEP, "recursion limit exceeded"),
    ],
)
def test_only_a_strict_schema_is_refused_for_what_cannot_be_compiled(
    parameters: Any, words: str, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    """Otherwise its tool's arguments are any object, and the other tools' are what they were."""
    grammar = Grammar(compiler, tokenizer, use_of("hermes", REQUIRED, parameters=parameters))
    for arguments in ("{}", '{"a": 1}', '{"a":  9007199254740993}'):
        assert grammar.accepts(written("hermes", ("weather", arguments)))
    assert not grammar.accepts(written("hermes", ("weather", "[]")))
    assert not grammar.accepts(written("hermes", ("now", '{"a": 1}')))
    for choice in (REQUIRED, ToolChoice("auto"), ToolChoice("required", "weather")):
        with pytest.raises(InvalidRequestError) as caught:
            Grammar(compiler, tokenizer, use_of("hermes", choice, parameters=parameters, strict=True))
        message = caught.value.message
        assert message.startswith("tools cannot be followed: tools[0].function (weather) has parameters that cannot be")
        assert words in message
        assert not re.search(r"Lark|start:|arguments_0|at \d", message), message


def test_a_tool_that_cannot_be_followed_keeps_its_place(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    found = find_style(STYLES["hermes"])
    assert found is not None
    given = check_tools(list(reversed(tools(strict=True, parameters=LOOKAHEAD))))
    with pytest.raises(InvalidRequestError, match=r"tools\[1\]\.function \(weather\)"):
        Grammar(compiler, tokenizer, ToolUse(given, ToolChoice("required", "weather"), True, found))


@pytest.mark.parametrize("style", STYLES)
def test_whatever_the_grammar_lets_through_is_calls(
    style: str, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    """Tokens drawn blindly from the masks: the parser finds calls with arguments of the schema, and nothing else."""
    use = use_of(style, REQUIRED)
    grammar = Grammar(compiler, tokenizer, use)
    rng = np.random.default_rng(7)
    num_ended = 0
    for _ in range(8):
        matcher, ids = grammar.compiled.matcher(), []
        row = np.zeros(-(-tokenizer.vocab_size // 32), np.uint32)
        while len(ids) < 300 and ids[-1:] != [0]:
            matcher.write_mask(row)
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            ids.append(0 if 0 in allowed else int(rng.choice(allowed)))
            assert matcher.accept(ids[-1])
        if ids[-1] != 0:
            continue
        num_ended += 1
        parser = use.parser()
        delta = parser.push(b"".join(map(tokenizer.token_bytes, ids[:-1])).decode(), final=True)
        assert delta.content == ""
        assert parser.finish_reason("stop") == "tool_calls"
        for call in join_tool_calls(delta.tool_calls):
            arguments = json.loads(call["function"]["arguments"])
            assert arguments == {} or arguments["city"] in WEATHER["$defs"]["City"]["enum"]  # type: ignore[index]
    assert num_ended > 4
