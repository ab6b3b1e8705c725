"""The compiled linear over weights of every kind: against float64, and its bits for any rows and threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from pageframe.kernels.cpu import build
from pageframe.kernels.cpu.isa import INSTRUCTION_SETS, InstructionSet, choose, processor_flags
from pageframe.kernels.cpu.linear import LinearMaps, PackedWeight, RowNorm
from pageframe.kernels.cpu.packing import pack_bf16, pack_blocks

ENGINE = Path(build.__file__).parent / "engine.cpp"
FORMATS = ("bf16", "Q4_0", "Q4_1", "Q8_0")
# (n, k): whole pieces of work, one output, parts of a strip, one strip, many groups.
SHAPES = ((192, 96), (1, 32), (5, 64), (83, 576), (48, 1536), (210, 2016))
ROWS = (0, 1, 2, 3, 5, 6, 7, 8, 9, 13, 31, 64, 300)


#: What a processor with AVX512 can run of the set that needs bfloat16 too, whose instructions others stand in for.
_WITH_BF16 = next(isa for isa in INSTRUCTION_SETS if isa.name == "avx512")
EMULATED_BF16 = InstructionSet(
    "emulated avx512",
    tuple(flag for flag in _WITH_BF16.needs if flag != "avx512_bf16"),
    tuple(flag for flag in _WITH_BF16.compiler_flags if flag != "-mavx512bf16"),
    "vpaddd %zmm0, %zmm1, %zmm2",
)


def instruction_sets() -> list[InstructionSet | str]:
    """Of this processor, emulated or not; why it has none, where that is so."""
    try:
        found = list(choose(processor_flags(), ""))
    except build.BuildError as error:
        return [str(error)]
    names = [isa.name for isa in found]
    emulates = "avx512" not in names and processor_flags().issuperset(EMULATED_BF16.needs)
    return [*([EMULATED_BF16] if emulates else []), *found]


def library_of(isa: InstructionSet | str) -> build.Library:
    """What is compiled for this set; skips where there is no compiler, not where one finds a fault."""
    if isinstance(isa, str):
        pytest.skip(isa)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "choose", lambda *_: (isa,))
        try:
            return build.Builder(ENGINE).load()
        except build.CompilerError:
            raise
        except build.BuildError as error:
            pytest.skip(str(error))


@pytest.fixture(scope="module", params=instruction_sets(), ids=lambda isa: getattr(isa, "name", "none"))
def library(request: pytest.FixtureRequest) -> build.Library:
    """Each instruction set's in turn."""
    return library_of(request.param)


@pytest.fixture(scope="module")
def isa(library: build.Library) -> str:
    """The library's instruction set; one that is emulated has the name of the real one."""
    return library.isa.removeprefix("emulated ")


@pytest.fixture(scope="module")
def maps(library: build.Library) -> LinearMaps:
    return LinearMaps(library.functions)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's number of threads, until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def make_weight(
    weight_format: str, n: int, k: int, *, bias: bool = True, interleaved: bool = False, isa: str = ""
) -> tuple[PackedWeight, torch.Tensor, torch.Tensor]:
    """A packed weight, and in float64 the values that it multiplies by [n, k] and its bias [n]."""
    random = np.random.default_rng(n * k)
    values = random.standard_normal((n, k), dtype=np.float32)
    added = torch.from_numpy(random.standard_normal(n, dtype=np.float32)) if bias else None
    if weight_format == "bf16":
        stored = torch.from_numpy(values).bfloat16()
        packed = pack_bf16(stored, interleaved=interleaved)
    else:
        kind = GGMLQuantizationType[weight_format]
        data = quantize(values, kind)
        packed = pack_blocks(weight_format, torch.from_numpy(data), interleaved=interleaved)
        stored = torch.from_numpy(dequantize(data, kind))
        if isa == "amx":  # which unpacks what it multiplies
            stored = stored.bfloat16()
    return PackedWeight(packed, added), stored.double(), torch.zeros(n).double() if added is None else added.double()


def make_rows(rows: int, k: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(rows + k).standard_normal((rows, k), dtype=np.float32))


def as_read(x: torch.Tensor, isa: str, weight_format: str) -> torch.Tensor:
    """Activations as they are multiplied, in float64."""
    if isa == "avx512_vnni" and weight_format != "bf16":
        groups = x.view(len(x), x.shape[1] // 32, 32)
        largest = groups.abs().amax(2, keepdim=True)
        codes = (groups * (torch.full_like(largest, 32767) / largest)).round()
        return (codes.double() * (largest / 32767).double()).view(x.shape)
    return x.double() if isa in ("avx2", "avx512_vnni") else x.bfloat16().double()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_linear_is_the_product_of_its_stored_values(
    maps: LinearMaps, isa: str, weight_format: str, shape: tuple[int, int]
) -> None:
    n, k = shape
    weight, values, bias = make_weight(weight_format, n, k, isa=isa)
    for rows in ROWS:
        x = make_rows(rows, k)
        read = as_read(x, isa, weight_format)
        expected = read @ values.T + bias
        # A few roundings of float32 for each of the numbers that are added up.
        allowed = 1e-6 * (read.abs() @ values.abs().T + read.abs().sum(1, keepdim=True) + bias.abs())
        error = (maps.linear(x, weight).double() - expected).abs()
        assert (error <= allowed).all(), rows


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_row_is_the_same_bits_in_any_batch_and_on_any_number_of_threads(
    maps: LinearMaps, threads: Callable[[int], None], weight_format: str
) -> None:
    weight, _, _ = make_weight(weight_format, 210, 544)
    x = make_rows(300, 544)
    threads(1)
    alone = torch.cat([maps.linear(row[None], weight) for row in x])
    for count in (1, 2, 3):
        threads(count)
        assert torch.equal(maps.linear(x, weight), alone)
        for rows in range(1, 71):
            assert torch.equal(maps.linear(x[:rows], weight), alone[:rows]), (count, rows)


@pytest.mark.parametrize("k", [4096, 9216])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_block_of_rows_that_fills_the_cache_changes_no_bit(maps: LinearMaps, weight_format: str, k: int) -> None:
    weight, _, _ = make_weight(weight_format, 40, k)
    x = make_rows(130, k)
    assert torch.equal(maps.linear(x, weight)[[0, 63, 129]], maps.linear(x[[0, 63, 129]], weight))


def test_without_a_bias_sums_start_from_zero(maps: LinearMaps) -> None:
    for weight_format in FORMATS:
        weight, _, _ = make_weight(weight_format, 20, 64, bias=False)
        assert torch.equal(maps.linear(torch.zeros(3, 64), weight), torch.zeros(3, 20))


def normed(x: torch.Tensor, norm: RowNorm) -> torch.Tensor:
    """Its definition, in float64."""
    wide = x.double()
    return wide / (wide.square().mean(1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_norm_before_a_linear(maps: LinearMaps, isa: str, threads: Callable[[int], None], weight_format: str) -> None:
    """Whatever the number of rows and threads; and the largest of these outputs is what the arg-max finds."""
    weight, values, bias = make_weight(weight_format, 83, 576, isa=isa)
    norm = RowNorm(torch.linspace(-1, 2, 576), eps=1e-2)
    x = 1e-1 * make_rows(40, 576)
    read = normed(x, norm)
    # Where activations are rounded to bfloat16, the last bit of what is rounded decides: so half of its step more.
    step = 2**-15 if isa in ("avx2", "avx512_vnni") else 2**-8
    allowed = step * (read.abs() @ values.abs().T + bias.abs())
    alone = torch.cat([maps.linear(row[None], weight, norm) for row in x])
    assert ((alone.double() - read @ values.T - bias).abs() <= allowed).all()
    for count in (1, 2, 3):
        threads(count)
        assert torch.equal(maps.linear(x, weight, norm), alone)
        columns, largest = maps.arg_max(x, weight, norm)
        assert torch.equal(largest, alone.max(dim=1).values)
        assert torch.equal(columns, alone.argmax(dim=1))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weight_format", FORMATS)
def test_rows_are_the_stored_values(maps: LinearMaps, weight_format: str, shape: tuple[int, int]) -> None:
    """To the bit, in any order and number."""
    weight, values, _ = make_weight(weight_format, *shape)
    for count in (0, 1, 3, 100):
        ids = torch.from_numpy(np.random.default_rng(count).integers(0, shape[0], count))
        assert torch.equal(maps.rows(ids, weight), values[ids].float())
    for wrong in (-1, shape[0]):
        with pytest.raises(IndexError, match=f"not from 0 to {shape[0] - 1}$"):
            maps.rows(torch.tensor([0, wrong]), weight)


def assert_near(given: torch.Tensor, expected: torch.Tensor, identity: torch.Tensor, isa: str) -> None:
    """Within an activation's rounding, and within few of float32's of what the identity function would give."""
    error = (given.double() - expected).abs()
    relative = 0 if isa in ("avx2", "avx512_vnni") else 2**-8
    assert (error <= relative * expected.abs() + 4e-7 * identity.abs()).all()


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_gated_linear_multiplies_its_halves(maps: LinearMaps, isa: str, weight_format: str) -> None:
    plain, _, _ = make_weight(weight_format, 160, 64, bias=False)
    interleaved, _, _ = make_weight(weight_format, 160, 64, bias=False, interleaved=True)
    for rows in (1, 7, 40):
        x = make_rows(rows, 64)
        gate, up = maps.linear(x, plain).double().split(80, dim=1)
        given = maps.gated(x, interleaved)
        assert_near(given, torch.nn.functional.silu(gate) * up, gate * up, isa)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_arg_max_finds_the_largest_output_of_each_row(
    maps: LinearMaps, threads: Callable[[int], None], weight_format: str
) -> None:
    weight, _, _ = make_weight(weight_format, 1003, 96)
    x = make_rows(67, 96)
    values, columns = maps.linear(x, weight).max(dim=1)
    for count in (1, 2):
        threads(count)
        for rows in (0, 1, 9, 67):
            found = maps.arg_max(x[:rows], weight)
            assert torch.equal(found[0], columns[:rows])
            assert torch.equal(found[1], values[:rows])


def test_arg_max_gives_the_lowest_of_equals_and_takes_nan_for_the_least(maps: LinearMaps) -> None:
    bias = torch.zeros(300)
    bias[[17, 250]] = 1.0
    bias[3] = torch.nan
    weight = PackedWeight(pack_bf16(torch.zeros(300, 32).bfloat16()), bias)
    columns, values = maps.arg_max(torch.ones(5, 32), weight)
    assert columns.tolist() == [17] * 5
    assert values.tolist() == [1.0] * 5
    columns, values = maps.arg_max(torch.full((1, 32), torch.nan), weight)
    assert columns.tolist() == [0]
    assert values.tolist() == [-torch.inf]


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_overflowed_spoils_its_own_outputs_and_no_other_rows(
    maps: LinearMaps, weight_format: str, number: float
) -> None:
    weight, _, _ = make_weight(weight_format, 40, 96)
    x = make_rows(5, 96)
    clean = maps.linear(x, weight)
    x[2, 50] = number
    spoiled = maps.linear(x, weight)
    assert not spoiled[2].isfinite().any()
    others = torch.tensor([0, 1, 3, 4])
    assert torch.equal(spoiled[others], clean[others])


@pytest.mark.parametrize("weight_format", FORMATS)
def test_rows_of_any_size_are_multiplied(maps: LinearMaps, weight_format: str) -> None:
    weight, _, _ = make_weight(weight_format, 40, 96, bias=False)
    x = make_rows(5, 96)
    for size in (2.0**-66, 2.0**66):
        assert torch.equal(maps.linear(x * size, weight), maps.linear(x, weight) * size)


def test_what_a_linear_cannot_read_is_refused(maps: LinearMaps) -> None:
    values = pack_bf16(torch.zeros(16, 32).bfloat16())
    weight = PackedWeight(values)
    with pytest.raises(ValueError, match=r"x must be contiguous float32 \[2, 32\]"):
        maps.linear(torch.zeros(2, 64), weight)
    with pytest.raises(ValueError, match="x must be contiguous float32"):
        maps.arg_max(torch.zeros(32, 2).T, weight)
    short = RowNorm(torch.ones(31), 1e-5)
    for multiply in (maps.linear, maps.arg_max):
        with pytest.raises(ValueError, match="the norm is of 31 numbers, the weight has 32 inputs"):
            multiply(torch.zeros(2, 32), weight, short)
    with pytest.raises(ValueError, match="weight must be contiguous float32"):
        RowNorm(torch.ones(32, dtype=torch.float64), 1e-5)
    with pytest.raises(ValueError, match=r"bias must be contiguous float32 \[16\]"):
        PackedWeight(values, torch.zeros(17))
