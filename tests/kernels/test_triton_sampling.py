"""Sampling kernels against the host's sampler, token by token, and their parts against plain arithmetic."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
import triton
import triton.language as tl

from pageframe.kernels.triton import launches, sampling
from pageframe.kernels.triton.sampling import Settings, draw_tokens
from pageframe.kernels.triton.sampling_filters import filter_row, is_kept, load_logits, order_key
from pageframe.kernels.triton.sampling_noise import contest, noise_bound, words_from, words_of
from pageframe.kernels.triton.sampling_penalties import Penalties, penalize
from pageframe.kernels.triton.sampling_rules import token_masses
from pageframe.kernels.triton.sampling_table import Draws
from pageframe.runtime.philox import NOISE_SPAN, gumbel, token_words
from pageframe.runtime.sampler import Sampler
from pageframe.runtime.step_plan import SamplingBatch, StepResult

from .test_triton_loads import reads_counted

INF, NAN = math.inf, math.nan
Float32s = npt.NDArray[np.float32]
#: Small enough that a few hundred tokens take every way through the kernels.
SMALL = Settings(part=64, lanes=64, tile=128, capacity=64)
VOCAB_SIZE = 301


@pytest.fixture(autouse=True)
def _quiet_interpreter() -> Iterator[None]:
    """Numbers may overflow as they do on a device."""
    with np.errstate(all="ignore"):
        yield


@dataclass(frozen=True)
class Row:
    logits: Float32s
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    output_index: int = 0
    num_logprobs: int = -1
    banned: tuple[int, ...] = ()


def batch_of(rows: list[Row]) -> tuple[Float32s, SamplingBatch]:
    def column(name: str, dtype: npt.DTypeLike) -> npt.NDArray:
        return np.array([getattr(row, name) for row in rows], dtype)

    return np.stack([row.logits for row in rows]), SamplingBatch(
        temperature=column("temperature", np.float32),
        top_k=column("top_k", np.int32),
        top_p=column("top_p", np.float32),
        min_p=column("min_p", np.float32),
        seed=column("seed", np.int64),
        output_index=column("output_index", np.int64),
        num_logprobs=column("num_logprobs", np.int32),
        banned=tuple((index, row.banned) for index, row in enumerate(rows) if row.banned),
    )


def check_against_host(rows: list[Row], device: torch.device) -> StepResult:
    """Draw on the device, assert that the host draws the same, and return it."""
    table, batch = batch_of(rows)
    logits = torch.from_numpy(table).to(device)
    before = logits.clone()
    drawn = Sampler(lambda hidden: hidden, on_device=True).sample_logits(logits, batch)
    expected = Sampler(lambda hidden: hidden).sample_logits(torch.from_numpy(table), batch)
    assert torch.equal(logits.view(torch.int32), before.view(torch.int32)), "the logits were written to"
    for row, token, wanted in zip(rows, drawn.token_ids.tolist(), expected.token_ids.tolist(), strict=True):
        assert token == wanted, row
    assert sorted(drawn.logprobs) == sorted(expected.logprobs)
    for index, logprobs in drawn.logprobs.items():
        wanted = expected.logprobs[index]
        assert logprobs.top_ids == wanted.top_ids, rows[index]
        assert logprobs.logprob == pytest.approx(wanted.logprob, abs=1e-5)
        assert logprobs.top_logprobs == pytest.approx(wanted.top_logprobs, abs=1e-5)
    return drawn


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "DEFAULTS", SMALL)


LEVELS = np.array([-30, -8, -2, -1, -0.5, -0.0, 0, 0.5, 1, 3, 4.25], np.float32)


def random_logits(rng: np.random.Generator, vocab_size: int = VOCAB_SIZE) -> Float32s:
    logits = {
        "levels": lambda: rng.choice(LEVELS, vocab_size),
        "normal": lambda: rng.normal(0, 3, vocab_size),
        "wide": lambda: rng.normal(0, 40, vocab_size),
        "close": lambda: rng.normal(0, 0.1, vocab_size),
        "peaked": lambda: np.where(rng.random(vocab_size) < 0.03, rng.normal(9, 2, vocab_size), rng.normal(0, 2)),
        "equal": lambda: np.full(vocab_size, 1.5),
    }[rng.choice(["levels", "normal", "normal", "wide", "close", "peaked", "equal"])]().astype(np.float32)
    if rng.random() < 0.2:
        share = rng.choice([0.01, 0.3, 1.0])
        logits[rng.random(vocab_size) < share] = rng.choice([-INF, NAN, INF, 3.4e38, -3.4e38])
    return logits


def random_row(rng: np.random.Generator, vocab_size: int = VOCAB_SIZE) -> Row:
    def pick(*values: float) -> float:
        return float(rng.choice(values))

    return Row(
        random_logits(rng, vocab_size),
        temperature=pick(0.0, 1e-5, 0.3, 0.7, 1.0, 1.0, 2.0, 10.0),
        top_k=int(pick(0, 0, 1, 2, 7, 40, 70, vocab_size - 1, vocab_size, 2**31 - 1)),
        top_p=pick(1.0, 1.0, 1e-6, 0.1, 0.5, 0.9, 0.95, 0.999999),
        min_p=pick(0.0, 0.0, 1e-9, 0.02, 0.3, 1.0),
        seed=int(rng.integers(-(2**63), 2**63)),
        output_index=int(pick(0, 1, 1000, 2**32, 2**40 + 5)),
        num_logprobs=int(pick(-1, -1, -1, 0, 3, 20)),
        banned=((), (), (0,), (3, 1, 3), (-1, vocab_size, 2**31), tuple(range(vocab_size)))[int(rng.choice(6))],
    )


@pytest.mark.usefixtures("_small")
def test_every_row_of_a_mixed_batch_draws_the_hosts_token(device: torch.device, rng: np.random.Generator) -> None:
    check_against_host([random_row(rng) for _ in range(14)], device)


@pytest.mark.long
@pytest.mark.parametrize("vocab_size", [1, 5, 64, 1000, 2500])
@pytest.mark.parametrize("settings", [SMALL, Settings(), Settings(part=16, lanes=16, tile=16, capacity=32)])
def test_many_rows_of_any_size_draw_the_hosts_tokens(
    device: torch.device,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    vocab_size: int,
    settings: Settings,
) -> None:
    if settings.tile * 100 < vocab_size:
        pytest.skip("hundreds of tiles a row take the interpreter too long")
    monkeypatch.setattr(sampling, "DEFAULTS", settings)
    check_against_host([random_row(rng, vocab_size) for _ in range(30)], device)


@pytest.mark.usefixtures("_small")
def test_hot_rows_keep_to_their_filters(device: torch.device, rng: np.random.Generator) -> None:
    """So hot that what a filter ought to drop would often win."""
    logits = rng.normal(0, 3, VOCAB_SIZE).astype(np.float32)
    filters = [{"min_p": 0.5}, {"min_p": 0.7, "top_k": 50}, {"top_k": 5}, {"top_p": 0.1}]
    rows = [Row(logits, temperature=8, output_index=index, **each) for each in filters for index in range(2)]
    check_against_host(rows, device)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize(
    "row",
    [
        Row(np.array([NAN, 1, 2, NAN, INF, INF], np.float32), temperature=0),
        Row(np.array([NAN, 1.0, -INF, 1.0, NAN], np.float32), top_p=0.5),
        Row(np.full(70, NAN, np.float32), num_logprobs=3),
        Row(np.full(70, -INF, np.float32), banned=(0, 69), num_logprobs=0),
        Row(np.arange(70, dtype=np.float32), banned=tuple(range(70)), num_logprobs=2),
        Row(np.array([0.0, INF, 1, NAN, INF] * 14, np.float32), top_k=20, num_logprobs=20),
        Row(np.array([-3.4e38, 3.4e38, -INF, 0.0] * 20, np.float32), top_p=0.9),
        Row(np.array([-0.0, 0, -0.0, 0, -1] * 30, np.float32), top_k=101, temperature=5, num_logprobs=4),
        Row(np.repeat(np.array([-INF, -1000, -1001], np.float32), 64), num_logprobs=2),
        Row(np.repeat(np.array([0, 3, -1], np.float32), [150, 2, 8]), top_k=12, min_p=1),
    ],
    ids=range(10),
)
def test_damaged_rows_follow_the_hosts_rules(device: torch.device, row: Row) -> None:
    check_against_host([row], device)


@pytest.mark.usefixtures("_small")
def test_only_the_lowest_ids_of_equal_logits_are_drawn(device: torch.device) -> None:
    """More equal tokens than the buffer holds: the cut's last id is found in the row itself."""
    equal = np.full(VOCAB_SIZE, 2.5, np.float32)
    rows = [
        Row(equal, output_index=index, **filters) for index in range(3) for filters in ({"top_k": 99}, {"top_p": 0.25})
    ]
    drawn = check_against_host(rows, device).token_ids
    assert drawn[::2].max() < 99
    assert drawn[1::2].max() < math.ceil(VOCAB_SIZE / 4)
    assert len(set(drawn.tolist())) > 3


# The parts.


@triton.jit
def cut_kernel(
    logits_ptr, kept_ptr, held_ptr, buffer_logits_ptr, buffer_ids_ptr, temperature_ptr, top_k, top_p_ptr, vocab_size,
    TILE: tl.constexpr, CAPACITY: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Marks which tokens of one row the filters keep."""
    ids = tl.arange(0, SIZE)
    logits = load_logits(logits_ptr, ids, vocab_size)
    best = tl.max(logits, axis=0)
    lanes = tl.max(tl.reshape(logits, [SIZE // 64, 64]), axis=0)
    floor = order_key(tl.full([], -3.0e38, tl.float32))
    key, last, held = filter_row(
        logits_ptr, vocab_size, best, lanes, 64, tl.load(temperature_ptr), floor, top_k + tl.zeros([], tl.int64),
        tl.load(top_p_ptr), buffer_logits_ptr, buffer_ids_ptr, TILE, CAPACITY,
    )  # fmt: skip
    tl.store(kept_ptr + ids, is_kept(order_key(logits), ids, key, last).to(tl.int32), mask=ids < vocab_size)
    tl.store(held_ptr, held)


def kept_by_kernel(
    logits: Float32s, temperature: float, top_k: int, top_p: float, settings: Settings, device: torch.device
) -> tuple[list[int], int]:
    """The ids that the filters keep, and how many tokens the buffer holds at the end, -1 if others."""
    kept = torch.zeros(len(logits), dtype=torch.int32, device=device)
    held = torch.zeros(1, dtype=torch.int32, device=device)
    buffer = torch.empty(settings.capacity, device=device)
    numbers = torch.tensor([np.float32(temperature), top_p], dtype=torch.float64, device=device)
    cut_kernel[(1,)](
        torch.from_numpy(logits).to(device),
        kept,
        held,
        buffer,
        torch.empty_like(buffer, dtype=torch.int32),
        numbers[:1],
        top_k,
        numbers[1:],
        len(logits),
        TILE=settings.tile,
        CAPACITY=settings.capacity,
        SIZE=triton.next_power_of_2(len(logits)),
    )
    return kept.nonzero()[:, 0].tolist(), int(held)


def kept_by_sorting(logits: Float32s, temperature: float, top_k: int, top_p: float) -> list[int]:
    """The rules, with whole numbers of any size."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    order = order[: top_k or len(order)]
    masses = dict(enumerate(token_masses((logits.max() - logits) / np.float32(temperature)).astype(int).tolist()))
    target = math.ceil(top_p * sum(masses[token] for token in order))
    ends = itertools.accumulate(masses[token] for token in order)
    count = next((place for place, mass in enumerate(ends, 1) if mass >= target and top_p < 1), len(order))
    return sorted(order[:count])


@pytest.mark.parametrize("settings", [SMALL, Settings(tile=512, capacity=512)], ids=["narrowed", "at_once"])
def test_cuts_are_the_sorted_rows(device: torch.device, rng: np.random.Generator, settings: Settings) -> None:
    """Whether the cut is found among the tokens set aside at first or needs more readings of the row."""
    held = []
    filters = [(7, 1.0), (0, 0.5), (40, 0.9), (200, 0.8), (0, 0.999)]
    for top_k, top_p in filters:
        logits = rng.normal(0, 2, VOCAB_SIZE).astype(np.float32) if top_k != 40 else rng.choice(LEVELS, VOCAB_SIZE)
        temperature = float(rng.choice([0.4, 1.0, 1.7]))
        kept, count = kept_by_kernel(logits, temperature, top_k, top_p, settings, device)
        assert kept == kept_by_sorting(logits, temperature, top_k, top_p), (top_k, top_p, temperature)
        held.append(count)
    assert (max(held) == VOCAB_SIZE) == (settings is not SMALL)
    assert (min(held) == -1) == (settings is SMALL)


def test_top_p_ends_where_whole_numbers_say(device: torch.device, rng: np.random.Generator) -> None:
    """At a top_p half a unit of mass below and above what the first tokens amount to."""
    logits = rng.normal(0, 2, 90).astype(np.float32)
    masses = np.sort(token_masses(logits.max() - logits))[::-1]
    for count in (3, 20):
        for unit, wanted in ((-0.5, count), (0.5, count + 1)):
            top_p = (masses[:count].sum() + unit) / masses.sum()
            kept, _ = kept_by_kernel(logits, 1.0, 0, float(top_p), SMALL, device)
            assert kept == np.sort(np.argsort(-logits)[:wanted]).tolist()


def test_crowded_lanes_do_not_hide_tokens(device: torch.device, rng: np.random.Generator) -> None:
    """The likeliest share few lanes, so more are set aside than fit."""
    logits = rng.normal(0, 1, VOCAB_SIZE).astype(np.float32)
    logits[np.arange(VOCAB_SIZE) % 64 < 30] += 10
    for top_k, top_p in ((25, 1.0), (0, 0.4)):
        kept, held = kept_by_kernel(logits, 1.0, top_k, top_p, SMALL, device)
        assert kept == kept_by_sorting(logits, 1.0, top_k, top_p)
        assert held == -1


@triton.jit
def contest_kernel(winner_ptr, bounds_ptr, logits_ptr, ids_ptr, words_ptr, kept_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    logits = tl.load(logits_ptr + at)
    words = tl.load(words_ptr + at).to(tl.uint32)
    score = tl.full([], float("-inf"), tl.float64)
    winner = tl.full([], 2**31 - 1, tl.int32)
    best = tl.max(logits, axis=0)
    one = tl.full([], 1.0, tl.float64)
    kept = tl.load(kept_ptr + at) != 0
    score, winner, logit = contest(score, winner, best, logits, tl.load(ids_ptr + at), words, kept, best, one, SIZE)
    tl.store(winner_ptr, winner)
    tl.store(winner_ptr + 1, logit.to(tl.int32))
    tl.store(bounds_ptr + at, noise_bound(words))


def test_contest_is_won_by_the_largest_score_and_the_lowest_id(device: torch.device, rng: np.random.Generator) -> None:
    """Among words whose bound says little about their noise, words alike, and the extreme ones."""
    near_ends = [0, 1, 2**31, 2**32 - 2, 2**32 - 1]
    for words in (rng.integers(0, 2**32, 64), rng.choice(2**30 + np.arange(3), 64), rng.choice(near_ends, 64)):
        logits = rng.choice([0, 1], 64).astype(np.float32)
        ids = rng.permutation(1000)[:64].astype(np.int32)
        kept = rng.random(64) < 0.7
        winner = torch.zeros(2, dtype=torch.int32, device=device)
        bounds = torch.zeros(64, device=device)
        arrays = (logits, ids, words.astype(np.int64), kept.astype(np.int32))
        contest_kernel[(1,)](winner, bounds, *(torch.from_numpy(array).to(device) for array in arrays), SIZE=64)
        noise = gumbel(words.astype(np.uint32))
        scores = np.where(kept, logits - logits.max() + noise, -INF)
        wins = ids == ids[scores == scores.max()].min()
        assert winner.tolist() == [int(ids[wins][0]), int(logits[wins][0])]
        assert (bounds.cpu().numpy() - noise).min() > 5e-4, "no room for float32's rounding"


@triton.jit
def noise_kernel(words_ptr, ids_ptr, start, seed_ptr, index_ptr, SIZE: tl.constexpr, FROM_IDS: tl.constexpr):
    at = tl.arange(0, SIZE)
    if FROM_IDS:
        words = words_of(tl.load(seed_ptr), tl.load(index_ptr), tl.load(ids_ptr + at))
    else:
        words = words_from(tl.load(seed_ptr), tl.load(index_ptr), start, SIZE)
    tl.store(words_ptr + at, words.to(tl.int64))


@pytest.mark.parametrize("from_ids", [False, True])
def test_noise_words_are_the_hosts(device: torch.device, rng: np.random.Generator, from_ids: bool) -> None:
    seeds = [0, -1, int(rng.integers(-(2**63), 2**63)), 2**32 + 7]
    for seed, index in zip(seeds, [0, 2**40 + 3, int(rng.integers(2**62)), 2**32 - 1], strict=True):
        start = 4 * int(rng.integers(30_000))
        ids = np.sort(rng.choice(200_000, 64, replace=False)) if from_ids else start + np.arange(64)
        words = torch.empty(64, dtype=torch.int64, device=device)
        noise_kernel[(1,)](
            words,
            torch.from_numpy(ids.astype(np.int32)).to(device),
            start,
            torch.tensor([seed], device=device),
            torch.tensor([index], device=device),
            SIZE=64,
            FROM_IDS=from_ids,
        )
        expected = token_words(np.array([seed]), np.array([index]), [ids.astype(np.int64)])
        assert words.tolist() == expected.tolist()


def draws(rows: int, **values: float) -> Draws:
    """Rows without filters, but for `values`."""
    defaults = {
        "temperature": 1.0,
        "span": NOISE_SPAN,
        "reach": NOISE_SPAN,
        "top_k": 0,
        "top_p": 1.0,
        "seed": 0,
        "output_index": 0,
        "num_top": -1,
    }
    dtypes = Draws.__annotations__
    return Draws(
        **{
            name: np.full(rows, values.get(name, value), str(dtypes[name]).split("np.")[1].rstrip("]"))
            for name, value in defaults.items()
        }
    )


@pytest.mark.parametrize(
    ("values", "readings"),
    [
        ({"temperature": 0.0}, 1),
        ({}, 1),
        ({"num_top": 0}, 1),
        ({"reach": 3.0}, 2),
        ({"top_k": 20}, 2),
        ({"top_p": 0.3}, 2),
        ({"top_k": 20, "top_p": 0.9, "reach": 5.0}, 2),
        ({"top_k": 20, "temperature": 0.01, "span": 0.26, "reach": 0.26}, 2),
    ],
)
@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="loads are counted in the interpreter")
def test_rows_are_read_once_and_where_filtered_twice(
    rng: np.random.Generator, values: dict[str, float], readings: int
) -> None:
    """Beside the drawn token's logit, once more, for a logprob."""
    logits = torch.from_numpy(rng.normal(0, 3, (1, VOCAB_SIZE)).astype(np.float32))
    with reads_counted(logits) as (count,):
        draw_tokens(logits, draws(1, **values), settings=replace(SMALL, capacity=128))
    assert count.min() == readings
    assert count.sum() == readings * VOCAB_SIZE + ("num_top" in values)


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="loads are counted in the interpreter")
@pytest.mark.parametrize("spread", [0.01, 1.0])
def test_a_cut_far_down_takes_a_few_readings_more(rng: np.random.Generator, spread: float) -> None:
    """Halving 301 tokens until 64 are left takes 3 steps, some of which are uneven."""
    logits = torch.from_numpy(rng.normal(0, spread, (1, VOCAB_SIZE)).astype(np.float32))
    with reads_counted(logits) as (count,):
        draw_tokens(logits, draws(1, top_p=0.8), settings=SMALL)
    assert 4 <= count.max() <= 10


def test_a_step_is_two_launches_and_one_more_for_logprobs(device: torch.device) -> None:
    logits = torch.zeros(2, 40, device=device)
    before = Counter(launches)
    draw_tokens(logits, draws(2, top_k=3), settings=SMALL)
    assert launches - before == {"scan": 1, "draw": 1}
    draw_tokens(logits, draws(2, num_top=1), settings=SMALL)
    assert launches - before == {"scan": 2, "draw": 2, "logprobs": 1}
    assert draw_tokens(logits[:0], draws(0)).token_ids.tolist() == []


def test_rows_may_be_apart_and_past_2_to_the_31_numbers(device: torch.device, rng: np.random.Generator) -> None:
    """The memory between them is never touched."""
    table = torch.empty(2**31 + 100, device=device)
    logits = table.as_strided((2, 96), (2**31 + 4, 1))
    logits[:] = torch.from_numpy(rng.normal(0, 2, (2, 96)).astype(np.float32)).to(device)
    for values in ({}, {"top_p": 0.8, "num_top": 2}):
        apart = draw_tokens(logits, draws(2, **values), settings=SMALL)
        together = draw_tokens(logits.contiguous(), draws(2, **values), settings=SMALL)
        np.testing.assert_array_equal(apart.table[:, :1], together.table[:, :1])
        if values:
            np.testing.assert_array_equal(apart.table, together.table)


# Penalties.


@dataclass(frozen=True)
class PenaltyCase:
    logits: Float32s
    penalties: Penalties
    expected: Float32s


def make_penalties(rng: np.random.Generator, num_rows: int, vocab_size: int, device: torch.device) -> PenaltyCase:
    """Random prompts and outputs, the first row without any, and what a loop over their tokens makes of the logits."""
    logits = rng.normal(0, 4, (num_rows, vocab_size)).astype(np.float32)
    logits[:, 3] = [-INF, INF, NAN, 0.0, -0.0][:num_rows]
    repetition = rng.choice([1.0, 1.3, 0.7], num_rows).astype(np.float32)
    presence, frequency = rng.normal(0, 1, (2, num_rows)).astype(np.float32)
    expected = logits.copy()
    counts = [Counter() for _ in range(num_rows)]
    for row in range(1, num_rows):
        counts[row] = Counter(dict.fromkeys([3, vocab_size, -1, *rng.integers(0, vocab_size, 30).tolist()], 0))
        counts[row].update(rng.integers(0, 12, 40).tolist())
        for token, count in counts[row].items():
            if 0 <= token < vocab_size:
                value, by = float(logits[row, token]), float(repetition[row])
                value = value / by if value > 0 else value * by
                if count:
                    value -= float(presence[row]) + float(frequency[row]) * count
                expected[row, token] = value
    flat = [(token, count) for row in counts for token, count in row.items()]
    tokens, token_counts = np.array(flat, np.int32).T.copy()
    starts = np.cumsum([0, *map(len, counts)]).astype(np.int32)
    arrays = (starts, tokens, token_counts, repetition, presence, frequency)
    return PenaltyCase(logits, Penalties(*(torch.from_numpy(array).to(device) for array in arrays)), expected)


def test_penalties_touch_exactly_the_tokens_they_name(
    device: torch.device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pageframe.kernels.triton.sampling_penalties.TILE", 16)
    case = make_penalties(rng, 5, 120, device)
    logits = torch.from_numpy(case.logits.copy()).to(device)
    penalize(logits, case.penalties)
    np.testing.assert_array_equal(logits.cpu().numpy(), case.expected)
    assert (case.expected != case.logits)[1:].any(axis=1).all()


def test_penalties_come_before_the_filters_and_not_into_logprobs(
    device: torch.device, rng: np.random.Generator
) -> None:
    case = make_penalties(rng, 3, 120, device)
    logits = torch.from_numpy(case.logits).to(device)
    how = draws(3, top_k=9, num_top=2)
    banned = np.array([0, 2]), np.array([int(np.argmax(case.logits[0])), 500])
    expected = case.expected.copy()
    expected[0, banned[1][0]] = -INF
    drawn = draw_tokens(logits, how, banned, case.penalties, SMALL)
    plain = draw_tokens(torch.from_numpy(expected).to(device), how, settings=SMALL)
    assert drawn.token_ids.tolist() == plain.token_ids.tolist()
    raw = draw_tokens(logits, replace(how, temperature=np.zeros(3, np.float32)), settings=SMALL)
    for row in range(3):
        assert drawn.logprobs(row, 2)[1:] == raw.logprobs(row, 2)[1:]
    np.testing.assert_array_equal(logits.cpu().numpy(), case.logits)
