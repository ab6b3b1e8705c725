"""Launch settings of the attention kernels: looked up in tables that a tuner wrote, never searched for at run time.

A device that was tuned has a table of its own in tables_data/ (`benchmarks/tune_triton.py` writes it). Every other
device, and whatever a device's own table lacks, gets the stated default of its kind (`KINDS`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import resources

import torch

#: Kernels that have settings.
KERNELS = ("attend_splits", "attend_prefill")
FOLDER = "tables_data"
#: The default's file for each kind of device: NVIDIA's whose matrix units work by themselves (compute capability 9 and
#: 10), NVIDIA's others, and AMD's, which have less shared memory and wider warps. Without a GPU it is the first's.
KINDS = {"hopper": "default", "ampere": "default_ampere", "amd": "default_amd"}
#: Compute capabilities, major, of the first kind.
_HOPPER = (9, 10)


@dataclass(frozen=True, slots=True)
class Settings:
    """How a kernel is launched.

    Args:
        tile: positions of the context that one matrix product takes.
        num_warps, num_stages: Triton's own: warps of a program, and loads in flight per loop (its software pipeline).
    """

    tile: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a table.

    Args:
        head_dims, cache_dtypes: the shapes it is for; dtypes by torch's name, such as "bfloat16".
        group: query heads per KV head it was tuned with; None: it is for any.
    """

    kernel: str
    head_dims: tuple[int, ...]
    cache_dtypes: tuple[str, ...]
    group: int | None
    settings: Settings


_overrides: dict[str, Settings] = {}


def settings(kernel: str, *, head_dim: int, cache_dtype: torch.dtype, group: int, device: torch.device) -> Settings:
    """What to launch `kernel` (one of KERNELS) with on this device; without a GPU the default."""
    return _overrides.get(kernel) or lookup(
        *describe(device), kernel, head_dim=head_dim, cache_dtype=cache_dtype, group=group
    )


@cache
def describe(device: torch.device) -> tuple[str, str]:
    """What a device's driver calls it, and its kind; "cpu" without a GPU."""
    if device.type != "cuda":
        return "cpu", "hopper"
    if torch.version.hip is not None:
        return torch.cuda.get_device_name(device), "amd"
    major, _ = torch.cuda.get_device_capability(device)
    return torch.cuda.get_device_name(device), "hopper" if major in _HOPPER else "ampere"


@cache
def lookup(name: str, kind: str, kernel: str, *, head_dim: int, cache_dtype: torch.dtype, group: int) -> Settings:
    """The settings for a device by `describe`: of its own table if that has the shape, else of its kind's default.

    Of entries tuned with several groups, the one with the nearest group counts, the smaller of two equally near.
    """
    dtype = str(cache_dtype).removeprefix("torch.")
    for table in (table_name(name), KINDS[kind]):
        fitting = [
            entry
            for entry in read_table(table)
            if entry.kernel == kernel and head_dim in entry.head_dims and dtype in entry.cache_dtypes
        ]
        if fitting:
            return min(fitting, key=lambda entry: _distance(entry.group, group)).settings
    raise AssertionError(f"no default for {kernel} with head_dim {head_dim} and {dtype}")


@contextmanager
def overridden(kernel: str, chosen: Settings) -> Iterator[None]:
    """Launch `kernel` with these settings whatever the tables say: what a tuner tries."""
    assert kernel in KERNELS, f"{kernel} has no settings"
    _overrides[kernel] = chosen
    try:
        yield
    finally:
        del _overrides[kernel]


def table_name(device: str) -> str:
    """The file of a device's own table, without its ending: "NVIDIA H200" -> "nvidia_h200"."""
    return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")


@cache
def read_table(name: str) -> tuple[Entry, ...]:
    """The entries of one table; none where there is no such file."""
    file = resources.files(__package__) / FOLDER / f"{name}.json"
    if not file.is_file():
        return ()
    return tuple(
        Entry(
            kernel=entry["kernel"],
            head_dims=tuple(entry["head_dims"]),
            cache_dtypes=tuple(entry["cache_dtypes"]),
            group=entry.get("group"),
            settings=Settings(entry["tile"], entry["num_warps"], entry["num_stages"]),
        )
        for entry in json.loads(file.read_text())["entries"]
    )


def _distance(tuned: int | None, group: int) -> tuple[int, int]:
    return (0, 0) if tuned is None else (abs(tuned - group), tuned)
