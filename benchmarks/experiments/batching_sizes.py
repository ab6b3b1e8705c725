"""How much `pageframe bench batching` runs: the usual sizes, the quick ones, and what a model's context leaves of them.

Knows numbers; no engine, no flags.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pageframe.benchmarks.experiments.report import InputError
from pageframe.benchmarks.experiments.sessions import longest_drawn

BATCHING, CHUNKS, PREFIX, BLOCKS = PARTS = ("batching", "chunks", "prefix", "blocks")
BLOCK_SIZES = tuple(2**power for power in range(9))
QUICK_BLOCK_SIZES = (1, 16, 256)
#: Prompt tokens of a request that decodes while long prompts arrive.
RUNNER_PROMPT = 16
#: Sessions may grow to so many tokens where the model has them.
SESSION_ROOM = 2048
#: With fewer positions a part would have nothing left to show.
LEAST_POSITIONS = 24


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is run.

    Args:
        requests, max_len: of the trace: requests, and most tokens of each.
        batch: most requests at once.
        runners, runner_tokens: requests that decode while long prompts arrive, and the tokens of each.
        long_prompts, long_tokens: those prompts, and the tokens of each.
        chunk: the token budget of a step where prompts are computed in chunks.
        sessions, turns, system_tokens: of the conversations. No length is one of whole blocks, paging's best case.
        user_tokens, answer_tokens: around which the lengths of each turn are drawn.
        open_sessions: held at once.
        repeats: of each way, taking turns.
        budget: seconds for each part; what one leaves over goes to those behind it.
    """

    requests: int = 32
    max_len: int = 512
    batch: int = 8
    runners: int = 4
    runner_tokens: int = 96
    long_prompts: int = 4
    long_tokens: int = 1024
    chunk: int = 128
    sessions: int = 6
    turns: int = 4
    system_tokens: int = 277
    user_tokens: int = 48
    answer_tokens: int = 32
    open_sessions: int = 3
    block_sizes: tuple[int, ...] = BLOCK_SIZES
    repeats: int = 3
    budget: float = 125.0

    @property
    def chunk_requests(self) -> int:
        """Requests at once while long prompts arrive."""
        return self.runners + self.long_prompts

    @property
    def session_tokens(self) -> int:
        """Most tokens of a drawn session."""
        turn = longest_drawn(self.user_tokens) + longest_drawn(self.answer_tokens)
        return self.system_tokens + self.turns * turn


QUICK = Sizes(
    requests=6,
    max_len=48,
    batch=4,
    runners=2,
    runner_tokens=24,
    long_prompts=2,
    long_tokens=384,
    chunk=64,
    sessions=2,
    turns=3,
    system_tokens=101,
    user_tokens=16,
    answer_tokens=8,
    open_sessions=2,
    block_sizes=QUICK_BLOCK_SIZES,
    budget=11.0,
)


def flag_name(field: str) -> str:
    """Of the fields that have a flag."""
    return "num-sessions" if field == "sessions" else field.replace("_", "-")


def check_ranges(sizes: Sizes) -> None:
    """Raises: InputError: a number is out of its range, whatever the model."""
    limits = {
        "requests": (1, 100_000),
        "max_len": (2, 2**20),
        "batch": (1, 1024),
        "long_tokens": (2, 2**20),
        # A step has a token for each request that decodes.
        "chunk": (sizes.chunk_requests, 2**20),
        "sessions": (1, 10_000),
        "repeats": (1, 1000),
    }
    for field, (low, high) in limits.items():
        value = getattr(sizes, field)
        if not low <= value <= high:
            raise InputError(f"{flag_name(field)} is {value}; it must be from {low} to {high}")
    if not 0 < sizes.budget <= 86_400:
        raise InputError(f"budget is {sizes.budget:g}; it must be above 0 and at most 86400 seconds")


def fit_context(
    sizes: Sizes, asked: Collection[str], names: Collection[str], positions: int, *, drawn_sessions: bool
) -> tuple[Sizes, list[str]]:
    """What these parts run, made small enough for the model's context, and a line for each number that was changed.

    Args:
        asked: fields that were asked for: they are not changed.
        names: the parts that run; nothing else has to fit.
        drawn_sessions: the sessions are not read from a file.

    Raises:
        InputError: what was asked for does not fit, or the context is too short for anything.
    """
    if positions < LEAST_POSITIONS:
        raise InputError(f"the model has {positions} positions; it must have at least {LEAST_POSITIONS}")
    fitting: dict[str, Any] = {}
    if BATCHING in names:
        fitting["max_len"] = min(sizes.max_len, positions)
    if CHUNKS in names:
        fitting |= _fitting_chunks(sizes, asked, positions)
    if drawn_sessions and not {PREFIX, BLOCKS}.isdisjoint(names):
        fitting |= _fitting_session(sizes, positions)
    if BLOCKS in names:
        fitting["block_sizes"] = tuple(size for size in sizes.block_sizes if size <= positions)
    changed = {field: value for field, value in fitting.items() if value != getattr(sizes, field)}
    for field in changed.keys() & set(asked):
        raise InputError(
            f"{flag_name(field)} is {getattr(sizes, field)}; the model has {positions} positions, which leave room for "
            f"{changed[field]}"
        )
    return dataclasses.replace(sizes, **changed), _in_words(sizes, changed)


def _fitting_chunks(sizes: Sizes, asked: Collection[str], positions: int) -> Mapping[str, int]:
    long_tokens = min(sizes.long_tokens, positions - 1)  # one is for the answer
    fitting = {"long_tokens": long_tokens, "runner_tokens": min(sizes.runner_tokens, positions - RUNNER_PROMPT)}
    if long_tokens < sizes.long_tokens and "chunk" not in asked:  # a prompt must have several chunks
        fitting["chunk"] = min(sizes.chunk, max(sizes.chunk_requests, long_tokens // 4))
    return fitting


def _fitting_session(sizes: Sizes, positions: int) -> Mapping[str, int]:
    """All lengths of a session by one factor."""
    factor = min(1.0, positions / sizes.session_tokens)
    fields = ("system_tokens", "user_tokens", "answer_tokens")
    return {field: max(1, int(getattr(sizes, field) * factor)) for field in fields}


def _in_words(sizes: Sizes, changed: Mapping[str, Any]) -> list[str]:
    lines = []
    for field, value in changed.items():
        if field == "block_sizes":
            lines.append(f"block sizes end at {value[-1]}, not {sizes.block_sizes[-1]}")
        else:
            lines.append(f"{flag_name(field)} is {value}, not {getattr(sizes, field)}")
    return lines
