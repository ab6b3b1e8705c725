"""Copies to the device: from pinned memory, and nobody waits for them. A GPU is pretended on the CPU's memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from fakes.ruled_model import VOCAB_SIZE, FakeFiller, batch_of, rules_of
from torch.overrides import TorchFunctionMode

from pageframe.benchmarks.gpu_parts.sizes import TOY
from pageframe.kernels.triton import decode, tables
from pageframe.kernels.triton.backend import TritonBackend
from pageframe.kernels.triton.plan import TritonParts, plan_step, update_plan
from pageframe.kernels.triton.sampling import draw_tokens
from pageframe.kernels.triton.sampling_table import Draws
from pageframe.kernels.triton.transfer import to_device
from pageframe.runtime.batch import Batch
from pageframe.runtime.block_copy import BlockCopy, CopyKind
from pageframe.runtime.block_table import TableUpdates
from pageframe.runtime.cuda_graphs import DecodeGraphs, run_again
from pageframe.runtime.device_logits import logprobs_of, penalties_of, with_bias_and_masks
from pageframe.runtime.model_runner import ModelRunner
from pageframe.runtime.models.decoder import Decoder
from pageframe.runtime.request import SamplingParams
from pageframe.runtime.sampler import Sampler
from pageframe.runtime.step_plan import SamplingBatch, ScoredTokens
from pageframe.runtime.token_masks import TokenMasks

from .cases import Step

GPU = torch.device("cuda", 0)


#: What asks the device for numbers, and the host waits for them.
WAITING = ("item", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero")


class PretendedGpu(TorchFunctionMode):
    """A GPU on the CPU's memory: tensors are on it, but for those that the host made (from arrays, without a device, or
    copied back), views included. What would wait for it without need is refused: an index that is on the host, a number
    assigned to indexed places, a tensor made of a list on the device, numbers asked for one by one.

    Attributes:
        copies: of each copy to the device, whether it was from pinned memory and nobody waited.
        returns: copies to the host that the host waited for.
        locked: addresses of page-locked memory.
        called: names of torch's functions that were called.
        waits: how often the host waited for everything.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[bool] = []
        self.returns = 0
        self.called: set[str] = set()
        self.waits = 0
        self.locked: list[int] = []
        self._host: dict[int, torch.Tensor] = {}
        self._pinned: list[torch.Tensor] = []

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The very tensor; its memory is the host's from now on, and no other tensor's."""
        if address := tensor.untyped_storage().data_ptr():
            self._host[address] = tensor
        return tensor

    def is_on_host(self, value: Any) -> bool:
        """Weights packed for a CPU's library, which show no memory, count as the device's."""
        if not isinstance(value, torch.Tensor) or value.is_mkldnn:
            return False
        return value.untyped_storage().data_ptr() in self._host

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        """As CUDA has it."""
        assert address % 4096 == 0, "pages that others may lock too"
        self.locked.append(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        """As CUDA has it."""
        self.locked.remove(address)
        return 0

    def synchronize(self) -> None:
        """As CUDA has it."""
        self.waits += 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        self.called.add(name)
        if func == torch.Tensor.device.__get__:
            return torch.device("cpu") if self.is_on_host(args[0]) else GPU
        if func == torch.Tensor.pin_memory:
            self._pinned.append(args[0])
            return args[0]
        if func in (torch.Tensor.to, torch.Tensor.cpu):
            return self._move(args, kwargs)
        if func == torch.Tensor.copy_:
            self._note_copy(args[0], args[1], kwargs)
        self._refuse(func, name, args, kwargs)
        is_host = self._is_made_on_host(args, kwargs)
        if kwargs.get("device") == GPU:
            kwargs["device"] = "cpu"
        result = func(*args, **kwargs)
        return self.on_host(result) if is_host and isinstance(result, torch.Tensor) else result

    def _is_made_on_host(self, args: Any, kwargs: dict[str, Any]) -> bool:
        if kwargs.get("device") is not None:
            return torch.device(kwargs["device"]).type == "cpu"
        each = [part for arg in args for part in (arg if isinstance(arg, (list, tuple)) else [arg])]
        return all(self.is_on_host(part) for part in each if isinstance(part, torch.Tensor))

    def _refuse(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> None:
        if func == torch.tensor:
            assert kwargs.get("device") != GPU, "a list becomes a tensor on the device: the host waits"
        if not args or not isinstance(args[0], torch.Tensor) or self.is_on_host(args[0]):
            return
        assert name not in WAITING, f"{name} of a tensor on the device: the host waits"
        if name in ("__getitem__", "__setitem__"):
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            assert not any(self.is_on_host(index) for index in indices), "an index on the host: its copy waits"
            if name == "__setitem__" and any(isinstance(index, torch.Tensor) for index in indices):
                assert isinstance(args[2], torch.Tensor), "a number for indexed places: its copy waits"
        elif name != "copy_":
            others = [arg for arg in args[1:] if isinstance(arg, torch.Tensor) and arg.dim()]
            assert not any(self.is_on_host(other) for other in others), f"{name} mixes devices"

    def _move(self, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        source, *rest = args
        target = next((arg for arg in (*rest, kwargs.get("device")) if isinstance(arg, (torch.device, str))), None)
        if target is None and rest + list(kwargs):
            moved = source.to(*rest, **kwargs)
            return self.on_host(moved) if self.is_on_host(source) else moved
        if target is not None and torch.device(target).type == "cuda":
            if not self.is_on_host(source):
                return source
            self._note(source, {key: value for key, value in kwargs.items() if key != "device"})
            return source.clone()
        self.returns += not self.is_on_host(source)
        return source if self.is_on_host(source) else self.on_host(source.clone())

    def _note_copy(self, target: torch.Tensor, source: torch.Tensor, options: dict[str, Any]) -> None:
        here, there = self.is_on_host(source), self.is_on_host(target)
        if here and not there:
            self._note(source, options)
        elif there and not here:
            assert self._is_locked(target), "a copy to memory that is not locked waits"
            assert target.is_contiguous(), "a copy to memory with gaps waits"
            assert options == {"non_blocking": True}, "a copy that waits"

    def _note(self, source: torch.Tensor, options: dict[str, Any]) -> None:
        pinned = any(source is pinned for pinned in self._pinned) or self._is_locked(source)
        self.copies.append(pinned and source.is_contiguous() and options == {"non_blocking": True})

    def _is_locked(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.locked


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PretendedGpu:
    gpu = PretendedGpu()
    from_numpy = torch.from_numpy
    monkeypatch.setattr(torch, "from_numpy", lambda array: gpu.on_host(from_numpy(array)))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: gpu)
    monkeypatch.setattr(tables, "describe", lambda device: ("a GPU", "hopper"))
    monkeypatch.setattr(decode, "num_programs", lambda device: 4)
    monkeypatch.setattr(torch.cuda, "check_error", lambda result: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: gpu.synchronize())
    return gpu


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
    decode_rows = Step(np.arange(2, dtype=np.int32), np.array([5, 9], np.int32), np.arange(3, dtype=np.int32), 2)
    tables = torch.zeros(2, 4, dtype=torch.int32)
    with gpu:
        parts = plan_step(mixed, tables, 16).parts
        assert isinstance(parts, TritonParts)
        assert parts.prefill is not None
        parts.prefill.items(2)
        update_plan(plan_step(decode_rows, tables, 16), decode_rows)
    assert gpu.copies == [True] * 4


def test_draws_with_rules(gpu: PretendedGpu, rng: np.random.Generator) -> None:
    penalised = SamplingParams(seed=0, logit_bias={3: 1.5}, presence_penalty=0.5, allowed_token_ids=[4, 5])
    batch = batch_of([(penalised, rules_of(penalised, [1, 2], [3])), (penalised, None)])
    TokenMasks(32, VOCAB_SIZE, 1, lambda num_threads: FakeFiller()).begin(batch)
    logits = torch.tensor(rng.normal(0, 1, (2, VOCAB_SIZE)), dtype=torch.float32)
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


@pytest.fixture
def mixed_batch() -> SamplingBatch:
    """A greedy row without rules, two with all kinds of rules, one with banned ids; logprobs of the last three."""
    ruled = SamplingParams(seed=0, logit_bias={3: 1.5}, presence_penalty=0.5, allowed_token_ids=[4, 5], logprobs=2)
    penalised = SamplingParams(seed=1, temperature=0.7, top_k=5, repetition_penalty=1.3, logprobs=1)
    rows = [(SamplingParams(seed=3, temperature=0), None), (ruled, rules_of(ruled, [1, 2], [3]))]
    rows += [(penalised, rules_of(penalised, [1, 2], [3])), (SamplingParams(seed=2, logprobs=0), None)]
    batch = dataclasses.replace(batch_of(rows), banned=((3, (0, 7)),))
    TokenMasks(32, VOCAB_SIZE, 1, lambda num_threads: FakeFiller()).begin(batch)
    return batch


def test_a_mixed_batch_is_drawn_without_waiting(
    gpu: PretendedGpu, rng: np.random.Generator, mixed_batch: SamplingBatch
) -> None:
    logits = torch.tensor(rng.normal(0, 1, (4, VOCAB_SIZE)), dtype=torch.float32)
    expected = Sampler(lambda hidden: hidden).sample(logits, mixed_batch)
    with gpu:
        found = Sampler(lambda hidden: hidden, on_device=True).sample(logits, mixed_batch)
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert sorted(found.logprobs) == [1, 2, 3]
    assert gpu.copies.count(False) == 0
    assert len(gpu.copies) > 9  # all of bias, masks, penalties, bans, draws
    assert gpu.returns == 2  # the tokens; logprobs of rows whose logits were changed


@pytest.mark.parametrize("num_top", [0, 2])
def test_prompt_logprobs_come_back_once(gpu: PretendedGpu, rng: np.random.Generator, num_top: int) -> None:
    logits = torch.tensor(rng.normal(0, 1, (150, VOCAB_SIZE)), dtype=torch.float32)
    ids, tops = rng.integers(0, VOCAB_SIZE, 150), np.full(150, num_top, np.int32)
    scored = ScoredTokens(np.arange(150), ids, tops, ((0, 100), (2, 50)))
    sampler = Sampler(lambda hidden: hidden)
    expected = sampler.score(logits, scored)
    with gpu:
        found = sampler.score(logits, scored)
    assert gpu.returns == 1
    assert ("sort" in gpu.called) == (num_top > 0)
    assert gpu.copies.count(False) == 0
    assert [len(found[position]) for position in (0, 2)] == [100, 50]
    for position, tokens in expected.items():
        assert [token.top_ids for token in found[position]] == [token.top_ids for token in tokens]
        numbers = [[token.logprob for token in side[position]] for side in (found, expected)]
        np.testing.assert_allclose(*numbers, atol=1e-6)


def step_of(rows: int) -> Batch:
    """So many decode rows, at least two; the first two have a new block each."""
    ones = np.ones(rows, np.int64)
    return Batch(
        token_ids=ones,
        positions=0 * ones,
        slots=4 * np.arange(rows)[::-1],  # in blocks of 4: the first row's block is number 1
        query_start=np.arange(rows + 1, dtype=np.int32),
        context_lens=np.ones(rows, np.int32),
        rows=np.arange(rows, dtype=np.int32),
        num_decode=rows,
        wanted=np.arange(rows),
        sampling=SamplingBatch.empty(),
        table_updates=TableUpdates([(0, 0, 1), (1, 0, 0)]),
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


@pytest.fixture
def decoder() -> Decoder:
    model, fp32 = next(iter(TOY.models.values())), torch.float32
    return Decoder.random(model, storage_dtype=fp32, compute_dtype=fp32, device=torch.device("cpu"), seed=0)


def make_runner(decoder: Decoder, **changes: Any) -> ModelRunner:
    fp32 = torch.float32
    settings = {"num_blocks": 2, "block_size": 4, "max_num_requests": 2, "max_blocks": 2, "kv_dtype": fp32}
    return ModelRunner(decoder, TritonBackend(torch.device("cpu")), **{**settings, **changes}, device=GPU)


def test_a_steps_inputs(gpu: PretendedGpu, decoder: Decoder) -> None:
    with gpu:
        runner = make_runner(decoder)
        gpu.copies.clear()
        runner.forward(step_of(2))
    # New entries of the block tables; tokens, positions, slots; the plan; which are wanted.
    assert gpu.copies == [True] * (3 + 3 + 1 + 1)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
def test_blocks_to_host_memory_and_back(gpu: PretendedGpu, decoder: Decoder, kv_dtype: torch.dtype) -> None:
    with gpu:
        runner = make_runner(decoder, num_blocks=6, host_slots=2, kv_dtype=kv_dtype)
        for block_id in range(6):
            runner.fill_blocks([block_id], float(block_id))
        there = [BlockCopy(CopyKind.TO_HOST, 3, 1), BlockCopy(CopyKind.TO_HOST, 5, 0)]
        back = [BlockCopy(CopyKind.TO_DEVICE, 1, 0), BlockCopy(CopyKind.TO_DEVICE, 0, 2)]
        gpu.copies.clear()
        gpu.waits = 0
        runner.copy_blocks([*there, *back, BlockCopy(CopyKind.FORK, 0, 4)])
        assert gpu.copies.count(False) == 0
        # Ids of the blocks read, ids of those written, the blocks: twice where scales stand beside the codes.
        assert len(gpu.copies) == (1 + (1 + 2) + 2) * (2 if kv_dtype == torch.int8 else 1)
        assert gpu.waits == 0
        found = [float(runner.read_block(0, block_id)[0].flatten()[0:1].cpu().numpy()[0]) for block_id in range(6)]
        assert found == [3, 1, 5, 3, 3, 5]
        runner.fill_host_slots([0], 0.0)
        assert gpu.waits == 1  # the host writes there itself: not while copies are under way


def test_locked_memory_is_given_back(gpu: PretendedGpu, decoder: Decoder) -> None:
    with gpu:
        runner = make_runner(decoder, host_slots=2, kv_dtype=torch.int8)
        assert len(gpu.locked) == 2
        del runner
    assert gpu.locked == []
