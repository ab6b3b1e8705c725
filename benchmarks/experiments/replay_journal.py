"""A recording replayed against pools of other sizes: what would more memory have found, or less have cost? No model.

    pageframe serve --journal FILE …
    python -m pageframe.benchmarks.experiments.replay_journal FILE [--blocks 1000 4000] [--host-slots 0 999]

The requests of a recording arrive again at their times, with prompts and outputs whose tokens are equal exactly where
the recorded digests are: the prefix cache finds what it would have found. The scheduler is the real one; a step takes
what a line through the recorded steps says of its number of tokens. The first row is what was recorded, the second the
same settings replayed: how far these two agree says how far to trust the others.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pageframe.benchmarks.experiments.grids import count
from pageframe.runtime.batch import Batch
from pageframe.runtime.config import ModelConfig, ResolvedConfig
from pageframe.runtime.engine import Engine
from pageframe.runtime.journal import ArriveEvent, FinishEvent, HitEvent, PreemptEvent, StepEvent
from pageframe.runtime.journal_file import JournalFileError, Recording, read_journal
from pageframe.runtime.philox import choice_seed
from pageframe.runtime.request import SamplingParams
from pageframe.runtime.step_plan import SamplingBatch, ScoredTokens, StepResult


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as it was recorded: `time` in seconds of the recorded clock, tokens that stand for the real ones."""

    request_id: str
    time: float
    priority: int
    prompt: list[int]
    output: list[int]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Tokens of requests when they first entered, those of them found computed, evictions and preemptions."""

    name: str
    lookup_tokens: int
    hit_tokens: int
    evicted: int
    preemptions: int
    seconds: float


def arrivals(recording: Recording) -> list[Arrival]:
    """The requests that arrived and ended in the recording, in order. Choices that shared a prompt come one by one."""
    ids: dict[Any, int] = {}
    ended = {event.request_id: event.num_output_tokens for event in recording.events if isinstance(event, FinishEvent)}
    found = []
    for event in recording.events:
        if not isinstance(event, ArriveEvent) or event.request_id not in ended:
            continue
        tokens: list[int] = []
        for _, part in recording.tokens.get(event.leader or event.request_id, [])[:1]:
            tokens += [ids.setdefault(token, len(ids)) for token in part]
        own = [part for start, part in recording.tokens.get(event.request_id, []) if start == event.num_prompt_tokens]
        output = [ids.setdefault(token, len(ids)) for token in (own[-1] if own else [])][: ended[event.request_id]]
        if len(tokens) == event.num_prompt_tokens and output:
            found.append(Arrival(event.request_id, event.time, event.priority, tokens, output))
    return found


class Scripted:
    """A model that computes nothing, and draws for each request the tokens that it drew before.

    Args:
        outputs: of the request whose seed is its place among them.
    """

    def __init__(self, outputs: Sequence[list[int]]) -> None:
        self._by_seed = {choice_seed(seed, 0): output for seed, output in enumerate(outputs)}

    def forward(self, batch: Batch) -> None:
        return None

    def synchronize(self) -> None:
        pass

    def sample(self, hidden: Any, batch: SamplingBatch) -> StepResult:
        drawn = zip(batch.seed.tolist(), batch.output_index.tolist(), strict=True)
        return StepResult(np.array([self._by_seed[seed][index] for seed, index in drawn], dtype=np.int32), {})

    def score(self, hidden: Any, scored: ScoredTokens) -> dict[int, Any]:
        raise AssertionError("nobody asks for logprobs of a prompt")


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def step_seconds(recording: Recording) -> Callable[[int], float]:
    """Seconds of a step by its number of tokens: the least-squares line through the recorded ones."""
    steps = [event for event in recording.events if isinstance(event, StepEvent) and event.num_requests]
    tokens = np.array([event.prefill_tokens + event.decode_tokens for event in steps], dtype=float)
    seconds = np.array([event.seconds for event in steps])
    if len(set(tokens.tolist())) < 2:
        mean = float(seconds.mean()) if len(steps) else 0.01
        return lambda num_tokens: mean
    slope, base = np.polyfit(tokens, seconds, 1)
    least = float(seconds.min())
    return lambda num_tokens: max(least, base + slope * num_tokens)


def replay(
    recording: Recording,
    requests: Sequence[Arrival],
    name: str,
    *,
    num_blocks: int,
    host_slots: int,
    advance: Callable[[], object] = lambda: None,
) -> Outcome:
    """Serve these requests again."""
    header, duration = recording.header, step_seconds(recording)
    model = Scripted([request.output for request in requests])
    clock = Clock(requests[0].time)
    engine = Engine(_resolved(header, num_blocks, host_slots), model, model, seed=0, clock=clock)
    waiting = list(reversed(list(enumerate(requests))))
    while waiting or engine.has_work:
        if not engine.has_work:
            clock.now = max(clock.now, waiting[-1][1].time)
        while waiting and waiting[-1][1].time <= clock.now:
            seed, request = waiting.pop()
            params = SamplingParams(max_tokens=len(request.output), ignore_eos=True, seed=seed)
            engine.add(request.request_id, request.prompt, params, priority=request.priority)
            advance()
        engine.step()
        clock.now += duration(engine.steps[-1].num_tokens) if engine.steps else 0.0
    scheduler = engine.scheduler
    return Outcome(
        name,
        scheduler.num_lookup_tokens,
        scheduler.num_hit_tokens,
        scheduler.blocks.num_evictions,
        scheduler.num_preemptions,
        clock.now - requests[0].time,
    )


def recorded(recording: Recording, requests: Sequence[Arrival]) -> Outcome:
    """What the recording says of the same requests."""
    ids = {request.request_id for request in requests}
    first_hits: dict[str, int] = {}
    for event in recording.events:
        if isinstance(event, HitEvent) and event.request_id in ids:
            first_hits.setdefault(event.request_id, event.num_tokens)
    ends = [event.time for event in recording.events if isinstance(event, FinishEvent) and event.request_id in ids]
    return Outcome(
        "as recorded",
        sum(len(request.prompt) for request in requests),
        sum(first_hits.values()),
        sum(event.evicted for event in recording.events if isinstance(event, StepEvent)),
        sum(isinstance(event, PreemptEvent) for event in recording.events),
        max(ends) - requests[0].time,
    )


class ReplayError(Exception):
    """This recording cannot be replayed so; the message is a line."""


def _number(header: dict[str, Any], name: str, least: int = 1) -> int:
    value = header.get(name)
    if type(value) is not int or not least <= value < 2**31:
        raise ReplayError(f"its first line says {name} is {value!r}: a replay needs a number")
    return value


def _number_or_none(header: dict[str, Any], name: str) -> int | None:
    return None if name in header and header[name] is None else _number(header, name)


def _resolved(header: dict[str, Any], num_blocks: int, host_slots: int) -> ResolvedConfig:
    """The recorded settings, but for the pool.

    Raises:
        ReplayError: there is none that can serve like the recorded one.
    """
    block_size, has_prefix_cache = _number(header, "block_size"), header.get("prefix_cache")
    if not isinstance(has_prefix_cache, bool):
        raise ReplayError(f"its first line says prefix_cache is {has_prefix_cache!r}: a replay needs true or false")
    if host_slots and not has_prefix_cache:
        raise ReplayError("the prefix cache was off: there is no host memory to be replayed")
    max_model_len = min(_number(header, "max_model_len"), num_blocks * block_size)
    slide_by = _number_or_none(header, "slide_by")
    if slide_by is not None and slide_by > max_model_len:
        raise ReplayError(f"contexts slid by {slide_by:,} tokens: {num_blocks:,} blocks of {block_size} hold fewer")
    window = _number_or_none(header, "window")
    return ResolvedConfig(
        model_name=str(header.get("model_name")),
        model=ModelConfig("none", 2**31 - 1, 8, 8, 1, 1, 1, 8, 1 << 30, 1e-5, windows=(window,)),
        dtype="float32",
        compute_dtype="float32",
        device="cpu",
        backend="reference",
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_num_requests=_number(header, "max_num_requests"),
        max_num_batched_tokens=_number(header, "max_num_batched_tokens"),
        mixed_token_budget=_number_or_none(header, "mixed_token_budget"),
        threads=1,
        kv_bytes_per_token=1,
        pool_bytes=block_size * num_blocks,
        prefix_cache=has_prefix_cache,
        host_slots=host_slots,
        slide_by=slide_by,
    )


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description="A recording replayed against pools of other sizes.")
    parser.add_argument("file", type=Path, help="a recording of `pageframe serve --journal FILE`")
    parser.add_argument(
        "--blocks", type=count, nargs="*", help="pool sizes (default: half, twice and four times its own)"
    )
    parser.add_argument("--host-slots", type=int, nargs="*", default=[0], help="blocks of host memory (default: 0)")
    options = parser.parse_args(arguments)
    try:
        recording = read_journal(options.file)
    except JournalFileError as error:
        print(f"replay_journal: {error}", file=sys.stderr)
        return 1
    for notice in recording.notices:
        print(f"replay_journal: {notice}", file=sys.stderr)
    requests = arrivals(recording)
    if not requests:
        print(f"replay_journal: {options.file} holds no request from its arrival to its end", file=sys.stderr)
        return 1
    try:
        outcomes = _replay_all(recording, requests, options.blocks, options.host_slots)
    except ReplayError as error:
        print(f"replay_journal: {options.file} cannot be replayed: {error}", file=sys.stderr)
        return 1
    show(outcomes, len(requests))
    return 0


def _replay_all(
    recording: Recording, requests: Sequence[Arrival], blocks: Sequence[int] | None, host_slots: Sequence[int]
) -> list[Outcome]:
    """What was recorded, the same replayed, and every pool asked for."""
    header = recording.header
    own = _number(header, "num_blocks")
    sizes = blocks or [max(own // 2, 1), own * 2, own * 4]
    pools = [(own, _number(header, "host_slots", least=0)), *((size, slots) for size in sizes for slots in host_slots)]
    configs = [_resolved(header, num_blocks, slots) for num_blocks, slots in pools]
    outcomes = [recorded(recording, requests)]
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("replaying", total=len(pools) * len(requests))
        for (num_blocks, slots), config in zip(pools, configs, strict=True):
            fitting = [request for request in requests if _fits(request, config)]
            name = f"{num_blocks:,} blocks" + (f", {slots:,} in host memory" if slots else "")
            name += f" ({len(requests) - len(fitting)} do not fit)" if len(fitting) < len(requests) else ""
            if fitting:
                outcomes.append(
                    replay(
                        recording,
                        fitting,
                        name,
                        num_blocks=num_blocks,
                        host_slots=slots,
                        advance=lambda: bar.advance(task),
                    )
                )
    return outcomes


def _fits(request: Arrival, config: ResolvedConfig) -> bool:
    if config.slide_by is not None:
        return len(request.prompt) < config.max_model_len
    return len(request.prompt) + len(request.output) <= config.max_model_len


def show(outcomes: Sequence[Outcome], num_requests: int) -> None:
    table = Table(title=f"{num_requests:,} requests")
    for column in ("pool", "tokens found", "of all", "evictions", "preemptions", "seconds"):
        table.add_column(column, justify="left" if column == "pool" else "right")
    for outcome in outcomes:
        table.add_row(
            outcome.name,
            f"{outcome.hit_tokens:,}",
            f"{outcome.hit_tokens / max(1, outcome.lookup_tokens):.1%}",
            f"{outcome.evicted:,}",
            f"{outcome.preemptions:,}",
            f"{outcome.seconds:.1f}",
        )
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
