"""What was seen of one request: plain times and counts. It does not know how they were obtained or what they mean.

Times are seconds on the client's monotonic clock, with 0 at the start of the measured load.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Outcome(StrEnum):
    OK = "ok"
    FAILED = "failed"
    CANCELLED = "cancelled"  # by --cancel-rate, on purpose
    INTERRUPTED = "interrupted"  # by Ctrl-C


class CountedBy(StrEnum):
    """How the tokens of each chunk were counted, best first."""

    USAGE = "usage"  # every chunk carried a running usage.completion_tokens
    LOGPROBS = "logprobs"  # every chunk carried one logprob per token
    CHUNKS = "chunks"  # one token a chunk, and the final usage agrees or is not there
    SPREAD = "spread"  # the final usage says another total, spread evenly over the chunks


@dataclass(frozen=True, slots=True)
class Failure:
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """One event that carried content.

    Args:
        time_s: when its bytes were read.
        running_total: output tokens of the request up to here, where the event's own usage says so.
        logprob_tokens: tokens that the event's logprobs list, where it has them.
    """

    time_s: float
    running_total: int | None = None
    logprob_tokens: int | None = None


@dataclass(slots=True)
class RequestRecord:
    """One request, filled in while it runs.

    Args:
        index: its place in the load, from 0.
        intended_s: when the arrival process or the free place of the closed loop wanted it sent.
        sent_s: when the client did send it; None: never.
        chunks: the events with content, in order.
        end_s: last byte read; for a failure, a cancellation or an interruption, when that happened.
        prompt_tokens, output_tokens, cached_tokens: from the server's final usage; None where it sent none.
        known_prompt_tokens: the prompt's length as the server's /tokenize counted it before the load.
    """

    index: int
    intended_s: float
    sent_s: float | None = None
    chunks: list[Chunk] = field(default_factory=list)
    end_s: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    known_prompt_tokens: int | None = None
    finish_reason: str | None = None
    outcome: Outcome = Outcome.INTERRUPTED
    failure: Failure | None = None
