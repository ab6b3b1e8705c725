"""A decoder's layers on a GPU: matrix products by torch, and all that stands between them in Triton's kernels.

Knows the order of operations, not the arithmetic, which is in kernels/triton. Importing it loads the compiler.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pageframe.kernels.attention import AttentionPlan, Backend
from pageframe.kernels.triton.activation import gated
from pageframe.kernels.triton.norm import add_rms_norm
from pageframe.kernels.triton.rope import rotate_and_write
from pageframe.runtime.config import ModelConfig
from pageframe.runtime.models.layers import LayerWeights, RotaryTable, RunLayer
from pageframe.runtime.models.weights import Norm, RmsNorm


def can_fuse(config: ModelConfig) -> bool:
    """Whether the kernels have this kind of layer: RMSNorm, rotary positions, a gated MLP."""
    return config.norm == "rms" and config.learned_positions is None and config.gated_mlp


class TritonLayers:
    """See `Layers`. Between two layers of a step the residual stream lacks the earlier one's MLP, which the later one's
    first norm adds in passing; after the last layer it is whole.

    Args:
        config: one that `can_fuse`.
        last_norm: behind the last layer.
    """

    def __init__(
        self, config: ModelConfig, layers: Sequence[LayerWeights], rotary: RotaryTable, last_norm: Norm
    ) -> None:
        self._config = config
        self._layers = layers
        self._cos, self._sin = rotary.pairs()
        self._last_norm = _values(last_norm)

    def begin(self, positions: Tensor, slots: Tensor, plan: AttentionPlan, backend: Backend) -> RunLayer:
        """See `Layers.begin`."""
        config, eps = self._config, self._config.norm_eps
        last = len(self._layers) - 1
        delta: Tensor | None = None

        def run(index: int, hidden: Tensor, kv_cache: Tensor, kv_scales: Tensor | None) -> None:
            nonlocal delta
            layer = self._layers[index]
            normed = add_rms_norm(hidden, delta, _values(layer.attention_norm), eps)
            q = rotate_and_write(
                layer.qkv(normed),
                positions,
                self._cos,
                self._sin,
                slots,
                kv_cache,
                kv_scales,
                num_heads=config.num_heads,
                qk_norm=None if layer.qk_norm is None else _values(layer.qk_norm),
                eps=eps,
            )
            attended = backend.paged_attention(
                q, kv_cache, plan, scale=config.head_dim**-0.5, window=layer.window, kv_scales=kv_scales
            )
            normed = add_rms_norm(hidden, layer.o(attended.flatten(1)), _values(layer.mlp_norm), eps)
            delta = layer.down(gated(layer.gate_up(normed), config.activation))
            if index == last:
                hidden.add_(delta)

        return run

    def final_norm(self, hidden: Tensor) -> Tensor:
        """The norm behind the last layer, of hidden states [num_rows, hidden_size], which stay as they are."""
        return add_rms_norm(hidden.contiguous(), None, self._last_norm, self._config.norm_eps)


def _values(norm: Norm) -> Tensor:
    assert isinstance(norm, RmsNorm), f"the kernels have no {type(norm).__name__}"
    return norm.values
