"""Paged attention and writing as plain loops in float64: slow, and simple enough to be believed.

It follows the block table slot by slot and touches nothing that a query does not see.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def attend(
    q: Floats,
    kv_cache: Floats,
    tables: npt.NDArray[np.int32],
    rows: npt.NDArray[np.int32],
    context_lens: npt.NDArray[np.int32],
    query_start: npt.NDArray[np.int32],
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Floats:
    """Attention of [num_tokens, num_heads, head_dim] queries, as `Backend.paged_attention` defines it."""
    num_heads, num_kv_heads = q.shape[1], kv_cache.shape[2]
    out = np.zeros_like(q)
    for request, context in enumerate(context_lens.tolist()):
        begin, end = int(query_start[request]), int(query_start[request + 1])
        if context == 0:
            continue
        for token in range(begin, end):
            position = context - (end - token)
            oldest = 0 if window is None else max(0, position - window + 1)
            for head in range(num_heads):
                kv_head = head // (num_heads // num_kv_heads)
                seen = [_slot(kv_cache, tables[rows[request]], kv_head, past) for past in range(oldest, position + 1)]
                scores = [scale * float(q[token, head] @ key) for key, _ in seen]
                if softcap is not None:
                    scores = [softcap * math.tanh(score / softcap) for score in scores]
                weights = np.exp(np.array(scores) - max(scores))
                out[token, head] = weights @ np.stack([value for _, value in seen]) / weights.sum()
    return out


def _slot(kv_cache: Floats, table: npt.NDArray[np.int32], kv_head: int, position: int) -> tuple[Floats, Floats]:
    block_size = kv_cache.shape[3]
    block_id = int(table[position // block_size])
    assert block_id >= 0, f"position {position} has no block"
    offset = position % block_size
    return kv_cache[block_id, 0, kv_head, offset], kv_cache[block_id, 1, kv_head, offset]


def write(k: Floats, v: Floats, kv_cache: Floats, slots: npt.NDArray[np.int64]) -> Floats:
    """The cache after writing, as `Backend.write_kv` defines it; the argument is left alone."""
    written = kv_cache.copy()
    block_size = kv_cache.shape[3]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            written[slot // block_size, 0, :, slot % block_size] = k[token]
            written[slot // block_size, 1, :, slot % block_size] = v[token]
    return written
