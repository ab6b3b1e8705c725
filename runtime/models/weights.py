"""Weight objects: stored values and what is done with them. Layers call them and never see their tensors.

A weight in another storage (packed 4 or 8 bits) is another class with the same call. The arithmetic of a weight is
fixed when it is made: the number of rows it is applied to never chooses another one.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pageframe.kernels.cpu import GROUP, STRIP, CpuKernels, PackedWeight, pack_bf16, pack_blocks
from pageframe.runtime.models.blocks import BlockMatrix

#: The number of rows oneDNN is told to pack for. One layout serves every row count, so the arithmetic is one.
_PACK_ROWS = 32
#: oneDNN compiles code for every number of rows it meets and keeps it, more than a megabyte for each: an engine that
#: meets all up to its token budget grows by hundreds. So rows are filled up to a multiple: (up to so many, of what),
#: and one weight of each shape meets the usual numbers of rows at start.
_ROW_MULTIPLES = ((8, 1), (64, 8), (128, 16), (1 << 30, 32))
_USUAL_ROWS = (*range(1, 9), *range(16, 65, 8), *range(80, 129, 16), *range(160, 513, 32))
#: Results beyond this size are rare, and take too long at start.
_MAX_USUAL_RESULT = 1 << 22


class Weight(Protocol):
    """A linear map with its stored values.

    Args:
        num_bytes: of the values that a product reads, without the bias.
    """

    out_features: int
    in_features: int
    num_bytes: int

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_tokens, in_features] -> [num_tokens, out_features], in x's dtype: x @ W.T + b."""
        ...


class DenseWeight:
    """Plain values in the dtype of the arithmetic.

    On a CPU they are held in oneDNN's packed layout alone, where this torch has the (private) operations for it: in
    float32 (AVX2) up to 1.5 times as fast as `F.linear`, and, unlike it, bit for bit the same for any number of rows
    tried.

    Args:
        weight: [out_features, in_features], already in the dtype and on the device of the arithmetic.
        bias: [out_features] or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.num_bytes = weight.nbytes
        self._bias = bias
        self._packed = weight.device.type == "cpu" and can_pack(weight.dtype)
        self._weight = _pack(weight) if self._packed else weight
        if self._packed:
            _first_of_shape.setdefault((self.out_features, self.in_features, weight.dtype), self)

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed:
            return _packed_linear(x, self._weight, self._bias)
        return F.linear(x, self._weight, self._bias)


#: By (out_features, in_features, dtype), until they have met the usual numbers of rows.
_first_of_shape: dict[tuple[int, int, torch.dtype], DenseWeight] = {}


def meet_usual_rows() -> None:
    """Have oneDNN compile what the weights made since the last call will need, for as many threads as are set now."""
    for (out_features, in_features, dtype), weight in _first_of_shape.items():
        for rows in _USUAL_ROWS:
            if rows * out_features <= _MAX_USUAL_RESULT:
                weight(torch.zeros(rows, in_features, dtype=dtype))
    _first_of_shape.clear()


class CompiledWeight:
    """Values of 16, 8 or 4 bits as they are stored, with float32 sums: the compiled CPU engine's.

    A row's result is the same bits for any number of rows and threads.
    """

    def __init__(self, packed: PackedWeight, kernels: CpuKernels) -> None:
        self.out_features, self.in_features = packed.values.n, packed.values.k
        self.num_bytes = packed.values.data.nbytes
        self.packed = packed
        self.kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernels.linear(x.contiguous(), self.packed)


def tied_embedding(table: Tensor | BlockMatrix, output: Weight, compute_dtype: torch.dtype) -> Embedding:
    """The embedding whose table is the output's matrix too: it reads the packed one where there is one, so that the
    values are in memory once."""
    return Embedding(output if isinstance(output, CompiledWeight) else table, compute_dtype)


def make_weight(
    values: Tensor | BlockMatrix,
    bias: Tensor | None,
    compute_dtype: torch.dtype,
    kernels: CpuKernels | None = None,
    *,
    interleaved: bool = False,
) -> Weight:
    """The weight for stored values and an arithmetic.

    Args:
        values: [out_features, in_features] in the storage dtype, on the device of the arithmetic; blocks only with
            kernels.
        bias: [out_features] of any floating dtype, or None.
        compute_dtype: what the weight is applied to; float32 with kernels.
        kernels: the compiled CPU engine, where it is to multiply.
        interleaved: the outputs of the two halves of out_features, gate and up, take turns in strips: only for a
            compiled layer.
    """
    bias = None if bias is None else bias.to(compute_dtype)
    if kernels is None or values.shape[1] % GROUP:
        assert isinstance(values, Tensor), "only the compiled engine multiplies blocks"
        assert not interleaved, "only a compiled layer takes interleaved outputs"
        return DenseWeight(values.to(compute_dtype), bias)
    assert compute_dtype == torch.float32, f"the compiled engine computes in float32, not {compute_dtype}"
    if isinstance(values, BlockMatrix):
        packed = pack_blocks(values.format, values.data, interleaved=interleaved)
    else:
        packed = pack_bf16(values, interleaved=interleaved)
    if bias is not None and interleaved:
        bias = bias.view(2, -1, STRIP).transpose(0, 1).reshape(-1)
    return CompiledWeight(PackedWeight(packed, None if bias is None else bias.contiguous()), kernels)


class Embedding:
    """Rows of a table by id, as hidden states.

    Args:
        table: [num_rows, hidden_size]; a weight has these rows as its outputs.
    """

    def __init__(self, table: Tensor | BlockMatrix | CompiledWeight, compute_dtype: torch.dtype) -> None:
        self._table = table
        self._compute_dtype = compute_dtype

    def __call__(self, ids: Tensor) -> Tensor:
        """int64 [n] -> [n, hidden_size]."""
        if isinstance(self._table, CompiledWeight):
            return self._table.kernels.rows(ids.contiguous(), self._table.packed)
        if isinstance(self._table, BlockMatrix):
            return self._table.rows(ids).to(self._compute_dtype)
        return self._table.index_select(0, ids).to(self._compute_dtype)


class Norm(Protocol):
    """Brings the last axis to one size, times a weight."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape and dtype; computed in float32."""
        ...


def make_norm(weight: Tensor, bias: Tensor | None, eps: float) -> Norm:
    """The norm of these values: without a bias RmsNorm, with one LayerNorm."""
    return RmsNorm(weight, eps) if bias is None else LayerNorm(weight, bias, eps)


class LayerNorm:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last axis, in float32, returned in x's dtype.

    Args:
        weight, bias: [size].
        eps: added to the variance.
    """

    def __init__(self, weight: Tensor, bias: Tensor, eps: float) -> None:
        self._weight = weight.float()
        self._bias = bias.float()
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape."""
        return F.layer_norm(x.float(), self._weight.shape, self._weight, self._bias, self._eps).to(x.dtype)


class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32, returned in x's dtype.

    Args:
        weight: [size], or [num_heads, size] for another weight on each head.
        eps: added to the mean of the squares.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._size = weight.shape[-1]
        self.eps = eps
        self.values = weight.float()
        self._on_cpu = weight.device.type == "cpu"
        self._weight = self.values
        if self._on_cpu:
            # |x| = sqrt(sum(x^2)), so that hypot(|x|, sqrt(size * eps)) = sqrt(size) * sqrt(mean(x^2) + eps).
            self._weight = self._weight * math.sqrt(self._size)
            self._floor = torch.tensor(math.sqrt(self._size * eps))

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., size], or [..., num_heads, size] -> the same shape."""
        wide = x.float()
        if self._on_cpu:
            # F.rms_norm is six operations on a CPU, and at a few rows each costs what it costs to call it.
            length: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).hypot_(self._floor)
            return (wide / length).mul_(self._weight).to(x.dtype)
        return F.rms_norm(wide, (self._size,), None, self.eps).mul_(self._weight).to(x.dtype)


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch has oneDNN's packed linear for `dtype` on this CPU, and computes it rightly."""
    weight = torch.linspace(-1, 1, 64 * 32).reshape(64, 32).to(dtype)
    x = torch.linspace(-1, 1, 3 * 32).reshape(3, 32).to(dtype)
    try:
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        result = _packed_linear(x, _pack(weight), None)
    except (AttributeError, RuntimeError):  # private operations: absent, of another signature, or not for this CPU
        return False
    return torch.allclose(result.float(), F.linear(x, weight).float(), rtol=2e-2, atol=2e-2)


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
    return packed


def _fill_up(x: Tensor) -> Tensor:
    """x [rows, size] with rows of zeros behind it."""
    multiple = next(multiple for limit, multiple in _ROW_MULTIPLES if x.shape[0] <= limit)
    missing = -x.shape[0] % multiple
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def _packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(_fill_up(x), packed, bias, "none", [], "")
    return result[: x.shape[0]]
