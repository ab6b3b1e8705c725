"""Logits where they are: rules applied to them, and logprobs of given tokens, without bringing whole rows to the host.

For logits on a GPU; every function works on any device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from pageframe.kernels.triton.transfer import to_device
from pageframe.runtime.request import TokenLogprobs
from pageframe.runtime.step_plan import SamplingBatch

if TYPE_CHECKING:
    from pageframe.kernels.triton.sampling_penalties import Penalties

Int64s = npt.NDArray[np.int64]


def with_bias_and_masks(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """float32 logits [n, vocab_size] with the batch's bias added and -inf where a mask forbids; the very same tensor
    where the batch has neither."""
    biased = [(row, rules) for row, rules in batch.rules if len(rules.bias_ids)]
    masked = [(row, rules.mask) for row, rules in batch.rules if rules.has_mask]
    if not biased and not masked:
        return logits
    changed = logits.clone()
    if biased:
        rows = np.repeat([row for row, _ in biased], [len(rules.bias_ids) for _, rules in biased])
        places = to_device(np.stack((rows, np.concatenate([rules.bias_ids for _, rules in biased]))), logits.device)
        changed[places[0], places[1]] += to_device(np.concatenate([rules.bias for _, rules in biased]), logits.device)
    if masked:
        masked_rows = to_device(np.array([row for row, _ in masked]), logits.device)
        # As little-endian bytes, the bits are in the order of the tokens.
        words = np.stack([mask for _, mask in masked if mask is not None]).astype("<u4", copy=False)
        each_bit = to_device(1 << np.arange(8, dtype=np.uint8), logits.device)
        bits = to_device(words.view(np.uint8), logits.device)[:, :, None] & each_bit
        forbidden = bits.flatten(1)[:, : logits.shape[1]] == 0
        changed[masked_rows] = changed[masked_rows].masked_fill(forbidden, float("-inf"))
    return changed


def penalties_of(batch: SamplingBatch, device: torch.device) -> Penalties | None:
    """What `draw_tokens` needs to know of the batch's penalties; None where it has none."""
    from pageframe.kernels.triton.sampling_penalties import Penalties

    counts = {row: rules.counts for row, rules in batch.rules if rules.counts is not None}
    if not counts:
        return None
    sizes = np.zeros(len(batch) + 1, np.int32)
    factors = np.zeros((3, len(batch)), np.float32)
    factors[0] = 1
    for row, rules in batch.rules:
        if rules.counts is not None:
            sizes[row + 1] = len(rules.counts.token_ids)
            factors[:, row] = rules.repetition, rules.presence, rules.frequency
    in_order = [counts[row] for row in sorted(counts)]
    repetition, presence, frequency = to_device(factors, device)
    return Penalties(
        row_start=to_device(sizes.cumsum(dtype=np.int32), device),
        token_ids=to_device(np.concatenate([one.token_ids for one in in_order]), device),
        output_counts=to_device(np.concatenate([one.output_counts for one in in_order]), device),
        repetition=repetition,
        presence=presence,
        frequency=frequency,
    )


def logprobs_of(logits: torch.Tensor, token_ids: Int64s, num_top: npt.NDArray[np.int32]) -> list[TokenLogprobs]:
    """Logprobs of one given token and of the likeliest `num_top` (0 or more) in each row of logits [n, vocab_size]; one
    copy to the host. See `packed_logprobs`."""
    return unpack_logprobs(packed_logprobs(logits, token_ids, int(num_top.max(initial=0))), num_top)


def packed_logprobs(logits: torch.Tensor, token_ids: Int64s, max_top: int) -> torch.Tensor:
    """Logprobs of one given token and of the likeliest `max_top` (0 or more, or as many as there are) in each row of
    logits [n, vocab_size], on their device, for one copy to the host.

    A NaN counts as -inf, +inf as the largest float32; a row with nothing above -inf as all equal. Ties go to the lower
    id.

    Returns:
        float64 [n, 1 + 2 * max_top]: the token's, the likeliest ones', then their ids, which float64 holds exactly.
    """
    clean = logits.nan_to_num(nan=float("-inf"), posinf=torch.finfo(torch.float32).max, neginf=float("-inf"))
    clean = clean.masked_fill(clean.amax(1, keepdim=True) == float("-inf"), 0.0)
    total = clean.double().logsumexp(1, keepdim=True)
    chosen = clean.gather(1, to_device(token_ids, logits.device)[:, None]) - total
    if max_top == 0:
        return chosen
    # Sorted and not torch.topk, which leaves open which of equals it takes.
    tops, top_ids = (part[:, :max_top] for part in clean.sort(dim=1, descending=True, stable=True))
    return torch.cat((chosen, tops - total, top_ids.double()), dim=1)


def unpack_logprobs(packed: torch.Tensor, num_top: npt.NDArray[np.int32]) -> list[TokenLogprobs]:
    """What `packed_logprobs` made, of each row as many of the likeliest as `num_top` says; one copy to the host."""
    host = packed.cpu().numpy()
    max_top = host.shape[1] // 2
    found = []
    for row, count in zip(host, np.minimum(num_top, max_top).tolist(), strict=True):
        ids = row[1 + max_top : 1 + max_top + count].astype(np.int64).tolist()
        found.append(TokenLogprobs(float(row[0]), ids, row[1 : 1 + count].tolist()))
    return found
