"""The parts of `pageframe bench batching`: what is run, counted and said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pageframe.benchmarks.experiments import batching_measures, batching_report
from pageframe.benchmarks.experiments.batching_measures import gap_metrics, latency_metrics
from pageframe.benchmarks.experiments.batching_parts import Part, take_turns
from pageframe.benchmarks.experiments.batching_sizes import PARTS, QUICK, Sizes, fit_context
from pageframe.benchmarks.experiments.driver import Agreement, Answer, Ask, OutOfTimeError
from pageframe.benchmarks.experiments.report import InputError, TimeBudget

# ---- counting -------------------------------------------------------------------------------------------------------


def answer_of(name: str, arrival: float, times: list[float]) -> Answer:
    return Answer(Ask(name, [1], len(times)), arrival, list(range(len(times))), times)


def test_latencies_by_hand() -> None:
    metrics = latency_metrics([answer_of("a", 0.0, [1.0, 2.0, 4.0]), answer_of("b", 1.0, [4.0, 6.0])])
    assert metrics["tokens_per_second"] == pytest.approx(5 / 6)
    assert metrics["ttft_mean_ms"] == pytest.approx(2000)
    assert metrics["latency_mean_ms"] == pytest.approx(4500)
    assert metrics["latency_p50_ms"] == pytest.approx(4500)
    assert metrics["ttft_max_ms"] == pytest.approx(3000)
    assert "ttft_p99_ms" not in metrics  # two values have none


def test_a_99th_percentile_takes_a_hundred_values() -> None:
    few = latency_metrics([answer_of(str(i), 0.0, [1.0 + i]) for i in range(99)])
    assert "ttft_p99_ms" not in few
    many = latency_metrics([answer_of(str(i), 0.0, [1.0 + i]) for i in range(101)])
    assert many["ttft_p99_ms"] == pytest.approx(100_000)
    assert many["ttft_max_ms"] == pytest.approx(101_000)
    ways = [f"{level}, all at once" for level in (batching_measures.REQUEST_LEVEL, batching_measures.ITERATION_LEVEL)]
    for runs, names, words in (
        ((many, many), {"latency p99", "TTFT p99"}, "the p99 of the time to first token 100.00 s"),
        ((many, few), {"latency longest", "TTFT longest"}, "the longest time to first token 99.00 s against 101.00 s"),
    ):
        part = Part("batching", ways={way: [run] for way, run in zip(ways, runs, strict=True)})
        assert names <= set(batching_report.draw_table(part).columns[0].cells)
        assert words in batching_report.sentences(part)[0]


def test_few_gaps_have_a_longest_one_and_no_percentile() -> None:
    gaps = {"tokens_per_second": 1.0, "long_ttft_p50_ms": 5.0, "num_gaps": 9.0, "gap_p50_ms": 2.0, "gap_max_ms": 30.0}
    part = Part("chunks", ways={"chunks of 8": [gaps], "whole prompts": [gaps | {"gap_max_ms": 60.0}]})
    assert (
        "the longest gap between tokens of running requests is 30 ms in chunks and 60 ms with whole prompts (2.0x)."
        in (batching_report.sentences(part)[0])
    )
    headings = list(batching_report.draw_table(part).columns[0].cells)
    assert "gap p99" not in headings
    assert headings.count("longest gap") == 1


def test_only_gaps_while_a_long_prompt_waits_count() -> None:
    answers = [
        answer_of("runner-0", 0.0, [1.0, 2.0, 5.0, 6.0, 7.0, 9.0]),
        answer_of("long-0", 2.5, [5.0]),
        answer_of("long-1", 6.5, [7.0]),
    ]
    metrics = gap_metrics(answers)
    assert metrics["num_gaps"] == 2  # from 2 to 5, and from 6 to 7
    assert metrics["gap_max_ms"] == pytest.approx(3000)
    assert metrics["gap_p50_ms"] == pytest.approx(2000)
    assert metrics["long_ttft_p50_ms"] == pytest.approx(1500)


# ---- sizes ----------------------------------------------------------------------------------------------------------


def test_a_long_context_leaves_all_sizes_as_they_are() -> None:
    assert fit_context(Sizes(), (), PARTS, 8192, drawn_sessions=True) == (Sizes(), [])


@pytest.mark.parametrize("usual", [Sizes(), QUICK])
@pytest.mark.parametrize("positions", [24, 25, 100, 256, 1000])
def test_sizes_fit_a_short_context(usual: Sizes, positions: int) -> None:
    sizes, _ = fit_context(usual, (), PARTS, positions, drawn_sessions=True)
    assert 2 <= sizes.max_len <= positions
    assert 2 <= sizes.long_tokens < positions  # one more is its answer
    assert 1 <= sizes.runner_tokens <= positions - 16  # its prompt has 16
    assert sizes.chunk_requests <= sizes.chunk <= usual.chunk
    assert min(sizes.system_tokens, sizes.user_tokens, sizes.answer_tokens) >= 1
    assert sizes.session_tokens <= positions
    assert max(sizes.block_sizes) <= positions


def test_what_was_changed_is_said() -> None:
    sizes, changes = fit_context(Sizes(), (), ["batching", "chunks"], 256, drawn_sessions=True)
    assert changes == ["max-len is 256, not 512", "long-tokens is 255, not 1024", "chunk is 63, not 128"]
    assert sizes.system_tokens == Sizes().system_tokens  # of a part that is not run


@pytest.mark.parametrize(
    ("asked", "names", "message"),
    [
        ({"max_len": 257}, ["batching"], "max-len is 257; the model has 256 positions, which leave room for 256"),
        ({"long_tokens": 256}, ["chunks"], "long-tokens is 256; the model has 256 positions, which leave room for 255"),
    ],
)
def test_what_was_asked_for_is_not_changed(asked: dict[str, int], names: list[str], message: str) -> None:
    sizes = replace(Sizes(), **asked)
    with pytest.raises(InputError, match=message):
        fit_context(sizes, asked, names, 256, drawn_sessions=True)
    others = [name for name in PARTS if name not in names]
    fitted, _ = fit_context(sizes, asked, others, 256, drawn_sessions=True)
    assert {field: getattr(fitted, field) for field in asked} == asked


def test_a_context_of_next_to_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="the model has 23 positions; it must have at least 24"):
        fit_context(Sizes(), (), PARTS, 23, drawn_sessions=True)


# ---- turns ----------------------------------------------------------------------------------------------------------


class Repeats:
    """Stands in for a Bench where only the number of repeats and the seed count."""

    def __init__(self, repeats: int, seed: int = 0) -> None:
        self.sizes = Sizes(repeats=repeats)
        self.seed = seed
        self.num_runs = 0

    def advance(self) -> None:
        self.num_runs += 1


def rounds_of(repeats: int, seed: int) -> list[tuple[str, ...]]:
    """The order of three ways in each round."""
    order: list[str] = []
    part, bench = Part("batching"), Repeats(repeats, seed)
    take_turns(part, ["a", "b", "c"], bench, 60, lambda way, budget: order.append(way))  # type: ignore[arg-type]
    return list(zip(*[iter(order)] * 3, strict=True))


def test_each_round_has_every_way_once_in_an_order_drawn_by_the_seed() -> None:
    rounds = rounds_of(repeats=30, seed=1)
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert {one[0] for one in rounds} == {"a", "b", "c"}
    rotations = [("a", "b", "c"), ("b", "c", "a"), ("c", "a", "b")]
    assert not set(rounds) <= set(rotations)
    assert rounds == rounds_of(repeats=30, seed=1) != rounds_of(repeats=30, seed=2)


def test_a_way_without_time_is_not_measured_and_says_so() -> None:
    part, bench = Part("blocks"), Repeats(2)
    order = []

    def run_once(way: str, budget: TimeBudget) -> None:
        order.append(way)
        if way == "4":
            raise OutOfTimeError
        part.ways[way].append({"hit_rate": 0.5})

    take_turns(part, ["1", "4", "8"], bench, 60, run_once)  # type: ignore[arg-type]
    assert sorted(order) == ["1", "1", "4", "8", "8"]  # what did not fit once is not tried again
    assert bench.num_runs == 6
    assert part.ways == {"1": [{"hit_rate": 0.5}] * 2, "4": [], "8": [{"hit_rate": 0.5}] * 2}
    assert part.reason("4") == "out of time"
    hit_rates, runs = batching_report.draw_table(part).columns[2], batching_report.draw_table(part).columns[-1]
    assert list(hit_rates.cells) == ["50.0%", "not measured: out of time", "50.0%"]
    assert (runs.header, list(runs.cells)) == ("runs", ["2", "0", "2"])


def test_without_any_time_no_way_starts() -> None:
    part = Part("prefix")
    take_turns(part, ["a", "b"], Repeats(1), 0, lambda way, budget: pytest.fail(way))  # type: ignore[arg-type]
    assert part.reasons() == ["no time left"]


def test_every_empty_cell_says_why() -> None:
    no_gap = {"tokens_per_second": 1.0, "long_ttft_p50_ms": 5.0, "num_gaps": 0.0}
    part = Part("chunks", ways={"chunks of 8": [no_gap], "whole prompts": []}, stopped="interrupted")
    names, chunked, whole = batching_report.draw_table(part).columns
    cells = dict(zip(names.cells, chunked.cells, strict=True))
    assert (cells["gap p50"], cells["gaps"]) == ("not measured: none in its runs", "0")
    assert set(whole.cells) == {"not measured: interrupted", "0"}


# ---- words ---------------------------------------------------------------------------------------------------------


def test_the_sentences_hold_the_medians() -> None:
    cached = {"hit_rate": 0.75, "ttft_p50_ms": 50.0, "tokens_per_second": 40.0}
    slower = cached | {"ttft_p50_ms": 70.0}
    part = Part("prefix", ways={batching_measures.CACHE_ON: [cached, slower, cached]})
    part.ways[batching_measures.CACHE_OFF] = [{"hit_rate": 0.0, "ttft_p50_ms": 200.0, "tokens_per_second": 20.0}]
    first, second = batching_report.sentences(part)
    assert "75.0% of prompt tokens" in first
    assert "50 ms against 200 ms without (0.25x)" in first
    assert "40.0 output tokens/s with it and 20.0 without (2.00x)" in second
    part.ways[batching_measures.CACHE_OFF] = []
    assert batching_report.sentences(part) == []
    names, on, off = batching_report.draw_table(part).columns
    assert (on.header, off.header) == (batching_measures.CACHE_ON, batching_measures.CACHE_OFF)
    measured = dict(zip(names.cells, on.cells, strict=True))
    assert (measured["hit rate"], measured["TTFT p50"], measured["runs"]) == ("75.0%", "50", "3")
    assert dict(zip(names.cells, off.cells, strict=True))["tokens/s"].startswith("not measured")


def test_answers_that_differ_are_said_to() -> None:
    part = Part("prefix", agreement=Agreement(equal=5, ties=2, one_step=1, different=1, skipped=3))
    text = batching_report.describe_agreement(part)
    assert "Same tokens in 5 of 9 answers" in text
    assert "2 part at a tie" in text
    assert "1 DIFFER" in text
