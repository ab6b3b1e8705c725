"""The Triton backend really launches its kernels: a fallback would pass every other test."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from pageframe.kernels.attention import select_backend
from pageframe.kernels.triton import launches

from .cases import Shape, make_case


def test_a_mixed_step_launches_a_kernel_for_each_part(device: torch.device, rng: np.random.Generator) -> None:
    backend = select_backend("triton", device)
    case = make_case(rng, Shape(), decode=[20], chunks=[(0, 3)])
    before = Counter(launches)
    case.check(backend, device)
    k = torch.zeros(1, 2, 64, device=device)
    backend.write_kv(k, k, case.kv_cache.to(device), torch.tensor([0], device=device))
    assert launches - before == {"attend_splits": 1, "merge_splits": 1, "attend_prefill": 1, "write_kv": 1}


@pytest.mark.parametrize(
    ("decode", "chunks", "kernels"),
    [([], [(0, 3)], {"attend_prefill"}), ([4], [], {"attend_splits", "merge_splits"})],
)
def test_a_step_of_one_kind_launches_no_kernel_of_the_other(
    device: torch.device,
    rng: np.random.Generator,
    decode: list[int],
    chunks: list[tuple[int, int]],
    kernels: set[str],
) -> None:
    before = Counter(launches)
    make_case(rng, Shape(head_dim=16), decode, chunks).check(select_backend("triton", device), device)
    assert set(launches - before) == kernels
