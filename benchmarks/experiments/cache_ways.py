"""Four ways to make the same tokens, which differ only in what keeps K and V: nothing, a cache that grows by
concatenation, a cache reserved whole, and the engine's paged pool.

All run the same decoder. The first three are attention backends for requests of equal length, which is what makes one
tensor per layer enough for them; their attention is what the reference backend computes, without its gather.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from pageframe.benchmarks.experiments.cache_memory import Held
from pageframe.benchmarks.experiments.ties import LogitGap, spacing
from pageframe.kernels.attention import AttentionPlan, StepBatch, UnsupportedError
from pageframe.kernels.layout import MAX_GROUP_ROWS, causal_bias
from pageframe.kernels.plan import check_cache, check_no_scales, make_plan
from pageframe.runtime.engine import Engine
from pageframe.runtime.errors import EngineError
from pageframe.runtime.inspection import engine_stats
from pageframe.runtime.model_runner import ModelRunner
from pageframe.runtime.models.decoder import Decoder
from pageframe.runtime.request import SamplingParams

Tokens = npt.NDArray[np.int64]


class Way(Protocol):
    """One way to continue `num_requests` prompts of equal length, a token of each at a time."""

    #: Whether every step needs the step before; one that does not may be asked for any position.
    keeps: bool

    def start(self, prompts: Tokens, num_new_tokens: int) -> None:
        """Begin with prompts [num_requests, prompt_len]; the room is taken here, and is no part of any step."""

    def step(self, tokens: Tokens) -> Tokens:
        """The next token [num_requests] of sequences [num_requests, length]: the prompts and all tokens so far.

        Raises:
            EngineError: a forward pass failed.
        """

    def logit_gap(self, request: int, token: int) -> LogitGap:
        """How far the last step's best logit of a request is above that of `token`."""

    def held(self) -> Held: ...

    def end(self) -> None:
        """Give back all memory of K and V."""


# ---- contiguous ways ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EqualRequests:
    """A step of requests that all have the same context, as kernels see it (StepBatch).

    Args:
        start: tokens whose K and V are kept already. num_new: tokens of each request in this step.
    """

    num_requests: int
    start: int
    num_new: int

    @property
    def rows(self) -> npt.NDArray[np.int32]:
        return np.arange(self.num_requests, dtype=np.int32)

    @property
    def context_lens(self) -> npt.NDArray[np.int32]:
        return np.full(self.num_requests, self.start + self.num_new, dtype=np.int32)

    @property
    def query_start(self) -> npt.NDArray[np.int32]:
        return np.arange(self.num_requests + 1, dtype=np.int32) * self.num_new

    @property
    def num_decode(self) -> int:
        return self.num_requests if self.num_new == 1 else 0


class ContiguousBackend(ABC):
    """Attention over K/V that lie in one tensor per layer: [2, num_requests, num_kv_heads, length, head_dim].

    It implements the kernels' Backend for steps of EqualRequests. Where a paged backend gets a layer's pool as
    `kv_cache`, this one gets the layer's number, an int64 scalar, and keeps K and V itself: `_keep` says how.
    """

    name = "contiguous"

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._kv: Tensor | None = None
        self._step: EqualRequests | None = None
        self._scratch = torch.empty(0)

    def check_supported(self, head_dim: int, block_size: int, dtype: torch.dtype) -> None:
        check_cache(block_size, dtype)

    def plan_attention(self, batch: StepBatch, tables: Tensor, block_size: int) -> AttentionPlan:
        """See `Backend.plan_attention`; there are no tables to follow."""
        assert isinstance(batch, EqualRequests), "contiguous K/V are for requests of equal length"
        self._step = batch
        return make_plan(batch, tables.device, block_size, batch)

    def write_kv(self, k: Tensor, v: Tensor, kv_cache: Tensor, slots: Tensor, kv_scales: Tensor | None = None) -> None:
        """Keep a step's K and V; a slot's number says nothing here, since all are written in order."""
        check_no_scales(self.name, kv_scales)
        assert self._step is not None, "no step was planned"
        num_kv_heads, head_dim = k.shape[1:]
        new = torch.stack((k, v)).view(2, self._step.num_requests, self._step.num_new, num_kv_heads, head_dim)
        self._kv = self._keep(int(kv_cache), self._step.start, new.transpose(2, 3).to(self._dtype))

    @abstractmethod
    def _keep(self, layer: int, start: int, new: Tensor) -> Tensor:
        """All K/V of a layer [2, num_requests, num_kv_heads, start + num_new, head_dim], `new` being the last ones."""

    @abstractmethod
    def held(self) -> Held: ...

    def paged_attention(
        self,
        q: Tensor,
        kv_cache: Tensor,
        plan: AttentionPlan,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        kv_scales: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """See `Backend.paged_attention`; called right after the layer's `write_kv`."""
        if softcap is not None:
            raise UnsupportedError("contiguous K/V have no attention with soft-capped scores")
        assert isinstance(plan.parts, EqualRequests)
        assert self._kv is not None, "K and V are written first"
        out = torch.empty_like(q) if out is None else out
        kv, self._kv = self._kv, None
        if plan.parts.num_new == 1:
            self._decode(q, kv if window is None else kv[:, :, :, -window:], scale, out)
        else:
            _attend_chunks(q, kv, plan.parts, scale, window, out)
        return out

    def _decode(self, q: Tensor, kv: Tensor, scale: float, out: Tensor) -> None:
        """One query token per request, in groups small enough for the CPU's caches, as the reference backend does."""
        _, num_requests, num_kv_heads, length, head_dim = kv.shape
        group = max(1, MAX_GROUP_ROWS // (num_kv_heads * length))
        for first in range(0, num_requests, group):
            part = slice(first, first + group)
            keys, values = self._float32(kv[:, part])
            queries = q[part].float().reshape(keys.shape[0], -1, head_dim)
            scores = torch.bmm(queries, keys.mT).mul_(scale)
            attended = torch.bmm(torch.softmax(scores, dim=-1), values)
            out[part] = attended.view(-1, *out.shape[1:]).to(out.dtype)

    def _float32(self, kv: Tensor) -> Tensor:
        """float32 [2, num_requests * num_kv_heads, length, head_dim]; others go through one buffer, used again."""
        if kv.dtype != torch.float32:
            if self._scratch.numel() < kv.numel() or self._scratch.device != kv.device:
                self._scratch = torch.empty(kv.numel(), device=kv.device)
            kv = self._scratch[: kv.numel()].view(kv.shape).copy_(kv)
        return kv.flatten(1, 2)


def _attend_chunks(q: Tensor, kv: Tensor, step: EqualRequests, scale: float, window: int | None, out: Tensor) -> None:
    """Several query tokens per request, one request after the other, as the reference backend does."""
    length = step.start + step.num_new
    plain = step.start == 0 and (window is None or window >= length)
    bias = None if plain else causal_bias(step.num_new, length, window, q.device)
    for request in range(step.num_requests):
        tokens = slice(request * step.num_new, (request + 1) * step.num_new)
        keys, values = kv[:, request].float()
        queries = q[tokens].float().transpose(0, 1)
        attended = F.scaled_dot_product_attention(
            queries[None],
            keys[None],
            values[None],
            attn_mask=bias,
            is_causal=plain,
            scale=scale,
            enable_gqa=True,
        )[0]
        out[tokens] = attended.transpose(0, 1).to(out.dtype)


class NothingKept(ContiguousBackend):
    """No cache: a layer's K and V live until its attention is done."""

    def _keep(self, layer: int, start: int, new: Tensor) -> Tensor:
        assert start == 0, "nothing was kept"
        return new

    def held(self) -> Held:
        return Held(0, 0)


class GrownCache(ContiguousBackend):
    """A cache that is exactly as long as its contents: at every token each layer's K/V are copied into longer ones."""

    def __init__(self, dtype: torch.dtype, num_layers: int) -> None:
        super().__init__(dtype)
        self._layers: list[Tensor | None] = [None] * num_layers
        self._now = self._most = 0

    def _keep(self, layer: int, start: int, new: Tensor) -> Tensor:
        old = self._layers[layer]
        grown = new.contiguous() if old is None else torch.cat((old, new), dim=3)
        self._now += grown.nbytes
        self._most = max(self._most, self._now)  # while it is copied, the old one is still there
        self._now -= 0 if old is None else old.nbytes
        self._layers[layer] = grown
        return grown

    def held(self) -> Held:
        return Held(self._most, sum(kv.nbytes for kv in self._layers if kv is not None))


class ReservedCache(ContiguousBackend):
    """A cache with room for `max_len` tokens of each request from the start."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, int, int, int, int, int], device: torch.device) -> None:
        """Args: shape: [num_layers, 2, num_requests, num_kv_heads, max_len, head_dim]."""
        super().__init__(dtype)
        self._layers = torch.zeros(shape, dtype=dtype, device=device)
        self._length = 0

    def _keep(self, layer: int, start: int, new: Tensor) -> Tensor:
        self._length = start + new.shape[3]
        kv = self._layers[layer]
        kv[:, :, :, start : self._length] = new
        return kv[:, :, :, : self._length]

    def held(self) -> Held:
        return Held(self._layers.nbytes, self._layers[:, :, :, :, : self._length].nbytes)


class ContiguousWay:
    """A decoder over a contiguous backend.

    Args:
        kind: the backend; every start makes a new one.
        dtype: what K and V are stored as.
        max_len: tokens of a request that a ReservedCache has room for.
    """

    def __init__(
        self, decoder: Decoder, kind: type[ContiguousBackend], *, dtype: torch.dtype, device: torch.device, max_len: int
    ) -> None:
        self.keeps = kind is not NothingKept
        self._decoder = decoder
        self._kind = kind
        self._dtype = dtype
        self._device = device
        self._max_len = max_len
        self._backend: ContiguousBackend | None = None
        self._layer_numbers = list(torch.arange(decoder.config.num_layers))
        self._logits = torch.empty(0)
        self._computed = "float32"
        self._num_kept = 0

    def start(self, prompts: Tokens, num_new_tokens: int) -> None:
        model = self._decoder.config
        if self._kind is GrownCache:
            self._backend = GrownCache(self._dtype, model.num_layers)
        elif self._kind is ReservedCache:
            shape = (model.num_layers, 2, len(prompts), model.num_kv_heads, self._max_len, model.head_dim)
            self._backend = ReservedCache(self._dtype, shape, self._device)
        else:
            self._backend = NothingKept(self._dtype)
        self._num_kept = 0

    @torch.inference_mode()
    def step(self, tokens: Tokens) -> Tokens:
        assert self._backend is not None, "not started"
        (num_requests, length), start = tokens.shape, self._num_kept
        step = EqualRequests(num_requests, start, length - start)
        positions = torch.arange(start, length, device=self._device).repeat(num_requests)
        hidden = self._decoder.forward(
            torch.from_numpy(tokens[:, start:]).flatten().to(self._device),
            positions,
            self._layer_numbers,
            positions,
            self._backend.plan_attention(step, torch.empty(0, device=self._device), 1),
            self._backend,
        )
        self._computed = str(hidden.dtype).removeprefix("torch.")
        self._logits = self._decoder.logits(hidden[step.num_new - 1 :: step.num_new])
        if self.keeps:
            self._num_kept = length
        # numpy's arg-max uses a CPU's vector instructions, torch's does not.
        best: Tokens = self._logits.cpu().numpy().argmax(axis=1)
        return best

    def logit_gap(self, request: int, token: int) -> LogitGap:
        logits = self._logits[request]
        best = float(logits.max())
        return LogitGap(best - float(logits[token]), spacing(best, self._computed))

    def held(self) -> Held:
        assert self._backend is not None, "not started"
        return self._backend.held()

    def end(self) -> None:
        self._backend = None


# ---- the paged way --------------------------------------------------------------------------------------------------


class PagedWay:
    """The engine itself: scheduler, block tables, paged attention, sampler. Its prefix cache must be off."""

    keeps = True

    def __init__(self, engine: Engine) -> None:
        assert isinstance(engine.runner, ModelRunner)
        assert not engine.resolved.prefix_cache, "a prompt that is found computed would cost nothing"
        self._engine = engine
        self._block_bytes = engine.runner.pool_bytes // engine.resolved.num_blocks
        self._numbers = itertools.count()
        #: Tokens of each request that no step has handed out yet, in the order of the prompts.
        self._made: dict[str, list[int]] = {}

    def start(self, prompts: Tokens, num_new_tokens: int) -> None:
        # One token more than wanted, so that the last one still finds its request alive, and its memory can be seen.
        params = SamplingParams(temperature=0, max_tokens=num_new_tokens + 1, ignore_eos=True)
        self._made = {f"request-{next(self._numbers)}": [] for _ in prompts}
        for request_id, prompt in zip(self._made, prompts.tolist(), strict=True):
            self._engine.add(request_id, prompt, params)

    def step(self, tokens: Tokens) -> Tokens:
        while not all(self._made.values()):
            for output in self._engine.step():
                if output.error:
                    raise EngineError(output.error)
                self._made[output.request_id] += output.token_ids
        return np.array([made.pop(0) for made in self._made.values()], dtype=np.int64)

    def logit_gap(self, request: int, token: int) -> LogitGap:
        raise NotImplementedError("the engine's logits stay in its sampler")

    def held(self) -> Held:
        stats = engine_stats(self._engine)
        slot_bytes = self._block_bytes // self._engine.resolved.block_size
        return Held(stats.blocks_used * self._block_bytes, stats.slots_written * slot_bytes)

    def end(self) -> None:
        for request_id in self._made:
            self._engine.abort(request_id)
        self._made = {}
