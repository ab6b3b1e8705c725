"""Several ways make the same tokens, taking turns token by token, each until its time is spent.

A busy moment of the machine thus falls on all of them, and whose turn is first is drawn by lot, so that none always
follows the same other one. Knows ways, tokens and seconds; no models, no tables.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pageframe.benchmarks.experiments.cache_memory import Kind
from pageframe.benchmarks.experiments.cache_results import Lap
from pageframe.benchmarks.experiments.cache_ways import Tokens, Way

#: Whose tokens the others are compared with: the first of these that is still running.
LEADERS = (Kind.PAGED, Kind.RESERVED, Kind.GROWN)
#: A way that keeps nothing is asked for each of the first tokens, and past them at so many lengths to a doubling.
DENSE_TOKENS = 8
SAMPLES_PER_DOUBLING = 4


@dataclass(frozen=True, slots=True)
class Course:
    """What is to be run.

    Args:
        prompts: [num_requests, prompt_len].
        num_new: tokens to make for each request.
        checkpoints: numbers of new tokens at which memory is looked at.
        sampled: a way that keeps nothing makes only some of the tokens (see DENSE_TOKENS) and the checkpoints, behind
            the others' tokens: its steps do not need one another, and each is as long as all that went before.
        tolerance: two best logits this close are a tie.
    """

    prompts: Tokens
    num_new: int
    checkpoints: tuple[int, ...]
    sampled: bool
    tolerance: float

    def asks(self, way: Way, token: int) -> bool:
        if way.keeps or not self.sampled or token in self.checkpoints or token in (1, self.num_new):
            return True
        place = SAMPLES_PER_DOUBLING * math.log2(token)
        return token <= DENSE_TOKENS or token == round(2 ** (round(place) / SAMPLES_PER_DOUBLING))


def run_race(
    ways: Mapping[Kind, Way],
    course: Course,
    laps: Mapping[Kind, Lap],
    allowances: Mapping[Kind, float],
    lot: random.Random,
    advance: Callable[[], object],
) -> None:
    """Run the course; `laps` has what was measured until now, also when this is interrupted.

    Args:
        allowances: seconds that each way may have spent in all; it stops where the next token would take it past them.
        lot: draws the order of the ways anew for each token.
        advance: called after each token.

    Raises:
        EngineError: a forward pass failed.
    """
    race = _Race(ways, course, laps, lot)
    try:
        for kind, way in ways.items():
            if laps[kind].spent < allowances[kind]:
                way.start(course.prompts, course.num_new)
                race.running.append(kind)
        for token in range(1, course.num_new + 1):
            race.turn(token, allowances)
            advance()
            if not race.leader():
                break
    finally:
        for kind in race.running:
            ways[kind].end()


class _Race:
    def __init__(self, ways: Mapping[Kind, Way], course: Course, laps: Mapping[Kind, Lap], lot: random.Random) -> None:
        self.running: list[Kind] = []
        self._ways = ways
        self._course = course
        self._laps = laps
        self._lot = lot
        num_requests, self._prompt_len = course.prompts.shape
        room = np.zeros((num_requests, course.num_new), dtype=np.int64)
        self._tokens = {kind: np.concatenate((course.prompts, room), axis=1) for kind in ways}

    def leader(self) -> Kind | None:
        """Whose tokens count; None where nobody is left who makes every token."""
        return next((kind for kind in LEADERS if kind in self.running), None)

    def turn(self, token: int, allowances: Mapping[Kind, float]) -> None:
        """Every way that is to makes its `token`-th token, in random order."""
        leader = self.leader()
        end = self._prompt_len + token - 1
        made: list[Kind] = []
        for kind in self._lot.sample(self.running, len(self.running)):
            way, lap = self._ways[kind], self._laps[kind]
            if not self._course.asks(way, token):
                continue
            if lap.spent + _last_seconds(lap, token) > allowances[kind]:
                self.running.remove(kind)
                way.end()
                continue
            if not way.keeps and leader:
                self._tokens[kind][:, :end] = self._tokens[leader][:, :end]
            started = time.perf_counter()
            new = way.step(self._tokens[kind][:, :end])
            seconds = time.perf_counter() - started
            self._tokens[kind][:, end] = new
            lap.seconds.setdefault(token, []).append(seconds)
            lap.spent += seconds
            made.append(kind)
        self._compare(made, end)
        if token in self._course.checkpoints:
            for kind in made:
                self._laps[kind].held[token] = self._ways[kind].held()

    def _compare(self, made: Sequence[Kind], end: int) -> None:
        leader = next((kind for kind in LEADERS if kind in made), None)
        if leader is None:
            return
        theirs = self._tokens[leader]
        for kind in made:
            if kind is leader:
                continue
            ours, lap = self._tokens[kind], self._laps[kind]
            comparable = (ours[:, :end] == theirs[:, :end]).all(axis=1)
            lap.compared += int(comparable.sum())
            for request in np.flatnonzero(comparable & (ours[:, end] != theirs[:, end])).tolist():
                gap = self._ways[kind].logit_gap(request, int(theirs[request, end]))
                lap.parted[gap.parting(self._course.tolerance)] += 1


def _last_seconds(lap: Lap, token: int) -> float:
    """What the token before took, or the one last asked for: about what this one will take."""
    earlier = next((known for known in range(token, 0, -1) if known in lap.seconds), None)
    return 0.0 if earlier is None else lap.seconds[earlier][-1]
