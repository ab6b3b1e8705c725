"""The Triton backend really launches its kernels: a fallback would pass every other test."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch

from pageframe.kernels.attention import select_backend
from pageframe.kernels.triton import launches

from .cases import Shape, make_case


def test_decode_and_write_launch_their_kernels(device: torch.device, rng: np.random.Generator) -> None:
    backend = select_backend("triton", device)
    case = make_case(rng, Shape(), decode=[20], chunks=[(0, 3)])
    before = Counter(launches)
    case.check(backend, device)
    k = torch.zeros(1, 2, 64, device=device)
    backend.write_kv(k, k, case.kv_cache.to(device), torch.tensor([0], device=device))
    assert launches - before == {"attend_splits": 1, "merge_splits": 1, "write_kv": 1}


def test_step_of_chunks_launches_no_decode_kernel(device: torch.device, rng: np.random.Generator) -> None:
    before = Counter(launches)
    make_case(rng, Shape(), decode=[], chunks=[(0, 3)]).check(select_backend("triton", device), device)
    assert launches == before
