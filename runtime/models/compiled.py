"""A decoder's layers in the compiled CPU engine: each is one call.

Knows which layers the engine can compute and hands it their stored values; the arithmetic is in kernels/cpu.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pageframe.kernels.attention import AttentionPlan, Backend
from pageframe.kernels.cpu import Arena, CompiledLayer, CompiledStep, CpuKernels, LayerShape, RowNorm
from pageframe.runtime.config import ModelConfig
from pageframe.runtime.models.layers import LayerWeights, RotaryTable, RunLayer
from pageframe.runtime.models.weights import CompiledWeight, Norm, RmsNorm, Weight


def can_compile(config: ModelConfig) -> bool:
    """Whether the engine has this kind of layer: RMSNorm, rotary positions, an MLP gated by SiLU, in sizes of 32."""
    sizes = (config.hidden_size, config.intermediate_size, config.head_dim)
    return (
        config.norm == "rms"
        and config.learned_positions is None
        and config.gated_mlp
        and config.activation == "silu"
        and all(size % 32 == 0 for size in sizes)
        and config.head_dim <= 256
    )


class CompiledLayers:
    """See `Layers`.

    Args:
        config: one that `can_compile`.
        layers: all of whose linears are CompiledWeights, gate and up interleaved.
    """

    def __init__(
        self, kernels: CpuKernels, config: ModelConfig, layers: Sequence[LayerWeights], rotary: RotaryTable
    ) -> None:
        self._kernels = kernels
        self._pairs = rotary.pairs()
        shape = LayerShape(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            norm_eps=config.norm_eps,
            attention_scale=config.head_dim**-0.5,
        )
        self._layers = [_compile(kernels, shape, layer) for layer in layers]

    def begin(self, positions: Tensor, slots: Tensor, plan: AttentionPlan, backend: Backend) -> RunLayer:
        """See `Layers.begin`."""
        return CompiledStep(self._kernels, self._layers, plan, positions, slots, *self._pairs).run


class CompiledProjection:
    """The norm behind the last layer and the output matrix, in one call where the norm is the engine's.

    Args:
        output: whose values are where they will stay.
    """

    def __init__(self, norm: Norm, output: CompiledWeight) -> None:
        self._kernels = output.kernels
        self._weight = output.packed
        self._before = None if isinstance(norm, RmsNorm) else norm
        self._norm = RowNorm(norm.values.contiguous(), norm.eps) if isinstance(norm, RmsNorm) else None

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Decoder.logits`."""
        return self._kernels.linear(self._rows(hidden), self._weight, self._norm)

    def arg_max(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See `Decoder.arg_max`."""
        return self._kernels.arg_max(self._rows(hidden), self._weight, self._norm)

    def _rows(self, hidden: Tensor) -> Tensor:
        return (hidden if self._before is None else self._before(hidden)).contiguous()


def lay_out_in_order(weights: Sequence[Weight]) -> None:
    """Move the values of the compiled ones among these weights side by side, in this order."""
    compiled = [weight for weight in weights if isinstance(weight, CompiledWeight)]
    arena = Arena([weight.packed.values.data.nbytes for weight in compiled])
    for weight in compiled:
        weight.packed = arena.move(weight.packed)


def _compile(kernels: CpuKernels, shape: LayerShape, weights: LayerWeights) -> CompiledLayer:
    linears = (weights.qkv, weights.o, weights.gate_up, weights.down)
    packed = [linear.packed for linear in linears if isinstance(linear, CompiledWeight)]
    assert len(packed) == len(linears), "a compiled layer needs compiled weights"
    assert isinstance(weights.attention_norm, RmsNorm)
    assert isinstance(weights.mlp_norm, RmsNorm)
    return kernels.compile_layer(
        shape,
        qkv=packed[0],
        o=packed[1],
        gate_up=packed[2],
        down=packed[3],
        attention_norm=weights.attention_norm.values,
        mlp_norm=weights.mlp_norm.values,
        qk_norm=weights.qk_norm.values if isinstance(weights.qk_norm, RmsNorm) else None,
        window=weights.window,
    )
