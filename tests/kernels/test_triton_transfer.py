"""Copies to the device: from pinned memory, and nobody waits for them. A GPU is pretended on the CPU's memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fakes.ruled_model import VOCAB_SIZE, FakeFiller, batch_of, rules_of
from torch.overrides import TorchFunctionMode

from pageframe.benchmarks.gpu_parts.sizes import TOY
from pageframe.kernels.reference import ReferenceBackend
from pageframe.kernels.triton.backend import TritonBackend
from pageframe.kernels.triton.plan import TritonParts, plan_step, update_plan
from pageframe.kernels.triton.sampling import draw_tokens
from pageframe.kernels.triton.sampling_table import Draws
from pageframe.kernels.triton.transfer import to_device
from pageframe.runtime.batch import Batch
from pageframe.runtime.block_table import TableUpdates
from pageframe.runtime.cuda_graphs import DecodeGraphs, run_again
from pageframe.runtime.device_logits import logprobs_of, penalties_of, with_bias_and_masks
from pageframe.runtime.model_runner import ModelRunner
from pageframe.runtime.models.decoder import Decoder
from pageframe.runtime.request import SamplingParams
from pageframe.runtime.step_plan import SamplingBatch
from pageframe.runtime.token_masks import TokenMasks

from .cases import Step

GPU = torch.device("cuda", 0)


class PretendedGpu(TorchFunctionMode):
    """Every tensor says that it is on a GPU, and stays where it is.

    Attributes:
        copies: of each copy to the device, whether it was from pinned memory and nobody waited.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[bool] = []
        self._pinned: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == torch.Tensor.device.__get__:
            return GPU
        if func == torch.Tensor.pin_memory:
            self._pinned.append(args[0])
            return args[0]
        if func == torch.Tensor.to and GPU in args:
            return self._note(args[0], kwargs)
        if func == torch.Tensor.copy_:
            self._note(args[1], kwargs)
        if kwargs.get("device") == GPU:
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)

    def _note(self, source: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        self.copies.append(any(source is pinned for pinned in self._pinned) and options == {"non_blocking": True})
        return source


@pytest.fixture
def gpu() -> PretendedGpu:
    return PretendedGpu()


def test_a_copy_that_waits_is_noticed(gpu: PretendedGpu) -> None:
    numbers = np.arange(3)
    with gpu:
        torch.from_numpy(numbers).to(GPU)
        torch.from_numpy(numbers).to(GPU, non_blocking=True)
        assert to_device(numbers, GPU).tolist() == [0, 1, 2]
    assert gpu.copies == [False, False, True]


def test_on_a_cpu_nothing_is_copied() -> None:
    numbers = np.arange(3)
    assert to_device(numbers, torch.device("cpu")).data_ptr() == numbers.ctypes.data


def test_plans_of_steps(gpu: PretendedGpu) -> None:
    mixed = Step(np.arange(2, dtype=np.int32), np.array([5, 9], np.int32), np.array([0, 1, 4], np.int32), 1)
    decode = Step(np.arange(2, dtype=np.int32), np.array([5, 9], np.int32), np.arange(3, dtype=np.int32), 2)
    tables = torch.zeros(2, 4, dtype=torch.int32)
    with gpu:
        parts = plan_step(mixed, tables, 16).parts
        assert isinstance(parts, TritonParts)
        assert parts.prefill is not None
        parts.prefill.items(2)
        update_plan(plan_step(decode, tables, 16), decode)
    assert gpu.copies == [True] * 4


def test_draws_with_rules(gpu: PretendedGpu, rng: np.random.Generator) -> None:
    penalised = SamplingParams(seed=0, logit_bias={3: 1.5}, presence_penalty=0.5, allowed_token_ids=[4, 5])
    batch = batch_of([(penalised, rules_of(penalised, [1, 2], [3])), (penalised, None)])
    TokenMasks(32, VOCAB_SIZE, 1, lambda num_threads: FakeFiller()).begin(batch)
    logits = torch.from_numpy(rng.normal(0, 1, (2, VOCAB_SIZE)).astype(np.float32))
    ones, integers = np.ones(2, np.float32), np.ones(2, np.int32)
    draws = Draws(ones, np.ones(2), np.ones(2), integers, ones, *np.zeros((2, 2), np.int64), integers)
    with gpu:
        allowed = with_bias_and_masks(logits, batch)
        assert gpu.copies == [True] * 5
        penalties = penalties_of(batch, GPU)
        assert gpu.copies == [True] * 9
        drawn = draw_tokens(allowed, draws, (np.array([1]), np.array([0])), penalties)
        assert gpu.copies[9:11] == [True] * 2
        assert len(drawn.token_ids) == 2
        gpu.copies.clear()
        logprobs_of(logits, np.array([1, 2]), integers)
    assert gpu.copies == [True]


def step_of(rows: int) -> Batch:
    """So many decode rows, the first of which has a new block."""
    ones = np.ones(rows, np.int64)
    return Batch(
        token_ids=ones,
        positions=0 * ones,
        slots=np.arange(rows),
        query_start=np.arange(rows + 1, dtype=np.int32),
        context_lens=np.ones(rows, np.int32),
        rows=np.arange(rows, dtype=np.int32),
        num_decode=rows,
        wanted=np.arange(rows),
        sampling=SamplingBatch.empty(),
        table_updates=TableUpdates([(0, 0, 1)]),
    )


def test_a_replays_inputs(gpu: PretendedGpu) -> None:
    tables = torch.zeros(2, 4, dtype=torch.int32)
    backend = TritonBackend(torch.device("cpu"))
    with gpu:
        graphs = DecodeGraphs(
            lambda token_ids, positions, slots, plan: token_ids[:, None].float(),
            backend,
            tables,
            block_size=16,
            max_num_requests=2,
            record=run_again,
        )
        gpu.copies.clear()
        assert graphs.run(step_of(2)).tolist() == [[1.0], [1.0]]
    assert gpu.copies == [True] * 2


def test_a_steps_inputs(gpu: PretendedGpu) -> None:
    model = next(iter(TOY.models.values()))
    fp32 = torch.float32
    decoder = Decoder.random(model, storage_dtype=fp32, compute_dtype=fp32, device=torch.device("cpu"), seed=0)
    with gpu:
        runner = ModelRunner(
            decoder,
            ReferenceBackend(),
            num_blocks=2,
            block_size=4,
            max_num_requests=2,
            max_blocks=2,
            kv_dtype=fp32,
            device=GPU,
        )
        gpu.copies.clear()
        runner.forward(step_of(2))
    # New entries of the block tables; tokens, positions, slots, and which are wanted. The reference copies as it likes.
    assert gpu.copies.count(True) == 3 + 4
