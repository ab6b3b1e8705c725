"""Writing K and V into slots, against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pageframe.kernels.attention import Backend, kv_cache_shape, select_backend
from pageframe.kernels.cpu import CpuKernels
from pageframe.kernels.cpu.backend import CpuBackend

from .cases import LARGEST_CODE
from .conftest import CODES
from .oracle import write

NUM_BLOCKS = 9


@pytest.fixture
def triton(device: torch.device) -> Backend:
    return select_backend("triton", device)


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


def nearest_codes(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Of float32 rows [..., head_dim]: codes, rounded to the nearest by torch, and scales, in the same arithmetic."""
    limit = torch.tensor(LARGEST_CODE[dtype])
    largest = rows.abs().amax(dim=-1)
    scaled = rows * (limit / largest.clamp(min=1e-30)).unsqueeze(-1)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), largest / limit


@pytest.mark.parametrize("head_dim", [16, 80])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("cache_dtype", CODES)
def test_codes_are_the_nearest_and_a_heads_largest_number_has_the_largest_code(
    triton: Backend,
    device: torch.device,
    rng: np.random.Generator,
    cache_dtype: torch.dtype,
    dtype: torch.dtype,
    head_dim: int,
) -> None:
    """Rows of numbers far apart too, whose small ones become fp8's subnormal codes and zeros."""
    num_kv_heads, block_size = 3, 4
    slots = rng.permutation(np.array([0, 5, NUM_BLOCKS * block_size - 1, -1, 7]))
    spread = 10.0 ** rng.uniform(-6, 3, size=(2, len(slots), num_kv_heads, 1))
    numbers = rng.standard_normal((2, len(slots), num_kv_heads, head_dim)) * spread
    numbers[:, :, 1] *= 10.0 ** rng.uniform(-5, 0, size=head_dim)
    numbers[:, :, 2, 3:] = 0.0
    kv = torch.from_numpy(numbers).to(dtype)
    shape = kv_cache_shape(NUM_BLOCKS, num_kv_heads, block_size, head_dim)
    codes = torch.full(shape, 0x55, dtype=torch.uint8).view(cache_dtype).to(device)
    scales = torch.full(shape[:4], torch.nan, device=device)
    expected = codes.to("cpu", torch.float32, copy=True)

    triton.write_kv(kv[0].to(device), kv[1].to(device), codes, torch.from_numpy(slots).to(device), scales)
    expected_codes, expected_scales = nearest_codes(kv.to(torch.float32), cache_dtype)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, block_size)
            expected[block, :, :, offset] = expected_codes[:, token].to(torch.float32)
            torch.testing.assert_close(scales[block, :, :, offset].cpu(), expected_scales[:, token], rtol=0, atol=0)
            scales[block, :, :, offset] = torch.nan
    assert torch.equal(codes.cpu().to(torch.float32), expected)
    assert scales.isnan().all(), "the scale of another slot was written"


@pytest.mark.parametrize("cache_dtype", CODES)
def test_between_two_codes_the_even_one_is_taken(
    triton: Backend, device: torch.device, cache_dtype: torch.dtype
) -> None:
    """The largest number is the largest code, so that the others are their own codes, rounded."""
    numbers, expected = [0.5, 1.5, -2.5, 126.5], [0, 2, -2, 126]
    if cache_dtype != torch.int8:
        # Three bits follow the leading one: steps are of 2 from 16 on, of 4 from 32 on; below them the subnormal codes.
        least = torch.finfo(cache_dtype).smallest_normal / 8
        numbers, expected = [17.0, 19.0, -34.0, 1.5 * least], [16.0, 20.0, -32.0, 2 * least]
    k = torch.tensor([*numbers, LARGEST_CODE[cache_dtype], *[0.0] * 11], device=device).view(1, 1, 16)
    codes = torch.zeros(kv_cache_shape(1, 1, 1, 16), dtype=torch.uint8).view(cache_dtype).to(device)
    scales = torch.zeros(codes.shape[:4], device=device)
    triton.write_kv(k, k, codes, torch.zeros(1, dtype=torch.int64, device=device), scales)
    assert codes[0, 0, 0, 0, :4].to(torch.float32).tolist() == expected
    assert scales.flatten().tolist() == [1.0, 1.0]


@pytest.mark.parametrize("cache_dtype", CODES)
@pytest.mark.parametrize("number", [0.0, 1e-38])
def test_rows_of_zeros_and_of_next_to_nothing_read_back_as_zeros(
    triton: Backend, device: torch.device, cache_dtype: torch.dtype, number: float
) -> None:
    codes = torch.full(kv_cache_shape(1, 1, 2, 16), 0x55, dtype=torch.uint8).view(cache_dtype).to(device)
    scales = torch.full(codes.shape[:4], torch.nan, device=device)
    k = torch.full((1, 1, 16), number, device=device)
    triton.write_kv(k, -k, codes, torch.zeros(1, dtype=torch.int64, device=device), scales)
    assert not codes[0, :, :, 0].to(torch.float32).any()
    assert scales[0, :, :, 0].flatten().tolist() == pytest.approx([number / LARGEST_CODE[cache_dtype]] * 2, abs=1e-44)


def test_int8_codes_are_those_of_the_compiled_kernels(
    triton: Backend, device: torch.device, rng: np.random.Generator, compiled_kernels: CpuKernels
) -> None:
    """A cache may have been written by either."""
    compiled = CpuBackend(compiled_kernels.library)
    k, v = (torch.from_numpy(rng.standard_normal((6, 2, 32))).to(torch.float32) for _ in range(2))
    slots = torch.from_numpy(rng.permutation(8)[:6])
    written = []
    for backend, place in ((compiled, torch.device("cpu")), (triton, device)):
        codes = torch.zeros(kv_cache_shape(2, 2, 4, 32), dtype=torch.int8, device=place)
        scales = torch.zeros(codes.shape[:4], device=place)
        backend.write_kv(k.to(place), v.to(place), codes, slots.to(place), scales)
        written.append((codes.cpu(), scales.cpu()))
    assert torch.equal(written[0][0], written[1][0])
    assert torch.equal(written[0][1], written[1][1])


@pytest.mark.parametrize("head_dim", [16, 80, 96, 256])
def test_every_head_dim_is_stored_whole(
    backend: Backend, device: torch.device, rng: np.random.Generator, head_dim: int
) -> None:
    kv_cache = torch.full(kv_cache_shape(2, 3, 4, head_dim), torch.nan, device=device)
    k = torch.from_numpy(rng.standard_normal((8, 3, head_dim))).to(device, torch.float32)
    backend.write_kv(k, -k, kv_cache, torch.arange(8, device=device))
    stored = kv_cache.permute(0, 3, 1, 2, 4).reshape(8, 2, 3, head_dim)
    assert torch.equal(stored, torch.stack((k, -k), dim=1))
