"""When requests are meant to be sent in an open loop. It knows neither the server nor the clock."""

from __future__ import annotations

import itertools
import math
import random


def arrival_times(num_requests: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Intended send times of an open loop, in seconds from the start of the load, ascending.

    The gaps are independent draws from a gamma distribution of shape `burstiness` and mean `1 / rate`: shape 1 is
    the exponential distribution, so the arrivals are a Poisson process; below 1 they are burstier; an infinite
    shape gives constant gaps. The times are not rescaled to fit a length: the rate that a finite run offers varies
    as that of a real process does.

    Args:
        rate: requests per second, above 0.
        burstiness: the shape, above 0, `math.inf` allowed.
    """
    if math.isinf(burstiness):
        return [(i + 1) / rate for i in range(num_requests)]
    draw = random.Random(f"arrivals {seed}")
    scale = 1.0 / (rate * burstiness)
    return list(itertools.accumulate(draw.gammavariate(burstiness, scale) for _ in range(num_requests)))
