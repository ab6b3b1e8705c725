"""The command that asks for /health beside large bodies: what it posts, and how it judges."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from pageframe.benchmarks.experiments.health_under_load import Answers, Body, bodies, report

BODY = Body("kind", "/tokenize", b"x" * 1_000_000)


def test_bodies_are_of_the_size_asked_for_and_nearly_all_json() -> None:
    kinds = bodies(100_000)
    assert all(60_000 < len(body.data) <= 100_000 for body in kinds)
    readable = 0
    for body in kinds:
        try:
            json.loads(body.data)
        except (ValueError, RecursionError):
            continue
        readable += 1
    assert readable == len(kinds) - 2


@pytest.mark.parametrize(("slow", "is_kept"), [(0, True), (1, True), (3, False)])
def test_one_slow_answer_in_a_hundred_is_allowed(slow: int, is_kept: bool, capsys: pytest.CaptureFixture[str]) -> None:
    answers = Answers([1.0] * (200 - slow) + [500.0] * slow, Counter({200: 3, 0: 1}))
    assert report([(BODY, answers)]) is is_kept
    told = capsys.readouterr().out
    assert "1 x closed, 3 x 200" in told
    assert "1.0" in told
