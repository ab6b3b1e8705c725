"""Offline throughput beside transformers' generate: same weights, same prompts, bf16, greedy, end of text ignored.

    python -m pageframe.benchmarks.experiments.offline_throughput [--repeats 3]

They take turns within one run, so that a busy or a throttled moment hits all; the table has the medians. Time is from
the prompts' token ids to the last token, prefill included, loading not. With --float32 transformers runs in float32
too: on a processor without bf16 arithmetic its bf16 is slow, while Pageframe adds bf16 values in float32. Beside them
stands the floor (floor.py): output tokens/s if every decode step took no longer than its bytes or its products take at
the speeds that this command measures first, and the prompts no time at all.

Exits with 1 if Pageframe is slower than transformers' bf16 anywhere.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pageframe.benchmarks.experiments.floor import Floors, measure_floors
from pageframe.benchmarks.experiments.report import engine_line
from pageframe.runtime.config import EngineConfig
from pageframe.runtime.engine import Engine
from pageframe.runtime.engine_builder import build_engine
from pageframe.runtime.models.source import resolve_source
from pageframe.runtime.request import SamplingParams


@dataclass(frozen=True, slots=True)
class Work:
    """`requests` prompts of `prompt` random tokens, `output` tokens each."""

    requests: int
    prompt: int
    output: int

    def __str__(self) -> str:
        return f"{self.prompt} + {self.output}, {self.requests}"

    @property
    def output_tokens(self) -> int:
        return self.requests * self.output


WORKS = (Work(1, 32, 128), Work(8, 128, 128), Work(32, 128, 128))
QUICK_WORKS = (Work(1, 32, 16), Work(4, 32, 16))


def random_prompts(work: Work, vocab_size: int, seed: int) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    rows: list[list[int]] = generator.integers(10, vocab_size, (work.requests, work.prompt)).tolist()
    return rows


def pageframe_seconds(engine: Engine, work: Work, prompts: list[list[int]]) -> float:
    params = SamplingParams(temperature=0, max_tokens=work.output, ignore_eos=True)
    started = time.perf_counter()
    for index, ids in enumerate(prompts):
        engine.add(f"{started}-{index}", ids, params)
    tokens = 0
    while engine.has_work:
        tokens += sum(len(output.token_ids) for output in engine.step())
    assert tokens == work.output_tokens, f"{tokens} tokens instead of {work.output_tokens}"
    return time.perf_counter() - started


def transformers_seconds(model: Any, work: Work, prompts: list[list[int]]) -> float:
    ids = torch.tensor(prompts)
    started = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=work.output,
            min_new_tokens=work.output,
            do_sample=False,
        )
    assert out.shape[1] == work.prompt + work.output
    return time.perf_counter() - started


def load_transformers(dtype: torch.dtype) -> Any:
    """transformers' model of the default file, with nothing that ends its text early."""
    from transformers import AutoModelForCausalLM, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    path = resolve_source("default").path
    # Dequantised once: left packed, transformers unpacks the weights at every step, which is no fair rival.
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=dtype, quantization_config=GgufConfig(dequantize=True)
    ).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def floor_seconds(floors: Floors, work: Work) -> float:
    """Of the decode steps, which make all tokens but the first of each request."""
    contexts = range(work.prompt + 1, work.prompt + work.output)
    return sum(floors.decode([context] * work.requests).seconds for context in contexts)


def measure(works: tuple[Work, ...], repeats: int, with_float32: bool) -> bool:
    """Print the table; whether Pageframe is ahead of transformers' bf16 everywhere."""
    console = Console(stderr=True)
    console.print("loading the engines", style="dim")
    engine = build_engine(EngineConfig.offline(dtype="bf16"))
    rivals = [load_transformers(torch.bfloat16)] + ([load_transformers(torch.float32)] if with_float32 else [])
    resolved = engine.resolved
    floors = measure_floors(engine)
    table = Table(
        title=f"output tokens/s, greedy, medians of {repeats}; Pageframe: {engine_line(resolved)}; {floors.machine}"
    )
    float32_columns = ("HF float32", "ratio") if with_float32 else ()
    for column in ("in + out, requests", "floor", "Pageframe", "HF bf16", "ratio", *float32_columns):
        table.add_column(column, justify="right")
    ahead = True
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("measuring", total=(1 + len(rivals)) * repeats * len(works))
        for work in works:
            times: list[list[float]] = [[] for _ in range(1 + len(rivals))]
            for repeat in range(repeats):
                prompts = random_prompts(work, resolved.model.vocab_size, repeat)
                times[0].append(pageframe_seconds(engine, work, prompts))
                bar.advance(task)
                for model, taken in zip(rivals, times[1:], strict=True):
                    taken.append(transformers_seconds(model, work, prompts))
                    bar.advance(task)
            ours, *theirs = (statistics.median(taken) for taken in times)
            ahead = ahead and ours < theirs[0]
            cells = [f"{work.output_tokens / floor_seconds(floors, work):.0f}"]
            cells.append(f"{work.output_tokens / ours:.1f}")
            for seconds in theirs:
                cells += [f"{work.output_tokens / seconds:.1f}", f"{seconds / ours:.2f}x"]
            table.add_row(str(work), *cells)
    Console().print(table)
    return ahead


def main() -> int:
    parser = argparse.ArgumentParser(description="Offline throughput beside transformers' generate, bf16.")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, interleaved (default: 3)")
    parser.add_argument("--quick", action="store_true", help="toy sizes, to see that it runs")
    parser.add_argument("--float32", action="store_true", help="transformers in float32 as well")
    args = parser.parse_args()
    return 0 if measure(QUICK_WORKS if args.quick else WORKS, args.repeats, args.float32) else 1


if __name__ == "__main__":
    sys.exit(main())
