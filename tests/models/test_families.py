"""Every family in a Hugging Face folder, against transformers in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from .helpers import hf_logits, hf_model, load, logits_of

LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama without GQA": ("Llama", {"num_key_value_heads": 4}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3.1": ("Llama", {"rope_parameters": LLAMA_3, "tie_word_embeddings": True}),
    "llama linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}}),
    "mistral": ("Mistral", {"sliding_window": 8, "head_dim": 32}),
    "mistral without a window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2 windowed": ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3 with biases": ("Qwen3", {"head_dim": 16, "attention_bias": True, "use_sliding_window": True,
                                    "sliding_window": 8,
                                    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
}  # fmt: skip
PROMPT = torch.randint(0, 64, (100,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    kind, changes = CASES[case]
    model = hf_model(kind, **changes)
    model.save_pretrained(tmp_path)
    expected = hf_logits(model, PROMPT)
    decoder = load(tmp_path)
    torch.testing.assert_close(logits_of(decoder, PROMPT), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(logits_of(decoder, PROMPT, chunk=7), expected, rtol=0, atol=1e-4)


def test_one_token_at_a_time_equals_transformers(tmp_path: Path) -> None:
    model = hf_model("Qwen3", head_dim=32)
    model.save_pretrained(tmp_path)
    result = logits_of(load(tmp_path), PROMPT[:40], chunk=1)
    torch.testing.assert_close(result, hf_logits(model, PROMPT[:40]), rtol=0, atol=1e-4)


def test_sharded_folder_equals_single_file(tmp_path: Path) -> None:
    model = hf_model("Llama")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    torch.testing.assert_close(
        logits_of(load(tmp_path / "sharded"), PROMPT), hf_logits(model, PROMPT), rtol=0, atol=1e-4
    )


def test_old_config_keys_mean_the_same(tmp_path: Path) -> None:
    """`rope_theta` and `rope_scaling` beside each other, as files from before transformers 5 have them."""
    import json

    model = hf_model("Llama", rope_parameters=LLAMA_3 | {"rope_theta": 500_000.0})
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    values["rope_scaling"] = values.pop("rope_parameters")
    values["rope_theta"] = values["rope_scaling"].pop("rope_theta")
    path.write_text(json.dumps(values))
    torch.testing.assert_close(logits_of(load(tmp_path), PROMPT), hf_logits(model, PROMPT), rtol=0, atol=1e-4)


def test_bf16_storage_rounds_matrices_and_computes_in_float32(tmp_path: Path) -> None:
    model = hf_model("Llama")
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(parameter.bfloat16())
    decoder = load(tmp_path, storage_dtype=torch.bfloat16)
    torch.testing.assert_close(logits_of(decoder, PROMPT), hf_logits(model, PROMPT), rtol=0, atol=1e-4)
