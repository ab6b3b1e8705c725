"""Others' attention over the same K and V, where it can be imported: torch's own two, FlashInfer, flash-attn.

Each function takes a layer and returns work for each of its sets, which gives [num_tokens, num_heads, head_dim]. It
raises whatever the other implementation raises where it cannot do that.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from pageframe.benchmarks.gpu_parts.layer import Layer, Step

Works = list[Callable[[], torch.Tensor]]

#: The block size that FlashAttention-2's paged kernels take.
FLASH_BLOCK = 256
#: Bytes that FlashInfer works in, for each set.
WORKSPACE_BYTES = 64 * 2**20


def varlen(layer: Layer) -> Works:
    """torch.nn.attention.varlen over the blocks as they are; it may refuse their size."""
    attend = _varlen_attn()
    if "block_table" not in inspect.signature(attend).parameters:
        raise NotImplementedError("this torch's takes no block table")
    # The pools that it takes have a block's heads inside its slots.
    keys, values = (layer.kv_cache[:, index].transpose(1, 2).contiguous() for index in range(2))
    works: Works = []
    for step, query in zip(layer.steps, layer.queries, strict=True):
        tables = layer.tables[int(step.rows[0]) : int(step.rows[-1]) + 1].contiguous()
        lengths = (_to(layer, step.query_start), None, _longest(step), int(step.context_lens.max()))
        options = {
            "seqused_k": _to(layer, step.context_lens),
            "block_table": tables,
            **_causal(attend, query, keys.shape[2]),
        }
        works.append(partial(attend, query, keys, values, *lengths, **options))
    return works


def varlen_contiguous(layer: Layer) -> Works:
    """torch.nn.attention.varlen over K and V without blocks: what its kernel reaches where it need not look any up."""
    attend = _varlen_attn()
    works: Works = []
    for index, (step, query) in enumerate(zip(layer.steps, layer.queries, strict=True)):
        keys, values = (tensor.contiguous() for tensor in layer.gathered(index))
        starts = _to(layer, step.query_start), _to(layer, _starts(step.context_lens))
        longest = _longest(step), int(step.context_lens.max())
        works.append(partial(attend, query, keys, values, *starts, *longest, **_causal(attend, query, keys.shape[1])))
    return works


def _varlen_attn() -> Any:
    return importlib.import_module("torch.nn.attention.varlen").varlen_attn


def _causal(attend: Any, query: torch.Tensor, num_kv_heads: int) -> dict[str, Any]:
    """varlen_attn's options, as far as this torch's has them: an older one takes groups of heads without a word."""
    known = inspect.signature(attend).parameters
    options = {"window_size": (-1, 0), "is_causal": True, "enable_gqa": query.shape[1] != num_kv_heads}
    if "window_size" in known:
        del options["is_causal"]
    return {name: value for name, value in options.items() if name in known}


def sdpa(layer: Layer) -> Works:
    """torch's scaled_dot_product_attention over K and V without blocks; all contexts must be equally long."""
    step = layer.steps[0]
    count, context, new = len(step.rows), int(step.context_lens[0]), int(step.query_start[1])
    if (step.context_lens != context).any():
        raise NotImplementedError("contexts differ")
    if 1 < new < context:
        raise NotImplementedError("its causal mask begins at the first key")
    works: Works = []
    for index, query in enumerate(layer.queries):
        heads = [
            tensor.reshape(count, context, *tensor.shape[1:]).transpose(1, 2).contiguous()
            for tensor in layer.gathered(index)
        ]
        queries = query.view(count, new, *query.shape[1:]).transpose(1, 2)
        works.append(partial(_sdpa, queries, *heads, causal=new > 1))
    return works


def _sdpa(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, causal: bool) -> torch.Tensor:
    attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=causal, enable_gqa=True)
    return attended.transpose(1, 2).flatten(0, 1)


def flashinfer(layer: Layer) -> Works:
    """FlashInfer's paged decode and prefill over the blocks as they are: K, then V, heads outside slots ("HND")."""
    library = importlib.import_module("flashinfer")
    works: Works = []
    _, _, num_kv_heads, block_size, head_dim = layer.kv_cache.shape
    for step, query in zip(layer.steps, layer.queries, strict=True):
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=layer.device)
        blocks = -(-step.context_lens // block_size)
        pages = (
            _to(layer, _starts(blocks)),
            torch.cat([layer.tables[row, :count] for row, count in zip(step.rows, blocks, strict=True)]),
            _to(layer, (step.context_lens - 1) % block_size + 1),
        )
        heads = (query.shape[1], num_kv_heads, head_dim, block_size)
        types = {"q_data_type": query.dtype, "kv_data_type": layer.kv_cache.dtype}
        if step.num_decode:
            wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
            wrapper.plan(*pages, *heads, **types)
        else:
            wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
            wrapper.plan(_to(layer, step.query_start), *pages, *heads, causal=True, **types)
        works.append(partial(wrapper.run, query, layer.kv_cache))
    return works


def flash_attn(layer: Layer) -> Works:
    """FlashAttention-3's or -2's attention with a cache, in blocks of 256 in order."""
    try:
        library = importlib.import_module("flash_attn_interface")
    except ImportError:
        library = importlib.import_module("flash_attn")
    works: Works = []
    for index, (step, query) in enumerate(zip(layer.steps, layer.queries, strict=True)):
        blocks = -(-step.context_lens // FLASH_BLOCK)
        table = np.zeros((len(blocks), int(blocks.max())), dtype=np.int32)
        for row, (first, count) in enumerate(zip(_starts(blocks), blocks, strict=False)):
            table[row, :count] = np.arange(first, first + count)
        caches = [_in_blocks(tensor, step.context_lens, blocks) for tensor in layer.gathered(index)]
        queries = query.view(len(blocks), -1, *query.shape[1:])
        options = {"block_table": _to(layer, table), "cache_seqlens": _to(layer, step.context_lens), "causal": True}
        works.append(partial(library.flash_attn_with_kvcache, queries, *caches, **options))
    return works


def _in_blocks(tensor: torch.Tensor, contexts: npt.NDArray[Any], blocks: npt.NDArray[Any]) -> torch.Tensor:
    """[sum of contexts, num_kv_heads, head_dim] -> [sum of blocks, FLASH_BLOCK, num_kv_heads, head_dim]."""
    cache = tensor.new_zeros(int(blocks.sum()), FLASH_BLOCK, *tensor.shape[1:])
    slots = cache.flatten(0, 1)
    start, first = 0, 0
    for context, count in zip(contexts.tolist(), blocks.tolist(), strict=True):
        slots[first : first + context] = tensor[start : start + context]
        start, first = start + context, first + count * FLASH_BLOCK
    return cache


def _longest(step: Step) -> int:
    """The most query tokens of a request."""
    return int(np.diff(step.query_start).max())


def _starts(lengths: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Where each part of these lengths starts, and where the last ends."""
    return np.concatenate(([0], np.cumsum(lengths)))


def _to(layer: Layer, numbers: npt.NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int32)).to(layer.device)


PEERS: dict[str, Callable[[Layer], Works]] = {
    "varlen": varlen,
    "varlen without blocks": varlen_contiguous,
    "SDPA": sdpa,
    "FlashInfer": flashinfer,
    "flash-attn": flash_attn,
}
