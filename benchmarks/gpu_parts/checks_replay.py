"""Recorded decode steps on the device against the same steps launched anew: to the bit, for both run the same kernels
over tensors of the same sizes.

Between replays contexts grow past the length at which a row gets a second split, and, on a GPU, past the one from which
splits grow; a block moves, so that an entry of the tables changes and its old block holds NaN; and requests end, so
that a bucket is filled in part after it was full, and smaller ones come. What the blocks hold is made up: each has
numbers of its own.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pageframe.benchmarks.gpu_parts.sizes import TOY
from pageframe.kernels.triton.backend import TritonBackend
from pageframe.kernels.triton.decode import MAX_SPLITS, SPLIT_SIZE
from pageframe.runtime.batch import Batch
from pageframe.runtime.block_copy import BlockCopy, CopyKind
from pageframe.runtime.block_table import TableUpdates
from pageframe.runtime.config import ModelConfig
from pageframe.runtime.cuda_graphs import bucket_of, buckets_for
from pageframe.runtime.model_runner import ModelRunner
from pageframe.runtime.models.decoder import Decoder
from pageframe.runtime.step_plan import SamplingBatch

Int32s = npt.NDArray[np.int32]
BF16 = torch.bfloat16
BLOCK_SIZE = 16
#: Of the requests: each of the two limits is crossed by the third of the replays that the request is in.
CONTEXTS = (5, SPLIT_SIZE - 2, MAX_SPLITS * SPLIT_SIZE - 2, 40)
TOY_CONTEXTS = (5, SPLIT_SIZE - 2, 20, 40)
ALL = (0, 1, 2, 3)


@dataclass(frozen=True, slots=True)
class Replay:
    """One decode step: which requests are in it, and which request's first block moves before it."""

    requests: tuple[int, ...]
    moved: int | None = None


#: As many requests as a bucket has; and fewer, after the same bucket was full.
FULL = (Replay(ALL), Replay(ALL), Replay(ALL, moved=1), Replay((1, 3)), Replay((3,)))
PADDED = (Replay(ALL), Replay((0, 1, 2)), Replay((0, 1, 2), moved=1), Replay((1, 2, 3)))


class Requests:
    """Requests with tables of their own, in blocks of random order, and the steps that they make.

    Args:
        contexts: tokens that each one has at first.
        num_steps: most steps to come.
    """

    def __init__(self, contexts: tuple[int, ...], num_steps: int, vocab_size: int) -> None:
        self.contexts = np.array(contexts, np.int32)
        self._vocab_size = vocab_size
        lengths = -(-(self.contexts + num_steps) // BLOCK_SIZE)
        self.num_blocks = int(lengths.sum()) + 1
        #: Of no request.
        self.spare, *free = np.random.default_rng(1).permutation(self.num_blocks).tolist()
        self.table = np.zeros((len(contexts), int(lengths.max())), np.int32)
        for row, length in enumerate(lengths.tolist()):
            self.table[row, :length] = [free.pop() for _ in range(length)]
        #: What the device's tables lack.
        self._updates = [
            (row, index, block_id)
            for row, length in enumerate(lengths.tolist())
            for index, block_id in enumerate(self.table[row, :length].tolist())
        ]

    def move(self, row: int) -> BlockCopy:
        """Give a request the spare block in place of its first one, which is spare then: the copy that this takes."""
        old, new = int(self.table[row, 0]), self.spare
        self.table[row, 0], self.spare = new, old
        self._updates.append((row, 0, new))
        return BlockCopy(CopyKind.FORK, old, new)

    def decode(self, rows: tuple[int, ...]) -> Batch:
        """One more token of each of these requests."""
        numbers = np.array(rows, np.int32)
        self.contexts[numbers] += 1
        contexts = self.contexts[numbers]
        positions = contexts.astype(np.int64) - 1
        blocks = self.table[numbers, positions // BLOCK_SIZE].astype(np.int64)
        updates, self._updates = TableUpdates(self._updates), []
        return Batch(
            token_ids=(positions * 7 + numbers) % self._vocab_size,
            positions=positions,
            slots=blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
            query_start=np.arange(len(rows) + 1, dtype=np.int32),
            context_lens=contexts,
            rows=numbers,
            num_decode=len(rows),
            wanted=np.arange(len(rows)),
            sampling=SamplingBatch.empty(),
            table_updates=updates,
        )


def padded(batch: Batch, size: int) -> Batch:
    """A step of decode rows filled up to `size` rows, as a bucket is: see `DecodeRows`."""
    empty = (0, size - batch.num_decode)
    return dataclasses.replace(
        batch,
        token_ids=np.pad(batch.token_ids, empty),
        positions=np.pad(batch.positions, empty),
        slots=np.pad(batch.slots, empty, constant_values=-1),
        query_start=np.arange(size + 1, dtype=np.int32),
        context_lens=np.pad(batch.context_lens, empty),
        rows=np.pad(batch.rows, empty),
        num_decode=size,
    )


def replay_full(device: torch.device) -> float:
    """Decode steps of as many rows as a bucket has: the same bits with graphs and without."""
    return _largest_difference(FULL, device)


def replay_padded(device: torch.device) -> float:
    """Decode steps that fill a bucket in part: the same bits as without graphs in a step padded to that size. (Without
    padding, products of another size may round otherwise.)"""
    return _largest_difference(PADDED, device)


def _largest_difference(replays: tuple[Replay, ...], device: torch.device) -> float:
    """Between hidden states of the two, as a share of them; NaN where one has a NaN."""
    contexts = CONTEXTS if device.type == "cuda" else TOY_CONTEXTS
    model = _model(device).replace(max_position=max(contexts) + len(replays))
    requests = Requests(contexts, len(replays), model.vocab_size)
    plain, recorded = runners = [_runner(model, requests, device, graphs=graphs) for graphs in (False, True)]
    for block_id in range(requests.num_blocks):
        for runner in runners:
            runner.fill_blocks([block_id], block_id * 37 % 101 / 50 - 1)
    sizes, differences = buckets_for(len(contexts)), []
    for replay in replays:
        if replay.moved is not None:
            copy = requests.move(replay.moved)
            for runner in runners:
                runner.copy_blocks([copy])
                runner.fill_blocks([copy.src], float("nan"))
        batch = requests.decode(replay.requests)
        ours = recorded.forward(batch).double()
        expected = plain.forward(padded(batch, bucket_of(batch.num_decode, sizes))).double()
        differences.append(float((ours - expected).norm() / expected.norm()))
    return float(np.max(differences))  # a NaN stays one


def _model(device: torch.device) -> ModelConfig:
    """Two layers; heads of 128 on a GPU."""
    model = next(iter(TOY.models.values())).replace(num_layers=2)
    return model.replace(hidden_size=512, num_heads=8, head_dim=128) if device.type == "cuda" else model


def _runner(model: ModelConfig, requests: Requests, device: torch.device, *, graphs: bool) -> ModelRunner:
    return ModelRunner(
        Decoder.random(model, storage_dtype=BF16, compute_dtype=BF16, device=device, seed=0),
        TritonBackend(device),
        num_blocks=requests.num_blocks,
        block_size=BLOCK_SIZE,
        max_num_requests=len(requests.contexts),
        max_blocks=requests.table.shape[1],
        kv_dtype=BF16,
        device=device,
        graphs=graphs,
    )
