"""What the model tests share: running a decoder over one request, and tiny models in files of each kind."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from pageframe.kernels.attention import kv_cache_shape, select_backend
from pageframe.runtime.models.config import load_model_config
from pageframe.runtime.models.decoder import Decoder
from pageframe.runtime.models.loader import load_decoder
from pageframe.runtime.models.source import ModelSource, resolve_source

CPU = torch.device("cpu")
BLOCK_SIZE = 16

# A vocabulary of 64 for tiny GGUF files: control tokens, the printable stand-ins of some bytes, and two merges.
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ", "Ġ"]
TOKENS += ["ab", "Ġa", "!", "?", "Ċ", "0", "1", "2"]
TYPES = [3, 3, 3] + [1] * (len(TOKENS) - 3)
MERGES = ["a b", "Ġ a"]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}{% endfor %}"


@dataclass
class OneRequest:
    """A step of one request in row 0, as kernels see it."""

    rows: np.ndarray
    context_lens: np.ndarray
    query_start: np.ndarray
    num_decode: int


def logits_of(decoder: Decoder, token_ids: Sequence[int], chunk: int | None = None) -> Tensor:
    """float32 [len(token_ids), vocab_size]: one request in chunks, over a pool of NaN with its blocks out of order."""
    config, num_tokens = decoder.config, len(token_ids)
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    table = torch.arange(num_blocks, dtype=torch.int32).flip(0)[None]
    shape = kv_cache_shape(num_blocks, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    kv_caches = [torch.full(shape, torch.nan) for _ in range(config.num_layers)]
    backend = select_backend("reference", CPU)
    results = []
    with torch.inference_mode():
        for start in range(0, num_tokens, chunk or num_tokens):
            end = min(start + (chunk or num_tokens), num_tokens)
            positions = torch.arange(start, end)
            step = OneRequest(*(np.array(x, np.int32) for x in ([0], [end], [0, end - start])), int(end - start == 1))
            slots = table[0, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
            plan = backend.plan_attention(step, table, BLOCK_SIZE)
            token_slice = torch.tensor(token_ids[start:end])
            results.append(decoder.logits(decoder.forward(token_slice, positions, kv_caches, slots, plan, backend)))
    return torch.cat(results)


def load(source: ModelSource | Path, storage_dtype: torch.dtype = torch.float32) -> Decoder:
    """The decoder at a path, in float32 arithmetic."""
    if isinstance(source, Path):
        source = resolve_source(str(source))
    config = load_model_config(source)
    return load_decoder(source, config, storage_dtype=storage_dtype, compute_dtype=torch.float32, device=CPU)


def hf_model(kind: str, **changes: Any) -> Any:
    """A tiny random model of transformers: "Llama", "Mistral", "Qwen2" or "Qwen3"; biases and norms are random too."""
    import transformers

    shape = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    config = getattr(transformers, f"{kind}Config")(**(shape | changes))
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
            else:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5)  # larger ones magnify rounding from layer to layer
    return model


def hf_logits(model: Any, token_ids: Sequence[int]) -> Tensor:
    """transformers' logits, float32 [len(token_ids), vocab_size], computed in float64: an oracle's own rounding would
    use up half of a tolerance."""
    with torch.no_grad():
        return copy.deepcopy(model).double()(torch.tensor([token_ids])).logits[0].float()


def write_tiny_gguf(
    path: Path,
    model: Any,
    architecture: str = "llama",
    kinds: Mapping[str, GGMLQuantizationType] | None = None,
    extra: Mapping[str, float | str] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Writes transformers' `model` as a GGUF file, as llama.cpp's converter lays it out.

    Args:
        kinds: storage type by GGUF module name ("attn_q"); matrices are F32 without one. Quantised ones change
            `model`'s parameter to the values that the file holds.
        extra: further metadata. tensors: further tensors.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    add_tiny_tokenizer(writer)
    for key, value in (extra or {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_float32)(key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        kind = GGMLQuantizationType.F32
        if parameter.ndim == 2:
            kind = (kinds or {}).get(gguf_name.split(".")[-2], kind)
        stored = gguf.quants.quantize(parameter.detach().numpy(), kind)
        values = gguf.quants.dequantize(stored, kind)
        parameter.data = torch.from_numpy(np.array(values, np.float32))
        num_heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        heads = num_heads.get(name.split(".")[-2])
        if architecture == "llama" and heads:
            stored = interleave(stored, heads)
        writer.add_tensor(gguf_name, stored, raw_dtype=kind)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows i and i + head_dim / 2 of each head side by side, as Llama's GGUF files have q and k."""
    head_dim = rows.shape[0] // num_heads
    order = [
        head * head_dim + half * head_dim // 2 + pair
        for head in range(num_heads)
        for pair in range(head_dim // 2)
        for half in range(2)
    ]
    return rows[order]


def add_tiny_tokenizer(writer: gguf.GGUFWriter, pre: str = "smollm") -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types(TYPES)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
