"""All that a request may make a GPU's compiler do, done once at start: no request waits for it, and what does not
compile or launch there, or finds too little memory, is said before anyone is served.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import numpy as np

from pageframe.kernels.triton.transfer import to_device
from pageframe.runtime.batch import Batch
from pageframe.runtime.block_table import TableUpdates
from pageframe.runtime.config import ResolvedConfig
from pageframe.runtime.errors import StartupError
from pageframe.runtime.model_runner import ModelRunner
from pageframe.runtime.models.source import one_line
from pageframe.runtime.sampler import Sampler
from pageframe.runtime.step_plan import SamplingBatch

PROMPT_TOKENS = 2
#: The decode kernel is compiled once for all numbers of rows up to this, and once more for each doubling.
ROWS_OF_ONE_KERNEL = 256


def warm_up(runner: ModelRunner, sampler: Sampler, resolved: ResolvedConfig) -> None:
    """Have a GPU's kernels compiled and loaded; on a CPU there is nothing to do."""
    if resolved.device != "cpu":
        run_every_kernel(runner, sampler, resolved.max_num_requests)
        run_largest_step(runner, sampler, resolved.max_num_batched_tokens, resolved.max_num_requests)
        runner.synchronize()


def run_every_kernel(runner: ModelRunner, sampler: Sampler, max_num_requests: int) -> None:
    """Run what steps of any kind run: decode rows, a prompt, tokens drawn, logprobs, penalties. No block is written.

    Args:
        sampler: draws where the logits are.
    """
    hidden = runner.forward(_mixed_step(1))
    num_decode = ROWS_OF_ONE_KERNEL + 1
    while num_decode <= max_num_requests:
        runner.forward(_mixed_step(num_decode))
        num_decode = 2 * num_decode - 1
    sampler.sample(hidden, _draws(1))
    if find_spec("triton") is not None:
        _penalize_once(runner)


def run_largest_step(runner: ModelRunner, sampler: Sampler, num_tokens: int, num_requests: int) -> None:
    """Run as many tokens and draws as a step may have, so that their memory is met now; torch keeps it for the steps to
    come. No block is written."""
    hidden = runner.forward(_mixed_step(num_requests - 1, num_tokens - num_requests + 1, num_requests))
    sampler.sample(hidden, dataclasses.replace(_draws(num_requests), banned=((0, (0,)),)))


def _mixed_step(num_decode: int, prompt_tokens: int = PROMPT_TOKENS, num_wanted: int = 1) -> Batch:
    """Decode rows and a prompt as padding has them: slot -1 writes nothing, context 0 attends to nothing. No recorded
    graph has such a step."""
    num_tokens = num_decode + prompt_tokens
    zeros = np.zeros(num_tokens, dtype=np.int64)
    requests = np.zeros(num_decode + 1, dtype=np.int32)
    return Batch(
        token_ids=zeros,
        positions=zeros,
        slots=zeros - 1,
        query_start=np.append(np.arange(num_decode + 1), num_tokens).astype(np.int32),
        context_lens=requests,
        rows=requests,
        num_decode=num_decode,
        wanted=np.zeros(num_wanted, dtype=np.int64),
        sampling=SamplingBatch.empty(),
        table_updates=TableUpdates([]),
    )


def _draws(count: int) -> SamplingBatch:
    """Rows drawn with a filter, with logprobs."""
    ones, integers, longs = np.ones(count, np.float32), np.ones(count, np.int32), np.zeros(count, np.int64)
    return SamplingBatch(
        temperature=ones,
        top_k=integers,
        top_p=ones,
        min_p=np.zeros(count, np.float32),
        seed=longs,
        output_index=longs,
        num_logprobs=integers,
    )


def _penalize_once(runner: ModelRunner) -> None:
    from pageframe.kernels.triton.sampling_penalties import Penalties, penalize

    logits = runner.logits(runner.forward(_mixed_step(1)))
    ids, factors = np.zeros(1, np.int32), to_device(np.ones((3, 1), np.float32), logits.device)
    starts = to_device(np.array([0, 1], np.int32), logits.device)
    token_ids, counts = to_device(ids, logits.device), to_device(ids, logits.device)
    penalize(logits, Penalties(starts, token_ids, counts, *factors))


@contextmanager
def refused_at_start(what: str) -> Iterator[None]:
    """Within this, what a compiler, its tools or a device's driver raise is a StartupError of one line.

    Args:
        what: cannot be made ready then, for the message.
    """
    try:
        yield
    except Exception as error:
        if not _is_of_kernels(error):
            raise
        reason = getattr(error, "error_message", None)  # without the source, which comes first in the whole of it
        said = one_line(Exception(reason) if reason else error)
        raise StartupError(f"{what} cannot be made ready: {type(error).__name__}: {said}") from error


def _is_of_kernels(error: Exception) -> bool:
    if isinstance(error, (RuntimeError, OSError, subprocess.SubprocessError)):
        return True
    if "triton" not in sys.modules:
        return False
    from triton.errors import TritonError

    return isinstance(error, TritonError)
