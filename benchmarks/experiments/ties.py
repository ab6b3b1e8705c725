"""When two greedy runs part although neither is wrong: their best logits are a tie, or no more than rounding apart."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from pageframe.runtime.config import ResolvedConfig

#: Two best logits this close are a tie, by the type of K and V.
TIE_TOLERANCE = {"float32": 1e-3, "bf16": 0.05}
#: Bits behind the leading one in the type that logits are computed in.
_MANTISSA_BITS = {"float32": 23, "bfloat16": 7}


def tie_tolerance(resolved: ResolvedConfig) -> float:
    """Two best logits this close are a tie between an engine's runs; none is where its logits are the same bits in all
    of them."""
    return 0.0 if resolved.batch_invariant else TIE_TOLERANCE[resolved.dtype]


class Parting(StrEnum):
    """What another token than expected means; the value is its name in files.

    TIE: the logits are within the tolerance.
    ONE_STEP: more than that apart, but neighbouring numbers of the arithmetic: bf16 logits from 16 to 32 are 0.125
        apart.
    DIFFERENT: neither; one of the runs is wrong.
    """

    TIE = "ties"
    ONE_STEP = "one_step"
    DIFFERENT = "different"


@dataclass(frozen=True, slots=True)
class LogitGap:
    """How far a logit is below the best one.

    Args:
        step: how far apart two numbers of the arithmetic are at the best logit.
    """

    gap: float
    step: float

    def parting(self, tolerance: float) -> Parting:
        if self.gap <= tolerance:
            return Parting.TIE
        return Parting.ONE_STEP if self.gap <= self.step else Parting.DIFFERENT


def spacing(value: float, dtype: str) -> float:
    """From `value` to the next number of the same size in this type of arithmetic: float32 or bfloat16."""
    return math.ldexp(1.0, math.frexp(value)[1] - 1 - _MANTISSA_BITS[dtype])
