"""What the machine is, and its own limits: copy bandwidth and bf16 matrix products."""

from __future__ import annotations

import platform
import shutil
import subprocess

import torch
import triton

from pageframe.benchmarks.gpu_parts.results import Results, Row, measuring
from pageframe.benchmarks.gpu_parts.sizes import Sizes
from pageframe.benchmarks.gpu_parts.timing import measure_bandwidth, measure_flops

PART = "machine"


def run(results: Results, sizes: Sizes, device: torch.device) -> None:
    """Rows: versions, the device, copy rate, matrix rate."""
    versions = f"torch {torch.__version__}, triton {triton.__version__}, Python {platform.python_version()}"
    results.add(Row(PART, "versions", note=versions))
    results.add(Row(PART, "device", note=_describe(device)))
    with measuring(results, PART, "copy"):
        copied = measure_bandwidth(sizes.copy_bytes, device)
        note = f"{sizes.copy_bytes:,} bytes, those read and those written"
        results.add(Row(PART, "copy", f"{copied / 1e12:.2f} TB/s", note=note, numbers={"bytes_per_second": copied}))
    with measuring(results, PART, "matrix"):
        flops = measure_flops(sizes.matrix_size, device)
        note = f"bf16, {sizes.matrix_size} each way"
        results.add(Row(PART, "matrix", f"{flops / 1e12:,.0f} TFLOP/s", note=note, numbers={"flops_per_second": flops}))


def _describe(device: torch.device) -> str:
    if device.type != "cuda":
        return f"no GPU: {platform.machine()}, Triton's interpreter"
    properties = torch.cuda.get_device_properties(device)
    memory = f"{properties.total_memory / 2**30:.0f} GiB, {properties.multi_processor_count} multiprocessors"
    return ", ".join([properties.name, memory, *_clocks()])


def _clocks() -> list[str]:
    """What nvidia-smi says of driver and clocks; nothing where there is none."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit"
    found = subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, check=False, timeout=20
    )
    return [f"driver, clocks and power limit: {found.stdout.strip()}"] if found.returncode == 0 else []
