"""Finds the attention kernels' launch settings on the GPU that is here, and writes its table for tables.py.

    python benchmarks/gpu.py --part tune            on a machine where nothing is installed
    python -m pageframe.benchmarks.tune_triton      where Pageframe is

Every setting of a grid is timed on the cases of a shape, over as many sets of requests in turn that none is found in a
cache of the device, as in a model of many layers; the one with the least mean of logarithms of times is taken. One that
does not compile or launch there is left out, and so is one that does not for other models to which the entry applies:
with other groups, with a window and a cap. A shape's entry replaces the table's older one for it, so that a run which
is cut has not been for nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.errors import TritonError

from pageframe.benchmarks.gpu_parts.layer import Layer, kv_bytes
from pageframe.benchmarks.gpu_parts.results import NOT_MEASURED, Results, Row, format_table, measuring, read_rows
from pageframe.benchmarks.gpu_parts.sizes import cache_dtype
from pageframe.benchmarks.gpu_parts.timing import Work, num_sets, timer_for
from pageframe.kernels.triton import tables
from pageframe.kernels.triton.backend import TritonBackend
from pageframe.kernels.triton.tables import Settings

PART = "tune"
NUM_KV_HEADS = 8
BLOCK_SIZE = 16
#: The ends of what models have. An entry serves all groups that are nearest to its own.
OTHER_GROUPS = (1, 16)
SMALL_CONTEXT = 8
#: The compiler, its assembler or the driver refuses a setting.
REFUSALS = (RuntimeError, TritonError)


@dataclass(frozen=True, slots=True)
class Shape:
    """What settings are sought for.

    Args:
        cache: "int8", "fp8", or "" for bf16.
    """

    kernel: str
    head_dim: int
    group: int
    cache: str = ""

    def __str__(self) -> str:
        return f"{self.kernel} {self.head_dim}, group {self.group}, {self.cache or 'bf16'}"


@dataclass(frozen=True, slots=True)
class Grid:
    """All that is tried.

    Args:
        cases: by kernel: (contexts, new tokens of each request).
    """

    shapes: tuple[Shape, ...]
    settings: tuple[Settings, ...]
    cases: dict[str, tuple[tuple[tuple[int, ...], int], ...]]


_K = 1024
GRID = Grid(
    shapes=tuple(
        Shape(kernel, head_dim, group, cache)
        for head_dim, group, cache in ((128, 4, ""), (128, 4, "int8"), (128, 4, "fp8"), (64, 4, ""), (128, 8, ""))
        for kernel in tables.KERNELS
    ),
    settings=tuple(itertools.starmap(Settings, itertools.product((32, 64, 128), (4, 8), (2, 3, 4)))),
    cases={
        "attend_splits": (((32 * _K,), 1), ((4 * _K,) * 64, 1), ((_K,) * 16, 1)),
        "attend_prefill": (((2 * _K,) * 4, 2 * _K), ((8 * _K,), 512)),
    },
)
TOY_GRID = Grid(
    shapes=(Shape("attend_splits", 16, 2), Shape("attend_prefill", 16, 2)),
    settings=(Settings(16, 4, 2), Settings(32, 4, 2)),
    cases={"attend_splits": (((20,), 1),), "attend_prefill": (((12,), 12),)},
)


def run(results: Results, device: torch.device, path: Path | None = None) -> None:
    """A row for each shape; the table is written after each.

    Args:
        path: of the table; the package's own for this device by default.
    """
    name, _ = tables.describe(device)
    if path is None:
        path = Path(tables.__file__).parent / tables.FOLDER / f"{tables.table_name(name)}.json"
    grid = GRID if device.type == "cuda" else TOY_GRID
    for shape in grid.shapes:
        dtype = cache_dtype(shape.cache, device)
        if dtype is None:
            results.add(Row(PART, str(shape), verdict=NOT_MEASURED, note=f"this device has no {shape.cache}"))
            continue
        with measuring(results, PART, str(shape)):
            found = dict(_times(shape, dtype, grid, device))
            in_use = found.get(None)
            times = {tried: seconds for tried, seconds in found.items() if tried is not None}
            if not times:
                raise RuntimeError(f"none of {len(grid.settings)} settings ran here")
            best = _best(shape, dtype, times, device)
            write_entry(path, name, shape, dtype, best)
            note = f"{len(times)} of {len(grid.settings)} settings ran; {times[best] * 1e6:,.1f} us; in {path}"
            value = f"tile {best.tile}, {best.num_warps} warps, {best.num_stages} stages"
            numbers = {} if in_use is None else {"of_default": times[best] / in_use}
            share = "".join(f"{gain:.0%}" for gain in numbers.values())
            results.add(Row(PART, str(shape), value, share, note=note, numbers=numbers))


def _best(shape: Shape, dtype: torch.dtype, times: dict[Settings, float], device: torch.device) -> Settings:
    """The fastest of these settings that all models to which the entry applies can have.

    Raises:
        RuntimeError: there is none.
    """
    for tried in sorted(times, key=lambda tried: times[tried]):
        if _serves_all(shape, dtype, tried, device):
            return tried
    raise RuntimeError(f"none of {len(times)} settings runs with other groups, a window and a cap")


def _serves_all(shape: Shape, dtype: torch.dtype, tried: Settings, device: torch.device) -> bool:
    """Whether the kernel compiles and launches so with every group and mask: on a few tokens, for that decides it."""
    new_tokens = 1 if shape.kernel == "attend_splits" else SMALL_CONTEXT
    try:
        with tables.overridden(shape.kernel, tried):
            for group in sorted({*OTHER_GROUPS, shape.group}):
                small = dataclasses.replace(shape, group=group)
                layer = _layer(small, dtype, (SMALL_CONTEXT,), new_tokens, device)
                layer.attend(0)
                layer.attend(0, window=SMALL_CONTEXT // 2, softcap=30.0)
            if device.type == "cuda":
                torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        raise
    except REFUSALS:
        return False
    return True


def _times(
    shape: Shape, dtype: torch.dtype, grid: Grid, device: torch.device
) -> Iterator[tuple[Settings | None, float]]:
    """Of the settings in use (None) and of those of the grid, as far as this device compiles and launches them: the
    geometric mean of the cases' seconds."""
    timer = timer_for(device)
    layers = [
        _layer(
            shape,
            dtype,
            contexts,
            new_tokens,
            device,
            sets=num_sets(kv_bytes(contexts, NUM_KV_HEADS, shape.head_dim, dtype), device),
        )
        for contexts, new_tokens in grid.cases[shape.kernel]
    ]
    for tried in (None, *grid.settings):
        with nullcontext() if tried is None else tables.overridden(shape.kernel, tried):
            try:
                seconds = [timer.seconds(_works(layer)) for layer in layers]
            except torch.OutOfMemoryError:
                raise
            except REFUSALS:
                continue
        yield tried, math.exp(sum(map(math.log, seconds)) / len(seconds))


def _layer(
    shape: Shape, dtype: torch.dtype, contexts: tuple[int, ...], new_tokens: int, device: torch.device, sets: int = 1
) -> Layer:
    return Layer(
        TritonBackend(device),
        contexts,
        num_sets=sets,
        new_tokens=new_tokens,
        num_heads=NUM_KV_HEADS * shape.group,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=shape.head_dim,
        block_size=BLOCK_SIZE,
        dtype=torch.bfloat16,
        cache_dtype=dtype,
        device=device,
    )


def _works(layer: Layer) -> list[Work]:
    """Attention of each of a layer's sets."""
    return [partial(layer.attend, index) for index in range(len(layer.steps))]


def write_entry(path: Path, device: str, shape: Shape, dtype: torch.dtype, best: Settings) -> None:
    """Put a shape's settings into the table at `path`, which is made where there is none."""
    table: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"entries": []}
    found = {
        "kernel": shape.kernel,
        "head_dims": [shape.head_dim],
        "cache_dtypes": [str(dtype).removeprefix("torch.")],
        "group": shape.group,
    }
    others = [entry for entry in table["entries"] if any(entry[key] != found[key] for key in found)]
    settings = {"tile": best.tile, "num_warps": best.num_warps, "num_stages": best.num_stages}
    measured = f"{datetime.date.today().isoformat()}, torch {torch.__version__}, triton {triton.__version__}"
    lines = ",\n".join(f"    {json.dumps(entry)}" for entry in [*others, found | settings])
    head = f'  "device": {json.dumps(device)},\n  "measured": {json.dumps(measured)},\n'
    path.write_text(f'{{\n{head}  "entries": [\n{lines}\n  ]\n}}\n')


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the launch settings' table of this machine's GPU.")
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="default: this device's own among Pageframe's tables"
    )
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("pageframe: no GPU is here; settings can't be timed", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        run(Results(rows), torch.device("cuda"), args.table)
        print(format_table(read_rows(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
