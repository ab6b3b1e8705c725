"""The sampler against the rules written out plainly, in float64 and a row at a time."""

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pageframe.runtime.philox import gumbel, token_words
from pageframe.runtime.sampler import Sampler
from pageframe.runtime.step_plan import SamplingBatch, StepResult

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
INF, NAN = math.inf, math.nan
SAMPLER = Sampler(lambda hidden: hidden)


@dataclass(frozen=True)
class Row:
    logits: list[float]
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    output_index: int = 0
    num_logprobs: int = -1
    banned: tuple[int, ...] = ()


def sample(rows: list[Row], device: str = "cpu") -> StepResult:
    def column(name: str, dtype: npt.DTypeLike) -> npt.NDArray:
        return np.array([getattr(row, name) for row in rows], dtype)

    batch = SamplingBatch(
        temperature=column("temperature", np.float32),
        top_k=column("top_k", np.int32),
        top_p=column("top_p", np.float32),
        min_p=column("min_p", np.float32),
        seed=column("seed", np.int64),
        output_index=column("output_index", np.int64),
        num_logprobs=column("num_logprobs", np.int32),
        banned=tuple((index, row.banned) for index, row in enumerate(rows) if row.banned),
    )
    logits = torch.tensor([row.logits for row in rows], dtype=torch.float32, device=device)
    before = logits.clone()
    result = SAMPLER.sample(logits, batch)
    assert torch.equal(logits.nan_to_num(7.5), before.nan_to_num(7.5)), "the logits were written to"
    return result


def tokens_of(rows: list[Row], device: str = "cpu") -> list[int]:
    return sample(rows, device).token_ids.tolist()


def clean_logits(row: Row) -> npt.NDArray[np.float64]:
    """The row in float64 with the documented meaning of NaN, infinities and bans."""
    logits = np.array(row.logits, np.float32).astype(np.float64)
    logits[np.isnan(logits)] = -INF
    logits[logits == INF] = float(np.finfo(np.float32).max)
    banned = [token for token in row.banned if 0 <= token < len(logits)]
    logits[banned] = -INF
    if logits.max() == -INF:
        logits[:] = 0
        if len(set(banned)) < len(logits):
            logits[banned] = -INF
    return logits


def candidates(row: Row) -> tuple[list[int], bool]:
    """The ids that the filters leave, ascending; whether top_p's boundary is within rounding."""
    logits, temperature = clean_logits(row), float(np.float32(row.temperature))
    if row.top_k == 0 and row.top_p == 1 and row.min_p == 0:
        return list(range(len(logits))), False
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if row.top_k > 0:
        order = order[: row.top_k]
    weight = {token: math.exp((logits[token] - logits.max()) / temperature) for token in order}
    target = float(np.float32(row.top_p)) * math.fsum(weight.values())
    close = False
    if row.top_p < 1:
        left, mass = [], 0.0
        for token in order:
            if mass >= target:
                break
            left.append(token)
            mass += weight[token]
            close |= 0 < abs(mass - target) < 1e-5 * target
        order = left
    min_p = float(np.float32(row.min_p))
    close |= any(0 < abs(weight[token] - min_p) < 1e-12 for token in order)
    return sorted(token for token in order if weight[token] >= min_p), close


def expected_token(row: Row) -> int:
    logits, temperature = clean_logits(row), float(np.float32(row.temperature))
    if row.temperature < 1e-5:
        return int(logits.argmax())
    ids = np.array(candidates(row)[0])
    noise = gumbel(token_words(np.array([row.seed]), np.array([row.output_index]), [ids]))
    return int(ids[((logits[ids] - logits.max()) / temperature + noise).argmax()])


LEVELS = np.array([-30, -8, -2, -1, -0.5, -0.0, 0, 0.5, 1, 3, 4.25], np.float32)


@st.composite
def row_lists(draw: st.DrawFn, specials: bool = True) -> list[Row]:
    vocab_size = draw(st.integers(5, 300))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))

    def logits() -> list[float]:
        kind = draw(st.sampled_from(["levels", "normal", "wide", "close", "equal"]))
        values = {
            "levels": rng.choice(LEVELS, vocab_size),
            "normal": rng.normal(0, 3, vocab_size),
            "wide": rng.normal(0, 40, vocab_size),
            "close": rng.normal(0, 0.1, vocab_size),
            "equal": np.full(vocab_size, 1.5),
        }[kind].astype(np.float32)
        if specials and draw(st.integers(0, 3)) == 0:
            share = draw(st.sampled_from([0.01, 0.3, 1.0]))
            values[rng.random(vocab_size) < share] = draw(st.sampled_from([-INF, NAN, INF, 3.4e38, -3.4e38]))
        return values.tolist()

    return [
        Row(
            logits(),
            temperature=draw(st.sampled_from([0.0, 1e-38, 1e-4, 0.3, 0.7, 1.0, 1.0, 2.0, 10.0])),
            top_k=draw(st.sampled_from([0, 0, 1, 2, 7, 40, vocab_size - 1, vocab_size, vocab_size + 1, 2**31 - 1])),
            top_p=draw(st.sampled_from([1.0, 1.0, 1e-6, 0.1, 0.5, 0.9, 0.95, 0.999999])),
            min_p=draw(st.sampled_from([0.0, 0.0, 1e-9, 0.02, 0.3, 1.0])),
            seed=draw(st.integers(-(2**63), 2**63 - 1)),
            output_index=draw(st.sampled_from([0, 1, 2, 1000, 2**32, 2**40 + 5])),
            num_logprobs=draw(st.sampled_from([-1, -1, 0, 3, 20])),
            banned=draw(st.sampled_from([(), (), (0,), (3, 1, 3), (-1, vocab_size, 2**31), tuple(range(vocab_size))])),
        )
        for _ in range(draw(st.integers(1, 5)))
    ]


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=150, deadline=None)
@given(rows=row_lists())
def test_every_row_of_a_mixed_batch_follows_the_rules(device: str, rows: list[Row]) -> None:
    for row, token in zip(rows, tokens_of(rows, device), strict=True):
        if row.temperature < 1e-5 or not candidates(row)[1]:
            assert token == expected_token(row), row


@settings(max_examples=60, deadline=None)
@given(rows=row_lists(), data=st.data())
def test_neighbours_change_nothing(rows: list[Row], data: st.DataObject) -> None:
    together = sample(rows)
    order = data.draw(st.permutations(range(len(rows))))
    shuffled = sample([rows[index] for index in order])
    for position, index in enumerate(order):
        alone = sample([rows[index]])
        assert alone.token_ids[0] == together.token_ids[index] == shuffled.token_ids[position]
        assert alone.logprobs.get(0) == together.logprobs.get(index) == shuffled.logprobs.get(position)


def test_a_large_vocabulary() -> None:
    """Large enough for every way in which the sampler avoids looking at all tokens."""
    table = np.random.default_rng(5).normal(0, 2, (6, 12_007)).astype(np.float32).tolist()
    filters = [{}, {"top_p": 0.9}, {"top_k": 4000, "top_p": 0.95}, {"min_p": 0.01}, {"temperature": 0.0}, {"top_k": 9}]
    rows = [
        Row(logits, seed=index, output_index=7, num_logprobs=2, **filters[index]) for index, logits in enumerate(table)
    ]
    together, alone = sample(rows), [sample([row]) for row in rows]
    assert together.token_ids.tolist() == [result.token_ids[0] for result in alone]
    assert together.logprobs == {index: result.logprobs[0] for index, result in enumerate(alone)}
    assert together.token_ids.tolist() == [expected_token(row) for row in rows]


def test_a_token_far_below_the_best_wins_as_often_as_it_should() -> None:
    """No token may be left out because it is unlikely: together these are ten times as likely as the best."""
    vocab_size, gap = 20_000, math.log(2000)
    logits = np.full(vocab_size, -gap, np.float32)
    logits[17] = 0
    row = Row(logits.tolist())
    rows = [replace(row, output_index=index) for index in range(40)]
    tokens = tokens_of(rows)
    assert tokens == [expected_token(row) for row in rows]
    assert 1 <= tokens.count(17) <= 10


CHECKED_FILTERS = [
    ({}, [0, 1, 2, 3, 4, 5]),
    ({"temperature": 2.0}, [0, 1, 2, 3, 4, 5]),
    ({"top_k": 3}, [1, 3, 4]),
    ({"top_p": 0.8}, [1, 3, 4]),
    ({"min_p": 0.3}, [1, 4]),
    ({"top_k": 4, "top_p": 0.9, "min_p": 0.02, "temperature": 0.5}, [1, 4]),
]


@pytest.mark.parametrize(("filters", "left"), CHECKED_FILTERS)
def test_frequencies_are_the_probabilities(filters: dict[str, float], left: list[int]) -> None:
    logits = [-1.0, 2.0, 0.0, 0.5, 1.25, -3.0]
    num_draws = 4000
    base = Row(logits, seed=1, **filters)
    rows = [replace(base, output_index=index // 2, seed=index % 2) for index in range(num_draws)]
    counts = np.bincount(tokens_of(rows), minlength=len(logits))
    weights = np.array([math.exp(x / base.temperature) if token in left else 0.0 for token, x in enumerate(logits)])
    expected = num_draws * weights / weights.sum()
    assert candidates(base)[0] == left
    assert not counts[expected == 0].any()
    chi_squared = ((counts - expected)[left] ** 2 / expected[left]).sum()
    # Its 99.9% point for 1, 2, 5 degrees of freedom. The draws are the same at every run.
    assert chi_squared < {1: 10.83, 2: 13.82, 5: 20.52}[len(left) - 1]


def test_draws_of_neighbouring_tokens_and_positions_are_independent() -> None:
    """Pairs of successive draws of four equal tokens, 16 cells of 200 each."""
    tokens = np.array(tokens_of([Row([0.0] * 4, seed=3, output_index=index) for index in range(3201)]))
    pairs = np.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16)
    assert ((pairs - 200) ** 2 / 200).sum() < 37.7


@pytest.mark.parametrize(
    ("row", "left"),
    [
        (Row([1.0, 1, 1, 1], top_k=2), [0, 1]),
        (Row([0.0, 1, 1, 2, 1], top_k=3), [1, 2, 3]),
        (Row([0.0, -0.0, 0, -0.0], top_k=3), [0, 1, 2]),
        (Row([1.0, 1, 1, 1], top_p=0.5), [0, 1]),
        (Row([1.0, 1, 1, 1], top_p=0.500001), [0, 1, 2]),
        (Row([1.0, 1, 1, 1], top_p=1e-30), [0]),
        (Row([1.0, 2, 2, 2, 2], top_k=4, top_p=0.75), [1, 2, 3]),
        (Row([1.0, 2, 2, 1], min_p=1.0), [1, 2]),
        (Row([5.0, 1, 5, 1], banned=(0,)), [1, 2, 3]),
        (Row([5.0, 1, 5, 1], banned=(0,), top_k=1), [2]),
        (Row([1.0, 1, 1, 1], banned=(0, 2)), [1, 3]),
        (Row([-INF] * 4, banned=(1,)), [0, 2, 3]),
        (Row([1.0, 2], banned=(0, 1)), [0, 1]),
    ],
)
def test_exactly_the_allowed_tokens_are_drawn(row: Row, left: list[int]) -> None:
    drawn = tokens_of([replace(row, temperature=2.0, output_index=index) for index in range(100)])
    assert sorted(set(drawn)) == left


@pytest.mark.parametrize("spacing", [0.001, 0.01, 0.1, 1.0])
def test_top_p_ends_at_the_right_token_wherever_the_mass_lies(spacing: float) -> None:
    logits = [-spacing * (token * 7 % 50) for token in range(50)]
    for top_p in (0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.99):
        rows = [Row(logits, top_p=top_p, output_index=index) for index in range(100)]
        assert not candidates(rows[0])[1]
        assert tokens_of(rows) == [expected_token(row) for row in rows]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("logits", "token"),
    [
        ([1.0, 3, 3, 2], 1),
        ([-0.0, 0, 0, 0], 0),
        ([NAN, 1, 2, NAN], 2),
        ([NAN, NAN, NAN, NAN], 0),
        ([-INF, -INF, -INF, -INF], 0),
        ([NAN, -INF, -INF, -5], 3),
        ([1.0, INF, INF, NAN], 1),
        ([-INF, 3.4e38, -3.4e38, 0], 1),
    ],
)
def test_greedy_takes_the_lowest_id_of_the_largest_logit(device: str, logits: list[float], token: int) -> None:
    cold = [Row(logits, temperature=temperature) for temperature in (0.0, 1e-38, 9e-6)]
    assert tokens_of([*cold, replace(cold[0], banned=(-1, 4)), Row([0.0, 0, 9, 0])], device) == [token] * 4 + [2]


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1.0, 10.0])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 3, "top_p": 0.5}])
def test_logits_that_are_no_numbers_are_never_drawn_nor_fatal(temperature: float, filters: dict[str, float]) -> None:
    for logits, possible in (
        ([NAN, 1.0, -INF, 1.0, NAN], {1, 3}),
        ([NAN] * 5, {0, 1, 2, 3, 4}),
        ([-INF] * 5, {0, 1, 2, 3, 4}),
        ([0.0, INF, 1.0, NAN, INF], {1, 4}),
        ([-3.4e38, 3.4e38, -INF, 0.0, 0.0], {1}),
    ):
        rows = [Row(logits, temperature=temperature, output_index=index, **filters) for index in range(20)]
        assert set(tokens_of(rows)) <= possible


def test_low_temperature_is_nearly_greedy_and_high_is_nearly_even() -> None:
    logits = [20.0, 20.01, 19.0]
    assert set(tokens_of([Row(logits, temperature=1e-4, output_index=index) for index in range(50)])) == {1}
    hot = tokens_of([Row([20.0, 20.01, 19.99], temperature=10.0, output_index=index) for index in range(1500)])
    assert min(np.bincount(hot, minlength=3)) > 420


@pytest.mark.parametrize("device", DEVICES)
def test_banned_tokens_leave_the_row_its_next_best(device: str) -> None:
    rows = [Row([1.0, 4, 3, 4], temperature=0.0, banned=banned) for banned in ((), (1,), (1, 3), (0,), (3, 2, 1, 0))]
    assert tokens_of(rows, device) == [1, 3, 2, 1, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_logprobs_are_of_the_raw_logits(device: str) -> None:
    rng = np.random.default_rng(2)
    logits = rng.normal(0, 3, 1000).astype(np.float32)
    logits[[40, 7, 300]] = logits.max() + 1
    plain = Row(logits.tolist(), num_logprobs=5)
    odd = replace(plain, temperature=0.2, top_k=2, top_p=0.3, min_p=0.9, banned=(7,))
    result = sample(
        [plain, odd, replace(plain, num_logprobs=-1), replace(plain, temperature=0, num_logprobs=0)], device
    )
    assert sorted(result.logprobs) == [0, 1, 3]
    reference = torch.log_softmax(torch.tensor(logits, dtype=torch.float64), 0)
    likeliest = sorted(range(1000), key=lambda token: (-logits[token], token))[:5]
    assert likeliest[:3] == [7, 40, 300]
    for index in (0, 1):
        logprobs = result.logprobs[index]
        assert logprobs.top_ids == likeliest
        assert logprobs.top_logprobs == pytest.approx(reference[likeliest].tolist(), abs=1e-5)
        assert logprobs.logprob == pytest.approx(reference[result.token_ids[index]].item(), abs=1e-5)
    assert result.token_ids[3] == 7
    assert result.logprobs[3].logprob == result.logprobs[0].top_logprobs[0]
    assert result.logprobs[3].top_ids == result.logprobs[3].top_logprobs == []


def test_logprobs_of_a_damaged_or_tiny_row() -> None:
    result = sample([Row([NAN, 0.0, -INF, 0.0], temperature=0, num_logprobs=20), Row([NAN] * 4, num_logprobs=1)])
    assert result.logprobs[0].top_ids == [1, 3, 0, 2]
    assert result.logprobs[0].top_logprobs == pytest.approx([-math.log(2)] * 2 + [-INF] * 2)
    assert result.logprobs[1].top_ids == [0]
    assert result.logprobs[1].logprob == pytest.approx(-math.log(4))


def test_choices_of_one_row_differ() -> None:
    row = Row([0.0] * 50)
    assert len(set(tokens_of([replace(row, seed=seed) for seed in range(20)]))) > 10


def test_an_empty_batch_and_the_projection() -> None:
    assert SAMPLER.sample(torch.empty(0, 7), _nothing()).token_ids.tolist() == []
    result = Sampler(lambda hidden: hidden @ torch.tensor([[0.0, 1.0, 0.5]])).sample(torch.empty(0, 1), _nothing())
    assert result.token_ids.dtype == np.int32


@pytest.mark.parametrize("has_pass", [True, False], ids=["arg_max", "no arg_max"])
def test_rows_that_are_known_to_be_plain_give_what_they_give_otherwise(has_pass: bool) -> None:
    """Rows without a finite logit, and an infinite one, too."""
    logits = torch.tensor([[0.0, 3.0, 1.0], [math.nan] * 3, [-INF] * 3, [1.0, INF, 2.0], [math.nan, -1.0, -2.0]])

    def arg_max(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        best = hidden.nan_to_num(nan=-INF, posinf=INF, neginf=-INF).max(dim=1)
        return (best.indices, best.values) if has_pass else None

    sampler = Sampler(lambda hidden: hidden, arg_max)
    for count in range(len(logits) + 1):
        zeros, ints, longs = np.zeros(count, np.float32), np.zeros(count, np.int32), np.zeros(count, np.int64)
        batch = SamplingBatch(zeros, ints, zeros, zeros, longs, longs, ints - 1)
        plain = replace(batch, all_plain=True)
        drawn = sampler.sample(logits[:count], plain)
        assert drawn.token_ids.tolist() == [1, 0, 0, 1, 1][:count]
        assert drawn.token_ids.tolist() == sampler.sample(logits[:count], batch).token_ids.tolist()
        assert drawn.token_ids.dtype == np.int32


def _nothing() -> SamplingBatch:
    floats, ints, longs = np.empty(0, np.float32), np.empty(0, np.int32), np.empty(0, np.int64)
    return SamplingBatch(floats, ints, floats, floats, longs, longs, ints)
