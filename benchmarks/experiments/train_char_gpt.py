"""Trains a small GPT on the characters of a text and saves it as an ordinary Hugging Face folder.

    python -m pageframe.benchmarks.experiments.train_char_gpt TEXT --out FOLDER [--quick]

GPT-2's shape: by default 6 layers of 6 heads, 384 wide, a context of 256 characters, about 11 million weights. Weights
are float32, products bf16. The last tenth of the text is for validation alone. Whenever the loss there is the best so
far, FOLDER is written: config.json, model.safetensors, a tokenizer of characters. Ctrl-C ends the training and leaves
what is best until then. A training that diverges, so that no loss there is finite, writes nothing and exits with 1.
There is no end-of-text token, so nothing ends early.

The training ends after --steps or --minutes, whichever comes first. What the clock has ended can't be repeated exactly;
`--steps N --minutes inf` can.

Both `pageframe serve --model FOLDER` and transformers' GPT2LMHeadModel load the folder.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path

import torch

from pageframe.benchmarks.experiments.char_gpt_data import Text
from pageframe.benchmarks.experiments.char_gpt_folder import DTYPES, Folder
from pageframe.benchmarks.experiments.char_gpt_model import CharGpt, Shape
from pageframe.benchmarks.experiments.char_gpt_training import Recipe, Training, say
from pageframe.benchmarks.experiments.report import EXIT_BAD_INPUT, EXIT_INTERRUPTED, InputError

EXIT_DIVERGED = 1
MINUTES, QUICK_MINUTES = 9.0, 0.5
#: Most of each number: enough for anything, and small enough to calculate with.
LIMITS = {
    "layers": 1000,
    "heads": 1000,
    "width": 2**16,
    "context": 2**20,
    "steps": 10**9,
    "batch": 10**6,
    "warmup": 10**9,
    "validate_every": 10**9,
}


def train(text: Text, shape: Shape, folder: Folder, recipe: Recipe) -> int:
    """Train and save; the exit status.

    Raises:
        InputError: the folder can't be written.
    """
    torch.manual_seed(recipe.seed)
    model = CharGpt(shape, recipe.dropout)
    say(
        f"{shape.num_weights / 1e6:.1f} million weights; {len(text.training):,} characters to learn from, "
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
    parser.add_argument("--minutes", type=float, help=f"most minutes ({MINUTES:g}, with --quick {QUICK_MINUTES:g})")
    parser.add_argument("--quick", action="store_true", help="done within a minute; such a model knows little")
    parser.add_argument("--batch", type=int, default=8, help="windows in a step (%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="the highest (%(default)s)")
    parser.add_argument("--warmup", type=int, default=100, help="steps until the highest rate (%(default)s)")
    parser.add_argument("--weight-decay", type=float, default=0.1, help="(%(default)s)")
    parser.add_argument("--dropout", type=float, default=0.0, help="(%(default)s)")
    parser.add_argument("--validate-every", type=int, default=100, help="steps (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32", help="of the saved weights (%(default)s)")
    options = parser.parse_args(arguments)
    if options.minutes is None:
        options.minutes = QUICK_MINUTES if options.quick else MINUTES
    for name, most in LIMITS.items():
        check(name, getattr(options, name) >= 1, getattr(options, name), "at least 1")
        check(name, getattr(options, name) <= most, getattr(options, name), f"at most {most}")
    check("width", options.width % (2 * options.heads) == 0, options.width, f"a multiple of {2 * options.heads}")
    check("minutes", options.minutes > 0, options.minutes, "above 0")
    check("seed", -(2**63) <= options.seed < 2**63, options.seed, "a signed number of 64 bits")
    check("learning_rate", 0 < options.learning_rate < math.inf, options.learning_rate, "above 0 and finite")
    check("weight_decay", 0 <= options.weight_decay < math.inf, options.weight_decay, "at least 0 and finite")
    check("dropout", 0 <= options.dropout < 1, options.dropout, "at least 0 and below 1")
    return options


def check(name: str, is_right: bool, value: object, rule: str) -> None:
    if not is_right:
        raise InputError(f"{name} is {value}; it must be {rule}")


def check_memory(shape: Shape, batch: int) -> None:
    """Raises: InputError: the training can't fit into this machine."""
    needed, present = shape.training_bytes(batch), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > present:
        raise InputError(
            f"{shape.num_weights:,} weights and a batch of {batch:,} take at least {needed / 2**30:,.1f} GiB to train; "
            f"this machine has {present / 2**30:,.1f} GiB"
        )


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    try:
        return run(parse(arguments))
    except InputError as error:
        print(f"train_char_gpt: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        say("stopped before the first step; nothing was written")
        return EXIT_INTERRUPTED


def run(options: argparse.Namespace) -> int:
    """Train as the flags say; the exit status.

    Raises:
        InputError: what was asked for can't be trained, or the folder can't be written.
    """
    text = Text(options.text, options.context)
    shape = Shape(len(text.characters), options.layers, options.heads, options.width, options.context)
    check_memory(shape, options.batch)
    folder = Folder(options.out, shape, text.characters, options.dtype)
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
    return train(text, shape, folder, recipe)


if __name__ == "__main__":
    sys.exit(main())
