"""Grammars: masks against what texts are allowed, all kinds of tokenizers, and grammars that must be refused."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Inner

from pageframe.runtime import grammar_trial
from pageframe.runtime.errors import EngineError, InvalidRequestError
from pageframe.runtime.grammar import CompiledGrammar, GrammarSpec, MaskFiller, Matcher, one_line
from pageframe.runtime.grammar_compiler import GrammarCompiler, GrammarLimits
from pageframe.runtime.grammar_trial import GrammarTrial, TrialLimits
from pageframe.runtime.grammar_vocabulary import ModelTokens, TokenTable
from pageframe.runtime.models.source import ModelSource
from pageframe.runtime.tokenizer import Tokenizer, load_tokenizer

SPECIAL = ["<s>", "</s>", "<end>"]
EOS = (1, 2)
#: By these "uvwx" is "u", "vwx", though "uv" is a token too.
NOT_THE_LONGEST_FIRST = [("v", "w"), ("vw", "x"), ("u", "v")]
SEED = int(os.environ.get("PAGEFRAME_TEST_SEED", "0"))


def tokenizer_of(folder: Path, inner: Inner) -> Tokenizer:
    inner.add_special_tokens(SPECIAL)
    inner.save(str(folder / "tokenizer.json"))
    return load_tokenizer(ModelSource("folder", folder, "tiny"))


def byte_level(folder: Path) -> Tokenizer:
    """All bytes, and merges across what a grammar takes for borders."""
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "t"), ('"', ":"), ("{", '"'), ("1", "2")]
    merges += NOT_THE_LONGEST_FIRST
    tokens += [left + right for left, right in merges]
    inner = Inner(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return tokenizer_of(folder, inner)


def sentencepiece(folder: Path) -> Tokenizer:
    """A space before every text, marks for spaces, bytes where no piece fits; its pieces spell ASCII twice."""
    merges = [("▁", "t"), ("h", "e"), *NOT_THE_LONGEST_FIRST]
    pieces = [
        *SPECIAL,
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *'▁abcdefghijklmnopqrstuvwxyz{}:,"',
    ]
    pieces += [left + right for left, right in merges]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    inner = Inner(models.BPE(vocab, merges, byte_fallback=True, unk_token="<s>"))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer_of(folder, inner)


def characters(folder: Path) -> Tokenizer:
    """A few characters and no bytes for the rest."""
    inner = Inner(models.WordLevel({token: index for index, token in enumerate([*SPECIAL, *"abc "])}))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    return tokenizer_of(folder, inner)


MAKERS = {"byte_level": byte_level, "sentencepiece": sentencepiece, "characters": characters}
#: More than any of the tokenizers has, and no multiple of 32.
VOCAB_SIZE = 301


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {name: make(tmp_path_factory.mktemp(name)) for name, make in MAKERS.items()}


@pytest.fixture(scope="module")
def compilers(tokenizers: dict[str, Tokenizer]) -> Iterator[dict[str, GrammarCompiler]]:
    made = {name: GrammarCompiler(tokenizer, VOCAB_SIZE, EOS) for name, tokenizer in tokenizers.items()}
    yield made
    for compiler in made.values():
        compiler.close()


@pytest.fixture
def compiler(compilers: dict[str, GrammarCompiler]) -> GrammarCompiler:
    return compilers["byte_level"]


@pytest.fixture
def tokenizer(tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers["byte_level"]


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    sys.stdout.write(f"repeat with PAGEFRAME_TEST_SEED={SEED}\n")
    return random.Random(SEED + zlib.crc32(request.node.nodeid.encode()))


def lark(source: str) -> GrammarSpec:
    return GrammarSpec("lark", source)


def schema(value: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(value))


def choice(*texts: str) -> GrammarSpec:
    return GrammarSpec("choice", json.dumps(texts))


def allowed(matcher: Matcher, vocab_size: int = VOCAB_SIZE) -> set[int]:
    """The ids whose bits are set; the row is dirty before, and bits beyond the vocabulary count as ids."""
    row = np.full(-(-vocab_size // 32), 0x5A5A5A5A, np.uint32)
    matcher.write_mask(row)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def feed(matcher: Matcher, tokenizer: Tokenizer, text: str) -> bool:
    """Whether it takes the text, byte by byte where it can."""
    ids = {tokenizer.token_bytes(token_id): token_id for token_id in range(len(SPECIAL), tokenizer.vocab_size)}
    return all(matcher.accept(ids[bytes([byte])]) for byte in text.encode())


def follows(compiled: CompiledGrammar, tokenizer: Tokenizer, text: str) -> bool:
    matcher = compiled.matcher()
    return feed(matcher, tokenizer, text) and matcher.is_accepting


def walk(matcher: Matcher, rng: random.Random, most: int = 60) -> list[int] | None:
    """Tokens drawn from the masks until the text ends; None where it does not end by then."""
    ids: list[int] = []
    for _ in range(most):
        token_id = rng.choice(sorted(allowed(matcher)))
        assert matcher.accept(token_id)
        if token_id in EOS:
            return ids
        ids.append(token_id)
    return None


# --- masks ---


def test_masks_of_choices_are_the_prefixes(compiler: GrammarCompiler, tokenizer: Tokenizer, rng: random.Random) -> None:
    """Where the next byte is open, exactly the tokens that keep some choice possible; where not, one of them."""
    choices = ["hello", "hell", "help", "he1", "x12", "x123", "xé", "x日"]
    compiled = compiler.compile(choice(*choices))
    texts = set()
    for _ in range(60):
        matcher, data = compiled.matcher(), b""
        while not matcher.must_stop:
            whole = [text.encode() for text in choices]
            left = {text[len(data) :] for text in whole if text.startswith(data)}
            possible = {
                token_id
                for token_id in range(len(SPECIAL), tokenizer.vocab_size)
                if any(rest.startswith(tokenizer.token_bytes(token_id)) for rest in left)
            } | (set(EOS) if b"" in left else set())
            mask = allowed(matcher)
            is_open = len({rest[:1] for rest in left}) > 1
            assert mask == possible if is_open else len(mask) == 1 and mask <= possible
            token_id = rng.choice(sorted(mask))
            assert matcher.accept(token_id)
            data += b"" if token_id in EOS else tokenizer.token_bytes(token_id)
        texts.add(data.decode())
    assert texts == set(choices)


def test_drawn_texts_are_valid_json(compiler: GrammarCompiler, tokenizer: Tokenizer, rng: random.Random) -> None:
    rules = {
        "type": "object",
        "properties": {
            "hello": {"enum": ["one", "two", 12]},
            "t": {"type": "array", "items": {"type": "integer", "minimum": -12, "maximum": 120}, "maxItems": 3},
            "é": {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 2}]},
        },
        "required": ["hello", "é"],
        "additionalProperties": False,
    }
    compiled = compiler.compile(schema(rules))
    ended = 0
    for _ in range(40):
        ids = walk(compiled.matcher(), rng)
        if ids is not None:
            jsonschema.validate(json.loads(tokenizer.decode(ids)), rules)
            ended += 1
    assert ended > 20


def test_drawn_texts_match_the_regular_expression(
    compiler: GrammarCompiler, tokenizer: Tokenizer, rng: random.Random
) -> None:
    pattern = r"(hello|[a-c]{2,4}é?)( t[^a-z]{0,3}){0,2}"
    compiled = compiler.compile(GrammarSpec("regex", pattern))
    texts = [walk(compiled.matcher(), rng) for _ in range(40)]
    ended = [tokenizer.decode(ids) for ids in texts if ids is not None]
    assert len(set(ended)) > 10
    assert all(re.fullmatch(pattern, text) for text in ended)


def test_special_and_unknown_tokens_are_no_text(compilers: dict[str, GrammarCompiler], tokenizer: Tokenizer) -> None:
    anything = GrammarSpec("regex", "(?s).*")
    mask = allowed(compilers["byte_level"].compile(anything).matcher())
    assert set(EOS) <= mask
    assert mask <= set(EOS) | set(range(len(SPECIAL), tokenizer.vocab_size))
    ascii_ids = {id_ for id_ in range(len(SPECIAL), tokenizer.vocab_size) if tokenizer.token_bytes(id_).isascii()}
    assert ascii_ids <= mask
    assert not mask & set(range(tokenizer.vocab_size, 320))
    for compiler in compilers.values():
        matcher = compiler.compile(anything).matcher()
        assert 0 not in allowed(matcher)
        assert not matcher.accept(0)


def test_an_end_of_text_token_is_no_text(tokenizer: Tokenizer) -> None:
    """Not even where the tokenizer takes it for an ordinary one."""
    a, z = (tokenizer.token_to_id(letter) for letter in "az")
    assert a is not None
    assert z is not None
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, (z,), GrammarLimits(num_trials=1))
    try:
        matcher = compiler.compile(GrammarSpec("regex", "[az]+")).matcher()
    finally:
        compiler.close()
    assert allowed(matcher) == {a}
    assert matcher.accept(a)
    assert allowed(matcher) == {a, z}
    assert matcher.accept(z)
    assert matcher.must_stop


def test_a_special_token_is_named_in_lark(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.compile(lark('start: <s> "hello"')).matcher()
    assert allowed(matcher) == {0}
    assert not feed(matcher.copy(), tokenizer, "<s>")
    assert matcher.accept(0)
    assert feed(matcher, tokenizer, "hello")
    assert matcher.must_stop


@pytest.mark.parametrize("number", [64, 3])
def test_masks_of_other_vocabulary_sizes(tokenizers: dict[str, Tokenizer], number: int) -> None:
    """A multiple of 32, and smaller than the tokenizer's."""
    limits = GrammarLimits(num_trials=1)
    compiler = GrammarCompiler(tokenizers["characters"], number, EOS, limits)
    try:
        mask = allowed(compiler.compile(GrammarSpec("regex", "[a-z]*")).matcher(), number)
    finally:
        compiler.close()
    assert mask == {token_id for token_id in (1, 2, 3, 4, 5) if token_id < number}


# --- the way of a text ---


def test_every_end_of_text_token_ends_where_the_grammar_may_end(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    start = compiler.compile(GrammarSpec("regex", "a+")).matcher()
    a = tokenizer.token_to_id("a")
    assert a is not None
    assert not start.is_accepting
    assert allowed(start) == {a}
    assert not start.accept(EOS[0])
    assert start.accept(a)
    assert allowed(start) == {a, *EOS}
    for token_id in EOS:
        matcher = start.copy()
        assert not matcher.must_stop
        assert matcher.accept(token_id)
        assert (matcher.is_accepting, matcher.must_stop, matcher.error) == (True, True, "")
        assert allowed(matcher) == set(EOS)
        assert not matcher.accept(a)
        assert matcher.accept(EOS[0])
    assert not start.must_stop


def test_a_text_that_cannot_go_on_must_stop(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.compile(choice("ab")).matcher()
    assert feed(matcher, tokenizer, "a")
    assert not matcher.must_stop
    assert feed(matcher, tokenizer, "b")
    assert (matcher.is_accepting, matcher.must_stop, matcher.error) == (True, True, "")
    assert allowed(matcher) == set(EOS)


def test_a_refused_token_changes_nothing(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.compile(GrammarSpec("regex", "[ab]{4}")).matcher()
    assert feed(matcher, tokenizer, "ab")
    before = allowed(matcher)
    for token_id in (0, EOS[0], tokenizer.token_to_id("c"), VOCAB_SIZE - 1):
        assert token_id is not None
        assert not matcher.accept(token_id)
    assert allowed(matcher) == before
    assert feed(matcher, tokenizer, "ba")
    assert matcher.must_stop


def test_copies_go_their_own_ways(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    first = compiler.compile(choice("abc", "abd", "x")).matcher()
    assert feed(first, tokenizer, "a")
    second = first.copy()
    assert feed(first, tokenizer, "bc")
    assert first.must_stop
    assert not second.must_stop
    assert feed(second, tokenizer, "bd")
    assert second.must_stop
    assert feed(compiler.compile(choice("abc", "abd", "x")).matcher(), tokenizer, "x")


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize("text", ["hello the hell", "é 日本 t", " the", "he" * 600, "tuvwx", "<s> a"])
def test_forced_text_is_spelt_as_the_model_spells_it(
    name: str, text: str, compilers: dict[str, GrammarCompiler], tokenizers: dict[str, Tokenizer]
) -> None:
    """Each mask leaves one token; together they are the tokenizer's ids, without the space it puts before a text."""
    tokenizer = tokenizers[name]
    matcher = compilers[name].compile(choice(text)).matcher()
    ids: list[int] = []
    while not matcher.must_stop:
        (token_id,) = allowed(matcher)
        assert matcher.accept(token_id)
        ids.append(token_id)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text
    lead = tokenizer.encode("a", add_special_tokens=False)
    spelt = tokenizer.encode("a" + text, add_special_tokens=False, parse_special=False)
    assert ids == spelt[len(lead) :]


def test_text_that_the_vocabulary_cannot_spell_is_a_dead_end(compilers: dict[str, GrammarCompiler]) -> None:
    """What the mask then leaves is not accepted: it is no end of a whole text."""
    matcher = compilers["characters"].compile(choice("ab!c")).matcher()
    for _ in range(2):
        (token_id,) = allowed(matcher)
        assert matcher.accept(token_id)
    assert allowed(matcher) <= set(EOS)
    assert not any(matcher.accept(token_id) for token_id in EOS)
    assert not matcher.is_accepting
    assert not matcher.must_stop


def test_greedy_spelling() -> None:
    table = TokenTable([b"<e>", b"a", b"ab", b"b", b"bc", b"", b"<0xff>"], {0, 6}, [0])
    assert table("abc") == [2, 0]
    assert table("abbc") == [2, 4]
    assert table("<e>") == [0]
    assert table("") == []


def test_the_tables_spell_what_the_tokenizer_decodes(tokenizers: dict[str, Tokenizer], rng: random.Random) -> None:
    for name in ("byte_level", "sentencepiece"):
        tokens = ModelTokens(tokenizers[name], VOCAB_SIZE, EOS)
        for _ in range(50):
            text = "".join(rng.choices('ab the "{:é日🦩\n\x02<s>', k=rng.randint(1, 20)))
            ids = tokens(text)
            assert b"".join(map(tokenizers[name].token_bytes, ids)) == text.encode()
            assert not any(map(tokenizers[name].is_special, ids))


def test_a_matcher_that_meets_a_limit_says_so(tokenizer: Tokenizer, rng: random.Random) -> None:
    """Also its grammar's next texts would; compiled again it is as new."""
    spec = GrammarSpec("regex", r"(?s).*a(?s).{12}")
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, EOS, GrammarLimits(trial=TrialLimits(lexer_states=400)))
    try:
        compiled = compiler.compile(spec)
        matcher = compiled.matcher()
        for _ in range(5000):
            if matcher.error or not feed(matcher, tokenizer, rng.choice("ab")):
                break
            allowed(matcher)
        assert matcher.error == "lexer error: too many states: 400 >= 400"
        assert (matcher.must_stop, matcher.is_accepting) == (False, False)
        assert allowed(matcher) == set(EOS)
        assert not matcher.accept(EOS[0])
        assert compiled.is_worn_out()
        again = compiler.compile(spec)
        assert again is not compiled
        assert not again.is_worn_out()
        assert compiler.compile(spec) is again
    finally:
        compiler.close()


def test_many_masks_at_once_are_the_single_ones(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    specs = [choice("hello", "x"), GrammarSpec("json_object"), GrammarSpec("regex", "[^a]*"), choice("hello", "x")]
    matchers = [compiler.compile(spec).matcher() for spec in specs]
    assert feed(matchers[3], tokenizer, "h")
    masks = np.full((6, 10), 7, np.uint32)
    filler = MaskFiller(num_threads=2)
    filler.fill([], masks)
    filler.fill([(4, matchers[0]), (0, matchers[1]), (1, matchers[2]), (5, matchers[3])], masks)
    for row, matcher in ((4, matchers[0]), (0, matchers[1]), (1, matchers[2]), (5, matchers[3])):
        single = np.zeros(10, np.uint32)
        matcher.write_mask(single)
        assert masks[row].tolist() == single.tolist()
    assert (masks[2:4] == 7).all()


@pytest.mark.parametrize(
    "row",
    [np.zeros(9, np.uint32), np.zeros(10, np.int32), np.zeros(20, np.uint32)[::2], np.zeros((1, 10), np.uint32)],
    ids=["short", "signed", "strided", "matrix"],
)
def test_masks_of_another_shape_are_our_own_bug(compiler: GrammarCompiler, row: Any) -> None:
    with pytest.raises(AssertionError):
        compiler.compile(GrammarSpec("json_object")).matcher().write_mask(row)


# --- kinds of grammars ---


@pytest.mark.parametrize(
    ("spec", "good", "bad"),
    [
        (GrammarSpec("json_object"), ["{}", '{"a": [1, null]}', "{ }"], ["[]", "1", "", "{", "{} "]),
        (schema(True), ["{}", "1", '"a"'], ["", "a"]),
        (schema({"type": "integer"}), ["1", "-12"], ["1.5", "a", "01"]),
        (GrammarSpec("regex", "a|bc"), ["a", "bc"], ["ac", "abc", ""]),
        (GrammarSpec("regex", "^a/b$"), ["a/b"], ["xa/b", "a/bx"]),
        (choice("a b", 'say "x"', "{", "a bc"), ["a b", 'say "x"', "{", "a bc"], ["a", "say x", "a b{"]),
        (lark('start: "a" b\nb: /[0-9]+/ | "(" b ")"'), ["a1", "a((2))"], ["a", "a(1"]),
        (lark('start: "x" %json {"type": "boolean"}'), ["xtrue"], ["true", "x1"]),
        (lark('start: "[temperature=" /[0-9]/ "]"'), ["[temperature=1]"], ["[temperature=]"]),
    ],
)
def test_kinds(compiler: GrammarCompiler, tokenizer: Tokenizer, spec: GrammarSpec, good: Any, bad: Any) -> None:
    compiled = compiler.compile(spec)
    assert [text for text in good if not follows(compiled, tokenizer, text)] == []
    assert [text for text in bad if follows(compiled, tokenizer, text)] == []


def test_white_space_in_json_is_bounded(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    document = {"a": [1, {"b": []}, 2], "c": "x"}
    compiled = compiler.compile(schema({}))
    for options in ({}, {"indent": 2}, {"indent": "\t"}, {"separators": (",", ":")}, {"indent": 21}):
        assert follows(compiled, tokenizer, json.dumps(document, **options))
    for text in ("{  }", '{"a":\n\n1}', '{"a": 1\n, "b": 2 \n}', "[" + "\n" + " " * 65 + "]"):
        assert not follows(compiled, tokenizer, text)
    free = compiler.compile(schema({"x-guidance": {"whitespace_pattern": r"[ \n]+"}}))
    assert follows(free, tokenizer, '{  "a":\n\n1}')


# --- what is refused ---


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (GrammarSpec("json_schema", "{"), "has a JSON schema that is not valid: EOF while parsing"),
        (GrammarSpec("json_schema", "[1]"), "has a JSON schema that is not valid"),
        (GrammarSpec("json_schema", "false"), "has a JSON schema that is not valid"),
        (GrammarSpec("json_schema", '{"a": ' * 200 + "1" + "}" * 200), "that is not valid: recursion limit exceeded"),
        (GrammarSpec("json_schema", '{"pattern": "\ud800"}'), "has a JSON schema that is not valid"),
        (schema({"uniqueItems": True}), 'that cannot be used: Unimplemented keys: ["uniqueItems"]'),
        (schema({"type": "string", "format": "none"}), "that cannot be used: Unknown format: none"),
        (schema({"type": "integer", "minimum": 2, "maximum": 1}), "that cannot be used: Unsatisfiable schema"),
        (schema({"$ref": "http://127.0.0.1/schema.json"}), "that cannot be used"),
        (
            schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
            "that cannot be used: no text can come next",
        ),
        (schema({"x-guidance": {"no": 1}}), "has a JSON schema that cannot be used: unknown field `no`"),
        (schema({"const": -(2**63)}), "a JSON schema that cannot be used: its const has -9223372036854775808"),
        (schema({"type": "integer", "minimum": 10**20}), "that cannot be used: its minimum has 100000000000000000000"),
        (lark('start: %json {"const": 9007199254740993}'), "that cannot be used: its const has 9007199254740993"),
        (lark('%llguidance {"bogus": true}\nstart: "a"'), "that cannot be used: %llguidance has the setting 'bogus'"),
        (GrammarSpec("tool_calls", "{}"), "has a grammar of tool calls that is not valid: it has no rules"),
        (GrammarSpec("regex", "(a"), "has a regular expression that cannot be used: .* unclosed group"),
        (GrammarSpec("regex", "a(?=b)"), "look-ahead"),
        (GrammarSpec("choice", "[]"), "has a list of choices that is not valid: it must be a list of at least one"),
        (GrammarSpec("choice", '["a", 1]'), "it has 1; each choice must be a text"),
        (GrammarSpec("choice", '["a", ""]'), "it has ''; each choice must be a text"),
        (GrammarSpec("choice", '"ab"'), "it must be a list"),
        (GrammarSpec("choice", "["), "has a list of choices that is not valid: Expecting value"),
        (GrammarSpec("choice", "[" * 100_000), "has a list of choices that is not valid: maximum recursion depth"),
        (lark("start: a"), 'has a Lark grammar that cannot be used: .*unknown name: "a"'),
        (lark('{"grammars": [{"lark_grammar": "start: /a/"}]}'), "has a Lark grammar that cannot be used"),
        (lark("start: <no_such_token>"), "unknown special token"),
        (lark("start: text\ntext[capture, temperature=0.5]: /a/"), "a rule sets a temperature, which is not supported"),
        (lark("start: " + "(" * 5000 + '"a"' + ")" * 5000), "too deeply nested"),
        (GrammarSpec("poem", ""), "has a grammar that is not valid: its kind is 'poem'; it must be one of json_schema"),
        (GrammarSpec("regex", "a" * 300_000), "has a regular expression of 300000 bytes; at most 262144 are allowed"),
        (GrammarSpec("regex", "é" * 140_000), "of 280000 bytes"),
    ],
)
def test_grammars_that_are_no_use(compiler: GrammarCompiler, spec: GrammarSpec, words: str) -> None:
    pattern = words if ".*" in words else re.escape(words)
    with pytest.raises(InvalidRequestError, match=pattern) as caught:
        compiler.compile(spec, param="field")
    assert caught.value.param == "field"
    assert caught.value.message.startswith("field ")
    assert "\n" not in caught.value.message
    assert "backtrace" not in caught.value.message
    assert len(caught.value.message) < 600


def test_what_would_end_the_process_is_refused(compiler: GrammarCompiler) -> None:
    """Each overflows llguidance's stack; the compiler lives, and the next grammar compiles."""
    length = 12_000
    references = {f"d{index}": {"$ref": f"#/$defs/d{index + 1}"} for index in range(5000)} | {"d5000": {}}
    chains = [
        lark("\n".join(f"r{index}: r{index + 1}" for index in range(length)) + f'\nr{length}: "a"\nstart: r0'),
        lark("\n".join(f'R{index}: R{index + 1} "a"' for index in range(length)) + f'\nR{length}: "a"\nstart: R0'),
        schema({"$defs": references, "$ref": "#/$defs/d0"}),
    ]
    for spec in chains:
        with pytest.raises(InvalidRequestError, match="nested too deeply, or takes more than 1024 MiB, to compile"):
            compiler.compile(spec)
    assert compiler.compile(choice("after that")).matcher()


@pytest.mark.parametrize(
    ("spec", "limits", "words"),
    [
        (
            schema({"prefixItems": [{"properties": {f"p{i}": {} for i in range(2500)}}] * 4}),
            TrialLimits(seconds=0.25),
            "it takes more than 0.25 seconds to compile",
        ),
        (
            lark("start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(40)) + '\nA40: "a"'),
            TrialLimits(memory_bytes=24 * 1024**2),
            "takes more than 24 MiB, to compile",
        ),
    ],
    ids=["time", "memory"],
)
def test_time_and_memory_are_limited(
    tokenizer: Tokenizer, spec: GrammarSpec, limits: TrialLimits, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the operating system: the parent would wait."""
    monkeypatch.setattr(grammar_trial, "PATIENCE", 1000)
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, EOS, GrammarLimits(num_trials=1, trial=limits))
    try:
        with pytest.raises(InvalidRequestError, match=re.escape(words)):
            compiler.compile(spec)
        compiler.compile(choice("after that"))
    finally:
        compiler.close()


def test_llguidances_words_are_one_line_without_its_inside() -> None:
    assert one_line("panic: a\n b\n<backtrace>\n 0: /some/path\n</backtrace>") == "panic: a b"
    assert one_line("too many states\n<non-verbose/>") == "too many states"
    assert one_line("é" * 500) == "é" * 500
    assert one_line("é" * 501) == "é" * 499 + "…"


def test_a_child_that_was_ended_is_started_again(tokenizer: Tokenizer) -> None:
    trial = GrammarTrial(ModelTokens(tokenizer, VOCAB_SIZE, EOS), TrialLimits())
    try:
        assert trial.complaint("start: /a/") == ""
        assert trial._process is not None
        trial._process.kill()
        trial._process.wait()
        assert trial.complaint("start: /a/") == ""
    finally:
        trial.close()


def test_a_child_that_cannot_start_is_our_own_error(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = GrammarTrial(ModelTokens(tokenizer, VOCAB_SIZE, EOS), TrialLimits())
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(EngineError, match=r"python -m pageframe\.runtime\.grammar_trial` ends with status 1"):
        trial.complaint("start: /a/")


def test_a_model_without_an_end_of_text_token_has_no_grammars(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="this model has no end-of-text token") as caught:
        GrammarCompiler(tokenizer, VOCAB_SIZE, ()).prepare()
    assert caught.value.param == "response_format"


def test_without_llguidance_grammars_are_refused(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidRequestError, match="llguidance, which is not installed here"):
        GrammarCompiler(tokenizer, VOCAB_SIZE, EOS).compile(GrammarSpec("json_object"))


# --- the cache, threads and processes ---


def test_the_cache_is_bounded_by_grammars_and_bytes(tokenizer: Tokenizer) -> None:
    limits = GrammarLimits(source_bytes=50, cached_grammars=3, cached_bytes=60, num_trials=1)
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, EOS, limits)
    specs = [GrammarSpec("regex", letter) for letter in "abcd"]
    try:
        compiled = [compiler.compile(spec) for spec in specs[:3]]
        assert compiler.compile(specs[0]) is compiled[0]
        compiler.compile(specs[3])  # the second was used longest ago
        assert compiler.compile(specs[0]) is compiled[0]
        assert compiler.compile(specs[2]) is compiled[2]
        assert compiler.compile(specs[1]) is not compiled[1]
        long = [compiler.compile(GrammarSpec("regex", letter * 40)) for letter in "xy"]
        assert compiler.compile(GrammarSpec("regex", "y" * 40)) is long[1]
        assert compiler.compile(GrammarSpec("regex", "x" * 40)) is not long[0]
    finally:
        compiler.close()


def test_refusals_are_remembered_within_the_same_bounds(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes the most that a grammar may takes it once, however often it comes."""
    tried: list[str] = []

    def complaint(self: GrammarTrial, grammar: str) -> str:
        tried.append(grammar)
        return "it takes more than 5 seconds to compile" if "Q" in grammar else ""

    monkeypatch.setattr(GrammarTrial, "complaint", complaint)
    limits = GrammarLimits(source_bytes=50, cached_grammars=2, cached_bytes=60, num_trials=1)
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, EOS, limits)

    def refusal(source: str, param: str) -> str:
        with pytest.raises(InvalidRequestError) as caught:
            compiler.compile(GrammarSpec("regex", source), param=param)
        assert caught.value.param == param
        return caught.value.message

    told = {refusal("Q", f"field{number}") for number in range(20)}
    assert told == {
        f"field{number} has a regular expression that cannot be used: it takes more than 5 seconds to compile"
        for number in range(20)
    }
    assert len(tried) == 1
    assert compiler.knows(GrammarSpec("regex", "Q"))
    assert not compiler.knows(GrammarSpec("regex", "a"))
    compiled = compiler.compile(GrammarSpec("regex", "a"))
    refusal("a" * 51, "field")  # too long to be remembered
    assert compiler.compile(GrammarSpec("regex", "a")) is compiled
    refusal("Q", "field")
    assert len(tried) == 2
    refusal("QQ", "field")
    refusal("Q", "field")
    assert len(tried) == 3
    refusal("QQQ", "field")
    refusal("QQ", "field")  # the one asked for longest ago made room
    assert len(tried) == 5


def test_threads_that_ask_for_one_grammar_get_the_same(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    good, bad = choice("together"), GrammarSpec("regex", "(together")

    def compile_both(index: int) -> tuple[CompiledGrammar, str]:
        with pytest.raises(InvalidRequestError) as caught:
            compiler.compile(bad, param=f"field{index}")
        return compiler.compile(good), caught.value.message

    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(compile_both, range(6)))
    assert {compiled for compiled, _ in results} == {results[0][0]}
    for index, (_, message) in enumerate(results):
        assert message.startswith(f"field{index} has a regular expression")


def test_children_end_with_the_compiler_and_with_the_process(tmp_path: Path) -> None:
    """Their pipes' other ends are what a child lives on: none is left when the parent is killed."""
    byte_level(tmp_path)
    script = """
import os, pathlib, sys
from pageframe.runtime.grammar import GrammarSpec
from pageframe.runtime.grammar_compiler import GrammarCompiler
from pageframe.runtime.models.source import ModelSource
from pageframe.runtime.tokenizer import load_tokenizer
def children():
    return pathlib.Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
compiler = GrammarCompiler(load_tokenizer(ModelSource("folder", pathlib.Path(sys.argv[1]), "")), 301, (1, 2))
compiler.prepare()
assert len(children()) == 1
compiler.close()
assert children() == []
compiler.compile(GrammarSpec("regex", "b"))
assert len(children()) == 1
del compiler
assert children() == []
compiler = GrammarCompiler(load_tokenizer(ModelSource("folder", pathlib.Path(sys.argv[1]), "")), 301, (1, 2))
compiler.compile(GrammarSpec("regex", "a"))
print(*children(), flush=True)
os.kill(os.getpid(), 9)
"""
    if not Path("/proc/self/task").exists():
        pytest.skip("the system does not list a process's children")
    ran = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert ran.returncode == -9, ran.stderr
    # The child holds the other end of nothing that this process waits for, so its end is waited for here.
    _wait_until_gone(int(ran.stdout))


def _wait_until_gone(process_id: int) -> None:
    try:
        handle = os.pidfd_open(process_id)
    except ProcessLookupError:
        return
    try:
        import select

        assert select.select([handle], [], [], 20)[0], "the child outlives its parent"
    finally:
        os.close(handle)
