"""StepPlan to the numpy arrays of one step: gathers from the rows, nothing per token in Python.

It knows no tensors; the runner copies these arrays to the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pageframe.runtime.block_copy import BlockCopy
from pageframe.runtime.block_table import BlockTables, TableUpdates
from pageframe.runtime.rows import RequestRows
from pageframe.runtime.step_plan import SamplingBatch, ScoredTokens, StepPlan
from pageframe.runtime.token_rules import TokenRules

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """The inputs of one forward pass. Tokens of all requests are concatenated, in plan order.

    Args:
        token_ids, positions: int64 [num_tokens].
        slots: int64 [num_tokens], where each token's K and V go.
        query_start: int32 [num_requests + 1], each request's range of tokens.
        context_lens: int32 [num_requests], tokens in the cache after this step's write.
        rows: int32 [num_requests], rows of the resident block table.
        num_decode: the first `num_decode` requests have one token each.
        wanted: int64, the tokens whose hidden state the sampler needs: num_samples, then those of `scored`.
        sampling: the sampler's parameters, one entry per token to draw.
        table_updates: what the device's copy of the block tables must change first.
        copies: blocks to copy before anything is computed, one after the other.
        scored: prompt tokens whose logprobs are wanted; None where there are none.
        wants_all: `wanted` is known to be every token, in order.
    """

    token_ids: Int64s
    positions: Int64s
    slots: Int64s
    query_start: Int32s
    context_lens: Int32s
    rows: Int32s
    num_decode: int
    wanted: Int64s
    sampling: SamplingBatch
    table_updates: TableUpdates
    copies: tuple[BlockCopy, ...] = ()
    scored: ScoredTokens | None = None
    wants_all: bool = False

    @classmethod
    def build(cls, plan: StepPlan, rows: RequestRows, tables: BlockTables) -> Batch:
        query_start = np.arange(len(plan.rows) + 1, dtype=np.int32)
        if plan.is_decode:  # one token of each request, and one to draw from it: nothing to repeat
            token_rows, positions, wanted = plan.rows, plan.starts.astype(np.int64), query_start[:-1].astype(np.int64)
        else:
            np.cumsum(plan.num_new_tokens, out=query_start[1:])
            token_rows = np.repeat(plan.rows, plan.num_new_tokens)
            # Position of a token: its request's start plus its distance from the request's first token.
            offsets = np.repeat(plan.starts - query_start[:-1], plan.num_new_tokens)
            positions = np.arange(plan.num_tokens, dtype=np.int64) + offsets
            wanted = np.repeat(query_start[1:], plan.num_samples).astype(np.int64) - 1
        block_size = tables.block_size
        block_ids = tables.table[token_rows, positions // block_size].astype(np.int64)
        scored = _scored(plan, rows, query_start) if rows.scored else None
        if scored is not None:
            wanted = np.concatenate((wanted, scored.wanted))
        return cls(
            token_ids=rows.token_ids[token_rows, positions].astype(np.int64),
            positions=positions,
            slots=block_ids * block_size + positions % block_size,
            query_start=query_start,
            context_lens=plan.starts + plan.num_new_tokens,
            rows=plan.rows,
            num_decode=plan.num_decode,
            wanted=wanted,
            sampling=_sampling(plan, rows),
            table_updates=plan.table_updates,
            copies=plan.copies,
            scored=scored,
            wants_all=plan.is_decode and scored is None,
        )


def _sampling(plan: StepPlan, rows: RequestRows) -> SamplingBatch:
    sampling = np.arange(len(plan.rows))
    sampled_rows = plan.rows
    if not plan.is_decode:
        sampling = np.repeat(sampling, plan.num_samples)
        sampled_rows = plan.rows[sampling]
    num_tokens = rows.num_tokens[sampled_rows]
    too_early = np.flatnonzero(num_tokens < rows.min_total_tokens[sampled_rows])
    return SamplingBatch(
        temperature=rows.temperature[sampled_rows],
        top_k=rows.top_k[sampled_rows],
        top_p=rows.top_p[sampled_rows],
        min_p=rows.min_p[sampled_rows],
        seed=_seeds(plan, rows.seed[sampled_rows]),
        output_index=(num_tokens - rows.num_prompt_tokens[sampled_rows]).astype(np.int64),
        num_logprobs=rows.num_logprobs[sampled_rows],
        banned=tuple((index, tuple(plan.requests[sampling[index]].stop_ids)) for index in too_early.tolist()),
        rules=_rules(sampled_rows, rows) if rows.rules else (),
        all_plain=bool(rows.is_plain[sampled_rows].all()),
    )


def _rules(sampled_rows: Int32s, rows: RequestRows) -> tuple[tuple[int, TokenRules], ...]:
    """Of the rows to draw from, those with rules, brought up to the tokens that they have now."""
    found = []
    for index, row in enumerate(sampled_rows.tolist()):
        rules = rows.rules.get(row)
        if rules is not None:
            rules.catch_up(rows.token_ids[row, : rows.num_tokens[row]])
            found.append((index, rules))
    return tuple(found)


def _scored(plan: StepPlan, rows: RequestRows, query_start: Int32s) -> ScoredTokens | None:
    """The prompt tokens behind those that this step computes, of requests that want their logprobs."""
    requests, wanted, token_ids, num_top = [], [], [], []
    for position, row in enumerate(plan.rows.tolist()):
        if row not in rows.scored:
            continue
        request, start = plan.requests[position], int(plan.starts[position])
        # What was scored before a preemption is known. The token at p scores the one at p + 1, the first has no score.
        first = max(start, len(request.prompt_logprobs))
        end = min(start + int(plan.num_new_tokens[position]), request.num_prompt_tokens - 1)
        if first < end:
            requests.append((position, end - first))
            wanted.append(np.arange(first, end, dtype=np.int64) - start + query_start[position])
            token_ids.append(rows.token_ids[row, first + 1 : end + 1].astype(np.int64))
            num_top.append(np.full(end - first, request.params.prompt_logprobs, np.int32))
    if not requests:
        return None
    return ScoredTokens(np.concatenate(wanted), np.concatenate(token_ids), np.concatenate(num_top), tuple(requests))


def _seeds(plan: StepPlan, seeds: Int64s) -> Int64s:
    """Each choice draws with its own seed, also the first token, which all draw from the leader's row."""
    for position in np.flatnonzero(plan.num_samples > 1).tolist():
        end = int(plan.num_samples[: position + 1].sum())
        followers = plan.requests[position].followers
        seeds[end - len(followers) : end] = [follower.seed for follower in followers]
    return seeds
