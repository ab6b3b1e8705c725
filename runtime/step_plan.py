"""What passes between the scheduler and the forward pass: the plan of one step, and its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pageframe.runtime.block_copy import BlockCopy
from pageframe.runtime.block_table import TableUpdates
from pageframe.runtime.request import Request, TokenLogprobs
from pageframe.runtime.rows import RequestRows
from pageframe.runtime.token_rules import TokenRules

Int32s = npt.NDArray[np.int32]

#: In the place of a token where a request's own rules leave none.
NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes: parallel arrays over its requests, one-token (decode) rows first.

    Args:
        requests: the scheduled requests; `rows` int32 their rows.
        starts: int32, the first position computed, which equals the tokens already in the cache.
        num_new_tokens: int32, positions computed in this step.
        num_samples: int32, tokens to draw from the last position: 0 while a prompt is unfinished, else 1, or one for
            each choice of a request that now forks.
        num_decode: the first `num_decode` requests compute exactly one token.
        table_updates: block-table entries written since the last step.
        copies: to be made before the forward pass, one after the other.
        preempted: ids of requests that lost their blocks for this step.
        is_prefill: bool, whether it had more left to compute than its next token.
        prefill_tokens, decode_tokens: their sum is the step's tokens, at most token_budget.
        is_decode: every request computes its latest token alone and draws one from it: most steps.
    """

    step: int
    requests: list[Request]
    rows: Int32s
    starts: Int32s
    num_new_tokens: Int32s
    num_samples: Int32s
    num_decode: int
    table_updates: TableUpdates
    copies: tuple[BlockCopy, ...]
    preempted: tuple[str, ...]
    is_prefill: npt.NDArray[np.bool_]
    prefill_tokens: int
    decode_tokens: int
    token_budget: int
    is_decode: bool

    @property
    def num_tokens(self) -> int:
        return self.prefill_tokens + self.decode_tokens

    @classmethod
    def build(
        cls,
        step: int,
        running: Sequence[Request],
        rows: Int32s,
        new_tokens: Int32s,
        row_values: RequestRows,
        *,
        token_budget: int,
        table_updates: TableUpdates,
        copies: tuple[BlockCopy, ...],
        preempted: tuple[str, ...],
    ) -> StepPlan:
        """The plan in which running request i, in row rows[i], computes new_tokens[i] tokens; those with 0 stay out."""
        starts = row_values.num_computed_tokens[rows]
        left = row_values.num_tokens[rows] - starts
        is_one = new_tokens == 1
        requests = list(running)
        if not is_one.all():
            order = np.concatenate([np.flatnonzero(is_one), np.flatnonzero(new_tokens > 1)])
            rows, starts, left, new_tokens = rows[order], starts[order], left[order], new_tokens[order]
            requests = [running[index] for index in order.tolist()]
        num_samples = (new_tokens == left).astype(np.int32)
        for index, request in enumerate(requests):
            if request.followers and num_samples[index]:
                num_samples[index] += len(request.followers)
        decode_tokens, num_drawn = int(np.count_nonzero(left == 1)), int(num_samples.sum())
        return cls(
            step=step,
            requests=requests,
            rows=rows,
            starts=starts,
            num_new_tokens=new_tokens,
            num_samples=num_samples,
            num_decode=int(np.count_nonzero(is_one)),
            table_updates=table_updates,
            copies=copies,
            preempted=preempted,
            is_prefill=left > 1,
            prefill_tokens=int(new_tokens.sum()) - decode_tokens,
            decode_tokens=decode_tokens,
            token_budget=token_budget,
            is_decode=decode_tokens == num_drawn == len(requests),
        )


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Sampling parameters of the rows to draw from: parallel arrays [n].

    Args:
        temperature, top_p, min_p: float32. A temperature below 1e-5 is greedy.
        top_k: int32, 0 for all of the vocabulary.
        seed: int64, the choice's seed.
        output_index: int64, output tokens the request already has.
        num_logprobs: int32, -1 for none.
        banned: (index, token ids that may not be drawn) where there are any.
        rules: (index, what else changes its logits) where anything does.
        all_plain: every row is known to be greedy, and nothing else is wanted of any.
    """

    temperature: npt.NDArray[np.float32]
    top_k: Int32s
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    seed: npt.NDArray[np.int64]
    output_index: npt.NDArray[np.int64]
    num_logprobs: Int32s
    banned: tuple[tuple[int, tuple[int, ...]], ...] = ()
    rules: tuple[tuple[int, TokenRules], ...] = ()
    all_plain: bool = False

    def __len__(self) -> int:
        return len(self.seed)

    def take(self, indices: npt.NDArray[np.int64]) -> SamplingBatch:
        """The parameters of some rows, in this order."""
        places = {int(index): place for place, index in enumerate(indices)}
        return SamplingBatch(
            temperature=self.temperature[indices],
            top_k=self.top_k[indices],
            top_p=self.top_p[indices],
            min_p=self.min_p[indices],
            seed=self.seed[indices],
            output_index=self.output_index[indices],
            num_logprobs=self.num_logprobs[indices],
            banned=tuple((places[index], ids) for index, ids in self.banned if index in places),
            rules=tuple((places[index], rules) for index, rules in self.rules if index in places),
        )

    @classmethod
    def empty(cls) -> SamplingBatch:
        """No rows at all."""
        float32s, int32s = np.zeros(0, dtype=np.float32), np.zeros(0, dtype=np.int32)
        int64s = np.zeros(0, dtype=np.int64)
        return cls(float32s, int32s, float32s, float32s, int64s, int64s, int32s)


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Prompt tokens whose logprobs are wanted: arrays over those that follow a token which this step computes.

    Args:
        wanted: int64, the tokens of the batch that they follow.
        token_ids: int64, their own ids.
        num_top: int32, how many of the likeliest tokens are wanted beside each.
        requests: (position in the plan, how many of them are its), in their order.
    """

    wanted: npt.NDArray[np.int64]
    token_ids: npt.NDArray[np.int64]
    num_top: Int32s
    requests: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the forward pass gave: num_samples tokens of each request, in plan order.

    Args:
        token_ids: int32 [number of samples]; NO_TOKEN where a request's rules leave none.
        logprobs: by index into `token_ids`, where asked for.
        prompt_logprobs: of the prompt tokens that were to be scored, by position in the plan.
    """

    token_ids: Int32s
    logprobs: dict[int, TokenLogprobs]
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
