"""Launch settings: the default covers whatever the kernels support, and a device's own table comes before it."""

from __future__ import annotations

import itertools
import json
from importlib import resources
from pathlib import Path

import pytest
import torch

from pageframe.kernels.triton import tables
from pageframe.kernels.triton.tables import KERNELS, Settings, lookup, settings

HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)
CACHE_DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
)
FILES = sorted(Path(str(resources.files("pageframe.kernels.triton"))).glob(f"{tables.FOLDER}/*.json"))


def is_power_of_two(number: int) -> bool:
    return number > 0 and not number & (number - 1)


@pytest.mark.parametrize("device", ["cpu", "NVIDIA H200", "a GPU of next year"])
@pytest.mark.parametrize("kind", tables.KINDS)
def test_every_supported_shape_has_settings_that_a_kernel_can_take(device: str, kind: str) -> None:
    for kernel, head_dim, dtype, group in itertools.product(KERNELS, HEAD_DIMS, CACHE_DTYPES, (1, 4, 7)):
        found = lookup(device, kind, kernel, head_dim=head_dim, cache_dtype=dtype, group=group)
        assert is_power_of_two(found.tile)
        assert found.tile >= 16, "the least of a matrix product"
        assert is_power_of_two(found.num_warps)
        assert found.num_stages >= 1


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_table_names_only_what_exists(path: Path) -> None:
    table = json.loads(path.read_text())
    assert table["device"]
    assert table["measured"]
    for entry in table["entries"]:
        assert entry["kernel"] in KERNELS
        assert set(entry["head_dims"]) <= set(HEAD_DIMS)
        assert {getattr(torch, name) for name in entry["cache_dtypes"]} <= set(CACHE_DTYPES)


def test_no_default_has_a_shape_twice() -> None:
    for name in tables.KINDS.values():
        shapes = [
            (entry.kernel, *shape)
            for entry in tables.read_table(name)
            for shape in itertools.product(entry.head_dims, entry.cache_dtypes)
        ]
        assert len(shapes) == len(set(shapes)) > 0


def test_no_gpu_means_the_default() -> None:
    found = settings("attend_splits", head_dim=64, cache_dtype=torch.bfloat16, group=4, device=torch.device("cpu"))
    (entry,) = (
        entry
        for entry in tables.read_table("default")
        if entry.kernel == "attend_splits" and 64 in entry.head_dims and "bfloat16" in entry.cache_dtypes
    )
    assert found == entry.settings


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device with a table of one kernel, one shape and two groups."""
    own = tuple(
        tables.Entry("attend_splits", (128,), ("bfloat16",), group, Settings(16, warps, 5))
        for group, warps in ((4, 1), (8, 2))
    )
    read = tables.read_table
    monkeypatch.setattr(tables, "read_table", lambda name: own if name == "test_gpu_9000" else read(name))


@pytest.mark.usefixtures("tuned")
@pytest.mark.parametrize(("group", "warps"), [(1, 1), (4, 1), (6, 1), (7, 2), (8, 2), (64, 2)])
def test_a_devices_own_table_comes_first_with_the_nearest_group(group: int, warps: int) -> None:
    shape = {"head_dim": 128, "cache_dtype": torch.bfloat16}
    assert lookup.__wrapped__("Test GPU-9000", "hopper", "attend_splits", **shape, group=group) == Settings(
        16, warps, 5
    )


@pytest.mark.usefixtures("tuned")
def test_what_a_devices_own_table_lacks_is_the_defaults() -> None:
    for kernel, head_dim, dtype in (
        ("attend_prefill", 128, torch.bfloat16),
        ("attend_splits", 64, torch.bfloat16),
        ("attend_splits", 128, torch.int8),
    ):
        shape = {"head_dim": head_dim, "cache_dtype": dtype, "group": 4}
        assert lookup.__wrapped__("Test GPU-9000", "hopper", kernel, **shape) == lookup(
            "cpu", "hopper", kernel, **shape
        )


def test_a_tuner_overrides_one_kernel_for_a_while() -> None:
    def found(kernel: str) -> Settings:
        return settings(kernel, head_dim=64, cache_dtype=torch.bfloat16, group=1, device=torch.device("cpu"))

    before, chosen = found("attend_splits"), Settings(128, 2, 7)
    other = found("attend_prefill")
    with tables.overridden("attend_splits", chosen):
        assert found("attend_splits") == chosen
        assert found("attend_prefill") == other
    assert found("attend_splits") == before
