"""Small configurations and a clock that stands still, for tests of the engine without a real model."""

from __future__ import annotations

from fakes.chain_hash import EOS, VOCAB_SIZE
from pageframe.runtime.block_copy import FREE_COPIES, CopyCosts
from pageframe.runtime.config import ModelConfig, ResolvedConfig


class VirtualClock:
    """Seconds that pass only when told to."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def tiny_model(**changes: object) -> ModelConfig:
    """The shape of a model nobody loads: 2 layers of 1 KV head of 4, K and V of 64 bytes a token in float32."""
    model = ModelConfig(
        family="chain-hash",
        vocab_size=VOCAB_SIZE,
        hidden_size=4,
        intermediate_size=4,
        num_layers=2,
        num_heads=1,
        num_kv_heads=1,
        head_dim=4,
        max_position=1 << 20,
        norm_eps=1e-5,
        rope_theta=1e4,
        eos_token_ids=(EOS,),
    )
    return model.replace(**changes)


def tiny_config(
    *,
    num_blocks: int = 8,
    block_size: int = 4,
    max_num_requests: int = 4,
    max_num_batched_tokens: int = 8,
    max_model_len: int | None = None,
    prefix_cache: bool = True,
    host_slots: int = 0,
    copy_costs: CopyCosts = FREE_COPIES,
    window: int | None = None,
    slide_by: int | None = None,
    mixed_token_budget: int | None = None,
) -> ResolvedConfig:
    """A resolved configuration; `max_model_len` is what the pool holds unless given."""
    model = tiny_model()
    if window is not None:
        model = model.replace(windows=(window,) * model.num_layers)
    bytes_per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * 4
    return ResolvedConfig(
        model_name="chain-hash",
        model=model,
        dtype="float32",
        compute_dtype="float32",
        device="cpu",
        backend="reference",
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=num_blocks * block_size if max_model_len is None else max_model_len,
        max_num_requests=max_num_requests,
        max_num_batched_tokens=max_num_batched_tokens,
        threads=1,
        kv_bytes_per_token=bytes_per_token,
        pool_bytes=bytes_per_token * block_size * num_blocks,
        prefix_cache=prefix_cache,
        host_slots=host_slots,
        copy_costs=copy_costs,
        slide_by=slide_by,
        mixed_token_budget=mixed_token_budget,
    )
