"""Every Triton kernel compiled for GPUs that need not be there: what its machine code takes and does.

    python -m pageframe.benchmarks.experiments.compiled_kernels [--quick] [--target sm_90 …] [--json FILE]

One line for each (kernel, variant, target): registers and spilled bytes of a thread, shared memory of a program, the
instruction of its products, and loads from global memory that are 16 bytes wide, and narrower ones. Exits with 1 where
registers spill beyond what is stated here, or a program asks for more shared memory than the target has.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from rich.console import Console
from rich.table import Table

from pageframe.benchmarks.experiments.kernel_calls import CALLS, QUICK_SHAPES, Shape, all_shapes
from pageframe.benchmarks.experiments.kernel_code import Code, read_code
from pageframe.benchmarks.experiments.kernel_launches import TARGETS, Launch, Target, compiled_launches
from pageframe.kernels.triton import tables

#: Of (kernel, target): bytes a thread that may spill, and why. Products of compute capability 8 and 12 take all their
#: operands from registers: with heads of 256 the sums of 128 rows leave too few for them, and with codes, which are
#: widened there, also heads of 128. Decode rows over codes lack one register or two. A vocabulary past 131,072 has more
#: than 128 parts, whose winners a program compares at once: four registers too many.
STATED_SPILLS = {
    ("attend_prefill_kernel", "sm_80"): 400,
    ("attend_prefill_kernel", "sm_86"): 400,
    ("attend_prefill_kernel", "sm_89"): 400,
    ("attend_prefill_kernel", "sm_120"): 480,
    ("attend_splits_kernel", "sm_86"): 8,
    ("attend_splits_kernel", "sm_89"): 8,
    ("attend_splits_kernel", "sm_100"): 8,
    **{("draw_kernel", target): 16 for target in ("sm_80", "sm_86", "sm_89", "sm_90")},
}
FP8 = dict.fromkeys(("sm_89", "sm_90", "sm_100", "sm_120"), torch.float8_e4m3fn) | {"gfx942": torch.float8_e4m3fnuz}
#: Of the table, where there is no terminal to ask.
PIPED_WIDTH = 140
COLUMNS = ("kernel", "variant", "target", "regs", "spilled", "shared", "product", "16-byte loads", "narrower")


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel, compiled."""

    kernel: str
    variant: str
    target: str
    code: Code

    @property
    def fault(self) -> str:
        """What is wrong with it; "" for nothing."""
        limit = TARGETS[self.target].shared_limit
        if self.code.shared_bytes > limit:
            return f"{self.code.shared_bytes} bytes of shared memory; {self.target} has {limit}"
        if self.code.spilled_bytes > STATED_SPILLS.get((self.kernel, self.target), 0):
            return f"{self.code.spilled_bytes} bytes of registers are spilled"
        return ""


def compile_all(targets: Iterable[Target], shapes: Sequence[Shape] | None = None) -> Iterator[Row]:
    """Every kernel in every shape for every target; of equal code only the first.

    Args:
        shapes: all there are by default.
    """
    for target in targets:
        seen = set()
        for shape in shapes or all_shapes(FP8.get(target.name)):
            for launch in _launches(target, shape):
                key = (launch.kernel, launch.compiled.hash)
                if key not in seen:
                    seen.add(key)
                    yield Row(launch.kernel, str(shape), target.name, read_code(launch.compiled))


def _launches(target: Target, shape: Shape) -> list[Launch]:
    with ExitStack() as stack:
        for kernel in tables.KERNELS:
            chosen = tables.lookup(
                target.device,
                target.kind,
                kernel,
                head_dim=shape.head_dim,
                cache_dtype=shape.cache_dtype,
                group=shape.group,
            )
            stack.enter_context(tables.overridden(kernel, chosen))
        launches = stack.enter_context(compiled_launches(target))
        for call in CALLS.values():
            call(shape)
    return launches


def make_table(rows: Sequence[Row]) -> Table:
    """One line a kernel."""
    table = Table(title=f"Triton {triton.__version__}, compiled ahead of time")
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if index < 3 else "right", no_wrap=index != 1)
    for row in rows:
        code = row.code
        numbers = (code.wide_loads, code.narrow_loads)
        style = "red" if row.fault else None
        cells = [row.kernel.removesuffix("_kernel"), row.variant, row.target]
        cells += [str(code.registers), str(code.spilled_bytes), f"{code.shared_bytes:,}", code.product or "-"]
        table.add_row(*cells, *map(str, numbers), style=style)
    return table


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """All rows as JSON."""
    entries = [
        {"kernel": row.kernel, "variant": row.variant, "target": row.target, "fault": row.fault}
        | dataclasses.asdict(row.code)
        | {"wide_bytes": row.code.wide_bytes}
        for row in rows
    ]
    path.write_text(json.dumps({"triton": triton.__version__, "kernels": entries}, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What the compiled Triton kernels take and do; needs no GPU.")
    parser.add_argument("--target", choices=TARGETS, action="append", help="only this one; may be given again")
    parser.add_argument("--quick", action="store_true", help="few variants that together meet every kernel")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows to FILE")
    args = parser.parse_args(argv)
    console = Console(stderr=True)
    if triton.knobs.runtime.interpret:
        console.print("pageframe: TRITON_INTERPRET is set; under the interpreter nothing is compiled", style="red")
        return 2
    targets = [TARGETS[name] for name in args.target or TARGETS]
    rows = []
    with console.status("compiling") as status:
        for row in compile_all(targets, QUICK_SHAPES if args.quick else None):
            rows.append(row)
            status.update(f"compiled {len(rows)}: {row.kernel}, {row.variant}, {row.target}")
    if args.json:
        write_rows(args.json, rows)
    Console(width=None if sys.stdout.isatty() else PIPED_WIDTH).print(make_table(rows))
    faults = [row for row in rows if row.fault]
    for row in faults:
        console.print(f"{row.kernel}, {row.variant}, {row.target}: {row.fault}", style="red", highlight=False)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
