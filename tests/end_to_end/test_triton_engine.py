"""Whole engines on Triton's kernels, in the interpreter: the tokens of the reference, whatever the scheduler does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

TESTS = Path(__file__).parent.parent
PROGRAM = Path(__file__).with_name("triton_engine.py")
#: By model, what it is run as; the interpreter is slow, so one model has the long suite to itself.
CASES = {"qwen3": ("reference", "float32", "fp8"), "llama": ("reference", "float32", "bf16", "int8")}
#: Blocks, slots of each, layers, K and V, KV heads.
POOL_SLOTS = 11 * 4 * 2 * 2 * 2
SLOT_BYTES = {"bf16": 2 * 16, "int8": 16 + 4, "fp8": 16 + 4, "float32": 4 * 16}
Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module", params=["qwen3", pytest.param("llama", marks=pytest.mark.long)])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What `triton_engine` printed. A process of its own: the interpreter must be on before Triton is imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(TESTS)}
    command = [sys.executable, str(PROGRAM), str(tmp_path_factory.mktemp("models")), request.param]
    result = subprocess.run(
        [*command, *CASES[request.param]], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    found: Results = json.loads(result.stdout)
    return found


def test_tokens_are_the_references(results: Results) -> None:
    triton, reference = results["float32"], results["reference"]
    assert (triton["backend"], reference["backend"]) == ("triton", "reference")
    assert triton["token_ids"] == reference["token_ids"]
    assert [len(tokens) for tokens in triton["token_ids"]] == [6, 6, 6, 6]
    np.testing.assert_allclose(triton["logprobs"], reference["logprobs"], rtol=0, atol=1e-4)


def test_steps_were_mixed_prompts_cut_and_requests_preempted(results: Results) -> None:
    for did in results.values():
        assert did["mixed_steps"] > 0
        assert did["preemptions"] > 0
        assert did["prefill_steps"] > 4 + did["preemptions"], "some prompt should have been cut"


def test_tritons_kernels_are_what_ran(results: Results) -> None:
    assert results["reference"]["launches"] == {}
    for case in set(results) - {"reference"}:
        ran, num_calls = results[case]["launches"], 2 * results[case]["steps"]
        assert ran["rotate_and_write"] == ran["gated"] == num_calls
        assert ran["add_rms_norm"] == 2 * num_calls + results[case]["steps"], "the last norm is a kernel's too"
        assert ran["attend_splits"] > 0
        assert ran["attend_prefill"] > 0


def test_what_keys_and_values_are_stored_as(results: Results) -> None:
    """The pool takes what the formula says, and the first tokens of the greedy answers stay what they are."""
    exact = results["float32"]
    for case, did in results.items():
        stored = "float32" if case == "reference" else case
        assert did["kv_dtype"] == stored
        assert did["pool_bytes"] == [POOL_SLOTS * SLOT_BYTES[stored]] * 2
        for greedy in (0, 2):
            assert did["token_ids"][greedy][0] == exact["token_ids"][greedy][0]
            assert abs(did["logprobs"][greedy][0] - exact["logprobs"][greedy][0]) < 0.1
        rounded = stored != "float32"
        assert (did["logprobs"][0][0] != pytest.approx(exact["logprobs"][0][0], abs=1e-4)) == rounded
