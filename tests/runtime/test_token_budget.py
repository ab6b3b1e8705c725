"""How a step's tokens are shared: known values, and the promises for any prompts and budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pageframe.runtime.token_budget import chunk_cost, chunk_within, share_token_budget, step_budget

LEFT = st.lists(st.integers(1, 100), max_size=12)
BUDGET = st.integers(0, 64)


@pytest.mark.parametrize(
    ("tokens_left", "budget", "shares"),
    [
        ([], 16, []),
        ([5], 16, [5]),
        ([100], 16, [16]),
        ([100, 100], 0, [0, 0]),
        # Half to the first, a quarter to the shortest, the rest to the next in order.
        ([100, 100, 50], 16, [8, 4, 4]),
        ([100, 100, 100, 50], 16, [8, 4, 0, 4]),
        # The shortest needs less than its quarter: the rest is the next one's.
        ([100, 100, 3], 16, [8, 5, 3]),
        # With two, what the first may not take goes to the other.
        ([100, 50], 16, [8, 8]),
        # Nobody else can use what is left: the first takes more than half.
        ([100, 3], 16, [13, 3]),
        # The first is the shortest: nothing keeps it from finishing.
        ([20, 100], 16, [16, 0]),
        ([6, 100], 16, [6, 10]),
        # Equal ones: the first of them is the shortest.
        ([9, 9, 9], 3, [3, 0, 0]),
        ([9, 9, 8], 3, [1, 1, 1]),
    ],
)
def test_known_shares(tokens_left: list[int], budget: int, shares: list[int]) -> None:
    assert share_token_budget(tokens_left, budget) == shares


def test_a_negative_budget_gives_nothing() -> None:
    assert share_token_budget([3, 4], -1) == [0, 0]


@given(tokens_left=LEFT, budget=BUDGET)
def test_everything_is_shared_and_nobody_gets_more_than_needed(tokens_left: list[int], budget: int) -> None:
    shares = share_token_budget(tokens_left, budget)
    assert sum(shares) == min(budget, sum(tokens_left))
    assert all(0 <= share <= left for share, left in zip(shares, tokens_left, strict=True))


@given(tokens_left=LEFT.filter(bool), budget=BUDGET)
def test_the_shortest_gets_a_quarter_and_no_other_more_than_half_while_another_waits(
    tokens_left: list[int], budget: int
) -> None:
    """Fault 18: a long prefill does not starve short requests."""
    shares = share_token_budget(tokens_left, budget)
    shortest = tokens_left.index(min(tokens_left))
    assert shares[shortest] >= min(tokens_left[shortest], budget // 4)
    for index, share in enumerate(shares):
        another_waits = any(shares[other] < left for other, left in enumerate(tokens_left) if other != index)
        if index != shortest and another_waits:
            assert share <= max(1, budget / 2)


@given(tokens_left=LEFT.filter(bool), budget=st.integers(1, 64))
def test_the_first_in_the_order_always_progresses(tokens_left: list[int], budget: int) -> None:
    """Fault 18: short requests do not starve a long prefill, however little decoding requests leave."""
    shares = share_token_budget(tokens_left, budget)
    shortest = min(tokens_left)
    least = min(tokens_left[0], max(1, budget // 2), max(1, budget - max(1, min(shortest, budget // 4))))
    assert shares[0] >= least if len(tokens_left) > 1 else shares[0] == min(tokens_left[0], budget)
    assert shares[0] > 0


@given(tokens_left=LEFT, budget=BUDGET)
def test_the_rest_goes_in_order(tokens_left: list[int], budget: int) -> None:
    """Whoever gets something stands behind nobody (but the shortest) who lacks both half the budget and its fill."""
    shares = share_token_budget(tokens_left, budget)
    shortest = tokens_left.index(min(tokens_left)) if tokens_left else 0
    for later, share in enumerate(shares):
        if share == 0 or later == shortest:
            continue
        for earlier in range(later):
            assert shares[earlier] >= min(tokens_left[earlier], max(1, budget // 2)) or earlier == shortest


@pytest.mark.parametrize(
    ("num_decoding", "mixed", "budget"),
    [
        (0, 32, 512),  # nobody waits
        (1, 32, 32),
        (16, 32, 32),
        (17, 32, 34),  # a token of a prompt for each decoding request
        (200, 32, 400),
        (300, 32, 512),  # never more than any step
        (8, 1000, 512),
        (8, None, 512),
    ],
)
def test_a_step_with_decoding_requests_has_a_smaller_budget(num_decoding: int, mixed: int | None, budget: int) -> None:
    assert step_budget(num_decoding, 512, mixed) == budget


@pytest.mark.parametrize("num_unscored", [0, 1, 3, 10])
@pytest.mark.parametrize("budget", range(12))
def test_the_longest_chunk_within_a_budget(budget: int, num_unscored: int) -> None:
    """Scored tokens count twice; a single one is computed even where only 1 is left, so that its prompt goes on."""
    fits = [n for n in range(20) if n + max(0, n - num_unscored) <= budget]
    assert chunk_within(budget, num_unscored) == max([*fits, min(budget, 1)])


@pytest.mark.parametrize("num_unscored", [0, 1, 5])
def test_a_whole_prompt_is_the_chunk_within_what_it_costs(num_unscored: int) -> None:
    for num_tokens in range(max(1, num_unscored), 20):
        assert chunk_within(chunk_cost(num_tokens, num_unscored), num_unscored) == num_tokens
