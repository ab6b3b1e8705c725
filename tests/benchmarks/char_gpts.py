"""A tiny character GPT: how it is trained, and what transformers makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from pageframe.benchmarks.experiments import train_char_gpt

CONTEXT = 24
#: With both kinds of line end, a tab, spaces at ends, and characters of two and four bytes.
TEXT = "ROMEO:\r\n\tWhat light,  is it? \n\nJULIET:\nÀ demain; adieu 🙂 \n" * 40
TINY = ["--layers", "2", "--heads", "2", "--width", "32", "--context", str(CONTEXT), "--batch", "4", "--warmup", "2"]


def write_text(folder: Path, text: str = TEXT) -> Path:
    path = folder / "text.txt"
    path.write_bytes(text.encode())
    return path


def train(folder: Path, *flags: str) -> int:
    """Train on TEXT into folder/model."""
    return train_char_gpt.main([str(write_text(folder)), "--out", str(folder / "model"), *TINY, *flags])


def hf_logits(model: Path, token_ids: Sequence[int]) -> torch.Tensor:
    import transformers

    loaded = transformers.GPT2LMHeadModel.from_pretrained(model, attn_implementation="eager").double().eval()
    with torch.no_grad():
        return loaded(torch.tensor([list(token_ids)])).logits[0].float()
