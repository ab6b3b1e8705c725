"""The least time that a step can take: its bytes at the bandwidth, its products at the speed, that are measured here.

Everything else (small operations, scheduling, calls) is free in this account, and bytes and products overlap in full.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pageframe.kernels.cpu import CpuKernels, PackedWeight, load
from pageframe.kernels.cpu.backend import CpuBackend
from pageframe.kernels.cpu.packing import BLOCK_BYTES, GROUP, PackedValues, pack_bf16, pack_blocks
from pageframe.runtime.config import ModelConfig
from pageframe.runtime.engine import Engine
from pageframe.runtime.model_runner import ModelRunner

READ_BYTES = 400_000_000  # far beyond the caches
MATRIX_SIZE = 2048
#: A linear whose matrix stays in a core's caches, and the rows that it is applied to.
LINEAR_SIZE, LINEAR_ROWS = 512, 4096
PASSES = 25  # on a busy machine some of them are undisturbed


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes read and floating-point operations done per second, all threads together."""

    bandwidth: float
    flops: float

    def __str__(self) -> str:
        return f"reads {self.bandwidth / 1e9:.1f} GB/s, multiplies at {self.flops / 1e9:,.0f} GFLOP/s"


def measure_machine(device: torch.device, dtype: torch.dtype, kernels: CpuKernels | None = None) -> Machine:
    """The fastest of several passes: reading memory, and products.

    Args:
        dtype: of the numbers that are multiplied.
        kernels: the compiled engine, where it computes; its products count where they are faster than torch's.
    """
    data = torch.ones(READ_BYTES // 4, device=device)
    matrix = torch.ones(MATRIX_SIZE, MATRIX_SIZE, dtype=dtype, device=device)
    read = _fastest(lambda: data.sum().item())
    flops = 2 * MATRIX_SIZE**3 / _fastest(lambda: (matrix @ matrix)[0, 0].item())
    if kernels is not None:
        flops = max(flops, *(_linear_flops(kernels, values) for values in _matrices()))
    return Machine(READ_BYTES / read, flops)


def _matrices() -> list[PackedValues]:
    """A matrix of each kind of arithmetic: instruction sets may multiply codes faster than bfloat16."""
    blocks = torch.zeros(LINEAR_SIZE, LINEAR_SIZE // GROUP * BLOCK_BYTES["Q8_0"], dtype=torch.uint8)
    return [
        pack_bf16(torch.ones(LINEAR_SIZE, LINEAR_SIZE, dtype=torch.bfloat16)),
        pack_blocks("Q8_0", blocks),
    ]


def _linear_flops(kernels: CpuKernels, values: PackedValues) -> float:
    weight, rows = PackedWeight(values), torch.ones(LINEAR_ROWS, LINEAR_SIZE)
    return 2 * LINEAR_ROWS * LINEAR_SIZE**2 / _fastest(lambda: kernels.linear(rows, weight))


def _fastest(work: Callable[[], object]) -> float:
    work()
    seconds = []
    for _ in range(PASSES):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


@dataclass(frozen=True, slots=True)
class Floor:
    """Seconds, and which of the two takes them: "reading" or "arithmetic"."""

    seconds: float
    bound: str


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """What a step reads, as it is stored.

    Args:
        layers: all matrices of all layers.
        output: the output matrix.
        kv: K and V of one token over all layers.
    """

    layers: int
    output: int
    kv: int


class Floors:
    """The floors of one model on one machine."""

    def __init__(self, model: ModelConfig, stored: StoredBytes, machine: Machine) -> None:
        attention = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        self.machine = machine
        self._model = model
        self._layer_weights = (
            model.num_layers * model.hidden_size * (attention + (2 + model.gated_mlp) * model.intermediate_size)
        )
        self._output_weights = model.vocab_size * model.hidden_size
        # Of the embedding only the tokens' rows are read, which are left out.
        self._layer_bytes, self._output_bytes = stored.layers, stored.output
        self._layer_kv_bytes = stored.kv // model.num_layers

    def prefill(self, num_tokens: int, chunk: int, start: int = 0) -> Floor:
        """The prompt's positions [start, start + num_tokens) up to the first token of its answer.

        Each step computes up to `chunk` tokens. It reads the layers' weights, and the K/V of the tokens before its own
        that its first query sees; the last step reads the output matrix too. Arithmetic is 2 flops for each weight of
        the layers and each token, the output projection once, and 4 flops for each query, key and element of a head.
        """
        positions = range(start + 1, start + num_tokens + 1)
        pairs = sum(self._seen(position) for position in positions)
        flops = 2 * (num_tokens * self._layer_weights + self._output_weights) + self._attention_flops(pairs)
        steps = range(start, start + num_tokens, chunk)
        cached = sum(self._seen(first + 1) - self._model.num_layers for first in steps)  # a query also sees itself
        num_bytes = len(steps) * self._layer_bytes + self._output_bytes + cached * self._layer_kv_bytes
        return self._floor(num_bytes, flops)

    def decode(self, contexts: list[int]) -> Floor:
        """One step of requests with these contexts: weights once, and each request's K/V once."""
        seen = sum(self._seen(context) for context in contexts)
        flops = 2 * len(contexts) * (self._layer_weights + self._output_weights) + self._attention_flops(seen)
        return self._floor(self._layer_bytes + self._output_bytes + seen * self._layer_kv_bytes, flops)

    def _seen(self, context: int) -> int:
        """Keys that one query sees, summed over the layers."""
        windows = self._model.windows or (None,) * self._model.num_layers
        return sum(context if window is None else min(context, window) for window in windows)

    def _attention_flops(self, pairs: int) -> int:
        return 4 * self._model.num_heads * self._model.head_dim * pairs

    def _floor(self, num_bytes: int, flops: int) -> Floor:
        reading, arithmetic = num_bytes / self.machine.bandwidth, flops / self.machine.flops
        return Floor(max(reading, arithmetic), "reading" if reading >= arithmetic else "arithmetic")


def measure_floors(engine: Engine) -> Floors:
    """The floors of an engine's model, with its weights and K/V as it holds them, for the products that it uses."""
    resolved, runner = engine.resolved, engine.runner
    assert isinstance(runner, ModelRunner)
    kernels = load() if resolved.instruction_set else None
    multiplied = getattr(torch, resolved.compute_dtype) if kernels is None else CpuBackend(kernels.library).act_dtype
    machine = measure_machine(torch.device(resolved.device), multiplied, kernels)
    stored = StoredBytes(runner.decoder.layer_bytes, runner.decoder.output_bytes, resolved.kv_bytes_per_token)
    return Floors(resolved.model, stored, machine)
