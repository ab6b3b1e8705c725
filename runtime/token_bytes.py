"""How the tokens of a vocabulary stand for bytes: byte-level BPE's table, SentencePiece's marks, or themselves.

Which it is shows in the decoder that a tokenizer.json names. No torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pageframe.runtime.errors import ModelError

_SPACE_MARK = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class Decoding:
    """How a vocabulary's spelling of tokens stands for bytes."""

    token_bytes: Callable[[str], bytes]
    strips_leading_space: bool = False


def decoding_of(decoder: Any, where: Path) -> Decoding:
    """Recognises the byte table that a tokenizer.json's decoder amounts to.

    Raises:
        ModelError: it is neither byte-level nor SentencePiece's, nor do its tokens stand for themselves.
    """
    state = json.loads(decoder.__getstate__()) if decoder is not None else None
    steps = state["decoders"] if state and state["type"] == "Sequence" else [state]
    kinds = [step["type"] if step else None for step in steps]
    if kinds == ["ByteLevel"]:
        return Decoding(byte_level_bytes)
    if kinds == ["Fuse"]:
        return Decoding(str.encode)
    replaces_mark, strips, falls_back = False, False, False
    for step, kind in zip(steps, kinds, strict=True):
        if kind == "Replace" and step["pattern"] == {"String": _SPACE_MARK} and step["content"] == " ":
            replaces_mark = True
        elif kind == "Metaspace" and step["replacement"] == _SPACE_MARK:
            # It drops every mark of the first token; SentencePiece, which it stands for, drops one.
            replaces_mark, strips = True, step.get("prepend_scheme", "always") != "never"
        elif kind == "Strip" and (step["content"], step["start"], step["stop"]) == (" ", 1, 0):
            strips = True
        elif kind == "ByteFallback":
            falls_back = True
        elif kind != "Fuse":
            raise ModelError(
                f"{where}: its decoder is {kinds}; supported are ByteLevel and SentencePiece's, and Fuse alone"
            )
    if not replaces_mark:
        raise ModelError(
            f"{where}: its decoder is {kinds}; supported are ByteLevel and SentencePiece's, and Fuse alone"
        )
    return Decoding(_sentencepiece_bytes if falls_back else _marked_bytes, strips)


def _byte_level_chars() -> dict[int, int]:
    """Byte-level BPE's printable stand-ins: code point of the stand-in -> byte.

    GPT-2's table (https://github.com/openai/gpt-2, src/encoder.py): printable Latin-1 characters stand for themselves,
    the other bytes, in order, for the code points from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {256 + index: byte for index, byte in enumerate(others)}


_NOT_LATIN_1 = 0x100
#: For str.translate: Latin-1 characters that stand for no byte become one that Latin-1 cannot encode.
_TO_LATIN_1 = dict.fromkeys(range(256), _NOT_LATIN_1) | _byte_level_chars()


def byte_level_bytes(token: str) -> bytes:
    try:
        return token.translate(_TO_LATIN_1).encode("latin-1")
    except UnicodeEncodeError:  # an added token, spelt as it is
        return token.encode()


def _marked_bytes(token: str) -> bytes:
    return token.replace(_SPACE_MARK, " ").encode()


def _sentencepiece_bytes(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else _marked_bytes(token)
