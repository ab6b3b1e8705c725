"""A tiny model in a folder, for the commands that run one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

MAX_POSITION = 256


def save_tiny_model(folder: Path, kind: str = "Llama", **changes: Any) -> Path:
    """A random model of 3 layers with room for 256 tokens, as transformers saves it; returns the folder."""
    import transformers

    shape = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITION,
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(shape | changes))
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder
