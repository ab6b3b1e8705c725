"""The memory formula by known values, sizes as people write them, and how many blocks the pool gets."""

from __future__ import annotations

import pytest
from fakes.engines import tiny_model

from pageframe.runtime.errors import ConfigError, MemoryPlanError
from pageframe.runtime.memory_plan import (
    GIB,
    POOL_SHARE,
    format_bytes,
    free_memory,
    kv_bytes_per_token,
    parse_bytes,
    plan_num_blocks,
)

MIB = 1024**2


def test_4096_tokens_of_a_7b_model_take_2_gib() -> None:
    """32 layers, 32 KV heads of 128, bf16: 512 KiB a token."""
    model = tiny_model(num_layers=32, num_kv_heads=32, head_dim=128)
    assert kv_bytes_per_token(model, "bf16") == 512 * 1024
    assert 4096 * kv_bytes_per_token(model, "bf16") == 2 * GIB


def test_grouped_heads_and_float32_count_as_they_are() -> None:
    """SmolLM2-135M: 30 layers, 3 KV heads of 64."""
    model = tiny_model(num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64)
    assert kv_bytes_per_token(model, "bf16") == 23_040
    assert kv_bytes_per_token(model, "float32") == 46_080


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("1073741824", GIB),
        ("512MiB", 512 * MIB),
        ("4GiB", 4 * GIB),
        ("1.5 GB", 1_500_000_000),
        (" 3 kb ", 3000),
        ("2KIB", 2048),
        ("7b", 7),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "4 TiB", "4GiB!", "1,5GB", "0x10", "nan"])
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (512 * MIB, "512.0 MiB"), (2 * GIB, "2.00 GiB")],
)
def test_sizes_are_written_for_people(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_there_is_free_memory_and_less_than_a_petabyte() -> None:
    assert 0 < free_memory() < 2**50


def plan(
    *,
    bytes_per_block: int = MIB,
    num_blocks: int | None = None,
    kv_memory: int | None = None,
    available: int = GIB,
    cap: int | None = None,
    enough: int = 10**9,
) -> int:
    return plan_num_blocks(
        bytes_per_block=bytes_per_block,
        num_blocks=num_blocks,
        kv_memory=kv_memory,
        available=available,
        cap=cap,
        enough=enough,
    )


def test_unasked_the_pool_takes_its_share_up_to_the_cap_and_never_more_than_enough() -> None:
    share = int(1024 * POOL_SHARE)
    assert plan() == share
    assert plan(cap=100 * MIB) == 100
    assert plan(cap=10 * GIB) == share
    assert plan(enough=7) == 7
    assert plan(bytes_per_block=3 * MIB, cap=100 * MIB) == 33


def test_what_the_user_asks_for_is_given_whole() -> None:
    assert plan(num_blocks=900, cap=MIB, enough=7) == 900
    assert plan(kv_memory=900 * MIB + MIB - 1, cap=MIB, enough=7) == 900
    assert plan(num_blocks=3, kv_memory=900 * MIB) == 3
    assert plan(num_blocks=1024) == plan(kv_memory=GIB) == 1024


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_blocks": 1025}, "num_blocks 1025 needs 1.00 GiB of memory; 1.00 GiB are free"),
        ({"kv_memory": MIB - 1}, "kv_memory is 1024.0 KiB; one block of the KV cache takes 1.0 MiB"),
        ({"kv_memory": GIB + 1}, "of memory are free"),
        ({"available": 2 * MIB - 1}, "too little memory for the KV cache: 2.0 MiB free, .* one block takes 1.0 MiB"),
        ({"cap": MIB - 1}, "too little memory"),
        ({"available": 0}, "too little memory for the KV cache: 0 B free"),
    ],
)
def test_too_little_memory_is_one_clear_line(changes: dict[str, int], message: str) -> None:
    with pytest.raises(MemoryPlanError, match=message) as caught:
        plan(**changes)
    assert "\n" not in str(caught.value)


def test_exactly_one_block_is_enough() -> None:
    assert plan(available=int(MIB / POOL_SHARE)) == 1
    assert plan(kv_memory=MIB, available=MIB) == 1
