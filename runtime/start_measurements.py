"""Measures, once at start, what the host tier's rule weighs: copying a block back against computing it again."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import numpy as np

from pageframe.runtime.batch import Batch
from pageframe.runtime.block_copy import BlockCopy, CopyCosts, CopyKind
from pageframe.runtime.block_table import TableUpdates
from pageframe.runtime.config import ResolvedConfig
from pageframe.runtime.model_runner import ModelRunner
from pageframe.runtime.step_plan import SamplingBatch

#: Enough tokens for the rate of a prefill, few enough for a start-up.
MEASURED_TOKENS = 512
MEASURED_COPIES = 8
REPEATS = 3


def measure_copy_costs(runner: ModelRunner, resolved: ResolvedConfig) -> CopyCosts:
    """Medians of a few runs. Called before any request: it writes into blocks that nobody uses yet."""
    capacity = resolved.num_blocks * resolved.block_size
    num_tokens = min(MEASURED_TOKENS, resolved.max_num_batched_tokens, resolved.max_model_len, capacity)
    batch = _prefill(num_tokens, resolved.block_size)
    count = min(MEASURED_COPIES, resolved.host_slots, resolved.num_blocks)
    copies = [BlockCopy(CopyKind.TO_DEVICE, index, index) for index in range(count)]
    return CopyCosts(
        per_block=_seconds(runner, lambda: runner.copy_blocks(copies)) / count,
        per_token=_seconds(runner, lambda: runner.forward(batch)) / num_tokens,
    )


def _seconds(runner: ModelRunner, work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        work()
        runner.synchronize()
        times.append(time.perf_counter() - started)
    return median(times[1:])


def _prefill(num_tokens: int, block_size: int) -> Batch:
    """One prompt of `num_tokens` zeros in row 0 and the first blocks."""
    positions = np.arange(num_tokens, dtype=np.int64)
    return Batch(
        token_ids=np.zeros(num_tokens, dtype=np.int64),
        positions=positions,
        slots=positions,
        query_start=np.array([0, num_tokens], dtype=np.int32),
        context_lens=np.array([num_tokens], dtype=np.int32),
        rows=np.zeros(1, dtype=np.int32),
        num_decode=int(num_tokens == 1),
        wanted=np.array([num_tokens - 1], dtype=np.int64),
        sampling=SamplingBatch.empty(),
        table_updates=TableUpdates([(0, index, index) for index in range(-(-num_tokens // block_size))]),
    )
