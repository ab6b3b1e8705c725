"""What `small_gpt` has measured: seconds and tokens of each way, and what they say together."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from pageframe.benchmarks.experiments.small_gpt_ways import Cached, Recomputed

TARGET_RATIO = 4.0
OUT_OF_TIME, INTERRUPTED, FAILED = "out of time", "interrupted", "a step failed"


@dataclass(slots=True)
class Run:
    """One turn of a way: its tokens, and the seconds that each took."""

    token_ids: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Output tokens [start, end), and what they are called."""

    name: str
    start: int
    end: int


@dataclass(slots=True)
class Results:
    """What was measured.

    Args:
        runs: by way; a run that was cut short has fewer tokens than `count`.
        stopped: why runs were cut short.
    """

    context: int
    num_prompt_tokens: int
    count: int
    seed: int
    runs: dict[str, list[Run]]
    stopped: str = OUT_OF_TIME

    @property
    def room(self) -> int:
        """Output tokens until the context is full."""
        return self.context - self.num_prompt_tokens

    def stretches(self) -> list[Stretch]:
        """Until the context is full; as many tokens as the context has; past it."""
        found = [
            Stretch(f"1-{self.room}, filling up", 0, self.room),
            self.whole_context,
            Stretch(f"{self.room + 1}-{self.count}, sliding", self.room, self.count),
        ]
        return [stretch for stretch in found if stretch.start < stretch.end <= self.count]

    @property
    def whole_context(self) -> Stretch:
        """What the target is set for."""
        return Stretch(f"1-{self.context}", 0, self.context)

    def whole_runs(self, way: str, stretch: Stretch) -> list[Run]:
        """Those that reached the stretch's end."""
        return [run for run in self.runs[way] if len(run.seconds) >= stretch.end]

    def seconds(self, way: str, stretch: Stretch) -> float | None:
        """Median over the runs that reached the stretch's end; None where none did."""
        whole = self.whole_runs(way, stretch)
        if not whole:
            return None
        return statistics.median(sum(run.seconds[stretch.start : stretch.end]) for run in whole)

    def ratio(self, stretch: Stretch) -> float | None:
        """How many times as long the recomputed way takes."""
        cached, recomputed = (self.seconds(way, stretch) for way in (Cached.name, Recomputed.name))
        return None if cached is None or recomputed is None else recomputed / cached

    def longest(self) -> Run:
        """The run with most tokens; an empty one where there is none."""
        runs = (run for runs in self.runs.values() for run in runs)
        return max(runs, key=lambda run: len(run.token_ids), default=Run())

    def first_difference(self) -> int | None:
        """The first output token that differs between any two runs, as far as both go."""
        longest = self.longest().token_ids
        differing = (
            index
            for runs in self.runs.values()
            for run in runs
            for index, token_id in enumerate(run.token_ids)
            if token_id != longest[index]
        )
        return min(differing, default=None)

    def shortest_way(self) -> tuple[str, int]:
        """The way whose longest run has the fewest tokens, and how many."""
        reached = {way: max((len(run.token_ids) for run in runs), default=0) for way, runs in self.runs.items()}
        way = min(reached, key=reached.__getitem__)
        return way, reached[way]

    def misses(self) -> list[str]:
        """What should hold and does not, or was to be shown and is not; nothing where all is as it should be."""
        found = []
        difference = self.first_difference()
        if difference is not None:
            found.append(f"the texts differ from output token {difference} on")
        way, reached = self.shortest_way()
        if reached < self.count:
            found.append(f"{way} got to {reached} of {self.count} tokens only ({self.stopped}): no more is compared")
        ratio = self.ratio(self.whole_context)
        if ratio is None and self.count >= self.context:
            found.append(f"the target of {TARGET_RATIO:.0f} times is not checked ({self.stopped})")
        if ratio is not None and ratio < TARGET_RATIO:
            found.append(
                f"with the cache {self.context} tokens are {ratio:.1f} times as fast; the target is at least "
                f"{TARGET_RATIO:.0f} times"
            )
        return found

    def unasked(self) -> list[str]:
        """What so few tokens can't show."""
        found = []
        if self.count < self.context:
            found.append(f"The target is for {self.context} output tokens: not checked with {self.count}.")
        if self.count <= self.room:
            found.append(f"The context is full after {self.room} output tokens: sliding is not checked.")
        return found
