"""Simulations that are recorded, and recordings compared with what was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fakes.engines import tiny_config
from fakes.simulation import Simulation
from pageframe.runtime.journal_file import Recording, read_journal
from pageframe.runtime.journal_recorder import JournalRecorder
from pageframe.runtime.journal_state import JournalState
from pageframe.runtime.request import SamplingParams

LARGE = 2**30


def record(
    path: Path,
    run: Callable[[Simulation, Callable[[], None]], None],
    *,
    simulation: Simulation | None = None,
    **settings: Any,
) -> tuple[Recording, Simulation]:
    """`run` gets the simulation and what is to be called after a step."""
    simulation = simulation or Simulation(tiny_config(num_blocks=16))
    recorder = JournalRecorder(simulation.engine, path, **({"max_bytes": LARGE} | settings))
    run(simulation, recorder.record)
    recorder.record()
    recorder.close()
    return read_journal(path), simulation


def serve(simulation: Simulation, recorded: Callable[[], None], *prompts: list[int], **fields: Any) -> None:
    for prompt in prompts:
        simulation.add(prompt, SamplingParams(max_tokens=3, ignore_eos=True), **fields)
        while simulation.live:
            simulation.step()
            recorded()


def shape(state: JournalState) -> dict[str, Any]:
    snapshot = state.snapshot()
    indexed = set(snapshot["indexed"])
    return {
        "tables": sorted(snapshot["tables"]),
        "running": snapshot["running"],
        "waiting": snapshot["waiting"],
        "following": snapshot["following"],
        "indexed": snapshot["indexed"],
        "host": sorted(slot for slot, _ in snapshot["host"]),
        # What a block held before it was handed out for something else tells nobody anything.
        "published_by": sorted(entry for entry in snapshot["published_by"] if entry[0] in indexed),
        "pins": sorted(snapshot["pins"]),
    }
