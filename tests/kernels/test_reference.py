"""The torch reference against the float64 oracle: it must be proven before it proves others."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pageframe.kernels.attention import select_backend

from .cases import SEED, Shape, make_case
from .oracle import write

CPU = torch.device("cpu")


def rng_of(*words: object) -> np.random.Generator:
    return np.random.default_rng([SEED, *(abs(hash(str(word))) for word in words)])
