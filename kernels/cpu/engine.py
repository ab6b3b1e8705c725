"""The functions of the compiled engine, from tensors to tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pageframe.kernels.cpu.backend import CpuStep, LayerKind, layer_kind
from pageframe.kernels.cpu.build import chosen_isa, load_library
from pageframe.kernels.cpu.linear import LinearMaps, PackedWeight
from pageframe.kernels.cpu.structs import Layer, LayerStep, address
from pageframe.kernels.plan import AttentionPlan


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes of a decoder layer; hidden_size, intermediate_size and head_dim are multiples of 32."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    attention_scale: float


@dataclass(frozen=True, slots=True, eq=False)
class CompiledLayer:
    """One decoder layer as the library reads it. Made by `CpuKernels.compile_layer`.

    Args:
        parts: the memory that `struct` points to.
        at: where `struct` is.
    """

    struct: Layer
    kind: LayerKind
    parts: tuple[PackedWeight | Tensor | None, ...]
    at: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "at", ctypes.addressof(self.struct))


class CpuKernels(LinearMaps):
    """The compiled engine, on as many threads as torch uses.

    Raises:
        BuildError: this machine cannot have it.
    """

    def __init__(self) -> None:
        self.library = load_library()
        super().__init__(self.library)
        self.instruction_set = chosen_isa()
        self.library.pageframe_layer_scratch_bytes.restype = ctypes.c_int64
        layer = self.library.pageframe_layer
        layer.restype = None
        layer.argtypes = [ctypes.c_void_p] * 5
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def compile_layer(
        self,
        shape: LayerShape,
        *,
        qkv: PackedWeight,
        o: PackedWeight,
        gate_up: PackedWeight,
        down: PackedWeight,
        attention_norm: Tensor,
        mlp_norm: Tensor,
        qk_norm: Tensor | None,
        window: int | None,
    ) -> CompiledLayer:
        """A decoder layer: RMSNorm, attention with rotary positions, RMSNorm, an MLP gated by SiLU.

        Args:
            qkv: to q heads, then k, then v.
            gate_up: interleaved.
            attention_norm, mlp_norm: float32 [hidden_size].
            qk_norm: float32 [num_heads + num_kv_heads, head_dim], or None.
            window: tokens that a query looks back, itself included; None for all.
        """
        norms = [None if norm is None else norm.contiguous() for norm in (attention_norm, mlp_norm, qk_norm)]
        struct = Layer(
            qkv=qkv.struct,
            o=o.struct,
            gate_up=gate_up.struct,
            down=down.struct,
            attention_norm=address(norms[0]),
            mlp_norm=address(norms[1]),
            qk_norm=address(norms[2]),
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            window=window or 0,
            norm_eps=shape.norm_eps,
            attention_scale=shape.attention_scale,
        )
        kind = layer_kind(shape.num_heads, shape.num_kv_heads, shape.head_dim, window)
        return CompiledLayer(struct, kind, (qkv, o, gate_up, down, *norms))

    def scratch(self, size: int) -> Tensor:
        """Memory of at least `size` bytes for one call, kept for the next: fresh memory costs more in page faults."""
        if len(self._scratch) < size:
            self._scratch = torch.empty(size, dtype=torch.uint8)
        return self._scratch


class CompiledStep:
    """One step, ready for its layers, one after the other.

    Args:
        plan: a CpuBackend's.
        positions, slots: int64 [num_tokens].
        cos, sin: float32 [max_position, head_dim / 2], of the same strides, the last one 1.
    """

    def __init__(
        self,
        kernels: CpuKernels,
        layers: Sequence[CompiledLayer],
        plan: AttentionPlan,
        positions: Tensor,
        slots: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> None:
        self._layers = layers
        self._tensors = (positions, slots, cos, sin)
        assert positions.dtype == slots.dtype == torch.int64
        assert cos.stride() == sin.stride()
        assert cos.stride(1) == 1
        self._kernels = kernels
        self._run = kernels.library.pageframe_layer
        assert isinstance(plan.parts, CpuStep), "the plan was made by another backend"
        self._parts = plan.parts
        self._parts.step.positions, self._parts.step.slots = positions.data_ptr(), slots.data_ptr()
        self._structs: dict[LayerKind, LayerStep] = {}
        # Of the layer before: looking a kind up takes longer than all else that Python does for a layer.
        self._kind: LayerKind | None = None
        self._shared_at = 0
        self._scratch: list[Tensor] = []

    def run(self, index: int, hidden: Tensor, kv_cache: Tensor, kv_scales: Tensor | None = None) -> None:
        """Add layer `index`'s output to `hidden`, float32 [num_tokens, hidden_size], in place, and write K and V of the
        step's tokens to their slots of `kv_cache`, bfloat16, or int8 where there are scales."""
        # Between two layers caches hold weights: every operation of Python here waits for its code from memory.
        layer = self._layers[index]
        if layer.kind is not self._kind:  # in most models at the first layer alone, whose cache is of all caches' type
            assert kv_cache.dtype == (torch.bfloat16 if kv_scales is None else torch.int8), f"K/V of {kv_cache.dtype}"
            self._kind, self._shared_at = layer.kind, ctypes.addressof(self._shared_by(layer))
        scales_at = None if kv_scales is None else kv_scales.data_ptr()
        self._run(layer.at, self._shared_at, kv_cache.data_ptr(), scales_at, hidden.data_ptr())

    def _shared_by(self, layer: CompiledLayer) -> LayerStep:
        """What all layers of this one's kind read of the step."""
        shared = self._structs.get(layer.kind)
        if shared is None:
            shared = self._structs[layer.kind] = self._prepare(layer)
        return shared

    def _prepare(self, layer: CompiledLayer) -> LayerStep:
        _, _, cos, sin = self._tensors
        shared = LayerStep(
            step=ctypes.addressof(self._parts.step),
            plan=self._parts.plan_for(layer.kind),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            rotary_stride=cos.stride(0),
            threads=torch.get_num_threads(),
        )
        size = self._kernels.library.pageframe_layer_scratch_bytes(ctypes.byref(layer.struct), ctypes.byref(shared))
        self._scratch.append(self._kernels.scratch(size))
        shared.scratch = self._scratch[-1].data_ptr()
        return shared
