"""Which kernels a start has compiled for a GPU, and which ones steps of every kind would compile after it, as JSON.

Run as a program without TRITON_INTERPRET. Nothing is compiled and no kernel runs: the launches alone are looked at, on
small tensors in main memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator

import numpy as np
import torch

from pageframe.benchmarks.experiments.kernel_launches import TARGETS, variants_met
from pageframe.kernels.triton.backend import TritonBackend
from pageframe.kernels.triton.sampling import draw_tokens
from pageframe.kernels.triton.sampling_table import Draws
from pageframe.runtime.batch import Batch
from pageframe.runtime.block_table import TableUpdates
from pageframe.runtime.config import ModelConfig
from pageframe.runtime.device_logits import penalties_of
from pageframe.runtime.model_runner import ModelRunner
from pageframe.runtime.models.decoder import Decoder
from pageframe.runtime.sampler import Sampler
from pageframe.runtime.step_plan import SamplingBatch
from pageframe.runtime.warm_up import run_every_kernel

CPU = torch.device("cpu")
MAX_REQUESTS = 600
MODEL = ModelConfig(
    family="qwen3",
    vocab_size=64,
    hidden_size=48,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position=256,
    norm_eps=1e-5,
    qk_norm=True,
)


class AbsentBackend(TritonBackend):
    """Asks no device what it has."""

    def __init__(self) -> None:
        pass


class Counts:
    """Of penalties: of so many tokens."""

    repetition = presence = frequency = np.float32(1)

    def __init__(self, num_tokens: int) -> None:
        self.counts = self
        self.token_ids = self.output_counts = np.zeros(num_tokens, np.int32)


def step(contexts: list[int], new_tokens: list[int]) -> Batch:
    """Decode rows first; the last blocks of each request's context are computed."""
    query_start = np.cumsum([0, *new_tokens]).astype(np.int32)
    num_tokens = int(query_start[-1])
    return Batch(
        token_ids=np.zeros(num_tokens, np.int64),
        positions=np.arange(num_tokens) % MODEL.max_position,
        slots=np.arange(num_tokens),
        query_start=query_start,
        context_lens=np.array(contexts, np.int32),
        rows=np.arange(len(contexts), dtype=np.int32),
        num_decode=sum(count == 1 for count in new_tokens),
        wanted=query_start[1:].astype(np.int64) - 1,
        sampling=SamplingBatch.empty(),
        table_updates=TableUpdates([(0, 0, 1)]),
    )


def draw(logits: torch.Tensor, num_top: int, num_penalised: int) -> None:
    """All rows with so many likeliest tokens, the first few with penalties; every second one has a banned token."""
    count = len(logits)
    ones, integers = np.ones(count, np.float32), np.ones(count, np.int32)
    draws = Draws(
        ones, np.ones(count), np.ones(count), integers, ones, *np.zeros((2, count), np.int64), integers * num_top
    )
    empty = SamplingBatch(ones, integers, ones, ones, draws.seed, draws.seed, integers)
    rules = tuple((row, Counts(3 + row)) for row in range(num_penalised))
    batch = SamplingBatch(*(getattr(empty, name) for name in SamplingBatch.__slots__[:7]), rules=rules)  # type: ignore[arg-type]
    rows = np.arange(0, count, 2)
    draw_tokens(logits, draws, (rows, rows) if num_top == 2 else None, penalties_of(batch, CPU))


def later(runner: ModelRunner) -> Iterator[Callable[[], None]]:
    """What requests may bring."""
    for count in (1, 2, 3, 16, 17, 255, 256, 257, 513):
        batch = step([5] * count, [1] * count)
        yield lambda batch=batch: runner.forward(batch)
        for new_tokens in ([1] * (count - 1) + [16], [1] * (count - 1) + [33, 2], [7] * min(count, 20)):
            batch = step([40] * len(new_tokens), new_tokens)
            yield lambda batch=batch: runner.forward(batch)
        for num_top in (-1, 0, 1, 2, 16, 20):
            logits = runner.logits(torch.zeros(count, MODEL.hidden_size, dtype=torch.bfloat16))
            yield lambda logits=logits, num_top=num_top: draw(logits, num_top, min(len(logits), 5))


def main() -> None:
    # A kernel that does not run leaves its result as it was: token 1, not any garbage.
    torch.empty = torch.ones
    with variants_met(TARGETS["sm_90"]) as met, torch.inference_mode():
        bf16 = torch.bfloat16
        decoder = Decoder.random(MODEL, storage_dtype=bf16, compute_dtype=bf16, device=CPU, seed=0)
        runner = ModelRunner(
            decoder,
            AbsentBackend(),
            num_blocks=1024,
            block_size=16,
            max_num_requests=MAX_REQUESTS,
            max_blocks=MODEL.max_position // 16,
            kv_dtype=bf16,
            device=CPU,
        )
        met.clear()
        run_every_kernel(runner, Sampler(runner.logits, runner.arg_max, on_device=True), MAX_REQUESTS)
        at_start = set(met)
        num_steps = 0
        for work in later(runner):
            work()
            num_steps += 1
        result = {
            "at_start": sorted({variant.kernel for variant in at_start}),
            "fusing": sorted({variant.kernel for variant in met if variant.fuses}),
            "later": sorted(f"{variant.kernel} {variant.key}" for variant in met - at_start),
            "num_steps": num_steps,
        }
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
