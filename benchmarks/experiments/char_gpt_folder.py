"""Where a character GPT is saved: an ordinary Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from pageframe.benchmarks.experiments.char_gpt_data import character_tokenizer
from pageframe.benchmarks.experiments.char_gpt_model import NORM_EPS, CharGpt, Shape
from pageframe.benchmarks.experiments.report import InputError

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


class Folder:
    """Where a model is saved: a Hugging Face folder.

    Raises:
        InputError: it can't be written.
    """

    def __init__(self, path: Path, shape: Shape, characters: list[str], dtype: str) -> None:
        self.path = path
        self._dtype = dtype
        no_special_tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        config = {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "vocab_size": shape.vocab_size,
            "n_embd": shape.width,
            "n_layer": shape.layers,
            "n_head": shape.heads,
            "n_positions": shape.context,
            "layer_norm_epsilon": NORM_EPS,
            "activation_function": "gelu_new",
            "tie_word_embeddings": True,
            "dtype": str(DTYPES[dtype]).removeprefix("torch."),
            **no_special_tokens,
        }
        tokenizer_config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": shape.context,
            "clean_up_tokenization_spaces": False,
        }
        self._files = {
            "config.json": config,
            "generation_config.json": {"do_sample": True, **no_special_tokens},
            "tokenizer_config.json": tokenizer_config,
        }
        self._tokenizer = character_tokenizer(characters)
        self._unfinished = path / "model.safetensors.unfinished"
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._unfinished.touch()  # a folder that can't be written is refused now, not after the first steps
            self._unfinished.unlink()
        except OSError as error:
            raise self._unwritable(error) from error

    def save(self, model: CharGpt) -> None:
        """Write the weights, in one piece or not at all, and with the first ones all else that a model needs.

        Raises:
            InputError: they can't be written.
        """
        dtype = DTYPES[self._dtype]
        weights = {f"transformer.{name}": value.detach().to(dtype) for name, value in model.state_dict().items()}
        try:
            save_file(weights, self._unfinished, metadata={"format": "pt"})
            for name, content in self._files.items():
                (self.path / name).write_text(json.dumps(content, indent=2) + "\n")
            (self.path / "tokenizer.json").write_text(self._tokenizer.to_str(pretty=True))
            self._unfinished.replace(self.path / "model.safetensors")
        except (OSError, SafetensorError) as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: Exception) -> InputError:
        reason = error.strerror if isinstance(error, OSError) else error
        return InputError(f"out is {self.path}; it can't be written: {reason}")
