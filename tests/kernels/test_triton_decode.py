"""The Triton decode kernels against the float64 oracle, over pools of NaN, and what they promise beside the values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from pageframe.kernels.attention import AttentionPlan, kv_cache_shape, select_backend
from pageframe.kernels.triton import decode
from pageframe.kernels.triton.backend import TritonBackend
from pageframe.kernels.triton.decode import NO_WINDOW, most_splits
from pageframe.kernels.triton.tables import Settings, overridden

from .cases import Case, Shape, Step, make_case, store
from .conftest import CODES

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INT8 = torch.int8
HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)


@pytest.fixture
def triton(device: torch.device) -> TritonBackend:
    backend = select_backend("triton", device)
    assert isinstance(backend, TritonBackend)
    return backend


@pytest.fixture
def small_splits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Splits of two tiles, 32 positions, and at most 4 a row: those of more than 128 positions grow."""
    monkeypatch.setattr(decode, "SPLIT_SIZE", 32)
    monkeypatch.setattr(decode, "MAX_SPLITS", 4)
    with overridden("attend_splits", Settings(tile=16, num_warps=4, num_stages=2)):
        yield


def run(triton: TritonBackend, case: Case, device: torch.device, plan: AttentionPlan | None = None) -> torch.Tensor:
    """What the kernels write for a step, on the CPU; with a plan of another step in that plan's memory."""
    if plan is None:
        plan = triton.plan_attention(case.step, case.tables.to(device), case.shape.block_size)
    q = case.q.to(device)
    q = torch.cat((q, q.new_ones(plan.num_tokens - len(q), *q.shape[1:])))
    scales = None if case.kv_scales is None else case.kv_scales.to(device)
    options = {"scale": case.scale, "window": case.shape.window, "softcap": case.shape.softcap, "kv_scales": scales}
    return triton.paged_attention(q, case.kv_cache.to(device), plan, **options).cpu()


def only(case: Case, requests: Sequence[int], num_padding: int = 0) -> Case:
    """A step of these decode rows of another, and of padding whose row of the tables is garbage."""
    step = Step(
        rows=np.append(case.step.rows[list(requests)], [np.int32(2**31 - 1)] * num_padding).astype(np.int32),
        context_lens=np.append(case.step.context_lens[list(requests)], [0] * num_padding).astype(np.int32),
        query_start=np.arange(len(requests) + num_padding + 1, dtype=np.int32),
        num_decode=len(requests) + num_padding,
    )
    q = torch.cat((case.q[list(requests)], torch.ones(num_padding, *case.q.shape[1:], dtype=case.q.dtype)))
    return dataclasses.replace(case, step=step, q=q)


def random_shape(rng: np.random.Generator, head_dim: int) -> Shape:
    return Shape(
        group=int(rng.choice([1, 2, 3, 5, 7, 8])),
        num_kv_heads=int(rng.integers(1, 4)),
        head_dim=head_dim,
        block_size=2 ** int(rng.integers(9)),
        dtype=[BF16, FP16, FP32][int(rng.integers(3))],
        window=int(rng.integers(1, 200)) if rng.random() < 0.4 else None,
        softcap=float(rng.choice([1.0, 2.0, 30.0])) if rng.random() < 0.4 else None,
        kv_dtype=None if rng.random() < 0.5 else CODES[int(rng.integers(len(CODES)))],
    )


@pytest.mark.usefixtures("small_splits")
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_random_shapes(triton: TritonBackend, device: torch.device, rng: np.random.Generator, head_dim: int) -> None:
    contexts = [0, 1, int(rng.integers(2, 40)), int(rng.integers(129, 160)), 64]
    make_case(rng, random_shape(rng, head_dim), rng.permutation(contexts).tolist()).check(triton, device)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100))
def test_many_random_shapes(triton: TritonBackend, device: torch.device, rng: np.random.Generator, seed: int) -> None:
    contexts = rng.integers(0, 700, size=int(rng.integers(1, 9))).tolist()
    make_case(rng, random_shape(rng, HEAD_DIMS[seed % len(HEAD_DIMS)]), contexts).check(triton, device)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("kv_dtype", CODES)
def test_quantised_caches(
    triton: TritonBackend, device: torch.device, rng: np.random.Generator, kv_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    shape = Shape(group=3, num_kv_heads=2, head_dim=32, dtype=dtype, kv_dtype=kv_dtype)
    make_case(rng, shape, [0, 70, 1, 16], chunks=[(20, 5)]).check(triton, device)


@pytest.mark.parametrize("kv_dtype", CODES)
def test_float16_queries_over_codes_of_small_values(
    triton: TritonBackend, device: torch.device, rng: np.random.Generator, kv_dtype: torch.dtype
) -> None:
    """V so small that a weight times its scale would be less than float16 has, by both kernels."""
    shape = Shape(group=2, num_kv_heads=1, head_dim=16, dtype=FP16, kv_dtype=kv_dtype)
    case = make_case(rng, shape, [70], chunks=[(60, 5)])
    assert case.kv_scales is not None
    case.kv_scales[:, 1] *= 2.0**-12
    result = run(triton, case, device).double() * 2.0**12
    torch.testing.assert_close(result, case.expected, rtol=1e-3, atol=1e-3)


def test_queries_of_another_dtype_than_the_cache(
    triton: TritonBackend, device: torch.device, rng: np.random.Generator
) -> None:
    shape = Shape(group=2, num_kv_heads=1, head_dim=16, dtype=FP32, kv_dtype=BF16)
    make_case(rng, shape, [33, 5]).check(triton, device)


@pytest.mark.usefixtures("small_splits")
@pytest.mark.parametrize("window", [None, 1, 33, 150])
def test_contexts_around_the_edges_of_splits(
    triton: TritonBackend, device: torch.device, rng: np.random.Generator, window: int | None
) -> None:
    """One split, just two, as many as there may be, and those of longer contexts, which are longer themselves."""
    shape = Shape(group=2, num_kv_heads=1, head_dim=16, block_size=4, window=window)
    make_case(rng, shape, [31, 32, 33, 127, 128, 129, 256, 257]).check(triton, device)


@pytest.mark.usefixtures("small_splits")
@pytest.mark.parametrize("window", [1, 32, 33, 70, 500, NO_WINDOW])
def test_partial_results_have_room(window: int) -> None:
    """A row's splits, as the kernel cuts them, are never more than the memory that is taken for a context so long."""
    for context in range(1, 700):
        oldest = max(0, context - window)
        length = context - oldest // 32 * 32
        size = 32 * max(1, -(-length // 128))
        assert -(-length // size) <= most_splits(context, window) <= 4


@pytest.mark.usefixtures("small_splits")
def test_any_number_of_programs_gives_the_same_bits(
    triton: TritonBackend, device: torch.device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(rng, Shape(group=3, num_kv_heads=2, head_dim=16, dtype=BF16), [70, 0, 5, 140])
    results = []
    for count in (1, 2, 5, 40):
        monkeypatch.setattr(decode, "num_programs", lambda device, count=count: count)
        results.append(run(triton, case, device))
    assert all(torch.equal(results[0], result) for result in results[1:])


@pytest.mark.usefixtures("small_splits")
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("kv_dtype", [None, INT8])
def test_a_rows_bits_depend_neither_on_its_neighbours_nor_on_padding(
    triton: TritonBackend,
    device: torch.device,
    rng: np.random.Generator,
    kv_dtype: torch.dtype | None,
    window: int | None,
) -> None:
    shape = Shape(group=2, num_kv_heads=1, head_dim=16, dtype=BF16, window=window, kv_dtype=kv_dtype)
    case = make_case(rng, shape, [75, 1, 140, 33])
    together = run(triton, case, device)
    for request in (0, 2):
        assert torch.equal(run(triton, only(case, [request]), device)[0], together[request])
    padded = run(triton, only(case, [3, 2, 0, 1], num_padding=4), device)
    assert torch.equal(padded[:4], together[[3, 2, 0, 1]])
    assert torch.equal(padded[4:], torch.zeros_like(padded[4:]))


@pytest.mark.usefixtures("small_splits")
def test_an_updated_plan_equals_a_fresh_one(
    triton: TritonBackend, device: torch.device, rng: np.random.Generator
) -> None:
    """As between two replays of one graph: the device's memory stays where it is, rows without a request give zeros."""
    case = make_case(rng, Shape(group=2, num_kv_heads=1, head_dim=16), [140, 3, 70])
    steps = [only(case, [1, 2]), only(case, [0, 2, 1]), only(case, []), only(case, [2])]
    plan = triton.plan_attention(only(case, [0, 1], num_padding=3).step, case.tables.to(device), 16)
    places = [tensor.data_ptr() for tensor in (plan.rows, plan.context_lens, plan.query_start)]
    for step in steps:
        triton.update_plan(plan, step.step)
        result = run(triton, step, device, plan)
        num_live = len(step.q)
        assert torch.equal(result[:num_live], run(triton, step, device))
        assert torch.equal(result[num_live:], torch.zeros_like(result[num_live:]))
    assert places == [tensor.data_ptr() for tensor in (plan.rows, plan.context_lens, plan.query_start)]


def test_only_plans_of_decode_rows_are_updated(
    triton: TritonBackend, device: torch.device, rng: np.random.Generator
) -> None:
    case = make_case(rng, Shape(head_dim=16), [3, 4], chunks=[(0, 2)])
    mixed = triton.plan_attention(case.step, case.tables.to(device), 16)
    decode_rows = only(case, [0, 1]).step
    with pytest.raises(AssertionError, match="serves its own step alone"):
        triton.update_plan(mixed, decode_rows)
    small = triton.plan_attention(only(case, [0]).step, case.tables.to(device), 16)
    with pytest.raises(AssertionError, match="2 decode rows, the plan has 1"):
        triton.update_plan(small, decode_rows)
    with pytest.raises(AssertionError, match="only steps of decode rows"):
        triton.update_plan(small, case.step)


def test_the_table_may_change_between_plan_and_kernel(
    triton: TritonBackend, device: torch.device, rng: np.random.Generator
) -> None:
    """A replayed graph reads the resident tables, not those of its capture."""
    case = make_case(rng, Shape(group=1, num_kv_heads=1, head_dim=16), [40, 20])
    tables = torch.full_like(case.tables, -1).to(device)
    plan = triton.plan_attention(case.step, tables, 16)
    tables.copy_(case.tables)
    assert torch.equal(run(triton, case, device, plan), run(triton, case, device))


@pytest.mark.usefixtures("small_splits")
@pytest.mark.parametrize("far", [300.0, -300.0])
def test_scores_far_from_0_and_far_apart(
    triton: TritonBackend, device: torch.device, rng: np.random.Generator, far: float
) -> None:
    """Scores of hundreds, all of one sign, whose powers no float holds: the highest is subtracted first."""
    case = make_case(rng, Shape(group=1, num_kv_heads=1, head_dim=16), [60])
    case.kv_cache[:, 0].abs_()
    q = torch.full_like(case.q, far)
    table = case.tables[int(case.step.rows[0])]
    k, v = (case.kv_cache[table[:4].long(), part, 0].reshape(64, 16)[:60].double() for part in (0, 1))
    expected = torch.softmax(q[0].double() @ k.T * case.scale, dim=-1) @ v
    result = run(triton, dataclasses.replace(case, q=q), device)
    torch.testing.assert_close(result[0].double(), expected, rtol=0, atol=1e-3)


def test_more_query_heads_than_a_product_has_rows(
    triton: TritonBackend, device: torch.device, rng: np.random.Generator
) -> None:
    make_case(rng, Shape(group=20, num_kv_heads=1, head_dim=16), [18]).check(triton, device)


@pytest.mark.parametrize("kv_dtype", CODES)
def test_pool_of_more_codes_than_32_bits_count(
    triton: TritonBackend, device: torch.device, kv_dtype: torch.dtype
) -> None:
    """The last block of a pool of 2^31 codes and a few, written and read: a 32-bit offset would land elsewhere."""
    shape = kv_cache_shape(2**16 + 8, 1, 256, 64)
    # 2 GiB of addresses, of which one block is touched.
    codes = torch.empty(shape, dtype=torch.uint8, device=device).view(kv_dtype)
    scales = torch.empty(shape[:4], device=device)
    last = shape[0] - 1
    values = torch.randn(4, 1, 64, generator=torch.Generator().manual_seed(1)).to(device)
    triton.write_kv(values, 2 * values, codes, torch.arange(4, device=device) + last * 256, scales)
    step = Step(np.zeros(1, np.int32), np.array([4], np.int32), np.array([0, 1], np.int32), 1)
    plan = triton.plan_attention(step, torch.tensor([[last]], dtype=torch.int32, device=device), 256)
    q = torch.ones(1, 1, 64, device=device)
    # A scale of 0 weighs all four slots alike.
    result = triton.paged_attention(q, codes, plan, scale=0.0, kv_scales=scales)
    _, _, stored = store(2 * values.double(), kv_dtype)
    torch.testing.assert_close(result[0].double(), stored.mean(dim=0), rtol=0, atol=2e-6)
