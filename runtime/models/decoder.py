"""The one decoder of all families, driven by ModelConfig: tokens to hidden states to logits.

Knows nothing of files, families or schedules. Runs under the caller's inference mode.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pageframe.kernels.attention import AttentionPlan, Backend
from pageframe.kernels.cpu import CpuKernels
from pageframe.runtime.config import ModelConfig
from pageframe.runtime.models.compiled import CompiledLayers, can_compile, lay_out_in_order
from pageframe.runtime.models.layers import ComposedLayers, Layers, LayerWeights, RotaryTable, mlp_activation
from pageframe.runtime.models.weights import CompiledWeight, Embedding, Norm, Weight, make_norm, make_weight


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """Everything a decoder holds.

    Args:
        embedding: token ids -> hidden_size.
        final_norm: over hidden_size.
        output: hidden_size -> vocab_size.
        compute_dtype: the dtype of the hidden states.
        device: of all of them.
        rope_factors: [head_dim / 2] divisors of the rotary frequencies, or None.
        positions: positions -> hidden_size, where the config has learned positions.
    """

    embedding: Embedding
    layers: Sequence[LayerWeights]
    final_norm: Norm
    output: Weight
    compute_dtype: torch.dtype
    device: torch.device
    rope_factors: Tensor | None = None
    positions: Embedding | None = None


class Decoder:
    """A model ready to run. `loader.load_decoder` and `Decoder.random` make one.

    Positions may go up to `config.max_position`; for another limit give it a config with that max_position.
    """

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        self.config = config
        self._weights = weights
        has_rotary = weights.positions is None
        self._rotary = RotaryTable(config, weights.device, weights.rope_factors) if has_rotary else None
        self._layers = _make_layers(config, weights, self._rotary)
        self._triton_layers: Layers | None = None
        self._num_layers = len(weights.layers)

    @classmethod
    def random(
        cls,
        config: ModelConfig,
        *,
        storage_dtype: torch.dtype,
        compute_dtype: torch.dtype,
        device: torch.device,
        seed: int,
        kernels: CpuKernels | None = None,
    ) -> Decoder:
        """A decoder with random weights, the same for the same seed and device type, in place of a model's.

        Args:
            kernels: the compiled CPU engine, if it is to compute; then storage_dtype is bfloat16 and compute_dtype
                float32.

        Matrices are normal with a deviation of 1/sqrt(in_features), norms near 1, biases small: hidden states keep
        their size from layer to layer.
        """
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int, scale: float, mean: float = 0.0) -> Tensor:
            values = torch.empty(shape, device=device).normal_(mean, scale, generator=generator)
            return values.to(storage_dtype)

        def dense(out_features: int, in_features: int, bias: bool = False, interleaved: bool = False) -> Weight:
            values = normal(out_features, in_features, scale=in_features**-0.5)
            offset = normal(out_features, scale=0.1) if bias else None
            return make_weight(values, offset, compute_dtype, kernels, interleaved=interleaved)

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
                gate_up=dense(
                    (1 + config.gated_mlp) * intermediate_size,
                    hidden_size,
                    config.mlp_bias,
                    interleaved=kernels is not None and can_compile(config),
                ),
                activate=mlp_activation(config),
                down=dense(hidden_size, intermediate_size, config.mlp_bias),
                window=window,
            )

        embedding = normal(config.vocab_size, config.hidden_size, scale=1.0)
        layers = [layer(window) for window in config.windows or (None,) * config.num_layers]
        tied = config.tie_word_embeddings
        if tied:
            output = make_weight(embedding, None, compute_dtype, kernels)
        else:
            output = dense(config.vocab_size, config.hidden_size)
        final_norm = norm(config.hidden_size)
        positions = None
        if config.learned_positions is not None:
            positions = normal(config.learned_positions, config.hidden_size, scale=1.0)
        weights = DecoderWeights(
            Embedding(embedding, compute_dtype),
            layers,
            final_norm,
            output,
            compute_dtype,
            device,
            positions=None if positions is None else Embedding(positions, compute_dtype),
        )
        return cls(config, weights)

    @property
    def layer_bytes(self) -> int:
        """Bytes of all layers' matrices, as a step reads them."""
        return sum(linear.num_bytes for layer in self._weights.layers for linear in layer.linears)

    @property
    def output_bytes(self) -> int:
        """Bytes of the output matrix, as a step reads it."""
        return self._weights.output.num_bytes

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_caches: Iterable[Tensor],
        slots: Tensor,
        plan: AttentionPlan,
        backend: Backend,
        kv_scales: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """One step through all layers; K and V of its tokens go to their slots.

        Args:
            token_ids: int64 [num_tokens], below vocab_size.
            positions: int64 [num_tokens], below config.max_position.
            kv_caches: one tensor per layer, each asked for when its layer's turn comes.
            slots: int64 [num_tokens]; -1 writes nothing.
            plan: what `backend.plan_attention` made of the step.
            backend: the attention kernels.
            kv_scales: of int8 caches, one tensor per layer.

        Returns:
            [num_tokens, hidden_size], before the final norm.
        """
        hidden = self._weights.embedding(token_ids)
        if self._weights.positions is not None:
            hidden.add_(self._weights.positions(positions))
        run_layer = self._layers_for(backend).begin(positions, slots, plan, backend)
        for index, kv_cache in zip(range(self._num_layers), kv_caches, strict=True):
            run_layer(index, hidden, kv_cache, None if kv_scales is None else kv_scales[index])
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [num_rows, hidden_size], before the final norm -> float32 [num_rows, vocab_size]."""
        weights = self._weights
        return weights.output(weights.final_norm(hidden)).float()

    def arg_max(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """Per row the lowest id of the largest of its `logits`, int64, and that logit, float32: in one pass that keeps
        no logits. A NaN counts as -inf. None where there is no such pass."""
        weights = self._weights
        if not isinstance(weights.output, CompiledWeight):
            return None
        return weights.output.arg_max(weights.final_norm(hidden))

    def _layers_for(self, backend: Backend) -> Layers:
        """The layers that go with a backend; Triton's are made when that backend first computes."""
        if backend.name != "triton":
            return self._layers
        if self._triton_layers is None:
            self._triton_layers = _make_triton_layers(self.config, self._weights, self._rotary)
        return self._triton_layers


def _make_triton_layers(config: ModelConfig, weights: DecoderWeights, rotary: RotaryTable | None) -> Layers:
    # Imported only when wanted: it pulls in the compiler, which is slow to load and absent on some platforms.
    from pageframe.runtime.models.triton_layers import TritonLayers, can_fuse

    if rotary is None or not can_fuse(config):
        return ComposedLayers(config, weights.layers, rotary)
    return TritonLayers(config, weights.layers, rotary)


def _make_layers(config: ModelConfig, weights: DecoderWeights, rotary: RotaryTable | None) -> Layers:
    if not isinstance(weights.output, CompiledWeight):
        return ComposedLayers(config, weights.layers, rotary)
    in_order = [linear for layer in weights.layers for linear in layer.linears]
    lay_out_in_order([*in_order, weights.output])
    if rotary is None or not can_compile(config):
        return ComposedLayers(config, weights.layers, rotary)
    return CompiledLayers(weights.output.kernels, config, weights.layers, rotary)
