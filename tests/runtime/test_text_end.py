"""The last tokens of a text from its end alone: they must be those of the whole text, whatever stands in it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from pageframe.runtime.models.source import ModelSource, resolve_source
from pageframe.runtime.text_end import LLAMA_3_SPLIT, QWEN_2_SPLIT, Cuts
from pageframe.runtime.tokenizer import Tokenizer, load_tokenizer

SENTENCES = (
    "Don't say \"it's 1,234.50\", she'll go...\r\n\n I'm 12 a's.  日本語、です。naïve Привет мир! <|x|> x_y (a)b"
)
#: What texts are made of: words, contractions, white space of every kind, digits, marks, special tokens, parts of them.
FRAGMENTS = [
    "a", "the", " the", "It", "'s", "'S", "n't", "'", "''ll", " ", "  ", "   ", "\n", "\r\n", "\n\n ", "\t", "\u00a0",
    "\u3000", "\u2028", "\x1c", "\x85", "1", "12", "2024", ".", "...", "?!", "-", "_", "(", "x)", "#", "é", "e\u0301",
    "\u0301", "naïve", "Привет", "мир", "日本", "語、", "。", "\uff0c", "ｶﾞ", "か\u3099", "한글", "각", "ไทย", "عرب",
    "🙂", "👩\u200d💻", "²", "Ⅷ", "٣", "½", "\u212b", "\ufeff", "<|im_start|>", "<|im_end|>", "<|im_", "|>",
    "<|endoftext|>", ".\n", "-\n\n", "<tag>", "K", "\u017f",
]  # fmt: skip
NUM_TEXTS = 400


def random_text(rng: random.Random, num_fragments: int) -> str:
    """Fragments, and now and then any character at all but half of a surrogate pair."""
    parts = rng.choices(FRAGMENTS, k=num_fragments)
    return "".join(
        part if rng.random() < 0.9 else chr(rng.choice([rng.randrange(0x3000), rng.randrange(0xE000, 0x20000)]))
        for part in parts
    )


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer(resolve_source("default"))


def trained(split: str | None, *, nfc: bool = False, added: str = "<|im_end|>") -> tokenizers.Tokenizer:
    """Byte-level BPE with many merges, pieces cut by `split`, or by GPT-2's expression."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    if split is not None:
        steps = [pre_tokenizers.Split(Regex(split), "isolated"), inner.pre_tokenizer]
        inner.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if nfc:
        inner.normalizer = normalizers.NFC()
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator([SENTENCES, "".join(FRAGMENTS), " ".join(FRAGMENTS)] * 3, trainer)
    inner.add_tokens([AddedToken(added, special=True, normalized=False)])
    return inner


def load(folder: Path, inner: tokenizers.Tokenizer) -> Tokenizer:
    inner.save(str(folder / "tokenizer.json"))
    return load_tokenizer(ModelSource("folder", folder, "tiny"))


def places_to_cut(cuts: Cuts, text: str) -> list[int]:
    return [place for place in range(len(text)) if cuts.last(text, place, place - 1) == place]


KINDS = [(None, False), (LLAMA_3_SPLIT, False), (QWEN_2_SPLIT, True)]


@pytest.mark.parametrize(("split", "nfc"), KINDS, ids=["gpt-2", "llama-3", "qwen-2"])
def test_a_cut_changes_no_token_of_either_part(split: str | None, nfc: bool) -> None:
    inner = trained(split, nfc=nfc)
    cuts, rng = Cuts(inner), random.Random(5)
    num_places = 0

    def ids(text: str) -> list[int]:
        found: list[int] = inner.encode(text, add_special_tokens=False).ids
        return found

    for text in (SENTENCES, " ".join(FRAGMENTS), *(random_text(rng, 40) for _ in range(NUM_TEXTS))):
        whole = ids(text)
        for place in places_to_cut(cuts, text):
            num_places += 1
            assert ids(text[:place]) + ids(text[place:]) == whole, (text, place)
        assert cuts.last(text, len(text) - 1, -5000) == max(places_to_cut(cuts, text), default=None)
    assert num_places > 4 * NUM_TEXTS


def test_the_default_models_last_tokens_are_those_of_the_whole_text(smollm2: Tokenizer) -> None:
    rng = random.Random(6)
    for _ in range(NUM_TEXTS):
        text = random_text(rng, 300)
        whole = smollm2.encode(text, add_special_tokens=True)
        for num_tokens in (1, rng.randint(2, 50)):
            found = smollm2.encode_end(text, num_tokens, add_special_tokens=True, max_bytes=10**6)
            assert found == whole[-num_tokens:], (text, num_tokens)


LONG_ENDS = ["x" * 5000, "x" * 5000 + " y", "日本語" * 2000, "0123456789" * 500, "ab " * 3000, "," * 999]


@pytest.mark.parametrize("num_tokens", [1, 7, 100, 5000])
@pytest.mark.parametrize("end", LONG_ENDS)
def test_long_runs_without_spaces(smollm2: Tokenizer, end: str, num_tokens: int) -> None:
    text = "The quick brown fox, 1234 times. " * 300 + end
    whole = smollm2.encode(text, add_special_tokens=False)
    found = smollm2.encode_end(text, num_tokens, add_special_tokens=False, max_bytes=10**6)
    assert found == whole[-num_tokens:]


def test_of_a_long_text_only_the_end_is_tokenised(smollm2: Tokenizer) -> None:
    sentence = "The quick brown fox, 1234 times.\n"
    text = sentence * (16 * 2**20 // len(sentence))
    few = smollm2.encode(sentence * 100, add_special_tokens=False)
    assert smollm2.encode_end(text, 1000, add_special_tokens=False, max_bytes=20_000) == few[-1000:]
    # Tokens that are long are reached by longer and longer ends.
    text = "y " + (" " * 40 + "x") * 20_000
    few = smollm2.encode("y " + (" " * 40 + "x") * 2000, add_special_tokens=False)
    assert smollm2.encode_end(text, 300, add_special_tokens=False, max_bytes=100_000) == few[-300:]


@pytest.mark.parametrize("run", ["x", " ", ",", "日"])
def test_an_end_that_cannot_be_cut_is_tokenised_up_to_its_limit(smollm2: Tokenizer, run: str) -> None:
    size = len(run.encode())
    text = "a " + run * 10_000
    limit = 10_000 * size + 1
    whole = smollm2.encode(text, add_special_tokens=False)
    assert smollm2.encode_end(text, 3, add_special_tokens=False, max_bytes=limit + 1) == whole[-3:]
    assert smollm2.encode_end("a " * 9 + text, 3, add_special_tokens=False, max_bytes=limit - 2 * size) is None
    assert smollm2.encode_end(run * 10_000, 3, add_special_tokens=False, max_bytes=limit - 2) is None


def test_what_is_added_around_a_text_is_added_to_its_end(tmp_path: Path) -> None:
    mark = "<|a_much_longer_mark|>"
    inner = trained(None, added=mark)
    inner.post_processor = processors.TemplateProcessing(
        single="a $A b", special_tokens=[(name, inner.token_to_id(name)) for name in "ab"]
    )
    tokenizer = load(tmp_path, inner)
    for text in ("", "a", "It's the end. " * 20, f"{mark} " * 20):
        whole = tokenizer.encode(text, add_special_tokens=True)
        for num_tokens in range(1, len(whole) + 2):
            found = tokenizer.encode_end(text, num_tokens, add_special_tokens=True, max_bytes=1000)
            assert found == whole[-num_tokens:]


def unknown_split() -> tokenizers.Tokenizer:
    return trained(r"[\s\S]{1,5}")


def added_with_space() -> tokenizers.Tokenizer:
    return trained(None, added="a b")


def eats_spaces() -> tokenizers.Tokenizer:
    inner = trained(None)
    inner.add_tokens([AddedToken("<mask>", rstrip=True, normalized=False)])
    return inner


def whole_words() -> tokenizers.Tokenizer:
    inner = trained(None)
    inner.add_tokens([AddedToken("mask", single_word=True, normalized=False)])
    return inner


def lowers() -> tokenizers.Tokenizer:
    inner = trained(None)
    inner.normalizer = normalizers.Lowercase()
    return inner


def prefixed() -> tokenizers.Tokenizer:
    inner = trained(None)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return inner


def no_split() -> tokenizers.Tokenizer:
    inner = trained(None)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return inner


@pytest.mark.parametrize(
    "make", [unknown_split, added_with_space, eats_spaces, whole_words, lowers, prefixed, no_split]
)
def test_a_tokenizer_that_is_not_known_has_no_place_to_cut(make: object, tmp_path: Path) -> None:
    assert callable(make)
    inner = make()
    assert places_to_cut(Cuts(inner), SENTENCES) == []
    tokenizer = load(tmp_path, inner)
    whole = tokenizer.encode(SENTENCES, add_special_tokens=False)
    num_bytes = len(SENTENCES.encode())
    assert tokenizer.encode_end(SENTENCES, 2, add_special_tokens=False, max_bytes=num_bytes) == whole[-2:]
    assert tokenizer.encode_end(SENTENCES, 2, add_special_tokens=False, max_bytes=num_bytes - 1) is None


def test_an_added_token_with_a_letter_before_a_mark_leaves_the_spaces() -> None:
    cuts = Cuts(trained(None, added="a.b"))
    assert places_to_cut(cuts, "one, two. 3") == [4, 9]
    assert places_to_cut(Cuts(trained(None)), "one, two. 3") == [3, 4, 8, 9]
