"""Trains a small GPT on the characters of a text and saves it as an ordinary Hugging Face folder.

    python -m pageframe.benchmarks.experiments.train_char_gpt TEXT --out FOLDER

GPT-2's shape: by default 6 layers of 6 heads, 384 wide, a context of 256 characters, about 11 million weights. Weights
are float32, products bf16. The last tenth of the text is for validation alone. Whenever the loss there is the best so
far, FOLDER is written: config.json, model.safetensors, a tokenizer of characters. Ctrl-C ends the training and leaves
what is best until then. A training that diverges, so that no loss there is finite, writes nothing and exits with 1.
There is no end-of-text token, so nothing ends early.

Both `pageframe serve --model FOLDER` and transformers' GPT2LMHeadModel load the folder.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn

from pageframe.benchmarks.experiments.report import EXIT_BAD_INPUT, EXIT_INTERRUPTED, InputError

EXIT_DIVERGED = 1
VALIDATION_SHARE = 0.1
VALIDATION_WINDOWS = 64
WINDOWS_AT_ONCE = 16
NORM_EPS = 1e-5
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model."""

    vocab_size: int
    layers: int
    heads: int
    width: int
    context: int


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a model is trained.

    Args:
        steps: most steps.
        minutes: most minutes, None for no limit. The learning rate falls with whichever is nearer to its end.
        batch: windows of the text in a step.
        learning_rate: the highest, reached after `warmup` steps; it falls to a tenth of that along a cosine.
        validate_every: steps between two looks at the validation text.
    """

    steps: int
    minutes: float | None
    batch: int
    learning_rate: float
    warmup: int
    weight_decay: float
    dropout: float
    validate_every: int
    seed: int


class Conv1D(nn.Module):
    """A linear map whose weight lies [in_features, out_features], as GPT-2 stores it."""

    def __init__(self, in_features: int, out_features: int, deviation: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(in_features, out_features) * deviation)
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.T, self.bias)


class Attention(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.heads = shape.heads
        self.dropout = dropout
        self.c_attn = Conv1D(shape.width, 3 * shape.width, 0.02)
        self.c_proj = Conv1D(shape.width, shape.width, 0.02 / math.sqrt(2 * shape.layers))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.c_attn(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        mixed = self.c_proj(attended.transpose(1, 2).reshape(batch, length, width))
        return F.dropout(mixed, self.dropout, self.training)


class Mlp(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.c_fc = Conv1D(shape.width, 4 * shape.width, 0.02)
        self.c_proj = Conv1D(4 * shape.width, shape.width, 0.02 / math.sqrt(2 * shape.layers))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.c_proj(F.gelu(self.c_fc(x), approximate="tanh")), self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(shape.width, NORM_EPS)
        self.attn = Attention(shape, dropout)
        self.ln_2 = nn.LayerNorm(shape.width, NORM_EPS)
        self.mlp = Mlp(shape, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        summed: Tensor = x + self.mlp(self.ln_2(x))
        return summed


class CharGpt(nn.Module):
    """GPT-2 with GPT-2's parameter names; the output projection is the embedding."""

    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.wte = nn.Embedding(shape.vocab_size, shape.width)
        self.wpe = nn.Embedding(shape.context, shape.width)
        self.h = nn.ModuleList(Block(shape, dropout) for _ in range(shape.layers))
        self.ln_f = nn.LayerNorm(shape.width, NORM_EPS)
        nn.init.normal_(self.wte.weight, std=0.02)
        nn.init.normal_(self.wpe.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """ids int64 [batch, length] -> logits [batch, length, vocab_size]."""
        x = F.dropout(self.wte(ids) + self.wpe(torch.arange(ids.shape[1])), self.dropout, self.training)
        for block in self.h:
            x = block(x)
        logits: Tensor = F.linear(self.ln_f(x), self.wte.weight)
        return logits

    def loss(self, windows: Tensor) -> Tensor:
        """Mean loss, in nats per character, of windows int64 [batch, context + 1]."""
        with torch.autocast("cpu", torch.bfloat16):
            logits = self(windows[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


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


def validation_loss(model: CharGpt, windows: Tensor) -> float:
    """Mean loss over these windows."""
    model.eval()
    with torch.inference_mode():
        losses = [model.loss(part).item() * len(part) for part in torch.split(windows, WINDOWS_AT_ONCE)]
    model.train()
    return sum(losses) / len(windows)


def make_optimizer(model: CharGpt, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW; matrices decay, biases and norms don't."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.99), fused=True)


def rate_at(step: int, done: float, recipe: Recipe) -> float:
    """The learning rate of a step, `done` of the training being behind it, from 0 to 1."""
    warmed = min(1.0, (step + 1) / recipe.warmup)
    return recipe.learning_rate * warmed * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a training. `loss` is the training loss of its batch."""

    number: int
    loss: float
    done: float
    minutes: float


def steps(model: CharGpt, text: Text, recipe: Recipe) -> Iterator[Step]:
    """Train; gives each step when it is made, `done` being 1 at the last."""
    optimizer = make_optimizer(model, recipe)
    generator = torch.Generator().manual_seed(recipe.seed)
    started = time.monotonic()
    done, number = 0.0, 0
    model.train()
    while done < 1:
        for group in optimizer.param_groups:
            group["lr"] = rate_at(number, done, recipe)
        loss = model.loss(text.draw(recipe.batch, generator))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        number += 1
        minutes = (time.monotonic() - started) / 60
        done = max(number / recipe.steps, minutes / recipe.minutes if recipe.minutes else 0.0)
        yield Step(number, loss.item(), done, minutes)


class Training:
    """A training run: what it prints, and which of its weights are kept."""

    def __init__(self, model: CharGpt, text: Text, folder: Folder, recipe: Recipe) -> None:
        self._model = model
        self._text = text
        self._folder = folder
        self._recipe = recipe
        self._windows = text.validation_windows(VALIDATION_WINDOWS)
        self._console = Console(stderr=True)
        self.best_step: int | None = None
        self.best_loss = math.inf
        self.last_step = 0

    def run(self) -> None:
        """Train to the end, or to Ctrl-C, with a bar."""
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"))
        losses: list[float] = []
        with Progress(*columns, TimeRemainingColumn(), console=self._console, transient=True) as bar:
            task = bar.add_task("training", total=self._recipe.steps, loss="")
            for step in steps(self._model, self._text, self._recipe):
                self.last_step = step.number
                losses.append(step.loss)
                total = round(step.number / step.done)
                bar.update(task, completed=step.number, total=total, loss=f"loss {step.loss:.2f}")
                if step.number % self._recipe.validate_every == 0 or step.done >= 1:
                    self._validate(step, sum(losses) / len(losses))
                    losses.clear()

    def keep_current(self) -> bool:
        """Save what there is, where nothing better was saved before; whether the folder has weights then."""
        if self.best_step is not None:
            return True
        if not all(bool(weights.isfinite().all()) for weights in self._model.parameters()):
            return False
        self._folder.save(self._model)
        return True

    def _validate(self, step: Step, training_loss: float) -> None:
        loss = validation_loss(self._model, self._windows)
        is_best = loss < self.best_loss
        if is_best:
            self._folder.save(self._model)
            self.best_loss, self.best_step = loss, step.number
        say(
            f"step {step.number:>6,}  training loss {training_loss:.3f}  validation loss {loss:.3f}  "
            f"{step.minutes:5.1f} min{'  saved' if is_best else ''}"
        )


def say(line: str) -> None:
    """One line on standard output, at once: a training is often watched through a file."""
    print(line, flush=True)


def train(text: Text, shape: Shape, folder: Folder, recipe: Recipe) -> int:
    """Train and save; the exit status.

    Raises:
        InputError: the folder can't be written.
    """
    torch.manual_seed(recipe.seed)
    model = CharGpt(shape, recipe.dropout)
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    say(
        f"{num_weights / 1e6:.1f} million weights; {len(text.training):,} characters to learn from, "
        f"{len(text.validation):,} to validate with, {shape.vocab_size} different ones"
    )
    training = Training(model, text, folder, recipe)
    try:
        training.run()
    except KeyboardInterrupt:
        if not training.keep_current():
            say(f"stopped after step {training.last_step}; the training has diverged, and nothing was written")
            return EXIT_INTERRUPTED
        kept = (
            f"the weights of step {training.best_step}, validation loss {training.best_loss:.3f}"
            if training.best_step is not None
            else "the weights as they are, not validated"
        )
        say(f"stopped after step {training.last_step}; {folder.path} has {kept}")
        return EXIT_INTERRUPTED
    if training.best_step is None:
        print(
            "train_char_gpt: the training diverged: no validation loss was finite, and nothing was written; "
            f"learning_rate is {recipe.learning_rate}, a lower one may do",
            file=sys.stderr,
        )
        return EXIT_DIVERGED
    say(f"{folder.path} has the weights of step {training.best_step}, validation loss {training.best_loss:.3f}")
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The flags.

    Raises:
        InputError: a number is out of range.
    """
    parser = argparse.ArgumentParser(description="Train a small GPT on the characters of a text.")
    parser.add_argument("text", type=Path, metavar="TEXT", help="a text file, UTF-8")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the model goes")
    parser.add_argument("--layers", type=int, default=6, help="(%(default)s)")
    parser.add_argument("--heads", type=int, default=6, help="(%(default)s)")
    parser.add_argument("--width", type=int, default=384, help="(%(default)s)")
    parser.add_argument("--context", type=int, default=256, help="characters (%(default)s)")
    parser.add_argument("--steps", type=int, default=3000, help="most steps (%(default)s)")
    parser.add_argument("--minutes", type=float, help="most minutes; default: as long as the steps take")
    parser.add_argument("--batch", type=int, default=8, help="windows in a step (%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="the highest (%(default)s)")
    parser.add_argument("--warmup", type=int, default=100, help="steps until the highest rate (%(default)s)")
    parser.add_argument("--weight-decay", type=float, default=0.1, help="(%(default)s)")
    parser.add_argument("--dropout", type=float, default=0.0, help="(%(default)s)")
    parser.add_argument("--validate-every", type=int, default=100, help="steps (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32", help="of the saved weights (%(default)s)")
    options = parser.parse_args(arguments)
    for name in ("layers", "heads", "width", "context", "steps", "batch", "warmup", "validate_every"):
        check(name, getattr(options, name) >= 1, getattr(options, name), "at least 1")
    check("width", options.width % (2 * options.heads) == 0, options.width, f"a multiple of {2 * options.heads}")
    check("minutes", options.minutes is None or options.minutes > 0, options.minutes, "above 0")
    check("learning_rate", 0 < options.learning_rate < math.inf, options.learning_rate, "above 0 and finite")
    check("weight_decay", 0 <= options.weight_decay < math.inf, options.weight_decay, "at least 0 and finite")
    check("dropout", 0 <= options.dropout < 1, options.dropout, "at least 0 and below 1")
    return options


def check(name: str, is_right: bool, value: object, rule: str) -> None:
    if not is_right:
        raise InputError(f"{name} is {value}; it must be {rule}")


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    try:
        options = parse(arguments)
        text = Text(options.text, options.context)
        shape = Shape(len(text.characters), options.layers, options.heads, options.width, options.context)
        folder = Folder(options.out, shape, text.characters, options.dtype)
    except InputError as error:
        print(f"train_char_gpt: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    recipe = Recipe(
        steps=options.steps,
        minutes=options.minutes,
        batch=options.batch,
        learning_rate=options.learning_rate,
        warmup=options.warmup,
        weight_decay=options.weight_decay,
        dropout=options.dropout,
        validate_every=options.validate_every,
        seed=options.seed,
    )
    try:
        return train(text, shape, folder, recipe)
    except InputError as error:
        print(f"train_char_gpt: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
