"""config.json and generation_config.json: what is read, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pageframe.runtime.config import ModelConfig, RopeScaling
from pageframe.runtime.errors import ModelError
from pageframe.runtime.models.config import load_model_config, sampling_defaults
from pageframe.runtime.models.source import resolve_source

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def write(folder: Path, **changes: Any) -> Path:
    values = {key: value for key, value in (LLAMA | changes).items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def read(folder: Path) -> ModelConfig:
    return load_model_config(resolve_source(str(folder)))


def test_plain_llama(tmp_path: Path) -> None:
    assert read(write(tmp_path)) == ModelConfig(
        family="llama",
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_layers=3,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        max_position=256,
        norm_eps=1e-5,
        rope_theta=10_000.0,
        eos_token_ids=(2,),
    )


def test_llama_3_rope(tmp_path: Path) -> None:
    config = read(write(tmp_path, rope_theta=500_000, rope_scaling=LLAMA_3))
    assert config.rope_theta == 500_000.0
    assert config.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)


def test_end_of_text_ids_come_from_generation_config_first(tmp_path: Path) -> None:
    write(tmp_path, eos_token_id=[5, 7])
    assert read(tmp_path).eos_token_ids == (5, 7)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 5, 9]}))
    assert read(tmp_path).eos_token_ids == (9, 5)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
    assert read(tmp_path).eos_token_ids == (5, 7)
    assert read(write(tmp_path, eos_token_id=None)).eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 8}, (8, 8, 8)),
        ({"model_type": "mistral", "sliding_window": None}, ()),
        ({"model_type": "mistral"}, (4096, 4096, 4096)),
        ({"model_type": "qwen2", "sliding_window": 8}, ()),
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2},
         (None, None, 8)),
        ({"model_type": "qwen3", "sliding_window": 8, "use_sliding_window": True,
          "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, (8, None, 8)),
    ],
)  # fmt: skip
def test_windows(changes: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path) -> None:
    assert read(write(tmp_path, num_key_value_heads=4, **changes)).windows == windows


@pytest.mark.parametrize(
    ("windows", "longest"),
    [
        ((), None),
        ((8, 8, 8), 8),
        ((8, 32, 16), 32),
        ((8, None, 8), None),
        ((None, None, None), None),
        # Layers without a word about theirs see everything.
        ((8, 8), None),
    ],
)
def test_the_longest_window_is_none_where_a_layer_sees_everything(
    windows: tuple[int | None, ...], longest: int | None, tmp_path: Path
) -> None:
    """What no layer looks at any more may be given back; 3 layers."""
    assert read(write(tmp_path)).replace(windows=windows).longest_window == longest


def test_family_defaults(tmp_path: Path) -> None:
    qwen2 = read(write(tmp_path, model_type="qwen2", num_key_value_heads=2))
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm, qwen2.head_dim) == (True, False, False, 16)
    qwen3 = read(write(tmp_path, model_type="qwen3", num_key_value_heads=2))
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.qk_norm, qwen3.head_dim) == (False, False, True, 128)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gptj"}, "model_type is 'gptj'; supported are llama, mistral, qwen2, qwen3, gpt2"),
        ({"model_type": "absent"}, "model_type is None"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type is 'yarn'; supported are"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_parameters.rope_type is 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": -1.0}}, "factor is -1.0"),
        ({"rope_scaling": LLAMA_3 | {"low_freq_factor": 4.0}}, "low_freq_factor is 4.0; it must be below"),
        ({"rope_scaling": []}, "rope_scaling is \\[\\]"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "for all layers alike"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is .*not supported"),
        ({"sliding_window": 128}, "sliding_window is 128"),
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias is True"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot be shared among 3 KV heads"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"hidden_size": "absent"}, "hidden_size is missing"),
        ({"hidden_size": 64.0}, "hidden_size is 64.0"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; .* 10000"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings is 10"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id is"),
        ({"eos_token_id": 64}, "the end-of-text id 64 is not below vocab_size"),
        ({"model_type": "qwen2", "num_key_value_heads": 4, "use_sliding_window": True, "layer_types": ["full"] * 3},
         "layer_types is"),
        ({"model_type": "qwen2", "num_key_value_heads": 4, "use_sliding_window": True, "layer_types": [[]] * 3},
         "layer_types is"),
    ],
)  # fmt: skip
def test_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path, **changes)
    with pytest.raises(ModelError, match=message) as caught:
        read(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", "nul", "\ufeff{}", "[" * 100_000])
def test_config_that_is_no_json_object(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        read(tmp_path)


def test_sampling_defaults(tmp_path: Path) -> None:
    source = resolve_source(str(write(tmp_path)))
    assert sampling_defaults(source) == {}
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"temperature": 1, "top_p": 0.9, "top_k": 20, "min_p": None, "max_length": 5}))
    assert sampling_defaults(source) == {"temperature": 1.0, "top_p": 0.9, "top_k": 20}
    path.write_text(json.dumps({"temperature": "hot"}))
    with pytest.raises(ModelError, match="temperature is 'hot'"):
        sampling_defaults(source)
