"""What goes to the sampling kernels and what comes back: one table of numbers each way. Needs no Triton."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

#: Columns of the table that `Draws.pack` makes.
DRAW_COLUMNS = range(8)
TEMPERATURE, SPAN, REACH, TOP_K, TOP_P, SEED, OUTPUT_INDEX, NUM_TOP = DRAW_COLUMNS
#: Columns of the kernels' result; from FIRST_TOP on the likeliest tokens' ids, and then as many logits.
RESULT_COLUMNS = range(5)
TOKEN, LOGIT, BEST, TOTAL, FIRST_TOP = RESULT_COLUMNS


@dataclass(frozen=True, slots=True)
class Draws:
    """How each of num_rows rows is drawn: arrays [num_rows].

    Args:
        temperature: float32; 0 takes the largest logit.
        span: float64. A token so far below the largest logit has neither a mass nor a chance.
        reach: float64, at most `span`: what min_p leaves.
        top_k: int32, 0 for all; top_p: float32, 1 for all.
        seed, output_index: int64, the noise's.
        num_top: int32, for how many of the likeliest tokens a logprob is wanted; -1 for none, not even the drawn one's.
    """

    temperature: npt.NDArray[np.float32]
    span: npt.NDArray[np.float64]
    reach: npt.NDArray[np.float64]
    top_k: npt.NDArray[np.int32]
    top_p: npt.NDArray[np.float32]
    seed: npt.NDArray[np.int64]
    output_index: npt.NDArray[np.int64]
    num_top: npt.NDArray[np.int32]

    def pack(self) -> npt.NDArray[np.int64]:
        """All of it in one table [num_rows, len(DRAW_COLUMNS)], float64 as their bits, for one copy to the device."""
        table = np.empty((len(self.seed), len(DRAW_COLUMNS)), np.int64)
        floats = table.view(np.float64)
        floats[:, TEMPERATURE], floats[:, TOP_P] = self.temperature, self.top_p
        floats[:, SPAN], floats[:, REACH] = self.span, self.reach
        table[:, TOP_K], table[:, NUM_TOP] = self.top_k, self.num_top
        table[:, SEED], table[:, OUTPUT_INDEX] = self.seed, self.output_index
        return table


@dataclass(frozen=True, slots=True)
class Drawn:
    """The kernels' result.

    Args:
        table: float64 [num_rows, FIRST_TOP + 2 * max_top], max_top being the largest num_top, at least 0. Column TOKEN:
            the token's id, -1 where no logit is above -inf. Where logprobs were asked for and a token was drawn, LOGIT:
            its logit; BEST: the row's largest; TOTAL: the sum of exp(logit - BEST); from FIRST_TOP on the ids of the
            likeliest num_top tokens (or of all there are), ascending, and max_top further on their logits. The rest
            is undefined.
        vocab_size: the logits'.
    """

    table: npt.NDArray[np.float64]
    vocab_size: int

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        return self.table[:, TOKEN].astype(np.int32)

    def logprobs(self, row: int, num_top: int) -> tuple[float, list[int], list[float]]:
        """The drawn token's logprob; the likeliest tokens, best first, ties to the lower id; theirs."""
        max_top = (self.table.shape[1] - FIRST_TOP) // 2
        count = min(num_top, self.vocab_size)
        ids = self.table[row, FIRST_TOP : FIRST_TOP + count].astype(np.int64)
        logits = self.table[row, FIRST_TOP + max_top : FIRST_TOP + max_top + count]
        order = np.argsort(-logits, kind="stable")
        log_total = self.table[row, BEST] + math.log(self.table[row, TOTAL])
        top_logprobs = (logits[order] - log_total).tolist()
        return float(self.table[row, LOGIT] - log_total), ids[order].tolist(), top_logprobs
