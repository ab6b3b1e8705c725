"""Reads a model's shape from config.json or GGUF metadata into a ModelConfig, and its sampling defaults.

What the decoder cannot do exactly as the file asks is refused here, by name. No weights are read. No torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pageframe.runtime.config import ModelConfig, RopeScaling
from pageframe.runtime.errors import ModelError
from pageframe.runtime.models.families import (
    GGUF_ROPE_FACTORS,
    Family,
    family_of_gguf,
    family_of_model_type,
    gguf_name,
)
from pageframe.runtime.models.gguf import GgufFile
from pageframe.runtime.models.source import ModelSource, one_line

#: Sizes above these are damage, not models.
_MAX_SIZE = 2**31 - 1
_MAX_LAYERS = 10_000
_MAX_POSITIONS = 2**24
#: What Mistral's and Qwen's first configurations mean where they have no `sliding_window` or `max_window_layers`.
_DEFAULT_WINDOW = 4096
_DEFAULT_FULL_LAYERS = 28
_MAX_JSON_BYTES = 64 * 2**20

#: Tokens that end a turn or a text in some chat format; where a GGUF marks one as control, it ends the text.
_END_TOKENS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end|>",
    "</s>",
    "<|eot|>",
)
_GGUF_CONTROL_TOKEN = 3

_SAMPLING_KEYS = {"temperature": float, "top_p": float, "top_k": int, "min_p": float}


def load_model_config(source: ModelSource) -> ModelConfig:
    """The shape of the model at `source`, end-of-text ids included.

    Raises:
        ModelError: a file is missing or damaged, or asks for something that is not supported.
    """
    if source.kind == "gguf":
        return _config_of_gguf(source.gguf)
    return _config_of_folder(source.path)


def sampling_defaults(source: ModelSource) -> dict[str, float | int]:
    """temperature, top_p, top_k and min_p as generation_config.json gives them; empty where it gives none.

    Raises:
        ModelError: the file is damaged, or one of these is no number.
    """
    if source.kind == "gguf":
        return {}
    path = source.path / "generation_config.json"
    values = read_json(path) if path.is_file() else {}
    defaults: dict[str, float | int] = {}
    for key, kind in _SAMPLING_KEYS.items():
        value = values.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not _is_finite(value):
            raise ModelError(f"{path}: {key} is {value!r}; it must be a number")
        defaults[key] = kind(value)
    return defaults


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        ModelError: it cannot be read or holds something else.
    """
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ModelError(f"{path}: is larger than {_MAX_JSON_BYTES} bytes")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: is not valid JSON: {one_line(error)}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds no JSON object")
    return value


def _is_finite(value: float) -> bool:
    """Whether a float can hold it: JSON's integers may have any number of digits."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


class _Keys:
    """Checked access to a mapping's values; errors name the file and the key.

    Args:
        prefix: stands before every key in the file.
        names: keys -> what the file calls them, where that differs.
    """

    def __init__(
        self, values: Mapping[str, Any], where: Path, prefix: str = "", names: Mapping[str, str] | None = None
    ) -> None:
        self.values = values
        self.where = where
        self.prefix = prefix
        self._names = names or {}

    def name(self, key: str) -> str:
        """The key as the file has it."""
        return self.prefix + self._names.get(key, key)

    def get(self, key: str) -> Any:
        return self.values.get(self.name(key))

    def size(self, key: str, default: int | None = None, *, limit: int = _MAX_SIZE) -> int:
        """An integer from 1 to `limit`; null counts as missing, and without a default missing is an error."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not 1 <= value <= limit:
            self.fail(key, value, f"it must be an integer from 1 to {limit}")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number; null counts as missing, and without a default missing is an error."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not (_is_finite(value) and value > 0):
            self.fail(key, value, "it must be a positive number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if type(value) is not bool:
            self.fail(key, value, "it must be true or false")
        return bool(value)

    def only(self, key: str, *allowed: Any) -> None:
        """Refuses a value that would change the arithmetic in a way the decoder does not know."""
        value = self.get(key)
        if value is not None and value not in allowed:
            self.fail(key, value, f"only {' or '.join(repr(item) for item in allowed)} is supported")

    def fail(self, key: str, value: Any, rule: str) -> None:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        what = "is missing" if value is None else f"is {shown}"
        raise ModelError(f"{self.where}: {self.name(key)} {what}; {rule}")


def _config_of_folder(folder: Path) -> ModelConfig:
    where = folder / "config.json"
    values = read_json(where)
    family = family_of_model_type(values.get("model_type"), str(where))
    keys = _Keys(values, where, names=family.config_keys)
    _refuse_unknown_arithmetic(keys, family)
    num_heads = keys.size("num_attention_heads")
    num_layers = keys.size("num_hidden_layers", limit=_MAX_LAYERS)
    hidden_size = keys.size("hidden_size")
    attention_bias = family.attention_bias_key and keys.flag("attention_bias")
    max_position = keys.size("max_position_embeddings", limit=_MAX_POSITIONS)
    rope_theta, rope_scaling = _hf_rope(keys)
    return _checked(
        ModelConfig(
            family=family.name,
            vocab_size=keys.size("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=keys.size("intermediate_size", hidden_size * (family.default_mlp_factor or 0) or None),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=keys.size("num_key_value_heads", family.default_num_kv_heads or num_heads),
            head_dim=keys.size("head_dim", family.default_head_dim or hidden_size // num_heads or 1),
            max_position=max_position,
            norm_eps=keys.number("rms_norm_eps", family.default_norm_eps),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            tie_word_embeddings=keys.flag("tie_word_embeddings", family.default_tied),
            qkv_bias=family.qkv_bias or attention_bias,
            output_bias=family.output_bias or attention_bias,
            mlp_bias=family.mlp_bias or (family.mlp_bias_key and keys.flag("mlp_bias")),
            qk_norm=family.qk_norm,
            norm=family.norm,
            learned_positions=max_position if family.learned_positions else None,
            activation=_hf_activation(keys, family),
            gated_mlp=family.gated_mlp,
            windows=_hf_windows(keys, family, num_layers),
            bos_token_id=_hf_bos(keys),
            eos_token_ids=_hf_eos(folder, keys),
        ),
        where,
    )


def _refuse_unknown_arithmetic(keys: _Keys, family: Family) -> None:
    for key, value in family.fixed_keys.items():
        keys.only(key, value)
    keys.only("partial_rotary_factor", 1, 1.0)
    keys.only("attention_bias", *((True, False) if family.attention_bias_key else (family.qkv_bias, False)))
    keys.only("mlp_bias", *((True, False) if family.mlp_bias_key else (False,)))
    if keys.get("quantization_config") is not None:
        keys.fail("quantization_config", keys.get("quantization_config"), "quantised folders are not supported")


def _hf_activation(keys: _Keys, family: Family) -> str:
    keys.only("hidden_act", *family.activations)
    return family.activations[keys.get("hidden_act") or next(iter(family.activations))]


def _hf_rope(keys: _Keys) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) from `rope_theta` and `rope_scaling`, or from `rope_parameters`, which newer files have."""
    name = "rope_parameters" if keys.get("rope_parameters") is not None else "rope_scaling"
    parameters = keys.get(name)
    if parameters is None:
        return keys.number("rope_theta", 10_000.0), None
    if not isinstance(parameters, dict) or any(isinstance(value, dict) for value in parameters.values()):
        keys.fail(name, parameters, "it must be one object of numbers, for all layers alike")
    inner = _Keys(parameters, keys.where)
    theta = inner.number("rope_theta", keys.number("rope_theta", 10_000.0))
    inner.only("partial_rotary_factor", 1, 1.0)
    kind = parameters.get("rope_type", parameters.get("type"))
    if kind in (None, "default"):
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", inner.number("factor"))
    if kind != "llama3":
        keys.fail(f"{name}.rope_type", kind, "supported are default, linear and llama3")
    scaling = RopeScaling(
        "llama3",
        inner.number("factor"),
        inner.number("low_freq_factor"),
        inner.number("high_freq_factor"),
        inner.size("original_max_position_embeddings"),
    )
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        keys.fail(f"{name}.low_freq_factor", scaling.low_freq_factor, "it must be below high_freq_factor")
    return theta, scaling


def _hf_windows(keys: _Keys, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """Each layer's window in tokens, itself included, or () where every layer sees everything."""
    if family.window == "never":
        keys.only("sliding_window")
        return ()
    if keys.values.get("sliding_window", _DEFAULT_WINDOW) is None:  # null is none; a missing key is the default
        return ()
    if family.window == "all":
        return (keys.size("sliding_window", _DEFAULT_WINDOW),) * num_layers
    if not keys.flag("use_sliding_window"):
        return ()
    size = keys.size("sliding_window", _DEFAULT_WINDOW)
    layer_types = keys.get("layer_types")
    if layer_types is None:
        first = keys.values.get("max_window_layers", _DEFAULT_FULL_LAYERS)
        if type(first) is not int or first < 0:
            keys.fail("max_window_layers", first, "it must be an integer of at least 0")
        return tuple(size if layer >= first else None for layer in range(num_layers))
    known = {"sliding_attention": size, "full_attention": None}
    if not isinstance(layer_types, list) or [kind in list(known) for kind in layer_types] != [True] * num_layers:
        keys.fail("layer_types", layer_types, f"it must list {num_layers} times one of {', '.join(known)}")
    return tuple(known[kind] for kind in layer_types)


def _hf_bos(keys: _Keys) -> int | None:
    ids = _token_ids(keys, "bos_token_id")
    return ids[0] if ids else None


def _hf_eos(folder: Path, keys: _Keys) -> tuple[int, ...]:
    """generation_config.json's end-of-text ids, else config.json's."""
    path = folder / "generation_config.json"
    if path.is_file():
        ids = _token_ids(_Keys(read_json(path), path), "eos_token_id")
        if ids:
            return ids
    return _token_ids(keys, "eos_token_id")


def _token_ids(keys: _Keys, key: str) -> tuple[int, ...]:
    """An id, a list of ids, or null -> ids in order, each once."""
    value = keys.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id <= _MAX_SIZE:
            keys.fail(key, value, "it must be a token id or a list of token ids")
    return tuple(dict.fromkeys(ids))


def _config_of_gguf(file: GgufFile) -> ModelConfig:
    architecture = file.metadata.get("general.architecture")
    family = family_of_gguf(architecture, str(file.path))
    keys = _Keys(file.metadata, file.path, f"{architecture}.")
    _refuse_unknown_gguf(keys, file.metadata)
    num_heads = keys.size("attention.head_count")
    hidden_size = keys.size("embedding_length")
    head_dim = keys.size("attention.key_length", hidden_size // num_heads or 1)
    keys.only("attention.value_length", head_dim)
    keys.only("rope.dimension_count", head_dim)
    embedding = file.tensors.get(gguf_name("embedding.weight"))
    if embedding is None:
        raise ModelError(f"{file.path}: tensor {gguf_name('embedding.weight')!r} is missing")
    return _checked(
        ModelConfig(
            family=family.name,
            vocab_size=embedding.shape[0],
            hidden_size=hidden_size,
            intermediate_size=keys.size("feed_forward_length"),
            num_layers=keys.size("block_count", limit=_MAX_LAYERS),
            num_heads=num_heads,
            num_kv_heads=keys.size("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            max_position=keys.size("context_length", limit=_MAX_POSITIONS),
            norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
            rope_theta=keys.number("rope.freq_base", 10_000.0),
            rope_scaling=_gguf_rope_scaling(keys, file),
            tie_word_embeddings=gguf_name("output.weight") not in file.tensors,
            qkv_bias=family.qkv_bias or gguf_name("layers.0.q.bias") in file.tensors,
            output_bias=gguf_name("layers.0.o.bias") in file.tensors,
            mlp_bias=gguf_name("layers.0.gate.bias") in file.tensors,
            qk_norm=family.qk_norm,
            bos_token_id=_gguf_token_id(file, "bos"),
            eos_token_ids=_gguf_eos(file),
        ),
        file.path,
    )


def _refuse_unknown_gguf(keys: _Keys, metadata: Mapping[str, Any]) -> None:
    keys.only("expert_count", 0)
    keys.only("attention.sliding_window", 0)
    keys.only("rope.scaling.attn_factor", 1.0)
    _Keys(metadata, keys.where).only("split.count", 0, 1)


def _gguf_rope_scaling(keys: _Keys, file: GgufFile) -> RopeScaling | None:
    kind = keys.get("rope.scaling.type")
    # A file from before `rope.scaling.*` has only this key.
    factor = keys.number("rope.scale_linear", 1.0)
    if kind == "linear":
        factor = keys.number("rope.scaling.factor")
    elif kind not in (None, "none"):
        keys.fail("rope.scaling.type", kind, f"supported are none, linear and the tensor {GGUF_ROPE_FACTORS!r}")
    return RopeScaling("linear", factor) if factor != 1.0 else None


def _gguf_token_id(file: GgufFile, name: str) -> int | None:
    ids = _token_ids(_Keys(file.metadata, file.path, "tokenizer.ggml."), f"{name}_token_id")
    return ids[0] if ids else None


def _gguf_eos(file: GgufFile) -> tuple[int, ...]:
    """The file's end-of-text ids (of text, of turn, of message) and every control token known to end a turn."""
    named = [_gguf_token_id(file, name) for name in ("eos", "eot", "eom")]
    ids = [token_id for token_id in named if token_id is not None]
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    types = file.metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(types, list):
        ids += [
            token_id
            for token_id, (token, kind) in enumerate(zip(tokens, types, strict=False))
            if kind == _GGUF_CONTROL_TOKEN and token in _END_TOKENS
        ]
    return tuple(dict.fromkeys(ids))


def _checked(config: ModelConfig, where: Path) -> ModelConfig:
    """Refuses shapes that contradict themselves.

    Raises:
        ModelError: they do.
    """
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"{where}: {config.num_heads} attention heads cannot be shared among {config.num_kv_heads} KV heads"
        )
    if config.head_dim % 2 and config.learned_positions is None:
        raise ModelError(f"{where}: head_dim is {config.head_dim}; it must be even")
    for token_id in config.eos_token_ids:
        if token_id >= config.vocab_size:
            raise ModelError(f"{where}: the end-of-text id {token_id} is not below vocab_size ({config.vocab_size})")
    return config
