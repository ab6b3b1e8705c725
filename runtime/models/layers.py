"""The pieces of a decoder layer: norm, rotary positions, attention and MLP around the kernels' entry.

Knows shapes and order of operations, not where weights come from. A decode step on a CPU is bound by the cost of
calling operations, so each piece uses as few as it can.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pageframe.kernels.attention import AttentionPlan, Backend
from pageframe.runtime.config import ModelConfig, RopeScaling
from pageframe.runtime.models.weights import Norm, Weight

#: Positions are tabulated this many at a time, so that a position's values do not depend on the table's length.
_TABLE_CHUNK = 4096

#: ModelConfig's `activation` -> the function.
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """What one layer holds.

    Args:
        attention_norm, mlp_norm: over hidden_size.
        qkv: hidden_size -> (num_heads + 2 * num_kv_heads) * head_dim; q heads, then k, then v.
        qk_norm: over head_dim, with weights for num_heads + num_kv_heads heads, or None.
        gate_up: hidden_size -> 2 * intermediate_size, gate, then up; without a gate just up.
        activate: what `mlp_activation` gave.
        window: how many tokens back a query sees, itself included; None sees everything.
    """

    attention_norm: Norm
    qkv: Weight
    qk_norm: Norm | None
    o: Weight
    mlp_norm: Norm
    gate_up: Weight
    activate: Callable[[Tensor], Tensor]
    down: Weight
    window: int | None

    @property
    def linears(self) -> tuple[Weight, ...]:
        """Its matrices, in the order in which a step reads them."""
        return self.qkv, self.o, self.gate_up, self.down


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotary factors of a step's tokens, for whole heads: both [num_tokens, 1, head_dim] float32.

    Args:
        cos: the cosines, twice over.
        sin: the sines, negated in the first half; they go with the head whose halves are swapped.
    """

    cos: Tensor
    sin: Tensor


class RotaryTable:
    """Rotary factors of every position up to a length.

    Args:
        config: `max_position` is the length; `rope_theta` and `rope_scaling` make the frequencies.
        factors: [head_dim / 2] divisors of the frequencies, which some files carry, or None.
    """

    def __init__(self, config: ModelConfig, device: torch.device, factors: Tensor | None = None) -> None:
        frequencies = rotary_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        if factors is not None:
            frequencies = frequencies / factors
        chunks = [
            torch.outer(torch.arange(start, start + _TABLE_CHUNK, dtype=torch.float32), frequencies)
            for start in range(0, config.max_position, _TABLE_CHUNK)
        ]
        cos = torch.cat([chunk.cos() for chunk in chunks])[: config.max_position]
        sin = torch.cat([chunk.sin() for chunk in chunks])[: config.max_position]
        self._cos = torch.cat((cos, cos), dim=1).unsqueeze(1).to(device)
        self._sin = torch.cat((-sin, sin), dim=1).unsqueeze(1).to(device)

    def at(self, positions: Tensor) -> Rotation:
        """The factors of `positions`, int64 [num_tokens], each below the config's max_position."""
        return Rotation(self._cos.index_select(0, positions), self._sin.index_select(0, positions))

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of every position's pairs: both [max_position, head_dim / 2] float32, views with the same
        strides."""
        half = self._cos.shape[2] // 2
        return self._cos[:, 0, :half], self._sin[:, 0, half:]


class RunLayer(Protocol):
    """The layers of one step."""

    def __call__(self, index: int, hidden: Tensor, kv_cache: Tensor, kv_scales: Tensor | None) -> None:
        """Layer `index`: adds attention's and the MLP's output to the residual stream, in place.

        Args:
            hidden: [num_tokens, hidden_size], the residual stream; changed.
            kv_cache: this layer's blocks; K and V of the step's tokens are written to their slots.
            kv_scales: of int8 blocks.
        """


class Layers(Protocol):
    """All layers of a decoder."""

    def begin(self, positions: Tensor, slots: Tensor, plan: AttentionPlan, backend: Backend) -> RunLayer:
        """Prepare a step.

        Args:
            positions: int64 [num_tokens].
            slots: int64 [num_tokens]; -1 writes nothing.
            plan: what `backend.plan_attention` made of the step.
        """


class ComposedLayers:
    """Layers as torch operations around the backend's attention; see `Layers`.

    Args:
        rotary: None where the embedding has the positions already.
    """

    def __init__(self, config: ModelConfig, layers: Sequence[LayerWeights], rotary: RotaryTable | None) -> None:
        self._config = config
        self._layers = layers
        self._rotary = rotary

    def begin(self, positions: Tensor, slots: Tensor, plan: AttentionPlan, backend: Backend) -> RunLayer:
        """See `Layers.begin`."""
        rotation = None if self._rotary is None else self._rotary.at(positions)

        def run(index: int, hidden: Tensor, kv_cache: Tensor, kv_scales: Tensor | None) -> None:
            layer = self._layers[index]
            decoder_layer(hidden, layer, self._config, rotation, kv_cache, kv_scales, slots, plan, backend)

        return run


def rotary_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Radians per position of each rotary pair: [head_dim / 2] float32.

    Pair i turns by theta^(-2i / head_dim) per position (Su et al., https://arxiv.org/abs/2104.09864). Llama 3.1
    divides by `factor` the frequencies whose wavelength exceeds original_max_position / low_freq_factor, keeps
    those below original_max_position / high_freq_factor, and blends linearly in (original / wavelength) between
    (https://github.com/meta-llama/llama-models, models/llama3/model.py).
    """
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if scaling is None:
        return frequencies
    stretched = frequencies / scaling.factor
    if scaling.kind == "linear":
        return stretched
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return torch.lerp(stretched, frequencies, kept.clamp(0, 1))


def rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """Turns each head's pairs (i, i + head_dim / 2) by their position's angles.

    Args:
        heads: [num_tokens, num_heads, head_dim].

    Returns:
        A new tensor of the same shape and dtype; computed in float32.
    """
    num_tokens, num_heads, head_dim = heads.shape
    swapped = heads.view(num_tokens, num_heads, 2, head_dim // 2).flip(2).view_as(heads)
    return (heads * rotation.cos).addcmul_(swapped, rotation.sin).to(heads.dtype)


def mlp_activation(config: ModelConfig) -> Callable[[Tensor], Tensor]:
    """What stands between an MLP's matrices: gate_up's result -> [num_tokens, intermediate_size]."""
    activation = _ACTIVATIONS[config.activation]

    def gated(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=1)
        return activation(gate).mul_(up)

    return gated if config.gated_mlp else activation


def decoder_layer(
    hidden: Tensor,
    weights: LayerWeights,
    config: ModelConfig,
    rotation: Rotation | None,
    kv_cache: Tensor,
    kv_scales: Tensor | None,
    slots: Tensor,
    plan: AttentionPlan,
    backend: Backend,
) -> None:
    """One layer: adds attention's and the MLP's output to the residual stream, in place.

    Args:
        hidden: [num_tokens, hidden_size], the residual stream; changed.
        rotation: the rotary factors of the step's positions; None where the embedding has the positions already.
        kv_cache: this layer's blocks; K and V of the step's tokens are written to `slots`.
        kv_scales: of int8 blocks.
        slots: int64 [num_tokens]; -1 writes nothing.
        plan: what `backend.plan_attention` made of the step.
    """
    num_heads, head_dim = config.num_heads, config.head_dim
    num_qk_heads = num_heads + config.num_kv_heads

    qkv = weights.qkv(weights.attention_norm(hidden))
    qkv = qkv.view(-1, num_qk_heads + config.num_kv_heads, head_dim)
    qk = qkv[:, :num_qk_heads]
    if weights.qk_norm is not None:
        qk = weights.qk_norm(qk)
    if rotation is not None:
        qk = rotate(qk, rotation)
    backend.write_kv(qk[:, num_heads:], qkv[:, num_qk_heads:], kv_cache, slots, kv_scales)
    attended = backend.paged_attention(
        qk[:, :num_heads], kv_cache, plan, scale=head_dim**-0.5, window=weights.window, kv_scales=kv_scales
    )
    hidden.add_(weights.o(attended.flatten(1)))

    hidden.add_(weights.down(weights.activate(weights.gate_up(weights.mlp_norm(hidden)))))
