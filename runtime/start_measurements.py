"""What is measured once at start, before any request: the speed of prompts, and of copies from host memory.

Both write into blocks that nobody uses yet.
"""

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
#: What a step with decoding requests may take: their tokens then come about as fast as anyone reads.
MIXED_STEP_SECONDS = 0.035
#: Fewer tokens at a time than this make poor use of the weights that a step reads.
MIN_MIXED_TOKENS = 32
#: A start-up spends about this long on the measurement of a fast model, and one step on a slow one's.
MIXED_MEASUREMENT_SECONDS = 0.2


def measure_copy_costs(runner: ModelRunner, resolved: ResolvedConfig) -> CopyCosts:
    """What the host tier's rule weighs: copying a block back against computing it again. Medians of a few runs."""
    batch = _prefill(MEASURED_TOKENS, resolved)
    num_tokens = len(batch.token_ids)
    count = min(MEASURED_COPIES, resolved.host_slots, resolved.num_blocks)
    copies = [BlockCopy(CopyKind.TO_DEVICE, index, index) for index in range(count)]
    return CopyCosts(
        per_block=_seconds(runner, lambda: runner.copy_blocks(copies)) / count,
        per_token=_seconds(runner, lambda: runner.forward(batch)) / num_tokens,
    )


def measure_mixed_token_budget(runner: ModelRunner, resolved: ResolvedConfig) -> int:
    """How many tokens a step computes in MIXED_STEP_SECONDS, at least MIN_MIXED_TOKENS. The best of a few runs: other
    processes that start at the same time would make it look slower than it is."""
    batch = _prefill(MIN_MIXED_TOKENS, resolved)
    fastest = float("inf")
    started = time.perf_counter()
    while time.perf_counter() - started < MIXED_MEASUREMENT_SECONDS:
        before = time.perf_counter()
        runner.forward(batch)
        fastest = min(fastest, time.perf_counter() - before)
    num_tokens = int(MIXED_STEP_SECONDS * len(batch.token_ids) / fastest)
    return min(max(MIN_MIXED_TOKENS, num_tokens), resolved.max_num_batched_tokens)


def _seconds(runner: ModelRunner, work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        work()
        runner.synchronize()
        times.append(time.perf_counter() - started)
    return median(times[1:])


def _prefill(most_tokens: int, resolved: ResolvedConfig) -> Batch:
    """One prompt of zeros in row 0 and the first blocks: `most_tokens`, or as many as there is room for."""
    block_size = resolved.block_size
    capacity = resolved.num_blocks * block_size
    num_tokens = min(most_tokens, resolved.max_num_batched_tokens, resolved.max_model_len, capacity)
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
