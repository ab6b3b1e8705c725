"""Four ways to make the same tokens, which differ only in who owns the memory of K and V: nobody beyond a step, a cache
that grows by concatenation, a cache reserved whole, and the engine's paged pool.

All run the same decoder and the same attention. A contiguous cache is a paged one whose block tables are the identity:
the blocks of a request lie side by side, in order. So that the kernels read them as they read the pool, they are as
large as the pool's: what is contiguous is rounded up to whole blocks. All requests are of equal length.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pageframe.benchmarks.experiments.cache_memory import Held
from pageframe.benchmarks.experiments.ties import LogitGap, spacing
from pageframe.kernels.attention import Backend, kv_cache_shape
from pageframe.runtime.config import ModelConfig
from pageframe.runtime.engine import Engine
from pageframe.runtime.errors import EngineError
from pageframe.runtime.inspection import engine_stats
from pageframe.runtime.model_runner import ModelRunner
from pageframe.runtime.models.decoder import Decoder
from pageframe.runtime.request import SamplingParams

Tokens = npt.NDArray[np.int64]


class Way(Protocol):
    """One way to continue `num_requests` prompts of equal length, a token of each at a time."""

    @property
    def keeps(self) -> bool:
        """Whether every step needs the step before; a way that does not may be asked for any position."""

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


# ---- contiguous memory ----------------------------------------------------------------------------------------------


class Blocks:
    """Makes blocks of K and V.

    Args:
        block_size: slots of a block.
        dtype: what K and V are stored as.
    """

    def __init__(self, model: ModelConfig, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_layers = model.num_layers
        self.size = block_size
        self._shape = kv_cache_shape(1, model.num_kv_heads, block_size, model.head_dim)[1:]
        self._dtype = dtype
        self.device = device

    def holding(self, length: int) -> int:
        """Blocks for `length` tokens."""
        return -(-length // self.size)

    def make(self, *counts: int) -> Tensor:
        """Zeros, so that no step pays for a page's first touch: [*counts, *shape of a block]."""
        return torch.zeros(*counts, *self._shape, dtype=self._dtype, device=self.device)


class Memory(Protocol):
    """Who owns K and V; a layer's blocks are [num_requests * blocks_each, *shape of a block]."""

    #: See `Way.keeps`.
    keeps: bool

    def __init__(self, blocks: Blocks, num_requests: int, longest: int) -> None:
        """Args: longest: tokens of a request at its end, for those that take their room at the start."""

    def blocks_each(self, length: int) -> int:
        """Blocks of each request when it has `length` tokens."""

    def layers(self, length: int) -> Iterable[Tensor]:
        """The layers' blocks with room for `length` tokens of each request, each to be asked for when it is needed."""

    def held(self) -> Held: ...


class NothingKept:
    """No cache: all layers write to the same blocks, one after the other, and nobody asks for them again."""

    keeps = False

    def __init__(self, blocks: Blocks, num_requests: int, longest: int) -> None:
        self._blocks_each = blocks.holding(longest)
        self._layers = [blocks.make(num_requests * self._blocks_each)] * blocks.num_layers

    def blocks_each(self, length: int) -> int:
        return self._blocks_each

    def layers(self, length: int) -> Iterable[Tensor]:
        return self._layers

    def held(self) -> Held:
        return Held(0, 0)


class GrownCache:
    """A cache as long as its contents: at every token each layer's K and V are copied into memory with room for it."""

    keeps = True

    def __init__(self, blocks: Blocks, num_requests: int, longest: int) -> None:
        self._blocks = blocks
        self._layers = [blocks.make(num_requests, 0) for _ in range(blocks.num_layers)]
        self._length = self._now = self._most = 0

    def blocks_each(self, length: int) -> int:
        return self._blocks.holding(length)

    def layers(self, length: int) -> Iterator[Tensor]:
        for index, old in enumerate(self._layers):
            num_requests, num_blocks, *shape = old.shape
            room = old.new_empty(num_requests, self.blocks_each(length) - num_blocks, *shape)
            grown = torch.cat((old, room), dim=1)
            self._now += grown.nbytes
            self._most = max(self._most, self._now)  # while it is copied, the old one is still there
            self._now -= old.nbytes
            self._layers[index] = grown
            yield grown.flatten(0, 1)
        self._length = length

    def held(self) -> Held:
        used = self._now * self._length // (self.blocks_each(self._length) * self._blocks.size)
        return Held(self._most, used)


class ReservedCache:
    """A cache with room for all tokens of each request from the start."""

    keeps = True

    def __init__(self, blocks: Blocks, num_requests: int, longest: int) -> None:
        self._blocks_each = blocks.holding(longest)
        self._slots_each = self._blocks_each * blocks.size
        self._layers = blocks.make(blocks.num_layers, num_requests * self._blocks_each)
        self._length = 0

    def blocks_each(self, length: int) -> int:
        return self._blocks_each

    def layers(self, length: int) -> Iterable[Tensor]:
        self._length = length
        return self._layers.unbind(0)

    def held(self) -> Held:
        return Held(self._layers.nbytes, self._layers.nbytes * self._length // self._slots_each)


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


class ContiguousWay:
    """A decoder over contiguous memory.

    Args:
        backend: the attention kernels.
        blocks: makes what the memory is made of.
        kind: the memory; every start makes a new one.
        max_len: tokens of a request that the memory has room for, where it takes its room at the start.
    """

    def __init__(self, decoder: Decoder, backend: Backend, blocks: Blocks, kind: type[Memory], max_len: int) -> None:
        self.keeps = kind.keeps
        self._decoder = decoder
        self._backend = backend
        self._blocks = blocks
        self._kind = kind
        self._max_len = max_len
        self._memory: Memory | None = None
        self._hidden = torch.empty(0)
        self._num_kept = 0

    def start(self, prompts: Tokens, num_new_tokens: int) -> None:
        self._memory = self._kind(self._blocks, len(prompts), self._max_len)
        self._num_kept = 0

    @torch.inference_mode()
    def step(self, tokens: Tokens) -> Tokens:
        length = tokens.shape[1]
        try:
            self._hidden = self._forward(tokens)
            best = self._arg_max(self._hidden)
        except RuntimeError as error:
            raise EngineError(f"the forward pass failed: {error}") from error
        if self.keeps:
            self._num_kept = length
        return best

    def _forward(self, tokens: Tokens) -> Tensor:
        """Compute what is not kept of sequences [num_requests, length]; the last hidden states [num_requests, …]."""
        assert self._memory is not None, "not started"
        (num_requests, length), start, device = tokens.shape, self._num_kept, self._blocks.device
        blocks_each = self._memory.blocks_each(length)
        first_blocks = torch.arange(num_requests, device=device)[:, None] * blocks_each
        tables = (first_blocks + torch.arange(blocks_each, device=device)).int()
        positions = torch.arange(start, length, device=device)
        step = EqualRequests(num_requests, start, length - start)
        hidden = self._decoder.forward(
            torch.from_numpy(tokens[:, start:]).flatten().to(device),
            positions.repeat(num_requests),
            self._memory.layers(length),
            (first_blocks * self._blocks.size + positions).flatten(),
            self._backend.plan_attention(step, tables, self._blocks.size),
            self._backend,
        )
        return hidden[step.num_new - 1 :: step.num_new].contiguous()

    def _arg_max(self, hidden: Tensor) -> Tokens:
        """As the engine's sampler finds it: together with the final projection, where there is such a pass."""
        found = self._decoder.arg_max(hidden)
        # numpy's arg-max uses a CPU's vector instructions, torch's does not.
        best: Tokens = self._logits(hidden).argmax(axis=1) if found is None else found[0].numpy()
        return best

    def _logits(self, hidden: Tensor) -> npt.NDArray[np.float32]:
        logits: npt.NDArray[np.float32] = self._decoder.logits(hidden).cpu().numpy()
        return logits

    @torch.inference_mode()
    def logit_gap(self, request: int, token: int) -> LogitGap:
        logits = self._logits(self._hidden[request : request + 1])[0]
        best = float(logits.max())
        computed = str(self._hidden.dtype).removeprefix("torch.")
        return LogitGap(best - float(logits[token]), spacing(best, computed))

    def held(self) -> Held:
        assert self._memory is not None, "not started"
        return self._memory.held()

    def end(self) -> None:
        self._memory = None


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
