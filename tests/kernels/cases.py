"""Random steps for the attention tests: a pool of NaN in which only what a step may read holds numbers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pageframe.kernels.attention import Backend, kv_cache_shape

from .oracle import attend

SEED = int(os.environ.get("PAGEFRAME_TEST_SEED", "20240607"))

#: What an entry of a table past the context may hold: nobody follows it.
GARBAGE = (-1, -(2**31), 2**31 - 1)


@dataclass(frozen=True)
class Step:
    """A `StepBatch`."""

    rows: npt.NDArray[np.int32]
    context_lens: npt.NDArray[np.int32]
    query_start: npt.NDArray[np.int32]
    num_decode: int


@dataclass(frozen=True)
class Shape:
    group: int = 3
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True)
class Case:
    """One step on one layer, and what it must give."""

    shape: Shape
    step: Step
    q: torch.Tensor
    kv_cache: torch.Tensor
    tables: torch.Tensor
    scale: float
    expected: torch.Tensor

    def run(self, backend: Backend) -> torch.Tensor:
        plan = backend.plan_attention(self.step, self.tables, self.shape.block_size)
        return backend.paged_attention(
            self.q, self.kv_cache, plan, scale=self.scale, window=self.shape.window, softcap=self.shape.softcap
        )

    def check(self, actual: torch.Tensor) -> None:
        """Compare with the oracle: sums in float32, then one rounding to q's dtype.

        The message of a failure names the seed that repeats it.
        """
        assert actual.dtype == self.q.dtype
        assert actual.shape == self.q.shape
        rounding = 0.0 if self.q.dtype == torch.float32 else torch.finfo(self.q.dtype).eps
        torch.testing.assert_close(
            actual.to(torch.float64),
            self.expected,
            rtol=rounding,
            atol=2e-5,
            msg=lambda text: f"PAGEFRAME_TEST_SEED={SEED}, {self.shape}, contexts {self.step.context_lens}: {text}",
        )


def make_case(
    rng: np.random.Generator, shape: Shape, decode: Sequence[int], chunks: Sequence[tuple[int, int]] = ()
) -> Case:
    """A step of decode rows with these contexts, then prefill chunks of (start, number of tokens)."""
    contexts = [*decode, *(start + length for start, length in chunks)]
    lengths = [1] * len(decode) + [length for _, length in chunks]
    step = Step(
        rows=rng.permutation(len(contexts) + 3)[: len(contexts)].astype(np.int32),
        context_lens=np.array(contexts, dtype=np.int32),
        query_start=np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
        num_decode=len(decode),
    )
    kv_cache, tables = _fill_pool(rng, shape, step)
    q = torch.from_numpy(rng.standard_normal((int(step.query_start[-1]), shape.group * shape.num_kv_heads, shape.head_dim)))
    q = q.to(shape.dtype)
    scale = shape.head_dim**-0.5
    expected = attend(
        q.to(torch.float64).numpy(),
        kv_cache.to(torch.float64).numpy(),
        tables.numpy(),
        step.rows,
        step.context_lens,
        step.query_start,
        scale=scale,
        window=shape.window,
        softcap=shape.softcap,
    )
    assert np.isfinite(expected).all(), "the oracle read a slot that is not live"
    return Case(shape, step, q, kv_cache, tables, scale, torch.from_numpy(expected))


def _fill_pool(rng: np.random.Generator, shape: Shape, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool of NaN with numbers in the slots that some query sees, and tables that lead to them in random order."""
    block_size = shape.block_size
    visible_from = _visible_from(shape, step)
    blocks = [
        range(int(low) // block_size, -(-int(context) // block_size))
        for low, context in zip(visible_from, step.context_lens, strict=True)
    ]
    num_blocks = sum(len(wanted) for wanted in blocks) + 5
    ids = rng.permutation(np.arange(1, num_blocks - 1))
    ids = rng.permutation(np.concatenate(([0, num_blocks - 1], ids[: num_blocks - 7])))

    kv_cache = np.full(kv_cache_shape(num_blocks, shape.num_kv_heads, block_size, shape.head_dim), np.nan)
    max_blocks = max((wanted.stop for wanted in blocks), default=0) + 2
    tables = rng.choice(np.array(GARBAGE), size=(len(step.rows) + 3, max_blocks)).astype(np.int32)
    given = 0
    for row, wanted, low, context in zip(step.rows, blocks, visible_from, step.context_lens, strict=True):
        tables[row, : wanted.start] = -1
        tables[row, wanted.start : wanted.stop] = ids[given : given + len(wanted)]
        given += len(wanted)
        for position in range(int(low), int(context)):
            slot = kv_cache[tables[row, position // block_size], :, :, position % block_size]
            slot[...] = rng.standard_normal(slot.shape)
    return torch.from_numpy(kv_cache).to(shape.dtype), torch.from_numpy(tables)


def _visible_from(shape: Shape, step: Step) -> npt.NDArray[np.int32]:
    """The oldest position that any query of each request sees."""
    if shape.window is None:
        return np.zeros_like(step.context_lens)
    first_query = step.context_lens - np.diff(step.query_start)
    return np.maximum(first_query - shape.window + 1, 0)
