"""Answer the same requests by engines on Triton's kernels and on torch's, and print what each did as JSON.

Run as a program, with TRITON_INTERPRET=1 and the tests' folder as PYTHONPATH: python triton_engine.py FOLDER MODEL
CASE…, where FOLDER is empty, MODEL is "llama" or "qwen3", and the cases are of CASES.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.interpreter import patch_once_a_launch
from safetensors.torch import save_file

from pageframe.benchmarks.experiments.poison import PoisonedRunner
from pageframe.kernels.triton import launches
from pageframe.runtime.config import EngineConfig
from pageframe.runtime.engine import Engine
from pageframe.runtime.engine_builder import build_engine
from pageframe.runtime.model_runner import ModelRunner
from pageframe.runtime.request import SamplingParams

VOCAB_SIZE, HIDDEN_SIZE, MLP_SIZE, NUM_LAYERS = 64, 48, 40, 2
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 16
PROMPT_LENGTHS, NUM_TOKENS = (9, 17, 3, 6), 6
#: A pool that does not hold all requests to their ends, and a budget that cuts the longest prompts.
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "threads": 1,
    "block_size": 4,
    "num_blocks": 11,
    "max_model_len": 24,
    "max_num_requests": 4,
    "max_num_batched_tokens": 8,
    "mixed_token_budget": 8,
    "prefix_cache": False,
}


def save_model(folder: Path, model_type: str) -> str:
    """A random model in a Hugging Face folder; "qwen3" has a norm for the heads of q and k."""
    generator = torch.Generator().manual_seed(1)
    tensors: dict[str, torch.Tensor] = {}

    def matrix(name: str, rows: int, columns: int) -> None:
        tensors[f"{name}.weight"] = torch.randn(rows, columns, generator=generator) * columns**-0.5

    def norm(name: str, size: int) -> None:
        tensors[f"{name}.weight"] = 1 + 0.1 * torch.randn(size, generator=generator)

    matrix("model.embed_tokens", VOCAB_SIZE, HIDDEN_SIZE)
    for layer in (f"model.layers.{index}" for index in range(NUM_LAYERS)):
        norm(f"{layer}.input_layernorm", HIDDEN_SIZE)
        norm(f"{layer}.post_attention_layernorm", HIDDEN_SIZE)
        for name, heads in (("q", NUM_HEADS), ("k", NUM_KV_HEADS), ("v", NUM_KV_HEADS)):
            matrix(f"{layer}.self_attn.{name}_proj", heads * HEAD_DIM, HIDDEN_SIZE)
        matrix(f"{layer}.self_attn.o_proj", HIDDEN_SIZE, NUM_HEADS * HEAD_DIM)
        matrix(f"{layer}.mlp.gate_proj", MLP_SIZE, HIDDEN_SIZE)
        matrix(f"{layer}.mlp.up_proj", MLP_SIZE, HIDDEN_SIZE)
        matrix(f"{layer}.mlp.down_proj", HIDDEN_SIZE, MLP_SIZE)
        if model_type == "qwen3":
            norm(f"{layer}.self_attn.q_norm", HEAD_DIM)
            norm(f"{layer}.self_attn.k_norm", HEAD_DIM)
    norm("model.norm", HIDDEN_SIZE)
    matrix("lm_head", VOCAB_SIZE, HIDDEN_SIZE)
    config = {
        "model_type": model_type,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": MLP_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def answer(engine: Engine) -> tuple[list[list[int]], list[list[float]]]:
    """Tokens of each request and their logprobs, over poisoned memory; the requests come at once, every second one is
    drawn."""
    poisoned = PoisonedRunner(engine)
    rng = np.random.default_rng(0)
    token_ids: dict[str, list[int]] = {}
    logprobs: dict[str, list[float]] = {}
    for index, length in enumerate(PROMPT_LENGTHS):
        params = SamplingParams(temperature=index % 2, seed=index, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
        token_ids[str(index)], logprobs[str(index)] = [], []
        engine.add(str(index), rng.integers(0, VOCAB_SIZE, length).tolist(), params)
    while engine.has_work:
        for output in engine.step():
            assert output.finish_reason != "error", output.error
            token_ids[output.request_id] += output.token_ids
            logprobs[output.request_id] += [row.logprob for row in output.logprobs or ()]
        poisoned.poison_free_blocks()
        engine.scheduler.check_invariants()
    return list(token_ids.values()), list(logprobs.values())


def run(model: str, **settings: Any) -> dict[str, Any]:
    """What an engine with these settings answered, and what it did."""
    engine = build_engine(EngineConfig(model=model, **(SETTINGS | settings)))
    assert isinstance(engine.runner, ModelRunner)
    pool_bytes = engine.runner.pool_bytes
    before = Counter(launches)
    token_ids, logprobs = answer(engine)
    prefills = sum(step.prefill_tokens > 0 for step in engine.steps)
    return {
        "token_ids": token_ids,
        "logprobs": logprobs,
        "backend": engine.resolved.backend,
        "kv_dtype": engine.resolved.kv_dtype,
        "pool_bytes": [engine.resolved.pool_bytes, pool_bytes],
        "steps": len(engine.steps),
        "mixed_steps": sum(bool(step.prefill_tokens and step.decode_tokens) for step in engine.steps),
        "prefill_steps": prefills,
        "preemptions": engine.scheduler.num_preemptions,
        "launches": dict(launches - before),
    }


#: What each case is run with; "reference" is what float32 on Triton is compared with.
CASES: dict[str, dict[str, str]] = {
    "reference": {"dtype": "float32", "backend": "reference"},
    "float32": {"dtype": "float32", "backend": "triton"},
    "bf16": {"dtype": "bf16", "backend": "triton"},
    "int8": {"dtype": "bf16", "backend": "triton", "kv_dtype": "int8"},
    "fp8": {"dtype": "bf16", "backend": "triton", "kv_dtype": "fp8"},
}


def main(folder: Path, model_type: str, cases: list[str]) -> None:
    model = save_model(folder / model_type, model_type)
    with pytest.MonkeyPatch.context() as patch:
        patch_once_a_launch(patch)
        json.dump({case: run(model, **CASES[case]) for case in cases}, sys.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
