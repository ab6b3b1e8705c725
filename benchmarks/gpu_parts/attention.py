"""Attention of one layer timed beside the machine's limits; and what other implementations take for the same."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from pageframe.benchmarks.gpu_parts.layer import Layer, kv_bytes
from pageframe.benchmarks.gpu_parts.peers import PEERS
from pageframe.benchmarks.gpu_parts.results import NOT_MEASURED, OK, SHORT, Results, Row, measuring
from pageframe.benchmarks.gpu_parts.sizes import Case, Sizes, Target, cache_dtype
from pageframe.benchmarks.gpu_parts.timing import Timer, measure_bandwidth, measure_flops, num_sets, timer_for
from pageframe.kernels.triton.backend import TritonBackend

PART, OTHERS = "attention", "others"
#: Of the queries, and so of the results. What others' kernels give may differ from ours by so much.
DTYPE = torch.bfloat16
CLOSE = 2e-2


def run(results: Results, sizes: Sizes, device: torch.device) -> None:
    """A row for each case. One that fails does not keep the rest from running."""
    bandwidth = measure_bandwidth(sizes.copy_bytes, device)
    flops = measure_flops(sizes.matrix_size, device)
    backend, timer = TritonBackend(device), timer_for(device)
    for case in sizes.cases:
        with measuring(results, PART, case.name):
            seconds = _seconds(case, backend, timer, sizes, device)
            if seconds is None:
                row = Row(PART, case.name, verdict=NOT_MEASURED, note=f"this device has no {case.cache}")
            elif case.new_tokens == 1:
                row = _decode_row(case, seconds, sizes, device, bandwidth)
            else:
                row = _prefill_row(case, seconds, sizes, flops)
            results.add(row if device.type == "cuda" else replace(row, verdict=NOT_MEASURED))


def _seconds(case: Case, backend: TritonBackend, timer: Timer, sizes: Sizes, device: torch.device) -> float | None:
    layer = _layer(case, backend, sizes, device)
    if layer is None:
        return None
    out = torch.empty_like(layer.queries[0])
    return timer.seconds([partial(layer.attend, index, out=out) for index in range(len(layer.steps))])


def run_others(results: Results, sizes: Sizes, device: torch.device) -> None:
    """A row for each case with what other implementations take; one for each that can't be imported here."""
    backend, timer = TritonBackend(device), timer_for(device)
    missing: dict[str, str] = {}
    for case in sizes.cases:
        with measuring(results, OTHERS, case.name):
            layer = None if case.cache else _layer(case, backend, sizes, device)
            if layer is not None:
                notes, numbers = _times_of_others(layer, timer, missing)
                results.add(Row(OTHERS, case.name, note="; ".join(notes), numbers=numbers))
    for name, reason in missing.items():
        results.add(Row(OTHERS, name, verdict=NOT_MEASURED, note=reason))


def _layer(case: Case, backend: TritonBackend, sizes: Sizes, device: torch.device) -> Layer | None:
    """None where the device does not have the case's cache."""
    dtype = cache_dtype(case.cache, device)
    if dtype is None:
        return None
    return Layer(
        backend,
        case.contexts,
        num_sets=num_sets(kv_bytes(case.contexts, sizes.num_kv_heads, sizes.head_dim, dtype), device),
        new_tokens=case.new_tokens,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        block_size=case.block_size,
        dtype=DTYPE,
        cache_dtype=dtype,
        device=device,
    )


def _decode_row(case: Case, seconds: float, sizes: Sizes, device: torch.device, bandwidth: float) -> Row:
    dtype = cache_dtype(case.cache, device)
    assert dtype is not None, "a case that was timed has a cache"
    read = kv_bytes(case.contexts, sizes.num_kv_heads, sizes.head_dim, dtype)
    share = read / seconds / bandwidth
    verdict = verdict_of(case.target, {"us": seconds * 1e6, "%": share * 100})
    note = "; ".join(
        [f"{read / seconds / 1e12:.2f} TB/s, floor {read / bandwidth * 1e6:,.1f} us", *_asked(case.target)]
    )
    numbers = {"seconds": seconds, "bytes": read, "share": share}
    return Row(PART, case.name, f"{seconds * 1e6:,.1f} us", f"{share:.0%}", verdict, note, numbers)


def _prefill_row(case: Case, seconds: float, sizes: Sizes, flops: float) -> Row:
    done = attention_flops(case, sizes)
    reached, share = done / seconds / 1e12, done / seconds / flops
    verdict = verdict_of(case.target, {"TFLOP/s": reached})
    note = "; ".join([f"{seconds * 1e6:,.0f} us", *_asked(case.target)])
    numbers = {"seconds": seconds, "flops": done, "share": share}
    return Row(PART, case.name, f"{reached:,.0f} TFLOP/s", f"{share:.0%}", verdict, note, numbers)


def attention_flops(case: Case, sizes: Sizes) -> int:
    """4 for each (query, key it sees, element of a head): the products of causal attention."""
    new = case.new_tokens
    pairs = sum(new * (context - new) + new * (new + 1) // 2 for context in case.contexts)
    return 4 * sizes.num_heads * sizes.head_dim * pairs


def verdict_of(target: Target | None, reached: dict[str, float]) -> str:
    """Whether what must be reached is; microseconds are the less the better."""
    if target is None:
        return ""
    value = reached[target.unit]
    return OK if (value <= target.must if target.unit == "us" else value >= target.must) else SHORT


def _asked(target: Target | None) -> list[str]:
    return [] if target is None else [f"must {target.must:g} {target.unit}, aim {target.aim:g}"]


def _times_of_others(layer: Layer, timer: Timer, missing: dict[str, str]) -> tuple[list[str], dict[str, float]]:
    """What other implementations take for the same: as text, and in seconds.

    Args:
        missing: those that can't be imported here, and why; they are not tried again.
    """
    expected = layer.attend(0).float()
    notes: list[str] = []
    numbers: dict[str, float] = {}
    for name, make in PEERS.items():
        if name in missing:
            continue
        try:
            works = make(layer)
            error = float((works[0]().float().view_as(expected) - expected).norm() / expected.norm())
            numbers[name] = timer.seconds(works)
        except ImportError as problem:
            missing[name] = str(problem)
            continue
        except Exception as problem:  # what one of others' kernels does not take is not ours to mend
            lines = str(problem).splitlines() or [type(problem).__name__]
            notes.append(f"{name}: {lines[0][:40]}")
            continue
        differs = "" if error < CLOSE else f", DIFFERS by {error:.1e}"
        notes.append(f"{name} {numbers[name] * 1e6:,.1f} us{differs}")
    return notes, numbers
