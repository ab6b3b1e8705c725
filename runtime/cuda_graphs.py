"""Decode steps as recorded launches: one graph for each bucket of batch sizes, replayed with other numbers in place.

A launch from Python costs more than many a kernel of a decode step takes. So the step is recorded once for each bucket
and replayed: token ids, positions, slots and context lengths are written into the very tensors that the recorded
kernels read. A batch fills the smallest bucket that holds it; the rest is padding with slot -1, which writes nothing,
and context 0, which attends to nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import torch

from pageframe.kernels.attention import AttentionPlan, Backend, StepBatch, UnsupportedError
from pageframe.kernels.triton.transfer import staged
from pageframe.runtime.batch import Batch

#: Batch sizes that have a graph, as far as batches may become so large. Four to each doubling past 256: few graphs, and
#: padding is at most a fifth, of steps whose launches cost little beside their kernels.
BUCKETS = (
    *(1, 2, 4, *range(8, 257, 8)),
    *(quarters * 2**power for power in range(6, 14) for quarters in (5, 6, 7, 8)),
)
#: Rows of the one array that a step's inputs travel in.
_TOKEN_IDS, _POSITIONS, _SLOTS = range(3)

Int32s = npt.NDArray[np.int32]
Run = Callable[[], torch.Tensor]
#: Makes of a function one that does the same work again, and leaves its result in the same memory.
Record = Callable[[Run], Run]
#: (token ids, positions, slots, plan) -> hidden states: a step of the model.
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionPlan], torch.Tensor]


class GraphBackend(Backend, Protocol):
    """A backend whose plan can be given another batch in place."""

    def update_plan(self, plan: AttentionPlan, batch: StepBatch) -> None:
        """Write the batch's rows and context lengths into the tensors that kernels launched with `plan` read.

        Args:
            plan: of decode rows only, as many as the batch has.
        """


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """A `StepBatch` of decode rows alone, filled up to a size. Padding has row 0, which is never read, and context 0.

    Args:
        rows, context_lens: int32 [size].
        query_start: int32 [size + 1]: one token each.
    """

    rows: Int32s
    context_lens: Int32s
    query_start: Int32s

    @property
    def num_decode(self) -> int:
        return len(self.rows)

    @classmethod
    def padded(cls, rows: Int32s, context_lens: Int32s, size: int) -> DecodeRows:
        """These rows, then padding."""
        empty = size - len(rows)
        return cls(np.pad(rows, (0, empty)), np.pad(context_lens, (0, empty)), np.arange(size + 1, dtype=np.int32))


@dataclass(frozen=True, slots=True)
class _Step:
    """What one bucket replays.

    Args:
        inputs: int64 [3, bucket]: token ids, positions, slots.
        replay: computes the hidden states [bucket, hidden_size], always in the same memory.
    """

    inputs: torch.Tensor
    plan: AttentionPlan
    replay: Run


class DecodeGraphs:
    """Recorded decode steps of one model over one pool. Recording happens here, once.

    Args:
        forward: the model's step; launches work on the device and never asks it for a number.
        backend: must be a `GraphBackend`.
        tables: the resident block tables, changed in place by their owner.
        max_num_requests: no larger batch will come.
        record: how a step is recorded.

    Raises:
        UnsupportedError: the backend has no plan that can be changed in place.
    """

    def __init__(
        self,
        forward: Forward,
        backend: Backend,
        tables: torch.Tensor,
        *,
        block_size: int,
        max_num_requests: int,
        record: Record,
    ) -> None:
        if not hasattr(backend, "update_plan"):
            raise UnsupportedError(f"backend is {backend.name!r}; graphs need one whose plans change in place: triton")
        self._forward = forward
        self._backend = cast(GraphBackend, backend)
        self._tables = tables
        self._block_size = block_size
        self.sizes = buckets_for(max_num_requests)
        # The largest first: the smaller ones then find their memory in the pool that it leaves.
        self._steps = {size: self._record(size, record) for size in reversed(self.sizes)}

    def fits(self, batch: Batch) -> bool:
        """Whether the batch is decode rows alone, and no more than the largest bucket has."""
        return 0 < batch.num_decode == len(batch.context_lens) <= self.sizes[-1]

    def run(self, batch: Batch) -> torch.Tensor:
        """Hidden states [number of requests, hidden_size] of a batch that `fits`; valid until the next call."""
        count = batch.num_decode
        size = bucket_of(count, self.sizes)
        step = self._steps[size]
        inputs = _padding(size)
        inputs[_TOKEN_IDS, :count] = batch.token_ids
        inputs[_POSITIONS, :count] = batch.positions
        inputs[_SLOTS, :count] = batch.slots
        step.inputs.copy_(staged(inputs, step.inputs.device), non_blocking=True)
        self._backend.update_plan(step.plan, DecodeRows.padded(batch.rows, batch.context_lens, size))
        return step.replay()[:count]

    def _record(self, size: int, record: Record) -> _Step:
        nobody = np.zeros(0, dtype=np.int32)
        plan = self._backend.plan_attention(DecodeRows.padded(nobody, nobody, size), self._tables, self._block_size)
        inputs = torch.from_numpy(_padding(size)).to(self._tables.device)
        token_ids, positions, slots = inputs
        return _Step(inputs, plan, record(lambda: self._forward(token_ids, positions, slots, plan)))


def buckets_for(max_num_requests: int) -> tuple[int, ...]:
    """The buckets that batches of 1 to `max_num_requests` (at most config.LIMITS') fall into."""
    end = bisect_left(BUCKETS, max_num_requests) + 1
    return BUCKETS[:end]


def bucket_of(num_requests: int, sizes: tuple[int, ...]) -> int:
    """The smallest of the ascending `sizes` that holds so many."""
    return sizes[bisect_left(sizes, num_requests)]


def run_again(run: Run) -> Run:
    """Records nothing: every replay launches anew. Where there is no CUDA, it runs all the rest of this file."""
    return run


class CudaRecorder:
    """Records on a CUDA device. All graphs share one pool of memory, since no two of them run at once."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # One for all: libraries keep a workspace for each stream that they have seen.
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, run: Run) -> Run:
        """See `Record`."""
        # A kernel's first launch compiles and loads it, which can't be recorded.
        run_aside(run, self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            result = run()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay


def run_aside(run: Callable[[], object], stream: torch.cuda.Stream) -> None:
    """Run this on the stream on which it is recorded next: what libraries keep for each stream is then there."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)


def recorder(device: torch.device) -> Record:
    """How steps are recorded on this device."""
    return CudaRecorder() if device.type == "cuda" else run_again


def _padding(size: int) -> npt.NDArray[np.int64]:
    """Inputs [3, size] of tokens that write nothing."""
    inputs = np.zeros((3, size), dtype=np.int64)
    inputs[_SLOTS] = -1
    return inputs
