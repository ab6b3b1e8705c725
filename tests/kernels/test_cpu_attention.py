"""The compiled attention against the float64 oracle, and its bits for any batch, chunks and threads."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from pageframe.kernels.attention import UnsupportedError, kv_cache_shape
from pageframe.kernels.cpu.backend import CpuBackend
from pageframe.kernels.kv_pool import KvPool

from .cases import Case, Shape, Step, make_case, make_layer
from .oracle import attend, write
from .test_cpu_engine_linear import instruction_sets, library_of
from .test_paged_attention import SHAPES, around_block_edges

BF16 = torch.bfloat16
CPU_SHAPES = [
    *(dataclasses.replace(shape, dtype=BF16) for shape in SHAPES),
    *(Shape(group=group, num_kv_heads=1, head_dim=dim, dtype=BF16) for group, dim in ((3, 32), (1, 96), (2, 256))),
    Shape(group=30, num_kv_heads=1, head_dim=64, dtype=BF16),
    Shape(group=100, num_kv_heads=1, head_dim=32, dtype=BF16),
]


@pytest.fixture(scope="module", params=instruction_sets(), ids=lambda isa: getattr(isa, "name", "none"))
def cpu(request: pytest.FixtureRequest) -> CpuBackend:
    """Each instruction set's in turn."""
    return CpuBackend(library_of(request.param).functions)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest, _one_thread: None) -> int:
    """How many work; `_one_thread` puts the number back afterwards."""
    torch.set_num_threads(request.param)
    return request.param


def multiplies_in_bfloat16(cpu: CpuBackend) -> bool:
    return cpu.act_dtype == BF16


def tolerances(cpu: CpuBackend) -> dict[str, float]:
    """Weights of V and results are rounded to bfloat16 where products are of bfloat16; V is about 1."""
    return {"atol": 2.0**-8, "rtol": 2.0**-8} if multiplies_in_bfloat16(cpu) else {"atol": 2e-5, "rtol": 0.0}


def check(cpu: CpuBackend, case: Case) -> None:
    plan = cpu.plan_attention(case.step, case.tables, case.shape.block_size)
    shape = case.shape
    actual = cpu.paged_attention(
        case.q.float(), case.kv_cache, plan, scale=case.scale, window=shape.window, softcap=shape.softcap
    )
    torch.testing.assert_close(actual.double(), case.expected, **tolerances(cpu), msg=lambda text: f"{shape}: {text}")


@pytest.mark.parametrize("shape", CPU_SHAPES, ids=str)
def test_decode_rows(cpu: CpuBackend, threads: int, rng: np.random.Generator, shape: Shape) -> None:
    check(cpu, make_case(rng, shape, around_block_edges(rng, shape.block_size)))


@pytest.mark.parametrize("window", [None, 1, 20, 40, 1000])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_decode_rows_and_chunks_in_one_step(
    cpu: CpuBackend, threads: int, rng: np.random.Generator, window: int | None, softcap: float | None
) -> None:
    shape = Shape(group=3, num_kv_heads=1, dtype=BF16, window=window, softcap=softcap)
    chunks = [(0, 17), (0, 1), (0, 0), (5, 9), (40, 33), (16, 16), (31, 1), (100, 60)]
    check(cpu, make_case(rng, shape, decode=[40, 0, 3], chunks=chunks))


@pytest.mark.parametrize("window", [None, 130, 300])
def test_long_contexts(cpu: CpuBackend, threads: int, rng: np.random.Generator, window: int | None) -> None:
    shape = Shape(group=2, num_kv_heads=1, head_dim=32, dtype=BF16, window=window)
    check(cpu, make_case(rng, shape, decode=[127, 128, 129, 255, 256, 257, 600, 0, 1100], chunks=[(300, 70)]))


@pytest.mark.parametrize("window", [None, 300])
def test_one_long_context_for_all_threads(
    cpu: CpuBackend, threads: int, rng: np.random.Generator, window: int | None
) -> None:
    shape = Shape(group=3, num_kv_heads=1, head_dim=32, dtype=BF16, window=window)
    check(cpu, make_case(rng, shape, decode=[1500]))
    check(cpu, make_case(rng, shape, decode=[], chunks=[(900, 3)]))


def test_one_plan_serves_layers_of_every_kind(cpu: CpuBackend, threads: int, rng: np.random.Generator) -> None:
    base = Shape(dtype=BF16)
    first = make_case(rng, base, decode=[70, 9, 0], chunks=[(40, 8)])
    plan = cpu.plan_attention(first.step, first.tables, 16)
    for changes in ({}, {"window": 24}, {"group": 2, "num_kv_heads": 1}, {"window": 3}, {"head_dim": 96}, {}):
        shape = dataclasses.replace(base, **changes)
        case = make_layer(rng, shape, first.step, first.tables.numpy())
        actual = cpu.paged_attention(case.q.float(), case.kv_cache, plan, scale=case.scale, window=shape.window)
        torch.testing.assert_close(actual.double(), case.expected, **tolerances(cpu))


def test_views_in_and_out(cpu: CpuBackend, rng: np.random.Generator) -> None:
    """As when q, k and v come out of one product, in any dtype; what lies beside `out` is left alone."""
    case = make_case(rng, Shape(dtype=BF16), decode=[7, 30], chunks=[(0, 5)])
    plan = cpu.plan_attention(case.step, case.tables, 16)
    plain = cpu.paged_attention(case.q, case.kv_cache, plan, scale=case.scale)
    tokens, heads, head_dim = case.q.shape
    for dtype in (BF16, torch.float32):
        wide = torch.full((tokens, heads + 4, head_dim), torch.nan, dtype=dtype)
        wide[:, :heads] = case.q
        into = torch.full_like(wide, 7.0)
        out = into[:, :heads]
        assert cpu.paged_attention(wide[:, :heads], case.kv_cache, plan, scale=case.scale, out=out) is out
        torch.testing.assert_close(out.to(BF16), plain, rtol=0, atol=0)
        assert (into[:, heads:] == 7).all()


def test_padding_rows_are_zeros_and_never_looked_up(cpu: CpuBackend, threads: int, rng: np.random.Generator) -> None:
    case = make_case(rng, Shape(dtype=BF16), decode=[7, 0, 20, 0])
    rows = np.where(case.step.context_lens == 0, np.int32(2**31 - 1), case.step.rows)
    check(cpu, dataclasses.replace(case, step=dataclasses.replace(case.step, rows=rows)))


@pytest.mark.parametrize("num_padding", [0, 3])
def test_step_without_contexts(cpu: CpuBackend, num_padding: int) -> None:
    none = np.zeros(num_padding, dtype=np.int32)
    step = Step(none, none, np.arange(num_padding + 1, dtype=np.int32), num_padding)
    plan = cpu.plan_attention(step, torch.full((4, 4), -1, dtype=torch.int32), 16)
    kv_cache = torch.full(kv_cache_shape(3, 2, 16, 64), torch.nan, dtype=BF16)
    q = torch.ones(num_padding, 4, 64)
    assert torch.equal(cpu.paged_attention(q, kv_cache, plan, scale=1.0), torch.zeros_like(q))


def test_a_pool_of_more_elements_than_32_bits_count(cpu: CpuBackend) -> None:
    shape = kv_cache_shape(2**16 + 8, 1, 256, 64)
    kv_cache = torch.empty(shape, dtype=BF16)  # 4 GiB of addresses, of which two blocks are touched
    last = shape[0] - 1
    k = torch.randn(4, 1, 64, generator=torch.Generator().manual_seed(1))
    cpu.write_kv(k, 2 * k, kv_cache, torch.arange(4) + last * 256)
    step = Step(np.zeros(1, np.int32), np.array([4], np.int32), np.array([0, 1], np.int32), 1)
    plan = cpu.plan_attention(step, torch.tensor([[last]], dtype=torch.int32), 256)
    # A scale of 0 weighs all four slots alike.
    result = cpu.paged_attention(torch.ones(1, 1, 64), kv_cache, plan, scale=0.0)
    torch.testing.assert_close(result[0], (2 * k).to(BF16).float().mean(dim=0), rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize(
    ("num_kv_heads", "head_dim", "block_size"), [(1, 64, 16), (3, 64, 32), (8, 128, 16), (2, 96, 1), (5, 32, 256)]
)
def test_write_touches_its_slots_and_no_other(
    cpu: CpuBackend, rng: np.random.Generator, num_kv_heads: int, head_dim: int, block_size: int
) -> None:
    num_slots = 9 * block_size
    slots = rng.permutation(np.unique(np.concatenate((rng.integers(0, num_slots, 9), [0, num_slots - 1]))))
    slots[rng.integers(len(slots))] = -1
    wide = torch.from_numpy(rng.standard_normal((len(slots), 4 * num_kv_heads, head_dim))).float()
    k, v = wide[:, num_kv_heads : 2 * num_kv_heads], wide[:, 2 * num_kv_heads : 3 * num_kv_heads]
    kv_cache = torch.full(kv_cache_shape(9, num_kv_heads, block_size, head_dim), torch.nan, dtype=BF16)
    expected = write(k.to(BF16).double().numpy(), v.to(BF16).double().numpy(), kv_cache.double().numpy(), slots)
    cpu.write_kv(k, v, kv_cache, torch.from_numpy(slots))
    torch.testing.assert_close(kv_cache.double(), torch.from_numpy(expected), rtol=0, atol=0, equal_nan=True)


def test_nothing_to_write(cpu: CpuBackend) -> None:
    kv_cache = torch.zeros(kv_cache_shape(2, 1, 16, 64), dtype=BF16)
    for slots in ([], [-1], [-1, -1]):
        k = torch.ones(len(slots), 1, 64)
        cpu.write_kv(k, k, kv_cache, torch.tensor(slots, dtype=torch.int64))
    assert not kv_cache.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_cache_dtypes_that_are_refused(cpu: CpuBackend, dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedError, match=f"K/V dtype is {dtype}; .* one of torch.bfloat16, torch.int8"):
        cpu.check_supported(64, 16, dtype)
    cpu.check_supported(64, 16, torch.int8)


@pytest.mark.parametrize("head_dim", [0, 16, 80, 288])
def test_head_dims_that_are_refused(cpu: CpuBackend, head_dim: int) -> None:
    with pytest.raises(UnsupportedError, match=f"head_dim is {head_dim}; .* multiple of 32 up to 256"):
        cpu.check_supported(head_dim, 16, BF16)
    cpu.check_supported(head_dim // 32 * 32 % 256 + 32, 16, BF16)


# int8 K/V


def quantised(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of [..., head_dim]."""
    scales = numbers.abs().amax(dim=-1) / 127
    return (numbers / scales[..., None]).round(), scales


def test_int8_write_is_the_nearest_code(cpu: CpuBackend, rng: np.random.Generator) -> None:
    k = torch.from_numpy(rng.standard_normal((5, 2, 64))).float()
    v = 100 * torch.from_numpy(rng.standard_normal((5, 2, 64))).float()
    v[0] = 0.0
    kv_cache = torch.full(kv_cache_shape(2, 2, 16, 64), 7, dtype=torch.int8)
    scales = torch.full(kv_cache.shape[:4], torch.nan)
    cpu.write_kv(k, v, kv_cache, torch.tensor([3, -1, 31, 0, 16]), scales)
    for token, slot in ((0, 3), (2, 31), (3, 0), (4, 16)):
        block, offset = divmod(slot, 16)
        for which, heads in ((0, k), (1, v)):
            stored = kv_cache[block, which, :, offset] * scales[block, which, :, offset, None]
            error = (stored - heads[token]).abs().amax(dim=-1)
            assert (error <= heads[token].abs().amax(dim=-1) * (0.5001 / 127)).all()
    untouched = torch.ones(2, 16, dtype=torch.bool)
    untouched[[0, 0, 1, 1], [0, 3, 0, 15]] = False
    assert (kv_cache.permute(0, 3, 1, 2, 4)[untouched] == 7).all()
    assert scales.permute(0, 3, 1, 2)[untouched].isnan().all()


def test_a_head_of_nan_stays_one(cpu: CpuBackend) -> None:
    """Codes are always numbers, so it is the scale that shows it."""
    kv_cache = torch.zeros(kv_cache_shape(1, 1, 16, 64), dtype=torch.int8)
    scales = torch.zeros(kv_cache.shape[:4])
    cpu.write_kv(torch.full((1, 1, 64), torch.nan), torch.ones(1, 1, 64), kv_cache, torch.tensor([5]), scales)
    assert scales[0, 0, 0].isnan().tolist() == [slot == 5 for slot in range(16)]
    assert not scales[0, 1].isnan().any()


@pytest.mark.parametrize("shape", [Shape(), Shape(window=21, softcap=2.0, block_size=4), Shape(head_dim=96)], ids=str)
def test_int8_attention(cpu: CpuBackend, threads: int, rng: np.random.Generator, shape: Shape) -> None:
    case = make_case(rng, dataclasses.replace(shape, dtype=BF16), decode=[40, 0, 3, 300], chunks=[(0, 17), (120, 33)])
    codes, scales = quantised(case.kv_cache.float())
    expected = attend(
        case.q.double().numpy(),
        (codes * scales[..., None]).double().numpy(),
        case.tables.numpy(),
        case.step.rows,
        case.step.context_lens,
        case.step.query_start,
        scale=case.scale,
        window=shape.window,
        softcap=shape.softcap,
    )
    plan = cpu.plan_attention(case.step, case.tables, shape.block_size)
    actual = cpu.paged_attention(
        case.q.float(),
        codes.nan_to_num(nan=-128).to(torch.int8),
        plan,
        scale=case.scale,
        window=shape.window,
        softcap=shape.softcap,
        kv_scales=scales,
    )
    # The scale of V makes every weight one that is rounded, the highest too, which is 1 without it.
    tolerance = {name: 2 * value for name, value in tolerances(cpu).items()}
    torch.testing.assert_close(actual.double(), torch.from_numpy(expected), **tolerance)


# The same bits


@dataclass(frozen=True)
class Prompt:
    """One request's tokens, and a pool of NaN for them and others."""

    shape: Shape
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor

    @property
    def length(self) -> int:
        return len(self.q)


def make_prompt(rng: np.random.Generator, shape: Shape, length: int) -> Prompt:
    def random(heads: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal((length, heads, shape.head_dim))).to(BF16)

    num_blocks = -(-length // shape.block_size)
    table = torch.from_numpy(rng.permutation(num_blocks + 3)[:num_blocks].astype(np.int32))
    kv = shape.num_kv_heads
    return Prompt(shape, random(kv * shape.group), random(kv), random(kv), table)


def run(cpu: CpuBackend, prompts: Sequence[Prompt], steps: Sequence[Sequence[tuple[int, int]]]) -> list[torch.Tensor]:
    """What the tokens of each prompt get, over steps of (first token, number of tokens) of each prompt.

    Slots are NaN until their step writes them.
    """
    shape = prompts[0].shape
    starts = np.cumsum([0] + [len(prompt.table) + 3 for prompt in prompts])
    pool = KvPool(
        1,
        kv_cache_shape(int(starts[-1]), shape.num_kv_heads, shape.block_size, shape.head_dim),
        shape.dtype,
        torch.device("cpu"),
    )
    pool.fill(range(starts[-1]), torch.nan)
    kv_cache, kv_scales = pool.caches[0], pool.scales[0] if pool.scales else None
    tables = torch.full((len(prompts), max(len(prompt.table) for prompt in prompts)), -1, dtype=torch.int32)
    for row, prompt in enumerate(prompts):
        tables[row, : len(prompt.table)] = prompt.table + starts[row]
    results = [torch.full_like(prompt.q, torch.nan) for prompt in prompts]
    for step in steps:
        parts = [(row, begin, begin + count) for row, (begin, count) in enumerate(step) if count]
        for row, begin, end in parts:
            positions = torch.arange(begin, end)
            slots = tables[row, positions // shape.block_size].long() * shape.block_size + positions % shape.block_size
            cpu.write_kv(prompts[row].k[begin:end], prompts[row].v[begin:end], kv_cache, slots, kv_scales)
        batch = Step(
            rows=np.array([row for row, _, _ in parts], np.int32),
            context_lens=np.array([end for _, _, end in parts], np.int32),
            query_start=np.cumsum([0] + [end - begin for _, begin, end in parts]).astype(np.int32),
            num_decode=0,
        )
        plan = cpu.plan_attention(batch, tables, shape.block_size)
        q = torch.cat([prompts[row].q[begin:end] for row, begin, end in parts])
        out = cpu.paged_attention(
            q,
            kv_cache,
            plan,
            scale=shape.head_dim**-0.5,
            window=shape.window,
            softcap=shape.softcap,
            kv_scales=kv_scales,
        )
        for (row, begin, end), part in zip(parts, out.split([end - begin for _, begin, end in parts]), strict=True):
            results[row][begin:end] = part
    return results


def in_chunks(length: int, size: int) -> list[list[tuple[int, int]]]:
    return [[(begin, min(size, length - begin))] for begin in range(0, length, size)]


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert not expected.isnan().any()
    assert torch.equal(actual.view(torch.int16), expected.view(torch.int16))


BIT_SHAPES = [
    Shape(dtype=BF16),
    Shape(group=1, num_kv_heads=1, head_dim=96, block_size=4, dtype=BF16, window=70),
    Shape(group=5, num_kv_heads=1, head_dim=32, block_size=64, dtype=BF16, softcap=3.0),
    Shape(group=2, num_kv_heads=2, head_dim=128, block_size=1, dtype=BF16, window=200),
    Shape(dtype=torch.int8),
    Shape(group=2, num_kv_heads=1, head_dim=96, block_size=4, dtype=torch.int8, window=150),
]


@pytest.mark.parametrize("shape", BIT_SHAPES, ids=str)
def test_chunks_do_not_change_bits(cpu: CpuBackend, rng: np.random.Generator, shape: Shape) -> None:
    prompt = make_prompt(rng, shape, 330)
    (whole,) = run(cpu, [prompt], in_chunks(prompt.length, prompt.length))
    for size in (1, 7, 32, 128, 200):
        (chunked,) = run(cpu, [prompt], in_chunks(prompt.length, size))
        assert_same_bits(chunked, whole)


@pytest.mark.parametrize("shape", BIT_SHAPES, ids=str)
def test_threads_and_neighbours_do_not_change_bits(cpu: CpuBackend, rng: np.random.Generator, shape: Shape) -> None:
    lengths = (700, 130, 1, 260, 64, 513)
    prompts = [make_prompt(rng, shape, length) for length in lengths]
    alone = [run(cpu, [prompt], in_chunks(prompt.length, prompt.length))[0] for prompt in prompts]
    for threads, size in itertools.product((1, 2, 5), (1, 90, 700)):
        torch.set_num_threads(threads)
        # Each prompt's last `size` tokens together, after the others.
        begins = [max(0, length - size) for length in lengths]
        firsts = [(0, begin) for begin in begins]
        lasts = [(begin, length - begin) for begin, length in zip(begins, lengths, strict=True)]
        steps = [firsts, lasts] if any(begins) else [lasts]
        for actual, expected in zip(run(cpu, prompts, steps), alone, strict=True):
            assert_same_bits(actual, expected)


@pytest.mark.parametrize("shape", BIT_SHAPES, ids=str)
def test_a_split_context_does_not_change_bits(cpu: CpuBackend, rng: np.random.Generator, shape: Shape) -> None:
    prompt = make_prompt(rng, shape, 1500)
    last = [[(0, 1470)], [(1470, 29)], [(1499, 1)]]
    (unsplit,) = run(cpu, [prompt], last)
    for threads in (2, 3, 8):
        torch.set_num_threads(threads)
        (split,) = run(cpu, [prompt], last)
        assert_same_bits(split, unsplit)
