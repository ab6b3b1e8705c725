"""What top_k and top_p keep on the host, against sorting the row and adding whole numbers."""

import itertools
import math

import numpy as np
import numpy.typing as npt
import pytest

from pageframe.kernels.triton.sampling_rules import MASS_BITS, token_masses
from pageframe.runtime.sampling_filters import likeliest, nucleus

Float32s = npt.NDArray[np.float32]


def sorted_ids(logits: Float32s) -> list[int]:
    return sorted(range(len(logits)), key=lambda token: (-logits[token], token))


def nucleus_by_sorting(logits: Float32s, temperature: float, top_p: float) -> list[int]:
    masses = [int(mass) for mass in token_masses((logits.max() - logits) / np.float32(temperature))]
    order = sorted_ids(logits)
    target = top_p * sum(masses)
    ends = itertools.accumulate(masses[token] for token in order)
    return sorted(order[: next(place for place, mass in enumerate(ends, 1) if mass >= target)])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("vocab_size", [30, 1000, 9000])
@pytest.mark.parametrize("spread", [0.05, 2.0, 3.5, 12.0])
def test_nucleus_is_the_shortest_prefix(spread: float, vocab_size: int, seed: int) -> None:
    """Few tokens near the best and many, with ties and without."""
    rng = np.random.default_rng([seed, vocab_size])
    logits = rng.normal(0, spread, vocab_size).astype(np.float32)
    if seed == 2:
        logits = np.round(logits * 4) / 4
    for top_p in (0.05, 0.5, 0.9, 0.99):
        kept = nucleus(logits, logits.max(), np.float32(0.8), top_p)
        assert kept.tolist() == nucleus_by_sorting(logits, 0.8, top_p)


@pytest.mark.parametrize("count", [1, 20, 500, 4500])
@pytest.mark.parametrize("kind", ["normal", "levels", "equal", "ascending"])
def test_likeliest_are_the_first_of_the_sorted(kind: str, count: int) -> None:
    rng = np.random.default_rng(7)
    logits = {
        "normal": rng.normal(0, 2, 5000),
        "levels": rng.integers(0, 40, 5000),
        "equal": np.zeros(5000),
        "ascending": np.arange(5000),
    }[kind].astype(np.float32)
    assert likeliest(logits, count).tolist() == sorted_ids(logits)[:count]


def test_masses_are_whole_numbers_close_to_the_weights() -> None:
    distances = np.array([0, 1e-7, 0.5, 3, 11, 24, 25, 200, np.inf], np.float32)
    masses = token_masses(distances)
    assert masses.tolist() == [round(mass) for mass in masses.tolist()]
    assert masses[0] == 2**MASS_BITS
    weights = np.exp(-distances.astype(np.float64))
    assert np.abs(masses / 2**MASS_BITS - weights).max() <= 0.51 * 2**-MASS_BITS
    assert masses[-2:].tolist() == [0, 0]


def test_a_sum_of_masses_is_exact_in_any_order() -> None:
    """Of more tokens than any vocabulary has, in float64."""
    rng = np.random.default_rng(3)
    masses = token_masses(rng.uniform(0, 0.2, 2**19).astype(np.float32))
    exact = sum(int(mass) for mass in masses)
    assert masses.sum() == masses[::-1].cumsum()[-1] == exact
    assert math.log2(exact) > 52.5
