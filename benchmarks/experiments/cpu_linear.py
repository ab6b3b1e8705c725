"""The linears of one step of SmolLM2-135M on a CPU: the compiled ones beside oneDNN's packed ones.

    python -m pageframe.benchmarks.experiments.cpu_linear [--rows 1 8 32 256] [--repeats 10] [--threads N]

One pass is the 120 matrices of 30 layers and the output projection, 134 million weights. The ways take turns, and
the table has each one's fastest pass: on a busy machine that is the one least disturbed. GB/s are of the weights as
each holds them (0.625 bytes of 4 bits and their scales, 2 or 4 else).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from pageframe.kernels.cpu import BuildError, CpuKernels, load
from pageframe.runtime.models.blocks import BlockMatrix
from pageframe.runtime.models.compiled import lay_out_in_order
from pageframe.runtime.models.weights import DenseWeight, can_pack, make_weight

LAYERS = 30
LAYER_SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
OUTPUT_SHAPE = (49152, 576)

Linear = Callable[[Tensor], Tensor]


def linears(matrices: list[Tensor]) -> dict[str, tuple[float, list[Linear]]]:
    """Each way to multiply by matrices of these shapes: bytes per weight and a function for each matrix."""
    ways: dict[str, tuple[float, list[Linear]]] = {}
    try:
        kernels = load()
    except BuildError as error:
        print(f"no compiled kernels: {error}", file=sys.stderr)
    else:
        ways["compiled 4 bits"] = (20 / 32, _compiled(kernels, [_random_blocks(matrix) for matrix in matrices]))
        ways["compiled bf16"] = (2, _compiled(kernels, matrices))
    for dtype in (torch.bfloat16, torch.float32):
        if can_pack(dtype):
            weights = [DenseWeight(matrix.to(dtype)) for matrix in matrices]
            ways[f"oneDNN {dtype}".replace("torch.", "")] = (
                dtype.itemsize,
                [_cast(weight, dtype) for weight in weights],
            )
    return ways


def _compiled(kernels: CpuKernels, matrices: Sequence[Tensor | BlockMatrix]) -> list[Linear]:
    weights = [make_weight(matrix, None, torch.float32, kernels) for matrix in matrices]
    lay_out_in_order(weights)
    return list(weights)


def _random_blocks(matrix: Tensor) -> BlockMatrix:
    """As many weights of 4 bits, of which only the time matters: small positive scales, minimums and any codes."""
    n, k = matrix.shape
    data = torch.randint(0, 256, (n, k // 32, 20), dtype=torch.uint8)
    data[:, :, 1] = data[:, :, 3] = 0x20
    return BlockMatrix("Q4_1", data.view(n, -1))


def _cast(weight: DenseWeight, dtype: torch.dtype) -> Linear:
    return lambda x: weight(x.to(dtype))


def fastest_passes(ways: dict[str, list[Linear]], inputs: list[Tensor], repeats: int) -> dict[str, float]:
    """Seconds of each way's fastest pass of `repeats`, after one that is not counted."""
    best = dict.fromkeys(ways, float("inf"))
    for repeat in range(repeats + 1):
        for name, functions in ways.items():
            start = time.perf_counter()
            for function, x in zip(functions, inputs, strict=True):
                function(x)
            if repeat > 0:
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description="Linears of one decode step on a CPU, by number of rows")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 256])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(0)
    shapes = [*LAYER_SHAPES * LAYERS, OUTPUT_SHAPE]
    matrices = [(torch.randn(n, k, generator=generator) / k**0.5).bfloat16() for n, k in shapes]
    num_weights = sum(matrix.numel() for matrix in matrices)
    table = Table("rows", "way", "ms", "GB/s", "GFLOP/s", title=f"{num_weights / 1e6:.0f}M weights")
    with torch.inference_mode():
        ways = linears(matrices)
        for rows in options.rows:
            inputs = [torch.randn(rows, k, generator=generator) for _, k in shapes]
            best = fastest_passes({name: functions for name, (_, functions) in ways.items()}, inputs, options.repeats)
            for name, seconds in best.items():
                bandwidth, speed = num_weights * ways[name][0] / seconds, 2 * rows * num_weights / seconds
                table.add_row(str(rows), name, f"{seconds * 1e3:.1f}", f"{bandwidth / 1e9:.1f}", f"{speed / 1e9:.0f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
