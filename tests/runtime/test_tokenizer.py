"""Tokenizers from folders and GGUF files, against the `tokenizers` library and against known ids."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Inner

from pageframe.runtime.errors import InvalidRequestError, ModelError
from pageframe.runtime.models.source import ModelSource, resolve_source
from pageframe.runtime.tokenizer import Tokenizer, load_tokenizer

# Texts and their ids by the tokenizer.json of HuggingFaceTB/SmolLM2-135M-Instruct (Apache-2.0).
SMOLLM2_IDS = json.loads((Path(__file__).parent / "smollm2_ids.json").read_text())
CORPUS = ["the cat sat on the mat", "hello there, hello world", "naïve café 日本語 🙂", "  spaces   and\nlines\t1234"]


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer(resolve_source("default"))


def folder_tokenizer(folder: Path, inner: Inner, config: dict[str, Any] | None = None) -> Tokenizer:
    folder.mkdir(exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(ModelSource("folder", folder, "tiny"))


def byte_level() -> Inner:
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"], show_progress=False
    )
    inner.train_from_iterator(CORPUS, trainer)
    inner.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return inner


def sentencepiece() -> Inner:
    """As Llama 2's and Mistral's tokenizer.json are: a prefix space, marks for spaces, bytes for the rest."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [*"▁abcdefghijklmnopqrstuvwxyz.,é", "▁t", "▁th", "▁the", "ll", "▁▁"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("l", "l"), ("▁", "▁")]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    inner = Inner(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    return inner


def metaspace() -> Inner:
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    alphabet = [chr(code) for code in range(33, 127)]
    trainer = trainers.BpeTrainer(vocab_size=200, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator(CORPUS, trainer)
    return inner


# --- SmolLM2 out of its GGUF file ---


@pytest.mark.parametrize(("text", "ids"), SMOLLM2_IDS, ids=range(len(SMOLLM2_IDS)))
def test_smollm2_ids(smollm2: Tokenizer, text: str, ids: list[int]) -> None:
    assert smollm2.encode(text, add_special_tokens=True) == ids
    assert smollm2.decode(ids, skip_special_tokens=False) == text


def test_smollm2_facts(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49_152
    assert (smollm2.bos_token, smollm2.eos_token, smollm2.add_bos) == ("<|im_start|>", "<|im_end|>", False)
    assert smollm2.token_to_id("<|im_end|>") == 2
    assert smollm2.token_to_id("no such token") is None
    assert [token_id for token_id in range(49_152) if smollm2.is_special(token_id)] == list(range(17))
    assert smollm2.token_bytes(2) == b"<|im_end|>"
    assert smollm2.token_bytes(49_152) == smollm2.token_bytes(-1) == b""
    assert smollm2.strips_leading_space is False


def test_special_tokens_are_skipped_or_shown(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("<|im_start|>user\nHi<|im_end|>", add_special_tokens=False)
    assert smollm2.decode(ids) == "user\nHi"
    assert smollm2.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nHi<|im_end|>"


def test_special_tokens_in_a_text_can_be_text(smollm2: Tokenizer) -> None:
    text = "a<|im_end|>b"
    ids = smollm2.encode(text, add_special_tokens=False, parse_special=False)
    assert not any(map(smollm2.is_special, ids))
    assert smollm2.decode(ids) == text
    assert 2 in smollm2.encode(text, add_special_tokens=False)


#: SmolLM2's vocabulary lacks the bytes of a few control characters and of the (unassigned) planes 4 to 11.
SMOLLM2_TEXT = st.text(
    st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs"], exclude_characters="\x04\x06\x13\x14\x16\x1d")
)


@settings(deadline=None)
@given(text=SMOLLM2_TEXT)
def test_decode_undoes_encode(smollm2: Tokenizer, text: str) -> None:
    ids = smollm2.encode(text, add_special_tokens=False, parse_special=False)
    assert smollm2.decode(ids) == text
    assert b"".join(map(smollm2.token_bytes, ids)) == text.encode()


def test_a_part_of_a_character_shows_as_a_replacement(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("🦩", add_special_tokens=False)
    assert len(ids) > 1
    assert "\ufffd" in smollm2.token_text(ids[0])
    assert smollm2.decode(ids[:1]) == "\ufffd"
    assert smollm2.decode(ids) == "🦩"


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\ud83d \ude42"])
@pytest.mark.parametrize("parse_special", [True, False])
def test_lone_surrogates_are_the_requests_error(smollm2: Tokenizer, text: str, parse_special: bool) -> None:
    with pytest.raises(InvalidRequestError, match=r"lone surrogate, U\+D[8-F]"):
        smollm2.encode(text, add_special_tokens=True, parse_special=parse_special)


def test_threads_agree(smollm2: Tokenizer) -> None:
    texts = [text for text, _ in SMOLLM2_IDS] * 5
    expected = [ids for _, ids in SMOLLM2_IDS] * 5
    plain = [smollm2.encode(text, add_special_tokens=False, parse_special=False) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        parsed = pool.map(lambda text: smollm2.encode(text, add_special_tokens=True), texts)
        unparsed = pool.map(lambda text: smollm2.encode(text, add_special_tokens=False, parse_special=False), texts)
        assert list(parsed) == expected
        assert list(unparsed) == plain


# --- tokenizer.json ---

ORACLE_TEXT = st.text(
    st.one_of(st.sampled_from("the catll.,é▁ \n日🙂\u0301<>/s0xA"), st.characters(exclude_categories=["Cs"])),
    max_size=40,
)


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_decode_equals_the_library(make: Callable[[], Inner], tmp_path: Path) -> None:
    inner = make()
    tokenizer = folder_tokenizer(tmp_path, inner)

    @settings(max_examples=200, deadline=None)
    @given(ORACLE_TEXT, st.integers(0, 5), st.booleans())
    def check(text: str, cut: int, skip: bool) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == inner.encode(text).ids
        expected = inner.decode(ids[cut:], skip_special_tokens=skip)
        if "\ufffd" not in expected:  # the cut may have left part of a character
            assert tokenizer.decode(ids[cut:], skip_special_tokens=skip) == expected

    check()


def test_metaspace_decodes_as_the_library(tmp_path: Path) -> None:
    inner = metaspace()
    tokenizer = folder_tokenizer(tmp_path, inner)
    assert tokenizer.strips_leading_space
    for text in ("the cat", "hello  world", "a b c, the mat.", "x"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == inner.decode(ids) == text


def test_sentencepiece_bytes(tmp_path: Path) -> None:
    tokenizer = folder_tokenizer(tmp_path, sentencepiece())
    assert tokenizer.strips_leading_space
    ids = tokenizer.encode("the é🙂", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == " the é🙂".encode()
    assert tokenizer.decode(ids) == "the é🙂"
    assert tokenizer.token_bytes(3 + 0xF0) == b"\xf0"
    assert tokenizer.decode([3 + 0xF0, 3 + 0x9F]) == "\ufffd"


def test_byte_tokens_are_text_without_byte_fallback(tmp_path: Path) -> None:
    inner = Inner(models.WordLevel({"<0x41>": 0, "▁a": 1}, unk_token="<0x41>"))
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    tokenizer = folder_tokenizer(tmp_path, inner)
    assert tokenizer.token_bytes(0) == b"<0x41>"
    assert tokenizer.decode([1, 1]) == " a a" == inner.decode([1, 1])


def test_added_tokens_beyond_the_vocabulary(tmp_path: Path) -> None:
    inner = byte_level()
    tokenizer = folder_tokenizer(tmp_path, inner)
    think = inner.token_to_id("<think>")
    assert tokenizer.vocab_size == think + 1
    assert tokenizer.encode("<think>", add_special_tokens=False) == [think]
    assert not tokenizer.is_special(think)
    assert tokenizer.decode([think]) == "<think>"
    assert tokenizer.encode("<think>", add_special_tokens=False, parse_special=False) == [think]


def test_bos_by_post_processor(tmp_path: Path) -> None:
    inner = byte_level()
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", inner.token_to_id("<s>"))]
    )
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": True}
    tokenizer = folder_tokenizer(tmp_path, inner, config)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.add_bos) == ("<s>", "</s>", True)
    ids = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode("the", add_special_tokens=True) == [inner.token_to_id("<s>"), *ids]


def test_bos_and_eos_by_tokenizer_config(tmp_path: Path) -> None:
    inner = byte_level()
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True}
    tokenizer = folder_tokenizer(tmp_path, inner, config)
    bos, eos = inner.token_to_id("<s>"), inner.token_to_id("</s>")
    ids = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.add_bos
    assert tokenizer.encode("the", add_special_tokens=True) == [bos, *ids, eos]


def test_truncation_and_padding_in_the_file_are_off(tmp_path: Path) -> None:
    inner = byte_level()
    expected = inner.encode("hello there").ids
    inner.enable_truncation(2)
    inner.enable_padding(length=50)
    assert folder_tokenizer(tmp_path, inner).encode("hello there", add_special_tokens=True) == expected


def test_special_tokens_map_names_bos(tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<s>"}}))
    assert folder_tokenizer(tmp_path, byte_level()).bos_token == "<s>"


@pytest.mark.parametrize(
    "decoder",
    [None, decoders.WordPiece(), decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]), decoders.BPEDecoder()],
)
def test_other_decoders_are_refused(decoder: Any, tmp_path: Path) -> None:
    inner = byte_level()
    if decoder is None:
        inner = Inner(models.BPE())
    else:
        inner.decoder = decoder
    with pytest.raises(ModelError, match=r"tokenizer\.json: its decoder is .*supported are ByteLevel and Sentence"):
        folder_tokenizer(tmp_path, inner)


def test_missing_or_damaged_tokenizer_json(tmp_path: Path) -> None:
    source = ModelSource("folder", tmp_path, "tiny")
    with pytest.raises(ModelError, match=r"holds no tokenizer\.json"):
        load_tokenizer(source)
    (tmp_path / "tokenizer.json").write_text('{"model": \n')
    with pytest.raises(ModelError, match=r"tokenizer\.json: cannot be read") as caught:
        load_tokenizer(source)
    assert "\n" not in str(caught.value)


# --- GGUF vocabularies ---

CONTROL = ["<|begin|>", "<|end|>"]
MERGES = ["1 2", "12 3", "123 4", "Ġ a", "a b", "' s", "' S", "Ċ Ċ", "ab c"]


def write_vocabulary(path: Path, pre: str = "gpt-2", model: str = "gpt2", **changes: Any) -> Path:
    """A byte-level vocabulary: all 256 bytes, the merges' results, "xyz" without a merge, and control tokens."""
    tokens = [*CONTROL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
    tokens += ["xyz", "<tool use>"]
    types = [3, 3] + [1] * (len(tokens) - 3) + [4]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(changes.pop("tokens", tokens))
    writer.add_token_types(changes.pop("types", types))
    writer.add_token_merges(changes.pop("merges", MERGES))
    writer.add_bos_token_id(changes.pop("bos", 0))
    writer.add_eos_token_id(1)
    for key, value in changes.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def pieces(path: Path, text: str) -> list[str]:
    tokenizer = load_tokenizer(ModelSource("gguf", path, "tiny"))
    return [tokenizer.token_text(token_id) for token_id in tokenizer.encode(text, add_special_tokens=False)]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "1234", ["1234"]),
        ("smollm", "1234", ["1", "2", "3", "4"]),
        ("qwen2", "1234", ["1", "2", "3", "4"]),
        ("llama-bpe", "1234", ["123", "4"]),
        ("gpt-2", "xyz", ["x", "y", "z"]),
        ("qwen2", "xyz", ["x", "y", "z"]),
        ("llama-bpe", "xyz", ["xyz"]),
        ("gpt-2", "x's", ["x", "'s"]),
        ("gpt-2", "x'S", ["x", "'", "S"]),
        ("llama-bpe", "x'S", ["x", "'S"]),
        ("qwen2", "x'S", ["x", "'S"]),
        ("gpt-2", "-ab", ["-", "ab"]),
        ("gpt-2", "x  ab", ["x", " ", " a", "b"]),
        ("gpt-2", "abc\n\n", ["abc", "\n\n"]),
        ("llama-bpe", "?\n\nab", ["?", "\n\n", "ab"]),
        ("qwen2", "e\u0301", ["\ufffd", "\ufffd"]),  # composed to é: two bytes
        ("llama-bpe", "e\u0301", ["e", "\ufffd", "\ufffd"]),
        ("gpt-2", "<tool use><|end|>", ["<tool use>", "<|end|>"]),
    ],
)
def test_splitting(pre: str, text: str, expected: list[str], tmp_path: Path) -> None:
    assert pieces(write_vocabulary(tmp_path / "vocab.gguf", pre), text) == expected


def test_gguf_control_tokens_are_special_and_user_defined_ones_are_not(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(ModelSource("gguf", write_vocabulary(tmp_path / "vocab.gguf"), "tiny"))
    ids = tokenizer.encode("<tool use>a<|end|>", add_special_tokens=False)
    assert tokenizer.decode(ids) == "<tool use>a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<tool use>a<|end|>"
    assert tokenizer.encode("<tool use>a", add_special_tokens=False, parse_special=False) == ids[:2]


def test_gguf_bos(tmp_path: Path) -> None:
    def ids(**changes: Any) -> list[int]:
        path = write_vocabulary(tmp_path / "vocab.gguf", **changes)
        return load_tokenizer(ModelSource("gguf", path, "tiny")).encode("", add_special_tokens=True)

    assert ids() == []
    assert ids(add_bos_token=True, add_eos_token=True) == [0, 1]
    assert ids(pre="llama-bpe") == [0]
    assert ids(pre="llama-bpe", add_bos_token=False) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "default"}, r"tokenizer\.ggml\.pre is 'default'; supported are gpt-2, smollm, llama-bpe"),
        ({"pre": "tekken"}, r"tokenizer\.ggml\.pre is 'tekken'"),
        ({"model": "llama"}, r"tokenizer\.ggml\.model is 'llama'; supported is gpt2"),
        ({"merges": ["a b", "q zzz"]}, r"tokenizer\.ggml\.merges do not fit the tokens"),
        ({"merges": ["a b", "abc"]}, r"tokenizer\.ggml\.merges has 'abc', which is not two tokens"),
        ({"tokens": ["a", "b", "a"], "types": [1, 1, 1], "merges": ["a b"]}, "1 tokens more than once"),
        ({"types": [1, 1]}, r"token_type must have an entry for each of \d+ tokens"),
        ({"bos": 99_999}, "bos_token_id is 99999; it must be below"),
    ],
)
def test_unsupported_gguf_vocabularies(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "vocab.gguf", **changes)
    with pytest.raises(ModelError, match=message) as caught:
        load_tokenizer(ModelSource("gguf", path, "tiny"))
    assert str(path) in str(caught.value)
