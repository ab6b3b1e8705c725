"""Matrices as a GGUF file stores them, against the gguf package's own dequantisation."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from pageframe.kernels.cpu import BLOCK_BYTES
from pageframe.runtime.models.blocks import BlockMatrix


@pytest.mark.parametrize("name", sorted(BLOCK_BYTES))
def test_rows_have_the_values_that_the_file_means(name: str) -> None:
    kind = GGMLQuantizationType[name]
    values = np.random.default_rng(0).normal(size=(7, 96)).astype(np.float32)
    data = gguf.quants.quantize(values, kind)
    matrix = BlockMatrix(name, torch.from_numpy(data))
    assert matrix.shape == (7, 96)
    ids = torch.tensor([6, 0, 3, 3])
    expected = gguf.quants.dequantize(data, kind)[ids]
    np.testing.assert_array_equal(matrix.rows(ids).numpy(), expected)
