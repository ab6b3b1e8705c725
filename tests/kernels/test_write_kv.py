"""Writing K and V into slots, against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pageframe.kernels.attention import Backend, kv_cache_shape

from .oracle import write

NUM_BLOCKS = 9


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("num_kv_heads", "head_dim", "block_size"), [(1, 64, 16), (3, 64, 32), (8, 128, 16), (2, 128, 1), (5, 64, 256)]
)
def test_write_touches_its_slots_and_no_other(
    backend: Backend,
    device: torch.device,
    rng: np.random.Generator,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    cache_dtype: torch.dtype,
) -> None:
    num_slots = NUM_BLOCKS * block_size
    slots = rng.permutation(num_slots)[: min(12, num_slots - 2)]
    slots = rng.permutation(np.unique(np.concatenate((slots, [0, num_slots - 1]))))
    slots[rng.integers(len(slots))] = -1
    # K and V as they come out of one product: views of a wider tensor, in a dtype that may not be the cache's.
    wide = torch.from_numpy(rng.standard_normal((len(slots), 4 * num_kv_heads, head_dim))).to(torch.float32)
    k, v = wide[:, num_kv_heads : 2 * num_kv_heads], wide[:, 2 * num_kv_heads : 3 * num_kv_heads]
    kv_cache = torch.full(kv_cache_shape(NUM_BLOCKS, num_kv_heads, block_size, head_dim), torch.nan, dtype=cache_dtype)

    wide_on_device, actual = wide.to(device), kv_cache.to(device)
    backend.write_kv(
        wide_on_device[:, num_kv_heads : 2 * num_kv_heads],
        wide_on_device[:, 2 * num_kv_heads : 3 * num_kv_heads],
        actual,
        torch.from_numpy(slots).to(device),
    )
    expected = write(k.double().numpy(), v.double().numpy(), kv_cache.double().numpy(), slots)
    # One rounding, to the cache's dtype.
    rtol = 0.0 if cache_dtype == torch.float32 else torch.finfo(cache_dtype).eps
    torch.testing.assert_close(actual.cpu().double(), torch.from_numpy(expected), rtol=rtol, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("slots", [[], [-1], [-1, -1, -1]])
def test_nothing_to_write(backend: Backend, device: torch.device, slots: list[int]) -> None:
    kv_cache = torch.zeros(kv_cache_shape(2, 1, 16, 64), device=device)
    k = torch.ones(len(slots), 1, 64, device=device)
    backend.write_kv(k, k, kv_cache, torch.tensor(slots, dtype=torch.int64, device=device))
    assert not kv_cache.any()
