"""Weights in the order the compiled linear reads them: see linear_weights.h, which describes the same layouts.

Pure rearrangement: every stored value stays what it is. Knows nothing of files or models.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

__all__ = ["BLOCK_BYTES", "GROUP", "STRIP", "PackedValues", "WeightKind", "pack_bf16", "pack_blocks"]

#: Outputs in a strip.
STRIP = 16
#: Inputs in a group, which is a block of GGUF.
GROUP = 32
#: Bytes in a block, by GGUF's name of the format: float16 scale, Q4_1's float16 minimum, codes.
BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}

_Q4_RECORD_BYTES = 320
_Q8_RECORD_BYTES = 544
#: Of each byte of an int64.
_LOWER_HALVES = 0x0F0F0F0F0F0F0F0F


class WeightKind(IntEnum):
    """How values are stored; types.h has the same numbers."""

    BF16 = 0
    Q4 = 1
    Q8 = 2


@dataclass(frozen=True, slots=True, eq=False)
class PackedValues:
    """The values of a matrix [n, k].

    Args:
        data: bfloat16 [strips, k / 2, 16, 2] for BF16, else uint8 [strips, k / 32, bytes of a record], where
            strips = ceil(n / 16).
    """

    kind: WeightKind
    n: int
    k: int
    data: Tensor


def pack_bf16(weight: Tensor, *, interleaved: bool = False) -> PackedValues:
    """Pack a matrix of bfloat16.

    Args:
        weight: bfloat16 [n, k] on the CPU, k a multiple of 32.
        interleaved: the first half of the outputs and the second take turns, strip by strip; n is a multiple of 32.

    Raises:
        ValueError: another dtype, device or shape.
    """
    if weight.dtype != torch.bfloat16 or not weight.is_cpu or weight.dim() != 2:
        raise ValueError(f"weight must be bfloat16 [n, k] on the CPU; it is {weight.dtype} {list(weight.shape)}")
    n, k = weight.shape
    _check_shape(n, k, interleaved)
    pairs = _in_strips(weight.contiguous().view(torch.int32), interleaved)  # [..., 16, k / 2]
    data = pairs.transpose(-1, -2).contiguous().view(torch.bfloat16).view(-1, k // 2, STRIP, 2)
    return PackedValues(WeightKind.BF16, n, k, data)


def pack_blocks(block_format: str, data: Tensor, *, interleaved: bool = False) -> PackedValues:
    """Pack a matrix of GGUF blocks.

    Args:
        block_format: a key of `BLOCK_BYTES`.
        data: uint8 [n, k / 32 * bytes of a block] on the CPU: GGUF's own bytes.
        interleaved: as for `pack_bf16`.

    Raises:
        ValueError: another format, dtype, device or shape.
    """
    size = BLOCK_BYTES.get(block_format)
    if size is None:
        raise ValueError(f"no packing for blocks of {block_format!r}; there is for {', '.join(BLOCK_BYTES)}")
    if data.dtype != torch.uint8 or not data.is_cpu or data.dim() != 2 or data.shape[1] % size:
        raise ValueError(
            f"{block_format} blocks must be uint8 [n, a multiple of {size}] on the CPU; "
            f"they are {data.dtype} {list(data.shape)}"
        )
    n, groups = data.shape[0], data.shape[1] // size
    _check_shape(n, groups * GROUP, interleaved)
    blocks = _in_strips(data.view(n, groups, size), interleaved)
    if block_format == "Q8_0":
        return PackedValues(WeightKind.Q8, n, groups * GROUP, _q8_records(blocks))
    return PackedValues(WeightKind.Q4, n, groups * GROUP, _q4_records(blocks))


def _check_shape(n: int, k: int, interleaved: bool) -> None:
    if n < 1 or k < 1 or k % GROUP:
        raise ValueError(f"a matrix needs outputs, and a multiple of {GROUP} inputs; it is [{n}, {k}]")
    if interleaved and n % (2 * STRIP):
        raise ValueError(f"halves that take turns must be whole strips of {STRIP} outputs; there are {n} outputs")


def _in_strips(rows: Tensor, interleaved: bool) -> Tensor:
    """[n, ...] -> [strips, 16, ...], or where halves take turns [strips / 2, 2, 16, ...]: a view, or a copy with zeros
    after the last row."""
    n = rows.shape[0]
    if n % STRIP:
        rows = torch.cat([rows, rows.new_zeros(-n % STRIP, *rows.shape[1:])])
    strips = rows.view(-1, STRIP, *rows.shape[1:])
    return strips.view(2, -1, *strips.shape[1:]).transpose(0, 1) if interleaved else strips


def _column(blocks: Tensor, start: int, end: int | None, dtype: torch.dtype) -> Tensor:
    """Some bytes of each block as numbers: [strips, 16, groups, numbers]."""
    return blocks[..., start:end].contiguous().view(dtype).flatten(0, -4)


def _q4_records(blocks: Tensor) -> Tensor:
    """uint8 [..., 16, groups, 18 or 20] -> uint8 [strips, groups, 320], Q4Record of linear_weights.h."""
    head = blocks.shape[-1] - GROUP // 2
    scales = _column(blocks, 0, 2, torch.float16)
    minimums = _column(blocks, 2, 4, torch.float16) if head == 4 else scales * -8
    # Byte i has code i in its lower half, and code 16 + i in its upper half.
    eights = _column(blocks, head, None, torch.int64)
    lines = torch.cat((eights & _LOWER_HALVES, eights >> 4 & _LOWER_HALVES), dim=-1)
    strips, _, groups, _ = lines.shape
    records = blocks.new_empty(strips, groups, _Q4_RECORD_BYTES)
    codes = records.view(torch.int32)[..., : 4 * STRIP].view(strips, groups, 4, STRIP)
    codes.copy_(_line_words(lines).permute(0, 2, 3, 1))
    halves = records.view(torch.float16)[..., -2 * STRIP :].view(strips, groups, 2, STRIP)
    halves.copy_(torch.cat((scales, minimums), dim=-1).permute(0, 2, 3, 1))
    return records


def _line_words(codes: Tensor) -> Tensor:
    """int64, a code in each byte's lower half -> int32 of the same shape: the dwords of a Q4Record's lines.

    It overwrites `codes`.
    """
    every_second = 0x000F000F000F000F
    together = 1 << 48 | 1 << 36 | 1 << 24 | 1 << 12  # a product's bits 48-63 are the four codes, side by side
    even = (codes & every_second).mul_(together).bitwise_right_shift_(48).bitwise_and_(0xFFFF)
    odd = codes.bitwise_right_shift_(8).bitwise_and_(every_second).mul_(together)
    words = odd.bitwise_right_shift_(32).bitwise_and_(0xFFFF0000).bitwise_or_(even)
    torch.bitwise_right_shift(words, 29, out=even)
    return words.bitwise_left_shift_(3).bitwise_or_(even).view(torch.int32)[..., ::2]


def _q8_records(blocks: Tensor) -> Tensor:
    """uint8 [..., 16, groups, 34] -> uint8 [strips, groups, 544], Q8Record of linear_weights.h."""
    pairs = _column(blocks, 2, None, torch.int16)
    strips, _, groups, _ = pairs.shape
    records = blocks.new_empty(strips, groups, _Q8_RECORD_BYTES)
    halves = records.view(torch.int16)
    halves[..., : STRIP * GROUP // 2].view(strips, groups, GROUP // 2, STRIP).copy_(pairs.permute(0, 2, 3, 1))
    halves[..., -STRIP:] = _column(blocks, 0, 2, torch.int16)[..., 0].transpose(1, 2)
    return records
