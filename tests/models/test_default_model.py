"""The default model: its shape, and that it knows what it should."""

from __future__ import annotations

import torch

from pageframe.runtime.config import ModelConfig
from pageframe.runtime.models.config import load_model_config, sampling_defaults
from pageframe.runtime.models.source import resolve_source
from pageframe.runtime.tokenizer import load_tokenizer

from .helpers import load, logits_of


def test_config() -> None:
    source = resolve_source("default")
    assert load_model_config(source) == ModelConfig(
        family="llama",
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_position=8192,
        norm_eps=9.999999747378752e-06,
        rope_theta=100_000.0,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2, 0),
    )
    assert sampling_defaults(source) == {}


def test_greedy_continuation() -> None:
    source = resolve_source("default")
    tokenizer = load_tokenizer(source)
    decoder = load(source, storage_dtype=torch.bfloat16)
    token_ids = tokenizer.encode("The capital of France is", add_special_tokens=True)
    for _ in range(4):
        token_ids.append(int(logits_of(decoder, token_ids)[-1].argmax()))
    assert "Paris" in tokenizer.decode(token_ids)
