"""The Triton prefill kernel against the float64 oracle, over pools of NaN, and what it promises beside the values."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import triton
from triton.runtime.interpreter import InterpreterBuilder

from pageframe.kernels.attention import kv_cache_shape
from pageframe.kernels.plan import make_plan
from pageframe.kernels.triton import launches
from pageframe.kernels.triton.dtypes import fp8_dtype
from pageframe.kernels.triton.prefill import attend_prefill, plan_prefill
from pageframe.kernels.triton.quantize import KV_LIMITS

from .cases import Case, Shape, Step, make_case
from .oracle import attend

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)


def run(
    case: Case,
    device: torch.device,
    *,
    kv_cache: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
    q: torch.Tensor | None = None,
) -> torch.Tensor:
    """What the kernel writes for a step, on the CPU; NaN where it writes nothing."""
    q = (case.q if q is None else q).to(device)
    out = torch.full(q.shape, torch.nan, dtype=q.dtype, device=device)
    attend_prefill(
        q,
        (case.kv_cache if kv_cache is None else kv_cache).to(device),
        case.tables.to(device),
        make_plan(case.step, device, case.shape.block_size, parts=None),
        plan_prefill(case.step, device),
        out,
        scale=case.scale,
        window=case.shape.window,
        softcap=case.shape.softcap,
        kv_scales=None if kv_scales is None else kv_scales.to(device),
    )
    return out.cpu()


def check(case: Case, actual: torch.Tensor, expected: torch.Tensor | None = None) -> None:
    """The prefill tokens are the oracle's, up to the rounding of the weights and the result; the others untouched."""
    atol, rtol = (2e-5, 0.0) if actual.dtype == FP32 else (torch.finfo(actual.dtype).eps,) * 2
    decode = slice(0, case.step.num_decode)
    prefill = slice(case.step.num_decode, None)
    assert actual[decode].isnan().all(), "a decode row was written"
    torch.testing.assert_close(
        actual[prefill].to(torch.float64),
        (case.expected if expected is None else expected)[prefill],
        rtol=rtol,
        atol=atol,
        msg=lambda text: f"{case.shape}, contexts {case.step.context_lens.tolist()}: {text}",
    )


def random_chunks(rng: np.random.Generator, longest: int) -> list[tuple[int, int]]:
    """Chunks of (start, tokens): a fresh prompt, the middle of a block, one token, none, and one that is long."""
    start = int(rng.integers(1, 60))
    return [(0, int(rng.integers(2, 20))), (start, int(rng.integers(1, 9))), (17, 1), (5, 0), (29, longest)]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_random_shapes(device: torch.device, rng: np.random.Generator, head_dim: int) -> None:
    group = int(rng.choice([1, 2, 3, 4, 5, 7, 8]))
    shape = Shape(
        group=group,
        num_kv_heads=int(rng.integers(1, 3)),
        head_dim=head_dim,
        block_size=int(rng.choice([1, 2, 4, 8, 16, 32, 64, 128, 256])),
        dtype=[BF16, FP16, FP32][int(rng.integers(3))],
        window=int(rng.integers(1, 60)) if rng.random() < 0.4 else None,
        softcap=2.0 if rng.random() < 0.4 else None,
    )
    # Long enough for a second tile of query tokens where a tile has not too many.
    case = make_case(rng, shape, decode=[19, 0], chunks=random_chunks(rng, min(128 // group + 5, 40)))
    check(case, run(case, device))


@pytest.mark.parametrize("window", [1, 20, 33, 64, 1000])
def test_windows(device: torch.device, rng: np.random.Generator, window: int) -> None:
    """Tiles before the window are released blocks, tiles at its edge are cut, tiles inside are whole."""
    shape = Shape(
        group=8, num_kv_heads=1, head_dim=16, block_size=8, window=window, softcap=1.5 if window > 40 else None
    )
    case = make_case(rng, shape, decode=[], chunks=[(0, 35), (110, 21)])
    check(case, run(case, device))


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="products are counted in the interpreter")
def test_key_tiles_before_the_window_cost_nothing(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    products = Counter[int]()
    multiply = InterpreterBuilder.create_dot
    shape = Shape(group=1, num_kv_heads=1, head_dim=16, window=20)
    for start in (64, 640):

        def counting_dot(*arguments: Any, start: int = start) -> Any:
            products[start] += 1
            return multiply(*arguments)

        case = make_case(rng, shape, decode=[], chunks=[(start, 5)])
        monkeypatch.setattr(InterpreterBuilder, "create_dot", counting_dot)
        run(case, torch.device("cpu"))
    assert products[64] == products[640] > 0


@pytest.mark.parametrize("q_dtype", [FP32, BF16])
@pytest.mark.parametrize("codes_of", ["int8", "fp8"])
def test_quantised_caches(device: torch.device, rng: np.random.Generator, codes_of: str, q_dtype: torch.dtype) -> None:
    cache_dtype = torch.int8 if codes_of == "int8" else fp8_dtype(device)
    if cache_dtype is None:
        pytest.skip("this GPU has no fp8")
    shape = Shape(group=4, num_kv_heads=2, head_dim=32, window=50, softcap=2.0 if q_dtype == FP32 else None)
    case = make_case(rng, shape, decode=[9], chunks=[(70, 34), (0, 5)])
    # A dead slot keeps a NaN as its scale; its codes are whatever they are.
    scales = case.kv_cache.abs().amax(dim=-1) / KV_LIMITS[cache_dtype]
    scaled = (case.kv_cache / scales.unsqueeze(-1)).nan_to_num(3.0)
    codes = (scaled.round() if cache_dtype == torch.int8 else scaled).to(cache_dtype)
    q = case.q.to(q_dtype)
    expected = attend(
        q.to(torch.float64).numpy(),
        (codes.to(torch.float64) * scales.to(torch.float64).unsqueeze(-1)).numpy(),
        case.tables.numpy(),
        case.step.rows,
        case.step.context_lens,
        case.step.query_start,
        scale=case.scale,
        window=shape.window,
        softcap=shape.softcap,
    )
    check(case, run(case, device, kv_cache=codes, kv_scales=scales, q=q), torch.from_numpy(expected))


def test_queries_and_result_may_be_views_of_wider_tensors(device: torch.device, rng: np.random.Generator) -> None:
    case = make_case(rng, Shape(head_dim=32), decode=[3], chunks=[(7, 5)])
    wide = torch.full((case.q.shape[0], case.q.shape[1] + 4, case.q.shape[2]), torch.nan)
    wide[:, : case.q.shape[1]] = case.q
    check(case, run(case, device, q=wide[:, : case.q.shape[1]]))


def test_tokens_without_context_get_zeros(device: torch.device, rng: np.random.Generator) -> None:
    """Whatever their row is: nothing follows it."""
    case = make_case(rng, Shape(head_dim=16, group=16, num_kv_heads=1), decode=[], chunks=[(9, 4)])
    padded = Step(
        rows=np.append(case.step.rows, np.int32(2**31 - 1)),
        context_lens=np.append(case.step.context_lens, np.int32(0)),
        query_start=np.array([0, 4, 7], np.int32),
        num_decode=0,
    )
    q = torch.cat((case.q, torch.ones(3, *case.q.shape[1:])))
    actual = run(dataclasses.replace(case, step=padded), device, q=q)
    check(case, actual[:4])
    assert torch.equal(actual[4:], torch.zeros(3, *case.q.shape[1:]))


def test_scores_far_apart(device: torch.device, rng: np.random.Generator) -> None:
    """Scores of hundreds, whose powers are past any float: the softmax subtracts the highest first."""
    case = make_case(rng, Shape(head_dim=16, group=2, num_kv_heads=1), decode=[], chunks=[(50, 5)])
    expected = attend(
        300 * case.q.to(torch.float64).numpy(),
        case.kv_cache.to(torch.float64).numpy(),
        case.tables.numpy(),
        case.step.rows,
        case.step.context_lens,
        case.step.query_start,
        scale=case.scale,
        window=None,
        softcap=None,
    )
    actual = run(case, device, q=300 * case.q).to(torch.float64)
    torch.testing.assert_close(actual, torch.from_numpy(expected), rtol=0, atol=1e-3)


def test_scale_of_zero_weighs_all_that_is_seen_alike(device: torch.device, rng: np.random.Generator) -> None:
    shape = Shape(group=1, num_kv_heads=1, head_dim=16, block_size=4, window=10)
    case = dataclasses.replace(make_case(rng, shape, decode=[], chunks=[(40, 12)]), scale=0.0)
    table = case.tables[int(case.step.rows[0])]
    values = {at: case.kv_cache[table[at // 4], 1, 0, at % 4] for at in range(31, 52)}
    means = [torch.stack([values[at] for at in range(last - 9, last + 1)]).mean(dim=0) for last in range(40, 52)]
    torch.testing.assert_close(run(case, device)[:, 0], torch.stack(means), rtol=0, atol=2e-6)


@pytest.fixture
def _products_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's matrix products are numpy's, whose bits may depend on a row's place among the others: which
    those are is the processor's business. These do not."""
    if triton.knobs.runtime.interpret:
        monkeypatch.setattr(np, "matmul", partial(np.einsum, "ij,jk->ik"))


@pytest.mark.usefixtures("_products_by_row")
@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_rows_bits_do_not_depend_on_how_its_prompt_was_cut(
    device: torch.device, rng: np.random.Generator, dtype: torch.dtype, window: int | None
) -> None:
    shape = Shape(group=3, num_kv_heads=1, head_dim=32, block_size=8, dtype=dtype, window=window)
    whole = make_case(rng, shape, decode=[], chunks=[(0, 101)])
    cuts = (0, 33, 34, 50, 101)
    parts = [
        run(chunk_beside_others(whole, start, end), device)[start - end :] for start, end in itertools.pairwise(cuts)
    ]
    assert torch.equal(torch.cat(parts), run(whole, device))


def chunk_beside_others(whole: Case, start: int, end: int) -> Case:
    """The tokens [start, end) of a prompt as the last chunk of a step with a decode row and another chunk."""
    lengths = (1, 3, end - start)
    step = dataclasses.replace(step_of(lengths, (5, 33, end), num_decode=1), rows=whole.step.rows.repeat(3))
    return dataclasses.replace(whole, step=step, q=torch.cat((whole.q[:4], whole.q[start:end])))


def test_pool_of_more_elements_than_32_bits_count(device: torch.device) -> None:
    """The last block of a pool of 2^31 elements and a few: a 32-bit offset would land elsewhere."""
    shape = kv_cache_shape(2**16 + 8, 1, 256, 64)
    kv_cache = torch.empty(shape, dtype=BF16, device=device)  # 4 GiB of addresses, of which one block is touched
    last = shape[0] - 1
    values = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).to(BF16)
    kv_cache[last, :, 0, :4] = values.to(device)
    step = Step(np.zeros(1, np.int32), np.array([4], np.int32), np.array([0, 4], np.int32), 0)
    out = torch.empty(4, 1, 64, dtype=BF16, device=device)
    attend_prefill(
        torch.ones_like(out),
        kv_cache,
        torch.tensor([[last]], dtype=torch.int32, device=device),
        make_plan(step, device, 256, parts=None),
        plan_prefill(step, device),
        out,
        scale=0.0,
        window=None,
        softcap=None,
        kv_scales=None,
    )
    means = torch.stack([values[: at + 1].float().mean(dim=0) for at in range(4)])
    torch.testing.assert_close(out[:, 0].cpu().float(), means, rtol=2**-7, atol=1e-2)


def test_tiles_cover_every_prefill_token_once_and_the_longest_come_first(rng: np.random.Generator) -> None:
    lengths = [1, 1, *rng.integers(0, 40, size=6).tolist()]
    contexts = [7, 0, *(length + int(rng.integers(0, 100)) for length in lengths[2:])]
    tiles = plan_prefill(step_of(lengths, contexts, num_decode=2), torch.device("cpu"))
    for tile_tokens in (1, 7, 128):
        covered: list[int] = []
        items = tiles.items(tile_tokens).tolist()
        for request, first, count, num_keys in items:
            assert 1 <= count <= tile_tokens
            end = sum(lengths[: request + 1])
            assert end - lengths[request] <= first
            assert num_keys == contexts[request] - (end - first - count)
            covered += range(first, first + count)
        assert sorted(covered) == list(range(2, sum(lengths)))
        assert [item[3] for item in items] == sorted((item[3] for item in items), reverse=True)
        assert tiles.items(tile_tokens) is tiles.items(tile_tokens), "the layers of a step share one copy"


def step_of(lengths: Sequence[int], contexts: Sequence[int], num_decode: int) -> Step:
    return Step(
        rows=np.arange(len(lengths), dtype=np.int32),
        context_lens=np.array(contexts, dtype=np.int32),
        query_start=np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
        num_decode=num_decode,
    )


def test_one_launch_for_all_chunks_and_none_without_tokens(device: torch.device, rng: np.random.Generator) -> None:
    shape = Shape(head_dim=16, group=1, num_kv_heads=1)
    before = launches["attend_prefill"]
    run(make_case(rng, shape, decode=[4], chunks=[(0, 3), (8, 2)]), device)
    assert launches["attend_prefill"] == before + 1
    run(make_case(rng, shape, decode=[4], chunks=[(5, 0)]), device)
    assert launches["attend_prefill"] == before + 1


def test_a_chunk_longer_than_its_context_is_our_own_bug() -> None:
    with pytest.raises(AssertionError, match="longer than its context"):
        plan_prefill(step_of([4], [3], num_decode=0), torch.device("cpu"))


def test_more_query_heads_than_rows(device: torch.device, rng: np.random.Generator) -> None:
    """A KV head shared by more heads than a tile has rows: a tile is then one token of them all."""
    case = make_case(rng, Shape(group=130, num_kv_heads=1, head_dim=16), decode=[], chunks=[(3, 2)])
    check(case, run(case, device))
