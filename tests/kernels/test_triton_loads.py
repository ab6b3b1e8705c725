"""Which bytes of the K/V cache the Triton kernels read: the interpreter's loads, counted by address and mask."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import triton
from triton.runtime.interpreter import InterpreterBuilder

from pageframe.kernels.attention import kv_cache_shape, select_backend
from pageframe.kernels.plan import make_plan
from pageframe.kernels.triton.prefill import attend_prefill, plan_prefill, tile_rows
from pageframe.kernels.triton.tables import settings

from .cases import Step

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="loads are counted in the interpreter")

NUM_KV_HEADS, BLOCK_SIZE = 2, 16
CPU = torch.device("cpu")
Ints = npt.NDArray[np.int64]


@contextmanager
def reads_counted(*tensors: torch.Tensor) -> Iterator[list[Ints]]:
    """Of each tensor, as it lies in memory: how often kernels have read every element. Masked elements do not count."""
    counts = [np.zeros(tensor.numel(), np.int64) for tensor in tensors]
    load = InterpreterBuilder.create_masked_load

    def counting_load(builder: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        at = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
        for tensor, count in zip(tensors, counts, strict=True):
            element = (at.astype(np.int64) - tensor.data_ptr()) // tensor.itemsize
            np.add.at(count, element[(element >= 0) & (element < tensor.numel())], 1)
        return load(builder, pointers, mask, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_masked_load", counting_load)
        yield counts


def make_pool(
    rng: np.random.Generator, contexts: list[int], head_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """A cache with three blocks more than the contexts need, its scales where it is int8, and their tables."""
    blocks = [-(-context // BLOCK_SIZE) for context in contexts]
    ids = rng.permutation(sum(blocks) + 3)
    tables = np.full((len(contexts), max(blocks)), -1, np.int32)
    for row, count in enumerate(blocks):
        tables[row, :count], ids = ids[:count], ids[count:]
    shape = kv_cache_shape(sum(blocks) + 3, NUM_KV_HEADS, BLOCK_SIZE, head_dim)
    numbers = torch.from_numpy(rng.integers(-3, 4, size=shape))
    scales = torch.ones(shape[:-1]) if dtype == torch.int8 else None
    return numbers.to(dtype), scales, torch.from_numpy(tables)


def slots_read(tables: torch.Tensor, num_blocks: int, ranges: list[tuple[int, int, int]]) -> Ints:
    """[num_blocks, BLOCK_SIZE]: in how many of the (row, first position, end) each slot lies."""
    times = np.zeros((num_blocks, BLOCK_SIZE), np.int64)
    for row, first, end in ranges:
        position = np.arange(first, end)
        np.add.at(times, (tables[row].numpy()[position // BLOCK_SIZE], position % BLOCK_SIZE), 1)
    return times


def by_slot(count: Ints, shape: tuple[int, ...]) -> Ints:
    """Reads of a cache or its scales as [num_blocks, BLOCK_SIZE, elements of the slot in K and V of all heads]."""
    return count.reshape(*shape[:4], -1).transpose(0, 3, 1, 2, 4).reshape(shape[0], BLOCK_SIZE, -1)


@pytest.mark.parametrize(("dtype", "window"), [(torch.bfloat16, None), (torch.int8, 1000)])
def test_decode_at_4k_reads_each_live_byte_once(
    rng: np.random.Generator, dtype: torch.dtype, window: int | None
) -> None:
    """However many query heads share a KV head, and with as few dead slots read beside as 5% of the live ones."""
    contexts, group, head_dim = [4096], 4, 16
    kv_cache, kv_scales, tables = make_pool(rng, contexts, head_dim, dtype)
    step = Step(np.arange(1, dtype=np.int32), np.array(contexts, np.int32), np.arange(2, dtype=np.int32), 1)
    backend = select_backend("triton", CPU)
    plan = backend.plan_attention(step, tables, BLOCK_SIZE)
    q = torch.ones(1, group * NUM_KV_HEADS, head_dim, dtype=torch.bfloat16)
    watched = [kv_cache] if kv_scales is None else [kv_cache, kv_scales]
    with reads_counted(*watched) as counts:
        backend.paged_attention(q, kv_cache, plan, scale=0.1, window=window, kv_scales=kv_scales)
    live = slots_read(tables, kv_cache.shape[0], [(0, 0 if window is None else 4096 - window, 4096)])[..., None]
    for count in counts:
        reads = by_slot(count, kv_cache.shape)
        assert (reads >= live).all(), "a live byte was not read"
        assert reads.sum() <= 1.05 * live.sum() * reads.shape[2]


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_prefill_reads_what_its_tiling_says(rng: np.random.Generator, dtype: torch.dtype, window: int | None) -> None:
    """A tile of tokens at the positions [first, last] reads the slots of [max(0, first - window + 1), last], K and V of
    a KV head, once each and nothing else. A tile has tile_rows // group tokens, the last of a chunk what is left.
    """
    group, head_dim, chunks = 8, 16, [(0, 40), (75, 21), (50, 1)]
    contexts = [start + length for start, length in chunks]
    kv_cache, kv_scales, tables = make_pool(rng, contexts, head_dim, dtype)
    step = Step(
        rows=np.arange(len(chunks), dtype=np.int32),
        context_lens=np.array(contexts, np.int32),
        query_start=np.concatenate(([0], np.cumsum([length for _, length in chunks]))).astype(np.int32),
        num_decode=0,
    )
    q = torch.ones(int(step.query_start[-1]), group * NUM_KV_HEADS, head_dim, dtype=torch.bfloat16)
    watched = [kv_cache] if kv_scales is None else [kv_cache, kv_scales]
    with reads_counted(*watched) as counts:
        attend_prefill(
            q,
            kv_cache,
            tables,
            make_plan(step, CPU, BLOCK_SIZE, parts=None),
            plan_prefill(step, CPU),
            torch.empty_like(q),
            scale=0.1,
            window=window,
            softcap=None,
            kv_scales=kv_scales,
        )
    launch = settings("attend_prefill", head_dim=head_dim, cache_dtype=dtype, group=group, device=CPU)
    tile_tokens = tile_rows(group, q.dtype, launch.num_warps) // group
    ranges = [
        (row, 0 if window is None else max(0, first - window + 1), min(first + tile_tokens, start + length))
        for row, (start, length) in enumerate(chunks)
        for first in range(start, start + length, tile_tokens)
    ]
    assert len(ranges) == 3 + 2 + 1
    expected = slots_read(tables, kv_cache.shape[0], ranges)[..., None]
    for count in counts:
        reads = by_slot(count, kv_cache.shape)
        np.testing.assert_array_equal(reads, np.broadcast_to(expected, reads.shape))
