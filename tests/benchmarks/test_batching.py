"""`pageframe bench batching`: how requests are driven, what is counted, and the command on the default model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.chain_hash import ChainHashModel
from fakes.engines import tiny_config

from pageframe.api.cli import main
from pageframe.benchmarks.experiments import batching, batching_parts, batching_report, driver
from pageframe.benchmarks.experiments.batching_parts import Part, TailWatch, gap_metrics, latency_metrics, take_turns
from pageframe.benchmarks.experiments.driver import Agreement, Answer, Ask, OutOfTimeError, compare, serve
from pageframe.benchmarks.experiments.report import InputError, TimeBudget
from pageframe.benchmarks.experiments.sessions import Holder, synthetic_session, synthetic_sessions
from pageframe.runtime.config import EngineConfig
from pageframe.runtime.engine import Engine
from pageframe.runtime.engine_builder import build_engine
from pageframe.runtime.errors import EngineError
from pageframe.runtime.model_runner import ModelRunner
from pageframe.runtime.sampler import Sampler


def chain_hash_engine(**changes: Any) -> Engine:
    """Its next token depends on every token before it, read back through the block tables."""
    settings = {"num_blocks": 64, "max_num_requests": 4, "max_num_batched_tokens": 64, "max_model_len": 60} | changes
    resolved = tiny_config(**settings)
    model = ChainHashModel(
        num_blocks=resolved.num_blocks,
        block_size=resolved.block_size,
        max_num_requests=resolved.max_num_requests,
        max_blocks=resolved.max_blocks,
    )
    return Engine(resolved, model, model, seed=0)


def plenty() -> TimeBudget:
    return TimeBudget(600)


def asks_of(*lengths: tuple[int, int]) -> list[Ask]:
    return [Ask(f"r{i}", [100 * i + j for j in range(prompt)], output) for i, (prompt, output) in enumerate(lengths)]


class Company:
    """Which requests ran together, step by step."""

    def __init__(self) -> None:
        self.steps: list[set[str]] = []

    def __call__(self, engine: Engine) -> None:
        self.steps.append({request.request_id for request in engine.scheduler.live_requests()})


# ---- driving --------------------------------------------------------------------------------------------------------


def test_whole_batches_admit_nobody_until_the_last_has_ended() -> None:
    asks = asks_of((3, 2), (3, 9), (3, 3), (3, 8), (3, 4))
    company = Company()
    answers = serve(chain_hash_engine(), asks, plenty(), batch_size=2, watch=company)
    batches = [{"r0", "r1"}, {"r2", "r3"}, {"r4"}]
    assert all(any(step <= batch for batch in batches) for step in company.steps)
    assert [len(answer.tokens) for answer in answers] == [2, 9, 3, 8, 4]
    # Each batch takes as many steps as its longest answer; the watch sees one step less of those that end with it.
    assert len(company.steps) == 9 + 8 + 4
    ends = {answer.ask.name: answer.times[-1] for answer in answers}
    starts = {answer.ask.name: answer.times[0] for answer in answers}
    assert max(ends["r0"], ends["r1"]) < min(starts["r2"], starts["r3"])


def test_by_iteration_a_request_joins_when_another_ends() -> None:
    asks = asks_of((3, 2), (3, 9), (3, 3), (3, 8), (3, 4))
    company = Company()
    engine = chain_hash_engine(max_num_requests=2, max_num_batched_tokens=64)
    answers = serve(engine, asks, plenty(), watch=company)
    assert len(company.steps) < 9 + 8 + 4
    by_request = serve(chain_hash_engine(), asks, plenty(), batch_size=2)
    assert compare(answers, by_request, engine) == Agreement(equal=5)


def test_a_request_comes_after_so_many_tokens() -> None:
    asks = [*asks_of((3, 10)), Ask("late", [7, 8], 1, after_tokens=4)]
    company = Company()
    serve(chain_hash_engine(), asks, plenty(), watch=company)
    together = [index for index, step in enumerate(company.steps) if "r0" in step]
    assert len(company.steps) == 10
    assert together == list(range(9))
    early = serve(chain_hash_engine(), asks, plenty())
    assert [answer.ask.name for answer in early] == ["r0", "late"]
    assert early[0].times[3] <= early[1].arrival <= early[1].times[0] <= early[0].times[4]


def test_a_request_that_waits_for_more_tokens_than_are_made_comes_at_last() -> None:
    asks = [*asks_of((3, 2)), Ask("late", [7, 8], 1, after_tokens=1000)]
    assert [len(answer.tokens) for answer in serve(chain_hash_engine(), asks, plenty())] == [2, 1]


def test_latency_counts_from_the_set_arrival() -> None:
    first, second = [Ask("a", [1], 3), Ask("b", [2], 2, arrival=0.05)]
    answers = serve(chain_hash_engine(), [second, first], plenty(), batch_size=1)
    assert [answer.arrival for answer in answers] == [0.0, 0.05]
    assert all(answer.first_token_seconds > 0 for answer in answers)


def test_a_budget_that_has_ended_ends_the_run() -> None:
    with pytest.raises(OutOfTimeError):
        serve(chain_hash_engine(), asks_of((3, 2)), TimeBudget(0))


def test_sessions_are_held_a_few_at_a_time_and_grow_by_their_answers() -> None:
    talks = [synthetic_session([1, 2], [[10 * i, 3], [4, 5]]) for i in range(1, 4)]
    holder = Holder(talks, answer_tokens=3, ignore_eos=True, longest=50)
    company = Company()
    answers = serve(chain_hash_engine(), holder.first(2), plenty(), follow=holder.follow, watch=company)
    assert max(len(step) for step in company.steps) == 2
    by_name = {answer.ask.name: answer for answer in answers}
    assert by_name.keys() == {f"session-{s}-turn-{t}" for s in range(3) for t in range(2)}
    for session in range(3):
        first, second = (by_name[f"session-{session}-turn-{turn}"] for turn in range(2))
        assert second.ask.prompt == [*first.ask.prompt, *first.tokens, 4, 5]
    assert holder.cut_short == 0


def test_a_session_that_outgrows_the_context_makes_room_for_the_next() -> None:
    talks = [
        synthetic_session([1], [[2] * 5, [3] * 50]),
        synthetic_session([1], [[2] * 80]),
        synthetic_session([1], [[4]]),
    ]
    holder = Holder(talks, answer_tokens=3, ignore_eos=True, longest=50)
    answers = serve(chain_hash_engine(), holder.first(1), plenty(), follow=holder.follow)
    assert [answer.ask.name for answer in answers] == ["session-0-turn-0", "session-2-turn-0"]
    assert holder.cut_short == 2


def test_drawn_sessions_share_one_system_prompt() -> None:
    make: Callable[[int], Any] = lambda seed: [  # noqa: E731
        next(talk)
        for talk in synthetic_sessions(3, turns=2, system_tokens=20, user_tokens=5, vocab_size=1000, seed=seed)
    ]
    prompts = make(1)
    assert prompts == make(1) != make(2)
    assert {tuple(prompt[:20]) for prompt in prompts} == {tuple(prompts[0][:20])}
    assert len({tuple(prompt) for prompt in prompts}) == 3
    assert all(20 + 3 <= len(prompt) <= 20 + 7 for prompt in prompts)


def test_drawn_lengths_do_not_end_with_their_blocks() -> None:
    talks = synthetic_sessions(8, turns=2, system_tokens=21, user_tokens=8, vocab_size=1000, seed=1)
    holder = Holder(talks, answer_tokens=4, ignore_eos=True, longest=54, seed=1)
    answers = serve(chain_hash_engine(), holder.first(4), plenty(), follow=holder.follow)
    assert {len(answer.tokens) for answer in answers} == {2, 3, 4, 5, 6}
    assert len({len(answer.ask.prompt) % 16 for answer in answers}) > 5
    again = Holder(
        synthetic_sessions(8, turns=2, system_tokens=21, user_tokens=8, vocab_size=1000, seed=1),
        answer_tokens=4,
        ignore_eos=True,
        longest=54,
        seed=1,
    )
    # Another number at once, another order of the turns: the same lengths.
    theirs = serve(chain_hash_engine(), again.first(1), plenty(), follow=again.follow)
    assert compare(theirs, answers, chain_hash_engine()) == Agreement(equal=16)
    sizes = batching_parts.Sizes()
    assert sizes.system_tokens % batching.BLOCK_SIZE
    assert batching_parts.QUICK.system_tokens % batching.BLOCK_SIZE


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
    ways = [f"{level}, all at once" for level in (batching_parts.REQUEST_LEVEL, batching_parts.ITERATION_LEVEL)]
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


def test_tails_are_the_slots_that_no_token_has() -> None:
    tails = TailWatch()
    engine = chain_hash_engine(block_size=8, num_blocks=8)
    serve(engine, asks_of((6, 5)), plenty(), watch=tails)
    # After a step the request has 7, 8, 9, 10 tokens; it enters with blocks for 7, and gets one more for its ninth. The
    # fifth token ends it.
    assert (tails.taken, tails.wasted) == (8 + 8 + 8 + 16, 1 + 0 + 0 + 6)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return build_engine(EngineConfig(num_blocks=16, max_model_len=128, max_num_requests=4))


def test_answers_that_part_are_told_apart_from_ties(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    asks = [Ask("a", [50, 60, 70], 4), Ask("b", [80, 90], 4)]
    answers = serve(engine, asks, plenty())

    def changed(index: int, token: int) -> list[Answer]:
        tokens = list(answers[0].tokens)
        tokens[index] = token
        return [Answer(asks[0], 0.0, tokens, answers[0].times), answers[1]]

    assert compare(answers, changed(2, answers[0].tokens[2]), engine) == Agreement(equal=2)
    assert compare(answers, changed(2, 5), engine) == Agreement(equal=1, different=1)
    prompt = [*asks[0].prompt, *answers[0].tokens[:2]]
    engine.add("top", prompt, driver.SamplingParams(temperature=0, max_tokens=1, logprobs=2))
    (output,) = engine.step()
    best, second = output.logprobs[0].top_ids
    assert best == answers[0].tokens[2]
    gap = output.logprobs[0].top_logprobs[0] - output.logprobs[0].top_logprobs[1]
    monkeypatch.setitem(driver.TIE_TOLERANCE, "bf16", gap * 1.01)
    assert compare(answers, changed(2, second), engine) == Agreement(equal=1, ties=1)
    monkeypatch.setitem(driver.TIE_TOLERANCE, "bf16", gap * 0.5)
    monkeypatch.setattr(driver, "spacing", lambda value, dtype: gap * 1.01)
    assert compare(answers, changed(2, second), engine) == Agreement(equal=1, one_step=1)
    monkeypatch.setattr(driver, "spacing", lambda value, dtype: gap * 0.99)
    assert compare(answers, changed(2, second), engine) == Agreement(equal=1, different=1)
    shorter = [Answer(asks[0], 0.0, answers[0].tokens[:3], answers[0].times[:3]), answers[1]]
    assert compare(answers, shorter, engine) == Agreement(equal=1, different=1)
    other_prompt = [Answer(Ask("a", [1, 2, 3], 4), 0.0, [1], [1.0]), answers[1]]
    assert compare(answers, other_prompt, engine) == Agreement(equal=1, skipped=1)
    assert compare(answers, answers[1:], engine) == Agreement(equal=1, skipped=1)
    assert compare(answers[:1], answers[1:], engine) == Agreement(skipped=2)


@pytest.mark.parametrize(
    ("compute", "expected"), [("bfloat16", Agreement(one_step=1)), ("float32", Agreement(different=1))]
)
def test_neighbours_are_those_of_the_arithmetic_not_of_the_stored_type(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, compute: str, expected: Agreement
) -> None:
    assert engine.resolved.dtype == "bf16"
    monkeypatch.setattr(driver, "_logits", lambda *args: (20.0, 19.9))  # 0.1 apart: past a tie, within bf16's 0.125
    assert isinstance(engine.runner, ModelRunner)
    resolved = replace(engine.resolved, compute_dtype=compute)
    machine = Engine(resolved, engine.runner, Sampler(engine.runner.logits))
    ask = Ask("a", [1, 2], 1)
    assert compare([Answer(ask, 0.0, [3], [1.0])], [Answer(ask, 0.0, [4], [1.0])], machine) == expected


def test_the_next_number_of_a_type() -> None:
    assert [driver.spacing(value, "bfloat16") for value in (16.0, 17.5, -31.9, 32.0, 1.0)] == [0.125] * 3 + [
        0.25,
        2**-7,
    ]
    assert driver.spacing(20.0, "float32") == 2**-19


class Repeats:
    """Stands in for a Bench where only the number of repeats counts."""

    def __init__(self, repeats: int) -> None:
        self.sizes = batching_parts.Sizes(repeats=repeats)
        self.num_runs = 0

    def advance(self) -> None:
        self.num_runs += 1


def test_ways_take_turns_and_one_without_time_is_not_measured() -> None:
    part, bench = Part("batching"), Repeats(2)
    order = []

    def run_once(way: str, budget: TimeBudget) -> None:
        order.append(way)
        if way == "slow":
            raise OutOfTimeError
        part.ways[way].append({"hit_rate": 0.5})

    take_turns(part, ["a", "slow", "b"], bench, 60, run_once)  # type: ignore[arg-type]
    assert order == ["a", "slow", "b", "a", "b"]
    assert bench.num_runs == 6
    assert part.ways == {"a": [{"hit_rate": 0.5}] * 2, "slow": [], "b": [{"hit_rate": 0.5}] * 2}


# ---- words ----------------------------------------------------------------------------------------------------------


def test_the_sentences_hold_the_medians() -> None:
    cached = {"hit_rate": 0.75, "ttft_p50_ms": 50.0, "tokens_per_second": 40.0}
    slower = cached | {"ttft_p50_ms": 70.0}
    part = Part("prefix", ways={batching_parts.CACHE_ON: [cached, slower, cached]})
    part.ways[batching_parts.CACHE_OFF] = [{"hit_rate": 0.0, "ttft_p50_ms": 200.0, "tokens_per_second": 20.0}]
    first, second = batching_report.sentences(part)
    assert "75.0% of prompt tokens" in first
    assert "50 ms against 200 ms without (0.25x)" in first
    assert "40.0 output tokens/s with it and 20.0 without (2.00x)" in second
    part.ways[batching_parts.CACHE_OFF] = []
    assert batching_report.sentences(part) == []
    names, on, off = batching_report.draw_table(part).columns
    assert (on.header, off.header) == (batching_parts.CACHE_ON, batching_parts.CACHE_OFF)
    measured = dict(zip(names.cells, on.cells, strict=True))
    assert (measured["hit rate"], measured["TTFT p50"], measured["runs"]) == ("75.0%", "50", "3")
    assert dict(zip(names.cells, off.cells, strict=True))["tokens/s"] == "not measured"


def test_answers_that_differ_are_said_to() -> None:
    part = Part("prefix", agreement=Agreement(equal=5, ties=2, one_step=1, different=1, skipped=3))
    text = batching_report.describe_agreement(part)
    assert "Same tokens in 5 of 9 answers" in text
    assert "2 part at a tie" in text
    assert "1 DIFFER" in text


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no flag makes smaller."""
    less = {"runner_tokens": 8, "turns": 2, "system_tokens": 40, "answer_tokens": 4, "block_sizes": (1, 16)}
    monkeypatch.setattr(batching, "QUICK", replace(batching_parts.QUICK, **less))


#: As little as can be run.
SMALL = ["--quick", "--requests", "3", "--max-len", "12", "--batch", "2", "--long-tokens", "40", "--chunk", "8"]
SMALL += ["--num-sessions", "2", "--repeats", "1", "--budget", "60"]


@pytest.mark.usefixtures("little_work")
def test_all_parts_on_the_default_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot, results = tmp_path / "batching.png", tmp_path / "batching.json"
    assert main(["bench", "batching", *SMALL, "--rate", "50", "--plot", str(plot), "--json", str(results)]) == 0
    parts = json.loads(results.read_text())["parts"]
    assert list(parts) == ["batching", "chunks", "prefix", "blocks"]
    assert all(len(runs) == 1 for part in parts.values() for runs in part["ways"].values())
    assert [len(part["ways"]) for part in parts.values()] == [4, 2, 2, 2]
    for part in parts.values():
        assert part["agreement"]["different"] == 0
        assert part["agreement"]["equal"] > 0
    assert parts["prefix"]["ways"]["cache on"][0]["hit_rate"] > 0.3
    assert parts["prefix"]["ways"]["cache off"][0]["hit_rate"] == 0
    blocks = parts["blocks"]["ways"]
    assert blocks["1"][0]["wasted"] == 0 < blocks["16"][0]["wasted"]
    assert blocks["1"][0]["hit_rate"] > blocks["16"][0]["hit_rate"] > 0
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        "batching by iteration makes",
        "The price: a long prompt's first token",
        "of prompt tokens were found",
    ):
        assert words in text
    header = plot.read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    assert int.from_bytes(header[16:20], "big") >= 1200


@pytest.mark.usefixtures("little_work")
def test_sessions_from_a_file(tmp_path: Path) -> None:
    questions, results = tmp_path / "question.jsonl", tmp_path / "x.json"
    questions.write_text(json.dumps({"turns": ["Why is the sky blue?", "Say it in five words."]}) + "\n")
    flags = ["--part", "prefix", "--sessions", str(questions), "--no-plot", "--json", str(results)]
    assert main(["bench", "batching", *SMALL, *flags]) == 0
    parts = json.loads(results.read_text())["parts"]
    assert list(parts) == ["prefix"]
    (run,) = parts["prefix"]["ways"]["cache on"]
    assert run["hit_rate"] > 0
    assert {"ttft_turn_1_ms", "ttft_turn_2_ms"} <= run.keys()


@pytest.mark.usefixtures("little_work")
def test_ctrl_c_prints_what_was_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    held = batching_parts.hold_sessions
    calls = []

    def hold_until_interrupted(*args: Any, **settings: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return held(*args, **settings)

    monkeypatch.setattr(batching_parts, "hold_sessions", hold_until_interrupted)
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["bench", "batching", *SMALL, "--part", "prefix", "--no-plot"]) == 130
    text = capsys.readouterr().out
    assert "Interrupted: partial results." in text
    assert "cache on" in text
    assert "not measured" in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-len", "9000"], "max-len needs 9000 tokens; the model has 8192 positions"),
        (["--long-tokens", "8192"], "long-tokens needs 8193 tokens; the model has 8192 positions"),
        (["--max-len", "1"], "max-len is 1; it must be from 2 to 1048576"),
        (["--chunk", "3"], "chunk is 3; it must be from 4 to"),
        (["--requests", "0"], "requests is 0; it must be from 1 to 100000"),
        (["--requests", "3000"], "requests is 3000; the trace has 2000"),
        (["--rate", "0"], "rate is 0; it must be above 0"),
        (["--budget", "nan"], "budget is nan; it must be above 0"),
        (["--seed", "-1"], "seed is -1; it must be at least 0"),
        (["--trace", "no/such/file"], "trace is no/such/file; it can't be read"),
        (["--sessions", "no/such/file"], "sessions is no/such/file; it holds neither questions nor recorded sessions"),
        (["--threads", "0"], "threads is 0; it must be from 1 to 1024"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    assert main(["bench", "batching", "--quick", "--no-plot", *flags]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.strip().count("\n") == 0


def test_a_part_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "batching", "--part", "everything"])
    assert ended.value.code == 2
    assert "invalid choice: 'everything'" in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "batching", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for flag in (
        "--part",
        "--trace",
        "--sessions",
        "--requests",
        "--max-len",
        "--rate",
        "--budget",
        "--quick",
        "--json",
    ):
        assert flag in text


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (InputError("sessions hold no prompt"), 2, "sessions hold no prompt"),
        (EngineError("a forward pass failed"), 1, "a forward pass failed"),
        (MemoryError(), 1, "out of memory"),
    ],
)
@pytest.mark.usefixtures("little_work")
def test_a_part_that_fails_takes_no_other_with_it(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    error: Exception,
    status: int,
    words: str,
) -> None:
    def fail(*args: Any, **settings: Any) -> None:
        raise error

    monkeypatch.setattr(batching_parts, "measure_prefix_cache", fail)
    flags = ["--part", "chunks", "--part", "prefix", "--part", "blocks", "--json", str(tmp_path / "x.json")]
    assert main(["bench", "batching", *SMALL, *flags, "--plot", str(tmp_path / "x.png")]) == status
    captured = capsys.readouterr()
    assert f"pageframe: part prefix failed: {words}" in captured.err
    assert "Traceback" not in captured.err
    for title in ("gaps between tokens while long prompts arrive", "block size, on half"):
        assert title in " ".join(captured.out.split())
    parts = json.loads((tmp_path / "x.json").read_text())["parts"]
    assert {name: part["failure"] for name, part in parts.items()} == {"chunks": "", "prefix": words, "blocks": ""}
    assert parts["blocks"]["ways"]["16"]


@pytest.mark.usefixtures("little_work")
def test_results_that_differ_without_a_tie_fail(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching_parts, "compare", lambda ours, theirs, engine: Agreement(different=1))
    assert main(["bench", "batching", *SMALL, "--part", "chunks", "--no-plot"]) == batching.EXIT_DIFFERENT
    assert "Some answers differ where no tie explains it." in capsys.readouterr().out
