"""The structures that the C++ of this folder reads, field by field as in types.h, norm.h and layer.h."""

from __future__ import annotations

import ctypes

from torch import Tensor


class LinearWeight(ctypes.Structure):
    """A linear map's stored values."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("values", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )


class RowNormStruct(ctypes.Structure):
    """RMSNorm of rows."""

    _fields_ = (("weight", ctypes.c_void_p), ("eps", ctypes.c_float))


class Layer(ctypes.Structure):
    """One decoder layer."""

    _fields_ = (
        ("qkv", LinearWeight),
        ("o", LinearWeight),
        ("gate_up", LinearWeight),
        ("down", LinearWeight),
        ("attention_norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        ("qk_norm", ctypes.c_void_p),
        ("hidden_size", ctypes.c_int64),
        ("intermediate_size", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("norm_eps", ctypes.c_float),
        ("attention_scale", ctypes.c_float),
    )


class LayerStep(ctypes.Structure):
    """What all layers of one step share."""

    _fields_ = (
        ("step", ctypes.c_void_p),
        ("plan", ctypes.c_void_p),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("rotary_stride", ctypes.c_int64),
        ("scratch", ctypes.c_void_p),
        ("threads", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor's values begin; None for none."""
    return None if tensor is None else tensor.data_ptr()
