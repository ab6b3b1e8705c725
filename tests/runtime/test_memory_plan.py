"""The memory formula by known values, sizes as people write them, and how many blocks the pool gets."""

from __future__ import annotations

import argparse

import pytest
from fakes.engines import tiny_model

from pageframe.api.flags import add_flags, read_flags
from pageframe.runtime.config import EngineConfig, ModelConfig
from pageframe.runtime.errors import ConfigError, MemoryPlanError
from pageframe.runtime.memory_plan import (
    GIB,
    POOL_SHARE,
    activation_bytes,
    format_bytes,
    free_memory,
    kv_bytes_per_token,
    parse_bytes,
    plan_host_slots,
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


def test_codes_have_a_scale_of_4_bytes_for_each_slot_and_head() -> None:
    """2 * 30 layers * 3 KV heads * (64 + 4)."""
    model = tiny_model(num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64)
    assert kv_bytes_per_token(model, "int8") == kv_bytes_per_token(model, "fp8") == 12_240


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
    share: float = POOL_SHARE,
    reserve: int = 0,
) -> int:
    return plan_num_blocks(
        bytes_per_block=bytes_per_block,
        num_blocks=num_blocks,
        kv_memory=kv_memory,
        available=available,
        cap=cap,
        enough=enough,
        share=share,
        reserve=reserve,
    )


def test_unasked_the_pool_takes_its_share_up_to_the_cap_and_never_more_than_enough() -> None:
    share = int(1024 * POOL_SHARE)
    assert plan() == share
    assert plan(cap=100 * MIB) == 100
    assert plan(cap=10 * GIB) == share
    assert plan(enough=7) == 7
    assert plan(bytes_per_block=3 * MIB, cap=100 * MIB) == 33


def test_a_reserve_is_left_where_the_share_leaves_less() -> None:
    assert plan(share=0.75) == plan(share=0.75, reserve=256 * MIB) == 768
    assert plan(share=0.75, reserve=257 * MIB) == 767
    assert plan(num_blocks=900, reserve=512 * MIB) == plan(kv_memory=900 * MIB, reserve=512 * MIB) == 900
    with pytest.raises(MemoryPlanError, match=r"1\.00 GiB free, 0 B of it for the cache"):
        plan(reserve=2 * GIB)


def test_a_step_has_more_tokens_on_a_gpu_unless_said_and_one_for_each_request() -> None:
    budgets = [EngineConfig().token_budget(device) for device in ("cpu", "cuda")]
    assert budgets == [512, 8192]
    assert [EngineConfig(max_num_requests=1000).token_budget(device) for device in ("cpu", "cuda")] == [1000, 8192]
    assert [EngineConfig(max_num_batched_tokens=300).token_budget(device) for device in ("cpu", "cuda")] == [300, 300]
    with pytest.raises(
        ConfigError, match=r"^max_num_batched_tokens is 255; it must be at least max_num_requests \(256\)"
    ):
        EngineConfig(max_num_batched_tokens=255)


def test_what_a_step_has_beside_weights_and_pool() -> None:
    model = tiny_model(vocab_size=100, hidden_size=8, intermediate_size=16, num_heads=1, num_kv_heads=1, head_dim=4)

    def of(model: ModelConfig) -> int:
        return activation_bytes(model, num_tokens=10, num_rows=3, number_bytes=2)

    # Of a token 4 * 8 numbers and those of the MLP, 3 * 16; of a drawn row 100 numbers of the product and 3 of float32.
    logits = 3 * 100 * (2 + 3 * 4)
    assert of(model) == 10 * 2 * (32 + 48) + logits
    assert of(model.replace(gated_mlp=False)) == 10 * 2 * (32 + 32) + logits
    # Attention has more: 3 * 4 of q and the result, 2 * 4 of k and v.
    assert of(model.replace(intermediate_size=1)) == 10 * 2 * (32 + 20) + logits


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


# ---- host memory for blocks that leave the pool -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host_cache", "slots"),
    [(None, 0), (MIB, 1), (2 * MIB - 1, 1), (2 * MIB, 2), (900 * MIB + 1, 900), (GIB, 1024)],
)
def test_host_memory_holds_as_many_whole_blocks_as_fit(host_cache: int | None, slots: int) -> None:
    assert plan_host_slots(host_cache, MIB, GIB) == slots


def test_no_host_memory_is_asked_for_where_there_is_none() -> None:
    assert plan_host_slots(None, MIB, 0) == 0


@pytest.mark.parametrize(
    ("host_cache", "available", "message"),
    [
        (MIB - 1, GIB, "host_cache is 1024.0 KiB; one block of the KV cache takes 1.0 MiB"),
        (1, GIB, "host_cache is 1 B; one block of the KV cache takes 1.0 MiB"),
        (3 * GIB, 2 * GIB, "host_cache is 3.00 GiB; 2.00 GiB of host memory are free beside the KV pool"),
        # The pool on a CPU has taken more than was free.
        (2 * MIB, -5 * MIB, "host_cache is 2.0 MiB; 0 B of host memory are free beside the KV pool"),
    ],
)
def test_host_memory_that_does_not_fit_is_one_clear_line(host_cache: int, available: int, message: str) -> None:
    with pytest.raises(MemoryPlanError, match=message) as caught:
        plan_host_slots(host_cache, MIB, available)
    assert "\n" not in str(caught.value)


# ---- the settings of memory, as flags -----------------------------------------------------------------------------


def read(*argv: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_flags(parser, EngineConfig)
    return read_flags(parser.parse_args(argv), EngineConfig)


def test_the_prefix_cache_is_on_and_can_be_switched_off_and_on() -> None:
    assert read().prefix_cache is True
    assert read("--no-prefix-cache").prefix_cache is False
    assert read("--prefix-cache").prefix_cache is True
    assert read("--no-prefix-cache", "--prefix-cache").prefix_cache is True


def test_a_switch_takes_no_value(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--prefix-cache=yes"], ["--prefix-cache", "no"], ["--no-prefix-cache=1"]):
        with pytest.raises(SystemExit):
            read(*argv)
        assert "error" in capsys.readouterr().err


def test_a_switchs_help_names_both_ways_and_the_default() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, EngineConfig)
    text = " ".join(parser.format_help().split())
    assert "--prefix-cache, --no-prefix-cache" in text
    assert "share their blocks (default: True)" in text


def test_host_cache_and_slide_flags() -> None:
    config = read("--host-cache", "2GiB", "--on-context-full", "slide", "--slide-by", "100")
    assert (config.host_cache, config.on_context_full, config.slide_by) == (2 * GIB, "slide", 100)
    assert (read().host_cache, read().on_context_full, read().slide_by) == (None, "stop", None)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--no-prefix-cache", "--host-cache", "1GiB"], "host_cache needs prefix_cache"),
        (["--slide-by", "8"], "slide_by is 8; it needs on_context_full slide"),
        (["--on-context-full", "slide", "--slide-by", "0"], "slide_by is 0; it must be from 1 to"),
        (["--host-cache", "0"], "host_cache is 0; it must be from 1 to"),
    ],
)
def test_settings_that_contradict_one_another_are_refused(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(*argv)
