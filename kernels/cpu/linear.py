"""Linear maps over packed weights, from tensors to tensors."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pageframe.kernels.cpu.packing import PackedValues
from pageframe.kernels.cpu.structs import LinearWeight, RowNormStruct, address

__all__ = ["LinearMaps", "PackedWeight", "RowNorm"]


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """x @ W.T + bias, with the memory that `struct` points to.

    Args:
        bias: contiguous float32 [n] on the CPU, or None.

    Raises:
        ValueError: the bias has another dtype, device or shape.
    """

    values: PackedValues
    bias: Tensor | None = None
    struct: LinearWeight = field(init=False)

    def __post_init__(self) -> None:
        n, k, bias = self.values.n, self.values.k, self.bias
        if bias is not None:
            _check("bias", bias, (n,))
        struct = LinearWeight(self.values.kind, 0, n, k, address(self.values.data), None, address(bias))
        object.__setattr__(self, "struct", struct)


@dataclass(frozen=True, slots=True, eq=False)
class RowNorm:
    """RMSNorm of rows: x / sqrt(mean(x^2) + eps) * weight, with the memory that `struct` points to.

    Args:
        weight: contiguous float32 [k] on the CPU.

    Raises:
        ValueError: the weight has another dtype, device or shape.
    """

    weight: Tensor
    eps: float
    struct: RowNormStruct = field(init=False)

    def __post_init__(self) -> None:
        _check("weight", self.weight, (self.weight.numel(),))
        object.__setattr__(self, "struct", RowNormStruct(address(self.weight), self.eps))


class LinearMaps:
    """The compiled library's linears. A row's result is the same bits whatever the number of rows and threads."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._linear = library.pageframe_linear
        self._linear.restype = None
        weight, norm = ctypes.POINTER(LinearWeight), ctypes.POINTER(RowNormStruct)
        self._linear.argtypes = [weight, norm, pointer, pointer, number, ctypes.c_int]
        self._gated = library.pageframe_gated_linear
        self._gated.restype = None
        self._gated.argtypes = [weight, pointer, pointer, number, ctypes.c_int]
        self._arg_max = library.pageframe_arg_max
        self._arg_max.restype = None
        self._arg_max.argtypes = [weight, norm, pointer, pointer, pointer, number, ctypes.c_int]
        self._rows = library.pageframe_rows
        self._rows.restype = ctypes.c_bool
        self._rows.argtypes = [weight, pointer, pointer, number, ctypes.c_int]

    def linear(self, x: Tensor, weight: PackedWeight, norm: RowNorm | None = None) -> Tensor:
        """x @ W.T + bias, with x rounded to bfloat16 first where the processor multiplies that, and float32 sums.

        Args:
            x: contiguous float32 [rows, k] on the CPU.
            norm: what is done to x before.

        Returns:
            float32 [rows, n].

        Raises:
            ValueError: x has another dtype, device or shape, or the norm another size.
        """
        _check("x", x, (len(x), weight.values.k))
        struct = _struct(norm, weight)
        out = x.new_empty(len(x), weight.values.n)
        self._linear(weight.struct, struct, x.data_ptr(), out.data_ptr(), len(x), torch.get_num_threads())
        return out

    def gated(self, x: Tensor, weight: PackedWeight) -> Tensor:
        """silu(gate) * up, rounded as activations are; gate is what the first half of the outputs gives, up the second.

        Args:
            weight: packed `interleaved`.

        Returns:
            float32 [rows, n / 2].

        Raises:
            ValueError: as `linear`.
        """
        _check("x", x, (len(x), weight.values.k))
        out = x.new_empty(len(x), weight.values.n // 2)
        self._gated(weight.struct, x.data_ptr(), out.data_ptr(), len(x), torch.get_num_threads())
        return out

    def arg_max(self, x: Tensor, weight: PackedWeight, norm: RowNorm | None = None) -> tuple[Tensor, Tensor]:
        """The largest of each row that `linear` would give, which is never stored.

        Returns:
            int64 [rows]: the lowest place of the row's largest number; a NaN counts as -inf.
            float32 [rows]: that number.

        Raises:
            ValueError: as `linear`.
        """
        _check("x", x, (len(x), weight.values.k))
        struct = _struct(norm, weight)
        columns, values = x.new_empty(len(x), dtype=torch.int64), x.new_empty(len(x))
        threads = torch.get_num_threads()
        self._arg_max(weight.struct, struct, x.data_ptr(), columns.data_ptr(), values.data_ptr(), len(x), threads)
        return columns, values

    def rows(self, ids: Tensor, weight: PackedWeight) -> Tensor:
        """Some rows of W, exactly as they are stored.

        Args:
            ids: contiguous int64 [count] on the CPU.

        Returns:
            float32 [count, k].

        Raises:
            IndexError: an id is not from 0 to n - 1.
        """
        assert ids.dtype == torch.int64
        assert ids.is_cpu
        assert ids.is_contiguous()
        out = ids.new_empty((len(ids), weight.values.k), dtype=torch.float32)
        if not self._rows(weight.struct, ids.data_ptr(), out.data_ptr(), len(ids), torch.get_num_threads()):
            raise IndexError(f"of the rows asked for some are not from 0 to {weight.values.n - 1}")
        return out


def _struct(norm: RowNorm | None, weight: PackedWeight) -> RowNormStruct | None:
    if norm is None:
        return None
    if len(norm.weight) != weight.values.k:
        raise ValueError(f"the norm is of {len(norm.weight)} numbers, the weight has {weight.values.k} inputs")
    return norm.struct


def _check(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.dtype != torch.float32 or tensor.shape != shape or not tensor.is_cpu or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous float32 {list(shape)} on the CPU; it is {tensor.dtype} {list(tensor.shape)} "
            f"with strides {list(tensor.stride())} on {tensor.device}"
        )
