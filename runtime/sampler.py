"""Sampler: a step's hidden states become one token per row, and logprobs where asked for.

It keeps nothing from step to step and knows nothing of requests, text or the scheduler. A row's result depends on
that row alone, to the bit: every sum is taken over one row, in an order that its neighbours do not change.

The arg-max runs together with the final projection where the runner has such a pass: then greedy rows need no logits
at all. Logits on a GPU stay there: kernels draw the tokens, and only those are copied back. Elsewhere rows are drawn
with numpy. Both give the same tokens: philox.py fixes the noise, sampling_rules.py what mass top_p adds up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from pageframe.kernels.triton.sampling_table import Draws
from pageframe.kernels.triton.transfer import to_device
from pageframe.runtime.philox import NOISE_SPAN, gumbel, gumbel_bound, token_words
from pageframe.runtime.request import GREEDY_BELOW, TokenLogprobs
from pageframe.runtime.sampling_filters import (
    Candidates,
    allowed_logits,
    find_candidates,
    likeliest,
    reach,
    ruled_logits,
)
from pageframe.runtime.step_plan import NO_TOKEN, SamplingBatch, ScoredTokens, StepResult

Float32s = npt.NDArray[np.float32]
Int64s = npt.NDArray[np.int64]

# Rows are drawn together until they have this many candidates: more no longer fit the CPU's caches.
_DRAWN_TOGETHER = 16_384
# Prompts' logprobs: logits of so many tokens are held at once.
_SCORED_AT_ONCE = 64


class Sampler:
    """Chooses tokens: banned ids and rules, then temperature, top_k, top_p, min_p, then Gumbel noise and the arg-max.

    Ties go to the lower id: in the arg-max, at the top_k and top_p boundaries, in logprobs. A NaN logit counts as
    -inf, +inf as the largest float32. A row with nothing above -inf counts as all equal. Logprobs are of the logits
    before any rule.

    Args:
        logits: hidden states [n, hidden_size] -> float32 logits [n, vocab_size].
        arg_max: the same -> per row the lowest id of the largest logit, and that logit (a NaN counts as -inf); None
            where there is no pass that does without the logits.
        on_device: draw with kernels where the logits are; None: if that is a GPU.
    """

    def __init__(
        self,
        logits: Callable[[torch.Tensor], torch.Tensor],
        arg_max: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor] | None] = lambda hidden: None,
        on_device: bool | None = None,
    ) -> None:
        self._logits = logits
        self._fused_arg_max = arg_max
        self._on_device = on_device

    def sample(self, hidden: torch.Tensor, batch: SamplingBatch) -> StepResult:
        """One token per row of `hidden` [n, hidden_size], which are the batch's in order."""
        plain = np.arange(len(batch)) if batch.all_plain else _plain_rows(batch)
        # On a GPU there is no such pass, and picking rows by numbers of the host would wait for it.
        can_fuse = hidden.device.type == "cpu" and len(plain)
        found = self._fused_arg_max(_rows(hidden, plain)) if can_fuse else None
        if found is None:
            return self.sample_logits(self._logits(hidden), batch)
        ids, is_finite = found[0].numpy(), [math.isfinite(value) for value in found[1].tolist()]
        if len(plain) == len(batch) and all(is_finite):
            return StepResult(ids.astype(np.int32), {})
        token_ids = np.zeros(len(batch), np.int32)
        token_ids[plain] = ids
        # A row without a finite logit is worth the long way.
        rest = np.setdiff1d(np.arange(len(batch)), plain[is_finite])
        if not len(rest):
            return StepResult(token_ids, {})
        result = self.sample_logits(self._logits(_rows(hidden, rest)), batch.take(rest))
        token_ids[rest] = result.token_ids
        return StepResult(token_ids, {int(rest[row]): logprobs for row, logprobs in result.logprobs.items()})

    def sample_logits(self, logits: torch.Tensor, batch: SamplingBatch) -> StepResult:
        """`sample` from the logits, float32 [n, vocab_size], which stay as they are.

        Banned ids beyond the vocabulary have no effect; a row whose every id is banned is drawn as if all were equal.
        A row whose mask leaves nothing gets NO_TOKEN.
        """
        assert logits.dtype == torch.float32
        assert logits.shape[0] == len(batch)
        on_device = _has_kernels(logits.device) if self._on_device is None else self._on_device
        return _sample_on_device(logits, batch) if on_device else _sample_on_host(logits, batch)

    def score(self, hidden: torch.Tensor, scored: ScoredTokens) -> dict[int, list[TokenLogprobs]]:
        """Logprobs of the prompt tokens that follow `hidden` [n, hidden_size], by position in the plan.

        Never more than a slice of their logits is in memory.
        """
        starts = range(0, len(scored.token_ids), _SCORED_AT_ONCE)
        parts = [slice(start, start + _SCORED_AT_ONCE) for start in starts]
        if hidden.device.type == "cpu":
            found = []
            for part in parts:
                found += _score(self._logits(hidden[part]), scored.token_ids[part], scored.num_top[part])
        else:
            found = self._score_on_device(hidden, scored, parts)
        ends = np.cumsum([count for _, count in scored.requests]).tolist()
        return {
            position: found[end - count : end] for (position, count), end in zip(scored.requests, ends, strict=True)
        }

    def _score_on_device(self, hidden: torch.Tensor, scored: ScoredTokens, parts: list[slice]) -> list[TokenLogprobs]:
        """Every slice's results stay on the device until all are made: the host waits once."""
        from pageframe.runtime.device_logits import packed_logprobs, unpack_logprobs

        max_top = int(scored.num_top.max(initial=0))
        packed = [packed_logprobs(self._logits(hidden[part]), scored.token_ids[part], max_top) for part in parts]
        return unpack_logprobs(torch.cat(packed), scored.num_top)


def _plain_rows(batch: SamplingBatch) -> Int64s:
    """Greedy rows of which nothing else is wanted."""
    is_plain = (batch.temperature < GREEDY_BELOW) & (batch.num_logprobs < 0)
    is_plain[[row for row, _ in (*batch.banned, *batch.rules)]] = False
    return np.flatnonzero(is_plain)


def _sample_on_host(logits: torch.Tensor, batch: SamplingBatch) -> StepResult:
    chosen, best = _arg_max(logits)
    token_ids = chosen.astype(np.int32)
    banned, rules = dict(batch.banned), dict(batch.rules)
    noisy = ~(batch.temperature < GREEDY_BELOW)
    wrong = ~np.isfinite(best)
    wrong[list(rules)] = True
    for row, ids in banned.items():
        wrong[row] |= token_ids[row] in ids
    wanted = np.flatnonzero(noisy | wrong | (batch.num_logprobs >= 0))
    host_rows = dict(zip(wanted.tolist(), _host_rows(logits, wanted), strict=True))

    waiting: list[Candidates] = []
    num_waiting = 0
    for row, values in host_rows.items():
        if not (noisy[row] or wrong[row]):
            continue
        if row in rules:
            allowed = ruled_logits(values, best[row], banned.get(row, ()), rules[row])
        else:
            allowed = allowed_logits(values, best[row], banned.get(row, ()))
        if not len(allowed):
            token_ids[row] = NO_TOKEN
        elif noisy[row]:
            waiting.append(find_candidates(allowed, batch, row))
            num_waiting += len(waiting[-1].ids)
            if num_waiting >= _DRAWN_TOGETHER:
                _draw(waiting, batch, token_ids)
                waiting, num_waiting = [], 0
        else:
            token_ids[row] = allowed.argmax()
    if waiting:
        _draw(waiting, batch, token_ids)
    logprobs = {
        row: _logprobs(allowed_logits(values, best[row], ()), int(token_ids[row]), int(batch.num_logprobs[row]))
        for row, values in host_rows.items()
        if batch.num_logprobs[row] >= 0 and token_ids[row] != NO_TOKEN
    }
    return StepResult(token_ids, logprobs)


def _sample_on_device(logits: torch.Tensor, batch: SamplingBatch) -> StepResult:
    """`Sampler.sample_logits` by kernels; rows with nothing above -inf to draw from are left to the host."""
    from pageframe.kernels.triton.sampling import draw_tokens
    from pageframe.runtime.device_logits import logprobs_of, penalties_of, with_bias_and_masks

    rows = [index for index, ids in batch.banned for _ in ids]
    banned = np.array(rows, np.int64), np.array([token_id for _, ids in batch.banned for token_id in ids], np.int64)
    allowed = with_bias_and_masks(logits, batch) if batch.rules else logits
    penalties = penalties_of(batch, logits.device) if batch.rules else None
    drawn = draw_tokens(allowed, _draws(batch), banned if rows else None, penalties)
    token_ids = drawn.token_ids
    # What the kernels know of a row that is changed before they see it are not the raw logits' logprobs.
    changed = [row for row, _ in batch.rules if allowed is not logits and batch.num_logprobs[row] >= 0]
    is_known = (batch.num_logprobs >= 0) & (token_ids >= 0)
    is_known[changed] = False
    logprobs = {
        row: TokenLogprobs(*drawn.logprobs(row, int(batch.num_logprobs[row])))
        for row in np.flatnonzero(is_known).tolist()
    }
    changed = [row for row in changed if token_ids[row] >= 0]
    if changed:
        picked = to_device(np.array(changed, np.int64), logits.device)
        found = logprobs_of(logits[picked], token_ids[changed].astype(np.int64), batch.num_logprobs[changed])
        logprobs |= zip(changed, found, strict=True)
    lost = np.flatnonzero(token_ids < 0)
    if len(lost):
        result = _sample_on_host(torch.from_numpy(_host_rows(logits, lost)), batch.take(lost))
        token_ids[lost] = result.token_ids
        logprobs |= {int(lost[row]): found for row, found in result.logprobs.items()}
    return StepResult(token_ids, logprobs)


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


def _has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _host_rows(logits: torch.Tensor, rows: Int64s) -> Float32s:
    """The logits of these rows, float32 [len(rows), vocab_size], on the host; not to be written to."""
    picked = logits if len(rows) == len(logits) else logits[to_device(rows, logits.device)]
    host: Float32s = np.ascontiguousarray(picked.cpu().numpy())
    return host


def _draw(rows: list[Candidates], batch: SamplingBatch, token_ids: npt.NDArray[np.int32]) -> None:
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
    top_ids = likeliest(values, min(count, len(values))).tolist() if count else []
    return TokenLogprobs(
        logprob=float(values[token_id]) - log_total,
        top_ids=top_ids,
        top_logprobs=[float(values[top_id]) - log_total for top_id in top_ids],
    )


def _score(logits: torch.Tensor, token_ids: Int64s, num_top: npt.NDArray[np.int32]) -> list[TokenLogprobs]:
    rows = logits.numpy()
    return [
        _logprobs(allowed_logits(values, values.max(), ()), token_id, count)
        for values, token_id, count in zip(rows, token_ids.tolist(), num_top.tolist(), strict=True)
    ]


def _draws(batch: SamplingBatch) -> Draws:
    """What the kernels need to know of each row."""
    temperature = np.where(batch.temperature < GREEDY_BELOW, np.float32(0), batch.temperature)
    reaches = [reach(float(t), float(p)) for t, p in zip(temperature, batch.min_p, strict=True)]
    return Draws(
        temperature=temperature,
        span=NOISE_SPAN * temperature.astype(np.float64),
        reach=np.array(reaches, np.float64),
        top_k=batch.top_k,
        top_p=batch.top_p,
        seed=batch.seed,
        output_index=batch.output_index,
        num_top=batch.num_logprobs,
    )
