"""What requests have just been waiting for: percentiles of the last minute. Knows nothing of HTTP."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

WINDOW_SECONDS = 60.0
#: The newest of a kind that are kept; a server gives some thousands of tokens a second.
MAX_KEPT = 8_192
PERCENTS = (50, 95, 99)
#: Percentiles are made anew at most so often: they sort what is kept.
FRESH_SECONDS = 1.0


class RecentTimes:
    """The times of one kind that were seen in the last minute, the newest MAX_KEPT of them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, float, int]] = deque(maxlen=MAX_KEPT)

    def add(self, seconds: float, count: int = 1) -> None:
        """`count` of them were seen now, of so many seconds each."""
        self._seen.append((self._clock(), seconds, count))

    def summary(self) -> dict[str, float | None]:
        """{"count", "p50", "p95", "p99"}: nearest-rank percentiles in seconds, None where nothing was seen."""
        since = self._clock() - WINDOW_SECONDS
        while self._seen and self._seen[0][0] < since:
            self._seen.popleft()
        values = sorted((seconds, count) for _, seconds, count in self._seen)
        total = sum(count for _, count in values)
        summary: dict[str, float | None] = {"count": total}
        for percent in PERCENTS:
            summary[f"p{percent}"] = _at_rank(values, math.ceil(total * percent / 100)) if total else None
        return summary


def _at_rank(values: list[tuple[float, int]], rank: int) -> float:
    """The `rank`-th smallest, from 1 on, of values with their counts in rising order."""
    for seconds, count in values:
        rank -= count
        if rank <= 0:
            return seconds
    raise AssertionError("a rank beyond all values")


class RecentLatencies:
    """First tokens, gaps between tokens and whole requests of the last minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.first_token, self.between_tokens, self.requests = (RecentTimes(clock) for _ in range(3))
        self._made_at = -math.inf
        self._summary: dict[str, Any] = {}

    def summary(self) -> dict[str, Any]:
        """{"ttft", "itl", "e2e"}, each as RecentTimes.summary; at most a second old."""
        if self._clock() - self._made_at >= FRESH_SECONDS:
            self._made_at = self._clock()
            self._summary = {
                "ttft": self.first_token.summary(),
                "itl": self.between_tokens.summary(),
                "e2e": self.requests.summary(),
            }
        return self._summary
