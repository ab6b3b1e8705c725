"""Time of work on the device: replays of a recorded graph between two events, so that launches cost nothing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from pageframe.runtime.cuda_graphs import run_aside

Work = Callable[[], object]

REPLAYS = 15
#: A device's caches hold less than this: work that touches as much each time reads memory.
BEYOND_CACHES = 400_000_000


class Timer(Protocol):
    """Measures work."""

    def seconds(self, works: Sequence[Work]) -> float:
        """Of one of these works, which are alike but for the memory that they touch, one after the other."""


class GraphTimer:
    """Records all works in one graph; the median of several replays. Only what launches kernels counts."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def seconds(self, works: Sequence[Work]) -> float:
        """See `Timer`."""
        run_aside(lambda: [work() for work in works], self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            for work in works:
                work()
        graph.replay()
        times: list[float] = []
        for _ in range(REPLAYS):
            start, end = _new_event(), _new_event()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return statistics.median(times) / len(works)


class HostTimer:
    """The first work once, by the host's clock: a rehearsal's figures mean nothing."""

    def seconds(self, works: Sequence[Work]) -> float:
        """See `Timer`."""
        started = time.perf_counter()
        works[0]()
        return time.perf_counter() - started


def timer_for(device: torch.device) -> Timer:
    """The one that a device allows."""
    return GraphTimer() if device.type == "cuda" else HostTimer()


def num_sets(num_bytes: int, device: torch.device) -> int:
    """How many sets of such inputs must take turns so that none is found in a cache."""
    return 1 if device.type != "cuda" else max(1, min(64, -(-BEYOND_CACHES // num_bytes)))


def measure_bandwidth(num_bytes: int, device: torch.device) -> float:
    """Bytes per second of a copy within the device's memory, those read and those written together."""
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / timer_for(device).seconds([lambda: target.copy_(source)])


def measure_flops(size: int, device: torch.device) -> float:
    """Floating-point operations per second of a bf16 product of two random square matrices."""
    left, right = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * size**3 / timer_for(device).seconds([lambda: torch.mm(left, right, out=out)])


def _new_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
