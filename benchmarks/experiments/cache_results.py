"""What `pageframe bench kv-cache` measured, and what follows from it by arithmetic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from pageframe.benchmarks.experiments.cache_memory import Held, Kind, KvShape
from pageframe.benchmarks.experiments.growth import Growth, fit_growth, log_slope, running_totals
from pageframe.benchmarks.experiments.ties import Parting


@dataclass(frozen=True, slots=True)
class Grid:
    """What is asked for, checked.

    Args:
        new_tokens, requests: ascending.
        max_len: tokens per request that the cache reserved whole has room for.
        budget: seconds for each way.
        all_tokens: without a cache too; see `cache_race.Course.sampled`.
        repeats: most runs of the longest; fewer where the time is up.
        notes: sentences on what the model has no room for.
    """

    new_tokens: tuple[int, ...]
    requests: tuple[int, ...]
    prompt_len: int
    max_len: int
    budget: float
    all_tokens: bool
    repeats: int
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class Lap:
    """What one way did with one number of requests.

    Args:
        seconds: by token from 1, one for each run.
        held: memory as the tensors have it, by number of new tokens.
        compared: tokens that had another way's token to be compared with, all tokens before being equal.
        parted: of these, other tokens, by what that means.
        spent: seconds in all.
    """

    seconds: dict[int, list[float]] = field(default_factory=dict)
    held: dict[int, Held] = field(default_factory=dict)
    compared: int = 0
    parted: Counter[Parting] = field(default_factory=Counter)
    spent: float = 0.0

    @property
    def last(self) -> int:
        """The last token that was timed, 0 for none."""
        return max(self.seconds, default=0)

    def medians(self) -> dict[int, float]:
        """Seconds of each token that was timed, by token."""
        return {token: median(times) for token, times in sorted(self.seconds.items())}

    def totals(self) -> Sequence[float]:
        """Seconds for the first n tokens, n from 1 to the last one."""
        return running_totals(self.medians(), self.last) if self.seconds else ()

    def total(self, num_new: int) -> float | None:
        """Seconds for `num_new` tokens of each request, the prompt included; None where it was not measured."""
        return self.totals()[num_new - 1] if self.last >= num_new else None

    def runs(self, num_new: int) -> int:
        """How many runs came to the `num_new`-th token; each of them timed the tokens before it too."""
        return len(self.seconds.get(num_new, ()))

    def expected(self, num_new: int) -> float:
        """The total for `num_new` tokens, or at least what it must be about if each takes as long as those known."""
        known = self.total(num_new)
        if known is not None:
            return known
        return self.totals()[-1] * num_new / self.last if self.seconds else 0.0

    def is_whole(self, num_new: int) -> bool:
        """Whether each of the first `num_new` tokens has a time of its own."""
        return all(token in self.seconds for token in range(1, num_new + 1))


@dataclass(slots=True)
class Race:
    """All ways with one number of requests."""

    num_requests: int
    laps: dict[Kind, Lap] = field(default_factory=lambda: {kind: Lap() for kind in Kind})

    def speed_up(self, kind: Kind, num_new: int) -> float | None:
        """How many times as fast as without a cache."""
        without, this = self.laps[Kind.NOTHING].total(num_new), self.laps[kind].total(num_new)
        return None if without is None or this is None else without / this


@dataclass(slots=True)
class Results:
    """Everything the report needs.

    Args:
        new_tokens: ascending.
        memory: bytes of which is asked how many requests they hold.
        races: by number of requests, ascending.
        tolerance: two best logits this close are a tie.
        same_bits: the arithmetic gives the same bits in all ways.
        notes: sentences on what the model has no room for.
    """

    prompt_len: int
    new_tokens: tuple[int, ...]
    memory: int
    shape: KvShape
    races: list[Race]
    tolerance: float = 0.0
    same_bits: bool = False
    notes: tuple[str, ...] = ()
    machine: str = ""

    @property
    def measured(self) -> bool:
        """Whether anything was."""
        return any(lap.seconds for race in self.races for lap in race.laps.values())

    @property
    def num_compared(self) -> int:
        """Tokens that were compared with another way's."""
        return sum(lap.compared for race in self.races for lap in race.laps.values())

    def num_parted(self, parting: Parting) -> int:
        """Tokens in which a way differs from another one, and that means this."""
        return sum(lap.parted[parting] for race in self.races for lap in race.laps.values())

    def growth(self, lap: Lap, kind: Kind) -> Growth | None:
        """The fit through all tokens of a lap; None where they are too few."""
        order = 3 if kind is Kind.NOTHING else 2
        times = lap.medians()
        return fit_growth(times, order) if len(times) > order else None

    def slope(self, lap: Lap) -> float | None:
        """The exponent of the total time between the last two numbers of new tokens; None where not measured."""
        if len(self.new_tokens) < 2:
            return None
        few, many = self.new_tokens[-2:]
        few_total, many_total = lap.total(few), lap.total(many)
        if few_total is None or many_total is None:
            return None
        return log_slope((few, few_total), (many, many_total))

    def held(self, kind: Kind, race: Race, num_new: int) -> Held:
        """K/V memory by formula. Where tensors were looked at, they must agree.

        Raises:
            AssertionError: they do not.
        """
        formula = self.shape.held(kind, race.num_requests, self.prompt_len, num_new)
        real = race.laps[kind].held.get(num_new)
        assert real is None or real == formula, f"{kind}, {num_new} tokens: tensors hold {real}, the formula {formula}"
        return formula

    def fits(self, kind: Kind, num_new: int) -> int | None:
        """Requests that `memory` holds; None where K and V set no limit."""
        return self.shape.requests_that_fit(kind, self.memory, self.prompt_len, num_new)

    def as_json(self) -> dict[str, Any]:
        return {
            "hardware": self.machine,
            "prompt_len": self.prompt_len,
            "new_tokens": self.new_tokens,
            "memory": self.memory,
            "notes": self.notes,
            "tie_tolerance": self.tolerance,
            "same_bits": self.same_bits,
            "kv": asdict(self.shape),
            "races": [
                {"requests": race.num_requests, "ways": {kind.value: self._lap(race, kind) for kind in Kind}}
                for race in self.races
            ],
        }

    def _lap(self, race: Race, kind: Kind) -> dict[str, Any]:
        lap = race.laps[kind]
        growth = self.growth(lap, kind)
        return {
            "seconds_of_token": lap.seconds,
            "total_seconds": {num_new: lap.total(num_new) for num_new in self.new_tokens},
            "runs": {num_new: lap.runs(num_new) for num_new in self.new_tokens},
            "growth": None if growth is None else asdict(growth),
            "slope": self.slope(lap),
            "bytes": {num_new: asdict(self.held(kind, race, num_new)) for num_new in self.new_tokens},
            "bytes_of_tensors": {num_new: asdict(held) for num_new, held in lap.held.items()},
            "requests_that_fit": {num_new: self.fits(kind, num_new) for num_new in self.new_tokens},
            "tokens": {"compared": lap.compared, **{parting.value: lap.parted[parting] for parting in Parting}},
        }
