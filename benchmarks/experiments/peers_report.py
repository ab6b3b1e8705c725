"""What `peers` measured, what was aimed at, and both as tables. It measures nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from pageframe.benchmarks.experiments.offline_throughput import Work
from pageframe.benchmarks.experiments.peers_engines import LLAMA, OURS, VLLM
from pageframe.benchmarks.experiments.peers_http import Load, Served
from pageframe.benchmarks.experiments.peers_steps import StepCost
from pageframe.benchmarks.experiments.report import NOT_MEASURED

PEERS = (VLLM, LLAMA)


@dataclass(frozen=True, slots=True)
class Target:
    """How many times a peer's rate ours must be at least; None asks nothing."""

    vllm: float | None = None
    llama: float | None = None

    def __str__(self) -> str:
        parts = [f"{name} {factor:g}x" for name, factor in self.factors.items()]
        return ", ".join(parts) or "-"

    @property
    def factors(self) -> dict[str, float]:
        both = {VLLM: self.vllm, LLAMA: self.llama}
        return {name: factor for name, factor in both.items() if factor is not None}


#: The offline rows; an output of one token is prefill alone.
TARGETS = {
    Work(1, 32, 128): Target(vllm=4.0, llama=1.5),
    Work(8, 128, 128): Target(vllm=2.5),
    Work(32, 128, 128): Target(vllm=1.8),
    Work(32, 512, 128): Target(vllm=1.5),
    Work(8, 2048, 64): Target(vllm=1.35),
    Work(1, 2048, 1): Target(vllm=1.6),
}
#: Over HTTP, by streams: of the output rate. ITL's 99th percentile must be no worse than vLLM's.
HTTP_TARGETS = {8: Target(vllm=2.0), 32: Target(vllm=1.6)}


@dataclass(slots=True)
class Results:
    """All that was measured.

    Args:
        header: hardware, commit and versions, a line each.
        floors: seconds, by work.
        offline: seconds of each repeat, by work and engine.
        http: of each repeat, by load and engine.
        failures: engines that failed, and how.
        partial: Ctrl-C ended it.
    """

    header: list[str] = field(default_factory=list)
    floors: dict[Work, float] = field(default_factory=dict)
    offline: dict[Work, dict[str, list[float]]] = field(default_factory=dict)
    http: dict[Load, dict[str, list[Served]]] = field(default_factory=dict)
    steps: list[StepCost] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    partial: bool = False

    def rate(self, work: Work, engine: str) -> float | None:
        """Tokens per second by the median repeat: output tokens, or prompt tokens where there is one output token."""
        seconds = self.offline.get(work, {}).get(engine)
        return tokens_counted(work) / median(seconds) if seconds else None

    def served(self, load: Load, engine: str) -> Served | None:
        """Each figure's median over the repeats."""
        seen = self.http.get(load, {}).get(engine)
        if not seen:
            return None
        return Served(*(median(values) for values in zip(*(dataclasses.astuple(each) for each in seen), strict=True)))

    def verdicts(self) -> list[bool]:
        """Whether each target was met that could be measured."""
        rows = [verdict(TARGETS.get(work, Target()), self._rates(work)) for work in self.offline]
        return [met for met in rows + [self.served_verdict(load) for load in self.http] if met is not None]

    def served_verdict(self, load: Load) -> bool | None:
        """Whether rate and ITL are as they must be; None where nothing was asked, or it was not measured."""
        seen = {engine: self.served(load, engine) for engine in (OURS, *PEERS)}
        met = verdict(HTTP_TARGETS.get(load.streams, Target()), _of_each(seen, lambda served: served.output_rate))
        ours, vllm = seen[OURS], seen[VLLM]
        if met is None or ours is None or vllm is None:
            return None
        return met and ours.p99_gap <= vllm.p99_gap

    def _rates(self, work: Work) -> dict[str, float | None]:
        return {engine: self.rate(work, engine) for engine in (OURS, *PEERS)}

    def as_json(self) -> dict[str, Any]:
        return {
            "partial": self.partial,
            "header": self.header,
            "failures": self.failures,
            "offline": [
                {**dataclasses.asdict(work), "floor_seconds": self.floors.get(work), "seconds": seconds}
                for work, seconds in self.offline.items()
            ],
            "http": [
                {
                    **dataclasses.asdict(load),
                    "served": {name: [dataclasses.asdict(each) for each in seen] for name, seen in engines.items()},
                }
                for load, engines in self.http.items()
            ],
            "steps": [dataclasses.asdict(cost) for cost in self.steps],
        }


def tokens_counted(work: Work) -> int:
    return work.requests * work.prompt if work.output == 1 else work.output_tokens


def verdict(target: Target, rates: dict[str, float | None]) -> bool | None:
    """Whether our rate is as many times each peer's as it must be; None where that is not known."""
    ours = rates[OURS]
    asked = [(rates[name], factor) for name, factor in target.factors.items()]
    known = [(theirs, factor) for theirs, factor in asked if theirs is not None]
    if ours is None or not known:
        return None
    if any(ours < factor * theirs for theirs, factor in known):
        return False
    return True if len(known) == len(asked) else None


def _of_each(seen: dict[str, Served | None], figure: Callable[[Served], float]) -> dict[str, float | None]:
    return {name: None if served is None else figure(served) for name, served in seen.items()}


def print_report(console: Console, results: Results) -> None:
    for line in results.header:
        console.print(line, soft_wrap=True, highlight=False)
    for name in PEERS:
        if name not in _measured([*results.offline.values(), *results.http.values()]):
            console.print(f"{name}: {NOT_MEASURED}")
    if results.offline:
        console.print(_offline_table(results))
    if results.http:
        console.print(_http_table(results))
    if results.steps:
        console.print(_steps_table(results.steps))
    for failure in results.failures:
        console.print(failure, style="red", markup=False, soft_wrap=True)
    if results.partial:
        console.print("Interrupted: only what was measured until then.", style="yellow")


def _offline_table(results: Results) -> Table:
    names = _measured(results.offline.values())
    table = Table(title="offline, tokens/s: output tokens, or prompt tokens where prefill stands alone")
    _add_columns(table, "in + out, requests", "floor", *_compared_columns(names), "must", "met")
    for work in results.offline:
        rates = results._rates(work)
        seconds = results.offline[work].get(OURS)
        reached = results.floors[work] / median(seconds) if seconds and work in results.floors else None
        target = TARGETS.get(work, Target())
        label = f"{work.prompt} prefill, {work.requests}" if work.output == 1 else str(work)
        floor = f"{reached:.0%}" if reached is not None else "-"
        table.add_row(label, floor, *_compared(rates, names), str(target), _shown(verdict(target, rates)))
    return table


def _measured(rows: Iterable[Mapping[str, object]]) -> list[str]:
    """The peers that some row has a figure of."""
    return [name for name in PEERS if any(name in row for row in rows)]


def _compared_columns(names: Sequence[str]) -> list[str]:
    return [OURS, *(column for name in names for column in (name, "ratio"))]


def _compared(rates: Mapping[str, float | None], names: Sequence[str], digits: int = 1) -> list[str]:
    """Our figure, then each of these peers' and what ours is divided by it."""
    ours = rates[OURS]
    cells = [_figure(ours, digits)]
    for name in names:
        theirs = rates[name]
        cells += [_figure(theirs, digits), f"{ours / theirs:.2f}x" if ours is not None and theirs else "-"]
    return cells


def _http_table(results: Results) -> Table:
    names = _measured(results.http.values())
    table = Table(title="over HTTP, closed loop, one client for all")
    _add_columns(table, "in + out, streams", "", *_compared_columns(names), "must", "met")
    for load in results.http:
        seen = {engine: results.served(load, engine) for engine in (OURS, *PEERS)}
        target = HTTP_TARGETS.get(load.streams, Target())
        rates = _of_each(seen, lambda served: served.output_rate)
        met = _shown(results.served_verdict(load))
        table.add_row(str(load), "output tokens/s", *_compared(rates, names), str(target), met)
        first = _of_each(seen, lambda served: served.first_token * 1e3)
        table.add_row("", "median TTFT, ms", *_compared(first, names, 0), "-", "")
        gaps = _of_each(seen, lambda served: served.p99_gap * 1e3)
        no_worse = f"{VLLM} 1x or less" if target.vllm is not None else "-"
        table.add_row("", "p99 ITL, ms", *_compared(gaps, names), no_worse, "", end_section=True)
    return table


def _steps_table(steps: Sequence[StepCost]) -> Table:
    table = Table(title=f"a step of pure decode, {OURS}, medians: outside is what the kernels do not take")
    _add_columns(table, "requests", "context", "step, ms", "floor, ms", "of floor", "outside, ms", "outside")
    for cost in steps:
        table.add_row(
            str(cost.size.rows),
            f"{cost.size.context:,}",
            f"{cost.step * 1e3:.2f}",
            f"{cost.floor * 1e3:.2f}",
            f"{cost.floor / cost.step:.0%}",
            f"{cost.outside * 1e3:.2f}",
            f"{cost.outside / cost.step:.1%}",
        )
    return table


def _add_columns(table: Table, *names: str) -> None:
    for name in names:
        table.add_column(name, justify="right")


def _figure(value: float | None, digits: int) -> str:
    return NOT_MEASURED if value is None else f"{value:,.{digits}f}"


def _shown(met: bool | None) -> str:
    return {True: "yes", False: "no", None: "-"}[met]
