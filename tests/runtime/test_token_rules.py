"""Bias, penalties, bad words, allowed tokens and grammars in the engine: each request against the rules written out
plainly, whatever happens around it. See fakes/ruled_model.py.
"""

from __future__ import annotations

import os
import random
import re
import sys
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from fakes.chain_hash import EOS
from fakes.ruled_model import (
    VOCAB_SIZE,
    FakeFiller,
    FakeGrammar,
    FakeMatcher,
    alone,
    batch_of,
    changed_logits,
    draw,
    forbidden,
    make_engine,
    random_params,
    rules_of,
)

from pageframe.runtime.errors import InvalidRequestError
from pageframe.runtime.grammar import GrammarSpec, MaskWords, Matcher
from pageframe.runtime.inspection import inspect
from pageframe.runtime.journal import GrammarEvent
from pageframe.runtime.philox import choice_seed
from pageframe.runtime.request import Request, RequestOutput, SamplingParams, choice_ids
from pageframe.runtime.sampler import Sampler
from pageframe.runtime.step_plan import NO_TOKEN
from pageframe.runtime.token_masks import TokenMasks
from pageframe.runtime.token_rules import TokenCounts, TokenRules, unpack

SEED = int(os.environ.get("PAGEFRAME_TEST_SEED", "20240607"))
SPEC = GrammarSpec("lark", "the test's")
EMPTY = np.zeros(0, np.int32)


@pytest.fixture
def rng() -> random.Random:
    sys.stdout.write(f"repeat with PAGEFRAME_TEST_SEED={SEED}\n")
    return random.Random(SEED)


# ---- the engine ---------------------------------------------------------------------------------------------------


def test_every_request_follows_its_rules_whatever_happens_around_it(rng: random.Random) -> None:
    """Preempted, forked, chunked and mixed with requests that have no rules."""
    engine, model = make_engine(num_blocks=16, max_num_requests=5, max_num_batched_tokens=9)
    expected, counts = {}, {"grammars": 0, "forks": 0}
    for number in range(30):
        plain = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "logit_bias": {}}
        plain |= {"allowed_token_ids": (), "bad_words_ids": ()}
        params = random_params(rng, n=rng.choice([1, 1, 3]), **(plain if rng.random() < 0.2 else {}))
        prompt = [rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randint(1, 12))]
        grammar = FakeGrammar(rng.randint(4, 25)) if rng.random() < 0.5 else None
        request_id = f"r{number}"
        engine.add(request_id, prompt, params, grammar=grammar)  # type: ignore[arg-type]
        counts["grammars"] += grammar is not None
        counts["forks"] += params.n > 1
        assert params.seed is not None
        for index, choice_id in enumerate(choice_ids(request_id, params.n)):
            matcher = FakeMatcher(grammar.length) if grammar is not None else None
            expected[choice_id] = alone(model, prompt, params, choice_seed(params.seed, index), matcher)
    got, reasons = run(engine)
    for choice_id, wanted in expected.items():
        assert (got[choice_id], reasons[choice_id]) == (wanted.token_ids, wanted.finish_reason), choice_id
    assert {"stop", "length"} <= set(reasons.values())
    assert engine.scheduler.num_preemptions > 5
    assert min(counts.values()) > 5
    assert not engine.scheduler.rows.rules, "rules of requests that have ended are kept"


def run(engine: Any) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Step until all have ended; the tokens and the finish reason of each choice."""
    tokens: dict[str, list[int]] = {}
    reasons = {}
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason:
                reasons[output.request_id] = output.finish_reason
        engine.scheduler.check_invariants()
    return tokens, reasons


def test_penalties_count_what_has_slid_out_of_the_context() -> None:
    """A token is drawn at most once, over many contexts: each is far behind all others once it has come."""
    engine, _ = make_engine(num_blocks=8, max_model_len=12, slide_by=6)
    params = SamplingParams(temperature=0, presence_penalty=2, frequency_penalty=2, max_tokens=60, ignore_eos=True)
    engine.add("free", [1, 2], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    engine.add("once", [1, 2], params)
    tokens, _ = run(engine)
    assert len(set(tokens["once"])) > len(set(tokens["free"])) + 10
    repeated = [token for token in tokens["once"] if tokens["once"].count(token) > 4]
    assert not repeated, "4 times are 10 off its logit, more than lies between any two"


def test_rules_that_leave_no_token_end_that_request_alone() -> None:
    engine, model = make_engine()
    rest = tuple((token,) for token in range(VOCAB_SIZE) if token != 9)
    engine.add("none", [1, 2], SamplingParams(allowed_token_ids=(5, 6), bad_words_ids=((5,), (6,)), max_tokens=4))
    engine.add("later", [1, 2], SamplingParams(bad_words_ids=(*rest, (9, 9)), n=2, max_tokens=4))
    params = SamplingParams(temperature=0, max_tokens=4)
    engine.add("other", [1, 2, 3], params)
    outputs: list[RequestOutput] = []
    while engine.has_work:
        outputs += engine.step()
        engine.scheduler.check_invariants()
    ends = {output.request_id: output for output in outputs if output.finish_reason}
    for request_id, num_tokens, param, words in (
        ("none", 0, "", "allowed_token_ids (2 ids) and bad_words together leave"),
        ("later-0", 1, "bad_words", "bad_words leaves"),
        ("later-1", 1, "bad_words", "bad_words leaves"),
    ):
        output = ends[request_id]
        assert (output.finish_reason, output.token_ids, output.param) == ("refused", [], param)
        assert output.error == f"{words} no token that may come next"
        request = engine.scheduler.find(request_id)
        assert request is not None
        assert request.token_ids.tolist() == [1, 2, *[9] * num_tokens]
    assert ends["other"].finish_reason == alone(model, [1, 2, 3], params, 0).finish_reason


@pytest.mark.parametrize(
    ("fields", "has_grammar", "param", "words"),
    [
        (
            {"allowed_token_ids": (EOS,), "min_tokens": 2},
            False,
            "",
            r"allowed_token_ids \(1 ids\) and min_tokens \(2, .* ",
        ),
        ({"allowed_token_ids": (EOS,)}, True, "", r"^grammar and allowed_token_ids \(1 ids\) together"),
        (
            {"bad_words_ids": [(token,) for token in range(VOCAB_SIZE)]},
            False,
            "bad_words",
            "^bad_words leaves no token",
        ),
    ],
)
def test_only_the_rules_that_a_request_has_are_blamed(
    fields: dict[str, Any], has_grammar: bool, param: str, words: str
) -> None:
    engine, _ = make_engine()
    grammar: Any = FakeGrammar(5) if has_grammar else None
    engine.add("r", [1, 2], SamplingParams(max_tokens=4, **fields), grammar=grammar)
    [output] = [output for output in engine.step() if output.finish_reason]
    assert (output.finish_reason, output.param) == ("refused", param)
    assert re.search(words, output.error), output.error


def test_extreme_penalties_are_no_matter_for_warnings() -> None:
    for penalty in (5e-324, 1e-45, 1e-38):
        request = Request(
            "r", np.array([1, 2, 3], np.int32), SamplingParams(repetition_penalty=penalty), "", 0, 0, 0.0, 0, 0, 9,
            frozenset(), frozenset(),
        )  # fmt: skip
        logits = np.array([1.0, 3e38, -3e38, 0.0], np.float32)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            TokenRules(request).apply(logits)
        assert not np.isnan(logits).any()
        assert logits[1] == np.finfo(np.float32).max


def test_a_matcher_that_fails_ends_its_request_and_not_the_engine() -> None:
    engine, _ = make_engine()
    params = SamplingParams(temperature=0, max_tokens=9)
    engine.add("fails", [1, 2], params, grammar=FakeGrammar(8, fails_at=2))  # type: ignore[arg-type]
    engine.add("goes on", [1, 2], params, grammar=FakeGrammar(5))  # type: ignore[arg-type]
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    ends = {output.request_id: output for output in outputs if output.finish_reason}
    assert (ends["fails"].finish_reason, ends["fails"].param) == ("refused", "grammar")
    assert "a limit of the test's" in ends["fails"].error
    assert (ends["goes on"].finish_reason, ends["goes on"].token_ids[-1]) == ("stop", EOS)


@pytest.mark.parametrize("end", ["by itself", "aborted", "refused"])
def test_a_request_that_has_ended_keeps_nothing_long(end: str) -> None:
    """It can be looked at for as long as 255 others end after it."""
    engine, _ = make_engine()
    params = SamplingParams(
        temperature=0,
        top_k=5,
        max_tokens=4,
        logit_bias={3: 1.0},
        bad_words_ids=[[4, 5]],
        allowed_token_ids=range(VOCAB_SIZE),
        grammar=GrammarSpec("lark", "long" * 1000),
    )
    grammar = FakeGrammar(8, fails_at=2 if end == "refused" else -1)
    engine.add("r", [1, 2], params, grammar=grammar)  # type: ignore[arg-type]
    engine.step()
    if end == "aborted":
        engine.abort("r")
    while engine.has_work:
        engine.step()
    request = engine.scheduler.find("r")
    assert request is not None
    assert request.finish_reason is not None
    assert request.matcher is None
    assert request.params == SamplingParams(temperature=0, top_k=5, max_tokens=4, grammar=GrammarSpec("lark"))
    assert inspect(engine, "request", "r")["finish_reason"] == request.finish_reason.value


@pytest.mark.parametrize(("logprobs", "num_steps"), [(None, 5), (0, 6)])
def test_a_grammar_ends_its_text_whatever_else_is_asked_for(logprobs: int | None, num_steps: int) -> None:
    """ignore_eos and min_tokens are for texts without a grammar: there is nothing left to write. The end is drawn only
    where its logprob is wanted."""
    engine, _ = make_engine()
    params = SamplingParams(temperature=0, max_tokens=20, min_tokens=15, ignore_eos=True, logprobs=logprobs)
    engine.add("whole", [1, 2], params, grammar=FakeGrammar(5))  # type: ignore[arg-type]
    tokens, reasons = run(engine)
    assert (len(tokens["whole"]), tokens["whole"][-1], reasons["whole"]) == (6, EOS, "stop")
    assert engine.scheduler.step == num_steps
    request = engine.scheduler.find("whole")
    assert request is not None
    assert request.token_ids.tolist() == [1, 2, *tokens["whole"]]


def test_the_journal_tells_of_a_grammar() -> None:
    engine, _ = make_engine()
    params = SamplingParams(max_tokens=2, grammar=SPEC)
    engine.add("with", [1], params, grammar=FakeGrammar(5))  # type: ignore[arg-type]
    engine.add("without", [1], SamplingParams(max_tokens=2))
    events = [event for event in engine.journal if isinstance(event, GrammarEvent)]
    assert [(event.request_id, event.kind_of_grammar) for event in events] == [("with", "lark")]


def test_an_engine_without_a_compiler_refuses_a_grammar() -> None:
    engine, _ = make_engine()
    with pytest.raises(InvalidRequestError, match=r"^grammar is given; .* no tokenizer") as raised:
        engine.add("r", [1], SamplingParams(grammar=SPEC))
    assert raised.value.param == "grammar"
    assert not engine.has_work


def test_requests_without_rules_cost_no_mask_and_no_rules() -> None:
    engine, _ = make_engine()
    engine.add("r", [1, 2, 3], SamplingParams(max_tokens=3, min_tokens=2, logprobs=1, stop_token_ids=[5]))
    engine.step()
    assert engine.scheduler.rows.rules == {}
    assert engine._masks._table is None


# ---- the sampler --------------------------------------------------------------------------------------------------


def test_rows_follow_their_rules_and_logprobs_are_of_the_raw_logits(rng: random.Random) -> None:
    cases, masks = [], TokenMasks(64, VOCAB_SIZE, 1, lambda num_threads: FakeFiller())
    for _ in range(60):
        params = random_params(rng, logprobs=rng.choice([None, 0, 4]))
        prompt, output = ([rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(0, 15))] for _ in range(2))
        matcher = FakeMatcher(99, accepted=output) if rng.random() < 0.4 else None
        rules = rules_of(params, prompt, output, matcher) if rng.random() < 0.9 else None
        cases.append((params, rules, prompt, output, matcher))
    table = np.random.default_rng(rng.randrange(2**40)).normal(0, 2, (60, VOCAB_SIZE)).astype(np.float32)
    table[5], table[6, 3], table[7, :40] = -np.inf, np.nan, np.inf
    batch = batch_of([(params, rules) for params, rules, *_ in cases])
    masks.begin(batch)
    result = Sampler(lambda hidden: hidden).sample_logits(torch.from_numpy(table), batch)
    without = Sampler(lambda hidden: hidden).sample_logits(
        torch.from_numpy(table), batch_of([(params, None) for params, *_ in cases])
    )
    changed = 0
    for row, (params, rules, prompt, output, matcher) in enumerate(cases):
        if row in (5, 7):  # nothing to choose by; what may not come does not, see below
            continue
        logits = np.nan_to_num(table[row], nan=-np.inf, neginf=-np.inf)
        if rules is not None:
            logits = changed_logits(logits, params, prompt, output)
            may_not = sorted(forbidden(params, output, None if matcher is None else matcher.allowed()))
            logits[may_not] = -np.inf
            if len(may_not) == VOCAB_SIZE:
                assert result.token_ids[row] == NO_TOKEN
                continue
        assert params.seed is not None
        assert result.token_ids[row] == draw(logits, params, params.seed, row), row
        changed += result.token_ids[row] != without.token_ids[row]
        if params.logprobs is not None:
            expected = table[row].astype(np.float64)
            expected[np.isnan(expected)] = -np.inf
            expected -= np.log(np.exp(expected).sum())
            assert result.logprobs[row].logprob == pytest.approx(expected[result.token_ids[row]], abs=1e-5)
            assert result.logprobs[row].top_logprobs == pytest.approx(
                np.sort(expected)[::-1][: params.logprobs], abs=1e-5
            )
    assert changed > 20, "the rules were meant to matter"


@pytest.mark.parametrize("level", [-np.inf, np.nan, np.inf, 3.4e38])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_row_without_a_choice_still_draws_what_its_mask_leaves(level: float, temperature: float) -> None:
    params = SamplingParams(
        temperature=temperature, seed=3, allowed_token_ids=[40, 41], repetition_penalty=0.1, logit_bias={41: 9}
    )
    batch = batch_of([(params, rules_of(params, [1, 40], [41]))])
    TokenMasks(1, VOCAB_SIZE, 1).begin(batch)
    logits = torch.full((1, VOCAB_SIZE), level)
    logits[0, 5] = 3.0
    assert Sampler(lambda hidden: hidden).sample_logits(logits, batch).token_ids[0] in (40, 41)


def test_a_mask_of_a_step_that_failed_is_not_written_over_the_next_steps() -> None:
    """Nobody waits for the first one's masks: its forward pass has failed."""
    may_fill, filling, filled = threading.Event(), threading.Event(), threading.Event()

    class SlowFiller(FakeFiller):
        def fill(self, matchers: Sequence[tuple[int, Matcher]], masks: MaskWords) -> None:
            filling.set()
            assert may_fill.wait(10)
            super().fill(matchers, masks)
            filled.set()

    masks = TokenMasks(1, VOCAB_SIZE, 1, lambda num_threads: SlowFiller())
    grammar = SamplingParams(temperature=0, seed=0)
    masks.begin(batch_of([(grammar, rules_of(grammar, [1], [], FakeMatcher(99)))]))
    assert filling.wait(10)
    allowed = SamplingParams(temperature=0, seed=0, allowed_token_ids=[40, 41])
    batch = batch_of([(allowed, rules_of(allowed, [1], []))])
    begun = threading.Thread(target=masks.begin, args=(batch,))
    begun.start()
    begun.join(0.05)  # without the wait it has written its mask by then, and the first one's comes over it
    may_fill.set()
    begun.join(10)
    assert filled.wait(10)
    logits = torch.arange(VOCAB_SIZE, dtype=torch.float32)[None]
    assert Sampler(lambda hidden: hidden).sample_logits(logits, batch).token_ids.tolist() == [41]


def test_banned_tokens_are_banned_in_masked_rows_too() -> None:
    masked = SamplingParams(temperature=0, seed=0, allowed_token_ids=[3, 60])
    penalised = SamplingParams(temperature=0, seed=0, presence_penalty=0.5)
    rows = [(masked, rules_of(masked, [1], [])), (penalised, rules_of(penalised, [1], []))]
    batch = batch_of(rows, banned=((0, (60, 64)), (1, (60, 64))))
    TokenMasks(2, VOCAB_SIZE, 1).begin(batch)
    logits = torch.arange(VOCAB_SIZE, dtype=torch.float32).roll(-5)[None].repeat(2, 1)
    assert Sampler(lambda hidden: hidden).sample_logits(logits, batch).token_ids.tolist() == [3, 63]


def test_greedy_rows_with_rules_are_not_drawn_by_the_fused_arg_max() -> None:
    """The others are, and only the logits of the rest are made."""
    params = SamplingParams(temperature=0, seed=0, logit_bias={2: 100})
    batch = batch_of([(params, None), (params, rules_of(params, [1], [])), (params, None)])
    sizes = []

    def make_logits(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return hidden

    def arg_max(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sizes.append(len(hidden))
        values, ids = hidden.max(1)
        return ids, values

    logits = torch.eye(3, VOCAB_SIZE)
    assert Sampler(make_logits, arg_max).sample(logits, batch).token_ids.tolist() == [0, 2, 2]
    assert sizes == [2, 1]


# ---- the parts ----------------------------------------------------------------------------------------------------


def test_counts_kept_token_by_token_equal_those_made_at_once(rng: random.Random) -> None:
    prompt, output = ([rng.randrange(400) for _ in range(count)] for count in (300, 500))
    kept = TokenCounts(np.array(prompt, np.int32), EMPTY)
    for token in output:
        kept.add(token)
    made = TokenCounts(np.array(prompt, np.int32), np.array(output, np.int32))
    for counts in (kept, made):
        found = dict(zip(counts.token_ids.tolist(), counts.output_counts.tolist(), strict=True))
        assert found == {token: output.count(token) for token in {*prompt, *output}}
        assert len(counts.token_ids) == len(found)


def test_prompt_tokens_are_counted_only_where_they_are_penalised() -> None:
    long_prompt = list(range(50))
    presence = rules_of(SamplingParams(presence_penalty=1), long_prompt, [3]).counts
    repetition = rules_of(SamplingParams(repetition_penalty=1.1), long_prompt, [3]).counts
    assert presence is not None
    assert repetition is not None
    assert (presence.token_ids.tolist(), len(repetition.token_ids)) == ([3], 50)


@pytest.mark.parametrize(
    ("output", "due"),
    [([], {7}), ([1], {2, 7}), ([1, 2], {3, 7}), ([2], {7}), ([1, 1, 2], {3, 7}), ([1, 2, 1], {2, 7})],
)
def test_what_completes_a_bad_word_may_not_come(output: list[int], due: set[int]) -> None:
    rules = rules_of(SamplingParams(bad_words_ids=[(7,), (1, 2), (1, 2, 3)]), [1, 2], [])
    for length in range(len(output) + 1):
        rules.catch_up(np.array([1, 2, *output[:length]], np.int32))
    mask = np.empty(-(-VOCAB_SIZE // 32), np.uint32)
    rules.write_mask(mask, ())
    assert set(np.flatnonzero(~unpack(mask, VOCAB_SIZE)).tolist()) == due


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("presence_penalty", 2.5, "from -2 to 2"),
        ("frequency_penalty", float("nan"), "from -2 to 2"),
        ("repetition_penalty", 0, "above 0 and at most 10"),
        ("logit_bias", {1: 101}, "from -100 to 100"),
        ("logit_bias", {1: True}, "from -100 to 100"),
        ("logit_bias", dict.fromkeys(range(1025), 1), "1025 entries; at most 1024"),
        ("bad_words_ids", [()], "a sequence of 0 tokens"),
        ("bad_words_ids", [(1,)] * 1025, "1025 sequences; at most 1024"),
        ("prompt_logprobs", 21, "from 0 to 20"),
        ("timeout_seconds", 0, "above 0 and at most 3600"),
        ("timeout_seconds", 3601, "above 0 and at most 3600"),
    ],
)
def test_values_out_of_range_are_refused(field: str, value: object, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said) as raised:
        SamplingParams(**{field: value})
    assert raised.value.param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [("logit_bias", {VOCAB_SIZE: 1}), ("allowed_token_ids", [VOCAB_SIZE]), ("bad_words_ids", [(1, -1)])],
)
def test_ids_beyond_the_vocabulary_are_refused_at_the_door(field: str, value: Any) -> None:
    engine, _ = make_engine()
    with pytest.raises(InvalidRequestError, match=f"^{field} has token id") as raised:
        engine.add("r", [1], SamplingParams(**{field: value}))
    assert raised.value.param == field
