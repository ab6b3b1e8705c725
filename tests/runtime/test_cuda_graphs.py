"""Decode steps in buckets, with padding: which bucket, and that nobody sees the padding.

They are recorded on a tape of torch's operations (fakes/tape.py), which replays no Python and refuses what CUDA
refuses. All else, padding, input in place, the choice between replay and an ordinary step, is what runs on a GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from fakes.engines import tiny_config
from fakes.tape import Tape

from pageframe.kernels.attention import AttentionPlan, StepBatch, UnsupportedError
from pageframe.kernels.reference import ReferenceBackend
from pageframe.runtime import model_runner
from pageframe.runtime.config import LIMITS
from pageframe.runtime.cuda_graphs import BUCKETS, DecodeRows, bucket_of, buckets_for
from pageframe.runtime.engine import Engine
from pageframe.runtime.model_runner import ModelRunner
from pageframe.runtime.models.decoder import Decoder
from pageframe.runtime.request import SamplingParams
from pageframe.runtime.sampler import Sampler

MODEL = tiny_config().model.replace(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_heads=2, num_kv_heads=1, head_dim=16, max_position=64
)
CONFIG = dataclasses.replace(
    tiny_config(num_blocks=128, block_size=4, max_num_requests=6, max_num_batched_tokens=16, max_model_len=64),
    model=MODEL,
)


class RecordableReference(ReferenceBackend):
    """The reference with decode rows in operations that ask the device nothing, and plans that change in place."""

    def plan_attention(self, batch: StepBatch, tables: torch.Tensor, block_size: int) -> AttentionPlan:
        plan = super().plan_attention(batch, tables, block_size)
        return plan if batch.num_decode < len(batch.rows) else dataclasses.replace(plan, parts=tables)

    def update_plan(self, plan: AttentionPlan, batch: StepBatch) -> None:
        assert plan.num_decode == len(batch.rows) == len(batch.context_lens), "a replay is always as large"
        plan.rows.copy_(torch.from_numpy(batch.rows))
        plan.context_lens.copy_(torch.from_numpy(batch.context_lens))

    def write_kv(
        self, k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor, kv_scales: Any = None
    ) -> None:
        # A token without a slot writes what the one with the last slot does; where none has one, what is there.
        taken = torch.where(slots < 0, slots.argmax(), torch.arange(len(slots)))
        slots = slots.index_select(0, taken)
        at = slots.clamp(min=0)
        blocks, offsets = at // kv_cache.shape[3], at % kv_cache.shape[3]
        fresh = torch.stack((k, v), dim=1).index_select(0, taken)
        before = kv_cache[blocks, :, :, offsets]
        kv_cache[blocks, :, :, offsets] = torch.where((slots < 0)[:, None, None, None], before, fresh)

    def paged_attention(
        self, q: torch.Tensor, kv_cache: torch.Tensor, plan: AttentionPlan, *, scale: float, **options: Any
    ) -> torch.Tensor:
        if not isinstance(plan.parts, torch.Tensor):
            return super().paged_attention(q, kv_cache, plan, scale=scale, **options)
        ids = plan.parts.index_select(0, plan.rows).clamp(min=0).long()
        blocks = kv_cache.index_select(0, ids.flatten()).unflatten(0, ids.shape)
        k, v = blocks.permute(2, 0, 3, 1, 4, 5).flatten(3, 4).unbind(0)
        seen = (torch.arange(k.shape[2]) < plan.context_lens[:, None])[:, None, :, None]
        k, v = (part.masked_fill(~seen, 0) for part in (k, v))
        scores = q.unflatten(1, (k.shape[1], -1)) @ k.mT * scale
        weights = scores.masked_fill(~seen.mT, float("-inf")).softmax(dim=3).nan_to_num(0)
        return (weights @ v).flatten(1, 2)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder.random(
        MODEL, storage_dtype=torch.float32, compute_dtype=torch.float32, device=torch.device("cpu"), seed=3
    )


@pytest.fixture(autouse=True)
def tape(monkeypatch: pytest.MonkeyPatch) -> Tape:
    tape = Tape()
    monkeypatch.setattr(model_runner, "recorder", lambda device: tape)
    return tape


def make_runner(decoder: Decoder, *, graphs: bool, backend: ReferenceBackend | None = None) -> ModelRunner:
    runner = ModelRunner(
        decoder,
        backend or RecordableReference(),
        num_blocks=CONFIG.num_blocks,
        block_size=CONFIG.block_size,
        max_num_requests=CONFIG.max_num_requests,
        max_blocks=CONFIG.max_blocks,
        kv_dtype=torch.float32,
        device=torch.device("cpu"),
        graphs=graphs,
    )
    runner.fill_blocks(range(CONFIG.num_blocks), float("nan"))
    return runner


def serve(runner: ModelRunner, on_step: Callable[[Engine], None] = lambda engine: None) -> dict[str, list[int]]:
    """Six requests that come one by one and end at different times: every batch size from 1 to 6, and mixed steps."""
    engine = Engine(CONFIG, runner, Sampler(runner.logits, runner.arg_max))
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, MODEL.vocab_size, length).tolist() for length in (3, 9, 1, 20, 5, 2)]
    answers: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    waiting = list(enumerate(prompts))
    while waiting or engine.has_work:
        if waiting:
            index, prompt = waiting.pop(0)
            params = SamplingParams(temperature=0.8, seed=index, max_tokens=20 + 5 * index, ignore_eos=True)
            engine.add(str(index), prompt, params)
        on_step(engine)
        for _ in range(3):
            for output in engine.step():
                assert not output.error
                answers[output.request_id] += output.token_ids
    return answers


@dataclasses.dataclass(frozen=True)
class Plain:
    """A run without graphs: what it answered, and the runner afterwards."""

    answers: dict[str, list[int]]
    runner: ModelRunner


@pytest.fixture(scope="module")
def plain(decoder: Decoder) -> Plain:
    runner = make_runner(decoder, graphs=False)
    return Plain(serve(runner), runner)


def test_buckets_are_dense_where_batches_are_small() -> None:
    assert BUCKETS[:7] == (1, 2, 4, 8, 16, 24, 32)
    assert list(BUCKETS) == sorted(set(BUCKETS))


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, (1,)), (2, (1, 2)), (3, (1, 2, 4)), (8, (1, 2, 4, 8)), (9, (1, 2, 4, 8, 16))]
)
def test_the_last_bucket_holds_the_largest_batch(most: int, sizes: tuple[int, ...]) -> None:
    assert buckets_for(most) == sizes
    assert bucket_of(most, sizes) == sizes[-1]


def test_every_batch_that_may_come_has_a_graph_and_large_ones_share_few() -> None:
    assert buckets_for(1000)[-8:] == (320, 384, 448, 512, 640, 768, 896, 1024)
    assert buckets_for(300)[-2:] == (256, 320)
    assert buckets_for(LIMITS["max_num_requests"][1]) == BUCKETS
    assert len(BUCKETS) < 70


def test_a_batch_takes_the_smallest_bucket_that_holds_it() -> None:
    taken = {count: bucket_of(count, BUCKETS) for count in (1, 2, 3, 4, 5, 8, 9, 17, 249, 256, 257)}
    assert taken == {1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 8: 8, 9: 16, 17: 24, 249: 256, 256: 256, 257: 320}


def test_padding_has_no_context() -> None:
    padded = DecodeRows.padded(np.array([7, 2], np.int32), np.array([30, 1], np.int32), 4)
    assert padded.context_lens.tolist() == [30, 1, 0, 0]
    assert padded.rows[:2].tolist() == [7, 2]
    assert padded.query_start.tolist() == [0, 1, 2, 3, 4]
    assert padded.num_decode == 4
    assert padded.rows.dtype == padded.context_lens.dtype == padded.query_start.dtype == np.int32


def test_without_graphs_nothing_is_recorded(decoder: Decoder, tape: Tape) -> None:
    make_runner(decoder, graphs=False)
    assert not tape.recorded


def test_answers_are_those_without_graphs_and_every_bucket_was_replayed(
    decoder: Decoder, plain: Plain, tape: Tape
) -> None:
    runner = make_runner(decoder, graphs=True)
    tape.replays.clear()
    mixed = 0

    def watch(engine: Engine) -> None:
        nonlocal mixed
        mixed += sum(bool(record.prefill_tokens and record.decode_tokens) for record in engine.steps)

    assert serve(runner, watch) == plain.answers
    assert tape.recorded == [8, 4, 2, 1], "the largest must be recorded first"
    assert set(tape.replays) == {1, 2, 4, 8}
    assert mixed > 0, "no step had both kinds of rows"


def test_a_replay_writes_the_slots_of_its_rows_and_no_other(decoder: Decoder, plain: Plain) -> None:
    """Every slot that the ordinary run leaves NaN stays so: padding wrote nothing."""
    graphed = make_runner(decoder, graphs=True)
    assert serve(graphed) == plain.answers
    for layer in range(MODEL.num_layers):
        for block_id in range(CONFIG.num_blocks):
            for ours, theirs in zip(
                graphed.read_block(layer, block_id), plain.runner.read_block(layer, block_id), strict=True
            ):
                assert torch.equal(ours.isnan(), theirs.isnan())


def test_a_step_with_a_prompt_is_not_replayed(decoder: Decoder, tape: Tape) -> None:
    runner = make_runner(decoder, graphs=True)
    engine = Engine(CONFIG, runner, Sampler(runner.logits, runner.arg_max))
    tape.replays.clear()
    engine.add("long", [1] * 10, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    engine.step()
    assert not tape.replays
    engine.step()
    assert tape.replays == {1: 1}
    engine.add("other", [2] * 10, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    engine.step()
    assert engine.steps[-1].prefill_tokens == 10
    assert engine.steps[-1].decode_tokens == 1
    assert tape.replays == {1: 1}


def test_a_backend_whose_plans_are_fixed_is_refused(decoder: Decoder) -> None:
    with pytest.raises(UnsupportedError, match=r"backend is 'reference'.*triton"):
        make_runner(decoder, graphs=True, backend=ReferenceBackend())


BREAKS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda context_lens: context_lens.max().item(),
    "bool": lambda context_lens: bool((context_lens > 3).any()),
    "int": lambda context_lens: int(context_lens[0]),
    "list": lambda context_lens: context_lens.tolist(),
    "numpy": lambda context_lens: context_lens.numpy(),
    "cpu": lambda context_lens: context_lens.cpu(),
    "nonzero": lambda context_lens: context_lens.nonzero(),
    "mask": lambda context_lens: context_lens[context_lens > 3],
    "range": lambda context_lens: range(context_lens[0]),
    "memory of the host": lambda context_lens: context_lens + torch.tensor([1]),
    "memory of numpy": lambda context_lens: torch.from_numpy(np.zeros(3)),
}


@pytest.mark.parametrize("reads", BREAKS.values(), ids=BREAKS)
def test_a_step_that_waits_for_the_device_or_takes_the_hosts_memory_cannot_be_recorded(
    decoder: Decoder, reads: Callable[[torch.Tensor], object]
) -> None:
    class Waiting(RecordableReference):
        def paged_attention(self, q: torch.Tensor, kv_cache: torch.Tensor, plan: AttentionPlan, **options: Any) -> Any:
            reads(plan.context_lens)
            return super().paged_attention(q, kv_cache, plan, **options)

    with pytest.raises(AssertionError, match="while a step is recorded"):
        make_runner(decoder, graphs=True, backend=Waiting())


def test_what_python_decides_stays_as_it_was_recorded(decoder: Decoder, plain: Plain, tape: Tape) -> None:
    """As in a CUDA graph: a backend that looks at the batch of its plan, and not at the plan's memory, is wrong."""

    class Stale(RecordableReference):
        def update_plan(self, plan: AttentionPlan, batch: StepBatch) -> None:
            pass

    assert serve(make_runner(decoder, graphs=True, backend=Stale())) != plain.answers
    assert tape.replays
