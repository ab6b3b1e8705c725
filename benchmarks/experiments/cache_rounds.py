"""How often each race of `pageframe bench kv-cache` is run: every cell once, quick ones several times, then all again
while there is time."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from pageframe.benchmarks.experiments.cache_memory import Kind
from pageframe.benchmarks.experiments.cache_race import Course, run_race
from pageframe.benchmarks.experiments.cache_results import Grid, Race
from pageframe.benchmarks.experiments.cache_ways import Tokens, Way

#: A cell that takes less is run so often before anything long is begun,
QUICK_SECONDS, QUICK_RUNS = 2.0, 3
#: unless that would take a large part of what its way has for the race: then the longest would not be reached.
QUICK_SHARE = 1 / 12
WARM_UP_TOKENS = 2


class Rounds:
    """Races between ways, each way within its time budget.

    Args:
        prompts: [most requests, prompt_len].
        tolerance: two best logits this close are a tie.
        advance: called after each race of a round.
    """

    def __init__(
        self,
        ways: Mapping[Kind, Way],
        prompts: Tokens,
        grid: Grid,
        tolerance: float,
        advance: Callable[[], object],
    ) -> None:
        self._ways = ways
        self._prompts = prompts
        self._grid = grid
        self._tolerance = tolerance
        self._advance = advance
        self._lot = random.Random(0)

    def run(self, races: Sequence[Race]) -> None:
        """Fill the races' laps. What a way has left it shares out evenly among the races still to come in a round.

        Raises:
            EngineError: a forward pass failed.
        """
        longest = self._grid.new_tokens[-1]
        for round_number in range(self._grid.repeats):
            for index, race in enumerate(races):
                share = {}
                for kind in self._ways:
                    spent = sum(other.laps[kind].spent for other in races)
                    share[kind] = race.laps[kind].spent + (self._grid.budget - spent) / (len(races) - index)
                if round_number == 0:
                    self._warm_up(race)
                    self._repeat_quick_cells(race, share)
                if any(race.laps[kind].runs(longest) < self._grid.repeats for kind in self._ways):
                    self._run(race, self._ways, longest, share)
                self._advance()

    def _warm_up(self, race: Race) -> None:
        unlimited = dict.fromkeys(self._ways, float("inf"))
        length = min(WARM_UP_TOKENS, self._grid.new_tokens[-1])
        self._run(Race(race.num_requests), self._ways, length, unlimited)

    def _repeat_quick_cells(self, race: Race, share: Mapping[Kind, float]) -> None:
        for length in self._grid.new_tokens:
            for _ in range(min(QUICK_RUNS, self._grid.repeats)):
                quick = {
                    kind: way
                    for kind, way in self._ways.items()
                    if race.laps[kind].expected(length) < min(QUICK_SECONDS, share[kind] * QUICK_SHARE)
                }
                self._run(race, quick, length, share)

    def _run(self, race: Race, ways: Mapping[Kind, Way], length: int, share: Mapping[Kind, float]) -> None:
        course = Course(
            self._prompts[: race.num_requests],
            length,
            self._grid.new_tokens,
            not self._grid.all_tokens,
            self._tolerance,
        )
        run_race(ways, course, race.laps, share, self._lot, lambda: None)
