"""The model families, as tables: their config keys and weight names, and ours.

A family is data; the one decoder is driven by ModelConfig. No file is read here. No torch.

Our weight names, with `layers.{i}.` in front of those of a layer:
    embedding, positions, final_norm, output,
    attention_norm, q, k, v (or qkv), o, q_norm, k_norm, mlp_norm, gate, up, down
each followed by `.weight` or `.bias`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from pageframe.runtime.errors import ModelError

_LLAMA_MODULES = {
    "embedding": "embed_tokens",
    "final_norm": "norm",
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
_GPT2_MODULES = {
    "embedding": "wte",
    "positions": "wpe",
    "final_norm": "ln_f",
    "output": "lm_head",
    "attention_norm": "ln_1",
    "qkv": "attn.c_attn",
    "o": "attn.c_proj",
    "mlp_norm": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}


@dataclass(frozen=True, slots=True)
class HfNames:
    """How a Hugging Face folder names a family's weights and lays them out.

    Args:
        modules: our modules -> theirs.
        base: what stands before all but the output's.
        layers: what stands before a layer's number.
        base_may_lack: folders of the bare model have the same names without `base`.
        transposed: our modules whose matrices are stored [in_features, out_features].
    """

    modules: Mapping[str, str]
    base: str
    layers: str
    base_may_lack: bool = False
    transposed: frozenset[str] = frozenset()


_LLAMA_NAMES = HfNames(_LLAMA_MODULES, "model.", "layers")
_GPT2_NAMES = HfNames(
    _GPT2_MODULES, "transformer.", "h", base_may_lack=True, transposed=frozenset(("qkv", "o", "up", "down"))
)
#: config.json's keys, where they differ from Llama's.
_GPT2_KEYS = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
    "rms_norm_eps": "layer_norm_epsilon",
}


@dataclass(frozen=True, slots=True)
class Family:
    """What distinguishes a family from the decoder's plain form.

    Args:
        model_type: config.json's `model_type`.
        gguf_architecture: GGUF's `general.architecture`; Mistral's files say llama. None: GGUF files are not read.
        hf_names: the weights' names in a folder.
        config_keys: Llama's keys of config.json -> this family's, where they differ.
        fixed_keys: keys of config.json that must have this value, if any.
        norm, gated_mlp: as in ModelConfig.
        activations: config.json's `hidden_act` -> ModelConfig's `activation`; the first is the default.
        learned_positions: a table has a row for each position.
        joined_qkv: q, k and v are stored as one matrix, one below the other.
        qkv_bias: q, k and v always have a bias; output_bias, mlp_bias: so have o, and the MLP.
        attention_bias_key: config.json's `attention_bias` gives q, k, v and o a bias.
        mlp_bias_key: config.json's `mlp_bias` gives the MLP a bias.
        qk_norm: q and k heads are normalised before the rotation.
        default_head_dim: where config.json has none; None is hidden_size / num_heads.
        default_num_kv_heads: where config.json has none; None is num_heads.
        default_mlp_factor: `intermediate_size` is so many times `hidden_size` where config.json has none.
        default_norm_eps, default_tied: where config.json does not say.
        window: which layers see only `sliding_window` tokens: "never"; "all" (if the value is not null); or
            "use_sliding_window" (if that is true, the layers from `max_window_layers` on, or as `layer_types` says).
        gguf_rotary_pairs: the file stores q and k rows for neighbouring rotary pairs; they are put back to halves.
    """

    name: str
    model_type: str
    gguf_architecture: str | None
    hf_names: HfNames = _LLAMA_NAMES
    config_keys: Mapping[str, str] = field(default_factory=dict)
    fixed_keys: Mapping[str, bool] = field(default_factory=dict)
    norm: str = "rms"
    activations: Mapping[str, str] = field(default_factory=lambda: {"silu": "silu", "swish": "silu"})
    gated_mlp: bool = True
    learned_positions: bool = False
    joined_qkv: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    attention_bias_key: bool = False
    mlp_bias_key: bool = False
    qk_norm: bool = False
    default_head_dim: int | None = None
    default_num_kv_heads: int | None = None
    default_mlp_factor: int | None = None
    default_norm_eps: float = 1e-6
    default_tied: bool = False
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
    Family(
        "gpt2",
        "gpt2",
        None,
        hf_names=_GPT2_NAMES,
        config_keys=_GPT2_KEYS,
        fixed_keys={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        norm="layer",
        activations={"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"},
        gated_mlp=False,
        learned_positions=True,
        joined_qkv=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        default_mlp_factor=4,
        default_norm_eps=1e-5,
        default_tied=True,
    ),
)

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
#: Tensors that old files carry and that the config already implies: rotary frequencies, causal masks.
_IGNORED = re.compile(
    r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq|(transformer\.)?h\.\d+\.attn\.(masked_)?bias"
)

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
        if family.gguf_architecture is not None and family.gguf_architecture == architecture:
            return family
    known = ", ".join(sorted({family.gguf_architecture for family in FAMILIES if family.gguf_architecture}))
    raise ModelError(f"{where}: general.architecture is {architecture!r}; supported are {known}")


def family_named(name: str) -> Family:
    """The family of a ModelConfig's `family`."""
    return next(family for family in FAMILIES if family.name == name)


def hf_name(name: str, names: HfNames, *, with_base: bool = True) -> str:
    """Our weight name -> Hugging Face's, or the bare model's without `names.base`."""
    layer = _LAYER.fullmatch(name)
    base = names.base if with_base else ""
    if layer:
        return f"{base}{names.layers}.{layer[1]}.{names.modules[layer[2]]}.{layer[3]}"
    theirs = _top_name(name, names.modules)
    return theirs if name.startswith("output.") else f"{base}{theirs}"


def module_of(name: str) -> str:
    """The module in our weight name: "layers.0.q.weight" -> "q"."""
    return name.split(".")[-2]


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
