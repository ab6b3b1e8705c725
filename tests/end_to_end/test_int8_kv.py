"""The default model with int8 K and V: close to bf16's answers, and the same bits however requests are scheduled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from pageframe.benchmarks.experiments.exactness import prompt_token_ids, shared_prefix
from pageframe.benchmarks.experiments.poison import PoisonedRunner
from pageframe.runtime.batch import Batch
from pageframe.runtime.block_table import TableUpdates
from pageframe.runtime.config import EngineConfig
from pageframe.runtime.engine import Engine
from pageframe.runtime.engine_builder import build_engine
from pageframe.runtime.inspection import inspect
from pageframe.runtime.journal import CopyEvent
from pageframe.runtime.model_runner import ModelRunner
from pageframe.runtime.request import SamplingParams
from pageframe.runtime.step_plan import SamplingBatch

NUM_PROMPTS, NUM_TOKENS = 6, 32
SMALL = {"num_blocks": 64, "max_model_len": 256, "max_num_requests": 16}

#: An answer's tokens and their logprobs, which tell apart what an arg-max does not.
Answer = list[tuple[int, float]]


pytestmark = pytest.mark.usefixtures("compiled_kernels")


@cache
def prompts() -> list[list[int]]:
    return prompt_token_ids(NUM_PROMPTS)


@dataclass
class Run:
    """An engine over poisoned memory, and what it answered."""

    engine: Engine
    answers: list[Answer]

    def copies(self, kind: str) -> int:
        return sum(event.copy_kind == kind for event in self.engine.journal if isinstance(event, CopyEvent))


def run(asked: Sequence[Sequence[int]], *, rounds: int = 1, choices: int = 1, **settings: Any) -> Run:
    """Answer all prompts at once, once a round; the answers of the last round, each choice's in turn."""
    engine = build_engine(EngineConfig(kv_dtype="int8", **(SMALL | settings)))
    poisoned = PoisonedRunner(engine)
    answers: dict[str, Answer] = {}
    for _ in range(rounds):
        answers.clear()
        for index, prompt in enumerate(asked):
            params = SamplingParams(n=choices, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
            engine.add(str(index), prompt, params)
        while engine.has_work:
            for output in engine.step():
                assert output.finish_reason != "error", output.error
                found = zip(output.token_ids, output.logprobs, strict=True)
                answers.setdefault(output.request_id, []).extend((token, row.logprob) for token, row in found)
            poisoned.poison_free_blocks()
        engine.scheduler.check_invariants()
    assert np.isfinite([logprob for answer in answers.values() for _, logprob in answer]).all()
    return Run(engine, [answers[request_id] for request_id in sorted(answers)])


@cache
def alone() -> list[Answer]:
    return [run([prompt], max_num_requests=1).answers[0] for prompt in prompts()]


def test_one_batch() -> None:
    together = run(prompts(), max_num_batched_tokens=4096)
    assert together.answers == alone()
    assert len(together.engine.steps) == NUM_TOKENS, "all requests should have shared every step"


def test_chunks_beside_decoding() -> None:
    chunked = run(prompts(), max_num_batched_tokens=16)
    assert chunked.answers == alone()
    assert any(step.prefill_tokens and step.decode_tokens for step in chunked.engine.steps)


def test_preempted_and_computed_again() -> None:
    squeezed = run(prompts(), num_blocks=16, max_num_batched_tokens=64, prefix_cache=False)
    assert squeezed.answers == alone()
    assert squeezed.engine.scheduler.num_preemptions > 0


def test_prefix_hits() -> None:
    behind = [[*shared_prefix()[:80], *prompt] for prompt in prompts()]
    first = [run([prompt], max_num_requests=1, prefix_cache=False).answers[0] for prompt in behind]
    shared = run(behind, rounds=2)
    assert shared.answers == first
    assert shared.engine.scheduler.num_hit_tokens > 80


def test_forks() -> None:
    forked = run(prompts()[:3], choices=2)
    assert forked.answers == [answer for answer in alone()[:3] for _ in range(2)]
    assert forked.copies("fork") > 0


def test_host_copies() -> None:
    copied = run(prompts(), rounds=2, num_blocks=12, max_model_len=160, max_num_requests=2, host_cache=64 * 2**20)
    assert copied.answers == alone()
    assert copied.copies("to_host") > 0
    assert copied.copies("to_device") > 0


def answer_logprobs(engine: Engine, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """Logprobs of an answer's tokens when it is fed as it is, float32 [len(answer)]."""
    assert isinstance(engine.runner, ModelRunner)
    tokens = np.array([*prompt, *answer[:-1]], dtype=np.int64)
    positions = np.arange(len(tokens))
    num_blocks = -(-len(tokens) // engine.resolved.block_size)
    hidden = engine.runner.forward(
        Batch(
            token_ids=tokens,
            positions=positions,
            slots=positions,
            query_start=np.array([0, len(tokens)], dtype=np.int32),
            context_lens=np.array([len(tokens)], dtype=np.int32),
            rows=np.zeros(1, dtype=np.int32),
            num_decode=0,
            wanted=positions[len(prompt) - 1 :],
            sampling=SamplingBatch.empty(),
            table_updates=TableUpdates([(0, index, index) for index in range(num_blocks)]),
        )
    )
    rows = torch.log_softmax(engine.runner.logits(hidden), dim=1)
    return rows.gather(1, torch.tensor(answer)[:, None])[:, 0]


def test_an_answer_of_bf16_is_about_as_likely() -> None:
    bf16, int8 = (build_engine(EngineConfig(kv_dtype=kv_dtype, **SMALL)) for kv_dtype in ("auto", "int8"))
    answers = {str(index): list[int]() for index in range(NUM_PROMPTS)}
    for request_id, prompt in zip(answers, prompts(), strict=True):
        bf16.add(request_id, prompt, SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True))
    while bf16.has_work:
        for output in bf16.step():
            answers[output.request_id] += output.token_ids
    pairs = list(zip(prompts(), answers.values(), strict=True))
    exact, rounded = (
        torch.cat([answer_logprobs(engine, prompt, answer) for prompt, answer in pairs]) for engine in (bf16, int8)
    )
    difference = rounded - exact
    assert difference.any(), "K and V should have been rounded"
    assert abs(difference.mean()) < 0.01
    assert difference.abs().mean() < 0.05
    assert difference.abs().max() < 0.5


def test_the_memory_of_a_token() -> None:
    engine = build_engine(EngineConfig(kv_dtype="int8", **SMALL))
    assert isinstance(engine.runner, ModelRunner)
    per_token = 2 * 30 * 3 * (64 + 4)
    assert (engine.resolved.kv_dtype, engine.resolved.kv_bytes_per_token) == ("int8", per_token)
    pool_bytes = SMALL["num_blocks"] * 16 * per_token
    assert engine.runner.pool_bytes == engine.resolved.pool_bytes == pool_bytes
    assert inspect(engine, "kv")["bytes"] == {"pool": pool_bytes, "per_block": 16 * per_token, "per_token": per_token}
