"""How a character GPT is trained: its recipe, the steps, and which weights are kept."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from pageframe.benchmarks.experiments.char_gpt_data import Text
from pageframe.benchmarks.experiments.char_gpt_folder import Folder
from pageframe.benchmarks.experiments.char_gpt_model import CharGpt

VALIDATION_WINDOWS = 64
WINDOWS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a model is trained.

    Args:
        steps: most steps.
        minutes: most minutes. The learning rate falls with whichever is nearer to its end.
        batch: windows of the text in a step.
        learning_rate: the highest, reached after `warmup` steps; it falls to a tenth of that along a cosine.
        validate_every: steps between two looks at the validation text.
    """

    steps: int
    minutes: float
    batch: int
    learning_rate: float
    warmup: int
    weight_decay: float
    dropout: float
    validate_every: int
    seed: int


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
        done = max(number / recipe.steps, minutes / recipe.minutes)
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
