"""Every formula against values worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pageframe.benchmarks.client.arrivals import arrival_times
from pageframe.benchmarks.client.load import choose_cancelled
from pageframe.benchmarks.client.measures import (
    Distribution,
    Objectives,
    chunk_tokens,
    inter_token_gaps,
    latencies,
    output_tokens,
    peak_concurrency,
    spread,
)
from pageframe.benchmarks.client.record import Chunk, CountedBy, Failure, Outcome, RequestRecord
from pageframe.benchmarks.client.report import find_warnings
from pageframe.benchmarks.client.summary import summarise


def finished(
    times_s: list[float],
    end_s: float,
    *,
    index: int = 0,
    intended_s: float = 0.0,
    sent_s: float = 0.0,
    output: int | None = None,
    prompt: int | None = 10,
) -> RequestRecord:
    return RequestRecord(
        index,
        intended_s,
        sent_s=sent_s,
        chunks=[Chunk(time_s) for time_s in times_s],
        end_s=end_s,
        prompt_tokens=prompt,
        output_tokens=output,
        outcome=Outcome.OK,
    )


def test_percentiles_interpolate_between_closest_ranks() -> None:
    seen = Distribution.of([4.0, 1.0, 3.0, 2.0])
    assert seen is not None
    assert (seen.count, seen.mean) == (4, 2.5)
    assert (seen.p50, seen.p90, seen.p99) == pytest.approx((2.5, 3.7, 3.97))
    assert Distribution.of([7.0]) == Distribution(1, 7.0, 7.0, 7.0, 7.0)
    assert Distribution.of([]) is None


def test_latencies_start_at_the_intended_send_and_end_at_the_last_byte() -> None:
    record = finished([1.5, 1.7, 1.9], end_s=2.3, intended_s=1.0, sent_s=1.25, output=3)
    seen = latencies(record)
    assert seen.ttft_s == pytest.approx(0.5)
    assert seen.e2e_s == pytest.approx(1.3)
    assert seen.tpot_s == pytest.approx((1.3 - 0.5) / 2)
    assert seen.itls_s == pytest.approx([0.2, 0.2])


def test_one_token_has_no_tpot_and_no_itl() -> None:
    seen = latencies(finished([0.5], end_s=0.6, output=1))
    assert (seen.ttft_s, seen.tpot_s, seen.itls_s) == (0.5, None, [])
    totals = summarise([finished([0.5], end_s=0.6, output=1)], num_requests=1)
    assert totals.tpot is None
    assert totals.itl is None


def test_an_answer_without_a_token_has_no_ttft() -> None:
    record = finished([], end_s=0.6, output=0)
    seen = latencies(record)
    assert (seen.ttft_s, seen.tpot_s, seen.e2e_s) == (None, None, 0.6)
    totals = summarise([record], num_requests=1)
    assert (totals.completed, totals.no_token, totals.ttft) == (1, 1, None)


def test_a_gap_before_a_chunk_of_several_tokens_is_shared_among_them() -> None:
    gaps = inter_token_gaps([1.0, 1.3, 1.9], [2, 3, 2])
    assert gaps == pytest.approx([0.1, 0.1, 0.1, 0.3, 0.3])


def test_chunks_read_at_one_instant_count_as_one_arrival() -> None:
    assert inter_token_gaps([1.0, 1.4, 1.4, 1.6], [1, 1, 1, 1]) == pytest.approx([0.2, 0.2, 0.2])


def test_an_arrival_without_a_token_lengthens_the_next_gap() -> None:
    assert inter_token_gaps([1.0, 1.4, 1.5], [1, 0, 1]) == pytest.approx([0.5])


def test_tokens_of_chunks_come_from_a_running_usage_where_every_chunk_has_one() -> None:
    chunks = [Chunk(1.0, running_total=1), Chunk(2.0, running_total=4), Chunk(3.0, running_total=5)]
    assert chunk_tokens(chunks, 6) == ([1, 3, 1], CountedBy.USAGE)
    some = [Chunk(1.0), Chunk(2.0, running_total=2)]
    assert chunk_tokens(some, 2) == ([1, 1], CountedBy.CHUNKS)


def test_tokens_of_chunks_come_from_logprobs_where_every_chunk_has_them() -> None:
    chunks = [Chunk(1.0, logprob_tokens=2), Chunk(2.0, logprob_tokens=1)]
    assert chunk_tokens(chunks, 3) == ([2, 1], CountedBy.LOGPROBS)


def test_a_final_usage_that_disagrees_is_spread_over_the_chunks() -> None:
    chunks = [Chunk(float(i)) for i in range(4)]
    assert chunk_tokens(chunks, 4) == ([1, 1, 1, 1], CountedBy.CHUNKS)
    assert chunk_tokens(chunks, None) == ([1, 1, 1, 1], CountedBy.CHUNKS)
    assert chunk_tokens(chunks, 5) == ([1, 1, 1, 2], CountedBy.SPREAD)
    assert chunk_tokens(chunks, 10) == ([2, 3, 2, 3], CountedBy.SPREAD)
    assert chunk_tokens(chunks, 2) == ([1, 0, 1, 0], CountedBy.SPREAD)


@settings(deadline=None)
@given(st.integers(1, 5000), st.integers(1, 300))
def test_spread_keeps_the_total_and_is_even(total: int, num_chunks: int) -> None:
    tokens = spread(total, num_chunks)
    assert len(tokens) == num_chunks
    assert sum(tokens) == total
    assert max(tokens) - min(tokens) <= 1
    assert tokens[0] >= 1


def test_pooled_chunks_give_the_mean_gap_of_their_tokens() -> None:
    """Four chunks of two tokens: TPOT and ITL agree with a server that sends each token by itself."""
    record = finished([0.2, 0.4, 0.6, 0.8], end_s=0.8, output=8)
    seen = latencies(record)
    assert seen.itls_s == pytest.approx([0.1] * 6)
    assert seen.tpot_s == pytest.approx(0.6 / 7)


def test_output_tokens_are_the_usage_s_unless_it_denies_what_was_read() -> None:
    assert output_tokens(finished([1.0, 2.0], end_s=2.0, output=5)) == 5
    assert output_tokens(finished([1.0, 2.0], end_s=2.0)) == 2
    assert output_tokens(finished([1.0, 2.0], end_s=2.0, output=0)) == 2
    assert output_tokens(finished([], end_s=2.0, output=3)) == 3


def test_peak_concurrency_counts_overlaps_from_actual_send_to_end() -> None:
    records = [
        finished([], end_s=2.0, sent_s=0.0),
        finished([], end_s=3.0, sent_s=1.0),
        finished([], end_s=4.0, sent_s=2.0),  # takes the place that the first one frees
    ]
    assert peak_concurrency(records) == 2
    assert peak_concurrency([]) == 0


def test_summary_of_a_load() -> None:
    done = [
        finished([1.5, 2.0], end_s=2.0, index=0, intended_s=1.0, sent_s=1.1, output=2),
        finished([2.0, 4.0], end_s=5.0, index=1, intended_s=1.5, sent_s=1.5, output=4),
    ]
    failures = [
        RequestRecord(2, 2.0, 2.0, end_s=6.0, outcome=Outcome.FAILED, failure=Failure("timeout", "first")),
        RequestRecord(3, 2.0, 2.0, end_s=3.0, outcome=Outcome.FAILED, failure=Failure("HTTP 500", "broken")),
        RequestRecord(4, 2.0, 2.0, end_s=3.0, outcome=Outcome.FAILED, failure=Failure("timeout", "second")),
    ]
    cancelled = RequestRecord(5, 2.0, 2.0, chunks=[Chunk(2.5), Chunk(2.6)], end_s=2.7, outcome=Outcome.CANCELLED)
    totals = summarise([*done, *failures, cancelled], num_requests=8)
    assert (totals.completed, totals.failed, totals.cancelled, totals.unsent) == (2, 3, 1, 2)
    assert [(group.kind, group.count, group.example) for group in totals.failures] == [
        ("timeout", 2, "first"),
        ("HTTP 500", 1, "broken"),
    ]
    assert totals.duration_s == pytest.approx(5.0)  # 1.0 to 6.0: the failures' time counts
    assert (totals.output_tokens, totals.cancelled_tokens, totals.prompt_tokens) == (6, 2, 20)
    assert totals.request_rate == pytest.approx(2 / 5)
    assert totals.output_rate == pytest.approx(6 / 5)
    assert totals.total_rate == pytest.approx(26 / 5)
    assert totals.ttft is not None
    assert totals.ttft.mean == pytest.approx(0.5)
    assert totals.lateness is not None
    assert totals.lateness.p99 > 0.09


def test_total_rate_is_unknown_where_a_prompt_s_length_is() -> None:
    totals = summarise([finished([1.0], end_s=1.0, prompt=None)], num_requests=1)
    assert (totals.prompt_tokens, totals.total_rate) == (None, None)
    counted = finished([1.0], end_s=1.0, prompt=None)
    counted.known_prompt_tokens = 9
    assert summarise([counted], num_requests=1).prompt_tokens == 9


def test_goodput_counts_requests_that_met_every_objective_and_no_failure() -> None:
    good = finished([0.1, 0.2], end_s=0.2, output=2)
    slow_start = finished([0.5, 0.6], end_s=0.6, output=2)
    one_long_gap = finished([0.1, 0.2, 0.9], end_s=0.9, output=3)
    one_token = finished([0.1], end_s=1.0, output=1)
    failed = RequestRecord(4, 0.0, 0.0, end_s=1.0, outcome=Outcome.FAILED, failure=Failure("timeout", ""))
    records = [good, slow_start, one_long_gap, one_token, failed]

    def met(objectives: Objectives) -> int | None:
        return summarise(records, num_requests=5, objectives=objectives).good

    assert met(Objectives(ttft_s=0.3)) == 3
    assert met(Objectives(ttft_s=0.3, itl_s=0.3)) == 2
    assert met(Objectives(tpot_s=0.2)) == 3  # one token has no TPOT to miss
    assert met(Objectives(e2e_s=0.2)) == 1
    totals = summarise(records, num_requests=5, objectives=Objectives(ttft_s=0.3))
    assert totals.goodput == pytest.approx(3 / 1.0)
    assert summarise(records, num_requests=5).goodput is None


def test_a_late_client_is_warned_of_where_it_distorts_what_was_measured() -> None:
    def warnings(sent_s: float, lag_s: float, gap_s: float) -> list[str]:
        record = finished([0.2, 0.2 + gap_s], end_s=0.2 + gap_s, sent_s=sent_s, output=2)
        return find_warnings(summarise([record], num_requests=1, loop_lags_s=[lag_s]))

    assert warnings(sent_s=0.001, lag_s=0.001, gap_s=0.001) == []
    (late,) = warnings(sent_s=0.05, lag_s=0.001, gap_s=0.02)
    assert "sent requests late (p99 50.00 ms)" in late
    (lagging,) = warnings(sent_s=0.001, lag_s=0.03, gap_s=0.02)
    assert "saw events late (p99 30.00 ms)" in lagging
    assert warnings(sent_s=0.001, lag_s=0.03, gap_s=2.0) == []


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_arrival_gaps_have_the_mean_and_the_variation_of_their_distribution(
    burstiness: float, variation: float
) -> None:
    times = arrival_times(20_000, 10.0, burstiness, seed=3)
    gaps = [after - before for before, after in zip([0.0, *times[:-1]], times, strict=True)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert mean == pytest.approx(0.1, rel=0.06)
    assert deviation / mean == pytest.approx(variation, rel=0.06)
    assert times == sorted(times)


def test_arrivals_depend_on_the_seed_alone_and_are_not_rescaled() -> None:
    times = arrival_times(50, 10.0, 1.0, seed=1)
    assert times == arrival_times(50, 10.0, 1.0, seed=1)
    assert times != arrival_times(50, 10.0, 1.0, seed=2)
    assert times[:20] == arrival_times(20, 10.0, 1.0, seed=1)
    assert arrival_times(3, 10.0, math.inf, seed=1) == pytest.approx([0.1, 0.2, 0.3])


def test_cancelled_requests_are_a_seeded_choice_of_the_asked_size() -> None:
    chosen = choose_cancelled(500, 0.2, 64, seed=0)
    assert len(chosen) == 100
    assert set(chosen) <= set(range(500))
    assert set(chosen.values()) <= set(range(64))
    assert len(set(chosen.values())) > 30
    assert chosen == choose_cancelled(500, 0.2, 64, seed=0)
    assert chosen != choose_cancelled(500, 0.2, 64, seed=1)
    assert choose_cancelled(500, 0.0, 64, seed=0) == {}
