"""The helpers that others use to look into and move blocks."""

from __future__ import annotations

import pytest
import torch

from pageframe.kernels.attention import Backend, copy_blocks, fill_block, kv_cache_shape, read_block


@pytest.fixture
def kv_cache(backend: Backend, device: torch.device) -> torch.Tensor:
    """Four blocks of four slots; K of a token is its slot's number, V is 100 more."""
    cache = torch.full(kv_cache_shape(4, 2, 4, 64), torch.nan, device=device)
    slots = torch.arange(16, device=device)
    k = slots.to(torch.float32).view(16, 1, 1).repeat(1, 2, 64)
    backend.write_kv(k, k + 100, cache, slots)
    return cache


def slots_in(kv_cache: torch.Tensor, block_id: int) -> list[float]:
    """What the slots of one block hold, checked to be the same in all heads and dimensions, and V with K."""
    k, v = read_block(kv_cache, block_id)
    assert k.shape == v.shape == (2, 4, 64)
    assert torch.equal(v, k + 100)
    assert torch.equal(k, k[:1, :, :1].expand_as(k))
    return [float(value) for value in k[0, :, 0]]


def test_read_block_sees_what_was_written(kv_cache: torch.Tensor) -> None:
    assert slots_in(kv_cache, 0) == [0, 1, 2, 3]
    assert slots_in(kv_cache, 3) == [12, 13, 14, 15]


def test_copy_reads_all_sources_first(kv_cache: torch.Tensor) -> None:
    ids = torch.tensor([0, 1, 3], device=kv_cache.device)
    copy_blocks(kv_cache, ids, ids[[1, 0, 2]])
    assert [slots_in(kv_cache, block_id)[0] for block_id in range(4)] == [4, 0, 8, 12]


def test_fill_poisons_these_blocks_only(kv_cache: torch.Tensor) -> None:
    fill_block(kv_cache, torch.tensor([1, 2], device=kv_cache.device), float("nan"))
    assert kv_cache[1:3].isnan().all()
    assert slots_in(kv_cache, 0) == [0, 1, 2, 3]
    assert slots_in(kv_cache, 3) == [12, 13, 14, 15]
