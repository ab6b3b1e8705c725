"""Sampler: a step's hidden states become one token per row, and logprobs where asked for.

It keeps nothing from step to step and knows nothing of requests, text or the scheduler. A row's result depends on
that row alone, to the bit: every sum is taken over one row, in an order that its neighbours do not change.

The arg-max runs on the logits' own device, or together with the final projection where the runner has such a pass:
then greedy rows need no logits at all. Rows that are not greedy are brought to the host and drawn there with numpy; a
kernel that draws on the device must give the same tokens (philox.py fixes the noise).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from pageframe.runtime.philox import NOISE_SPAN, gumbel, gumbel_bound, token_words
from pageframe.runtime.request import GREEDY_BELOW, TokenLogprobs
from pageframe.runtime.step_plan import SamplingBatch, StepResult

Float32s = npt.NDArray[np.float32]
Int64s = npt.NDArray[np.int64]

# Rows are drawn together until they have this many candidates: more no longer fit the CPU's caches.
_DRAWN_TOGETHER = 16_384
# top_p's histogram reaches 32 below the best; what is further away has next to no mass and shares the last bin.
_BINS_PER_UNIT = np.float32(16)
_NUM_BINS = 512


class Sampler:
    """Chooses tokens: banned ids, then temperature, top_k, top_p, min_p, then Gumbel noise and the arg-max.

    Ties go to the lower id: in the arg-max, at the top_k and top_p boundaries, in logprobs. A NaN logit counts as
    -inf, +inf as the largest float32. A row with nothing above -inf counts as all equal.

    Args:
        logits: hidden states [n, hidden_size] -> float32 logits [n, vocab_size].
        arg_max: the same -> per row the lowest id of the largest logit, and that logit (a NaN counts as -inf); None
            where there is no pass that does without the logits.
    """

    def __init__(
        self,
        logits: Callable[[torch.Tensor], torch.Tensor],
        arg_max: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor] | None] = lambda hidden: None,
    ) -> None:
        self._logits = logits
        self._fused_arg_max = arg_max

    def sample(self, hidden: torch.Tensor, batch: SamplingBatch) -> StepResult:
        """One token per row of `hidden` [n, hidden_size], which are the batch's in order."""
        is_plain = (batch.temperature < GREEDY_BELOW) & (batch.num_logprobs < 0)
        is_plain[[row for row, _ in batch.banned]] = False
        plain = np.flatnonzero(is_plain)
        found = self._fused_arg_max(_rows(hidden, plain)) if len(plain) else None
        if found is None:
            return self.sample_logits(self._logits(hidden), batch)
        ids, best = found[0].numpy(), found[1].numpy()
        token_ids = np.zeros(len(batch), np.int32)
        token_ids[plain] = ids
        # A row without a finite logit is worth the long way.
        rest = np.sort(np.concatenate((np.flatnonzero(~is_plain), plain[~np.isfinite(best)])))
        if not len(rest):
            return StepResult(token_ids, {})
        result = self.sample_logits(self._logits(_rows(hidden, rest)), batch.take(rest))
        token_ids[rest] = result.token_ids
        return StepResult(token_ids, {int(rest[row]): logprobs for row, logprobs in result.logprobs.items()})

    def sample_logits(self, logits: torch.Tensor, batch: SamplingBatch) -> StepResult:
        """`sample` from the logits, float32 [n, vocab_size], which stay as they are.

        Banned ids beyond the vocabulary have no effect; a row whose every id is banned is drawn as if all were equal.
        """
        assert logits.dtype == torch.float32
        assert logits.shape[0] == len(batch)
        chosen, best = _arg_max(logits)
        token_ids = chosen.astype(np.int32)
        banned = dict(batch.banned)
        noisy = ~(batch.temperature < GREEDY_BELOW)
        wrong = ~np.isfinite(best)
        for row, ids in banned.items():
            wrong[row] |= token_ids[row] in ids
        wanted = np.flatnonzero(noisy | wrong | (batch.num_logprobs >= 0))
        host_rows = dict(zip(wanted.tolist(), _host_rows(logits, wanted), strict=True))

        waiting: list[_Candidates] = []
        num_waiting = 0
        for row, values in host_rows.items():
            if noisy[row]:
                waiting.append(_candidates(_allowed(values, best[row], banned.get(row, ())), batch, row))
                num_waiting += len(waiting[-1].ids)
                if num_waiting >= _DRAWN_TOGETHER:
                    _draw(waiting, batch, token_ids)
                    waiting, num_waiting = [], 0
            elif wrong[row]:
                token_ids[row] = _allowed(values, best[row], banned.get(row, ())).argmax()
        if waiting:
            _draw(waiting, batch, token_ids)
        logprobs = {
            row: _logprobs(_allowed(values, best[row], ()), int(token_ids[row]), int(batch.num_logprobs[row]))
            for row, values in host_rows.items()
            if batch.num_logprobs[row] >= 0
        }
        return StepResult(token_ids, logprobs)


@dataclass(frozen=True, slots=True)
class _Candidates:
    """What the filters leave of one row.

    Args:
        ids: int64, ascending, not empty.
        logits: float32, theirs.
        best: the row's largest logit.
    """

    row: int
    ids: Int64s
    logits: Float32s
    best: np.float32


def _rows(hidden: torch.Tensor, rows: Int64s) -> torch.Tensor:
    return hidden if len(rows) == len(hidden) else hidden[torch.from_numpy(rows)]


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


def _candidates(values: Float32s, batch: SamplingBatch, row: int) -> _Candidates:
    """Filters one row of logits without NaN and with a finite maximum."""
    best, temperature = values.max(), batch.temperature[row]
    ids = None
    if 0 < batch.top_k[row] < len(values):
        ids = np.sort(_likeliest(values, int(batch.top_k[row])))
    if batch.top_p[row] < 1:
        within = _nucleus(values if ids is None else values[ids], best, temperature, float(batch.top_p[row]))
        ids = within if ids is None else ids[within]
    ids = _near(values, ids, float(best), float(temperature), float(batch.min_p[row]))
    return _Candidates(row, ids, values[ids], best)


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
        bins = np.minimum(distance * _BINS_PER_UNIT, _NUM_BINS - 1).astype(np.int64)
    weights = np.exp(-distance)
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


def _draw(rows: list[_Candidates], batch: SamplingBatch, token_ids: npt.NDArray[np.int32]) -> None:
    """Writes each row's token: the largest (logit - best) / temperature + noise, in float64, the lower id of equals.

    The rows share calls, whose cost is in their number, but no arithmetic.
    """
    batch_rows = [candidates.row for candidates in rows]
    temperature = batch.temperature[batch_rows]
    best = np.array([candidates.best for candidates in rows], np.float64)
    logits = np.concatenate([candidates.logits for candidates in rows])
    starts = np.cumsum([0, *(len(candidates.ids) for candidates in rows)])
    words = token_words(batch.seed[batch_rows], batch.output_index[batch_rows], [candidates.ids for candidates in rows])

    def scores(chosen: Int64s, owners: Int64s) -> npt.NDArray[np.float64]:
        return (logits[chosen] - best[owners]) / temperature[owners].astype(np.float64) + gumbel(words[chosen])

    # Exact noise costs two float64 logarithms. Only those whose bound reaches one candidate's exact score can win,
    # and they are few.
    bound = gumbel_bound(words)
    bounds = [bound[start:end] for start, end in pairwise(starts)]
    for row_bound, candidates, row_temperature in zip(bounds, rows, temperature, strict=True):
        row_bound += (candidates.logits - candidates.best) / row_temperature
    likely = starts[:-1] + [row_bound.argmax() for row_bound in bounds]
    reached = scores(likely, np.arange(len(rows)))
    finalists = [
        start + np.flatnonzero(row_bound >= score)
        for start, row_bound, score in zip(starts, bounds, reached, strict=False)
    ]
    owners = np.repeat(np.arange(len(rows)), [len(indices) for indices in finalists])
    final_scores = scores(np.concatenate(finalists), owners)
    final_starts = np.searchsorted(owners, np.arange(len(rows) + 1))
    for index, (start, end) in enumerate(pairwise(final_starts)):
        winner = finalists[index][final_scores[start:end].argmax()] - starts[index]
        token_ids[batch_rows[index]] = rows[index].ids[winner]


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
