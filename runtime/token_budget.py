"""How many tokens a step may compute, and how they are shared among the requests that compute their prompts."""

from __future__ import annotations

from collections.abc import Sequence


def step_budget(num_decoding: int, max_num_batched_tokens: int, mixed_token_budget: int | None) -> int:
    """Most tokens of a step in which `num_decoding` requests decode.

    Every token of a prompt in a step makes all decoding requests wait for theirs, so beside them prompts get only what
    `mixed_token_budget` leaves, yet at least one token for each decoding request: requests that came in more slowly
    than others end would leave ever fewer to decode together.

    Args:
        max_num_batched_tokens: of any step, at least num_decoding.
        mixed_token_budget: of a step with decoding requests, theirs included; None bounds nothing.
    """
    if num_decoding == 0 or mixed_token_budget is None:
        return max_num_batched_tokens
    return min(max_num_batched_tokens, max(mixed_token_budget, 2 * num_decoding))


def chunk_cost(num_tokens: int, num_unscored: int) -> int:
    """What a chunk takes of a step's budget, of whose tokens all but the first `num_unscored` get logprobs.

    A scored token counts twice. The logits of all of the vocabulary, and the sums over them, take a small model about
    as long as the token itself, and a long chunk would make everybody wait for them.
    """
    return 2 * num_tokens - num_unscored


def chunk_within(budget: int, num_unscored: int) -> int:
    """The longest chunk that takes no more than `budget`; of one token at least, if that is not 0."""
    if budget <= num_unscored:
        return budget
    return max(1, num_unscored + (budget - num_unscored) // 2)


def share_token_budget(tokens_left: Sequence[int], budget: int) -> list[int]:
    """Share `budget` tokens among prefilling requests, given in the order of service.

    The last quarter goes to the request with fewest tokens left, and no other takes more than half while another
    waits: a short request behind any number of long ones gets a share of every step, and the first in the order
    still gets the largest.

        |<------ first in order: up to half ------>|<-- next in order -->|<- shortest ->|
        0                                      budget/2            3*budget/4        budget

    Args:
        tokens_left: prompt tokens each still has to compute, each at least 1; or what they take, see `chunk_cost`.
        budget: tokens of this step that decoding requests left over.

    Returns:
        tokens for each, in the same order; their sum is min(budget, sum(tokens_left)).
    """
    shares = [0] * len(tokens_left)
    if not shares or budget <= 0:
        return shares
    if len(shares) == 1:
        return [min(tokens_left[0], budget)]
    shortest = min(range(len(shares)), key=lambda index: (tokens_left[index], index))
    # A single token is the first one's, who is to get on in every step.
    shares[shortest] = min(tokens_left[shortest], max(1, budget // 4)) if budget > 1 else 0
    remaining = budget - shares[shortest]
    half = max(1, budget // 2)
    # First pass: at most half each. Second pass: what nobody else can use.
    for limit in (half, budget):
        for index, left in enumerate(tokens_left):
            if remaining == 0:
                return shares
            ceiling = left if index == shortest else min(left, limit)
            extra = min(max(0, ceiling - shares[index]), remaining)
            shares[index] += extra
            remaining -= extra
    return shares
