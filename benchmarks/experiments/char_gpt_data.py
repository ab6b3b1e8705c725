"""The text that a character GPT learns from, as windows of ids, and the tokenizer for its characters."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from pageframe.benchmarks.experiments.report import InputError

VALIDATION_SHARE = 0.1


class Text:
    """A text as ids of its characters, in two parts: for training, and for validation.

    Args:
        path: UTF-8; line ends are kept as they are.
        context: characters that a window holds beside the one that follows it.

    Raises:
        InputError: it can't be read, or is too short.
    """

    def __init__(self, path: Path, context: int) -> None:
        try:
            text = path.read_bytes().decode()
        except OSError as error:
            raise InputError(f"text is {path}; it can't be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise InputError(f"text is {path}; it must be UTF-8 and isn't: {error.reason}") from error
        shortest = math.ceil((context + 1) / VALIDATION_SHARE)
        if len(text) < shortest:
            raise InputError(
                f"text is {path} of {len(text):,} characters; with a context of {context} it must have at least "
                f"{shortest:,}"
            )
        self.characters = sorted(set(text))
        id_of = {character: token_id for token_id, character in enumerate(self.characters)}
        ids = torch.tensor([id_of[character] for character in text])
        num_validation = math.ceil(len(text) * VALIDATION_SHARE)
        self.training, self.validation = ids[:-num_validation], ids[-num_validation:]
        self._window = torch.arange(context + 1)

    def draw(self, batch: int, generator: torch.Generator) -> Tensor:
        """Random windows of the training part: int64 [batch, context + 1]."""
        starts = torch.randint(len(self.training) - len(self._window) + 1, (batch, 1), generator=generator)
        return self.training[starts + self._window]

    def validation_windows(self, most: int) -> Tensor:
        """Up to `most` windows spread evenly over the validation part, each character foretold once at most."""
        context = len(self._window) - 1
        num_windows = (len(self.validation) - 1) // context
        chosen = torch.linspace(0, num_windows - 1, min(most, num_windows)).long()
        return self.validation[chosen[:, None] * context + self._window]


def character_tokenizer(characters: list[str]) -> Tokenizer:
    """Each character a token, in this order. A text with any other character is refused: there is no token for it."""
    tokenizer = Tokenizer(models.WordLevel({character: token_id for token_id, character in enumerate(characters)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer
