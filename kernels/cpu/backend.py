"""The compiled attention as a backend: reads K and V in their blocks, on all of torch's threads.

A row's result is the same bits whatever else is in the step, wherever its prompt was cut into chunks, and for any
number of threads. Q and the weights of V are rounded to bfloat16 where the processor multiplies in it.
"""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from pageframe.kernels.plan import AttentionPlan, StepBatch, UnsupportedError, check_cache, make_plan

HEAD_DIM_STEP = 32
MAX_HEAD_DIM = 256
CACHE_DTYPES = (torch.bfloat16, torch.int8)


class _Step(ctypes.Structure):
    _fields_ = (
        ("num_tokens", ctypes.c_int64),
        ("num_requests", ctypes.c_int64),
        ("positions", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("query_start", ctypes.c_void_p),
        ("context_lens", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
    )


class _KvCache(ctypes.Structure):
    _fields_ = (
        ("values", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
    )


class _AttentionCall(ctypes.Structure):
    _fields_ = (
        ("step", ctypes.POINTER(_Step)),
        ("plan", ctypes.c_void_p),
        ("cache", _KvCache),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("q", ctypes.c_void_p),
        ("q_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("partials", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What layers that share a compiled plan have in common."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None


#: The one object for a kind.
layer_kind = cache(LayerKind)


@dataclass(slots=True, eq=False)
class CpuStep:
    """One step as the library reads it, and its compiled plans, each made when the first layer of a kind asks.

    Args:
        tables, arrays: the memory that `step` points into.
    """

    step: _Step
    tables: torch.Tensor
    library: ctypes.CDLL
    arrays: tuple[torch.Tensor, ...] = ()
    plans: dict[LayerKind, _CompiledPlan] = field(default_factory=dict)

    def plan_for(self, kind: LayerKind) -> ctypes.c_void_p:
        """The compiled plan of layers of this kind."""
        plan = self.plans.get(kind)
        if plan is None:
            plan = self.plans[kind] = _CompiledPlan(self.library, self.step, kind)
        return plan.address


class _CompiledPlan:
    """A plan of the library's, freed with this object."""

    def __init__(self, library: ctypes.CDLL, step: _Step, kind: LayerKind) -> None:
        self.address = ctypes.c_void_p(library.pageframe_new_plan())
        weakref.finalize(self, library.pageframe_delete_plan, self.address)
        library.pageframe_plan_attention(
            self.address,
            ctypes.byref(step),
            ctypes.c_int64(kind.num_heads),
            ctypes.c_int64(kind.num_kv_heads),
            ctypes.c_int64(kind.head_dim),
            ctypes.c_int64(kind.window or 0),
            torch.get_num_threads(),
        )


class CpuBackend:
    """Runs on the CPU over bfloat16 caches, or int8 ones with scales.

    Args:
        library: what `build.load_library` gave.
    """

    name = "cpu"

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.pageframe_new_plan.restype = ctypes.c_void_p
        bfloat16 = library.pageframe_act_bytes() == ctypes.sizeof(ctypes.c_uint16)
        self.act_dtype = torch.bfloat16 if bfloat16 else torch.float32

    def check_supported(self, head_dim: int, block_size: int, dtype: torch.dtype) -> None:
        """See `Backend.check_supported`: bfloat16 or int8, and head_dim a multiple of 32 up to 256."""
        check_cache(block_size, dtype, CACHE_DTYPES)
        if not 0 < head_dim <= MAX_HEAD_DIM or head_dim % HEAD_DIM_STEP:
            raise UnsupportedError(
                f"head_dim is {head_dim}; the cpu backend needs a multiple of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}"
            )

    def plan_attention(self, batch: StepBatch, tables: torch.Tensor, block_size: int) -> AttentionPlan:
        """See `Backend.plan_attention`. The resident tables are read when the layers run."""
        assert tables.dtype == torch.int32
        assert tables.stride(1) == 1
        step = _Step(tables=tables.data_ptr(), table_stride=tables.stride(0), block_size=block_size)
        parts = CpuStep(step, tables, self._library)
        plan = make_plan(batch, tables.device, block_size, parts)
        parts.arrays = plan.query_start, plan.context_lens, plan.rows
        assert all(array.dtype == torch.int32 for array in parts.arrays)
        step.query_start, step.context_lens, step.rows = (array.data_ptr() for array in parts.arrays)
        step.num_tokens, step.num_requests = plan.num_tokens, len(plan.rows)
        return plan

    def write_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
        kv_scales: torch.Tensor | None = None,
    ) -> None:
        """See `Backend.write_kv`. A code is the nearest one of a scale that gives the largest number 127."""
        k, v, slots = k.to(torch.float32).contiguous(), v.to(torch.float32).contiguous(), slots.contiguous()
        cache = _cache(kv_cache, kv_scales)
        self._library.pageframe_write_kv(
            ctypes.byref(cache),
            ctypes.c_int64(kv_cache.shape[3]),
            _pointer(k),
            _pointer(v),
            _pointer(slots),
            ctypes.c_int64(len(slots)),
        )

    def paged_attention(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        plan: AttentionPlan,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        kv_scales: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Backend.paged_attention`."""
        parts = plan.parts
        assert isinstance(parts, CpuStep), "the plan was made by another backend"
        assert q.shape[0] == plan.num_tokens, f"q has {q.shape[0]} tokens, the plan {plan.num_tokens}"
        assert kv_cache.shape[3] == plan.block_size, f"blocks of {kv_cache.shape[3]}, the plan's {plan.block_size}"
        kind = layer_kind(q.shape[1], kv_cache.shape[2], q.shape[2], window)
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype)
        queries = q if self._is_direct(q) else q.to(self.act_dtype).contiguous()
        attended = out if self._is_direct(out) else torch.empty(q.shape, dtype=self.act_dtype)
        call = _AttentionCall(
            step=ctypes.pointer(parts.step),
            plan=parts.plan_for(kind),
            cache=_cache(kv_cache, kv_scales),
            scale=scale,
            softcap=softcap or 0.0,
            q=queries.data_ptr(),
            q_stride=queries.stride(0),
            out=attended.data_ptr(),
            out_stride=attended.stride(0),
        )
        self._library.pageframe_attention(ctypes.byref(call), torch.get_num_threads())
        return attended if attended is out else out.copy_(attended)

    def _is_direct(self, tensor: torch.Tensor) -> bool:
        """Whether the library reads and writes this memory as it is."""
        return tensor.dtype == self.act_dtype and tensor.stride()[1:] == (tensor.shape[2], 1)


def _cache(kv_cache: torch.Tensor, kv_scales: torch.Tensor | None) -> _KvCache:
    assert kv_cache.is_contiguous()
    assert kv_cache.dtype == (torch.bfloat16 if kv_scales is None else torch.int8), f"the K/V are {kv_cache.dtype}"
    if kv_scales is not None:
        assert kv_scales.is_contiguous()
        assert kv_scales.dtype == torch.float32
        assert kv_scales.shape == kv_cache.shape[:4]
    return _KvCache(
        values=kv_cache.data_ptr(),
        scales=None if kv_scales is None else kv_scales.data_ptr(),
        num_kv_heads=kv_cache.shape[2],
        head_dim=kv_cache.shape[4],
    )


def _pointer(tensor: torch.Tensor) -> Any:
    return ctypes.c_void_p(tensor.data_ptr())
