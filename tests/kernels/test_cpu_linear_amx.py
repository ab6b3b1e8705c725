"""The linear of AMX: emulated, so that processors without it can run what is made of its tiles, and compiled for it.

Processors that have AMX run the real one in test_cpu_engine_linear.py.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pageframe.kernels.cpu import build
from pageframe.kernels.cpu.build import COMPILE_FLAGS
from pageframe.kernels.cpu.isa import INSTRUCTION_SETS, BuildError, InstructionSet, processor_flags
from pageframe.kernels.cpu.linear import LinearMaps, PackedWeight
from pageframe.kernels.cpu.packing import pack_bf16

from .test_cpu_engine_linear import EMULATED_BF16, FORMATS, SHAPES, library_of, make_rows, make_weight

ENGINE = Path(build.__file__).parent / "engine.cpp"
AMX = next(isa for isa in INSTRUCTION_SETS if isa.name == "amx")
EMULATED = InstructionSet(
    "emulated amx",
    EMULATED_BF16.needs,
    (*EMULATED_BF16.compiler_flags, "-DPAGEFRAME_ISA_AMX=1", "-DPAGEFRAME_EMULATE_AMX=1"),
    EMULATED_BF16.probe,
)
# Less than a tile of rows, whole ones, and what remains; strips unpacked as they are used, and before.
ROWS = (0, 1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 65, 300)


@pytest.fixture(scope="module")
def maps() -> LinearMaps:
    try:
        processor = processor_flags()
    except BuildError as error:
        pytest.skip(str(error))
    if not processor.issuperset(EMULATED.needs):
        pytest.skip("what surrounds the emulated tiles needs AVX512")
    return LinearMaps(library_of(EMULATED).functions)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's number of threads, until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def assert_is_product(given: torch.Tensor, x: torch.Tensor, values: torch.Tensor, bias: torch.Tensor) -> None:
    """x @ values.T + bias in float64, within a few roundings of float32 for each number that is added up."""
    read = x.bfloat16().double()
    allowed = 1e-6 * (read.abs() @ values.abs().T + read.abs().sum(1, keepdim=True) + bias.abs())
    assert ((given.double() - (read @ values.T + bias)).abs() <= allowed).all(), len(x)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_linear_is_the_product_of_its_values_rounded_to_bfloat16(
    maps: LinearMaps, weight_format: str, shape: tuple[int, int]
) -> None:
    weight, stored, bias = make_weight(weight_format, *shape)
    values = stored.float().bfloat16().double()
    for rows in ROWS:
        x = make_rows(rows, shape[1])
        assert_is_product(maps.linear(x, weight), x, values, bias)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_unpacked_values_are_the_stored_ones_rounded_once(maps: LinearMaps, weight_format: str) -> None:
    weight, stored, _ = make_weight(weight_format, 40, 96, bias=False)
    for rows in (1, 96):  # a row of the identity matrix picks an input
        inputs = torch.eye(96)[:rows]
        assert torch.equal(maps.linear(inputs, weight), stored.T[:rows].float().bfloat16().float())


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_row_is_the_same_bits_in_any_batch_and_on_any_number_of_threads(
    maps: LinearMaps, threads: Callable[[int], None], weight_format: str
) -> None:
    weight, _, _ = make_weight(weight_format, 210, 288)
    x = make_rows(300, 288)
    threads(1)
    alone = torch.cat([maps.linear(row[None], weight) for row in x])
    for count in (1, 2):
        threads(count)
        assert torch.equal(maps.linear(x, weight), alone)
        for rows in range(1, 71):
            assert torch.equal(maps.linear(x[:rows], weight), alone[:rows]), (count, rows)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_blocks_of_rows_that_fill_the_cache_change_no_bit(maps: LinearMaps, weight_format: str) -> None:
    weight, _, _ = make_weight(weight_format, 40, 16416)  # a block is the least, 32 rows
    for rows in (33, 65, 71):
        x = make_rows(rows, 16416)
        some = [0, 15, 16, 32, rows - 1]
        assert torch.equal(maps.linear(x, weight)[some], maps.linear(x[some], weight))


def test_without_a_bias_sums_start_from_zero(maps: LinearMaps) -> None:
    for weight_format in FORMATS:
        weight, _, _ = make_weight(weight_format, 20, 64, bias=False)
        assert torch.equal(maps.linear(torch.zeros(3, 64), weight), torch.zeros(3, 20))


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_gated_linear_multiplies_the_second_half_by_the_function_of_the_first(
    maps: LinearMaps, weight_format: str
) -> None:
    plain, _, _ = make_weight(weight_format, 160, 64, bias=False)
    interleaved, _, _ = make_weight(weight_format, 160, 64, bias=False, interleaved=True)
    for rows in (1, 20, 40):
        x = make_rows(rows, 64)
        gate, up = maps.linear(x, plain).double().chunk(2, dim=1)
        expected = torch.nn.functional.silu(gate) * up
        error = (maps.gated(x, interleaved).double() - expected).abs()
        assert (error <= 2**-8 * expected.abs() + 4e-7 * (gate * up).abs()).all(), rows


@pytest.mark.parametrize("weight_format", FORMATS)
def test_arg_max_finds_the_largest_output_of_each_row(
    maps: LinearMaps, threads: Callable[[int], None], weight_format: str
) -> None:
    weight, _, _ = make_weight(weight_format, 1003, 96)
    x = make_rows(67, 96)
    values, columns = maps.linear(x, weight).max(dim=1)
    for count in (1, 2):
        threads(count)
        for rows in (0, 1, 17, 67):
            found = maps.arg_max(x[:rows], weight)
            assert torch.equal(found[0], columns[:rows])
            assert torch.equal(found[1], values[:rows])


def test_arg_max_gives_the_lowest_of_equals(maps: LinearMaps) -> None:
    bias = torch.zeros(300)
    bias[[17, 250]] = 1.0
    columns, _ = maps.arg_max(torch.ones(40, 32), PackedWeight(pack_bf16(torch.zeros(300, 32).bfloat16()), bias))
    assert columns.tolist() == [17] * 40


def test_the_engine_compiles_to_tile_instructions(tmp_path: Path) -> None:
    compiler, disassembler = shutil.which("g++"), shutil.which("objdump")
    if compiler is None or disassembler is None:
        pytest.skip("no g++ or no objdump")
    probe, compiled = tmp_path / "probe.cpp", tmp_path / "engine.o"
    probe.write_text(f'int main() {{ asm volatile("{AMX.probe}"); }}')
    flags = [*COMPILE_FLAGS, *AMX.compiler_flags]
    known = subprocess.run([compiler, *flags, "-c", probe, "-o", tmp_path / "probe.o"], capture_output=True, text=True)
    if known.returncode != 0:
        pytest.skip(f"{compiler} does not know AMX: {known.stderr.splitlines()[0]}")
    subprocess.run([compiler, *flags, "-c", ENGINE, "-o", compiled], check=True)
    listing = subprocess.run([disassembler, "-d", compiled], check=True, capture_output=True, text=True).stdout
    for instruction in ("ldtilecfg", "tileloadd", "tdpbf16ps", "tilestored", "tilerelease"):
        assert instruction in listing
