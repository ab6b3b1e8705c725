"""Paged attention of every backend against the float64 oracle, over pools of NaN."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from pageframe.kernels.attention import Backend, kv_cache_shape

from .cases import Shape, Step, make_case, make_layer

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

DTYPES = (BF16, FP32, FP16)
#: Every combination of query group, head_dim and block size, the dtypes in turn.
COMMON = [
    Shape(group=group, num_kv_heads=2 if group == 1 else 1, head_dim=head_dim, block_size=block_size, dtype=dtype)
    for (group, head_dim, block_size), dtype in zip(
        itertools.product((1, 3, 4, 8), (64, 128), (16, 32)), itertools.cycle(DTYPES), strict=False
    )
]
SHAPES = [
    *COMMON,
    Shape(group=4, num_kv_heads=1, head_dim=64, block_size=1, dtype=FP32),
    Shape(group=3, num_kv_heads=1, head_dim=64, block_size=256, dtype=BF16),
    Shape(group=3, num_kv_heads=1, head_dim=64, block_size=16, dtype=FP32, softcap=2.0),
    Shape(group=4, num_kv_heads=1, head_dim=64, block_size=16, dtype=BF16, softcap=2.0, window=21),
    Shape(group=1, num_kv_heads=2, head_dim=64, block_size=16, dtype=FP32, window=16),
    Shape(group=2, num_kv_heads=1, head_dim=64, block_size=16, dtype=FP32, window=33),
    Shape(group=2, num_kv_heads=1, head_dim=64, block_size=32, dtype=BF16, window=1),
]


def around_block_edges(rng: np.random.Generator, block_size: int) -> list[int]:
    """Contexts of 0, 1 and one less, exactly and one more than some blocks, in random order."""
    size = min(block_size, 64)
    contexts = [0, 1, size - 1, size, size + 1, 3 * size, 5 * size - 1, int(rng.integers(1, 100))]
    return list(rng.permutation(contexts))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_rows(backend: Backend, device: torch.device, rng: np.random.Generator, shape: Shape) -> None:
    make_case(rng, shape, around_block_edges(rng, shape.block_size)).check(backend, device)


@pytest.mark.parametrize("window", [None, 1, 20, 40, 1000])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_decode_rows_and_chunks_in_one_step(
    backend: Backend, device: torch.device, rng: np.random.Generator, window: int | None, softcap: float | None
) -> None:
    shape = Shape(group=3, num_kv_heads=1, window=window, softcap=softcap)
    chunks = [(0, 17), (0, 1), (0, 0), (5, 9), (40, 33), (16, 16), (31, 1)]
    make_case(rng, shape, decode=[40, 0, 3], chunks=chunks).check(backend, device)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_chunks_alone(backend: Backend, device: torch.device, rng: np.random.Generator, dtype: torch.dtype) -> None:
    shape = Shape(group=4, num_kv_heads=2, dtype=dtype, block_size=32)
    make_case(rng, shape, decode=[], chunks=[(0, 33), (33, 31)]).check(backend, device)


@pytest.mark.parametrize("window", [None, 300])
def test_long_contexts(backend: Backend, device: torch.device, rng: np.random.Generator, window: int | None) -> None:
    shape = Shape(group=1, num_kv_heads=1, window=window)
    make_case(rng, shape, decode=[255, 256, 257, 600, 0, 1100]).check(backend, device)


def test_many_rows_of_many_lengths(backend: Backend, device: torch.device, rng: np.random.Generator) -> None:
    shape = Shape(group=1, num_kv_heads=1, block_size=8)
    make_case(rng, shape, decode=rng.integers(0, 70, size=40).tolist()).check(backend, device)


def test_one_plan_serves_layers_of_every_kind(backend: Backend, device: torch.device, rng: np.random.Generator) -> None:
    """Layers share a step's tables and differ in window, number of KV heads and contents."""
    first = make_case(rng, Shape(), decode=[70, 9, 0], chunks=[(40, 8)])
    kinds = [Shape(), Shape(window=24), Shape(group=2, num_kv_heads=1), Shape(window=3), Shape()]
    plan = backend.plan_attention(first.step, first.tables.to(device), 16)
    for kind in kinds:
        make_layer(rng, kind, first.step, first.tables.numpy()).check_plan(backend, plan, device)


def test_result_goes_where_the_caller_wants_it(
    backend: Backend, device: torch.device, rng: np.random.Generator
) -> None:
    case = make_case(rng, Shape(), decode=[7, 0], chunks=[(0, 5), (3, 4)])
    plan = backend.plan_attention(case.step, case.tables.to(device), 16)
    out = torch.full_like(case.q, torch.nan).to(device)
    result = backend.paged_attention(case.q.to(device), case.kv_cache.to(device), plan, scale=case.scale, out=out)
    assert result is out
    torch.testing.assert_close(out.cpu().to(torch.float64), case.expected, rtol=0, atol=2e-5)


def test_padding_rows_are_never_looked_up(backend: Backend, device: torch.device, rng: np.random.Generator) -> None:
    case = make_case(rng, Shape(), decode=[7, 0, 20, 0])
    rows = np.where(case.step.context_lens == 0, np.int32(2**31 - 1), case.step.rows)
    dataclasses.replace(case, step=dataclasses.replace(case.step, rows=rows)).check(backend, device)


@pytest.mark.parametrize("num_padding", [0, 3])
def test_step_without_contexts(backend: Backend, device: torch.device, num_padding: int) -> None:
    step = Step(
        rows=np.zeros(num_padding, dtype=np.int32),
        context_lens=np.zeros(num_padding, dtype=np.int32),
        query_start=np.arange(num_padding + 1, dtype=np.int32),
        num_decode=num_padding,
    )
    tables = torch.full((4, 4), -1, dtype=torch.int32, device=device)
    kv_cache = torch.full(kv_cache_shape(3, 2, 16, 64), torch.nan, device=device)
    q = torch.ones(num_padding, 4, 64, device=device)
    plan = backend.plan_attention(step, tables, 16)
    assert torch.equal(backend.paged_attention(q, kv_cache, plan, scale=1.0), torch.zeros_like(q))


def test_queries_may_be_a_view_of_a_wider_tensor(
    backend: Backend, device: torch.device, rng: np.random.Generator
) -> None:
    """As when q, k and v come out of one product."""
    case = make_case(rng, Shape(), decode=[7, 30], chunks=[(0, 5)])
    wide = torch.full((case.q.shape[0], case.q.shape[1] + 4, case.q.shape[2]), torch.nan)
    wide[:, : case.q.shape[1]] = case.q
    plan = backend.plan_attention(case.step, case.tables.to(device), 16)
    q = wide.to(device)[:, : case.q.shape[1]]
    result = backend.paged_attention(q, case.kv_cache.to(device), plan, scale=case.scale)
    torch.testing.assert_close(result.cpu().to(torch.float64), case.expected, rtol=0, atol=2e-5)


def test_pool_of_more_elements_than_32_bits_count(backend: Backend, device: torch.device) -> None:
    """The last block of a pool of 2^31 elements and a few: a 32-bit offset would land elsewhere."""
    shape = kv_cache_shape(2**16 + 8, 1, 256, 64)
    kv_cache = torch.empty(shape, dtype=BF16, device=device)  # 4 GiB of addresses, of which two blocks are touched
    last = shape[0] - 1
    k = torch.randn(4, 1, 64, generator=torch.Generator().manual_seed(1)).to(device, BF16)
    slots = torch.arange(4, device=device) + last * 256
    backend.write_kv(k, 2 * k, kv_cache, slots)
    step = Step(np.zeros(1, np.int32), np.array([4], np.int32), np.array([0, 1], np.int32), 1)
    plan = backend.plan_attention(step, torch.tensor([[last]], dtype=torch.int32, device=device), 256)
    # A scale of 0 weighs all four slots alike.
    result = backend.paged_attention(torch.ones(1, 1, 64, dtype=BF16, device=device), kv_cache, plan, scale=0.0)
    torch.testing.assert_close(result[0].float(), (2 * k).float().mean(dim=0), rtol=2**-7, atol=1e-2)
