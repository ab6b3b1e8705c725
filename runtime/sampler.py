"""Sampler: a step's hidden states become one token per row, and logprobs where asked for.

It keeps nothing from step to step and knows nothing of requests, text or the scheduler. A row's result depends on
that row alone, to the bit: every sum is taken over one row, in an order that its neighbours do not change.

The arg-max runs on the logits' own device. Rows that are not greedy are brought to the host and drawn there with
numpy; a kernel that draws on the device must give the same tokens (philox.py fixes the noise).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from pageframe.runtime.philox import NOISE_SPAN, gumbel, gumbel_bound, token_words
from pageframe.runtime.request import GREEDY_BELOW, TokenLogprobs
from pageframe.runtime.step_plan import SamplingBatch, StepResult

Float32s = npt.NDArray[np.float32]
Int64s = npt.NDArray[np.int64]

_GREEDY_BELOW = np.float32(GREEDY_BELOW)
# top_p's histogram reaches 32 below the best; what is further away has next to no mass and shares the last bin.
_BINS_PER_UNIT = np.float32(16)
_NUM_BINS = 512


class Sampler:
    """Chooses tokens: banned ids, then temperature, top_k, top_p, min_p, then Gumbel noise and the arg-max.

    Ties go to the lower id: in the arg-max, at the top_k and top_p boundaries, in logprobs. A NaN logit counts as
    -inf, +inf as the largest float32. A row with nothing above -inf counts as all equal.

    Args:
        logits: hidden states [n, hidden_size] -> float32 logits [n, vocab_size].
    """

    def __init__(self, logits: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._logits = logits

    def sample(self, hidden: torch.Tensor, batch: SamplingBatch) -> StepResult:
        """One token per row of `hidden` [n, hidden_size], which are the batch's in order."""
        return self.sample_logits(self._logits(hidden), batch)

    def sample_logits(self, logits: torch.Tensor, batch: SamplingBatch) -> StepResult:
        """`sample` from the logits, float32 [n, vocab_size], which stay as they are.

        Banned ids beyond the vocabulary have no effect; a row whose every id is banned is drawn as if all were equal.
        """
        assert logits.dtype == torch.float32
        assert logits.shape[0] == len(batch)
        chosen, best = _arg_max(logits)
        token_ids = chosen.astype(np.int32)
        banned = dict(batch.banned)
        drawn = ~(batch.temperature < _GREEDY_BELOW) | ~np.isfinite(best)
        for row, ids in banned.items():
            drawn[row] |= token_ids[row] in ids
        wanted = np.flatnonzero(drawn | (batch.num_logprobs >= 0))
        logprobs: dict[int, TokenLogprobs] = {}
        for row, values in zip(wanted.tolist(), _host_rows(logits, wanted), strict=True):
            if drawn[row]:
                token_ids[row] = _choose(_allowed(values, best[row], banned.get(row, ())), batch, row)
            if batch.num_logprobs[row] >= 0:
                logprobs[row] = _logprobs(
                    _allowed(values, best[row], ()), int(token_ids[row]), int(batch.num_logprobs[row])
                )
        return StepResult(token_ids, logprobs)


def _arg_max(logits: torch.Tensor) -> tuple[Int64s, Float32s]:
    """Per row the lowest id of the largest logit, and that logit; NaN where the row has a NaN."""
    if logits.device.type == "cpu":
        # numpy's arg-max uses the CPU's vector instructions, torch's does not.
        table = logits.numpy()
        ids = table.argmax(axis=1)
        return ids, table[np.arange(len(ids)), ids]
    return _device_arg_max(logits)


def _device_arg_max(logits: torch.Tensor) -> tuple[Int64s, Float32s]:
    """`_arg_max` by torch, with one copy to the host: float64 holds both an id and a float32 exactly."""
    values, indices = logits.max(dim=1)
    packed = torch.stack((indices.double(), values.double())).cpu().numpy()
    return packed[0].astype(np.int64), packed[1].astype(np.float32)


def _host_rows(logits: torch.Tensor, rows: Int64s) -> Float32s:
    """The logits of these rows, float32 [len(rows), vocab_size], on the host; not to be written to."""
    picked = logits if len(rows) == len(logits) else logits[torch.from_numpy(rows).to(logits.device)]
    host: Float32s = np.ascontiguousarray(picked.cpu().numpy())
    return host


def _allowed(values: Float32s, best: np.float32, banned: tuple[int, ...]) -> Float32s:
    """A row with banned ids at -inf and at least one finite logit; `values` itself where nothing is to be changed.

    Args:
        best: the largest of `values`, NaN if one of them is.
    """
    ids = [token_id for token_id in banned if 0 <= token_id < len(values)]
    if np.isfinite(best) and not ids:
        return values
    largest = float(np.finfo(np.float32).max)
    allowed: Float32s = np.nan_to_num(values, nan=-np.inf, posinf=largest, neginf=-np.inf)
    allowed[ids] = -np.inf
    if allowed.max() == -np.inf:
        # All allowed ids are equal then, and all ids if none is allowed, since a token must be drawn.
        allowed[:] = 0
        if len(set(ids)) < len(allowed):
            allowed[ids] = -np.inf
    return allowed


def _choose(values: Float32s, batch: SamplingBatch, row: int) -> int:
    """The token of one row of logits without NaN and with a finite maximum."""
    best = values.max()
    temperature = batch.temperature[row]
    if temperature < _GREEDY_BELOW:
        return int(values.argmax())
    ids = None
    if 0 < batch.top_k[row] < len(values):
        ids = np.sort(_likeliest(values, int(batch.top_k[row])))
    if batch.top_p[row] < 1:
        within = _nucleus(values if ids is None else values[ids], best, temperature, float(batch.top_p[row]))
        ids = within if ids is None else ids[within]
    ids = _near(values, ids, float(best), float(temperature), float(batch.min_p[row]))
    return _draw(values, ids, float(best), float(temperature), int(batch.seed[row]), int(batch.output_index[row]))


def _near(values: Float32s, ids: Int64s | None, best: float, temperature: float, min_p: float) -> Int64s:
    """Of `ids` (None: of all), those that min_p leaves and that can win: NOISE_SPAN below the best none can.

    p / p_best = exp((logit - best) / temperature), whatever the filters before left, since they leave the best.
    """
    depth = min(NOISE_SPAN, -math.log(min_p)) if min_p > 0 else NOISE_SPAN
    # A float32 is at least the cut in float64 exactly when it is at least the cut rounded to float32.
    cut = np.float32(best - depth * temperature)
    if ids is None:
        return np.flatnonzero(values >= cut)
    return ids[values[ids] >= cut]


def _likeliest(values: Float32s, count: int) -> Int64s:
    """Indices of the `count` largest values, largest first, ties to the lower index."""
    if count < len(values):
        smallest = np.partition(values, len(values) - count)[len(values) - count]
        above, level = np.flatnonzero(values > smallest), np.flatnonzero(values == smallest)
        indices = np.concatenate((above, level[: count - len(above)]))
    else:
        indices = np.arange(len(values))
    # Within equal values the indices ascend, and a stable sort leaves them so.
    order: Int64s = indices[np.argsort(-values[indices], kind="stable")]
    return order


def _nucleus(values: Float32s, best: np.float32, temperature: np.float32, top_p: float) -> Int64s:
    """Indices, ascending, of the shortest prefix, likeliest first, whose mass is at least top_p of all.

    Only one bin of a histogram by distance from the best is sorted: the one in which the mass reaches top_p. The
    bins before it are taken whole.
    """
    with np.errstate(over="ignore"):
        distance = (best - values) / temperature
    weights = np.exp(-distance)
    bins = np.minimum(distance * _BINS_PER_UNIT, _NUM_BINS - 1).astype(np.int64)
    mass = np.cumsum(np.bincount(bins, weights, minlength=_NUM_BINS))
    target = top_p * mass[-1]
    last_bin = int(np.searchsorted(mass, target))
    mass_before = mass[last_bin - 1] if last_bin else 0.0
    inside = np.flatnonzero(bins == last_bin)
    inside = inside[_likeliest(values[inside], len(inside))]
    num_kept = int(np.searchsorted(mass_before + np.cumsum(weights[inside], dtype=np.float64), target)) + 1
    kept = bins < last_bin
    kept[inside[:num_kept]] = True
    return np.flatnonzero(kept)


def _draw(values: Float32s, ids: Int64s, best: float, temperature: float, seed: int, output_index: int) -> int:
    """Of `ids`, ascending, the one with the largest (logit - best) / temperature + noise, in float64."""
    words = token_words(seed, output_index, ids)

    def scores(chosen: Int64s) -> npt.NDArray[np.float64]:
        return (values[ids[chosen]].astype(np.float64) - best) / temperature + gumbel(words[chosen])

    # Exact noise costs two float64 logarithms. Only those whose bound reaches one candidate's exact score can win,
    # and they are few.
    bound = (values[ids] - np.float32(best)) / np.float32(temperature) + gumbel_bound(words)
    finalists = np.flatnonzero(bound >= scores(np.array([bound.argmax()])))
    return int(ids[finalists[scores(finalists).argmax()]])


def _logprobs(values: Float32s, token_id: int, count: int) -> TokenLogprobs:
    """Log-probabilities of `token_id` and of the `count` likeliest, of one row of logits without NaN."""
    best = values.max()
    with np.errstate(over="ignore"):
        weights = np.exp(values - best)
    log_total = float(best) + math.log(float(weights.sum(dtype=np.float64)))
    top_ids = _likeliest(values, min(count, len(values))).tolist() if count else []
    return TokenLogprobs(
        logprob=float(values[token_id]) - log_total,
        top_ids=top_ids,
        top_logprobs=[float(values[top_id]) - log_total for top_id in top_ids],
    )
