"""The one decoder of all families, driven by ModelConfig: tokens to hidden states to logits.

Knows nothing of files, families or schedules. Runs under the caller's inference mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pageframe.kernels.attention import AttentionPlan, Backend
from pageframe.kernels.cpu import CpuKernels
from pageframe.runtime.config import ModelConfig
from pageframe.runtime.models.compiled import CompiledLayers, CompiledProjection, can_compile, lay_out_in_order
from pageframe.runtime.models.layers import ComposedLayers, Layers, LayerWeights, RotaryTable, mlp_activation
from pageframe.runtime.models.weights import (
    CompiledWeight,
    Embedding,
    Norm,
    Weight,
    make_norm,
    make_weight,
    tied_embedding,
)


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
        self._kernels = _make_kernels(config, weights, self._rotary)
        self._triton_kernels: _Kernels | None = None
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
        random = _RandomWeights(
            config, storage_dtype, compute_dtype, torch.Generator(device).manual_seed(seed), kernels
        )
        return cls(config, random.decoder())

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
        run_layer = self._kernels_for(backend).layers.begin(positions, slots, plan, backend)
        for index, kv_cache in zip(range(self._num_layers), kv_caches, strict=True):
            run_layer(index, hidden, kv_cache, None if kv_scales is None else kv_scales[index])
        return hidden

    def logits(self, hidden: Tensor, backend: Backend | None = None) -> Tensor:
        """hidden [num_rows, hidden_size], before the final norm -> float32 [num_rows, vocab_size].

        Args:
            backend: whose kernels compute the norm, where it has one; None: torch's operations.
        """
        kernels = self._kernels if backend is None else self._kernels_for(backend)
        if kernels.projection is not None:
            return kernels.projection.logits(hidden)
        return self._weights.output(kernels.final_norm(hidden)).float()

    def arg_max(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """Per row the lowest id of the largest of its `logits`, int64, and that logit, float32: in one pass that keeps
        no logits. A NaN counts as -inf. None where there is no such pass."""
        projection = self._kernels.projection
        return None if projection is None else projection.arg_max(hidden)

    def _kernels_for(self, backend: Backend) -> _Kernels:
        """What goes with a backend; Triton's are made when that backend first computes."""
        if backend.name != "triton":
            return self._kernels
        if self._triton_kernels is None:
            self._triton_kernels = _make_triton_kernels(self.config, self._weights, self._rotary)
        return self._triton_kernels


@dataclass(frozen=True, slots=True)
class _RandomWeights:
    """Makes random weights, in the order in which it is asked. See `Decoder.random`."""

    config: ModelConfig
    storage_dtype: torch.dtype
    compute_dtype: torch.dtype
    generator: torch.Generator
    kernels: CpuKernels | None

    def decoder(self) -> DecoderWeights:
        config, compute_dtype, device = self.config, self.compute_dtype, self.generator.device
        table = self._normal(config.vocab_size, config.hidden_size, scale=1.0)
        layers = [self._layer(window) for window in config.windows or (None,) * config.num_layers]
        if config.tie_word_embeddings:
            output = make_weight(table, None, compute_dtype, self.kernels)
            embed = tied_embedding(table, output, compute_dtype)
        else:
            output = self._dense(config.vocab_size, config.hidden_size)
            embed = Embedding(table, compute_dtype)
        final_norm = self._norm(config.hidden_size)
        positions = None
        if config.learned_positions is not None:
            learned = self._normal(config.learned_positions, config.hidden_size, scale=1.0)
            positions = Embedding(learned, compute_dtype)
        return DecoderWeights(embed, layers, final_norm, output, compute_dtype, device, positions=positions)

    def _layer(self, window: int | None) -> LayerWeights:
        config = self.config
        num_qk_heads = config.num_heads + config.num_kv_heads
        hidden_size, intermediate_size = config.hidden_size, config.intermediate_size
        return LayerWeights(
            attention_norm=self._norm(hidden_size),
            qkv=self._dense((num_qk_heads + config.num_kv_heads) * config.head_dim, hidden_size, config.qkv_bias),
            qk_norm=self._norm(num_qk_heads, config.head_dim, bias=False) if config.qk_norm else None,
            o=self._dense(hidden_size, config.num_heads * config.head_dim, config.output_bias),
            mlp_norm=self._norm(hidden_size),
            gate_up=self._dense(
                (1 + config.gated_mlp) * intermediate_size,
                hidden_size,
                config.mlp_bias,
                interleaved=self.kernels is not None and can_compile(config),
            ),
            activate=mlp_activation(config),
            down=self._dense(hidden_size, intermediate_size, config.mlp_bias),
            window=window,
        )

    def _dense(self, out_features: int, in_features: int, bias: bool = False, interleaved: bool = False) -> Weight:
        values = self._normal(out_features, in_features, scale=in_features**-0.5)
        offset = self._normal(out_features, scale=0.1) if bias else None
        return make_weight(values, offset, self.compute_dtype, self.kernels, interleaved=interleaved)

    def _norm(self, *shape: int, bias: bool | None = None) -> Norm:
        """`bias`: by default where the model's norms have one."""
        bias = self.config.norm == "layer" if bias is None else bias
        weight = self._normal(*shape, scale=0.1, mean=1.0)
        return make_norm(weight, self._normal(*shape, scale=0.1) if bias else None, self.config.norm_eps)

    def _normal(self, *shape: int, scale: float, mean: float = 0.0) -> Tensor:
        values = torch.empty(shape, device=self.generator.device).normal_(mean, scale, generator=self.generator)
        return values.to(self.storage_dtype)


@dataclass(frozen=True, slots=True)
class _Kernels:
    """What computes with a backend: the layers, and the norm behind the last of them; that norm and the output matrix
    in one where the compiled engine has them."""

    layers: Layers
    final_norm: Callable[[Tensor], Tensor]
    projection: CompiledProjection | None = None


def _make_triton_kernels(config: ModelConfig, weights: DecoderWeights, rotary: RotaryTable | None) -> _Kernels:
    # Imported only when wanted: it pulls in the compiler, which is slow to load and absent on some platforms.
    from pageframe.runtime.models.triton_layers import TritonLayers, can_fuse

    if rotary is None or not can_fuse(config):
        return _Kernels(ComposedLayers(config, weights.layers, rotary), weights.final_norm)
    layers = TritonLayers(config, weights.layers, rotary, weights.final_norm)
    return _Kernels(layers, layers.final_norm)


def _make_kernels(config: ModelConfig, weights: DecoderWeights, rotary: RotaryTable | None) -> _Kernels:
    if not isinstance(weights.output, CompiledWeight):
        return _Kernels(ComposedLayers(config, weights.layers, rotary), weights.final_norm)
    in_order = [linear for layer in weights.layers for linear in layer.linears]
    lay_out_in_order([*in_order, weights.output])
    projection = CompiledProjection(weights.final_norm, weights.output)
    if rotary is None or not can_compile(config):
        return _Kernels(ComposedLayers(config, weights.layers, rotary), weights.final_norm, projection)
    layers = CompiledLayers(weights.output.kernels, config, weights.layers, rotary)
    return _Kernels(layers, weights.final_norm, projection)
