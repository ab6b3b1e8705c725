"""What passes between the scheduler and the forward pass: the plan of one step, and its result."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pageframe.runtime.block_table import TableUpdates
from pageframe.runtime.request import Request, TokenLogprobs

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes: parallel arrays over its requests, one-token (decode) rows first.

    Args:
        requests: the scheduled requests; `rows` int32 their rows.
        starts: int32, the first position computed, which equals the tokens already in the cache.
        num_new_tokens: int32, positions computed in this step.
        num_samples: int32, tokens to draw from the last position: 0 while a prompt is unfinished, else 1.
        num_decode: the first `num_decode` requests compute exactly one token.
        table_updates: block-table entries written since the last step.
        preempted: ids of requests that lost their blocks for this step.
        prefill_tokens, decode_tokens: their sum is the step's tokens; a request that needed just its next token counts
            as decode.
    """

    step: int
    requests: list[Request]
    rows: Int32s
    starts: Int32s
    num_new_tokens: Int32s
    num_samples: Int32s
    num_decode: int
    table_updates: TableUpdates
    preempted: tuple[str, ...]
    prefill_tokens: int
    decode_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.prefill_tokens + self.decode_tokens


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
    """

    temperature: npt.NDArray[np.float32]
    top_k: Int32s
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    seed: npt.NDArray[np.int64]
    output_index: npt.NDArray[np.int64]
    num_logprobs: Int32s
    banned: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def __len__(self) -> int:
        return len(self.seed)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the forward pass gave: tokens of the requests with num_samples > 0, in plan order.

    Args:
        token_ids: int32 [number of sampling requests].
        logprobs: by index into `token_ids`, where asked for.
    """

    token_ids: Int32s
    logprobs: dict[int, TokenLogprobs]
