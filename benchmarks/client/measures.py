"""The measures of one request and their formulas: pure functions of recorded times.

It does no input or output and reads no clock. Every latency starts at the *intended* send time, so a request that
waited in the client counts its wait.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pageframe.benchmarks.client.record import Chunk, CountedBy, Outcome, RequestRecord

TTFT_FORMULA = "first token's content - intended send"
TPOT_FORMULA = "(E2E - TTFT) / (tokens - 1); none for one token"
ITL_FORMULA = "gap before a chunk of k tokens / k, counted k times"
E2E_FORMULA = "last byte - intended send"
LATENESS_FORMULA = "actual send - intended send"
PERCENTILE_DEFINITION = "linear interpolation between closest ranks: value at rank (n - 1) * q / 100, ranks from 0"


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and percentiles of `count` values; all of one unit."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float] | NDArray[np.float64]) -> Distribution | None:
        """None for no values. Percentiles by PERCENTILE_DEFINITION."""
        if len(values) == 0:
            return None
        array = np.asarray(values, dtype=np.float64)
        p50, p90, p99 = np.percentile(array, [50, 90, 99], method="linear")
        return cls(len(array), float(array.mean()), float(p50), float(p90), float(p99))


@dataclass(frozen=True, slots=True)
class Latencies:
    """The measures of one finished request, in seconds; None where the request does not define one."""

    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float
    itls_s: list[float]


def spread(total: int, num_chunks: int) -> list[int]:
    """`total` tokens over `num_chunks` chunks as evenly as whole numbers allow.

    The first chunk gets at least one. What is over goes to the later chunks: a server that counts an end token
    it does not show has one token more than chunks, and it came last.
    """
    if total >= num_chunks:
        ends = [total * i // num_chunks for i in range(num_chunks + 1)]
    else:
        ends = [-(-total * i // num_chunks) for i in range(num_chunks + 1)]
    return [end - start for start, end in itertools.pairwise(ends)]


def chunk_tokens(chunks: Sequence[Chunk], usage_total: int | None) -> tuple[list[int], CountedBy]:
    """How many tokens each chunk carried, and how that is known.

    A running usage in every chunk is exact; so are logprobs in every chunk. Otherwise a chunk counts as one token,
    and where the final usage disagrees, its total is spread over the chunks.
    """
    totals = [chunk.running_total for chunk in chunks if chunk.running_total is not None]
    if len(totals) == len(chunks) and chunks:
        # a total never falls; one that does not rise belongs to a chunk that shares its token with the one before
        tokens = [max(0, total - before) for before, total in itertools.pairwise([0, *totals])]
        if tokens[0] > 0:
            return tokens, CountedBy.USAGE
    logprobs = [chunk.logprob_tokens for chunk in chunks if chunk.logprob_tokens is not None]
    if len(logprobs) == len(chunks) and chunks and logprobs[0] > 0:
        return logprobs, CountedBy.LOGPROBS
    if usage_total and chunks and usage_total != len(chunks):
        return spread(usage_total, len(chunks)), CountedBy.SPREAD
    return [1] * len(chunks), CountedBy.CHUNKS


def output_tokens(record: RequestRecord) -> int:
    """Output tokens of a request: the final usage's, or those counted in its chunks where it has none."""
    if record.output_tokens is not None and (record.output_tokens > 0 or not record.chunks):
        return record.output_tokens
    return sum(chunk_tokens(record.chunks, None)[0])


def prompt_tokens(record: RequestRecord) -> int | None:
    """Prompt tokens of a request: the final usage's, or what /tokenize counted, or unknown."""
    return record.prompt_tokens if record.prompt_tokens is not None else record.known_prompt_tokens


def inter_token_gaps(times_s: Sequence[float], tokens: Sequence[int]) -> list[float]:
    """One gap per token after the first arrival, in seconds.

    Chunks read at the same instant arrived together and count as one of their tokens' sum. An arrival of k tokens,
    g seconds after the arrival before it, gives k gaps of g / k. An arrival of no token lengthens the next gap.
    """
    gaps: list[float] = []
    previous: float | None = None
    pairs = zip(times_s, tokens, strict=True)
    for time_s, together in itertools.groupby(pairs, key=lambda pair: pair[0]):
        count = sum(tokens for _, tokens in together)
        if count == 0:
            continue
        if previous is not None:
            gaps.extend([(time_s - previous) / count] * count)
        previous = time_s
    return gaps


def latencies(record: RequestRecord) -> Latencies:
    """The measures of a request that finished (its `end_s` is set)."""
    assert record.end_s is not None, "an unfinished request has no latencies"
    e2e_s = record.end_s - record.intended_s
    if not record.chunks:
        return Latencies(None, None, e2e_s, [])
    ttft_s = record.chunks[0].time_s - record.intended_s
    total = output_tokens(record)
    tpot_s = (e2e_s - ttft_s) / (total - 1) if total > 1 else None
    tokens, _ = chunk_tokens(record.chunks, record.output_tokens)
    gaps = inter_token_gaps([chunk.time_s for chunk in record.chunks], tokens)
    return Latencies(ttft_s, tpot_s, e2e_s, gaps)


def peak_concurrency(records: Iterable[RequestRecord]) -> int:
    """The most requests in flight at once, each from its actual send to its end. An end frees its place first."""
    edges: list[tuple[float, int]] = []
    for record in records:
        if record.sent_s is not None and record.end_s is not None:
            edges += [(record.sent_s, +1), (record.end_s, -1)]
    return max(itertools.accumulate(change for _, change in sorted(edges)), default=0)


@dataclass(frozen=True, slots=True)
class Objectives:
    """The limits of goodput, in seconds; None: no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    itl_s: float | None = None
    e2e_s: float | None = None

    def met_by(self, record: RequestRecord) -> bool:
        """Whether a request came through and kept every limit; `itl_s` limits its longest gap.

        A request without any token has missed a limit on TTFT; one without a second token cannot miss those on TPOT
        and ITL.
        """
        if record.outcome is not Outcome.OK:
            return False
        seen = latencies(record)
        if self.ttft_s is not None and (seen.ttft_s is None or seen.ttft_s > self.ttft_s):
            return False
        if self.tpot_s is not None and seen.tpot_s is not None and seen.tpot_s > self.tpot_s:
            return False
        if self.itl_s is not None and max(seen.itls_s, default=0.0) > self.itl_s:
            return False
        return self.e2e_s is None or seen.e2e_s <= self.e2e_s
