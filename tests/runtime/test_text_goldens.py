"""Real tokenizers and llama.cpp's edge-case strings: ids as published, and text out of a stream as it went in.

Needs the folder that PAGEFRAME_DATA names, with tokenizers/ in it:

    PAGEFRAME_DATA=…/data pytest -m long tests/runtime/test_text_goldens.py
"""

from __future__ import annotations

import lzma
import os
import random
import shutil
from pathlib import Path

import pytest

from pageframe.runtime.models.source import ModelSource
from pageframe.runtime.request import SamplingParams
from pageframe.runtime.text import TextStream
from pageframe.runtime.tokenizer import Tokenizer, load_tokenizer

DATA = Path(os.environ.get("PAGEFRAME_DATA", "")) / "tokenizers"
SEED = int(os.environ.get("PAGEFRAME_TEST_SEED", "20240607"))
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif("PAGEFRAME_DATA" not in os.environ, reason="PAGEFRAME_DATA names no folder with tokenizers/"),
]
NAMES = ["smollm2", "mistral-v3-spm", "qwen3"]


def tokenizer_of(name: str, folder: Path) -> Tokenizer:
    for path in (DATA / name).iterdir():
        if path.suffix == ".xz":
            (folder / path.stem).write_bytes(lzma.decompress(path.read_bytes()))
        else:
            shutil.copy(path, folder)
    return load_tokenizer(ModelSource("folder", folder, name))


def goldens(name: str) -> list[tuple[str, list[int]]]:
    """Strings and the ids that llama.cpp's own tests expect of them."""
    path = DATA / "llama.cpp-goldens" / f"ggml-vocab-{name}.gguf.inp"
    # Read as bytes: line ends of every kind are part of the strings.
    texts = path.read_bytes().decode().removesuffix("\n__ggml_vocab_test__\n").split("\n__ggml_vocab_test__\n")
    lines = path.with_suffix(".out").read_text().splitlines()
    return [(text, list(map(int, line.split()))) for text, line in zip(texts, lines, strict=True)]


def test_qwens_ids_are_the_published_ones(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("qwen3", tmp_path)
    expected = goldens("qwen2")
    assert len(expected) > 40
    assert [(text, tokenizer.encode(text, add_special_tokens=False)) for text, _ in expected] == expected


@pytest.mark.parametrize("name", NAMES)
def test_texts_come_out_of_a_stream_as_they_went_in(name: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(name, tmp_path)
    rng = random.Random(SEED)
    texts = [text for text, _ in goldens("qwen2")]
    for text in [*texts, "".join(texts), *("".join(rng.sample(texts, 5)) for _ in range(200))]:
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        stream, out = TextStream(tokenizer, SamplingParams()), ""
        while ids:
            size = rng.randint(1, 4)
            out += stream.push(ids[:size]).text
            del ids[:size]
        out += stream.push([], final=True).text
        # An output continues a prompt: the space that SentencePiece puts in front of a text is part of it.
        assert out == " " * (tokenizer.strips_leading_space and bool(text)) + text
