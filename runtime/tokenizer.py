"""Text to token ids and back, from a folder's tokenizer.json or a GGUF file's vocabulary.

Decoding is by bytes: each token has its bytes, and a text is the bytes of its tokens as UTF-8, so a stream can be cut
anywhere. Knows nothing of models, requests or chat formats. No torch.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from pageframe.runtime.errors import InvalidRequestError, ModelError
from pageframe.runtime.models.config import read_json
from pageframe.runtime.models.gguf import GgufFile
from pageframe.runtime.models.source import ModelSource, one_line
from pageframe.runtime.text_end import LLAMA_3_SPLIT, QWEN_2_SPLIT, Cuts
from pageframe.runtime.token_bytes import Decoding, byte_level_bytes, decoding_of

#: Of a text's end that is tried first where its last tokens are wanted: most texts have fewer.
_CHARS_PER_TOKEN = 6

_GGUF_CONTROL = 3
_GGUF_USER_DEFINED = 4


class Tokenizer:
    """A model's tokenizer. Safe to use from several threads.

    Args:
        inner: the `tokenizers` object that encodes; nothing may change it later.
        decoding: how its tokens stand for bytes.
        bos_ids, eos_ids: put before and after a text that is encoded with special tokens, beside what `inner`
            itself adds.
        bos_token, eos_token: the tokens' texts, for chat templates; "" without one.
    """

    vocab_size: int
    """Number of ids it can decode: the highest id, plus 1. A model's own may be larger."""
    add_bos: bool
    """Whether a text encoded with special tokens starts with BOS."""
    longest_token: int
    """Bytes of the longest token: a text of n bytes has at least n / longest_token tokens."""
    strips_leading_space: bool
    """Whether one space at the start of a whole decoded text is no part of it."""

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        decoding: Decoding,
        *,
        bos_ids: Sequence[int] = (),
        eos_ids: Sequence[int] = (),
        bos_token: str = "",
        eos_token: str = "",
    ) -> None:
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.strips_leading_space = decoding.strips_leading_space
        self._inner = inner
        self._decoding = decoding
        self._bos_ids = list(bos_ids)
        self._eos_ids = list(eos_ids)
        added = inner.get_added_tokens_decoder()
        self._special = {token_id: token.content for token_id, token in added.items() if token.special}
        self.vocab_size = max(inner.get_vocab_size(with_added_tokens=False), max(added, default=-1) + 1)
        self._bytes: list[bytes | None] = [None] * self.vocab_size
        bos_id = inner.token_to_id(bos_token) if bos_token else None
        self.add_bos = bos_id is not None and self.encode("", add_special_tokens=True)[:1] == [bos_id]
        self.longest_token = max(len(self.token_bytes(token_id)) for token_id in range(self.vocab_size))
        self._cuts = Cuts(inner)
        self._plain: tokenizers.Tokenizer | None = None
        self._plain_lock = threading.Lock()

    def encode(self, text: str, *, add_special_tokens: bool, parse_special: bool = True) -> list[int]:
        """The token ids of `text`.

        Args:
            add_special_tokens: add what the model wants around a text, such as BOS.
            parse_special: special tokens written in the text are those tokens; else they are ordinary text.

        Raises:
            InvalidRequestError: the text holds half of a surrogate pair, which UTF-8 cannot express, or a character
                that a vocabulary of characters does not have.
        """
        inner = self._inner if parse_special else self._without_special()
        try:
            # Of one text alone, the library holds the interpreter's lock until it is encoded; of a list it does not.
            ids: list[int] = inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except (UnicodeEncodeError, TypeError):
            lone = next((char for char in text if "\ud800" <= char <= "\udfff"), None)
            if lone is None:
                raise
            raise InvalidRequestError(
                f"the text holds a lone surrogate, U+{ord(lone):04X}; it must be valid Unicode"
            ) from None
        except Exception as error:  # the library raises a plain one where a vocabulary without "unknown" lacks a token
            missing = next((char for char in text if inner.token_to_id(char) is None), None)
            if missing is None:
                raise
            raise InvalidRequestError(
                f"the text holds {missing!r} (U+{ord(missing):04X}), for which this model has no token"
            ) from error
        return self._bos_ids + ids + self._eos_ids if add_special_tokens else ids

    def encode_end(self, text: str, num_tokens: int, *, add_special_tokens: bool, max_bytes: int) -> list[int] | None:
        """The last `num_tokens` of the token ids that `encode` gives, or all, where they are fewer.

        No more of the text's end is tokenised than those tokens need, and so that it begins where a cut is sure to
        change none of them.

        Args:
            max_bytes: most that may be tokenised at once. With 2 * num_tokens * `longest_token` there is always enough
                of a text that has places to cut at.

        Returns:
            None where it would take more: the text, or its end, cannot be cut.

        Raises:
            InvalidRequestError: as `encode`.
        """
        num_chars = num_tokens * _CHARS_PER_TOKEN
        num_around = len(self.encode("", add_special_tokens=add_special_tokens))
        while True:
            start = self._cuts.last(text, len(text) - num_chars, len(text) - max_bytes) or 0
            end = text[start:]
            if len(end.encode("utf-8", "replace")) > max_bytes:
                return None
            ids = self.encode(end, add_special_tokens=add_special_tokens)
            # What is added in front of the text is not among the last ones, though it was added to its end, too.
            if start == 0 or len(ids) >= num_tokens + num_around:
                return ids[-num_tokens:]
            num_chars *= 2

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD, ids beyond the vocabulary nothing."""
        if skip_special_tokens:
            ids = [token_id for token_id in ids if token_id not in self._special]
        data = b"".join(map(self.token_bytes, ids))
        if self.strips_leading_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; a special token's are its text's, an id beyond the vocabulary has none."""
        if not 0 <= token_id < self.vocab_size:
            return b""
        data = self._bytes[token_id]
        if data is None:
            token = self._inner.id_to_token(token_id)
            if token_id in self._special:
                data = self._special[token_id].encode()
            else:
                data = self._decoding.token_bytes(token) if token is not None else b""
            self._bytes[token_id] = data
        return data

    def token_text(self, token_id: int) -> str:
        """A token's bytes as text; a part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        """Whether the token marks structure (end of text, a turn) rather than text."""
        return token_id in self._special

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it."""
        token_id: int | None = self._inner.token_to_id(token)
        return token_id

    def _without_special(self) -> tokenizers.Tokenizer:
        """A second encoder that takes special tokens for text: the switch is per object and not thread-safe."""
        with self._plain_lock:
            if self._plain is None:
                self._plain = tokenizers.Tokenizer.from_str(self._inner.to_str())
                self._plain.encode_special_tokens = True
            return self._plain


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """The tokenizer of the model at `source`.

    Raises:
        ModelError: it is missing, damaged, or of a kind that is not supported.
    """
    if source.kind == "gguf":
        return _tokenizer_of_gguf(source.gguf)
    return _tokenizer_of_folder(source.path)


# --- Hugging Face folders ---


def _tokenizer_of_folder(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{folder}: holds no tokenizer.json; other tokenizer files are not supported")
    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for whatever is wrong in the file
        raise ModelError(f"{path}: cannot be read: {one_line(error)}") from error
    inner.no_truncation()
    inner.no_padding()
    config_path = folder / "tokenizer_config.json"
    config = read_json(config_path) if config_path.is_file() else {}
    bos_token = _special_token(folder, config, "bos_token")
    eos_token = _special_token(folder, config, "eos_token")
    # Where tokenizer_config.json asks for these, tokenizer.json may add them already.
    around = inner.encode("", add_special_tokens=True).ids
    bos_id = inner.token_to_id(bos_token) if config.get("add_bos_token") is True else None
    eos_id = inner.token_to_id(eos_token) if config.get("add_eos_token") is True else None
    return Tokenizer(
        inner,
        decoding_of(inner.decoder, path),
        bos_ids=[] if bos_id is None or around[:1] == [bos_id] else [bos_id],
        eos_ids=[] if eos_id is None or around[-1:] == [eos_id] else [eos_id],
        bos_token=bos_token,
        eos_token=eos_token,
    )


def _special_token(folder: Path, config: dict[str, Any], name: str) -> str:
    """A token's text from tokenizer_config.json, else special_tokens_map.json; "" for none."""
    value = config.get(name)
    map_path = folder / "special_tokens_map.json"
    if value is None and map_path.is_file():
        value = read_json(map_path).get(name)
    if isinstance(value, dict):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise ModelError(f"{folder / 'tokenizer_config.json'}: {name} is {value!r}; it must be a text")
    return value or ""


# --- GGUF files ---


@dataclass(frozen=True, slots=True)
class _Splitting:
    """How a byte-level BPE cuts text before merging.

    Args:
        split: a regular expression whose matches are the pieces, or None for GPT-2's own.
        single_digits: each digit is a piece, before the rest.
        whole_words: a piece that is a token is that token, whatever the merges say.
        nfc: text is normalised first.
        add_bos: BOS is added where the file does not say.
    """

    split: str | None = None
    single_digits: bool = False
    whole_words: bool = False
    nfc: bool = False
    add_bos: bool = False


_GPT_2 = _Splitting()
_SMOLLM = _Splitting(single_digits=True)
_LLAMA_3 = _Splitting(LLAMA_3_SPLIT, whole_words=True, add_bos=True)
_QWEN_2 = _Splitting(QWEN_2_SPLIT, nfc=True)
#: `tokenizer.ggml.pre` -> splitting.
_SPLITTINGS = {
    "gpt-2": _GPT_2,
    "smollm": _SMOLLM,
    "llama-bpe": _LLAMA_3,
    "llama3": _LLAMA_3,
    "llama-v3": _LLAMA_3,
    "qwen2": _QWEN_2,
    "deepseek-r1-qwen": _QWEN_2,
}


def _tokenizer_of_gguf(file: GgufFile) -> Tokenizer:
    def get(key: str) -> Any:
        return file.metadata.get(f"tokenizer.ggml.{key}")

    kind, pre = get("model"), get("pre")
    if kind != "gpt2":
        raise ModelError(f"{file.path}: tokenizer.ggml.model is {kind!r}; supported is gpt2 (byte-level BPE)")
    if not isinstance(pre, str) or pre not in _SPLITTINGS:
        raise ModelError(f"{file.path}: tokenizer.ggml.pre is {pre!r}; supported are {', '.join(_SPLITTINGS)}")
    splitting = _SPLITTINGS[pre]
    tokens, types, merges = (_string_list(file, "tokens"), get("token_type"), _string_list(file, "merges"))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise ModelError(f"{file.path}: tokenizer.ggml.token_type must have an entry for each of {len(tokens)} tokens")
    inner = _build_bpe(tokens, merges, splitting, file.path)
    inner.add_tokens(
        [
            AddedToken(token, special=token_type == _GGUF_CONTROL, normalized=False)
            for token, token_type in zip(tokens, types, strict=True)
            if token_type in (_GGUF_CONTROL, _GGUF_USER_DEFINED)
        ]
    )
    ids = {name: _token_index(file, name, len(tokens)) for name in ("bos", "eos")}
    adds_bos = splitting.add_bos if get("add_bos_token") is None else get("add_bos_token") is True
    return Tokenizer(
        inner,
        Decoding(byte_level_bytes),
        bos_ids=ids["bos"] if adds_bos else [],
        eos_ids=ids["eos"] if get("add_eos_token") is True else [],
        bos_token="".join(tokens[token_id] for token_id in ids["bos"]),
        eos_token="".join(tokens[token_id] for token_id in ids["eos"]),
    )


def _build_bpe(tokens: list[str], merges: list[str], splitting: _Splitting, where: Path) -> tokenizers.Tokenizer:
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ModelError(f"{where}: tokenizer.ggml.tokens has {len(tokens) - len(vocabulary)} tokens more than once")
    pairs: list[tuple[str, str]] = []
    for merge in merges:
        left, space, right = merge.partition(" ")
        if not space or " " in right:
            raise ModelError(f"{where}: tokenizer.ggml.merges has {merge!r}, which is not two tokens")
        pairs.append((left, right))
    try:
        model = models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=splitting.whole_words)
    except Exception as error:  # the library raises plain Exception for merges whose tokens do not exist
        raise ModelError(f"{where}: tokenizer.ggml.merges do not fit the tokens: {one_line(error)}") from error
    inner = tokenizers.Tokenizer(model)
    if splitting.nfc:
        inner.normalizer = normalizers.NFC()
    steps: list[Any] = []
    if splitting.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if splitting.split is not None:
        steps.append(pre_tokenizers.Split(Regex(splitting.split), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.split is None))
    inner.pre_tokenizer = pre_tokenizers.Sequence(steps)
    inner.decoder = decoders.ByteLevel()
    return inner


def _string_list(file: GgufFile, key: str) -> list[str]:
    value = file.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise ModelError(f"{file.path}: tokenizer.ggml.{key} is missing or is no list of texts")
    return value


def _token_index(file: GgufFile, name: str, num_tokens: int) -> list[int]:
    """The id of a named token as a list of one, or of none."""
    value = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    if value is None:
        return []
    if type(value) is not int or not 0 <= value < num_tokens:
        raise ModelError(f"{file.path}: tokenizer.ggml.{name}_token_id is {value!r}; it must be below {num_tokens}")
    return [value]
