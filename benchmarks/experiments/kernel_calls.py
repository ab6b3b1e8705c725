"""Every Triton kernel and how the engine calls it: one table, from which the proof without a GPU and the checks on one
take their list.

A call is made of a `Shape` and runs a piece of the path through a step on tensors of that shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pageframe.kernels.attention import AttentionPlan, StepBatch, kv_cache_shape
from pageframe.kernels.triton.activation import ACTIVATIONS, gated
from pageframe.kernels.triton.backend import TritonBackend
from pageframe.kernels.triton.norm import add_rms_norm
from pageframe.kernels.triton.rope import rotate_and_write
from pageframe.kernels.triton.sampling import draw_tokens
from pageframe.kernels.triton.sampling_penalties import Penalties
from pageframe.kernels.triton.sampling_table import Draws

NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int8: "int8",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e4m3fnuz: "fp8 fnuz",
}
#: Contexts and chunks of the example step: none is a multiple of a tile.
_CONTEXTS = (700, 33)
_CHUNK = 77
#: Of Llama-3.1-8B; logits of other vocabularies have other numbers of parts, for which the kernels that draw are
#: compiled anew.
_HIDDEN_SIZE, _INTERMEDIATE_SIZE, _VOCAB_SIZE = 4096, 14_336, 128_256
#: Blocks of a pool past 2 GiB, up to which a compiler may take 32-bit offsets. The memory is never touched.
_POOL_BYTES = 2**31 + 2**28


@dataclass(frozen=True, slots=True)
class Shape:
    """What a kernel is compiled for.

    Args:
        dtype: of activations.
        cache_dtype: of K and V.
        masked: with a sliding window and a soft cap.
        vocab_size: of the logits that are drawn from.
    """

    head_dim: int = 128
    group: int = 4
    num_kv_heads: int = 8
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype = torch.bfloat16
    masked: bool = False
    vocab_size: int = _VOCAB_SIZE

    def __str__(self) -> str:
        stored = NAMES[self.cache_dtype]
        if self.scaled and self.dtype != torch.bfloat16:
            stored = f"{NAMES[self.dtype]} over {stored}"
        words = [f"{self.head_dim}", stored, f"group {self.group}", f"block {self.block_size}"]
        if self.vocab_size != _VOCAB_SIZE:
            words.append(f"vocabulary {self.vocab_size:,}")
        return ", ".join(words + ["window, cap"] * self.masked)

    @property
    def scaled(self) -> bool:
        """K and V are codes with scales."""
        return self.cache_dtype.itemsize == 1


@dataclass(frozen=True, slots=True)
class Batch:
    """A `StepBatch`."""

    rows: npt.NDArray[np.int32]
    context_lens: npt.NDArray[np.int32]
    query_start: npt.NDArray[np.int32]
    num_decode: int


def _batch(decode: bool) -> Batch:
    """Two requests, as decode rows or as chunks."""
    lengths = [1, 1] if decode else [_CHUNK, _CONTEXTS[1]]
    return Batch(
        rows=np.arange(2, dtype=np.int32),
        context_lens=np.array(_CONTEXTS, dtype=np.int32),
        query_start=np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
        num_decode=2 if decode else 0,
    )


class _AbsentBackend(TritonBackend):
    """The backend of a GPU that is not there: it asks no device what it has."""

    def __init__(self) -> None:
        pass


class _Layer:
    """Tensors of one layer's attention in one step."""

    def __init__(self, shape: Shape, batch: StepBatch) -> None:
        per_block = 2 * shape.num_kv_heads * shape.block_size * shape.head_dim * shape.cache_dtype.itemsize
        num_blocks = _POOL_BYTES // per_block
        num_tokens = int(batch.query_start[-1])
        self.shape = shape
        cache_shape = kv_cache_shape(num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
        self.kv_cache = torch.empty(cache_shape, dtype=shape.cache_dtype)
        self.kv_scales = torch.empty(cache_shape[:-1], dtype=torch.float32) if shape.scaled else None
        self.tables = torch.zeros((256, 4096), dtype=torch.int32)
        heads = shape.group * shape.num_kv_heads
        self.q = torch.zeros(num_tokens, heads, shape.head_dim, dtype=shape.dtype)
        self.k = torch.zeros(num_tokens, shape.num_kv_heads, shape.head_dim, dtype=shape.dtype)
        self.slots = torch.zeros(num_tokens, dtype=torch.int64)
        self.backend = _AbsentBackend()
        self.plan: AttentionPlan = self.backend.plan_attention(batch, self.tables, shape.block_size)

    def attend(self) -> None:
        self.backend.paged_attention(
            self.q,
            self.kv_cache,
            self.plan,
            scale=0.1,
            window=300 if self.shape.masked else None,
            softcap=30.0 if self.shape.masked else None,
            kv_scales=self.kv_scales,
        )


def _decode(shape: Shape) -> None:
    _Layer(shape, _batch(decode=True)).attend()


def _prefill(shape: Shape) -> None:
    _Layer(shape, _batch(decode=False)).attend()


def _write(shape: Shape) -> None:
    layer = _Layer(shape, _batch(decode=True))
    layer.backend.write_kv(layer.k, layer.k, layer.kv_cache, layer.slots, layer.kv_scales)


def _norm(shape: Shape) -> None:
    hidden = torch.zeros(2, _HIDDEN_SIZE, dtype=shape.dtype)
    weight = torch.zeros(_HIDDEN_SIZE)
    add_rms_norm(hidden, None, weight, 1e-6)
    add_rms_norm(hidden, hidden, weight, 1e-6)


def _rotate(shape: Shape) -> None:
    layer = _Layer(shape, _batch(decode=True))
    heads = shape.group * shape.num_kv_heads
    qkv = torch.zeros(2, (heads + 2 * shape.num_kv_heads) * shape.head_dim, dtype=shape.dtype)
    turns = torch.zeros(1024, shape.head_dim // 2)
    weights = torch.zeros(heads + shape.num_kv_heads, shape.head_dim)
    cache, scales = layer.kv_cache, layer.kv_scales
    for norm in (None, weights):
        rotate_and_write(
            qkv, layer.slots, turns, turns, layer.slots, cache, scales, num_heads=heads, qk_norm=norm, eps=1e-6
        )


def _gated(shape: Shape) -> None:
    for activation in ACTIVATIONS:
        gated(torch.zeros(2, 2 * _INTERMEDIATE_SIZE, dtype=shape.dtype), activation)


def _sample(shape: Shape) -> None:
    ones, integers = np.ones(2, np.float32), np.ones(2, np.int32)
    draws = Draws(
        temperature=ones,
        span=np.ones(2),
        reach=np.ones(2),
        top_k=integers,
        top_p=ones,
        seed=np.ones(2, np.int64),
        output_index=np.ones(2, np.int64),
        num_top=integers,
    )
    floats, tokens = torch.ones(2), torch.zeros(4, dtype=torch.int32)
    penalties = Penalties(torch.zeros(3, dtype=torch.int32), tokens, tokens, floats, floats, floats)
    draw_tokens(torch.zeros(2, shape.vocab_size), draws, penalties=penalties)


#: What is compiled, by name. A call launches one kernel or several.
CALLS: dict[str, Callable[[Shape], None]] = {
    "decode": _decode,
    "prefill": _prefill,
    "write": _write,
    "norm": _norm,
    "rotate and write": _rotate,
    "activation": _gated,
    "sampling": _sample,
}

#: Few shapes that together meet every kernel.
QUICK_SHAPES = (Shape(), Shape(cache_dtype=torch.int8))


def all_shapes(fp8: torch.dtype | None) -> tuple[Shape, ...]:
    """Every head size, every dtype, block sizes and groups at both ends, masks.

    Args:
        fp8: the target's own format, None where it has none.
    """
    bf16, fp16, fp32, int8 = torch.bfloat16, torch.float16, torch.float32, torch.int8
    shapes = [Shape(head_dim=head_dim) for head_dim in (16, 32, 64, 80, 96, 128, 256)]
    shapes += [Shape(head_dim=head_dim, masked=True) for head_dim in (64, 128, 256)]
    shapes += [Shape(dtype=fp16, cache_dtype=fp16), Shape(dtype=fp32, cache_dtype=fp32)]
    shapes += [Shape(head_dim=head_dim, dtype=fp32, cache_dtype=fp32) for head_dim in (64, 256)]
    codes = [int8] if fp8 is None else [int8, fp8]
    shapes += [Shape(head_dim=head_dim, cache_dtype=dtype) for dtype in codes for head_dim in (64, 80, 128, 256)]
    shapes += [Shape(dtype=fp16, cache_dtype=dtype) for dtype in codes]
    shapes += [Shape(block_size=block_size, cache_dtype=dtype) for block_size in (1, 128) for dtype in (bf16, int8)]
    shapes += [Shape(group=group) for group in (1, 7, 16)]
    # Of GPT-2 and of Gemma 3: a row has fewer parts, and more.
    shapes += [Shape(vocab_size=vocab_size) for vocab_size in (50_257, 262_144)]
    return tuple(dict.fromkeys(shapes))
