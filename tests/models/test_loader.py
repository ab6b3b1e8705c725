"""Weight files that are incomplete, damaged or of another model; progress; and the weight objects."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from pageframe.runtime.config import ModelConfig
from pageframe.runtime.errors import ModelError
from pageframe.runtime.models import weights as weights_module
from pageframe.runtime.models.config import load_model_config
from pageframe.runtime.models.decoder import Decoder
from pageframe.runtime.models.loader import load_decoder
from pageframe.runtime.models.source import resolve_source
from pageframe.runtime.models.weights import DenseWeight, RmsNorm

from .helpers import CPU, hf_logits, hf_model, load, logits_of

PROMPT = list(range(40))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    hf_model("Llama").save_pretrained(tmp_path)
    return tmp_path


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replaces, adds or (None) removes tensors; "__" stands for "." in their names."""
    path = folder / "model.safetensors"
    stored = load_file(path)
    for name, tensor in tensors.items():
        stored.pop(name.replace("__", "."), None)
        if tensor is not None:
            stored[name.replace("__", ".")] = tensor
    save_file(stored, path)


def refuse(folder: Path, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_tensor(folder: Path) -> None:
    change(folder, model__layers__1__mlp__up_proj__weight=None)
    refuse(folder, r"tensor 'model\.layers\.1\.mlp\.up_proj\.weight' is missing")


def test_wrong_shape(folder: Path) -> None:
    change(folder, model__layers__0__self_attn__k_proj__weight=torch.zeros(64, 64))
    refuse(folder, r"k_proj\.weight' has shape \[64, 64\]; the configuration asks for \[32, 64\]")


def test_unknown_tensor(folder: Path) -> None:
    change(folder, model__layers__0__self_attn__q_proj__bias=torch.zeros(64))
    refuse(folder, r"tensor 'model\.layers\.0\.self_attn\.q_proj\.bias' is no part of this model")


def test_integer_tensor(folder: Path) -> None:
    change(folder, model__norm__weight=torch.ones(64, dtype=torch.int64))
    refuse(folder, r"'model\.norm\.weight' is torch\.int64")


def test_old_rotary_tensors_and_a_tied_models_output_are_ignored(tmp_path: Path) -> None:
    model = hf_model("Llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    change(
        tmp_path,
        lm_head__weight=torch.zeros(64, 64),
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8),
    )
    torch.testing.assert_close(logits_of(load(tmp_path), PROMPT), hf_logits(model, PROMPT), rtol=0, atol=1e-4)


@pytest.mark.parametrize("keep", [0, 4, 100, 10_000])
def test_truncated_safetensors(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refuse(folder, r"model\.safetensors: cannot be read as safetensors")


def test_garbage_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 1000)
    refuse(folder, r"model\.safetensors: cannot be read as safetensors")


def test_pickles_are_not_loaded(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    refuse(folder, r"holds no \*\.safetensors$")
    (folder / "pytorch_model.bin").write_bytes(b"x")
    refuse(folder, r"holds no \*\.safetensors; pytorch_model\.bin is a pickle, which is never loaded")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "gone.safetensors"}}, r"gone\.safetensors: is missing, but model\.safetensors\.index"),
        ({"weight_map": {"a": "../up.safetensors"}}, r"names '\.\./up\.safetensors', which is no plain file name"),
        ({"weight_map": ["a"]}, "weight_map must name a file for each tensor"),
        ({"weight_map": {"a": 1}}, "weight_map must name a file for each tensor"),
        ({}, "weight_map must name a file for each tensor"),
    ],
)
def test_bad_index(folder: Path, index: object, message: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refuse(folder, message)


def test_several_files_without_an_index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "b.safetensors").write_bytes((folder / "a.safetensors").read_bytes())
    refuse(folder, r"holds 2 safetensors files but no model\.safetensors\.index\.json")


def test_progress_counts_every_tensor(folder: Path) -> None:
    source = resolve_source(str(folder))
    calls: list[tuple[int, int]] = []
    load_decoder(
        source,
        load_model_config(source),
        storage_dtype=torch.float32,
        compute_dtype=torch.float32,
        device=CPU,
        progress=lambda done, total: calls.append((done, total)),
    )
    num_tensors = 3 + 3 * 9
    assert calls == [(done, num_tensors) for done in range(1, num_tensors + 1)]


def test_loading_keeps_the_number_of_threads(folder: Path) -> None:
    torch.set_num_threads(2)
    load(folder)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)


CONFIG = ModelConfig(
    family="qwen3",
    vocab_size=100,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position=64,
    norm_eps=1e-6,
    rope_theta=10_000.0,
    qkv_bias=True,
    qk_norm=True,
    windows=(None, 8),
)


def random_decoder(seed: int, dtype: torch.dtype = torch.float32) -> Decoder:
    return Decoder.random(CONFIG, storage_dtype=dtype, compute_dtype=dtype, device=CPU, seed=seed)


def test_random_weights_repeat_by_seed() -> None:
    first = logits_of(random_decoder(0), PROMPT)
    assert torch.equal(first, logits_of(random_decoder(0), PROMPT))
    assert not torch.allclose(first, logits_of(random_decoder(1), PROMPT))
    assert first.isfinite().all()


def test_bf16_arithmetic_stays_near_float32() -> None:
    exact = logits_of(random_decoder(0), PROMPT)
    rounded = logits_of(random_decoder(0, torch.bfloat16), PROMPT)
    assert rounded.dtype == torch.float32
    assert (exact - rounded).abs().mean() < 0.05 * exact.abs().mean()


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_dense_weight_is_a_linear(packs: bool, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not packs:
        monkeypatch.setattr(weights_module, "can_pack", lambda dtype: False)
    generator = torch.Generator().manual_seed(0)
    weight, offset = torch.randn(48, 80, generator=generator), torch.randn(48, generator=generator)
    linear = DenseWeight(weight, offset if bias else None)
    assert (linear.out_features, linear.in_features) == (48, 80)
    for rows in (1, 2, 31, 33, 100):
        x = torch.randn(rows, 80, generator=generator)
        torch.testing.assert_close(linear(x), F.linear(x, weight, offset if bias else None), rtol=1e-5, atol=1e-5)


def test_rms_norm() -> None:
    x, weight = torch.randn(5, 3, 16), torch.randn(3, 16)
    expected = F.rms_norm(x.double(), (16,), None, 1e-2) * weight
    torch.testing.assert_close(RmsNorm(weight, 1e-2)(x), expected.float(), rtol=1e-5, atol=1e-6)
    assert torch.equal(RmsNorm(weight, 1e-2)(torch.zeros(1, 3, 16)), torch.zeros(1, 3, 16))
    assert RmsNorm(weight, 1e-2)(x.bfloat16()).dtype == torch.bfloat16
