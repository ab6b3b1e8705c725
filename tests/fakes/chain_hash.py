"""A model whose only arithmetic is hashing, so that any slot read or written wrongly changes its output.

Its "KV" at position p of layer l is a 64-bit hash of (salt, all tokens up to p, l), continued from what the cache
holds at p - 1. It is written through the batch's slots and read back through a copy of the block tables that only
`table_updates` change, as a real runner does, and copied between blocks and host memory where a batch says so. The
next token mixes every slot of the context (with a window: of the window) in every layer with the sampling parameters.
It knows no scheduler; `solo` knows not even blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from pageframe.runtime.batch import Batch
from pageframe.runtime.block_copy import CopyKind
from pageframe.runtime.request import GREEDY_BELOW, SamplingParams, TokenLogprobs
from pageframe.runtime.step_plan import SamplingBatch, ScoredTokens, StepResult

#: Large, so that a wrong hash gives a right token about never.
VOCAB_SIZE = 2**31 - 1
EOS = 0
#: Drawn about as often as EOS; prompts and stop ids may use it.
COMMON = 3
#: One draw in this many is EOS, and one is COMMON.
RARITY = 24
POISON = 0xDEAD_BEEF_DEAD_BEEF

Uint64s = npt.NDArray[np.uint64]

_MASK = 2**64 - 1
_TOKEN, _POSITION, _LAYER = 0x1E3779B97F4A7C15, 0x42B2AE3D27D4EB4F, 0x165667B19E3779F9
# Arrays of no dimension: numpy takes several times as long over scalars, and these tests make millions of calls.
_SHIFTS = tuple(np.array(count, dtype=np.uint64) for count in (30, 27, 31))
_FACTORS = tuple(np.array(factor, dtype=np.uint64) for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_TOKEN_FACTOR, _POSITION_FACTOR = np.array(_TOKEN), np.array(_POSITION)


class InjectedFailure(RuntimeError):
    """The forward pass fails because the test asked for it."""


def mix(value: int) -> int:
    """64 well-mixed bits: the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def mix_array(values: Uint64s) -> Uint64s:
    """`mix` of each element."""
    values = (values ^ (values >> _SHIFTS[0])) * _FACTORS[0]
    values = (values ^ (values >> _SHIFTS[1])) * _FACTORS[1]
    return values ^ (values >> _SHIFTS[2])


def weight(position: int, layer: int) -> int:
    """The odd factor of a slot in the context's hash: no two slots can be exchanged unseen."""
    return mix(position * _POSITION + layer * _LAYER & _MASK) | 1


@dataclass(frozen=True)
class Solo:
    """What a request gives alone."""

    token_ids: list[int]
    finish_reason: str
    stop_token_id: int


class ChainHashModel:
    """A Runner and a TokenSampler over a pool [num_layers, num_blocks * block_size] uint64, poisoned at the start.

    `fail_next` makes the next forward raise: "before" anything is touched, "after" the cache is written, or where there
    are "copies" to be made. `num_failures` counts. While `device_is_lost`, `synchronize` fails.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_requests: int,
        max_blocks: int,
        num_layers: int = 2,
        host_slots: int = 0,
        window: int | None = None,
        salt: int = 0x5A17,
    ) -> None:
        assert window is None or window >= 2, "a token's hash continues from the one before it"
        self.block_size = block_size
        self.pool: Uint64s = np.full((num_layers, num_blocks * block_size), POISON, dtype=np.uint64)
        self._blocks = self.pool.reshape(num_layers, num_blocks, block_size)
        self._host = np.full((num_layers, host_slots, block_size), POISON, dtype=np.uint64)
        self.window = window
        self.num_copies: Counter[CopyKind] = Counter()
        self.num_forwards = 0
        self.fail_next = ""
        self.num_failures = 0
        self.device_is_lost = False
        self._tables = np.full((max_num_requests, max_blocks), -1, dtype=np.int64)
        self._roots = [mix(salt + layer) for layer in range(num_layers)]
        self._roots_column = np.array(self._roots, dtype=np.uint64)[:, None]
        self._layers = np.arange(num_layers, dtype=np.uint64)[:, None] * np.uint64(_LAYER)
        positions = range(max_blocks * block_size)
        self._weights = np.array(
            [[weight(position, layer) for position in positions] for layer in range(num_layers)], dtype=np.uint64
        )
        self._index = np.array(positions) // block_size
        self._offset = np.array(positions) % block_size

    def poison(self, block_ids: Sequence[int]) -> None:
        """Overwrite whole blocks in every layer: nothing may read them before they are written again."""
        self._blocks[:, block_ids] = POISON

    def poison_host(self, slots: Sequence[int]) -> None:
        self._host[:, slots] = POISON

    # ---- Runner ---------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch) -> Uint64s:
        """Write the KV of the batch's tokens; the hash of the context up to it, uint64 [n], for each wanted token."""
        self.num_forwards += 1
        if self.fail_next == "before" or (self.fail_next == "copies" and batch.copies):
            self._fail("before the cache was written")
        check_batch(batch)
        for copy in batch.copies:
            self.num_copies[copy.kind] += 1
            source = self._host if copy.kind is CopyKind.TO_DEVICE else self._blocks
            target = self._host if copy.kind is CopyKind.TO_HOST else self._blocks
            target[:, copy.dst] = source[:, copy.src]
        updates = batch.table_updates
        self._tables[updates.rows, updates.indices] = updates.block_ids
        self._write(batch)
        if self.fail_next == "after":
            self._fail("after the cache was written")
        return self._read(batch)

    def synchronize(self) -> None:
        """Nothing runs behind its back; it fails where the device is to be lost."""
        if self.device_is_lost:
            raise InjectedFailure("the device is lost")

    def _fail(self, when: str) -> NoReturn:
        self.fail_next = ""
        self.num_failures += 1
        raise InjectedFailure(when)

    def _write(self, batch: Batch) -> None:
        first_tokens, positions = batch.query_start[:-1], batch.positions
        before = positions[first_tokens] - 1
        slots = self._tables[batch.rows, self._index[before]] * self.block_size + self._offset[before]
        previous = np.where(before >= 0, self.pool[:, slots], self._roots_column)
        places = batch.token_ids * _TOKEN_FACTOR + positions * _POSITION_FACTOR
        values = mix_array(places.view(np.uint64) + self._layers)
        if batch.num_decode == len(batch.rows):
            values += previous
        else:
            sums = values.cumsum(axis=1, dtype=np.uint64)
            before_first = (sums - values)[:, first_tokens]
            counts = batch.query_start[1:] - first_tokens
            values = sums + (previous - before_first).repeat(counts, axis=1)
        self.pool[:, batch.slots] = values

    def _read(self, batch: Batch) -> Uint64s:
        requests = batch.query_start.searchsorted(batch.wanted, side="right") - 1
        lens = batch.positions[batch.wanted] + 1
        end = lens.max(initial=0)
        table = self._tables[batch.rows[requests]]
        slots = table[:, self._index[:end]] * self.block_size + self._offset[:end]
        places = np.arange(end)
        live = places < lens[:, None]
        if self.window is not None:
            live &= places >= lens[:, None] - self.window
        terms = self.pool[:, slots] * self._weights[:, None, :end] * live
        sums: Uint64s = terms.sum(axis=(0, 2), dtype=np.uint64)
        return sums

    # ---- TokenSampler ---------------------------------------------------------------------------------------------

    def sample(self, hidden: Uint64s, batch: SamplingBatch) -> StepResult:
        assert len(hidden) == len(batch), f"{len(hidden)} hidden states for {len(batch)} samples"
        banned = dict(batch.banned)
        tokens = np.zeros(len(batch), dtype=np.int32)
        logprobs = {}
        for index, context in enumerate(hidden.tolist()):
            drawn = draw(
                context,
                temperature=float(batch.temperature[index]),
                top_p=float(batch.top_p[index]),
                min_p=float(batch.min_p[index]),
                top_k=int(batch.top_k[index]),
                seed=int(batch.seed[index]),
                output_index=int(batch.output_index[index]),
            )
            tokens[index] = choose(drawn, banned.get(index, ()))
            if batch.num_logprobs[index] >= 0:
                logprobs[index] = expected_logprobs(int(tokens[index]), int(batch.num_logprobs[index]))
        return StepResult(tokens, logprobs)

    def score(self, hidden: Uint64s, scored: ScoredTokens) -> dict[int, list[TokenLogprobs]]:
        assert len(hidden) == len(scored.token_ids) == sum(count for _, count in scored.requests)
        contexts, token_ids, num_top = hidden.tolist(), scored.token_ids.tolist(), scored.num_top.tolist()
        found = list(map(expected_score, contexts, token_ids, num_top))
        ends = np.cumsum([count for _, count in scored.requests]).tolist()
        return {place: found[end - count : end] for (place, count), end in zip(scored.requests, ends, strict=True)}

    # ---- the oracle -----------------------------------------------------------------------------------------------

    def solo(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        max_total_tokens: int,
        seed: int,
        max_model_len: int,
        slide_by: int | None = None,
    ) -> Solo:
        """The same request alone, by the definition: no blocks, no batches, no cache.

        Args:
            seed: the choice's.
            max_model_len, slide_by: a longer context begins again `slide_by` tokens later, positions from 0.
        """
        eos_ids = () if params.ignore_eos else (EOS,)
        stop_ids = {*eos_ids, *params.stop_token_ids}
        output: list[int] = []
        context = self._context(prompt)
        while len(prompt) + len(output) < max_total_tokens:
            drawn = draw(
                context.seen(self.window),
                temperature=params.temperature,
                top_p=params.top_p,
                min_p=params.min_p,
                top_k=max(0, params.top_k),
                seed=seed,
                output_index=len(output),
            )
            token = choose(drawn, stop_ids if len(output) < params.min_tokens else ())
            output.append(token)
            if token in stop_ids:
                return Solo(output, "stop", -1 if token in eos_ids else token)
            context.append(token)
            if len(context.token_ids) > max_model_len and slide_by is not None:
                context = self._context(context.token_ids[slide_by:])
        return Solo(output, "length", -1)

    def solo_scores(self, prompt: Sequence[int], count: int) -> list[TokenLogprobs]:
        """What `score` gives for a prompt's tokens from the second on, alone."""
        context, scores = self._context(prompt[:1]), []
        for token_id in prompt[1:]:
            scores.append(expected_score(context.seen(self.window), token_id, count))
            context.append(token_id)
        return scores

    def _context(self, token_ids: Sequence[int]) -> _SoloContext:
        context = _SoloContext(list(self._roots))
        for token in token_ids:
            context.append(token)
        return context


@dataclass
class _SoloContext:
    """A context as the definition has it: `kv` of the newest token in each layer, and what each position adds."""

    kv: list[int]
    token_ids: list[int] = field(default_factory=list)
    terms: list[int] = field(default_factory=list)

    def append(self, token: int) -> None:
        position, term = len(self.token_ids), 0
        for layer in range(len(self.kv)):
            place = position * _POSITION + layer * _LAYER
            self.kv[layer] = (self.kv[layer] + mix(token * _TOKEN + place & _MASK)) & _MASK
            term += self.kv[layer] * weight(position, layer)
        self.token_ids.append(token)
        self.terms.append(term)

    def seen(self, window: int | None) -> int:
        return sum(self.terms if window is None else self.terms[-window:]) & _MASK


def draw(context: int, temperature: float, top_p: float, min_p: float, top_k: int, seed: int, output_index: int) -> int:
    """64 bits that decide the next token: of the context alone where greedy, else of all sampling parameters."""
    if temperature < GREEDY_BELOW:
        return mix(context)
    # Rounded, since float32 parameters must draw as the ones they were made from.
    filters = (round(temperature * 1e4), round(top_p * 1e4), round(min_p * 1e4))
    for number in (*filters, top_k, seed & _MASK, output_index):
        context = mix((context + number * _TOKEN + _LAYER) & _MASK)
    return context


def choose(drawn: int, banned: Sequence[int] | set[int]) -> int:
    """The token of 64 drawn bits: sometimes EOS or COMMON, else any other of a large vocabulary."""
    special = {0: EOS, 1: COMMON}.get(drawn % RARITY)
    if special is not None and special not in banned:
        return special
    return COMMON + 1 + (drawn >> 8) % (VOCAB_SIZE - COMMON - 1)


def expected_logprobs(token: int, count: int) -> TokenLogprobs:
    """What `sample` reports for a token, so that a test sees when it reaches another request."""
    return TokenLogprobs(-float(token), list(range(count)), [-1.0] * count)


def expected_score(context: int, token_id: int, count: int) -> TokenLogprobs:
    """What `score` reports for a token behind a context."""
    return TokenLogprobs(-float(mix(context ^ token_id)), list(range(count)), [-1.0] * count)


def check_batch(batch: Batch) -> None:
    """What every runner may rely on."""
    query_start, positions = batch.query_start.tolist(), batch.positions.tolist()
    counts = [end - start for start, end in pairwise(query_start)]
    num_tokens = len(batch.token_ids)
    assert num_tokens > 0, "an empty batch reached the model"
    assert query_start[0] == 0
    assert query_start[-1] == num_tokens == len(positions) == len(batch.slots)
    assert min(counts) > 0, "a request without tokens is in the batch"
    assert set(counts[: batch.num_decode]) <= {1}, "the first num_decode requests must have one token"
    assert 1 not in counts[batch.num_decode :], "a one-token request stands behind num_decode"
    slots = set(batch.slots.tolist())
    assert min(slots) >= 0, "a token has no slot"
    assert len(slots) == num_tokens, "two tokens are written to one slot"
    assert len(set(batch.rows.tolist())) == len(batch.rows) == len(counts), "two requests share a row"
    ends = [end - 1 for end in query_start[1:]]
    assert batch.context_lens.tolist() == [positions[end] + 1 for end in ends]
    to_draw = batch.wanted[: len(batch.sampling)].tolist()
    assert set(to_draw) <= set(ends), "a token to draw from is not the last of its request"
    if batch.wants_all:
        assert batch.wanted.tolist() == list(range(num_tokens)), "not every token is wanted, in order"
    sampling = batch.sampling
    if sampling.all_plain:
        assert (sampling.temperature < GREEDY_BELOW).all(), "a row is not greedy"
        assert (sampling.num_logprobs < 0).all(), "a row wants logprobs"
        assert not sampling.banned, "a row may not end yet"
        assert not sampling.rules, "a row has rules"
    updates = batch.table_updates
    entries = set(zip(updates.rows.tolist(), updates.indices.tolist(), strict=True))
    assert len(entries) == len(updates), "a table entry is updated twice in one step: on a device either may win"
