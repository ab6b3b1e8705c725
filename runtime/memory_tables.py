"""What the memory formula gives for other models, block sizes and types than the one at hand. Arithmetic only.

A context of any length is as likely to end at one slot of its last block as at another, so on average a block size of
`n` leaves (n - 1) / 2 slots of a request unused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pageframe.runtime.config import MAX_BLOCK_SIZE, ModelConfig
from pageframe.runtime.memory_plan import KV_DTYPE_BYTES, kv_bytes_per_token

BLOCK_SIZES = tuple(2**power for power in range(MAX_BLOCK_SIZE.bit_length()))


@dataclass(frozen=True, slots=True)
class HeadsRow:
    """What a number of KV heads costs.

    Args:
        ratio: to one KV head for each head.
    """

    name: str
    num_kv_heads: int
    bytes_per_token: int
    ratio: float


@dataclass(frozen=True, slots=True)
class BlockSizeRow:
    """What a block size costs.

    Args:
        mean_tail: slots that a request leaves unused on average.
        wasted: for each length asked for, the share of its slots that this is.
    """

    block_size: int
    bytes_per_block: int
    mean_tail: float
    wasted: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class DtypeRow:
    """What a type of K and V costs.

    Args:
        pool_tokens: tokens that a pool of the same bytes holds.
    """

    name: str
    bytes_per_token: int
    pool_tokens: int


def heads_rows(model: ModelConfig, kv_dtype: str) -> list[HeadsRow]:
    """One KV head for each head, as many as the model has, and one for all, each number once."""
    names = {1: "one for all heads (multi-query)", model.num_heads: "one for each head (multi-head)"}
    names[model.num_kv_heads] = "the model's" + (" (grouped-query)" if 1 < model.num_kv_heads < model.num_heads else "")
    rows = []
    for number in sorted(names, reverse=True):
        size = kv_bytes_per_token(model.replace(num_kv_heads=number), kv_dtype)
        rows.append(HeadsRow(names[number], number, size, number / model.num_heads))
    return rows


def mean_tail(block_size: int) -> float:
    """Slots of its last block that a request leaves unused, averaged over all lengths."""
    return (block_size - 1) / 2


def block_size_rows(bytes_per_token: int, lengths: Sequence[int]) -> list[BlockSizeRow]:
    """Every block size that can be chosen; shares are for requests of about these lengths."""
    rows = []
    for size in BLOCK_SIZES:
        tail = mean_tail(size)
        rows.append(BlockSizeRow(size, size * bytes_per_token, tail, tuple(tail / (tail + n) for n in lengths)))
    return rows


def dtype_rows(model: ModelConfig, pool_bytes: int) -> list[DtypeRow]:
    """Each type that the engine stores K and V in."""
    sizes = {kv_dtype: kv_bytes_per_token(model, kv_dtype) for kv_dtype in KV_DTYPE_BYTES}
    return [DtypeRow(kv_dtype, size, pool_bytes // size) for kv_dtype, size in sizes.items()]


def requests_that_fit(tokens: int, num_blocks: int, block_size: int) -> int:
    """Requests of that many tokens which a pool holds at once, in blocks taken as needed."""
    return num_blocks // -(-tokens // block_size)


def curve_lengths(max_len: int) -> list[int]:
    """Lengths for a curve, from 16 (or less) to max_len, eight for each doubling."""
    shortest = min(16, max_len)
    lengths = {max_len}
    length = float(shortest)
    while length < max_len:
        lengths.add(round(length))
        length *= 2**0.125
    return sorted(lengths)
