"""All requests of a load together: counts, rates and distributions. Pure functions; it prints nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pageframe.benchmarks.client.measures import (
    Distribution,
    Objectives,
    chunk_tokens,
    latencies,
    output_tokens,
    peak_concurrency,
    prompt_tokens,
)
from pageframe.benchmarks.client.record import CountedBy, Failure, Outcome, RequestRecord

DURATION_FORMULA = "last end of any request - first intended send"
REQUEST_RATE_FORMULA = "completed requests / duration"
OUTPUT_RATE_FORMULA = "output tokens of completed requests / duration"
TOTAL_RATE_FORMULA = "(prompt + output tokens of completed requests) / duration"
GOODPUT_FORMULA = "completed requests that met every objective / duration"


@dataclass(frozen=True, slots=True)
class FailureGroup:
    kind: str
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Summary:
    """What a load measured. Times in seconds, rates per second of `duration_s`.

    Latencies, tokens and rates are of completed requests only. `prompt_tokens` and `total_rate` are None where some
    completed request's prompt length is unknown. `goodput` is None without objectives. `counted_by` says for
    completed requests with content how their chunks' tokens were counted.
    """

    num_requests: int
    completed: int
    failed: int
    cancelled: int
    interrupted: int
    unsent: int
    no_token: int
    failures: list[FailureGroup]
    duration_s: float
    prompt_tokens: int | None
    output_tokens: int
    cancelled_tokens: int
    cached_tokens: int
    request_rate: float
    output_rate: float
    total_rate: float | None
    ttft: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    e2e: Distribution | None
    lateness: Distribution | None
    loop_lag: Distribution | None
    peak_concurrency: int
    good: int | None
    goodput: float | None
    counted_by: dict[CountedBy, int]


def summarise(
    records: Sequence[RequestRecord],
    *,
    num_requests: int,
    loop_lags_s: Sequence[float] = (),
    objectives: Objectives | None = None,
) -> Summary:
    """The summary of a load.

    Args:
        records: the requests that were sent, warm-up not among them.
        num_requests: how many were asked for; the rest were never sent.
        loop_lags_s: how late the client's own event loop ran, sampled.
    """
    sent = [record for record in records if record.sent_s is not None]
    outcomes = Counter(record.outcome for record in sent)
    done = [record for record in sent if record.outcome is Outcome.OK]
    measured = [latencies(record) for record in done]
    duration_s = _duration(sent)
    prompts = [prompt_tokens(record) for record in done]
    total_prompt = sum(known for known in prompts if known is not None) if None not in prompts else None
    total_output = sum(output_tokens(record) for record in done)
    good = sum(objectives.met_by(record) for record in sent) if objectives is not None else None
    return Summary(
        num_requests=num_requests,
        completed=len(done),
        failed=outcomes[Outcome.FAILED],
        cancelled=outcomes[Outcome.CANCELLED],
        interrupted=outcomes[Outcome.INTERRUPTED],
        unsent=num_requests - len(sent),
        no_token=sum(not record.chunks for record in done),
        failures=_failure_groups([record.failure for record in sent if record.failure is not None]),
        duration_s=duration_s,
        prompt_tokens=total_prompt,
        output_tokens=total_output,
        cancelled_tokens=sum(output_tokens(record) for record in sent if record.outcome is Outcome.CANCELLED),
        cached_tokens=sum(record.cached_tokens or 0 for record in sent),
        request_rate=_per_second(len(done), duration_s),
        output_rate=_per_second(total_output, duration_s),
        total_rate=None if total_prompt is None else _per_second(total_prompt + total_output, duration_s),
        ttft=Distribution.of([each.ttft_s for each in measured if each.ttft_s is not None]),
        tpot=Distribution.of([each.tpot_s for each in measured if each.tpot_s is not None]),
        itl=Distribution.of([gap for each in measured for gap in each.itls_s]),
        e2e=Distribution.of([each.e2e_s for each in measured]),
        lateness=Distribution.of([r.sent_s - r.intended_s for r in sent if r.sent_s is not None]),
        loop_lag=Distribution.of(loop_lags_s),
        peak_concurrency=peak_concurrency(sent),
        good=good,
        goodput=None if good is None else _per_second(good, duration_s),
        counted_by=dict(Counter(chunk_tokens(r.chunks, r.output_tokens)[1] for r in done if r.chunks)),
    )


def _duration(sent: Sequence[RequestRecord]) -> float:
    ends = [record.end_s for record in sent if record.end_s is not None]
    if not ends:
        return 0.0
    return max(ends) - min(record.intended_s for record in sent)


def _per_second(amount: int, duration_s: float) -> float:
    return amount / duration_s if duration_s > 0 else 0.0


def _failure_groups(failures: Sequence[Failure]) -> list[FailureGroup]:
    """Failures by kind, most frequent first, each with the first message of its kind."""
    counts = Counter(failure.kind for failure in failures)
    examples: dict[str, str] = {}
    for failure in failures:
        examples.setdefault(failure.kind, failure.message)
    return [FailureGroup(kind, count, examples[kind]) for kind, count in counts.most_common()]
