"""What other models, block sizes and types would take, against numbers worked out by hand."""

from __future__ import annotations

from statistics import mean

import pytest
from fakes.engines import tiny_model

from pageframe.runtime import memory_tables
from pageframe.runtime.memory_tables import block_size_rows, curve_lengths, dtype_rows, heads_rows, requests_that_fit

MODEL = tiny_model(num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64)


def test_fewer_kv_heads_take_less() -> None:
    rows = [(row.num_kv_heads, row.bytes_per_token) for row in heads_rows(MODEL, "bf16")]
    assert rows == [(9, 69_120), (3, 23_040), (1, 7_680)]
    multi_head = heads_rows(MODEL.replace(num_kv_heads=9), "float32")
    assert [(row.num_kv_heads, row.ratio) for row in multi_head] == [(9, 1), (1, 1 / 9)]


@pytest.mark.parametrize("block_size", memory_tables.BLOCK_SIZES)
def test_the_mean_tail_is_that_of_all_lengths(block_size: int) -> None:
    tails = [-length % block_size for length in range(1, 1025)]
    assert memory_tables.mean_tail(block_size) == mean(tails)


def test_block_sizes_are_all_that_can_be_chosen() -> None:
    rows = block_size_rows(100, [85, 15])
    assert [row.block_size for row in rows] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    (row,) = (row for row in rows if row.block_size == 32)
    assert (row.bytes_per_block, row.mean_tail) == (3200, 15.5)
    assert row.wasted == pytest.approx((15.5 / 100.5, 15.5 / 30.5))


def test_types_of_k_and_v() -> None:
    rows = [(row.name, row.bytes_per_token, row.pool_tokens) for row in dtype_rows(MODEL, 2**30)]
    codes = (12_240, 87_724)
    assert rows == [("bf16", 23_040, 46_603), ("int8", *codes), ("fp8", *codes), ("float32", 46_080, 23_301)]


def test_a_request_takes_whole_blocks() -> None:
    assert [requests_that_fit(tokens, 10, 16) for tokens in (1, 16, 17, 160, 161)] == [10, 10, 5, 1, 0]


@pytest.mark.parametrize("max_len", [2, 16, 17, 8192])
def test_a_curve_ends_at_the_longest_context(max_len: int) -> None:
    lengths = curve_lengths(max_len)
    assert (lengths[0], lengths[-1]) == (min(16, max_len), max_len)
    assert lengths == sorted(set(lengths))
