"""Time of a step's draws of all kinds, the host's part included: from the logits to tokens on the host."""

from __future__ import annotations

import dataclasses
import statistics
import time

import torch

from pageframe.benchmarks.gpu_parts.checks_sampling import make_case
from pageframe.benchmarks.gpu_parts.results import Results, Row, measuring
from pageframe.benchmarks.gpu_parts.sizes import Sizes
from pageframe.benchmarks.gpu_parts.timing import measure_bandwidth
from pageframe.runtime.sampler import Sampler

PART = "sampling"
CASE = "top-k, top-p, min-p, noise, penalties"
#: Of a row with banned ids.
BANNED = 4
REPEATS = 15


def run(results: Results, sizes: Sizes, device: torch.device) -> None:
    """One row."""
    with measuring(results, PART, CASE):
        case = make_case(device, sizes.requests)
        batch = dataclasses.replace(case.batch, banned=tuple((row, ids[:BANNED]) for row, ids in case.batch.banned))
        sampler = Sampler(lambda hidden: hidden, on_device=True)
        sampler.sample_logits(case.logits, batch)  # compiled, and all before it is done
        times = []
        for _ in range(REPEATS if device.type == "cuda" else 1):
            started = time.perf_counter()
            sampler.sample_logits(case.logits, batch)
            times.append(time.perf_counter() - started)
        seconds, floor = statistics.median(times), case.logits.nbytes / measure_bandwidth(sizes.copy_bytes, device)
        num_rows, vocab_size = case.logits.shape
        note = f"{num_rows} rows of {vocab_size:,}; to read these takes {floor * 1e6:,.0f} us"
        numbers = {"seconds": seconds, "floor_seconds": floor}
        results.add(Row(PART, CASE, f"{seconds * 1e6:,.0f} us", f"{floor / seconds:.0%}", note=note, numbers=numbers))
