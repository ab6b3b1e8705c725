"""The model families, as tables: their config keys and weight names, and ours.

A family is data; the one decoder is driven by ModelConfig. No file is read here. No torch.

Our weight names, with `layers.{i}.` in front of those of a layer:
    embedding, final_norm, output,
    attention_norm, q, k, v, o, q_norm, k_norm, mlp_norm, gate, up, down
each followed by `.weight` or `.bias`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from pageframe.runtime.errors import ModelError


@dataclass(frozen=True, slots=True)
class Family:
    """What distinguishes a family from the decoder's plain form.

    Args:
        model_type: config.json's `model_type`.
        gguf_architecture: GGUF's `general.architecture`; Mistral's files say llama.
        qkv_bias: q, k and v always have a bias.
        attention_bias_key: config.json's `attention_bias` gives q, k, v and o a bias.
        mlp_bias_key: config.json's `mlp_bias` gives the MLP a bias.
        qk_norm: q and k heads are normalised before the rotation.
        default_head_dim: where config.json has none; None is hidden_size / num_heads.
        default_num_kv_heads: where config.json has none; None is num_heads.
        window: which layers see only `sliding_window` tokens: "never"; "all" (if the value is not null); or
            "use_sliding_window" (if that is true, the layers from `max_window_layers` on, or as `layer_types` says).
        gguf_rotary_pairs: the file stores q and k rows for neighbouring rotary pairs; they are put back to halves.
    """

    name: str
    model_type: str
    gguf_architecture: str
    qkv_bias: bool = False
    attention_bias_key: bool = False
    mlp_bias_key: bool = False
    qk_norm: bool = False
    default_head_dim: int | None = None
    default_num_kv_heads: int | None = None
    window: str = "never"
    gguf_rotary_pairs: bool = False


FAMILIES = (
    Family("llama", "llama", "llama", attention_bias_key=True, mlp_bias_key=True, gguf_rotary_pairs=True),
    Family("mistral", "mistral", "llama", default_num_kv_heads=8, window="all", gguf_rotary_pairs=True),
    Family("qwen2", "qwen2", "qwen2", qkv_bias=True, default_num_kv_heads=32, window="use_sliding_window"),
    Family(
        "qwen3",
        "qwen3",
        "qwen3",
        attention_bias_key=True,
        qk_norm=True,
        default_head_dim=128,
        default_num_kv_heads=32,
        window="use_sliding_window",
    ),
)

_HF_MODULES = {
    "embedding": "model.embed_tokens",
    "final_norm": "model.norm",
    "output": "lm_head",
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_GGUF_MODULES = {
    "embedding": "token_embd",
    "final_norm": "output_norm",
    "output": "output",
    "attention_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
#: Llama 3.1's GGUF files carry the rotary scaling as one factor per frequency.
GGUF_ROPE_FACTORS = "rope_freqs.weight"
#: Tensors that old files carry and that the config already implies.
_IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")

_LAYER = re.compile(r"layers\.(\d+)\.(\w+)\.(weight|bias)")
_TOP = re.compile(r"(\w+)\.(weight|bias)")


def family_of_model_type(model_type: object, where: str) -> Family:
    """The family of a config.json's `model_type`.

    Raises:
        ModelError: it is none of ours; `where` names the file in the message.
    """
    for family in FAMILIES:
        if family.model_type == model_type:
            return family
    known = ", ".join(family.model_type for family in FAMILIES)
    raise ModelError(f"{where}: model_type is {model_type!r}; supported are {known}")


def family_of_gguf(architecture: object, where: str) -> Family:
    """The family of a GGUF's `general.architecture` (Mistral's files say llama, and are).

    Raises:
        ModelError: it is none of ours; `where` names the file in the message.
    """
    for family in FAMILIES:
        if family.gguf_architecture == architecture:
            return family
    known = ", ".join(sorted({family.gguf_architecture for family in FAMILIES}))
    raise ModelError(f"{where}: general.architecture is {architecture!r}; supported are {known}")


def family_named(name: str) -> Family:
    """The family of a ModelConfig's `family`."""
    return next(family for family in FAMILIES if family.name == name)


def hf_name(name: str) -> str:
    """Our weight name -> Hugging Face's."""
    layer = _LAYER.fullmatch(name)
    if layer:
        return f"model.layers.{layer[1]}.{_HF_MODULES[layer[2]]}.{layer[3]}"
    return _top_name(name, _HF_MODULES)


def gguf_name(name: str) -> str:
    """Our weight name -> GGUF's."""
    layer = _LAYER.fullmatch(name)
    if layer:
        return f"blk.{layer[1]}.{_GGUF_MODULES[layer[2]]}.{layer[3]}"
    return _top_name(name, _GGUF_MODULES)


def is_ignored(stored_name: str) -> bool:
    """Whether a stored tensor says only what the config says too."""
    return _IGNORED.fullmatch(stored_name) is not None


def _top_name(name: str, modules: Mapping[str, str]) -> str:
    top = _TOP.fullmatch(name)
    assert top, f"{name} is no weight name of ours"
    return f"{modules[top[1]]}.{top[2]}"
