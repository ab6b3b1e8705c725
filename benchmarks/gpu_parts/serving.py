"""The engine with random weights in the shape of a model: tokens/s, decode steps beside their floor, GPU busy time.

The floor of a decode step is its bytes at the rate of a copy: all weights once, and the K and V of every context.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from pageframe.benchmarks.gpu_parts.results import NOT_MEASURED, Results, Row, measuring
from pageframe.benchmarks.gpu_parts.sizes import Sizes
from pageframe.benchmarks.gpu_parts.timing import measure_bandwidth
from pageframe.kernels.triton.backend import TritonBackend
from pageframe.runtime.batch import Batch
from pageframe.runtime.config import ModelConfig, ResolvedConfig
from pageframe.runtime.engine import Engine
from pageframe.runtime.errors import EngineError
from pageframe.runtime.memory_plan import GPU_POOL_SHARE, kv_bytes_per_token
from pageframe.runtime.model_runner import ModelRunner
from pageframe.runtime.models.decoder import Decoder
from pageframe.runtime.request import SamplingParams
from pageframe.runtime.sampler import Sampler
from pageframe.runtime.warm_up import warm_up

PART = "engine"
BF16 = torch.bfloat16
BLOCK_SIZE = 16
WARM_UP_REQUESTS, WARM_UP_OUTPUT = 4, 3
#: Prompt tokens of the requests that decode while the busy time is taken.
BUSY_PROMPT = 64
#: Steps within which all of them decode.
BUSY_PREFILL_STEPS = 50


@dataclass(frozen=True, slots=True)
class Ask:
    """A request's prompt and how many tokens it gets."""

    prompt: list[int]
    output: int


@dataclass(slots=True)
class Watched:
    """A runner that remembers what each step was.

    Args:
        contexts: of each step, the sum over its requests; None where not all were decode rows.
    """

    runner: ModelRunner
    contexts: list[int | None] = field(default_factory=list)

    def forward(self, batch: Batch) -> torch.Tensor:
        """See `Runner`."""
        is_decode = batch.num_decode == len(batch.context_lens)
        self.contexts.append(int(batch.context_lens.sum()) if is_decode else None)
        return self.runner.forward(batch)

    def synchronize(self) -> None:
        """See `Runner`."""
        self.runner.synchronize()


@dataclass(frozen=True, slots=True)
class Measured:
    """One run.

    Args:
        seconds: of the run; it is cut if not all requests `ended`.
        steps, floors: of its decode steps, in seconds; mixed: of all other steps.
    """

    tokens: int
    seconds: float
    ended: int
    steps: list[float]
    floors: list[float]
    mixed: list[float]


def run(name: str, results: Results, sizes: Sizes, device: torch.device) -> None:
    """A row with graphs and one without."""
    bandwidth = measure_bandwidth(sizes.copy_bytes, device)
    decoder = Decoder.random(sizes.models[name], storage_dtype=BF16, compute_dtype=BF16, device=device, seed=0)
    asks = random_asks(sizes, decoder.config.vocab_size)
    for graphs, limit in ((True, sizes.run_seconds), (False, sizes.eager_seconds)):
        case = f"{name}, graphs" if graphs else f"{name}, no graphs"
        with measuring(results, PART, case):
            try:
                row = _measure(case, decoder, asks, sizes, device, bandwidth, graphs=graphs, limit=limit)
            except torch.OutOfMemoryError as error:
                row = Row(PART, case, verdict=NOT_MEASURED, note=str(error).splitlines()[0])
            results.add(row)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def random_asks(sizes: Sizes, vocab_size: int) -> list[Ask]:
    """Lengths from the range of `sizes`, prompt and output each, and random tokens."""
    rng = np.random.default_rng(0)
    low, high = sizes.tokens
    lengths = rng.integers(low, high + 1, (sizes.requests, 2)).tolist()
    return [Ask(rng.integers(0, vocab_size, prompt).tolist(), output) for prompt, output in lengths]


def _measure(
    case: str,
    decoder: Decoder,
    asks: Sequence[Ask],
    sizes: Sizes,
    device: torch.device,
    bandwidth: float,
    *,
    graphs: bool,
    limit: float,
) -> Row:
    started = time.perf_counter()
    resolved = resolve(decoder.config, sizes, device)
    watched = Watched(_runner(decoder, resolved, device, graphs=graphs))
    weight_bytes = decoder.layer_bytes + decoder.output_bytes

    def floor(contexts: int) -> float:
        return (weight_bytes + contexts * resolved.kv_bytes_per_token) / bandwidth

    sampler = Sampler(watched.runner.logits, watched.runner.arg_max)
    engine = Engine(resolved, watched, sampler, seed=0)
    warm_up(watched.runner, sampler, resolved)
    ready = time.perf_counter() - started
    # What libraries load for a first step of real size is no part of any rate.
    first = [Ask(ask.prompt, WARM_UP_OUTPUT) for ask in asks[:WARM_UP_REQUESTS]]
    serve(engine, watched, first, floor, limit)
    measured = serve(engine, watched, asks, floor, limit)
    busy = busy_share(engine, sizes) if device.type == "cuda" else None
    return _row(case, measured, len(asks), busy, ready)


def _row(case: str, measured: Measured, num_asked: int, busy: float | None, ready: float) -> Row:
    rate = measured.tokens / measured.seconds
    numbers = {"tokens_per_second": rate, "seconds": measured.seconds, "ready_seconds": ready}
    notes, share = [], ""
    if measured.steps:
        step, least = statistics.mean(measured.steps), statistics.mean(measured.floors)
        numbers |= {"step_seconds": step, "floor_seconds": least}
        notes.append(f"decode step {step * 1e3:.2f} ms, floor {least * 1e3:.2f}")
        share = f"{least / step:.0%}"
    if measured.mixed:
        mixed = statistics.mean(measured.mixed)
        numbers["mixed_step_seconds"] = mixed
        notes.append(f"{len(measured.mixed)} steps with prompts, {mixed * 1e3:.2f} ms each")
    notes.append(f"GPU busy {NOT_MEASURED}" if busy is None else f"GPU busy {busy:.0%}")
    if busy is not None:
        numbers["busy"] = busy
    notes.append(f"{measured.ended} of {num_asked} requests in {measured.seconds:.1f} s, ready in {ready:.1f} s")
    return Row(PART, case, f"{rate:,.0f} tok/s", share, note="; ".join(notes), numbers=numbers)


def resolve(model: ModelConfig, sizes: Sizes, device: torch.device) -> ResolvedConfig:
    """The engine's configuration: room for all requests at their longest, or what the memory holds."""
    longest = 2 * sizes.tokens[1]
    per_token = kv_bytes_per_token(model, "bf16")
    num_blocks = sizes.requests * -(-longest // BLOCK_SIZE)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        held = int(GPU_POOL_SHARE * torch.cuda.mem_get_info(device)[0]) // (per_token * BLOCK_SIZE)
        num_blocks = min(num_blocks, held)
    return ResolvedConfig(
        model_name=model.family,
        model=model,
        dtype="bf16",
        compute_dtype="bfloat16",
        device=str(device),
        backend="triton",
        weights="bf16",
        kv_dtype="bf16",
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_model_len=longest,
        max_num_requests=sizes.requests,
        max_num_batched_tokens=sizes.token_budget,
        threads=torch.get_num_threads(),
        kv_bytes_per_token=per_token,
        pool_bytes=per_token * BLOCK_SIZE * num_blocks,
        prefix_cache=False,
    )


def _runner(decoder: Decoder, resolved: ResolvedConfig, device: torch.device, *, graphs: bool) -> ModelRunner:
    return ModelRunner(
        decoder,
        TritonBackend(device),
        num_blocks=resolved.num_blocks,
        block_size=resolved.block_size,
        max_num_requests=resolved.max_num_requests,
        max_blocks=resolved.max_blocks,
        kv_dtype=BF16,
        device=device,
        graphs=graphs,
    )


def serve(
    engine: Engine, watched: Watched, asks: Sequence[Ask], floor: Callable[[int], float], limit: float
) -> Measured:
    """All requests at once, to their ends or until `limit` seconds have gone. Nothing is left running.

    Args:
        floor: the least seconds of a decode step over so many tokens of context.
    """
    names = [f"{index}" for index in range(len(asks))]
    for name, ask in zip(names, asks, strict=True):
        engine.add(name, ask.prompt, SamplingParams(temperature=0, max_tokens=ask.output, ignore_eos=True))
    watched.contexts.clear()
    tokens = ended = 0
    times: list[float] = []
    started = now = time.perf_counter()
    while engine.has_work and now - started < limit:
        for output in engine.step():
            if output.error:
                raise EngineError(output.error)
            tokens += len(output.token_ids)
            ended += bool(output.finish_reason)
        before, now = now, time.perf_counter()
        times.append(now - before)
    for name in names:
        engine.abort(name)
    decodes = [(taken, total) for taken, total in zip(times, watched.contexts, strict=True) if total is not None]
    return Measured(
        tokens,
        now - started,
        ended,
        steps=[taken for taken, _ in decodes],
        floors=[floor(total) for _, total in decodes],
        mixed=[taken for taken, total in zip(times, watched.contexts, strict=True) if total is None],
    )


def busy_share(engine: Engine, sizes: Sizes) -> float | None:
    """The share of time in which the GPU computes or copies anything, over decode steps of all requests at once; None
    where its activity can't be traced."""
    from torch.profiler import ProfilerActivity, profile

    names = [f"busy-{index}" for index in range(sizes.requests)]
    params = SamplingParams(temperature=0, max_tokens=sizes.tokens[1], ignore_eos=True)
    for name in names:
        engine.add(name, [0] * min(BUSY_PROMPT, sizes.tokens[1]), params)
    for _ in range(BUSY_PREFILL_STEPS):
        engine.step()
        if engine.steps[-1].decode_tokens == sizes.requests:
            break
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        started = time.perf_counter()
        for _ in range(sizes.busy_steps):
            engine.step()
        torch.cuda.synchronize()
        window = time.perf_counter() - started
    for name in names:
        engine.abort(name)
    active = [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type.name == "CUDA"
    ]
    return union_length(active) / 1e6 / window if active else None


def union_length(intervals: Sequence[tuple[float, float]]) -> float:
    """Length of the union of intervals (start, end)."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered
