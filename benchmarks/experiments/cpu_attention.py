"""Paged attention of one layer of the default model on a CPU, by requests and context: time, and bytes of K and V read.

    python -m pageframe.benchmarks.experiments.cpu_attention [--repeats 30] [--threads N] [--kv-dtype bf16|int8]

Each request decodes one token over its context, whose blocks of 16 lie scattered in the pool (9 query and 3 KV heads of
64). Between two passes of one size the other layers' caches are gone through, so that what is read comes from memory as
in a step; "in the cache" reads the same layer again and again. Figures are medians.
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import median

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from pageframe.benchmarks.experiments.grids import count
from pageframe.kernels.attention import kv_cache_shape, select_backend

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16
SIZES = ((1, 1024), (8, 192), (32, 192), (8, 2112))
LAYERS = 30


class DecodeBatch:
    """A step in which each request decodes over a context of the same length."""

    def __init__(self, num_requests: int, context: int) -> None:
        self.rows = np.arange(num_requests, dtype=np.int32)
        self.context_lens = np.full(num_requests, context, dtype=np.int32)
        self.query_start = np.arange(num_requests + 1, dtype=np.int32)
        self.num_decode = num_requests


def measure(
    num_requests: int, context: int, repeats: int, kv_dtype: torch.dtype, *, layers: int
) -> tuple[float, float]:
    """Median microseconds of one layer's attention, and the GB/s of K and V that is.

    Args:
        layers: gone through in turn.
    """
    generator = torch.Generator().manual_seed(0)
    blocks_each = -(-context // BLOCK_SIZE)
    num_blocks = num_requests * blocks_each
    backend = select_backend("cpu", torch.device("cpu"))
    shape = kv_cache_shape(num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    is_coded = kv_dtype == torch.int8
    caches = [
        torch.randint(-127, 128, shape, dtype=torch.int8) if is_coded else torch.randn(shape).to(kv_dtype)
        for _ in range(layers)
    ]
    scales = [torch.full(shape[:-1], 1 / 127) if is_coded else None for _ in range(layers)]
    tables = torch.randperm(num_blocks, generator=generator).to(torch.int32).view(num_requests, blocks_each)
    plan = backend.plan_attention(DecodeBatch(num_requests, context), tables, BLOCK_SIZE)
    q = torch.randn(num_requests, NUM_HEADS, HEAD_DIM, generator=generator)
    seconds = []
    for repeat in range(repeats + 2):
        for cache, scale in zip(caches, scales, strict=True):
            started = time.perf_counter()
            backend.paged_attention(q, cache, plan, scale=HEAD_DIM**-0.5, kv_scales=scale)
            if repeat >= 2:
                seconds.append(time.perf_counter() - started)
    per_token = 2 * NUM_KV_HEADS * (HEAD_DIM * kv_dtype.itemsize + (4 if is_coded else 0))
    return median(seconds) * 1e6, num_requests * context * per_token / median(seconds) / 1e9


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description="Paged attention of one layer on a CPU.")
    parser.add_argument("--repeats", type=count, default=30, help="passes over all layers (default: 30)")
    parser.add_argument("--threads", type=count, default=torch.get_num_threads(), help="default: all")
    parser.add_argument("--kv-dtype", choices=("bf16", "int8"), default="bf16", help="of K and V (default: bf16)")
    parser.add_argument("--quick", action="store_true", help="toy sizes, to see that it runs")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    kv_dtype = torch.int8 if options.kv_dtype == "int8" else torch.bfloat16
    title = f"one layer, {options.kv_dtype} K/V, threads: {options.threads}"
    table = Table("requests x context", "us", "GB/s", "in the cache, us", "GB/s", title=title)
    sizes = ((2, 32),) if options.quick else SIZES
    with torch.inference_mode():
        for num_requests, context in sizes:
            repeats = 2 if options.quick else options.repeats
            cold = measure(num_requests, context, repeats, kv_dtype, layers=LAYERS)
            warm = measure(num_requests, context, repeats * LAYERS, kv_dtype, layers=1)
            figures = [f"{figure:.{digits}f}" for figure, digits in zip((*cold, *warm), (0, 1, 0, 1), strict=True)]
            table.add_row(f"{num_requests} x {context:,}", *figures)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
