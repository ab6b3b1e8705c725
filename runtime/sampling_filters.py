"""What temperature, top_k, top_p and min_p leave of one row of logits, on the host. No torch.

Ties go to the lower id, and what top_p adds up are whole numbers, so that the same tokens are left everywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pageframe.kernels.triton.sampling_rules import token_masses
from pageframe.runtime.philox import NOISE_SPAN
from pageframe.runtime.step_plan import SamplingBatch
from pageframe.runtime.token_rules import TokenRules, unpack

Float32s = npt.NDArray[np.float32]
Int64s = npt.NDArray[np.int64]

# top_p's histogram reaches 32 below the best; what is further away has no mass and shares the last bin.
_BINS_PER_UNIT = np.float32(16)
_NUM_BINS = 512
_LAST_BIN = np.float32(_NUM_BINS - 1)
# Where few tokens are within this distance, and all of the nucleus, those are sorted, without a histogram.
_NEAR = np.float32(6)
_SORTED_AT_ONCE = 128
_SORTED_SHARE = 64
# top_k's candidates are bounded by the largest of as many lanes, each of at least so many tokens.
_LANES_PER_TOKEN = 4
_LEAST_LANE = 8


@dataclass(frozen=True, slots=True)
class Candidates:
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


def allowed_logits(values: Float32s, best: np.float32, banned: tuple[int, ...]) -> Float32s:
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


def ruled_logits(values: Float32s, best: np.float32, banned: tuple[int, ...], rules: TokenRules) -> Float32s:
    """What `allowed_logits` makes of a row that has rules; of no length where its mask leaves nothing. A copy."""
    changed = allowed_logits(values, best, ()).copy()
    rules.apply(changed)
    if rules.mask is None:
        return allowed_logits(changed, changed.max(), banned)
    may_come = unpack(rules.mask, len(values))
    changed[~may_come] = -np.inf
    if changed.max() == -np.inf:
        changed[may_come] = 0
    return changed if may_come.any() else changed[:0]


def find_candidates(values: Float32s, batch: SamplingBatch, row: int) -> Candidates:
    """Filters one row of logits without NaN and with a finite maximum."""
    best, temperature = values.max(), batch.temperature[row]
    ids = None
    if 0 < batch.top_k[row] < len(values):
        ids = np.sort(likeliest(values, int(batch.top_k[row])))
    if batch.top_p[row] < 1:
        within = nucleus(values if ids is None else values[ids], best, temperature, float(batch.top_p[row]))
        ids = within if ids is None else ids[within]
    ids = _near(values, ids, float(best), float(temperature), float(batch.min_p[row]))
    return Candidates(row, ids, values[ids], best)


def _near(values: Float32s, ids: Int64s | None, best: float, temperature: float, min_p: float) -> Int64s:
    """Of `ids` (None: of all), those that min_p leaves and that can win: NOISE_SPAN below the best none can.

    p / p_best = exp((logit - best) / temperature), whatever the filters before left, since they leave the best.
    """
    # A float32 is at least the cut in float64 exactly when it is at least the cut rounded to float32.
    cut = np.float32(best - reach(temperature, min_p))
    if ids is None:
        return np.flatnonzero(values >= cut)
    return ids[values[ids] >= cut]


def reach(temperature: float, min_p: float) -> float:
    """How far below the best logit one may lie that min_p leaves and that can win."""
    return (min(NOISE_SPAN, -math.log(min_p)) if min_p > 0 else NOISE_SPAN) * temperature


def likeliest(values: Float32s, count: int) -> Int64s:
    """Indices of the `count` largest values, largest first, ties to the lower index."""
    num_lanes = _LANES_PER_TOKEN * count
    if num_lanes * _LEAST_LANE <= len(values):
        # The count-th largest of the lanes' largest is at most the count-th largest of all.
        lanes = values[: len(values) // num_lanes * num_lanes].reshape(-1, num_lanes).max(axis=0)
        near = np.flatnonzero(values >= np.partition(lanes, num_lanes - count)[num_lanes - count])
        found: Int64s = near[_likeliest_of_few(values[near], count)]
        return found
    return _likeliest_of_few(values, count)


def _likeliest_of_few(values: Float32s, count: int) -> Int64s:
    if count < len(values):
        smallest = np.partition(values, len(values) - count)[len(values) - count]
        above, level = np.flatnonzero(values > smallest), np.flatnonzero(values == smallest)
        indices = np.concatenate((above, level[: count - len(above)]))
    else:
        indices = np.arange(len(values))
    # Within equal values the indices ascend, and a stable sort leaves them so.
    order: Int64s = indices[np.argsort(-values[indices], kind="stable")]
    return order


def nucleus(values: Float32s, best: np.float32, temperature: np.float32, top_p: float) -> Int64s:
    """Indices, ascending, of the shortest prefix, likeliest first, whose mass is at least top_p of all.

    The sums are of whole numbers, hence exact: see `token_masses`.
    """
    with np.errstate(over="ignore"):
        distance = best - values
        distance /= temperature
    masses = token_masses(distance)
    target = float(np.ceil(top_p * masses.sum()))
    near = distance < _NEAR
    if np.count_nonzero(near) <= _SORTED_AT_ONCE + len(values) // _SORTED_SHARE:
        indices = near.nonzero()[0]
        if masses[indices].sum() >= target:
            return np.sort(_shortest_prefix(values, masses, indices, target))
    return _nucleus_by_histogram(values, distance, masses, target)


def _nucleus_by_histogram(
    values: Float32s, distance: Float32s, masses: npt.NDArray[np.float64], target: float
) -> Int64s:
    """`nucleus` by sorting only the bin in which the mass reaches `target`; the bins before it are taken whole."""
    bins = (distance.clip(0, _LAST_BIN / _BINS_PER_UNIT) * _BINS_PER_UNIT).astype(np.int32)
    mass = np.bincount(bins, masses, minlength=_NUM_BINS).cumsum()
    last_bin = int(mass.searchsorted(target))
    mass_before = mass[last_bin - 1] if last_bin else 0.0
    inside = (bins == last_bin).nonzero()[0]
    kept = bins < last_bin
    kept[_shortest_prefix(values, masses, inside, target - mass_before)] = True
    return kept.nonzero()[0]


def _shortest_prefix(values: Float32s, masses: npt.NDArray[np.float64], indices: Int64s, target: float) -> Int64s:
    """The fewest of `indices`, likeliest first, whose mass is at least `target`."""
    order = indices[_likeliest_of_few(values[indices], len(indices))]
    found: Int64s = order[: int(masses[order].cumsum().searchsorted(target)) + 1]
    return found
