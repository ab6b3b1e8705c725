"""What do fewer bits cost? Perplexity of one text in each arithmetic that the engine has, against float32.

    python -m pageframe.benchmarks.experiments.perplexity [--text FILE] [--tokens 4096] [--context 512] [--quick]

The text is cut into contexts of equal length, each computed from its first token on, as a prompt that comes in chunks;
each token but the first is predicted from those before it. The measure is float32 with the values that the model's file
stores, by torch's operations. Every other arithmetic's perplexity must be within 1% of it.

By default the text is what the package itself has at hand: the documentation inside its modules. It changes with the
code, so a digest of it is printed; the ratios hold for one text.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import pageframe.runtime
from pageframe.benchmarks.experiments.report import InputError, engine_line, run_experiment
from pageframe.runtime.batch import Batch
from pageframe.runtime.block_table import TableUpdates
from pageframe.runtime.config import DEFAULT_MODEL, EngineConfig
from pageframe.runtime.engine_builder import build_engine
from pageframe.runtime.model_runner import ModelRunner
from pageframe.runtime.models.source import resolve_source
from pageframe.runtime.step_plan import SamplingBatch
from pageframe.runtime.tokenizer import load_tokenizer

#: Settings of EngineConfig; the first is the measure of the others.
ARITHMETICS: Mapping[str, Mapping[str, Any]] = {
    "float32": {"dtype": "float32"},
    "weights bf16": {"weights": "bf16"},
    "weights file": {"weights": "file"},
    "weights file, K/V int8": {"weights": "file", "kv_dtype": "int8"},
}
TOLERANCE = 0.01
BLOCK_SIZE = 16
#: Prompt positions whose logits are held at once: 128 rows of a vocabulary of 150,000 are 77 MB.
CHUNK = 128


@dataclass(frozen=True, slots=True)
class Result:
    """One arithmetic's perplexity.

    Args:
        computed: the machine and what computed it, for people.
        perplexity: e to the mean of -log p(token) over the predicted tokens.
    """

    name: str
    computed: str
    perplexity: float


def package_text() -> str:
    """The docstrings of the runtime's modules, file by file."""
    parts = []
    for folder in pageframe.runtime.__path__:
        for path in sorted(Path(folder).glob("*.py")):
            nodes = ast.walk(ast.parse(path.read_text()))
            documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
            parts += [ast.get_docstring(node) or "" for node in nodes if isinstance(node, documented)]
    return "\n\n".join(part for part in parts if part)


def cut(token_ids: Sequence[int], num_tokens: int, context: int) -> list[Sequence[int]]:
    """The first `num_tokens` tokens in contexts of `context`; what is left over at the end is not used."""
    used = min(num_tokens, len(token_ids))
    return [token_ids[start : start + context] for start in range(0, used - context + 1, context)]


class PromptScorer:
    """One model that is asked for the log-probabilities of whole prompts, over a pool that holds one."""

    def __init__(self, model: str, context: int, settings: Mapping[str, Any]) -> None:
        num_blocks = -(-context // BLOCK_SIZE)
        engine = build_engine(
            EngineConfig(
                model=model,
                block_size=BLOCK_SIZE,
                num_blocks=num_blocks,
                max_model_len=context,
                max_num_requests=1,
                prefix_cache=False,
                **settings,
            )
        )
        assert isinstance(engine.runner, ModelRunner)
        self.resolved = engine.resolved
        self._runner = engine.runner
        self._updates = TableUpdates([(0, index, index) for index in range(num_blocks)])

    def negative_log_likelihood(self, token_ids: Sequence[int]) -> float:
        """The sum of -log p over all tokens but the first, in nats."""
        total = 0.0
        for start in range(0, len(token_ids) - 1, CHUNK):
            end = min(start + CHUNK, len(token_ids) - 1)
            logits = self._runner.logits(self._runner.forward(self._chunk(token_ids, start, end)))
            next_ids = torch.tensor(token_ids[start + 1 : end + 1], device=logits.device)
            total += float(torch.nn.functional.cross_entropy(logits.double(), next_ids, reduction="sum"))
        return total

    def _chunk(self, token_ids: Sequence[int], start: int, end: int) -> Batch:
        """The positions [start, end) of a request in row 0, whose blocks lie in order, so that slots are positions."""
        positions = np.arange(start, end, dtype=np.int64)
        return Batch(
            token_ids=np.array(token_ids[start:end], dtype=np.int64),
            positions=positions,
            slots=positions,
            query_start=np.array([0, end - start], dtype=np.int32),
            context_lens=np.array([end], dtype=np.int32),
            rows=np.zeros(1, dtype=np.int32),
            num_decode=int(end - start == 1),
            wanted=positions - start,
            sampling=SamplingBatch.empty(),
            table_updates=self._updates,
        )


def measure(model: str, contexts: Sequence[Sequence[int]], name: str) -> Result:
    """The perplexity of all contexts in one of ARITHMETICS."""
    scorer = PromptScorer(model, len(contexts[0]), ARITHMETICS[name])
    total = sum(scorer.negative_log_likelihood(context) for context in contexts)
    resolved = scorer.resolved
    return Result(name, engine_line(resolved), math.exp(total / sum(len(context) - 1 for context in contexts)))


def run(model: str, contexts: Sequence[Sequence[int]], report: Callable[[Result, float, bool], None]) -> bool:
    """All arithmetics; whether each one's perplexity is within the tolerance of the first one's.

    Args:
        report: called with each result, its ratio to the first one, and whether that is within the tolerance.
    """
    within = True
    reference = math.nan
    for name in ARITHMETICS:
        result = measure(model, contexts, name)
        reference = result.perplexity if math.isnan(reference) else reference
        ratio = result.perplexity / reference
        holds = abs(ratio - 1) <= TOLERANCE
        report(result, ratio, holds)
        within = within and holds
    return within


def read_text(path: Path | None) -> str:
    """The text of a file, or the package's own.

    Raises:
        InputError: the file cannot be read as text.
    """
    if path is None:
        return package_text()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"text is {path}; it cannot be read: {error}") from error


def run_command(args: argparse.Namespace) -> int:
    num_tokens, context = (128, 64) if args.quick else (args.tokens, args.context)
    text = read_text(args.text)
    token_ids = load_tokenizer(resolve_source(DEFAULT_MODEL)).encode(text, add_special_tokens=False)
    if not 2 <= context <= min(num_tokens, len(token_ids)):
        raise InputError(
            f"context is {context}; it must be from 2 to the text's tokens, {min(num_tokens, len(token_ids))} here"
        )
    contexts = cut(token_ids, num_tokens, context)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    table = Table(
        title=f"{len(contexts)} contexts of {context} tokens; text {args.text or 'of the package'} ({digest})"
    )
    for column in ("arithmetic", "perplexity", "to float32", f"within {TOLERANCE:.0%}"):
        table.add_column(column, justify="left" if column == "arithmetic" else "right")
    machine: list[str] = []

    def report(result: Result, ratio: float, holds: bool) -> None:
        table.add_row(result.name, f"{result.perplexity:.4f}", f"{ratio:.5f}", "yes" if holds else "no")
        machine.append(f"{result.name}: {result.computed}")

    within = run(DEFAULT_MODEL, contexts, report)
    console = Console()
    console.print(table)
    console.print("\n".join(machine), highlight=False)
    return 0 if within else 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Perplexity of one text in each arithmetic, against float32.")
    parser.add_argument("--text", type=Path, metavar="FILE", help="the text (default: the package's documentation)")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the text to use (default: %(default)s)")
    parser.add_argument("--context", type=int, default=512, help="tokens of a context (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="128 tokens in contexts of 64: to see that it runs")
    args = parser.parse_args(arguments)
    return run_experiment(lambda: run_command(args))


if __name__ == "__main__":
    sys.exit(main())
