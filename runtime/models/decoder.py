"""The one decoder of all families, driven by ModelConfig: tokens to hidden states to logits.

Knows nothing of files, families or schedules. Runs under the caller's inference mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pageframe.kernels.attention import AttentionPlan, Backend
from pageframe.runtime.config import ModelConfig
from pageframe.runtime.models.layers import LayerWeights, RotaryTable, decoder_layer, mlp_activation
from pageframe.runtime.models.weights import Norm, Weight, make_norm, make_weight


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """Everything a decoder holds.

    Args:
        embedding: [vocab_size, hidden_size], in the storage dtype.
        final_norm: over hidden_size.
        output: hidden_size -> vocab_size.
        compute_dtype: the dtype of the hidden states.
        rope_factors: [head_dim / 2] divisors of the rotary frequencies, or None.
        positions: [learned_positions, hidden_size], in the storage dtype, where the config has learned positions.
    """

    embedding: Tensor
    layers: Sequence[LayerWeights]
    final_norm: Norm
    output: Weight
    compute_dtype: torch.dtype
    rope_factors: Tensor | None = None
    positions: Tensor | None = None


class Decoder:
    """A model ready to run. `loader.load_decoder` and `Decoder.random` make one.

    Positions may go up to `config.max_position`; for another limit give it a config with that max_position.
    """

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        self.config = config
        self._weights = weights
        self._rotary = (
            RotaryTable(config, weights.embedding.device, weights.rope_factors) if weights.positions is None else None
        )

    @classmethod
    def random(
        cls,
        config: ModelConfig,
        *,
        storage_dtype: torch.dtype,
        compute_dtype: torch.dtype,
        device: torch.device,
        seed: int,
    ) -> Decoder:
        """A decoder with random weights, the same for the same seed and device type, in place of a model's.

        Matrices are normal with a deviation of 1/sqrt(in_features), norms near 1, biases small: hidden states keep
        their size from layer to layer.
        """
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int, scale: float, mean: float = 0.0) -> Tensor:
            values = torch.empty(shape, device=device).normal_(mean, scale, generator=generator)
            return values.to(storage_dtype)

        def dense(out_features: int, in_features: int, bias: bool = False) -> Weight:
            values = normal(out_features, in_features, scale=in_features**-0.5)
            return make_weight(values, normal(out_features, scale=0.1) if bias else None, compute_dtype)

        def norm(*shape: int, bias: bool = config.norm == "layer") -> Norm:
            weight = normal(*shape, scale=0.1, mean=1.0)
            return make_norm(weight, normal(*shape, scale=0.1) if bias else None, config.norm_eps)

        def layer(window: int | None) -> LayerWeights:
            num_qk_heads = config.num_heads + config.num_kv_heads
            hidden_size, intermediate_size = config.hidden_size, config.intermediate_size
            return LayerWeights(
                attention_norm=norm(hidden_size),
                qkv=dense((num_qk_heads + config.num_kv_heads) * config.head_dim, hidden_size, config.qkv_bias),
                qk_norm=norm(num_qk_heads, config.head_dim, bias=False) if config.qk_norm else None,
                o=dense(hidden_size, config.num_heads * config.head_dim, config.output_bias),
                mlp_norm=norm(hidden_size),
                gate_up=dense((1 + config.gated_mlp) * intermediate_size, hidden_size, config.mlp_bias),
                activate=mlp_activation(config),
                down=dense(hidden_size, intermediate_size, config.mlp_bias),
                window=window,
            )

        embedding = normal(config.vocab_size, config.hidden_size, scale=1.0)
        layers = [layer(window) for window in config.windows or (None,) * config.num_layers]
        tied = config.tie_word_embeddings
        output = make_weight(embedding, None, compute_dtype) if tied else dense(config.vocab_size, config.hidden_size)
        final_norm = norm(config.hidden_size)
        positions = None
        if config.learned_positions is not None:
            positions = normal(config.learned_positions, config.hidden_size, scale=1.0)
        weights = DecoderWeights(embedding, layers, final_norm, output, compute_dtype, positions=positions)
        return cls(config, weights)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[Tensor],
        slots: Tensor,
        plan: AttentionPlan,
        backend: Backend,
    ) -> Tensor:
        """One step through all layers; K and V of its tokens go to their slots.

        Args:
            token_ids: int64 [num_tokens], below vocab_size.
            positions: int64 [num_tokens], below config.max_position.
            kv_caches: one tensor per layer.
            slots: int64 [num_tokens]; -1 writes nothing.
            plan: what `backend.plan_attention` made of the step.
            backend: the attention kernels.

        Returns:
            [num_tokens, hidden_size], before the final norm.
        """
        hidden = self._weights.embedding.index_select(0, token_ids).to(self._weights.compute_dtype)
        if self._weights.positions is not None:
            hidden.add_(self._weights.positions.index_select(0, positions))
        rotation = None if self._rotary is None else self._rotary.at(positions)
        for layer, kv_cache in zip(self._weights.layers, kv_caches, strict=True):
            decoder_layer(hidden, layer, self.config, rotation, kv_cache, slots, plan, backend)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [num_rows, hidden_size], before the final norm -> float32 [num_rows, vocab_size]."""
        weights = self._weights
        return weights.output(weights.final_norm(hidden)).float()
