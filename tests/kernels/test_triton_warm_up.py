"""What is compiled at start: all that requests may need, without a trace in memory; and what is said if it fails."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.engines import tiny_config
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from pageframe.benchmarks.gpu_parts.sizes import TOY
from pageframe.kernels.triton import launches
from pageframe.kernels.triton.backend import TritonBackend
from pageframe.runtime.batch import Batch
from pageframe.runtime.errors import MemoryPlanError, StartupError
from pageframe.runtime.model_runner import ModelRunner
from pageframe.runtime.models.decoder import Decoder
from pageframe.runtime.sampler import Sampler
from pageframe.runtime.warm_up import refused_at_start, run_every_kernel, run_largest_step, warm_up

PROGRAM = Path(__file__).with_name("triton_variants.py")
ATTENTION = {"attend_splits", "merge_splits", "attend_prefill"}
LAYERS = {"add_rms_norm", "rotate_and_write", "gated"}
SAMPLING = {"scan", "draw", "logprobs", "penalize"}


@pytest.fixture(scope="module")
def variants() -> dict[str, Any]:
    """What `triton_variants` printed. A process of its own: the interpreter is on here."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, str(PROGRAM)], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_after_the_start_no_step_has_anything_compiled(variants: dict[str, Any]) -> None:
    assert variants["num_steps"] > 50
    assert variants["later"] == []


def test_the_start_has_every_kernel_compiled(variants: dict[str, Any]) -> None:
    assert {name.removesuffix("_kernel") for name in variants["at_start"]} == ATTENTION | LAYERS | SAMPLING


def test_only_the_prefill_kernel_which_says_where_may_fuse_products_and_sums(variants: dict[str, Any]) -> None:
    assert variants["fusing"] == ["attend_prefill_kernel"]


@pytest.fixture
def runner(device: torch.device) -> ModelRunner:
    """Its blocks hold NaN."""
    decoder = Decoder.random(
        next(iter(TOY.models.values())),
        storage_dtype=torch.float32,
        compute_dtype=torch.float32,
        device=device,
        seed=0,
    )
    runner = ModelRunner(
        decoder,
        TritonBackend(device),
        num_blocks=3,
        block_size=4,
        max_num_requests=2,
        max_blocks=2,
        kv_dtype=torch.float32,
        device=device,
    )
    runner.fill_blocks(range(3), float("nan"))
    return runner


def test_every_kernel_runs_and_no_block_is_written(runner: ModelRunner) -> None:
    before = Counter(launches)
    run_every_kernel(runner, Sampler(runner.logits, runner.arg_max, on_device=True), 2)
    assert set(launches - before) == ATTENTION | LAYERS | SAMPLING
    _check_no_block_is_written(runner)


def test_the_largest_step_is_run_and_no_block_is_written(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, int, int]] = []
    drawn: list[int] = []
    forward = runner.forward

    def watched(batch: Batch) -> torch.Tensor:
        sizes.append((len(batch.token_ids), len(batch.rows), len(batch.wanted)))
        return forward(batch)

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        drawn.append(len(hidden))
        return runner.logits(hidden)

    monkeypatch.setattr(runner, "forward", watched)
    run_largest_step(runner, Sampler(logits, on_device=True), num_tokens=9, num_requests=3)
    run_largest_step(runner, Sampler(logits, on_device=True), num_tokens=5, num_requests=1)
    assert sizes == [(9, 3, 3), (5, 1, 1)]
    assert drawn == [3, 1]
    _check_no_block_is_written(runner)


@pytest.mark.parametrize("of_gpu", [True, False])
def test_only_a_gpu_is_warmed_up_its_largest_step_too(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, of_gpu: bool
) -> None:
    sizes: list[int] = []
    forward = runner.forward

    def watched(batch: Batch) -> torch.Tensor:
        sizes.append(len(batch.token_ids))
        return forward(batch)

    monkeypatch.setattr(runner, "forward", watched)
    resolved = tiny_config(max_num_requests=2, max_num_batched_tokens=11)
    sampler = Sampler(runner.logits, runner.arg_max, on_device=True)
    warm_up(runner, sampler, dataclasses.replace(resolved, device="cuda" if of_gpu else "cpu"))
    assert (11 in sizes) == bool(sizes) == of_gpu


def _check_no_block_is_written(runner: ModelRunner) -> None:
    for block_id in range(3):
        assert all(part.isnan().all() for part in runner.read_block(0, block_id))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (CompilationError("x = tl.load(p)\ny = x +\n", None, "y is\nundefined"), "CompilationError: y is undefined"),  # type: ignore[arg-type]
        (OutOfResources(300_000, 232_448, "shared memory"), "OutOfResources: out of resource: shared memory, Required"),
        (PTXASError("Internal error\n`ptxas` stderr:\nbad"), "PTXASError: Internal error `ptxas` stderr: bad"),
        (RuntimeError("Failed to find C compiler."), "RuntimeError: Failed to find C compiler."),
        (PermissionError(13, "Permission denied", "/cache"), "PermissionError: .* Permission denied: '/cache'"),
        (subprocess.CalledProcessError(1, "gcc"), "CalledProcessError: Command 'gcc' returned non-zero exit status 1"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_compilers_raise_at_start_is_one_line(error: Exception, said: str) -> None:
    with pytest.raises(StartupError, match=f"^the triton backend cannot be made ready: {said}") as caught:  # noqa: SIM117
        with refused_at_start("the triton backend"):
            raise error
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [MemoryPlanError("too small"), AssertionError("a bug")], ids=str)
def test_other_errors_pass_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:  # noqa: SIM117
        with refused_at_start("the triton backend"):
            raise error
    assert caught.value is error
