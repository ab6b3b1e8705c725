"""How a time grows with the number of tokens: a polynomial through the measured times, and a slope."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Growth:
    """Seconds for n tokens: linear * n + quadratic * n^2 + cubic * n^3."""

    linear: float
    quadratic: float
    cubic: float

    def seconds(self, num_tokens: int) -> float:
        return sum(self.parts(num_tokens))

    def parts(self, num_tokens: int) -> tuple[float, float, float]:
        """The three terms at `num_tokens`."""
        return self.linear * num_tokens, self.quadratic * num_tokens**2, self.cubic * num_tokens**3

    @property
    def square_passed_at(self) -> float | None:
        """The number of tokens from which on the time grows faster than their square, None for none.

        The exponent n * seconds'(n) / seconds(n) is above 2 exactly where cubic * n^3 is above linear * n.
        """
        return math.sqrt(self.linear / self.cubic) if self.cubic > 0 else None


def fit_growth(seconds: Mapping[int, float], order: int) -> Growth:
    """The growth that fits the times of single tokens best (least squares), with no term below zero.

    Args:
        seconds: of the k-th token, by k from 1. The first one is left out: it is the prompt's.
        order: the highest power, 2 or 3.

    Raises:
        ValueError: fewer times than terms.
    """
    k = np.array([token for token in seconds if token > 1], dtype=np.float64)
    if len(k) < order:
        raise ValueError(f"{len(k)} times are too few to fit {order} terms")
    times = np.array([seconds[token] for token in seconds if token > 1])
    # The k-th token's share of n, n^2 and n^3: sums over k = 1 … n give exactly those.
    columns = np.stack([k**power - (k - 1) ** power for power in range(1, order + 1)], axis=1)
    terms = [*non_negative_least_squares(columns, times).tolist(), 0.0, 0.0][:3]
    return Growth(*terms)


def non_negative_least_squares(columns: Floats, values: Floats) -> Floats:
    """x >= 0 that makes |columns @ x - values| smallest, for a handful of columns [n, m]: every choice of those that
    are not zero is solved, and the best one without a negative is it."""
    scale = np.linalg.norm(columns, axis=0)
    best, least = np.zeros(columns.shape[1]), float(values @ values)
    for size in range(1, columns.shape[1] + 1):
        for chosen in map(list, itertools.combinations(range(columns.shape[1]), size)):
            part = np.linalg.lstsq(columns[:, chosen] / scale[chosen], values)[0] / scale[chosen]
            rest = float(((columns[:, chosen] @ part - values) ** 2).sum())
            if (part >= 0).all() and rest < least:
                best, least = np.zeros(columns.shape[1]), rest
                best[chosen] = part
    return best


def log_slope(few: tuple[int, float], many: tuple[int, float]) -> float:
    """The exponent p of time ~ n^p through two points (n, seconds): 1 is linear, 2 is quadratic."""
    return math.log(many[1] / few[1]) / math.log(many[0] / few[0])


def running_totals(seconds: Mapping[int, float], last: int) -> Sequence[float]:
    """Seconds for the first n tokens, n = 1 … last; a token without a time of its own has one on the straight line
    between its neighbours.

    Args:
        seconds: of the k-th token, by k; of the first and of `last` they are known.
    """
    assert {1, last} <= seconds.keys(), "the first and the last token have times"
    known = sorted(seconds)
    each = np.interp(np.arange(1, last + 1), known, [seconds[token] for token in known])
    totals: list[float] = np.cumsum(each).tolist()
    return totals
