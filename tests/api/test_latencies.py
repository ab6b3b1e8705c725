"""Percentiles of the last minute, against a sorted list."""

from __future__ import annotations

import math
import random

from pageframe.api.latencies import FRESH_SECONDS, MAX_KEPT, WINDOW_SECONDS, RecentLatencies, RecentTimes


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_percentiles_are_those_of_all_values_by_nearest_rank() -> None:
    rng, times, values = random.Random(1), RecentTimes(Clock()), []
    for _ in range(200):
        seconds, count = rng.random(), rng.randint(1, 4)
        times.add(seconds, count)
        values += [seconds] * count
    values.sort()
    ranks = {f"p{percent}": values[math.ceil(len(values) * percent / 100) - 1] for percent in (50, 95, 99)}
    assert times.summary() == {"count": len(values), **ranks}


def test_one_value_is_every_percentile_and_none_is_none() -> None:
    times = RecentTimes(Clock())
    assert times.summary() == {"count": 0, "p50": None, "p95": None, "p99": None}
    times.add(0.25)
    assert times.summary() == {"count": 1, "p50": 0.25, "p95": 0.25, "p99": 0.25}


def test_what_is_older_than_a_minute_counts_no_more() -> None:
    clock = Clock()
    times = RecentTimes(clock)
    times.add(9.0)
    clock.now += WINDOW_SECONDS - 1
    times.add(1.0)
    assert times.summary()["count"] == 2
    clock.now += 2
    assert times.summary() == {"count": 1, "p50": 1.0, "p95": 1.0, "p99": 1.0}


def test_what_is_kept_is_bounded() -> None:
    times = RecentTimes(Clock())
    for _ in range(MAX_KEPT + 10):
        times.add(1.0)
    assert times.summary()["count"] == MAX_KEPT


def test_a_summary_is_made_anew_after_a_second() -> None:
    clock = Clock()
    latencies = RecentLatencies(clock)
    assert latencies.summary()["ttft"]["count"] == 0
    latencies.first_token.add(0.5)
    assert latencies.summary()["ttft"]["count"] == 0
    clock.now += FRESH_SECONDS
    assert latencies.summary()["ttft"] == {"count": 1, "p50": 0.5, "p95": 0.5, "p99": 0.5}
