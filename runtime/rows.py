"""The running requests' numbers as arrays by row, so that a step is built by gathers.

The scheduler is the one writer; batch.py reads.
"""

from __future__ import annotations

import numpy as np

from pageframe.runtime.request import GREEDY_BELOW, Request
from pageframe.runtime.token_rules import TokenRules, has_rules


class RequestRows:
    """Arrays over [max_requests] rows; a row's values mean something only while a request runs in it.

    token_ids            int32 [max_requests, max_model_len + 1]  the context: prompt, then output
    num_tokens           int32  tokens of the context known so far
    num_computed_tokens  int32  tokens whose K/V are in the cache
    num_prompt_tokens    int32  where the output begins; negative once a context has slid past it
    min_total_tokens     int32  below this many tokens of context no stop id may be drawn
    temperature, top_p, min_p float32 · top_k, num_logprobs (-1: none) int32 · seed int64
    is_plain             bool   the most probable token is drawn, and nothing else is wanted of it
    rules                by row, of those that have any: what changes their logits
    scored               rows whose prompt tokens' logprobs are wanted
    """

    def __init__(self, max_requests: int, max_model_len: int) -> None:
        # np.zeros: pages that no request ever reaches are never touched, so they cost no memory.
        # One column more: the token behind a full context, which ends the request or makes its context slide.
        self.token_ids = np.zeros((max_requests, max_model_len + 1), dtype=np.int32)
        self.num_tokens = np.zeros(max_requests, dtype=np.int32)
        self.num_computed_tokens = np.zeros(max_requests, dtype=np.int32)
        self.num_prompt_tokens = np.zeros(max_requests, dtype=np.int32)
        self.min_total_tokens = np.zeros(max_requests, dtype=np.int32)
        self.temperature = np.zeros(max_requests, dtype=np.float32)
        self.top_p = np.ones(max_requests, dtype=np.float32)
        self.min_p = np.zeros(max_requests, dtype=np.float32)
        self.top_k = np.zeros(max_requests, dtype=np.int32)
        self.num_logprobs = np.full(max_requests, -1, dtype=np.int32)
        self.seed = np.zeros(max_requests, dtype=np.int64)
        self.is_plain = np.zeros(max_requests, dtype=np.bool_)
        self.rules: dict[int, TokenRules] = {}
        self.scored: set[int] = set()

    def load(self, row: int, request: Request, num_computed_tokens: int) -> None:
        """Fill `row` from a request that enters, some leading tokens of its context computed already."""
        context, params = request.context, request.params
        self.token_ids[row, : len(context)] = context
        self.num_tokens[row] = len(context)
        self.num_computed_tokens[row] = num_computed_tokens
        self.num_prompt_tokens[row] = request.num_prompt_tokens - request.context_start
        self.min_total_tokens[row] = self.num_prompt_tokens[row] + params.min_tokens
        self.temperature[row] = params.temperature
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.top_k[row] = min(max(0, params.top_k), np.iinfo(np.int32).max)
        self.num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self.seed[row] = request.seed
        ruled = has_rules(request)
        is_bare = params.logprobs is None and params.min_tokens == 0 and not ruled
        self.is_plain[row] = is_bare and params.temperature < GREEDY_BELOW
        if ruled:
            self.rules[row] = TokenRules(request)
        if request.wants_prompt_logprobs:
            self.scored.add(row)

    def store(self, row: int, request: Request) -> None:
        """Take a request's tokens out of its row before it leaves."""
        context = self.token_ids[row, : self.num_tokens[row]]
        request.token_ids = np.concatenate([request.token_ids[: request.context_start], context])
        self.rules.pop(row, None)
        self.scored.discard(row)
