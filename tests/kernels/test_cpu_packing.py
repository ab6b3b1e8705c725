"""Packed weights, read back as kernels/cpu/linear_weights.h describes them, against what was packed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from pageframe.kernels.cpu.packing import BLOCK_BYTES, WeightKind, pack_bf16, pack_blocks

Q4_RECORD = np.dtype([("codes", "<u4", (4, 16)), ("scales", "<f2", 16), ("minimums", "<f2", 16)])
Q8_RECORD = np.dtype([("codes", "i1", (16, 16, 2)), ("scales", "<f2", 16)])


def blocks(block_format: str, n: int, k: int) -> torch.Tensor:
    values = np.random.default_rng(n * k).standard_normal((n, k), dtype=np.float32)
    return torch.from_numpy(quantize(values, GGMLQuantizationType[block_format]))


def values_of_q4(data: torch.Tensor) -> np.ndarray:
    """float32 [strips, 16, k]."""
    records = data.numpy().view(Q4_RECORD)[..., 0]  # [strips, groups]
    strips, groups = records.shape
    words = records["codes"]  # [strips, groups, line, output]
    codes = np.empty((strips, 16, groups, 32), np.float32)
    for line in range(4):
        for pair in range(4):
            turned = words[:, :, line] >> 4 * pair | words[:, :, line] << (32 - 4 * pair) % 32
            at = 8 * line + 2 * pair
            codes[..., at] = (turned >> 3 & 15).transpose(0, 2, 1)
            codes[..., at + 1] = (turned >> 19 & 15).transpose(0, 2, 1)
    scales, minimums = (
        records[name].astype(np.float32).transpose(0, 2, 1)[..., None] for name in ("scales", "minimums")
    )
    return (scales * codes + minimums).reshape(strips, 16, -1)


def values_of_q8(data: torch.Tensor) -> np.ndarray:
    """float32 [strips, 16, k]."""
    records = data.numpy().view(Q8_RECORD)[..., 0]
    codes = records["codes"].transpose(0, 3, 1, 2, 4).reshape(len(records), 16, -1, 32)
    scales = records["scales"].astype(np.float32).transpose(0, 2, 1)[..., None]
    return (scales * codes).reshape(len(records), 16, -1)


@pytest.mark.parametrize("n", [1, 16, 40])
def test_packed_bf16_holds_each_value_at_its_strip_pair_and_output(n: int) -> None:
    weight = torch.randn(n, 64).bfloat16()
    packed = pack_bf16(weight)
    assert (packed.kind, packed.n, packed.k) == (WeightKind.BF16, n, 64)
    assert packed.data.is_contiguous()
    unpacked = packed.data.permute(0, 2, 1, 3).reshape(-1, 64)
    assert torch.equal(unpacked[:n], weight)
    assert not unpacked[n:].any()


@pytest.mark.parametrize("n", [1, 32, 41])
@pytest.mark.parametrize("block_format", BLOCK_BYTES)
def test_packed_blocks_hold_the_values_that_ggufs_own_reader_finds(block_format: str, n: int) -> None:
    data = blocks(block_format, n, 96)
    packed = pack_blocks(block_format, data)
    kind = WeightKind.Q8 if block_format == "Q8_0" else WeightKind.Q4
    assert (packed.kind, packed.n, packed.k) == (kind, n, 96)
    assert packed.data.is_contiguous()
    unpacked = (values_of_q8 if kind == WeightKind.Q8 else values_of_q4)(packed.data).reshape(-1, 96)
    np.testing.assert_array_equal(unpacked[:n], dequantize(data.numpy(), GGMLQuantizationType[block_format]))
    assert not unpacked[n:].any()


def test_the_halves_of_an_interleaved_weight_take_turns_by_strips() -> None:
    weight = torch.randn(96, 32).bfloat16()
    turns = [0, 3, 1, 4, 2, 5]  # the strips, in the order they are packed in
    ordered = torch.cat([weight[16 * strip : 16 * strip + 16] for strip in turns])
    assert torch.equal(pack_bf16(weight, interleaved=True).data, pack_bf16(ordered).data)
    data = blocks("Q4_1", 96, 32)
    ordered = torch.cat([data[16 * strip : 16 * strip + 16] for strip in turns])
    assert torch.equal(pack_blocks("Q4_1", data, interleaved=True).data, pack_blocks("Q4_1", ordered).data)


def test_a_weight_that_cannot_be_packed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"bfloat16 \[n, k\]"):
        pack_bf16(torch.zeros(16, 32))
    with pytest.raises(ValueError, match="multiple of 32 inputs; it is"):
        pack_bf16(torch.zeros(16, 48).bfloat16())
    with pytest.raises(ValueError, match="whole strips of 16 outputs; there are 48"):
        pack_bf16(torch.zeros(48, 32).bfloat16(), interleaved=True)
    with pytest.raises(ValueError, match="no packing for blocks of 'Q6_K'"):
        pack_blocks("Q6_K", torch.zeros(16, 210, dtype=torch.uint8))
    with pytest.raises(ValueError, match="a multiple of 18"):
        pack_blocks("Q4_0", torch.zeros(16, 20, dtype=torch.uint8))
