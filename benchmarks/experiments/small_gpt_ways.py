"""Two ways to continue a prompt for `small_gpt`: with the engine's KV cache, and with none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from pageframe.kernels.attention import kv_cache_shape, select_backend
from pageframe.runtime.errors import EngineError
from pageframe.runtime.llm import LLM
from pageframe.runtime.models.config import load_model_config
from pageframe.runtime.models.loader import load_decoder
from pageframe.runtime.models.source import resolve_source
from pageframe.runtime.philox import choice_seed
from pageframe.runtime.request import SamplingParams
from pageframe.runtime.sampler import Sampler
from pageframe.runtime.step_plan import SamplingBatch

TEMPERATURE = 0.8
CPU = torch.device("cpu")


class Way(Protocol):
    """A way to continue a prompt."""

    name: str

    def tokens(self, prompt: Sequence[int], count: int, seed: int) -> Iterator[int]:
        """The `count` tokens after the prompt, each when it is there.

        Raises:
            EngineError: a forward pass failed.
        """
        ...


class Cached:
    """The engine, one request at a time. A prefix cache would find what the turn before computed, so it is off."""

    name = "cached"

    def __init__(self, model: str, threads: int | None = None) -> None:
        self.llm = LLM(
            model,
            dtype="float32",
            threads=threads,
            device="cpu",
            max_num_requests=1,
            prefix_cache=False,
            on_context_full="slide",
            slide_by=1,
        )

    def tokens(self, prompt: Sequence[int], count: int, seed: int) -> Iterator[int]:
        engine = self.llm.engine
        params = SamplingParams(max_tokens=count, temperature=TEMPERATURE, seed=seed, ignore_eos=True)
        engine.add(self.name, prompt, params)
        try:
            while engine.has_work:
                for output in engine.step():
                    if output.error:
                        raise EngineError(output.error)
                    yield from output.token_ids
        finally:
            engine.abort(self.name)


@dataclass(frozen=True, slots=True)
class WholeSequence:
    """A step that computes one request from its first token on."""

    rows: npt.NDArray[np.int32]
    context_lens: npt.NDArray[np.int32]
    query_start: npt.NDArray[np.int32]
    num_decode: int

    @classmethod
    def of(cls, length: int) -> WholeSequence:
        rows, context_lens, query_start = (np.array(values, np.int32) for values in ([0], [length], [0, length]))
        return cls(rows, context_lens, query_start, int(length == 1))


class Recomputed:
    """The decoder alone: the last `context` tokens anew for every token. Its K and V are written and used in one step.

    Args:
        context: most tokens it sees.
        block_size: as the engine's, so that the kernels' work is cut alike.
    """

    name = "recomputed"

    def __init__(self, model: str, context: int, block_size: int) -> None:
        source = resolve_source(model)
        config = load_model_config(source)
        self._context = context
        self._block_size = block_size
        self._decoder = load_decoder(
            source, config, storage_dtype=torch.float32, compute_dtype=torch.float32, device=CPU
        )
        self._sampler = Sampler(self._decoder.logits)
        self._backend = select_backend("reference", CPU)
        num_blocks = -(-context // block_size)
        shape = kv_cache_shape(num_blocks, config.num_kv_heads, block_size, config.head_dim)
        self._kv_caches = [torch.zeros(shape) for _ in range(config.num_layers)]
        self._tables = torch.arange(num_blocks, dtype=torch.int32)[None]

    def tokens(self, prompt: Sequence[int], count: int, seed: int) -> Iterator[int]:
        token_ids = list(prompt)
        for index in range(count):
            try:
                token_ids.append(self._next(token_ids[-self._context :], index, seed))
            except RuntimeError as error:
                raise EngineError(f"the forward pass failed: {error}") from error
            yield token_ids[-1]

    @torch.inference_mode()
    def _next(self, window: list[int], index: int, seed: int) -> int:
        """The token after `window`, the `index`-th of the output."""
        plan = self._backend.plan_attention(WholeSequence.of(len(window)), self._tables, self._block_size)
        places = torch.arange(len(window))  # blocks lie in order: a position is its slot
        hidden = self._decoder.forward(torch.tensor(window), places, self._kv_caches, places, plan, self._backend)
        return int(self._sampler.sample(hidden[-1:], _sampling(index, seed)).token_ids[0])


def _sampling(index: int, seed: int) -> SamplingBatch:
    """What the engine asks of the sampler for a request's `index`-th token."""
    float32s = [np.array([value], np.float32) for value in (TEMPERATURE, 1.0, 0.0)]
    seeds, indices = np.array([choice_seed(seed, 0)], np.int64), np.array([index], np.int64)
    no_top_k, no_logprobs = np.array([0], np.int32), np.array([-1], np.int32)
    return SamplingBatch(float32s[0], no_top_k, float32s[1], float32s[2], seeds, indices, no_logprobs)
