"""TextStream against decoding everything at once and looking at every place a stop string may end."""

import codecs
import sys
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pageframe.runtime.request import SamplingParams
from pageframe.runtime.text import TextDelta, TextStream


class FakeTokenizer:
    """Token i is the i-th entry; ids from `first_special` on are special."""

    def __init__(self, tokens: list[bytes], *, first_special: int = 10**9) -> None:
        self._tokens = tokens
        self._first_special = first_special

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokens[token_id] if token_id < len(self._tokens) else b""

    def is_special(self, token_id: int) -> bool:
        return token_id >= self._first_special


def stream(tokens: list[bytes], params: SamplingParams) -> TextStream:
    return TextStream(FakeTokenizer(tokens), params)


def run(tokens: list[bytes], cuts: list[int], params: SamplingParams) -> tuple[str, str | None, int]:
    """Pushes tokens[cut:next cut] for each two cuts, the last push final; the text, the stop string, num_tokens."""
    text_stream = stream(tokens, params)
    bounds = [0, *cuts, len(tokens)]
    text = ""
    for start, end in pairwise(bounds):
        delta = text_stream.push(list(range(start, end)), final=end == len(tokens))
        text += delta.text
        if delta.stop is not None or end == len(tokens):
            return text, delta.stop, delta.num_tokens
    raise AssertionError("the last bound is the number of tokens")


def plain(tokens: list[bytes], params: SamplingParams) -> tuple[str, str | None, int]:
    """The same without anything incremental."""
    text = b"".join(tokens).decode("utf-8", "replace")
    # Characters known after each token: those that no later byte can change.
    known = [
        len(codecs.utf_8_decode(b"".join(tokens[:count]), "replace", False)[0]) for count in range(1, len(tokens) + 1)
    ]
    for end in range(1, len(text) + 1):
        num_tokens = next((index for index, length in enumerate(known, 1) if length >= end), len(tokens))
        matches = [stop for stop in params.stop if text[:end].endswith(stop)]
        if matches and num_tokens > params.min_tokens:
            stop = max(matches, key=len)
            return text[: end if params.include_stop_str_in_output else end - len(stop)], stop, num_tokens
    return text, None, len(tokens)


SPLITTABLE = [
    "héllo",
    "日本語 text",
    "😀!",
    "👩‍👩‍👧‍👦 family",
    "e\u0301 combining",
    "\ufffd itself",
]


@pytest.mark.parametrize("text", SPLITTABLE)
def test_characters_survive_every_split(text: str) -> None:
    data = text.encode()
    for first in range(len(data) + 1):
        for second in range(first, len(data) + 1):
            tokens = [data[:first], data[first:second], data[second:]]
            assert run(tokens, [1, 2], SamplingParams())[0] == text
    assert run([data[index : index + 1] for index in range(len(data))], [], SamplingParams())[0] == text


def test_an_incomplete_character_is_held_back_and_then_whole() -> None:
    text_stream = stream([b"a\xf0\x9f", b"\x98", b"\x80b"], SamplingParams())
    assert text_stream.push([0]).text == "a"
    assert text_stream.push([1]).text == ""
    assert text_stream.push([2]).text == "😀b"


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ([b"\xc0"], "\ufffd"),
        ([b"a", b"\xc0", b"\xaf", b"b"], "a\ufffd\ufffdb"),
        ([b"\x80", b"\xbf", b"x"], "\ufffd\ufffdx"),
        ([b"\xe2\x82", b"x"], "\ufffdx"),
        ([b"\xf0\x9f\x98"], "\ufffd"),
        ([b"\xed\xa0\x80"], "\ufffd\ufffd\ufffd"),
        ([b"\xff\xfe"], "\ufffd\ufffd"),
        ([], ""),
    ],
)
def test_invalid_bytes_become_replacement_characters(tokens: list[bytes], text: str) -> None:
    assert run(tokens, list(range(1, len(tokens))), SamplingParams()) == (text, None, len(tokens))


@pytest.mark.parametrize("stop", ["STOP", "né日😀"])
@pytest.mark.parametrize("include", [False, True])
def test_no_split_lets_a_stop_string_out(stop: str, include: bool) -> None:
    params = SamplingParams(stop=(stop,), include_stop_str_in_output=include)
    expected = "before " + stop * include
    data = f"before {stop} after".encode()
    for first in range(len(data) + 1):
        for second in range(first, len(data) + 1):
            tokens = [data[:first], data[first:second], data[second:]]
            assert run(tokens, [1, 2], params)[:2] == (expected, stop)
            assert run(tokens, [1, 2], params) == run(tokens, [], params)


def test_a_stop_strings_prefix_waits_until_it_is_decided() -> None:
    params = SamplingParams(stop=("abcd",))
    text_stream = stream([b"xab", b"c", b"x", b"ab"], params)
    assert text_stream.push([0]) == TextDelta("x", None, 1)
    assert text_stream.push([1]) == TextDelta("", None, 2)
    assert text_stream.push([2]) == TextDelta("abcx", None, 3)
    assert text_stream.push([3], final=True) == TextDelta("ab", None, 4)


def test_a_push_may_be_empty() -> None:
    text_stream = stream([b"a", b"b"], SamplingParams(stop=("bc",)))
    assert text_stream.push([]) == TextDelta("", None, 0)
    assert text_stream.push([0, 1]) == TextDelta("a", None, 2)
    assert text_stream.push([], final=True) == TextDelta("b", None, 2)


@pytest.mark.parametrize(
    ("stops", "text", "kept", "stop"),
    [
        (("bcd", "c"), "abcd", "ab", "c"),  # the first to end, though another began before it
        (("c", "bc", "abc"), "xabcx", "x", "abc"),  # of those that end together the longest
        (("aab",), "aaaab", "aa", "aab"),
        (("ababc", "babd"), "ababd", "a", "babd"),
        (("a", "a"), "ba", "b", "a"),
        (("\n\n",), "a\n\nb", "a", "\n\n"),
    ],
)
def test_which_stop_string_wins(stops: tuple[str, ...], text: str, kept: str, stop: str) -> None:
    tokens = [character.encode() for character in text]
    params = SamplingParams(stop=stops)
    assert run(tokens, [], params)[:2] == (kept, stop)
    assert run(tokens, list(range(1, len(tokens))), params)[:2] == (kept, stop)
    assert run([text.encode()], [], params) == (kept, stop, 1)


def test_tokens_after_the_stop_string_do_not_count() -> None:
    tokens = [b"a", b"S", b"T\xf0", b"more", b"more"]
    assert run(tokens, [], SamplingParams(stop=("ST",))) == ("a", "ST", 3)


def test_a_stop_string_within_min_tokens_stays_in_the_text() -> None:
    tokens = [b"a", b"END", b"b", b"END", b"c"]
    assert run(tokens, [1], SamplingParams(stop=("END",), min_tokens=1)) == ("a", "END", 2)
    assert run(tokens, [1], SamplingParams(stop=("END",), min_tokens=2)) == ("aENDb", "END", 4)
    assert run(tokens, [1], SamplingParams(stop=("END",), min_tokens=4)) == ("aENDbENDc", None, 5)


def test_a_stop_string_may_begin_within_min_tokens() -> None:
    assert run([b"aE", b"ND", b"b"], [], SamplingParams(stop=("END",), min_tokens=1)) == ("a", "END", 2)


def test_an_ignored_stop_string_that_cannot_grow_is_let_out() -> None:
    text_stream = stream([b"END"], SamplingParams(stop=("END",), min_tokens=5))
    assert text_stream.push([0]) == TextDelta("END", None, 1)


def test_an_ignored_stop_string_may_end_in_the_beginning_of_another() -> None:
    text_stream = stream([b"xab", b"c"], SamplingParams(stop=("xab", "abc"), min_tokens=1))
    assert text_stream.push([0]) == TextDelta("x", None, 1)
    assert text_stream.push([1]) == TextDelta("", "abc", 2)


def test_the_last_flush_may_complete_a_stop_string() -> None:
    assert run([b"a", b"\xe2\x82"], [], SamplingParams(stop=("\ufffd",))) == ("a", "\ufffd", 2)


def test_a_leading_space_is_kept_since_an_output_continues_a_prompt() -> None:
    assert run([b" Paris", b" is"], [1], SamplingParams())[0] == " Paris is"


def test_special_tokens_are_skipped_if_asked() -> None:
    tokenizer = FakeTokenizer([b"a\xc3", b"\xa9", b"<eos>"], first_special=2)
    assert TextStream(tokenizer, SamplingParams()).push([0, 2, 1], final=True) == TextDelta("aé", None, 3)
    kept = TextStream(tokenizer, SamplingParams(skip_special_tokens=False)).push([0, 1, 2], final=True)
    assert kept == TextDelta("aé<eos>", None, 3)
    assert TextStream(tokenizer, SamplingParams()).push([0, 99, 1], final=True).text == "aé"


def test_special_tokens_that_mark_something_are_shown_among_skipped_ones() -> None:
    tokenizer = FakeTokenizer([b"a", b"<eos>", b"[CALL]"], first_special=1)
    text_stream = TextStream(tokenizer, SamplingParams(stop=("]a",)), shown_ids={2})
    assert text_stream.push([0, 1, 2]) == TextDelta("a[CALL", None, 3)
    assert text_stream.push([1, 0]) == TextDelta("", "]a", 5)


@pytest.mark.parametrize("last", ["stop", "final"])
def test_nothing_may_be_pushed_after_the_end(last: str) -> None:
    text_stream = stream([b"stop"], SamplingParams(stop=("stop",)))
    text_stream.push([0] if last == "stop" else [], final=last == "final")
    with pytest.raises(AssertionError, match="after the text has ended"):
        text_stream.push([])


PIECES = [b"a", b"b", b"ab", b"ba", b"aab", b"", b" ", "é".encode(), "😀".encode()]
PIECES += [b"\xc3", b"\xa9", b"\xf0\x9f", b"\x98\x80", b"\xc0", b"\x80", b"\xed\xa0", b"\xe2"]


@settings(max_examples=400, deadline=None)
@given(
    tokens=st.lists(st.sampled_from(PIECES), max_size=14),
    stops=st.lists(st.text("ab é😀\ufffd", min_size=1, max_size=4), max_size=4),
    cuts=st.lists(st.integers(0, 14), max_size=5),
    min_tokens=st.integers(0, 6),
    include=st.booleans(),
)
@example(tokens=[b"a", b"b", b"a"], stops=["aba", "b"], cuts=[1], min_tokens=2, include=False)
def test_any_grouping_equals_the_plain_way(
    tokens: list[bytes], stops: list[str], cuts: list[int], min_tokens: int, include: bool
) -> None:
    params = SamplingParams(stop=tuple(stops), min_tokens=min_tokens, include_stop_str_in_output=include)
    expected = plain(tokens, params)
    cuts = sorted(cut for cut in cuts if cut < len(tokens))
    assert run(tokens, cuts, params) == expected
    assert run(tokens, list(range(1, len(tokens))), params) == expected


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.lists(st.sampled_from(PIECES), max_size=14),
    stops=st.lists(st.text("abé", min_size=1, max_size=5), min_size=1, max_size=4),
)
def test_exactly_what_may_become_a_stop_string_is_held_back(tokens: list[bytes], stops: list[str]) -> None:
    # min_tokens beyond the end: no stop, so every prefix of the text can be looked at.
    text_stream = stream(tokens, SamplingParams(stop=tuple(stops), min_tokens=len(tokens)))
    emitted = ""
    for index in range(len(tokens)):
        emitted += text_stream.push([index]).text
        known = codecs.utf_8_decode(b"".join(tokens[: index + 1]), "replace", False)[0]
        prefixes = {stop[:length] for stop in stops for length in range(len(stop))}
        held = max(len(prefix) for prefix in prefixes if known.endswith(prefix))
        assert emitted == known[: len(known) - held]


def test_long_stop_strings_cost_no_more_per_character() -> None:
    """Partial matches a thousand long, broken and begun again: at most a few calls for each character."""
    stops = tuple("a" * (1023 - length) + "b" + "a" * length for length in range(16))
    text = ("a" * 1006 + "c") * 10
    text_stream = stream(
        [text[start : start + 3].encode() for start in range(0, len(text), 3)], SamplingParams(stop=stops)
    )
    num_calls = 0

    def count(_frame: object, _event: str, _argument: object) -> None:
        nonlocal num_calls
        num_calls += 1

    emitted = ""
    previous = sys.getprofile()
    sys.setprofile(count)
    try:
        for index in range(-(-len(text) // 3)):
            emitted += text_stream.push([index], final=False).text
    finally:
        sys.setprofile(previous)
    assert emitted == text
    assert num_calls < 30 * len(text)
