"""The checks that benchmarks/gpu.py makes on a GPU, made here: that they pass, and that they notice what is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pageframe.benchmarks.gpu_parts import checks_model
from pageframe.benchmarks.gpu_parts.checks import relative_error
from pageframe.benchmarks.gpu_parts.layer import Layer
from pageframe.kernels.triton import backend as triton_backend
from pageframe.kernels.triton.backend import TritonBackend


@pytest.mark.parametrize(
    ("name", "limit", "check"),
    [
        pytest.param(*check, id=check[0], marks=[pytest.mark.long] if "padded" in check[0] else [])
        for check in checks_model.MODEL_CHECKS
    ],
)
def test_what_is_around_attention_passes(
    name: str, limit: float, check: Callable[[torch.device], float], device: torch.device
) -> None:
    torch.manual_seed(0)
    assert check(device) <= limit


def test_a_replay_with_the_plan_of_another_step_is_noticed(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides of the check then differ: the replay attends to nothing."""
    monkeypatch.setattr(triton_backend, "update_plan", lambda plan, batch: None)
    (check,) = (check for name, _, check in checks_model.MODEL_CHECKS if name == "graph replay, bucket full")
    assert check(device) > 1e-2


def test_a_number_that_is_none_is_within_no_limit() -> None:
    ours, expected = torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0])
    assert not relative_error(ours, expected) <= 1e9


@pytest.mark.parametrize("block_size", [4, 16])
def test_sets_of_a_layer_hold_the_contexts_that_are_gathered(device: torch.device, block_size: int) -> None:
    """What others' attention is given is what ours reads: torch's over the gathered K and V equals the reference."""
    contexts = [5, 16, 33]
    layer = Layer(
        TritonBackend(device),
        contexts,
        num_sets=2,
        new_tokens=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        block_size=block_size,
        dtype=torch.float32,
        cache_dtype=torch.float32,
        device=device,
        poison=True,
    )
    for index in range(2):
        expected, begin = layer.expected(index), 0
        keys, values = layer.gathered(index)
        for request, context in enumerate(contexts):
            part = slice(begin, begin + context)
            attended = torch.nn.functional.scaled_dot_product_attention(
                layer.queries[index][request][:, None],
                keys[part].transpose(0, 1),
                values[part].transpose(0, 1),
                enable_gqa=True,
            )
            torch.testing.assert_close(attended[:, 0], expected[request], rtol=1e-4, atol=1e-5)
            begin += context
    assert not torch.equal(layer.gathered(0)[0], layer.gathered(1)[0]), "sets must not share their blocks"
