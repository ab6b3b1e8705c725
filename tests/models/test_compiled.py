"""Decoders in the compiled CPU engine, against the same weights in torch's float32, and against themselves: the same
bits however a request is cut up and whoever else is in the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from pageframe.kernels.attention import kv_cache_shape
from pageframe.kernels.cpu import CpuKernels
from pageframe.kernels.cpu.backend import CpuBackend
from pageframe.kernels.kv_pool import KvPool
from pageframe.runtime.config import ModelConfig
from pageframe.runtime.models.config import load_model_config
from pageframe.runtime.models.decoder import Decoder
from pageframe.runtime.models.loader import load_decoder
from pageframe.runtime.models.source import resolve_source
from pageframe.runtime.models.weights import make_weight, tied_embedding

from .helpers import BLOCK_SIZE, CPU, OneRequest, hf_model, logits_of, write_tiny_gguf

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
CONFIG = ModelConfig(
    family="llama",
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    max_position=512,
    norm_eps=1e-5,
)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "qk norm": {"qk_norm": True},
    "windows": {"windows": (40, None, 17)},
    "tied": {"tie_word_embeddings": True},
    "wide heads": {"head_dim": 64},
}


@pytest.fixture(scope="module")
def kernels(compiled_kernels: CpuKernels) -> CpuKernels:
    return compiled_kernels


def run(
    decoder: Decoder,
    kernels: CpuKernels,
    prompts: Sequence[Sequence[int]],
    chunk: int,
    threads: int = 2,
    kv_dtype: torch.dtype = torch.bfloat16,
) -> list[Tensor]:
    """Logits of each prompt, float32 [tokens, vocab_size], all prompts together in chunks, over a pool of NaN."""
    config, backend = decoder.config, CpuBackend(kernels.library)
    blocks_each = -(-max(len(prompt) for prompt in prompts) // BLOCK_SIZE)
    table = torch.randperm(len(prompts) * blocks_each).int().view(len(prompts), -1)
    shape = kv_cache_shape(table.numel(), config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    pool = KvPool(config.num_layers, shape, kv_dtype, CPU)
    pool.fill(range(table.numel()), torch.nan)
    results: list[list[Tensor]] = [[] for _ in prompts]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    with torch.inference_mode():
        for start in range(0, max(len(prompt) for prompt in prompts), chunk):
            rows = [row for row, prompt in enumerate(prompts) if len(prompt) > start]
            ends = [min(start + chunk, len(prompts[row])) for row in rows]
            positions = torch.cat([torch.arange(start, end) for end in ends])
            owners = torch.cat([torch.full((end - start,), row) for row, end in zip(rows, ends, strict=True)])
            tokens = [token for row, end in zip(rows, ends, strict=True) for token in prompts[row][start:end]]
            slots = table[owners, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
            query_start = np.cumsum([0] + [end - start for end in ends])
            step = OneRequest(*(np.array(x, np.int32) for x in (rows, ends, query_start)), num_decode=0)
            plan = backend.plan_attention(step, table, BLOCK_SIZE)
            hidden = decoder.forward(torch.tensor(tokens), positions, pool.caches, slots, plan, backend, pool.scales)
            logits = decoder.logits(hidden)
            for row, first, last in zip(rows, query_start, query_start[1:], strict=False):
                results[row].append(logits[first:last])
    torch.set_num_threads(before)
    return [torch.cat(parts) for parts in results]


def random_prompts(*lengths: int, vocab_size: int = CONFIG.vocab_size) -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, vocab_size, length).tolist() for length in lengths]


def decoders(kernels: CpuKernels, config: ModelConfig) -> tuple[Decoder, Decoder]:
    """One with the engine and one with torch's float32, of the same bfloat16 values."""
    made = [
        Decoder.random(
            config, storage_dtype=torch.bfloat16, compute_dtype=torch.float32, device=CPU, seed=3, kernels=each
        )
        for each in (kernels, None)
    ]
    return made[0], made[1]


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_the_engine_computes_what_torch_does(kernels: CpuKernels, changes: dict[str, Any]) -> None:
    ours, torchs = decoders(kernels, CONFIG.replace(**changes))
    (prompt,) = random_prompts(150)
    (logits,) = run(ours, kernels, [prompt], chunk=64)
    exact = logits_of(torchs, prompt)
    # Activations are rounded to bfloat16 before every product, each a relative error of up to 1/256.
    assert (logits - exact).abs().mean() < 0.02 * exact.abs().mean()
    assert (logits - exact).abs().max() < 0.1 * exact.abs().max()


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_the_bits_depend_on_nothing_but_the_request(kernels: CpuKernels, changes: dict[str, Any]) -> None:
    decoder, _ = decoders(kernels, CONFIG.replace(**changes))
    prompts = random_prompts(1, 5, 33, 70, 129, 300, 16, 257)
    alone = [run(decoder, kernels, [prompt], chunk=1, threads=1)[0] for prompt in prompts]
    for chunk, threads in ((512, 1), (512, 2), (7, 2), (64, 3)):
        together = run(decoder, kernels, prompts, chunk, threads)
        assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True)), f"chunks of {chunk}"


@pytest.mark.parametrize("changes", [{}, {"windows": (40, None, 17)}, {"intermediate_size": 80}], ids=str)
def test_int8_keys_and_values(kernels: CpuKernels, changes: dict[str, Any]) -> None:
    """Close to the exact ones, and as independent of others; in compiled layers, and (80) in composed ones."""
    ours, torchs = decoders(kernels, CONFIG.replace(**changes))
    prompts = random_prompts(150, 20, 33)
    logits = run(ours, kernels, prompts, chunk=64, kv_dtype=torch.int8)
    exact = logits_of(torchs, prompts[0])
    assert (logits[0] - exact).abs().mean() < 0.03 * exact.abs().mean()
    assert not torch.equal(logits[0], run(ours, kernels, prompts, chunk=64)[0]), "K and V should have been rounded"
    alone = [run(ours, kernels, [prompt], chunk=1, threads=1, kv_dtype=torch.int8)[0] for prompt in prompts]
    assert all(torch.equal(a, b) for a, b in zip(alone, logits, strict=True))


def test_arg_max_is_that_of_the_logits(kernels: CpuKernels) -> None:
    decoder, torchs = decoders(kernels, CONFIG)
    hidden = torch.randn(37, CONFIG.hidden_size, generator=torch.Generator().manual_seed(0))
    found = decoder.arg_max(hidden)
    assert found is not None
    logits = decoder.logits(hidden)
    assert torch.equal(found[0], logits.argmax(dim=1))
    assert torch.equal(found[1], logits.max(dim=1).values)
    assert torchs.arg_max(hidden) is None


def test_an_embedding_that_reads_the_outputs_matrix_gives_its_rows(kernels: CpuKernels) -> None:
    """Also for ids that do not lie side by side."""
    table = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    embedding = tied_embedding(table, make_weight(table, None, torch.float32, kernels), torch.float32)
    ids = torch.tensor([[49, 1], [0, 2], [17, 3]])
    assert torch.equal(embedding(ids[:, 0]), table[[49, 0, 17]].float())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_a_files_own_values(kernels: CpuKernels, kind: str, tmp_path: Any) -> None:
    """Kept as they are stored, they give what torch makes of the dequantised values; rotary pairs are put in order."""
    model = hf_model("Llama", **SIZES, tie_word_embeddings=False)
    stored = GGMLQuantizationType[kind]
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "token_embd", "output")
    write_tiny_gguf(tmp_path / "tiny.gguf", model, kinds=dict.fromkeys(names, stored))
    source = resolve_source(str(tmp_path / "tiny.gguf"))
    config = load_model_config(source)
    (prompt,) = random_prompts(90, vocab_size=config.vocab_size)
    kept = load_decoder(
        source,
        config,
        storage_dtype=torch.bfloat16,
        compute_dtype=torch.float32,
        device=CPU,
        kernels=kernels,
        keep_blocks=True,
    )
    exact = load_decoder(source, config, storage_dtype=torch.float32, compute_dtype=torch.float32, device=CPU)
    (logits,) = run(kept, kernels, [prompt], chunk=32)
    expected = logits_of(exact, prompt)
    assert (logits - expected).abs().mean() < 0.02 * expected.abs().mean()


def test_a_matrix_of_another_format_is_rounded_to_bf16(kernels: CpuKernels, tmp_path: Any) -> None:
    model = hf_model("Llama", **SIZES, tie_word_embeddings=False)
    write_tiny_gguf(tmp_path / "tiny.gguf", model, kinds={"ffn_down": GGMLQuantizationType.Q8_0})
    source = resolve_source(str(tmp_path / "tiny.gguf"))
    config = load_model_config(source)
    kept, rounded = (
        load_decoder(
            source,
            config,
            storage_dtype=torch.bfloat16,
            compute_dtype=torch.float32,
            device=CPU,
            kernels=kernels,
            keep_blocks=keep,
        )
        for keep in (True, False)
    )
    (prompt,) = random_prompts(20, vocab_size=config.vocab_size)
    one, other = run(kept, kernels, [prompt], 32)[0], run(rounded, kernels, [prompt], 32)[0]
    if kernels.instruction_set != "amx":  # its tiles multiply values rounded to bf16, whatever they are stored as
        assert not torch.equal(one, other), "the Q8_0 matrix should have kept its values"
    assert (one - other).abs().mean() < 0.05 * other.abs().mean()


def test_sizes_the_engine_has_not_are_left_to_torch(kernels: CpuKernels) -> None:
    config = CONFIG.replace(intermediate_size=80)
    decoder, torchs = decoders(kernels, config)
    (prompt,) = random_prompts(20)
    (logits,) = run(decoder, kernels, [prompt], chunk=20)
    exact = logits_of(torchs, prompt)
    assert (logits - exact).abs().mean() < 0.02 * exact.abs().mean()
