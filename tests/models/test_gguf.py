"""GGUF files: values, names, row order, metadata; and files that are damaged."""

from __future__ import annotations

import contextlib
import struct
import warnings
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pageframe.runtime.chat_template import load_chat_template
from pageframe.runtime.config import RopeScaling
from pageframe.runtime.errors import ModelError
from pageframe.runtime.models.config import load_model_config
from pageframe.runtime.models.gguf import GgufFile
from pageframe.runtime.models.source import resolve_source
from pageframe.runtime.tokenizer import load_tokenizer

from .helpers import hf_logits, hf_model, load, logits_of, write_tiny_gguf
from .test_families import LLAMA_3, PROMPT

QUANTISED = {
    "token_embd": Kind.Q8_0,
    "attn_q": Kind.Q4_0,
    "attn_k": Kind.Q4_1,
    "attn_v": Kind.Q5_0,
    "attn_output": Kind.Q5_1,
    "ffn_gate": Kind.BF16,
    "ffn_up": Kind.F16,
    "ffn_down": Kind.Q8_0,
}


@pytest.mark.parametrize(
    ("kind", "architecture", "changes"),
    [
        ("Llama", "llama", {}),
        ("Llama", "llama", {"attention_bias": True}),
        ("Llama", "llama", {"tie_word_embeddings": True}),
        ("Mistral", "llama", {"sliding_window": None, "head_dim": 32}),
        ("Qwen2", "qwen2", {"tie_word_embeddings": True}),
        ("Qwen3", "qwen3", {"head_dim": 32}),
    ],
)
def test_logits_equal_the_dequantised_model(kind: str, architecture: str, changes: dict, tmp_path: Path) -> None:
    model = hf_model(kind, **changes)
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, model, architecture, kinds=QUANTISED)
    torch.testing.assert_close(logits_of(load(path), PROMPT), hf_logits(model, PROMPT), rtol=0, atol=1e-4)


def test_rope_factors_divide_the_frequencies(tmp_path: Path) -> None:
    """Llama 3.1's files hold the scaling as a tensor of divisors, computed by the converter from the config."""
    model = hf_model("Llama", rope_parameters=LLAMA_3)
    plain = 1.0 / 10_000.0 ** (np.arange(0, 16, 2) / 16)
    divisors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert divisors.max() == pytest.approx(8.0)
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, model, tensors={"rope_freqs.weight": divisors})
    torch.testing.assert_close(logits_of(load(path), PROMPT), hf_logits(model, PROMPT), rtol=0, atol=1e-4)


def test_linear_rope_scaling(tmp_path: Path) -> None:
    model = hf_model("Llama", rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0})
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, model, extra={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    assert load_model_config(resolve_source(str(path))).rope_scaling == RopeScaling("linear", 4.0)
    torch.testing.assert_close(logits_of(load(path), PROMPT), hf_logits(model, PROMPT), rtol=0, atol=1e-4)


def test_config_of_gguf(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, hf_model("Llama"))
    config = load_model_config(resolve_source(str(path)))
    assert (config.family, config.vocab_size, config.num_layers, config.max_position) == ("llama", 64, 3, 256)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert config.bos_token_id == 1
    # tokenizer.ggml.eos_token_id, and <|endoftext|>, a control token that ends texts.
    assert config.eos_token_ids == (2, 0)


def _all_kinds() -> list[Kind]:
    kinds = []
    for kind, (block, size) in gguf.GGML_QUANT_SIZES.items():
        try:
            gguf.quants.dequantize(np.zeros((1, size), np.uint8), kind)
        except NotImplementedError:
            continue
        if block > 1:
            kinds.append(kind)
    return kinds


@pytest.mark.parametrize("kind", _all_kinds(), ids=lambda kind: kind.name)
def test_every_quantised_type_reads_as_the_gguf_package_dequantises_it(kind: Kind, tmp_path: Path) -> None:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 256, (70, 2 * size), np.uint8)
    path = tmp_path / "one.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("some", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(path)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, kind)
    values = file.read_tensor(file.tensors["some"])
    assert values.shape == (70, 2 * block)
    np.testing.assert_array_equal(values, expected)


def test_metadata_of_every_type(tmp_path: Path) -> None:
    path = tmp_path / "keys.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a", 255)
    writer.add_int8("b", -1)
    writer.add_uint16("c", 65_535)
    writer.add_int16("d", -2)
    writer.add_uint32("e", 2**32 - 1)
    writer.add_int32("f", -3)
    writer.add_uint64("g", 2**64 - 1)
    writer.add_int64("h", -4)
    writer.add_float32("i", 0.5)
    writer.add_float64("j", 0.1)
    writer.add_bool("k", True)
    writer.add_string("l", "é🙂")
    writer.add_array("m", ["", "x", "日本"])
    writer.add_array("n", [1, -2, 3])
    writer.add_array("o", [0.5, 1.5])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = GgufFile(path).metadata
    assert [metadata[key] for key in "abcdefgh"] == [255, -1, 65_535, -2, 2**32 - 1, -3, 2**64 - 1, -4]
    assert [metadata[key] for key in "ijklmno"] == [0.5, 0.1, True, "é🙂", ["", "x", "日本"], [1, -2, 3], [0.5, 1.5]]


# --- damaged and unsupported files ---


@pytest.mark.parametrize("length", [5, 2**63, 2**64 - 1])
def test_last_string_past_the_end(length: int, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    key = struct.pack("<Q1sIQ4s", 1, b"a", 8, length, b"abcd")
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + key)
    with pytest.raises(ModelError, match="runs past the end of the file"):
        GgufFile(path)


@pytest.fixture(scope="module")
def tiny_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    model = hf_model("Llama", num_hidden_layers=1, hidden_size=32, intermediate_size=32, max_position_embeddings=64)
    write_tiny_gguf(path, model, kinds={"attn_q": Kind.Q8_0, "ffn_up": Kind.Q4_0})
    return path.read_bytes()


def _load_everything(path: Path) -> None:
    source = resolve_source(str(path))
    load_chat_template(source, load_tokenizer(source))
    load(path)


def test_the_undamaged_file_loads(tiny_bytes: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_bytes)
    _load_everything(path)
    metadata = GgufFile(path).metadata
    assert metadata["llama.block_count"] == 1
    assert metadata["llama.context_length"] == 64


@pytest.mark.parametrize(
    ("start", "replacement", "message"),
    [
        (0, b"GGML", "starts with b'GGML'"),
        (4, b"\x01\0\0\0", "version 1"),
        (4, b"\0\0\0\x03", "big-endian"),
        (8, b"\xff" * 8, "claims 18446744073709551615 tensors"),
        (16, b"\xff" * 8, "claims 18446744073709551615 metadata keys"),
        (24, b"\xff" * 8, "a name of 18446744073709551615 bytes"),
    ],
)
def test_damaged_start(tiny_bytes: bytes, tmp_path: Path, start: int, replacement: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(tiny_bytes[:start] + replacement + tiny_bytes[start + len(replacement) :])
    with pytest.raises(ModelError, match=message) as caught:
        _load_everything(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.1, 0.5, 0.9, 0.999])
def test_truncated_file(tiny_bytes: bytes, tmp_path: Path, fraction: float) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny_bytes[: int(len(tiny_bytes) * fraction)])
    with pytest.raises(ModelError, match=r"truncated|empty") as caught:
        _load_everything(path)
    assert str(path) in str(caught.value)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_files_give_a_model_error_or_load(tiny_bytes: bytes, tmp_path: Path, data: st.DataObject) -> None:
    """Whatever bytes the header holds, nothing but a ModelError comes out."""
    header_end = tiny_bytes.index(b"output_norm") + 100
    mutated = bytearray(tiny_bytes)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(4, header_end))
        size = data.draw(st.sampled_from([1, 1, 4, 8]))
        value = data.draw(st.one_of(st.binary(min_size=size, max_size=size), st.sampled_from([b"\0", b"\xff"])))
        mutated[place : place + len(value)] = value
    path = tmp_path / "mutated.gguf"
    path.write_bytes(mutated)
    with contextlib.suppress(ModelError), warnings.catch_warnings(action="error"):
        _load_everything(path)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"llama.rope.scaling.type": "yarn"}, r"rope\.scaling\.type is 'yarn'"),
        ({"llama.expert_count": 8.0}, r"expert_count is 8\.0"),
        ({"llama.rope.dimension_count": 8.0}, r"rope\.dimension_count is 8\.0"),
        ({"llama.attention.sliding_window": 4096.0}, r"sliding_window is 4096\.0"),
    ],
)
def test_unsupported_metadata(extra: dict[str, float | str], message: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, hf_model("Llama", num_hidden_layers=1), extra=extra)
    with pytest.raises(ModelError, match=message):
        load(path)


def test_unknown_architecture(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"general\.architecture is 'mamba'; supported are llama, qwen2, qwen3"):
        load(path)


def test_tensor_of_an_integer_type(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, hf_model("Llama"), tensors={"rope_freqs.weight": np.ones(8, np.int32)})
    with pytest.raises(ModelError, match=r"'rope_freqs\.weight' is stored as I32"):
        load(path)


def test_leftover_tensor(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, hf_model("Llama"), tensors={"blk.0.attn_q_norm.weight": np.ones(16, np.float32)})
    with pytest.raises(ModelError, match=r"'blk\.0\.attn_q_norm\.weight' is no part of this model"):
        load(path)
