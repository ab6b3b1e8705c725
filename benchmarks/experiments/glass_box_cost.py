"""What looking inside costs the engine: the journal, its recording, and the frames of the dashboard. No model.

    python -m pageframe.benchmarks.experiments.glass_box_cost [--steps 600] [--quick]

256 requests decode, with prompts of 200 to 400 tokens and outputs of 100 to 300 in a pool of 20,000 blocks of 16; as
soon as one ends the next arrives, one or two a step. Forward passes cost nothing. Four engines of the same requests
take their steps in turn, so that whatever else the machine does meets all of them: without a journal (nothing is
noted), with it, with a recording of it to a file (what is written in a thread beside is not in its figure, what is
handed over is), and with a frame made every few steps, as often as a page asks for one. Figures are medians over the
steps; what each way costs is the median of the differences to the one before, step by step.

Targets: 30 us a step for the journal, 30 more for its recording; 3% of the time for frames, 12 of them a second.

Exits with 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pageframe.runtime.batch import Batch
from pageframe.runtime.config import ModelConfig, ResolvedConfig
from pageframe.runtime.engine import Engine
from pageframe.runtime.journal import Event, Journal
from pageframe.runtime.journal_recorder import JournalRecorder
from pageframe.runtime.live_frames import LiveFrames
from pageframe.runtime.request import SamplingParams
from pageframe.runtime.step_plan import SamplingBatch, ScoredTokens, StepResult

NUM_REQUESTS, NUM_BLOCKS, BLOCK_SIZE = 256, 20_000, 16
SHORTEST, LONGEST = 200, 400
SHORTEST_OUTPUT, LONGEST_OUTPUT = 100, 300
FRAMES_PER_SECOND = 12
TOKEN = 7
MODEL = ModelConfig(
    family="none",
    vocab_size=32_000,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    max_position=1 << 20,
    norm_eps=1e-5,
)

JOURNAL_TARGET_US = 30.0
RECORDING_TARGET_US = 30.0
FRAMES_TARGET = 0.03


class SilentJournal(Journal):
    """Notes nothing."""

    def note(self, event_type: type[Any], request_id: str, **numbers: Any) -> None:
        pass

    def write(self, event: Event) -> None:
        pass


class NoModel:
    """Computes nothing and draws one and the same token."""

    def forward(self, batch: Batch) -> None:
        return None

    def synchronize(self) -> None:
        pass

    def sample(self, hidden: Any, batch: SamplingBatch) -> StepResult:
        return StepResult(np.full(len(batch), TOKEN, dtype=np.int32), {})

    def score(self, hidden: Any, scored: ScoredTokens) -> dict[int, Any]:
        raise AssertionError("nobody asks for logprobs of a prompt")


class Traffic:
    """Requests that come and go: so many are there at any time. The same ones for every engine."""

    def __init__(self, engine: Engine, num_requests: int) -> None:
        self.engine = engine
        self.num_arrived = 0
        self._num_requests = num_requests
        self._random = np.random.default_rng(0)

    def step(self) -> None:
        """One of the engine, those before it replaced that have ended."""
        scheduler, random = self.engine.scheduler, self._random
        for _ in range(self._num_requests - scheduler.num_running - scheduler.num_waiting):
            prompt = random.integers(0, MODEL.vocab_size, random.integers(SHORTEST, LONGEST)).tolist()
            # The first ones are met in the middle, so that they do not all end at once.
            shortest = SHORTEST_OUTPUT if self.num_arrived >= self._num_requests else 2
            max_tokens = int(random.integers(shortest, LONGEST_OUTPUT))
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
            self.engine.add(f"chatcmpl-{self.num_arrived:032x}", prompt, params)
            self.num_arrived += 1
        self.engine.step()


def make_traffic(journal: Journal, num_requests: int, num_blocks: int) -> Traffic:
    """An engine whose first requests have all computed their prompts."""
    resolved = ResolvedConfig(
        model_name="none",
        model=MODEL,
        dtype="float32",
        compute_dtype="float32",
        device="cpu",
        backend="reference",
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_model_len=LONGEST + LONGEST_OUTPUT,
        max_num_requests=num_requests,
        max_num_batched_tokens=num_requests * LONGEST,
        threads=1,
        kv_bytes_per_token=64,
        pool_bytes=64 * BLOCK_SIZE * num_blocks,
    )
    model = NoModel()
    traffic = Traffic(Engine(resolved, model, model, seed=0, journal=journal), num_requests)
    traffic.step()
    assert traffic.engine.scheduler.num_running == num_requests, "all prompts are computed in the first step"
    return traffic


def step_microseconds(traffic: Traffic, after: Callable[[], object] = lambda: None) -> float:
    started = time.perf_counter()
    traffic.step()
    after()
    return (time.perf_counter() - started) * 1e6


def measure(num_requests: int, num_blocks: int, num_steps: int) -> bool:
    """Print the table; whether every target is met."""
    with tempfile.TemporaryDirectory() as folder, Progress(console=Console(stderr=True), transient=True) as bar:
        journals = (SilentJournal(), Journal(), Journal(), Journal())
        served = [make_traffic(journal, num_requests, num_blocks) for journal in journals]
        recorder = JournalRecorder(served[2].engine, Path(folder) / "journal", max_bytes=2**30)
        frames = LiveFrames(served[3].engine)
        frames.start()
        frame_us: list[float] = []

        def make_frame() -> None:
            started = time.perf_counter()
            frames.next()
            frame_us.append((time.perf_counter() - started) * 1e6)

        ways: list[list[float]] = [[] for _ in served]
        task = bar.add_task("decoding", total=num_steps)
        for number in range(num_steps):
            for place in range(len(served)):
                index = (place + number) % len(served)  # each way comes first as often as the others
                ways[index].append(step_microseconds(served[index], recorder.record if index == 2 else lambda: None))
            make_frame()
            bar.advance(task)
        recorder.close()
    return report(ways, frame_us, num_requests, num_blocks)


def report(ways: list[list[float]], frame_us: list[float], num_requests: int, num_blocks: int) -> bool:
    """Print the table; whether every target is met."""
    console = Console()
    table = Table(title=f"us a step, {num_requests:,} requests come and go; medians of {len(ways[0]):,} steps")
    for column in ("", "a step", "more than before"):
        table.add_column(column, justify="left" if not column else "right")
    cost = [0.0] * len(ways)
    for index, name in enumerate(("without a journal", "with the journal", "and recorded to a file")):
        before = ways[max(0, index - 1)]
        cost[index] = median(with_it - without for with_it, without in zip(ways[index], before, strict=True))
        table.add_row(name, f"{median(ways[index]):.0f}", f"{cost[index]:.0f}" if index else "")
    console.print(table)
    share = median(frame_us) * FRAMES_PER_SECOND / 1e6
    console.print(
        f"The journal takes {cost[1]:.0f} us a step; the target is at most {JOURNAL_TARGET_US:.0f}.\n"
        f"Its recording takes {cost[2]:.0f} us a step more; the target is at most {RECORDING_TARGET_US:.0f}.\n"
        f"A frame of {num_blocks:,} blocks takes {median(frame_us) / 1e3:.2f} ms: {share:.1%} of the time at "
        f"{FRAMES_PER_SECOND} a second, however many watch; the target is at most {FRAMES_TARGET:.0%}."
    )
    return cost[1] <= JOURNAL_TARGET_US and cost[2] <= RECORDING_TARGET_US and share <= FRAMES_TARGET


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description="What looking inside costs the engine, without a model.")
    parser.add_argument("--steps", type=int, default=600, help="decode steps measured (default: 600)")
    parser.add_argument("--quick", action="store_true", help="toy sizes, to see that it runs; the targets do not count")
    options = parser.parse_args(arguments)
    if options.quick:
        measure(num_requests=8, num_blocks=512, num_steps=20)
        return 0
    return 0 if measure(NUM_REQUESTS, NUM_BLOCKS, options.steps) else 1


if __name__ == "__main__":
    sys.exit(main())
