"""The least time that a step can take: its bytes at the bandwidth, its products at the speed, that are measured here.

Everything else (small operations, scheduling, calls) is free in this account, and bytes and products overlap in full.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pageframe.runtime.config import ModelConfig
from pageframe.runtime.memory_plan import DTYPE_BYTES, kv_bytes_per_token

READ_BYTES = 400_000_000  # far beyond the caches
MATRIX_SIZE = 2048
PASSES = 7


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes read and floating-point operations done per second, all threads together."""

    bandwidth: float
    flops: float


def measure_machine(device: torch.device, compute_dtype: torch.dtype) -> Machine:
    """The fastest of several passes: reading memory, and a product of square matrices."""
    data = torch.ones(READ_BYTES // 4, device=device)
    matrix = torch.ones(MATRIX_SIZE, MATRIX_SIZE, dtype=compute_dtype, device=device)
    read = _fastest(lambda: data.sum().item())
    product = _fastest(lambda: (matrix @ matrix)[0, 0].item())
    return Machine(READ_BYTES / read, 2 * MATRIX_SIZE**3 / product)


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


class Floors:
    """The floors of one model on one machine.

    Args:
        dtype: of weights and K/V as stored, "bf16" or "float32".
    """

    def __init__(self, model: ModelConfig, dtype: str, machine: Machine) -> None:
        attention = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        self._model = model
        self._machine = machine
        self._layer_weights = (
            model.num_layers * model.hidden_size * (attention + (2 + model.gated_mlp) * model.intermediate_size)
        )
        self._output_weights = model.vocab_size * model.hidden_size
        # Of the embedding only the tokens' rows are read, which are left out.
        self._layer_bytes = self._layer_weights * DTYPE_BYTES[dtype]
        self._output_bytes = self._output_weights * DTYPE_BYTES[dtype]
        self._layer_kv_bytes = kv_bytes_per_token(model, dtype) // model.num_layers

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
        reading, arithmetic = num_bytes / self._machine.bandwidth, flops / self._machine.flops
        return Floor(max(reading, arithmetic), "reading" if reading >= arithmetic else "arithmetic")
