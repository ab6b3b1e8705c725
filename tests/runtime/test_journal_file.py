"""Recordings: what is read back is what happened, at every step; damage costs what is damaged and no more."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.engines import tiny_config
from fakes.simulation import Simulation
from fakes.workload import Workload, random_config

from pageframe.runtime import journal_recorder
from pageframe.runtime.errors import StartupError
from pageframe.runtime.journal_file import JournalFileError, Recording, read_journal
from pageframe.runtime.journal_recorder import JournalRecorder, state_now
from pageframe.runtime.journal_state import JournalState
from pageframe.runtime.request import SamplingParams
from pageframe.runtime.story import tell

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


def test_all_events_come_back_as_they_were(tmp_path: Path) -> None:
    recording, simulation = record(tmp_path / "j", lambda sim, done: serve(sim, done, [1] * 9, [1] * 9))
    assert recording.events == list(simulation.engine.journal)
    assert recording.notices == []
    assert recording.header["version"] == 1
    assert recording.header["num_blocks"] == 16
    assert tell(recording.events, "r1") == tell(simulation.engine.journal, "r1")


@pytest.mark.parametrize("seed", range(5))
def test_at_every_step_the_state_rebuilt_is_the_one_that_was(tmp_path: Path, seed: int) -> None:
    """In files so small that most begin in the middle of things."""
    rng = random.Random(seed)
    simulation = Simulation(random_config(rng))
    lived: dict[int, dict[str, Any]] = {}

    def run(simulation: Simulation, recorded: Callable[[], None]) -> None:
        def look(num_steps: int) -> None:
            recorded()
            lived[simulation.engine.scheduler.step] = shape(state_now(simulation.engine))

        Workload(simulation, rng, on_step=look).run(300)
        look(0)

    recording, _ = record(tmp_path / "j", run, simulation=simulation, max_bytes=24_000)
    assert (tmp_path / "j.1").exists()
    oldest = recording.events[0].step
    begins_in_the_middle = [state for _, state in recording.states if state.running]
    assert len(begins_in_the_middle) >= 1
    # The journal of a step goes on until the next begins: clients come and go between two.
    checked = 0
    for step, expected in lived.items():
        if step > oldest:
            checked += 1
            assert shape(recording.state_at(step)) == expected or step_goes_on(recording, step, expected)
    assert checked > 20


def step_goes_on(recording: Recording, step: int, expected: dict[str, Any]) -> bool:
    """Whether the state was so after some event of the step, of which more followed."""
    begin, known = max(
        (entry for entry in recording.states if entry[0] <= first_of(recording, step)), key=lambda entry: entry[0]
    )
    state = JournalState.load(known.snapshot())
    for index, event in enumerate(recording.events[begin:], begin):
        if event.step > step:
            break
        state.apply((event,))
        if index >= first_of(recording, step) and shape(state) == expected:
            return True
    return False


def first_of(recording: Recording, step: int) -> int:
    return next((index for index, event in enumerate(recording.events) if event.step >= step), len(recording.events))


# ---- tokens ---------------------------------------------------------------------------------------------------------


def digests(recording: Recording, request_id: str) -> list[Any]:
    return [digest for _, part in recording.tokens[request_id] for digest in part]


def common(first: list[Any], second: list[Any]) -> int:
    return next(
        (index for index, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]),
        min(len(first), len(second)),
    )


def test_digests_are_equal_exactly_as_far_as_prompts_are(tmp_path: Path) -> None:
    def run(simulation: Simulation, recorded: Callable[[], None]) -> None:
        serve(simulation, recorded, [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 5, 8, 9])
        serve(simulation, recorded, [1, 2, 3, 4, 5, 6, 7, 8, 9], tenant="other")

    recording, _ = record(tmp_path / "j", run)
    first, second, other = (digests(recording, f"r{number}") for number in range(3))
    assert len(first) == 9 + 3
    assert common(first, second) == 6
    assert common(first, other) == 0, "tenants share nothing"
    assert [start for start, _ in recording.tokens["r0"]] == [0, 9]
    written = (tmp_path / "j").read_text()
    assert "token_ids" not in written


def test_two_recordings_have_different_keys(tmp_path: Path) -> None:
    one, other = (record(tmp_path / name, lambda sim, done: serve(sim, done, [1] * 5))[0] for name in ("a", "b"))
    assert common(digests(one, "r0"), digests(other, "r0")) == 0


def test_token_ids_are_written_where_asked_for(tmp_path: Path) -> None:
    recording, simulation = record(
        tmp_path / "j", lambda sim, done: serve(sim, done, [1, 2, 3, 4, 5]), with_token_ids=True
    )
    assert digests(recording, "r0") == [1, 2, 3, 4, 5, *simulation.ended["r0"].token_ids]


# ---- files ----------------------------------------------------------------------------------------------------------


def test_a_bounded_number_of_files_of_bounded_size(tmp_path: Path) -> None:
    def run(simulation: Simulation, recorded: Callable[[], None]) -> None:
        serve(simulation, recorded, *([number + 1] * 9 for number in range(120)))

    recording, simulation = record(tmp_path / "j", run, max_bytes=8_000)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["j", "j.1", "j.2", "j.3", "j.4"]
    assert max(path.stat().st_size for path in tmp_path.iterdir()) < 8_000 + 24_000
    held = len(recording.events)
    assert recording.events == list(simulation.engine.journal)[-held:]
    assert recording.notices == []


def test_an_older_recording_is_kept_and_not_mixed_in(tmp_path: Path) -> None:
    record(tmp_path / "j", lambda sim, done: serve(sim, done, [1] * 5))
    second, simulation = record(tmp_path / "j", lambda sim, done: serve(sim, done, [2] * 5))
    assert second.events == list(simulation.engine.journal)
    assert (tmp_path / "j.1").exists()


def test_where_nothing_can_be_written_the_engine_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"journal: .*no-folder/j cannot be written: No such file"):
        JournalRecorder(Simulation().engine, tmp_path / "no-folder" / "j", max_bytes=LARGE)


@pytest.mark.parametrize("path", ["/dev/null", "."])
def test_what_is_no_file_is_not_moved_aside(path: str) -> None:
    with pytest.raises(StartupError, match=f"journal: {path} cannot be written: it is no regular file"):
        JournalRecorder(Simulation().engine, Path(path), max_bytes=LARGE)
    assert Path(path).exists()


def test_a_disk_that_fails_ends_the_recording_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder goes away; the next file cannot be begun."""
    folder = tmp_path / "gone"
    folder.mkdir()
    simulation = Simulation(tiny_config(num_blocks=16))
    recorder = JournalRecorder(simulation.engine, folder / "j", max_bytes=100)
    serve(simulation, recorder.record, [1] * 5)
    shutil.rmtree(folder)
    for number in range(50):
        serve(simulation, recorder.record, [2 + number] * 5)
    recorder.close()
    recorder.record()
    assert "the journal is recorded no further" in caplog.text
    assert "No such file or directory" in caplog.text


def test_a_disk_that_is_too_slow_costs_events_and_a_line_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(simulation: Simulation, recorded: Callable[[], None]) -> None:
        simulation.add([1] * 9, SamplingParams(max_tokens=8, ignore_eos=True))
        simulation.step()
        recorded()
        monkeypatch.setattr(journal_recorder, "MAX_WAITING", -1)
        simulation.step()
        recorded()
        monkeypatch.setattr(journal_recorder, "MAX_WAITING", 1_000)
        for _ in range(3):
            simulation.step()
            recorded()

    recording, simulation = record(tmp_path / "j", run)
    dropped = [event for event in simulation.engine.journal if event not in recording.events]
    assert {event.step for event in dropped} == {2}
    assert any("were not recorded" in notice for notice in recording.notices)
    # From the next file on, which begins with how things stand, everything is known again.
    assert shape(recording.state_at(10**9)) == shape(state_now(simulation.engine))


# ---- damage ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    record(tmp_path / "j", lambda sim, done: serve(sim, done, [1] * 9, [2] * 9))
    return tmp_path / "j"


def test_a_file_cut_anywhere_gives_what_comes_before(recorded: Path) -> None:
    whole = read_journal(recorded)
    data = recorded.read_bytes()
    first_line = data.index(b"\n") + 1
    for cut in range(first_line, len(data), 97):
        recorded.write_bytes(data[:cut])
        part = read_journal(recorded)
        assert part.events == whole.events[: len(part.events)]
        assert len(part.events) >= data[:cut].count(b'"id":') - 1
        assert bool(part.notices) == (not data[:cut].endswith(b"\n"))
        assert all("is cut off in line" in notice for notice in part.notices)


def test_another_version_opens_as_far_as_it_goes(recorded: Path) -> None:
    whole = read_journal(recorded)
    lines = recorded.read_text().splitlines()
    lines[0] = json.dumps(json.loads(lines[0]) | {"version": 2})
    lines[3] = json.dumps(json.loads(lines[3]) | {"kind": "teleport"})
    event = json.loads(lines[5])
    lines[5] = json.dumps(event | {"color": "red"})
    recorded.write_text("\n".join(lines) + "\n")
    part = read_journal(recorded)
    assert len(part.events) == len(whole.events) - 1
    assert part.events == whole.events[:2] + whole.events[3:]
    assert any("version 2 of the format" in notice for notice in part.notices)
    assert any("1 of " in notice and "unknown form" in notice for notice in part.notices)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("not json", "are no JSON"),
        ("[1, 2]", "are no JSON"),
        ('{"kind": "free"}', "unknown form"),
        ("\x00\x01", "no JSON"),
    ],
)
def test_lines_that_mean_nothing_are_left_out(recorded: Path, line: str, words: str) -> None:
    whole = read_journal(recorded)
    lines = recorded.read_text().splitlines()
    recorded.write_text("\n".join([*lines[:4], line, *lines[4:]]) + "\n")
    part = read_journal(recorded)
    assert part.events == whole.events
    assert len(part.notices) == 1
    assert words in part.notices[0]


@pytest.mark.parametrize("content", [b"", b"\n", b"{}\n", b"\xff\xfe\n", b'{"kind": "admit"}\n'])
def test_what_is_no_recording_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(JournalFileError, match="is no recording of a journal"):
        read_journal(tmp_path / "x")
    with pytest.raises(JournalFileError, match="cannot be read: No such file"):
        read_journal(tmp_path / "y")


def test_random_damage_never_raises_anything_else(recorded: Path) -> None:
    rng, data = random.Random(7), recorded.read_bytes()
    for _ in range(150):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 20)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        recorded.write_bytes(bytes(damaged))
        try:
            part = read_journal(recorded)
        except JournalFileError:
            continue
        assert all(dataclasses.is_dataclass(event) for event in part.events)
