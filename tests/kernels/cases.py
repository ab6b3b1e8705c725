"""Random steps for the attention tests: a pool of NaN in which only what a step may read holds numbers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pageframe.kernels.attention import AttentionPlan, Backend, kv_cache_shape

from .oracle import attend

SEED = int(os.environ.get("PAGEFRAME_TEST_SEED", "20240607"))

#: More blocks than any test's pool has.
MAX_POOL = 10**6

#: The largest code of each dtype of quantised K and V.
LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 240.0}

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
    """A layer. K and V are stored in kv_dtype where that is given: codes with scales; else in dtype, as q is."""

    group: int = 3
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    kv_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Case:
    """One step on one layer, on the CPU, and what it must give."""

    shape: Shape
    step: Step
    q: torch.Tensor
    kv_cache: torch.Tensor
    tables: torch.Tensor
    scale: float
    expected: torch.Tensor
    kv_scales: torch.Tensor | None = None

    def check(self, backend: Backend, device: torch.device) -> None:
        """Plan and run the step; raises AssertionError where the result is not the oracle's."""
        plan = backend.plan_attention(self.step, self.tables.to(device), self.shape.block_size)
        self.check_plan(backend, plan, device)

    def check_plan(self, backend: Backend, plan: AttentionPlan, device: torch.device) -> None:
        """Run the step with a plan made of its batch and tables."""
        actual = backend.paged_attention(
            self.q.to(device),
            self.kv_cache.to(device),
            plan,
            scale=self.scale,
            window=self.shape.window,
            softcap=self.shape.softcap,
            kv_scales=None if self.kv_scales is None else self.kv_scales.to(device),
        )
        assert actual.dtype == self.q.dtype
        atol, rtol = tolerance(backend, self.shape.dtype)
        torch.testing.assert_close(
            actual.cpu().to(torch.float64),
            self.expected,
            rtol=rtol,
            atol=atol,
            msg=lambda text: f"{self.shape}, contexts {self.step.context_lens.tolist()}: {text}",
        )


def tolerance(backend: Backend, dtype: torch.dtype) -> tuple[float, float]:
    """Absolute and relative. The reference sums in float32 and rounds once, to q's dtype.

    On tensor cores, and by the compiled CPU kernels, the weights are rounded as well, before they multiply V: an
    absolute error, V being about 1.
    """
    if dtype == torch.float32:
        return 2e-5, 0.0
    rounding = torch.finfo(dtype).eps
    return (2e-5 if backend.name == "reference" else rounding), rounding


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
    return make_layer(rng, shape, step, _random_tables(rng, shape, step))


def make_layer(rng: np.random.Generator, shape: Shape, step: Step, tables: npt.NDArray[np.int32]) -> Case:
    """A layer of this shape in a step with these tables."""
    numbers = _fill_pool(rng, shape, step, tables)
    kv_cache, kv_scales, numbers = store(numbers, shape.kv_dtype or shape.dtype)
    num_heads = shape.group * shape.num_kv_heads
    q = torch.from_numpy(rng.standard_normal((int(step.query_start[-1]), num_heads, shape.head_dim))).to(shape.dtype)
    scale = shape.head_dim**-0.5
    expected = attend(
        q.to(torch.float64).numpy(),
        numbers.numpy(),
        tables,
        step.rows,
        step.context_lens,
        step.query_start,
        scale=scale,
        window=shape.window,
        softcap=shape.softcap,
    )
    assert np.isfinite(expected).all(), "the oracle read a slot that is not live"
    return Case(shape, step, q, kv_cache, torch.from_numpy(tables), scale, torch.from_numpy(expected), kv_scales)


def _random_tables(rng: np.random.Generator, shape: Shape, step: Step) -> npt.NDArray[np.int32]:
    """Tables in which the blocks that some query sees are in random order, those before are released (-1)."""
    first_block = _visible_from(shape, step) // shape.block_size
    end_block = -(-step.context_lens // shape.block_size)
    num_needed = int((end_block - first_block).sum())
    ids = iter(_permuted_ids(rng, num_needed, num_needed + 5))
    tables = rng.choice(np.array(GARBAGE), size=(len(step.rows) + 3, int(end_block.max(initial=0)) + 2)).astype(
        np.int32
    )
    for row, first, end in zip(step.rows, first_block, end_block, strict=True):
        tables[row, :first] = -1
        tables[row, first:end] = [next(ids) for _ in range(first, end)]
    return tables


def _fill_pool(rng: np.random.Generator, shape: Shape, step: Step, tables: npt.NDArray[np.int32]) -> torch.Tensor:
    """A pool of NaN, float64, with numbers in the slots that some query sees."""
    block_size = shape.block_size
    num_blocks = int(tables.max(where=tables < MAX_POOL, initial=0)) + 1
    kv_cache = np.full(kv_cache_shape(num_blocks, shape.num_kv_heads, block_size, shape.head_dim), np.nan)
    for row, oldest, context in zip(step.rows, _visible_from(shape, step), step.context_lens, strict=True):
        for position in range(int(oldest), int(context)):
            slot = kv_cache[tables[row, position // block_size], :, :, position % block_size]
            slot[...] = rng.standard_normal(slot.shape)
    return torch.from_numpy(kv_cache)


def store(numbers: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """K and V, float64 with NaN in dead slots, as a cache of this dtype holds them: the cache, its scales, and what
    these stand for, float64. A dead slot's codes are numbers, its scale is NaN."""
    if dtype not in LARGEST_CODE:
        kv_cache = numbers.to(dtype)
        return kv_cache, None, kv_cache.to(torch.float64)
    scales = (numbers.abs().amax(dim=-1) / LARGEST_CODE[dtype]).to(torch.float32)
    scaled = (numbers / scales.to(torch.float64).unsqueeze(-1)).nan_to_num(-3.0)
    codes = (scaled.round() if dtype == torch.int8 else scaled.to(torch.float32)).to(dtype)
    return codes, scales, codes.to(torch.float64) * scales.to(torch.float64).unsqueeze(-1)


def _permuted_ids(rng: np.random.Generator, num_needed: int, num_blocks: int) -> npt.NDArray[np.int64]:
    """Block ids in random order, the pool's first and last among them."""
    inner = rng.permutation(np.arange(1, num_blocks - 1))[: max(0, num_needed - 2)]
    return rng.permutation(np.concatenate(([0, num_blocks - 1], inner)))


def _visible_from(shape: Shape, step: Step) -> npt.NDArray[np.int32]:
    """The oldest position that any query of each request sees."""
    if shape.window is None:
        return np.zeros_like(step.context_lens)
    first_query = step.context_lens - np.diff(step.query_start)
    return np.maximum(first_query - shape.window + 1, 0)
