"""A pool's blocks in all layers: what is filled, copied and read, and what it takes; of numbers, and of codes."""

from __future__ import annotations

import math

import pytest
import torch

from pageframe.kernels.attention import kv_cache_shape
from pageframe.kernels.kv_pool import KvPool

CPU = torch.device("cpu")
NUM_LAYERS, NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM = 3, 6, 2, 4, 32
SLOTS = NUM_LAYERS * NUM_BLOCKS * 2 * NUM_KV_HEADS * BLOCK_SIZE


def make_pool(dtype: torch.dtype, num_blocks: int = NUM_BLOCKS) -> KvPool:
    """Block i of layer l is filled with 10 * l + i + 1."""
    pool = KvPool(NUM_LAYERS, kv_cache_shape(num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM), dtype, CPU)
    for layer, kv_cache in enumerate(pool.caches):
        for block_id in range(num_blocks):
            value = 10 * layer + block_id + 1
            kv_cache[block_id] = 2 if pool.scales else value
            if pool.scales:
                pool.scales[layer][block_id] = value / 2
    return pool


def blocks_in(pool: KvPool, layer: int, num_blocks: int = NUM_BLOCKS) -> list[float]:
    """What the blocks of one layer hold, checked to be the same in all their slots."""
    values = []
    for block_id in range(num_blocks):
        k, v = pool.read(layer, block_id)
        assert k.shape == v.shape == (NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        value = float(k.flatten()[0])
        for part in (k, v):
            torch.testing.assert_close(part.float(), torch.full(k.shape, value), rtol=0, atol=0, equal_nan=True)
        values.append(value)
    return values


FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


@pytest.fixture(params=[torch.bfloat16, torch.float32, torch.int8, *FP8], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def test_a_block_is_read_in_each_layer(dtype: torch.dtype) -> None:
    pool = make_pool(dtype)
    assert blocks_in(pool, 0) == [1, 2, 3, 4, 5, 6]
    assert blocks_in(pool, 2) == [21, 22, 23, 24, 25, 26]


@pytest.mark.parametrize("value", [0.0, 1.0, math.nan])
def test_fill_touches_these_blocks_in_all_layers(dtype: torch.dtype, value: float) -> None:
    pool = make_pool(dtype)
    pool.fill([1, 4], value)
    for layer in range(NUM_LAYERS):
        found = blocks_in(pool, layer)
        assert [found[1], found[4]] == pytest.approx([value, value], nan_ok=True)
        assert [found[i] for i in (0, 2, 3, 5)] == [10 * layer + i + 1 for i in (0, 2, 3, 5)]


def test_copies_within_a_pool_read_all_sources_first(dtype: torch.dtype) -> None:
    pool = make_pool(dtype)
    pool.copy_from(pool, [0, 1, 3], [1, 0, 2])
    assert blocks_in(pool, 0) == [2, 1, 4, 4, 5, 6]
    assert blocks_in(pool, 1) == [12, 11, 14, 14, 15, 16]


def test_copies_between_pools_of_other_sizes(dtype: torch.dtype) -> None:
    pool, host = make_pool(dtype), make_pool(dtype, num_blocks=2)
    host.copy_from(pool, [5], [1])
    assert blocks_in(host, 1, num_blocks=2) == [11, 16]
    pool.copy_from(host, [1, 0], [0, 2])
    assert blocks_in(pool, 2) == [26, 22, 21, 24, 25, 26]


@pytest.mark.parametrize(
    ("dtype", "slot_bytes"),
    [
        (torch.bfloat16, 2 * HEAD_DIM),
        (torch.float32, 4 * HEAD_DIM),
        (torch.int8, HEAD_DIM + 4),
        (torch.float8_e4m3fn, HEAD_DIM + 4),
    ],
)
def test_what_it_takes(dtype: torch.dtype, slot_bytes: int) -> None:
    assert make_pool(dtype).nbytes == SLOTS * slot_bytes
    assert KvPool(NUM_LAYERS, kv_cache_shape(0, 1, 1, 32), dtype, CPU).nbytes == 0
