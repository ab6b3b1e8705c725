"""How large the GPU script's cases are: on a GPU, and in a rehearsal, where the interpreter computes on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pageframe.runtime.config import GPU_TOKEN_BUDGET, ModelConfig, RopeScaling


@dataclass(frozen=True, slots=True)
class Target:
    """What a case must reach and should reach: at most so many microseconds, or at least such a share of the measured
    copy rate, or so many TFLOP/s."""

    unit: str
    must: float
    aim: float


@dataclass(frozen=True, slots=True)
class Case:
    """One attention of one layer.

    Args:
        contexts: of each request, this step's tokens included.
        new_tokens: query tokens of each request: 1 is a decode step.
        cache: what K and V are stored as, "" for the queries' type.
        target: on an H200; None where nothing is asked.
    """

    name: str
    contexts: tuple[int, ...]
    new_tokens: int = 1
    block_size: int = 16
    cache: str = ""
    target: Target | None = None


@dataclass(frozen=True, slots=True)
class Sizes:
    """Everything that differs between a run and a rehearsal.

    Args:
        copy_bytes, matrix_size: what the machine's own limits are measured with.
        num_heads, num_kv_heads, head_dim: of the timed attention.
        requests: of the engine; each has prompt_tokens[0] to prompt_tokens[1] of prompt and as many of output.
        token_budget: of one of its steps.
        run_seconds, eager_seconds: after which a run with graphs is cut, and one without.
        busy_steps: steps over which the device's busy time is taken.
    """

    copy_bytes: int
    matrix_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    cases: tuple[Case, ...]
    requests: int
    tokens: tuple[int, int]
    token_budget: int
    run_seconds: float
    eager_seconds: float
    busy_steps: int
    models: dict[str, ModelConfig]


def _mixed(shortest: int, longest: int, count: int) -> tuple[int, ...]:
    """Contexts whose logarithms are evenly spread, in an order that helps no scheduler."""
    contexts = np.geomspace(shortest, longest, count).astype(int)
    return tuple(np.random.default_rng(0).permutation(contexts).tolist())


_K = 1024
_CASES = (
    Case("1 request, 1K", (_K,), target=Target("us", 20, 12)),
    Case("1, 32K", (32 * _K,), target=Target("%", 50, 65)),
    Case("8, 4K", (4 * _K,) * 8, target=Target("%", 55, 70)),
    Case("64, 4K", (4 * _K,) * 64, target=Target("%", 78, 88)),
    Case("8, 32K", (32 * _K,) * 8, target=Target("%", 78, 90)),
    Case("32 mixed 0.5K to 32K", _mixed(512, 32 * _K, 32), target=Target("%", 65, 80)),
    Case("64, 4K, block 128", (4 * _K,) * 64, block_size=128),
    Case("64, 4K, int8", (4 * _K,) * 64, cache="int8"),
    Case("64, 4K, fp8", (4 * _K,) * 64, cache="fp8"),
    Case("prefill, causal, 8K", (8 * _K,), new_tokens=8 * _K, target=Target("TFLOP/s", 300, 500)),
    Case("prefill, 4 of 2K", (2 * _K,) * 4, new_tokens=2 * _K),
    Case("prefill, 512 on 8K", (8 * _K,), new_tokens=512),
)
_TOY_CASES = (
    Case("1 request", (40,), target=Target("us", 20, 12)),
    Case("3 mixed", (5, 70, 33), target=Target("%", 65, 80)),
    Case("2, block 4", (20, 20), block_size=4),
    Case("2, int8", (20, 20), cache="int8"),
    Case("2, fp8", (20, 20), cache="fp8"),
    Case("prefill", (40,), new_tokens=40, target=Target("TFLOP/s", 300, 500)),
    Case("prefill, 8 on 40", (40, 40), new_tokens=8),
)

_LLAMA = ModelConfig(
    family="llama",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position=4096,
    norm_eps=1e-5,
    rope_theta=500_000.0,
    rope_scaling=RopeScaling("llama3", 8.0),
)
_QWEN = _LLAMA.replace(
    family="qwen3",
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=28,
    num_heads=16,
    norm_eps=1e-6,
    rope_theta=1_000_000.0,
    rope_scaling=None,
    tie_word_embeddings=True,
    qk_norm=True,
)
#: Shapes as the models' config.json have them; the positions that a run reaches, no more.
MODELS = {
    "Qwen3-0.6B": _QWEN,
    "Llama-3.1-8B": _LLAMA,
    "Qwen3-14B": _QWEN.replace(
        hidden_size=5120, intermediate_size=17_408, num_layers=40, num_heads=40, tie_word_embeddings=False
    ),
}


def _toy(model: ModelConfig) -> ModelConfig:
    return model.replace(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position=64,
        rope_scaling=None,
    )


REAL = Sizes(
    copy_bytes=2 * 2**30,
    matrix_size=8192,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    cases=_CASES,
    requests=256,
    tokens=(100, 1024),
    token_budget=GPU_TOKEN_BUDGET,
    run_seconds=25.0,
    eager_seconds=8.0,
    busy_steps=12,
    models=MODELS,
)
TOY = Sizes(
    copy_bytes=2**16,
    matrix_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    cases=_TOY_CASES,
    requests=3,
    tokens=(2, 4),
    token_budget=16,
    run_seconds=60.0,
    eager_seconds=60.0,
    busy_steps=1,
    models={name: _toy(model) for name, model in MODELS.items()},
)


def cache_dtype(name: str, device: torch.device) -> torch.dtype | None:
    """The dtype of a case's cache; None where this device has none such."""
    from pageframe.kernels.triton.dtypes import fp8_dtype

    if name == "fp8":
        return fp8_dtype(device)
    return torch.int8 if name == "int8" else torch.bfloat16
