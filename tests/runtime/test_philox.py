"""The noise is the published generator's, laid out as documented, and finite for every word."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pageframe.runtime.philox import NOISE_SPAN, choice_seed, gumbel, gumbel_bound, philox4x32, token_words

SEEDS = st.integers(-(2**63), 2**63 - 1)


def philox_by_hand(counter: list[int], key: list[int]) -> list[int]:
    """The paper's round, with Python's integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(product1 >> 32) ^ c[1] ^ k[0], product1 % 2**32, (product0 >> 32) ^ c[3] ^ k[1], product0 % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


# From Random123's file of known answers.
@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_known_answers(counter: str, key: str, words: str) -> None:
    counter_words = [np.array([int(word, 16)], np.uint64) for word in counter.split()]
    key_words = [np.array([int(word, 16)], np.uint64) for word in key.split()]
    got = philox4x32(tuple(counter_words), tuple(key_words))
    assert [f"{int(word[0]):08x}" for word in got] == words.split()
    by_hand = philox_by_hand([int(word[0]) for word in counter_words], [int(word[0]) for word in key_words])
    assert [f"{word:08x}" for word in by_hand] == words.split()


ROWS = st.tuples(
    SEEDS,
    st.integers(0, 2**63 - 1),
    st.one_of(
        st.sets(st.integers(0, 2**31 - 1), min_size=1, max_size=12),
        st.sets(st.integers(1000, 1040), min_size=1, max_size=41),
    ),
)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(ROWS, min_size=1, max_size=4))
def test_words_follow_the_documented_layout(rows: list[tuple[int, int, set[int]]]) -> None:
    expected = [
        philox_by_hand([token // 4, 0, output_index % 2**32, output_index >> 32], [seed % 2**32, (seed >> 32) % 2**32])[
            token % 4
        ]
        for seed, output_index, ids in rows
        for token in sorted(ids)
    ]
    seeds, output_indices = np.array([row[:2] for row in rows], np.int64).T.copy()
    words = token_words(seeds, output_indices, [np.array(sorted(ids), np.int64) for _, _, ids in rows])
    assert words.tolist() == expected


def test_noise_is_finite_and_within_its_span_at_the_extreme_words() -> None:
    low, high = gumbel(np.array([0, 2**32 - 1], np.uint32))
    assert low == pytest.approx(-math.log(33 * math.log(2)), abs=1e-12)
    assert high == pytest.approx(33 * math.log(2), abs=1e-9)
    assert high - low < NOISE_SPAN < high - low + 0.01


def test_bound_is_never_below_the_noise() -> None:
    powers = [2**bit for bit in range(32)]
    near = [power + shift for power in powers for shift in (-1, 0, 1)] + [2**32 - power for power in powers]
    rng = np.random.default_rng(0)
    words = np.concatenate((np.array(near, np.uint32), rng.integers(0, 2**32, 100_000, np.uint32)))
    excess = gumbel_bound(words) - gumbel(words)
    # The room that is left for float32's rounding elsewhere.
    assert excess.min() > 5e-4
    assert excess[gumbel(words) > 0].max() < 0.5


# The first outputs of the authors' C code for seed 1234567, and the first for seed 0.
def test_choice_seeds_are_splitmix64() -> None:
    outputs = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert [choice_seed(1234567, index) % 2**64 for index in range(5)] == outputs
    assert choice_seed(0, 0) % 2**64 == 0xE220A8397B1DCDAF


@given(seed=SEEDS, index=st.integers(0, 1000))
def test_choice_seed_is_a_signed_64_bit_number(seed: int, index: int) -> None:
    assert -(2**63) <= choice_seed(seed, index) < 2**63
